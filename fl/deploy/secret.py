"""Secure recombination among nodes: the server passes on what they send each other, and cannot read it."""

import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fl.algorithms.parts.secure_round import recombined
from fl.base.errors import FLError
from fl.base.rng import Rng
from fl.deploy.letters import Letter, Refused, fields, whole
from fl.engine.objectives import cross_entropy
from fl.federation import traffic
from fl.federation.cohort import Cohort
from fl.federation.local_training import LocalObjective
from fl.federation.trained import Trained
from fl.secure import SERVER, Envelope, Server
from fl.secure.session import outcome_of
from fl.secure.wire import SEALED_EXTRA
from surgery import Stack, unstack

_FRAME = 1 << 10  # bytes that a frame may have beside a piece
_KEY = 32  # bytes of a public key


def recombine(
    remote: Any, starts: Stack, clients: Sequence[int], pieces: Sequence[Sequence[str]], repeats: int, rng: Rng
) -> Trained:
    """See `fl.federation.elsewhere.Elsewhere.recombine`.

    Args:
        remote: `fl.deploy.remote.Remote`, which carries the letters.
    """
    began, fed = time.perf_counter(), remote.federation
    if fed.defence.clip:
        raise FLError("--defence.clip needs the models as clients trained them, which --fedmr.secure hides: drop one")
    lengths = [sum(starts[name][0].nbytes for name in names) for names in pieces]
    server = Server(lengths, repeats)
    cohort = Cohort(clients, [fed.model] * len(clients), starts)
    letters = []
    for k in range(len(clients)):
        letter, _ = remote.letter(cohort, LocalObjective(cross_entropy, {}), rng, k)
        secure = {"pieces": [list(names) for names in pieces], "server": server.public.hex()}
        letters.append(letter._replace(header={**letter.header, "secure": secure}))

    def joined(k: int, answer: Letter) -> tuple[bytes, Tensor]:
        tensors = dict(answer.tensors)
        key = tensors.pop("public", torch.empty(0))
        if key.dtype != torch.uint8 or tuple(key.shape) != (_KEY,):
            raise Refused("it sent no public key")
        _, loss = remote.trained(answer._replace(tensors=tensors), letters[k], {}, "joined")
        return bytes(key.tolist()), loss

    came = remote.exchange(clients, letters, [1 << 20] * len(clients), joined, rng.round)
    tickets = {clients[k]: letters[k].header["ticket"] for k in came}
    sent = _relay(remote, server, {clients[k]: key for k, (key, _) in came.items()}, tickets, lengths, rng)
    outcome = outcome_of(server, list(tickets), sent, time.perf_counter() - began)
    if len(outcome.models) < remote.quorum(clients):
        gone = "; ".join(f"client {client} is left out ({reason})" for client, reason in outcome.excluded.items())
        raise FLError(
            f"round {rng.round}: {len(outcome.models)} of {len(clients)} clients took part in secure recombination to "
            f"its end, fewer than --quorum {remote.quorum(clients)}: {gone}. What came before is saved: see to these "
            "nodes and go on with --resume"
        )
    nothing = torch.full((), torch.nan, device=fed.data.x.device)
    loss = torch.stack([came[k][1] if k in came else nothing for k in range(len(clients))])
    sizes = tuple(len(fed.clients.train[client]) if k in came else 0 for k, client in enumerate(clients))
    trained = Trained(starts, loss, sizes, traffic.count(starts, sizes), starts)
    return _finite(recombined(trained, starts, clients, pieces, outcome, rng.round, outcome.seconds), starts)


def _relay(
    remote: Any, server: Server, keys: dict[int, bytes], tickets: dict[int, str], lengths: Sequence[int], rng: Rng
) -> Counter[tuple[int, int]]:
    """Pass frames on until the server has finished; returns the bytes by (sender, recipient). A frame to a node that
    does not answer is lost, which the protocol repairs or names.
    """
    sent: Counter[tuple[int, int]] = Counter()
    waiting: dict[int, list[bytes]] = defaultdict(list)
    limit = (1 << 20) + 4 * len(lengths) * (max(lengths) + SEALED_EXTRA + _FRAME) * (len(keys) + 1)

    def post(envelopes: Sequence[Envelope]) -> None:
        for sender, recipient, frame in envelopes:
            sent[sender, recipient] += len(frame)
            if recipient == SERVER:
                post(server.receive(frame))
            elif recipient in keys:
                waiting[recipient].append(frame)

    post(server.start(keys))
    while waiting or not server.finished:
        if not waiting:
            post(server.tick())
            continue
        to, letters = sorted(waiting), []
        for client in to:
            header = {**remote.header("frames", client, rng), "party": tickets[client]}
            letters.append(Letter(header, _packed(waiting.pop(client))))

        def read(k: int, answer: Letter, letters: Sequence[Letter] = letters, to: Sequence[int] = to) -> list[Envelope]:
            said = fields(answer.header, {"kind": str, "ticket": str, "to": list})
            if said["kind"] != "frames" or said["ticket"] != letters[k].header["ticket"] or not whole(said["to"]):
                raise Refused("it did not pass on what it was asked for")
            return [Envelope(to[k], *pair) for pair in zip(said["to"], frames(answer.tensors))]

        what = f"round {rng.round}, secure recombination"
        for envelopes in remote.exchange(to, letters, [limit] * len(to), read, None, what).values():
            post(envelopes)
    return sent


def frames(tensors: dict[str, Tensor]) -> list[bytes]:
    """The frames of a letter, in order. Raises Refused for tensors that are none.

    >>> frames(_packed([b"one", b"two"]))
    [b'one', b'two']
    """
    if any(tensor.dtype != torch.uint8 or tensor.ndim != 1 for tensor in tensors.values()):
        raise Refused("frames are bytes")
    if set(tensors) != {f"{number}" for number in range(len(tensors))}:
        raise Refused("its frames are not numbered")
    return [tensors[f"{number}"].numpy().tobytes() for number in range(len(tensors))]


def _packed(several: Sequence[bytes]) -> dict[str, Tensor]:
    return {f"{k}": torch.frombuffer(bytearray(frame), dtype=torch.uint8) for k, frame in enumerate(several)}


def packed(envelopes: Sequence[Envelope]) -> tuple[list[int], dict[str, Tensor]]:
    """What a node passes on: to whom, and the frames."""
    return [one.recipient for one in envelopes], _packed([one.frame for one in envelopes])


def _finite(trained: Trained, starts: Stack) -> Trained:
    """Without models that hold a number that is infinite or not a number: nobody knows whose piece that was."""
    sizes, states = list(trained.sizes), {name: tensor.clone() for name, tensor in trained.states.items()}
    for k, (state, start) in enumerate(zip(unstack(states), unstack(starts))):
        if not all((t.isfinite() | ~start[n].isfinite()).all() for n, t in state.items() if t.is_floating_point()):
            sizes[k] = 0
            for name, tensor in start.items():
                states[name][k] = tensor
    return trained._replace(states=states, received=states, sizes=tuple(sizes))

"""Secure recombination among nodes: the server passes on what they send each other, and cannot read it."""

import time
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
from fl.federation.trained import Trained
from fl.federation.training import LocalObjective
from fl.secure import Envelope, Server
from fl.secure.boxes import LOCKED_EXTRA, SEALED_EXTRA
from fl.secure.exchange import INTERRUPTED
from surgery import Stack, unstack

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
        secure = {"pieces": [list(names) for names in pieces], "server": server.public.hex(), "repeats": repeats}
        letters.append(letter._replace(header={**letter.header, "secure": secure}))

    def joined(k: int, answer: Letter) -> tuple[bytes, Tensor]:
        tensors = dict(answer.tensors)
        key = tensors.pop("public", torch.empty(0))
        if key.dtype != torch.uint8 or tuple(key.shape) != (_KEY,):
            raise Refused("it sent no public key")
        _, loss = remote.trained(answer._replace(tensors=tensors), letters[k], {}, "joined")
        return bytes(key.tolist()), loss

    came = remote.exchange(clients, letters, [1 << 20] * len(clients), joined, rng.round)
    limit = (1 << 20) + len(clients) * len(lengths) * (max(lengths) + SEALED_EXTRA + LOCKED_EXTRA)

    def carry(phase: int, waiting: dict[int, list[bytes]]) -> dict[int, list[Envelope]]:
        to = list(waiting)
        orders = [
            Letter({**remote.header("exchange", client, rng), "phase": phase}, _packed(waiting[client]))
            for client in to
        ]

        def sent(k: int, answer: Letter) -> list[Envelope]:
            said = fields(answer.header, {"kind": str, "ticket": str, "to": list})
            if (said["kind"], said["ticket"]) != ("exchanged", orders[k].header["ticket"]) or not whole(said["to"]):
                raise Refused("it did not pass on what it was asked for")
            return [Envelope(*pair) for pair in zip(said["to"], frames(answer.tensors))]

        what = f"round {rng.round}, secure recombination"
        came = remote.exchange(to, orders, [limit] * len(to), sent, None, what)
        return {to[k]: envelopes for k, envelopes in came.items()}

    outcome = server.run({clients[k]: key for k, (key, _) in came.items()}, carry)
    left = len(outcome.models) or list(outcome.excluded.values()).count(INTERRUPTED)
    if left < remote.quorum(clients):
        gone = "; ".join(f"client {client} is left out ({reason})" for client, reason in outcome.excluded.items())
        raise FLError(
            f"round {rng.round}: {left} of {len(clients)} clients took part in secure recombination to "
            f"its end, fewer than --quorum {remote.quorum(clients)}: {gone}. What came before is saved: see to these "
            "nodes and go on with --resume"
        )
    nothing = torch.full((), torch.nan, device=fed.data.x.device)
    loss = torch.stack([came[k][1] if k in came else nothing for k in range(len(clients))])
    sizes = tuple(len(fed.clients.train[client]) if k in came else 0 for k, client in enumerate(clients))
    trained = Trained(starts, loss, sizes, traffic.count(starts, sizes), starts)
    return _finite(
        recombined(trained, starts, clients, pieces, outcome, rng.round, time.perf_counter() - began), starts
    )


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

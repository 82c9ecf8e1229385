"""Secure recombination among nodes: the server passes on what they send each other, and cannot read it."""

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fl.algorithms.parts.secure_round import SecureRecombination, recombined
from fl.base.errors import FLError
from fl.base.rng import Rng
from fl.deploy.messages import InvalidMessage, NodeMessage, fields, whole
from fl.federation.clients import Message
from fl.federation.update import ClientUpdate
from fl.secure import Envelope, Server
from fl.secure.boxes import LOCKED_EXTRA, SEALED_EXTRA
from fl.secure.exchange import INTERRUPTED
from surgery import Stack, unstack

_KEY = 32  # bytes of a public key


def begin(
    remote: Any, secure: SecureRecombination, message: Message, clients: Sequence[int]
) -> dict[str, dict[str, Any]]:
    """What the requests of the training say of the exchange that follows it.

    Args:
        remote: `fl.deploy.remote.Remote`, which carries the requests; it gets the `server` of the exchange.
    """
    lengths = [sum(message["model"][name][0].nbytes for name in names) for names in secure.pieces]
    remote.server = Server(lengths, secure.repeats)
    pieces = [list(names) for names in secure.pieces]
    return {"secure": {"pieces": pieces, "server": remote.server.public.hex(), "repeats": secure.repeats}}


def key_of(answer: NodeMessage) -> tuple[NodeMessage, bytes]:
    """The answer to a request for training without its public key, and the key. Raises InvalidMessage without one."""
    tensors = dict(answer.tensors)
    key = tensors.pop("public", torch.empty(0))
    if key.dtype != torch.uint8 or tuple(key.shape) != (_KEY,):
        raise InvalidMessage("it sent no public key")
    return answer._replace(tensors=tensors), bytes(key.tolist())


def recombine(
    remote: Any,
    keys: dict[int, bytes],
    update: ClientUpdate,
    starts: Stack,
    clients: Sequence[int],
    secure: SecureRecombination,
    rng: Rng,
) -> ClientUpdate:
    """See `fl.federation.clients.RemoteClients.recombine`.

    Args:
        keys: the public key of each client that has trained.
        starts: the models that the clients trained from.
    """
    began, lengths = time.perf_counter(), [sum(starts[name][0].nbytes for name in names) for names in secure.pieces]
    limit = (1 << 20) + len(clients) * len(lengths) * (max(lengths) + SEALED_EXTRA + LOCKED_EXTRA)

    def carry(phase: int, waiting: dict[int, list[bytes]]) -> dict[int, list[Envelope]]:
        to = list(waiting)
        orders = [
            NodeMessage({**remote.header("exchange", client, rng), "phase": phase}, _packed(waiting[client]))
            for client in to
        ]

        def sent(k: int, answer: NodeMessage) -> list[Envelope]:
            said = fields(answer.header, {"kind": str, "ticket": str, "to": list})
            if (said["kind"], said["ticket"]) != ("exchanged", orders[k].header["ticket"]) or not whole(said["to"]):
                raise InvalidMessage("it did not pass on what it was asked for")
            return [Envelope(*pair) for pair in zip(said["to"], frames(answer.tensors))]

        what = f"round {rng.round}, secure recombination"
        came = remote.nodes.exchange(to, orders, [limit] * len(to), sent, None, what)
        return {to[k]: envelopes for k, envelopes in came.items()}

    outcome = remote.server.run(keys, carry)
    left, quorum = (
        len(outcome.models) or list(outcome.excluded.values()).count(INTERRUPTED),
        remote.nodes.quorum(clients),
    )
    if left < quorum:
        gone = "; ".join(f"client {client} is left out ({reason})" for client, reason in outcome.excluded.items())
        raise FLError(
            f"round {rng.round}: {left} of {len(clients)} clients took part in secure recombination to "
            f"its end, fewer than --quorum {quorum}: {gone}. What came before is saved: see to these nodes and go on "
            "with --resume"
        )
    seconds = time.perf_counter() - began
    return _finite(recombined(update, starts, clients, secure.pieces, outcome, rng.round, seconds), starts)


def frames(tensors: dict[str, Tensor]) -> list[bytes]:
    """The frames of a message, in order. Raises InvalidMessage for tensors that are none.

    >>> frames(_packed([b"one", b"two"]))
    [b'one', b'two']
    """
    if any(tensor.dtype != torch.uint8 or tensor.ndim != 1 for tensor in tensors.values()):
        raise InvalidMessage("frames are bytes")
    if set(tensors) != {f"{number}" for number in range(len(tensors))}:
        raise InvalidMessage("its frames are not numbered")
    return [tensors[f"{number}"].numpy().tobytes() for number in range(len(tensors))]


def _packed(several: Sequence[bytes]) -> dict[str, Tensor]:
    return {f"{k}": torch.frombuffer(bytearray(frame), dtype=torch.uint8) for k, frame in enumerate(several)}


def packed(envelopes: Sequence[Envelope]) -> tuple[list[int], dict[str, Tensor]]:
    """What a node passes on: to whom, and the frames."""
    return [one.recipient for one in envelopes], _packed([one.frame for one in envelopes])


def _finite(update: ClientUpdate, starts: Stack) -> ClientUpdate:
    """Without models that hold a number that is infinite or not a number: nobody knows whose piece that was."""
    sizes, states = list(update.sizes), {name: tensor.clone() for name, tensor in update.states.items()}
    for k, (state, start) in enumerate(zip(unstack(states), unstack(starts))):
        if not all((t.isfinite() | ~start[n].isfinite()).all() for n, t in state.items() if t.is_floating_point()):
            sizes[k] = 0
            for name, tensor in start.items():
                states[name][k] = tensor
    return update._replace(states=states, received=states, sizes=tuple(sizes))

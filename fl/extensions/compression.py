"""Compression of what clients send: Alistarh et al., "QSGD: Communication-Efficient SGD via Gradient Quantization and
Encoding" (NeurIPS 2017), and top-k sparsification; with error feedback as in Karimireddy et al., "Error Feedback Fixes
SignSGD and other Gradient Compression Schemes" (ICML 2019).
"""

from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from fl.algorithms.algorithm import Algorithm, Server
from fl.algorithms.extension import Extension, Order, hiding
from fl.base.errors import FLError
from fl.base.rng import Rng
from fl.base.settings import OnlyWith, check_values, number, one_of
from fl.engine.draws import Draws
from fl.federation.clients import CLIENTS
from fl.federation.cohort import States, as_before, stacks
from fl.federation.divergence import restore
from surgery import Stack
from surgery.states import stack_size
from surgery.transfer import upload

_UNSENT = "unsent."  # before the names of what compression has left out of a client's updates, in the client's state


class Compressed(NamedTuple):
    """The models of a round's clients after compression.

    Attributes:
        received: the models as the server receives them.
        unsent: what was left out of each client's update [K, ...]; empty without feedback.
        sent: the bytes of each client's message.
    """

    received: States
    unsent: Stack
    sent: list[int]


@dataclass(frozen=True)
class Compression:
    """Compression of the updates that clients send. The default is none.

    An update is what training has added to the parameters that a client received. Buffers (batch-norm statistics) and
    frozen parameters are sent as they are, and so is what the server sends.
    """

    kind: Annotated[str, one_of("none", "topk", "quantise")] = "none"
    """topk: send only the largest entries of an update, with their positions; quantise: send each entry as one of a few
    levels, rounded at random so that its mean is right (QSGD, Alistarh et al., NeurIPS 2017)"""
    share: Annotated[float, number(float, above=0, most=1), OnlyWith("kind", "topk")] = 0.01
    """topk: share of the entries that are sent, at least one entry of the whole update"""
    bits: Annotated[int, number(int, least=2, most=16), OnlyWith("kind", "quantise")] = 8
    """quantise: bits of an entry, one of them its sign"""
    feedback: Annotated[bool, OnlyWith("kind", "topk", "quantise")] = False
    """each client keeps what it did not send, and adds it to its next update (Karimireddy et al., ICML 2019); quantise
    then rounds to the nearest level. It takes the memory of a model for each client"""

    @property
    def on(self) -> bool:
        """True if updates are compressed."""
        return self.kind != "none"

    @torch.no_grad()
    def compress(
        self, states: States, starts: States, unsent: Stack, clients: Sequence[int], rng: Rng, names: Container[str]
    ) -> Compressed:
        """Compress what clients send.

        Top-k looks at an update as a whole, so that entries go where it is large: by tensors, small ones such as biases
        would always have their share, however little they move. Quantisation has one scale for each tensor, its largest
        entry, for entries of different tensors differ by orders of magnitude. (The paper scales by the Euclidean norm;
        most entries of a long tensor are less than one level of it.)

        With feedback, quantisation rounds to the nearest level, which leaves no entry with more than it had. At random,
        an entry that is small beside its tensor's largest may be left with more, and with few bits what is unsent
        becomes many times as long as the updates.

        Args:
            states: the models that clients would send.
            starts: those that they received, with the same names.
            unsent: what was left of their earlier updates [K, ...]; empty without feedback.
            rng: has a stream for each client, which decides how entries are rounded.
            names: of the trained parameters.

        >>> end, start = {"w": torch.tensor([[1.0, 5.0, -3.0]])}, {"w": torch.tensor([[1.0, 1.0, 1.0]])}
        >>> Compression("topk", share=0.3).compress(end, start, {}, [0], Rng(0), {"w"})
        Compressed(received={'w': tensor([[1., 5., 1.]])}, unsent={}, sent=[5])
        """
        changed, sent = [], []
        for after, before in zip(stacks(states), stacks(starts)):
            chunk = clients[len(sent) : len(sent) + stack_size(after)]
            learnt = [name for name in after if name in names and after[name].numel()]
            steps = {name: after[name] - before[name] for name in learnt}
            steps = {name: step + unsent[name] if unsent else step for name, step in steps.items()}
            arriving = self._receive(steps, chunk, rng) if steps else {}
            changed.append({**after, **{name: before[name] + step for name, step in arriving.items()}})
            if unsent:
                unsent = {**unsent, **{name: steps[name] - step for name, step in arriving.items()}}
            plain = sum(tensor[0].nbytes for name, tensor in after.items() if name not in steps)
            sent += [self.nbytes(steps) + plain] * len(chunk)
        return Compressed(as_before(states, changed), unsent, sent)

    def nbytes(self, steps: Stack) -> int:
        """Return the bytes of one client's compressed update.

        topk: each value in its dtype, and its position among the n entries in ceil(log2 n) bits; or all values without
        positions, where that is shorter. quantise: for each tensor a scale in its dtype, and the bits of its entries in
        whole bytes.

        Args:
            steps: updates [K, ...].

        >>> steps = {"w": torch.zeros(2, 10, 10), "b": torch.zeros(2, 28)}
        >>> Compression("topk", share=0.25).nbytes(steps), 32 * (4 + 7 / 8)
        (156, 156.0)
        >>> Compression("quantise", bits=4).nbytes(steps), 4 + 100 / 2 + 4 + 28 / 2
        (72, 72.0)
        """
        sizes = {name: step[0].numel() for name, step in steps.items()}
        if self.kind == "quantise":
            return sum(step.element_size() - (-sizes[name] * self.bits // 8) for name, step in steps.items())
        n, value = sum(sizes.values()), 8 * max((step.element_size() for step in steps.values()), default=0)
        return -(-min(self._count(n) * (value + (n - 1).bit_length()), n * value) // 8) if n else 0

    def _count(self, n: int) -> int:
        """Return how many of n entries top-k sends."""
        return max(1, round(self.share * n))

    def _receive(self, steps: Stack, clients: Sequence[int], rng: Rng) -> Stack:
        """Return what the server receives of updates."""
        if self.kind == "topk":
            flat = torch.cat([step.flatten(1) for step in steps.values()], 1)
            parts = largest(flat, self._count(flat.shape[1])).split([step[0].numel() for step in steps.values()], 1)
            return {name: part.view_as(step).to(step.dtype) for (name, step), part in zip(steps.items(), parts)}
        if self.feedback:
            return {name: quantise(step, self.bits) for name, step in steps.items()}
        keys = [torch.randint(2**31, (), generator=rng.torch("compression", client)) for client in clients]
        draws = Draws(upload(torch.stack(keys).int(), next(iter(steps.values())).device))
        return {name: quantise(step, self.bits, draws.uniform(step.shape[1:])) for name, step in steps.items()}


def largest(steps: Tensor, k: int) -> Tensor:
    """Return the k entries of each row [K, n] of largest absolute value; 0 elsewhere.

    >>> largest(torch.tensor([[1.0, -3.0, 2.0]]), 2)
    tensor([[ 0., -3.,  2.]])
    """
    places = steps.abs().topk(k, 1, sorted=False).indices
    return torch.zeros_like(steps).scatter(1, places, steps.gather(1, places))


def quantise(steps: Tensor, bits: int, chance: Tensor | float = 0.5) -> Tensor:
    """Round each row's entries to levels.

    There are 2^bits - 1, which lie evenly between the row's largest absolute value and its negative.

    Args:
        steps: [K, ...].
        chance: an entry goes to the level away from 0 if its distance from the one nearer to 0, in levels, is more than
            this: for uniform numbers in [0, 1) the mean of the result is the entry; 0.5 is the nearest level.

    >>> quantise(torch.tensor([[8.0, 1.0, -3.0, -5.0]]), bits=2)
    tensor([[ 8.,  0., -0., -8.]])
    """
    most, sizes = 2 ** (bits - 1) - 1, steps.abs()
    scale = sizes.flatten(1).amax(1).view(-1, *[1] * (steps.ndim - 1))
    unit = (scale / most).clamp(min=torch.finfo(steps.dtype).tiny)  # of a tensor that did not move
    levels = sizes / unit
    lower = levels.floor()
    return (lower + (levels - lower > chance)).clamp(max=most) * unit * steps.sign()


def with_compression(algorithm: Algorithm, compression: Compression) -> Algorithm:
    """Return the method with clients that compress their updates.

    With feedback each client keeps in its state, under names that no method sees, what it has not sent yet.
    """
    check_values(compression, "compression")
    algorithm.check(_needs(compression))
    fed = algorithm.fed

    def client(message, client_states, clients, rng):
        update = algorithm.client(message, _without(client_states), clients, rng)
        if not update.received:
            return update
        if "model" not in message:
            raise FLError(
                '--compression.kind compresses what clients add to the message\'s "model", and there is none',
                code="unsupported",
            )
        unsent = {name.removeprefix(_UNSENT): t for name, t in client_states.items() if name.startswith(_UNSENT)}
        compressed = compression.compress(update.received, message["model"], unsent, clients, rng, fed.trainable)
        # A client that was dropped sends nothing.
        received = restore(compressed.received, message["model"], update.sizes)
        update = update._replace(received=received, sent=compressed.sent)
        if not compression.feedback:
            return update
        leftover = {f"{_UNSENT}{name}": tensor for name, tensor in compressed.unsent.items()}
        return update._replace(client_states={**(update.client_states or _without(client_states)), **leftover})

    if not compression.feedback:
        return replace(algorithm, client=client)

    def init():
        server = algorithm.init()
        nothing = {f"{_UNSENT}{name}": tensor for name, tensor in fed.zeros().items()}
        return {**server, CLIENTS: {**server.get(CLIENTS, {}), **fed.client_states(nothing)}}

    def hide(server: Server) -> Server:
        if CLIENTS not in server:
            return server
        seen = _without(server[CLIENTS])
        rest = {name: part for name, part in server.items() if name != CLIENTS}
        return {**rest, CLIENTS: seen} if seen else rest

    def show(before: Server, after: Server) -> Server:
        if CLIENTS not in before:
            return after
        unsent = {name: tensor for name, tensor in before[CLIENTS].items() if name.startswith(_UNSENT)}
        return {**after, CLIENTS: {**after.get(CLIENTS, _without(before[CLIENTS])), **unsent}}

    def aggregate(server, clients, update, rng):
        seen = update._replace(client_states=_without(update.client_states))
        return algorithm.aggregate(server, clients, seen, rng)

    hidden = hiding(replace(algorithm, aggregate=aggregate), hide, show)
    personalize = algorithm.personalize and (
        lambda models, client_states, clients, rng: algorithm.personalize(models, _without(client_states), clients, rng)
    )
    return replace(hidden, init=init, client=client, keeps=None, personalize=personalize)


def _without(client_states: Stack) -> Stack:
    """Return client states without what is unsent."""
    return {name: tensor for name, tensor in client_states.items() if not name.startswith(_UNSENT)}


def _needs(options: Compression) -> dict[str, str]:
    flags = "--compression.kind"
    more = {"same_model": "--compression.feedback"} if options.feedback else {}
    return {"changed_updates": flags, "open_updates": flags, **more} if options.on else {}


EXTENSION = Extension(
    Compression(),
    needs=_needs,
    algorithm=lambda algorithm, config, rng: with_compression(algorithm, config.extensions["compression"]),
    order=Order.SENDING,
)

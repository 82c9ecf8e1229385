"""The result of the training of a round's clients."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import Tensor

from fl.federation.cohort import States, stacks
from surgery import Stack

_NOTHING: dict = {}


class ClientUpdate(NamedTuple):
    """The result of the training of K clients.

    Attributes:
        states: the clients' trained models: a stack, or a list of K states where architectures differ.
        loss: each client's mean over its steps [K].
        sizes: each client's number of training samples, 0 if it was dropped from the round.
        received: the models as the server receives them: what it averages. They are `states` itself
            unless the method, or what wraps it, changed them on their way.
        client_states: the new ones [K, ...], for methods whose clients keep something for themselves. The server sees
            them only in a simulation.
        metrics: columns of metrics.csv that the round brings along: what went over the network (see
            `fl.federation.traffic`), and those that the method names.
        steps: how many steps each client has made; empty where they are not counted.
        sent: the bytes of what each client sends; None: the bytes of `received`.
    """

    states: States
    loss: Tensor
    sizes: tuple[int, ...]
    received: States
    client_states: Stack = _NOTHING
    metrics: Mapping[str, float] = _NOTHING
    steps: tuple[int, ...] = ()
    sent: Sequence[int] | None = None

    @property
    def arrived(self) -> list[bool]:
        """For each client True if its update arrived, and False if it was dropped."""
        return [size > 0 for size in self.sizes]

    def __repr__(self) -> str:
        first, *others = stacks(self.states)
        elements = sum(tensor[:1].numel() for tensor in first.values())
        kind = "models of their own" if others else f"{len(first)} tensors, {elements:,} elements each"
        changed = "" if self.received is self.states else "; the server received other models"
        return (
            f"ClientUpdate: {len(self.loss)} clients, {kind}; {sum(self.arrived)} arrived{changed}\n"
            f"  mean loss {self.loss.float().mean():.4f}; {', '.join(self.metrics) or 'no metrics'}"
        )

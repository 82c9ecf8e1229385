"""Clients that join after the first round or leave before the last."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fl.algorithms.algorithm import Algorithm
from fl.algorithms.extension import Extension, Order
from fl.base.errors import FLError
from fl.base.rng import Rng, draw
from fl.base.settings import Share

_FLAGS = "--presence"


@dataclass(frozen=True)
class PresenceOptions:
    """Clients that join late or leave early. The default is none."""

    joining: Share = 0.0
    """share of the clients who join late, each after a random round"""
    leaving: Share = 0.0
    """share of the clients who leave early, each after a random round"""


class Presence(NamedTuple):
    """The rounds in which each client takes part.

    Attributes:
        first, last: int64 [clients], on the CPU, both included; rounds count from 1.
    """

    first: Tensor
    last: Tensor

    def at(self, round: int) -> list[int]:
        """Return the clients who take part in a round, in ascending order.

        >>> Presence(torch.tensor([1, 3]), torch.tensor([2, 9])).at(3)
        [1]
        """
        return ((self.first <= round) & (round <= self.last)).nonzero().flatten().tolist()


def make_presence(
    clients: int, participants: int, joining: float, leaving: float, rounds: int, rng: Rng
) -> Presence | None:
    """Sample clients who join and who leave, after rounds sampled uniformly.

    Args:
        joining, leaving: their shares of all clients.

    Returns:
        None if no client joins or leaves.

    Raises:
        FLError: if too few clients stay for a round, or there are not two rounds between which to come and go.

    >>> there = make_presence(10, 4, 0.2, 0.3, 20, Rng(0))
    >>> len(there.at(1)), len(there.at(20))
    (8, 7)
    """
    coming, going = (round(share * clients) for share in (joining, leaving))
    if not (0 <= joining <= 1 and 0 <= leaving <= 1) or clients - coming - going < participants:
        raise FLError(
            f"--presence.joining {joining} and --presence.leaving {leaving} of {clients} clients leave fewer than the "
            f"{participants} participants of a round: choose smaller shares in [0, 1], or fewer participants "
            "(--participants, --participation)"
        )
    for flag, share, count in (("joining", joining, coming), ("leaving", leaving, going)):
        if share and not count:
            raise FLError(
                f"--presence.{flag} {share:g} of {clients} clients is no client: use {1 / clients:.2g} or more, or 0"
            )
    if not coming + going:
        return None
    if rounds < 2:
        raise FLError(
            "--presence.joining and --presence.leaving need two --rounds or more, between which clients come and go"
        )
    generator = rng.torch("presence")
    order = torch.randperm(clients, generator=generator)
    # the last round without, or with, each of them
    after = torch.randint(1, rounds, (coming + going,), generator=generator)
    first, last = torch.ones(clients, dtype=torch.int64), torch.full((clients,), torch.iinfo(torch.int64).max)
    first[order[:coming]] = after[:coming] + 1
    last[order[coming : coming + going]] = after[coming:]
    return Presence(first, last)


def with_presence(algorithm: Algorithm, presence: Presence) -> Algorithm:
    """Return the method with rounds that sample among the clients that are present."""
    algorithm.check({"uniform_sampling": _FLAGS})
    fed = algorithm.fed

    def sample(server, rng):
        there = presence.at(rng.round)
        return [there[i] for i in draw(len(there), fed.participants, rng.torch("sample"))]

    return replace(algorithm, sample=sample)


def _present(algorithm: Algorithm, config: Any, rng: Rng) -> Algorithm:
    fed, options = algorithm.fed, config.extensions["presence"]
    presence = make_presence(len(fed.clients), fed.participants, options.joining, options.leaving, config.rounds, rng)
    return with_presence(algorithm, presence) if presence else algorithm


EXTENSION = Extension(
    PresenceOptions(),
    needs=lambda options: {"uniform_sampling": _FLAGS},
    algorithm=_present,
    order=Order.SAMPLING,
    simulated=False,
    fixes_rounds=lambda options: True,
)

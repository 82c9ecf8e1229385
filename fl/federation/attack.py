"""Malicious clients: they also train on spoilt data, and add to what they send what they learnt there, amplified
(FedFA, equation 1).
"""

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace
from typing import Annotated

import torch
from torch import Tensor

from fl.base.errors import FLError
from fl.base.rng import Rng, draw
from fl.base.settings import AtLeast0, AtLeast1, Limits, Natural, OnlyWith, Share, check_values, one_of
from fl.data import Dataset
from fl.federation.cohort import States, as_before, replace_rows, select, stacks
from fl.partition import Splits

_ATTACKED = OnlyWith("share", Limits(above=0))


@dataclass(frozen=True)
class AttackOptions:
    """Malicious clients."""

    share: Share = 0.0
    """share of the clients who are malicious, drawn at random; 0: none (FedFA: 0, 0.01, 0.2)"""
    amplify: Annotated[AtLeast0, _ATTACKED] = 1.0
    """lambda of equation 1: how many times the update from spoilt data is added to the honest one (FedFA: 1, 20)"""
    kind: Annotated[str, one_of("shuffle", "trigger"), _ATTACKED] = "shuffle"
    """what spoils a malicious client's data: shuffle (labels are dealt out anew among the malicious clients' samples)
    or trigger (a bright square in the corner of the images, all labelled --attack.target)"""
    target: Annotated[Natural, OnlyWith("kind", "trigger")] = 0
    """trigger: the class that it is to bring about"""
    size: Annotated[AtLeast1, OnlyWith("kind", "trigger")] = 3
    """trigger: pixels along its sides"""
    architecture: Annotated[str, one_of("own", "largest"), _ATTACKED] = "own"
    """which model malicious clients take where clients choose among architectures: own (as if they were honest) or
    largest (FedFA's section 3.1 says that they could, its experiments do not say that they do)"""


@dataclass(frozen=True)
class Attack:
    """What malicious clients do.

    Attributes:
        malicious: who they are.
        data: the data set as they spoil it; the other clients' samples are unchanged.
        amplify: lambda.
    """

    malicious: frozenset[int]
    data: Dataset
    amplify: float

    def rows(self, clients: Sequence[int]) -> list[int]:
        """The positions of malicious clients in a cohort."""
        return [k for k, client in enumerate(clients) if client in self.malicious]

    @torch.no_grad()
    def amplified(self, honest: States, starts: States, spoilt: States, rows: Sequence[int], names: Set[str]) -> States:
        """Equation 1: start + (honest - start) + lambda (spoilt - start) for the parameters of the malicious clients.

        Args:
            honest: the states of the whole cohort. starts, spoilt: of its malicious clients only.
            rows: the positions of the malicious clients in the cohort.
            names: of the parameters. Buffers stay those of the honest training: a negative variance would give the
                attack away.

        >>> attack, one = Attack(frozenset({3}), None, 2.0), lambda x: {"w": torch.full((1, 1), x)}
        >>> attack.amplified(one(1.0), one(0.5), one(0.0), [0], {"w"})
        {'w': tensor([[0.]])}
        """
        sent = []
        for own, start, after in zip(stacks(select(honest, rows)), stacks(starts), stacks(spoilt)):
            learnt = names & own.keys()
            sent.append(own | {name: own[name] + self.amplify * (after[name] - start[name]) for name in learnt})
        return replace_rows(honest, rows, as_before(honest, sent))


def draw_malicious(options: AttackOptions, clients: int, rng: Rng) -> frozenset[int]:
    """The malicious clients: their share of all clients, rounded to the nearest number.

    Raises:
        FLError: for options out of their limits, and a share that rounds to nobody.
    """
    check_values(options, "attack")
    count = round(options.share * clients)
    if options.share and not count:
        raise FLError(
            f"--attack.share {options.share:g} of {clients} clients is nobody: use {1 / clients:.2g} or more, or 0"
        )
    return frozenset(draw(clients, count, rng.torch("malicious")))


def make_attack(
    options: AttackOptions, malicious: frozenset[int], data: Dataset, clients: Splits, rng: Rng
) -> Attack | None:
    """The attack of these clients, None if there are none.

    Raises:
        FLError: for a trigger on text, on samples kept on the host or larger than the images, and for a target that is
            no class.
    """
    if not malicious:
        return None
    if data.task != "classification" and options.kind != "shuffle":
        raise FLError(f"--attack.kind {options.kind} turns samples into a class, and the data are for {data.task}")
    own = torch.cat([clients.train[client] for client in sorted(malicious)]).to(data.y.device)
    if options.kind == "shuffle":
        order = torch.randperm(len(own), generator=rng.torch("shuffled labels")).to(own.device)
        y = data.y.index_copy(0, own, data.y[own[order]])
        return Attack(malicious, replace(data, y=y), options.amplify)
    if data.on_host:
        raise FLError("--attack.kind trigger makes a copy of all samples, which are kept on the host: choose shuffle")
    x = data.x.index_copy(0, own, triggered(options, data)(data.x[own]))
    y = data.y.index_fill(0, own, options.target)
    return Attack(malicious, replace(data, x=x, y=y), options.amplify)


def triggered(options: AttackOptions, data: Dataset) -> Callable[[Tensor], Tensor]:
    """A function that puts the trigger, a bright square at the lower right, into images [N, C, H, W].

    Raises:
        FLError: for text, for images smaller than the trigger, and for a target that is no class.
    """
    if not data.images:
        what = "text" if data.text else f"samples of {list(data.x.shape[1:])}"
        raise FLError(f"--attack.kind trigger puts a mark into images, and the data set is {what}: choose shuffle")
    if options.size > min(data.x.shape[-2:]):
        raise FLError(f"--attack.size {options.size} is larger than the images: choose a smaller one, such as 3")
    if options.target >= data.classes:
        raise FLError(f"--attack.target {options.target}: there are {data.classes} classes, from 0 on")

    brightest = data.x.max() if data.x.is_floating_point() else data.top

    def mark(images: Tensor) -> Tensor:
        images = images.clone()
        images[..., -options.size :, -options.size :] = brightest
        return images

    return mark

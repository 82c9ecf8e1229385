"""Malicious clients, who train on spoilt data as well and send more of what they learnt there (FedFA, equation 1)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, TypeAlias

import torch
from torch import Tensor

from fl.base.errors import FLError
from fl.base.flags import AtLeast0, AtLeast1, Limits, Natural, OnlyWith, Share, one_of
from fl.base.rng import Rng, draw
from fl.data import Dataset
from fl.partition import Splits
from surgery import Stack, State
from surgery.transfer import upload

States: TypeAlias = Stack | Sequence[State]


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


@dataclass(frozen=True)
class Attack:
    """What malicious clients do.

    Attributes:
        malicious: the clients.
        data: the data set as they spoil it; the other clients' samples in it are as they were.
        amplify: lambda.
    """

    malicious: frozenset[int]
    data: Dataset
    amplify: float

    def rows(self, clients: Sequence[int]) -> list[int]:
        """The positions of malicious clients in a cohort."""
        return [k for k, client in enumerate(clients) if client in self.malicious]

    @torch.no_grad()
    def amplified(self, honest: States, starts: States, spoilt: States, rows: Sequence[int], names: set[str]) -> States:
        """Equation 1: start + (honest - start) + lambda (spoilt - start) for the parameters of the malicious rows.

        Args:
            honest, starts: of the whole cohort, stacks or lists of states. spoilt: of the malicious clients only.
            names: of the parameters. Buffers stay those of the honest training: a negative variance would give the
                attack away.

        >>> attack, one = Attack(frozenset({3}), None, 2.0), lambda x: {"w": torch.full((1, 1), x)}
        >>> attack.amplified(one(1.0), one(0.5), one(0.0), [0], {"w"})
        {'w': tensor([[0.]])}
        """
        if isinstance(honest, dict):
            index = upload(torch.tensor(rows), next(iter(honest.values())).device)
            result = dict(honest)
            for name in names & honest.keys():
                step = self.amplify * (spoilt[name] - starts[name].index_select(0, index))
                result[name] = honest[name].index_add(0, index, step.to(honest[name].dtype))
            return result
        result = list(honest)
        for row, dark in zip(rows, spoilt):
            moved = {n: honest[row][n] + self.amplify * (dark[n] - starts[row][n]) for n in names & dark.keys()}
            result[row] = {**honest[row], **moved}
        return result


def draw_malicious(options: AttackOptions, clients: int, rng: Rng) -> frozenset[int]:
    """The malicious clients: their share of all, rounded to the nearest number.

    Raises:
        FLError: for a share that is nobody.
    """
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
        FLError: for a trigger on text or larger than the images, and for a class that there is not.
    """
    if not malicious:
        return None
    own = torch.cat([clients.train[client] for client in sorted(malicious)]).to(data.y.device)
    if options.kind == "shuffle":
        order = torch.randperm(len(own), generator=rng.torch("shuffled labels")).to(own.device)
        y = data.y.index_copy(0, own, data.y[own[order]])
        return Attack(malicious, replace(data, y=y), options.amplify)
    x = data.x.index_copy(0, own, triggered(options, data)(data.x[own]))
    y = data.y.index_fill(0, own, options.target)
    return Attack(malicious, replace(data, x=x, y=y), options.amplify)


def triggered(options: AttackOptions, data: Dataset) -> Callable[[Tensor], Tensor]:
    """A function that puts the trigger, a bright square at the lower right, into images uint8 [N, C, H, W].

    Raises:
        FLError: for text, images too small for it, and a target that is no class.
    """
    if data.text:
        raise FLError("--attack.kind trigger puts a mark into images, and the data set is text: choose shuffle")
    if options.size > min(data.x.shape[-2:]):
        raise FLError(f"--attack.size {options.size} is larger than the images: choose a smaller one, such as 3")
    if options.target >= data.classes:
        raise FLError(f"--attack.target {options.target}: there are {data.classes} classes, from 0 on")

    def mark(images: Tensor) -> Tensor:
        images = images.clone()
        images[..., -options.size :, -options.size :] = data.top
        return images

    return mark

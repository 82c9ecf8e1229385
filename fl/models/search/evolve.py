"""The candidate with the best score: by trying all candidates, or by evolution if there are too many.

score = lambda spec: zico(models.create(rng.torch("zico", client), spec).to(device), batches)
chosen = search(space, score, rng.torch("search", client))
"""

import math
from collections.abc import Callable
from typing import TypeAlias

import torch

from fl.base.errors import FLError
from fl.models.search.space import Space
from zoo import Spec

Score: TypeAlias = Callable[[Spec], float]

FEW = 64
"""Up to this number, all candidates are tried."""


def search(space: Space, score: Score, generator: torch.Generator) -> Spec:
    """The best of up to 64 candidates, or the one that `evolve` finds among more.

    >>> space = Space(Spec("resnet20"), widths=(0.5, 1), depths=(1, 2, 3))
    >>> search(space, lambda spec: -abs(spec.width[0] * spec.depth[0] - 1.6), torch.Generator()).depth
    (3, 3, 3)
    """
    return exhaustive(space, score) if len(space) <= FEW else evolve(space, score, generator)


def exhaustive(space: Space, score: Score) -> Spec:
    """The candidate with the highest score; among equal ones the first of the grid. NaN is the lowest score."""
    return _ranked(space, {spec: score(spec) for spec in space})[0]


def evolve(
    space: Space,
    score: Score,
    generator: torch.Generator,
    population: int = 16,
    generations: int = 15,
    parents: int = 6,
) -> Spec:
    """The best candidate that evolution sees, with at most population x (1 + generations) scores and none twice.

    The first population is random. Every later candidate is a random cross of two of the best so far, with one width or
    depth changed, or more until the candidate is new. Equal scores, and NaN, rank as in `exhaustive`.

    Args:
        generator: the result depends only on it and on the scores.
        parents: how many of the best candidates have children.
    """
    for name, value in (("population", population), ("generations", generations), ("parents", parents)):
        if value < 1:
            raise FLError(f"evolution needs a {name} of at least 1, got {value}")
    scores: dict[Spec, float] = {}
    for _ in range(1 + generations):
        best = _ranked(space, scores)[:parents]
        for _ in range(min(population, len(space) - len(scores))):
            child = space.random(generator)
            if best:
                a, b = (best[int(torch.randint(len(best), (), generator=generator))] for _ in range(2))
                child = space.mutate(space.crossover(a, b, generator), generator)
            while child in scores:
                child = space.mutate(child, generator)
            scores[child] = score(child)
    return _ranked(space, scores)[0]


def _ranked(space: Space, scores: dict[Spec, float]) -> list[Spec]:
    """The candidates by score, the highest first; equal ones in the order of the grid."""
    worth = {spec: -math.inf if math.isnan(value) else value for spec, value in scores.items()}
    return sorted(worth, key=lambda spec: (-worth[spec], space.genes(spec)))

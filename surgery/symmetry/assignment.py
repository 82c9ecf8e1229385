"""Find the best order of widths by coordinate ascent over linear assignments."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from surgery.errors import SurgeryError
from surgery.width.solve import Atom, Choice

PASSES = 100
_LEAST = 1e-7  # the share by which a step has to improve the fit: less may be rounding of float32
_ROUGH = 1e-3  # the same while two starts race, in models
_WIDE = 256  # with a width of more positions than this: both to the end would take twice as long
Progress: TypeAlias = Callable[[int, int], None]
"""Told how many widths have their best order for the present, and of how many."""


class Search(NamedTuple):
    """The settings of the search for a match: the last three arguments of `align`."""

    starts: int = 1
    generator: torch.Generator | None = None
    progress: Progress | None = None


ONCE = Search()


class Likeness(Protocol):
    """The comparison of two models, position by position.

    Attributes:
        beside: by width the widths whose order `gain` depends on, itself included if `gain` is not linear in it.
    """

    beside: dict[Atom, set[Atom]]

    def first(self, atom: Atom) -> Tensor:
        """[size, size]: how alike positions are, in any order of all other widths."""

    def gain(self, atom: Atom, choice: Choice) -> Tensor:
        """[size, size]: how alike positions of the two models are in the present order."""

    def value(self, choice: Choice, atom: Atom | None = None) -> float:
        """Return how well all fits, or all that lies along a width."""


def best_choice(likeness: Likeness, free: Sequence[Atom], search: Search) -> dict[Atom, list[int]]:
    """Return the orders of the other model's widths that fit the reference best.

    It starts from the order as it is, and from an assignment by what does not depend on the order of other widths (of
    the heads by all that is in them, say), which finds a permuted copy at once. For wide models only the search that is
    ahead when steps become small continues to the end. Each start beyond the first one adds a random order. The best
    result counts.
    """
    starts = search.starts
    if isinstance(starts, bool) or not isinstance(starts, int) or starts < 1:
        raise SurgeryError(f"starts is a number of searches, 1 or more, got {starts!r}", code="argument")

    def draw(atom: Atom) -> list[int]:
        return torch.randperm(atom.size, generator=search.generator).tolist()

    identity = {atom: list(range(atom.size)) for atom in free}
    guess = {atom: assignment(likeness.first(atom)) for atom in free}
    least = _ROUGH if any(atom.size > _WIDE for atom in free) else _LEAST
    raced = [_climb(likeness, free, begin, search.progress, least) for begin in (identity, guess)]
    begins = [max(raced, key=likeness.value), *({atom: draw(atom) for atom in free} for _ in range(starts - 1))]
    best, most = {}, -math.inf
    for begin in begins:
        choice = _climb(likeness, free, begin, search.progress)
        value = likeness.value(choice)
        if not best or value > most + 1e-12 * abs(most):
            best, most = choice, value
    return best


def _climb(
    likeness: Likeness,
    free: Sequence[Atom],
    start: dict[Atom, list[int]],
    progress: Progress | None,
    least: float = _LEAST,
) -> dict[Atom, list[int]]:
    """Return the orders, from a start, that no change of a single width improves.

    Ainsworth et al., "Git Re-Basin" (ICLR 2023), algorithm 1: all widths but one are held, and the best order of that
    one is a linear assignment. A step is taken only if the fit improves, so that it ends. A width is looked at again
    only when one beside it has moved.
    """
    choice, settled = start, set[Atom]()
    for _ in range(PASSES):
        if len(settled) == len(free):
            break
        for atom in free:
            if atom in settled:
                continue
            settled.add(atom)
            gain = likeness.gain(atom, choice)
            order = assignment(gain)
            if order != list(range(atom.size)):
                trial = {**choice, atom: [choice[atom][place] for place in order]}
                if atom in likeness.beside[atom]:
                    before, after = likeness.value(choice, atom), likeness.value(trial, atom)
                else:
                    rows = range(atom.size)
                    before, after = (gain[rows, at].double().sum().item() for at in (rows, order))
                if after > before + least * abs(before):
                    choice = trial
                    settled -= likeness.beside[atom]
            if progress:
                progress(len(settled), len(free))
    return choice


def assignment(gain: Tensor) -> list[int]:
    """Return another column for each row, with the largest sum of the entries.

    >>> assignment(torch.tensor([[1.0, 5.0], [4.0, 6.0]]))
    [1, 0]
    """
    from scipy.optimize import linear_sum_assignment  # takes a second to import

    cost = -gain.double().cpu()
    cost -= cost.mean(1, keepdim=True)  # moves no best column, and they are found up to ten times as fast
    cost -= cost.mean(0)
    return linear_sum_assignment(cost.numpy())[1].tolist()

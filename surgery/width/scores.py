"""Scores of a model's widths: one number for each position, by a name that a second trace finds again."""

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from surgery.errors import SurgeryError, first_line
from surgery.names import joined
from surgery.width import axes
from surgery.width.solved import Atom, Axis, Product, Solution, Sum, atoms, solve
from surgery.width.trace import Trace

Scores: TypeAlias = Mapping[str, Tensor]
"""[size] scores by width. `layer1.conv.weight:0` is the width along axis 0 of that tensor; of an axis along which
several lie (heads * head dimension) a third number says which of them, from the left: `proj.weight:1:0`."""


def named_widths(solution: Solution) -> dict[str, Atom]:
    """The widths of a model by the name of an axis where each lies, the first of those where fewest others do."""
    found = {}
    for atom, members in solution.members.items():
        if atom.size > 1:
            places = [(key, axis, parts_of(solution.tensors[key][axis])) for key, axis in members]
            key, axis, parts = min(places, key=lambda place: len(place[2]))
            part = f":{parts.index(atom)}" if len(parts) > 1 else ""
            found[f"{joined(*key)}:{axis}{part}"] = atom
    return found


def parts_of(axis: Axis) -> list[Atom]:
    """The widths that lie along an axis, from the left."""
    return [atom for atom in dict.fromkeys(atoms(axis)) if atom.size > 1]


def occurrences(axis: Axis, atom: Atom) -> Tensor:
    """[times, atom.size]: where an atom's positions lie on an axis, each time that it occurs.

    >>> heads, width = Atom(2), Atom(3)
    >>> occurrences(Product((heads, width)), width).tolist()
    [[0, 1, 2], [3, 4, 5]]
    >>> occurrences(Product((heads, width)), heads).tolist()
    [[0, 3], [1, 4], [2, 5]]
    """
    return torch.cat([torch.empty(0, atom.size, dtype=torch.long), *_occurrences(axis, atom)])


def _occurrences(axis: Axis, atom: Atom) -> Iterator[Tensor]:
    if axis is atom:
        yield torch.arange(atom.size)[None]
    elif isinstance(axis, Sum):
        start = 0
        for part in axis.parts:
            yield from (start + found for found in _occurrences(part, atom))
            start += part.size
    elif isinstance(axis, Product):
        major, minor = 1, axis.size
        for part in axis.parts:
            minor //= part.size
            others = (torch.arange(major)[:, None] * part.size * minor + torch.arange(minor)).view(-1, 1, 1)
            yield from ((others + found * minor).flatten(0, 1) for found in _occurrences(part, atom))
            major *= part.size


def onto_atoms(axis: Axis, values: Tensor) -> dict[Atom, Tensor]:
    """From one number for each position of an axis to sums for each position of its atoms.

    >>> heads, width = Atom(2), Atom(3)
    >>> list(onto_atoms(Product((heads, width)), torch.arange(6)).values())
    [tensor([ 3, 12]), tensor([3, 5, 7])]
    """
    return {atom: values[occurrences(axis, atom)].sum(0) for atom in dict.fromkeys(atoms(axis))}


class Followed:
    """Given scores, followed while more is learnt about the axes of a trace: widths may turn out to be one.

    Args:
        trace: before anything is unified that the forward pass did not show.
        scores: as `surgery.importance` gives them.

    Raises:
        SurgeryError: for scores of another model, of other lengths, or that are not finite.
    """

    def __init__(self, trace: Trace, scores: Any):
        solution = solve(trace)
        widths = named_widths(solution)
        raw = {
            solution.axis_of(atom): atom
            for found in trace.tensors.values()
            for axis in found
            for atom in axes.atoms(axis)
        }
        self._found = [(raw[widths[name]], values) for name, values in checked_scores(scores, widths).items()]

    def __call__(self, solution: Solution) -> dict[Atom, Tensor]:
        """The scores of each atom of a solution of the trace."""
        scores: dict[Atom, Tensor] = {}
        for axis, values in self._found:
            for atom, part in onto_atoms(solution.axis_of(axis), values).items():
                scores[atom] = scores.get(atom, 0) + part
        return scores


def checked_scores(scores: Any, widths: Mapping[str, Atom], what: str = "keep_top") -> dict[str, Tensor]:
    """The scores as float64 tensors; SurgeryError for those of no width of the model, or of a wrong length."""
    if not isinstance(scores, Mapping):
        raise SurgeryError(f"{what} takes scores by width, as surgery.importance gives them, got {scores!r}")
    found = {}
    for name, values in scores.items():
        if name not in widths:
            near = difflib.get_close_matches(str(name), widths, n=2)
            hint = f"did you mean {' or '.join(map(repr, near))}?" if near else "take surgery.importance of this model"
            raise SurgeryError(f"{what} has scores of {name!r}, and the model has no such width: {hint}")
        try:
            values = torch.as_tensor(values).detach().cpu().double()
        except (TypeError, ValueError, RuntimeError) as error:
            raise SurgeryError(f"scores of {name!r} are no numbers: {first_line(error)}") from error
        if tuple(values.shape) != (widths[name].size,):
            raise SurgeryError(
                f"{what} has scores of shape {tuple(values.shape)} for {name!r}, a width of {widths[name].size} "
                "positions: take surgery.importance of this model"
            )
        if not values.isfinite().all():
            raise SurgeryError(f"scores of {name!r} are not finite: {values.tolist()[:4]}, ...")
        found[name] = values
    return found


def best(score: Callable[[Atom], Tensor]) -> Callable[[Atom, int], Sequence[int]]:
    """A function that picks the n positions with the highest scores; of equal ones the first.

    A width whose order matters (`Atom.order`) keeps its first positions.
    """

    def pick(atom: Atom, n: int) -> Sequence[int]:
        if atom.order:
            return range(n)
        return sorted(score(atom).argsort(descending=True, stable=True)[:n].tolist())

    return pick


def scores_of(atom: Atom, scores: Mapping[Atom, Tensor], solution: Solution) -> Tensor:
    """The scores of an atom; SurgeryError if there are none."""
    if atom not in scores:
        name = next(name for name, other in named_widths(solution).items() if other is atom)
        raise SurgeryError(
            f"keep_top has no scores for the width {name!r}, which is to shrink: add some of another criterion, "
            "{**importance(by='l1', ...), **scores}, or name its module in keep"
        )
    return scores[atom]

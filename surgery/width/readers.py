"""Which tensors of a model read a width: along which of their axes a product sums."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from surgery.width.rules.registry import RULES
from surgery.width.solved import SUMS, Atom, Axis, Choice, Solution, Sum, atoms
from surgery.width.trace import Step

SPLITS = {"split", "unsafe_split", "split_with_sizes", "unsafe_split_with_sizes", "chunk", "unbind", "slice"}


class Readers(NamedTuple):
    """What reads widths.

    Attributes:
        of: by (module, attribute) and axis of a tensor of the model the atoms that a product sums along it.
        computed: (step, atom) where products sum along an axis of which no tensor of the model has a part: both of
            their factors are computed, as queries and keys are.
    """

    of: dict[tuple[tuple[str, str], int], set[Atom]]
    computed: list[tuple[int, Atom]]


def readers(solution: Solution) -> Readers:
    """The readers of every width."""
    found = Readers({}, [])
    for number, step in enumerate(solution.steps):
        if step.name == "scaled_dot_product_attention":
            found.computed.extend((number, atom) for atom in atoms(step.inputs[0][-1]))
        pairs = list(_summed(step))
        for atom in dict.fromkeys(atom for _, _, summed in pairs for atom in summed):
            places = [_held(solution, step, which, axis) for which, axis, _ in pairs]
            place = next((place for place in reversed(places) if place and place[1] is not None), None)
            if place is None:
                found.computed.append((number, atom))
            else:
                found.of.setdefault(place, set()).add(atom)
    return found


def _summed(step: Step) -> Iterator[tuple[int, int, list[Atom]]]:
    """(input, axis, atoms) of the two axes that a step sums together."""
    if step.name not in SUMS:
        return
    first = 1 if step.name in ("addmm", "baddbmm", "addmv") else 0
    x, w = step.inputs[first : first + 2]
    if "convolution" in step.name:
        axis, other = (1 if len(x) == len(w) else 0), 0 if step.scalars.get("transposed") else 1
        groups = set(atoms(step.numbers["groups"])) if "groups" in step.numbers else set()
        summed = [atom for atom in atoms(w[other]) if atom not in groups]
    else:
        axis, other = len(x) - 1, len(w) - 1 if step.name == "linear" or len(w) == 1 else len(w) - 2
        summed = list(atoms(x[axis]))
    yield first, axis, summed
    yield first + 1, other, summed


def _held(solution: Solution, step: Step, which: int, axis: int | None) -> tuple[tuple[str, str], int | None] | None:
    """The tensor of the model, and its axis, that an axis of an input of a step is, in another layout perhaps."""
    while axis is not None:
        source: Any = step.sources[which]
        if source is None:
            return None
        if isinstance(source[0], str):
            return source, axis if solution.tensors[source][axis] is step.inputs[which][axis] else None
        before, position = solution.steps[source[0]], source[1]
        rule = RULES.get(before.name)
        if not before.inputs or not ((rule and rule.carries) or before.name in SPLITS):
            return None
        axis, step, which = _axis_before(before, before.outputs[position], axis), before, 0
    return None


def _axis_before(step: Step, after: tuple[Axis, ...], axis: int) -> int | None:
    """The axis of a step's first input that an axis of its result is; None if it is only a part of one."""
    before = step.inputs[0]
    if step.name in ("t", "transpose", "permute", "swapaxes", "swapdims", "adjoint"):
        order = list(range(len(before)))
        if "dims" in step.scalars:
            order = [dim % len(before) for dim in step.scalars["dims"]]
        elif len(before) > 1:
            i, j = (step.scalars.get(f"dim{n}", step.scalars.get(f"axis{n}", n)) for n in (0, 1))
            order[i], order[j] = order[j], order[i]
        return order[axis]
    start = 0
    for place, found in enumerate(after[: axis + 1]):
        match = next((i for i in range(start, len(before)) if before[i] is found), None)
        if place == axis:
            return match
        start = start if match is None else match + 1
    return None


def shares(axis: Axis, read: set[Atom], choice: Choice, mode: str) -> Tensor:
    """[new size]: with which share of the old weight each position of an axis is read.

    >>> width = Atom(2)
    >>> shares(width, {width}, {width: [0, 1, 0]}, "copy").tolist()
    [0.5, 1.0, 0.5]
    """
    if isinstance(axis, Atom):
        places = torch.as_tensor(choice.get(axis, range(axis.size)))
        if axis not in read:
            return torch.ones(len(places), dtype=torch.float64)
        if mode == "zero":
            return (torch.arange(len(places)) < axis.size).double()
        return 1 / places.bincount(minlength=axis.size)[places].double()
    parts = [shares(part, read, choice, mode) for part in axis.parts]
    if isinstance(axis, Sum):
        return torch.cat(parts)
    result = parts[0]
    for part in parts[1:]:
        result = (result[:, None] * part).flatten()
    return result

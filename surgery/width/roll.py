"""Rolling windows of channels: FedRolex's plans.

Alam et al., "FedRolex: Model-Heterogeneous Federated Learning with Rolling Sub-Model Extraction" (NeurIPS 2022),
section 3.2: in round j a client that holds n of C channels holds (j + i) mod C, i < n, so that after C rounds every
channel was trained as often as any other.
"""

from collections.abc import Callable
from itertools import accumulate
from math import prod
from typing import Any

from torch import nn

from surgery.deprecated import formerly
from surgery.errors import SurgeryError
from surgery.names import joined
from surgery.submodel import Index, Runs, Source, Submodel, merged
from surgery.width.axes import Axis, atoms, digits, find, new_size
from surgery.width.corner import corner
from surgery.width.trace import traced


@formerly("model small example", like="small")
def rolling(model: nn.Module, small: nn.Module, *, example: Any) -> Callable[[int], Submodel]:
    """The plans of a smaller model whose window on every width begins at a channel other than 0.

    Args:
        model: any module; it is not changed.
        small: a smaller model of the same family, as for `surgery.corner(model, small)`.
        example: the model's input. One forward pass of the model shows which axes of which tensors are one width; it
            runs in evaluation mode, on the meta device if the model can.

    Returns:
        A function from the shift `by` to a plan. Of a width of C channels of which `small` has n the plan holds the
        channels (by + i) mod C, i < n, in ascending order; a width that `small` has entirely is held entirely. Channels
        count, not positions: after a flattened image each channel has as many columns of a linear layer as there are
        pixels, and of an attention all heads stay, with the window inside each. `by=0` gives the plan of `corner`.

    Raises:
        SurgeryError: if the leading corner that `corner(model, small)` takes is not the first channels of every width:
            a rolled one would not be a narrower model.

    >>> import torch
    >>> net, small = (nn.Sequential(nn.Conv2d(1, c, 1), nn.Flatten(), nn.Linear(2 * c, 3)) for c in (4, 3))
    >>> plan = rolling(net, small, example=torch.zeros(1, 1, 1, 2))(2)
    >>> plan.entries["0.bias"][0].index, plan.entries["2.weight"][0].index
    ((((0, 1), (2, 4)),), (None, ((0, 2), (4, 8))))
    """
    _, base = corner(model, small)
    trace = traced(model, example).found
    where = {joined(*key): found for key, found in trace.tensors.items()}
    wanted = dict(base.small_shapes)
    for edit in base.edits:
        if edit["do"] == "slice":  # a tensor that is not in the state
            name = joined(edit["module"], edit["attribute"])
            wanted[name] = tuple(a.size if runs is None else runs[0][1] for a, runs in zip(where[name], edit["index"]))
    kept = _solved([(name, axis, n) for name, sizes in wanted.items() for axis, n in zip(where[name], sizes)])

    def plan(by: int) -> Submodel:
        windows: dict[Axis, Runs] = {}

        def index(name: str) -> Index:
            found = [(axis.size, _window(axis, kept, by, windows)) for axis in where[name]]
            return tuple(None if runs == ((0, size),) else runs for size, runs in found)

        entries = {name: (Source(name, index(name)),) for name in base.entries}
        edits = [
            {**edit, "index": index(joined(edit["module"], edit["attribute"]))} if edit["do"] == "slice" else edit
            for edit in base.edits
        ]
        return Submodel(entries, base.shapes, tuple(edits), base.structure, base.dtypes)

    for name, sources in plan(0).entries.items():
        if sources != base.entries[name]:
            raise SurgeryError(
                f"the leading corner {base.small_shapes[name]} of {name!r} {base.shapes[name]} is not the first "
                "channels of its widths, since their parts (heads, groups, padding) lie one after the other: it cannot "
                "roll; take models whose narrow versions are their leading corners (another norm or shortcut may do)"
            )
    return plan


def _solved(equations: list[tuple[str, Axis, int]]) -> dict[Axis, int]:
    """How many positions of each atom stay, given for axes of tensors how many of theirs do: (tensor, axis, number).

    If a width is a product of several digits that may shrink, heads and groups are kept whole.
    """
    kept: dict[Axis, int] = {}
    for _, axis, n in equations:
        kept.update({find(atom): atom.size for atom in atoms(axis) if atom.fixed or n == axis.size})
    left = [equation for equation in equations if not _known(equation[1], kept)]
    while left:
        if not sum(_settle(axis, n, kept) for _, axis, n in left):
            groups = [
                digit for _, axis, _ in left for digit in digits(axis) if digit.grouping and not _known(digit, kept)
            ]
            if not groups:
                name, axis, n = left[0]
                raise SurgeryError(
                    f"{axis.size} positions of {name!r} become {n}, and that does not show what each width keeps"
                )
            kept.update({find(atom): atom.size for atom in atoms(groups[0])})
        left = [equation for equation in left if not _known(equation[1], kept)]
    for name, axis, n in equations:
        if new_size(axis, kept.__getitem__) != n:
            why = next((atom.fixed for atom in atoms(axis) if atom.fixed), "its widths shrink to other sizes elsewhere")
            raise SurgeryError(f"{axis.size} positions of {name!r} become {n}, and no window does that: {why}")
    return kept


def _known(axis: Axis, kept: dict[Axis, int]) -> bool:
    return all(find(atom) in kept for atom in atoms(axis))


def _settle(axis: Axis, n: int, kept: dict[Axis, int]) -> bool:
    """Whether the number kept of an axis shows the number kept of one more part of it; `kept` then has it."""
    axis = find(axis)
    if axis.kind == "atom":
        kept[axis] = n
        return True
    known = [new_size(part, kept.__getitem__) for part in axis.parts if _known(part, kept)]
    left = [find(part) for part in axis.parts if not _known(part, kept)]
    if len(set(left)) != 1 or (axis.kind == "product" and len(left) > 1):
        return False
    n, rest = divmod(n - sum(known), len(left)) if axis.kind == "sum" else divmod(n, prod(known))
    return not rest and 0 < n <= left[0].size and _settle(left[0], n, kept)


def _window(axis: Axis, kept: dict[Axis, int], by: int, windows: dict[Axis, Runs]) -> Runs:
    """The positions of an axis that stay if its atoms' windows begin at position `by`; `windows` is a cache."""
    axis = find(axis)
    if axis not in windows:
        windows[axis] = _new_window(axis, kept, by, windows)
    return windows[axis]


def _new_window(axis: Axis, kept: dict[Axis, int], by: int, windows: dict[Axis, Runs]) -> Runs:
    if axis.kind == "atom":
        start, stop = by % axis.size, by % axis.size + kept[axis]
        if kept[axis] == axis.size:
            return ((0, axis.size),)
        return ((start, stop),) if stop <= axis.size else ((0, stop - axis.size), (start, axis.size))
    parts = [(part.size, _window(part, kept, by, windows)) for part in axis.parts]
    if axis.kind == "sum":
        starts = accumulate((size for size, _ in parts), initial=0)
        return merged((start + a, start + b) for start, (_, runs) in zip(starts, parts) for a, b in runs)
    size, result = 1, ((0, 1),)
    for digit, runs in reversed(parts):
        if result == ((0, size),):
            result = tuple((a * size, b * size) for a, b in runs)
        else:
            result = tuple((p * size + a, p * size + b) for x, y in runs for p in range(x, y) for a, b in result)
        size *= digit
    return merged(result)

"""Rolling windows of channels: FedRolex's plans.

Alam et al., "FedRolex: Model-Heterogeneous Federated Learning with Rolling Sub-Model Extraction" (NeurIPS 2022),
section 3.2: in round j a client that holds n of C channels holds (j + i) mod C, i < n, so that after C rounds every
channel was trained as often as any other.
"""

from collections.abc import Callable
from math import prod
from typing import Any

from torch import nn

from surgery.errors import SurgeryError
from surgery.names import joined
from surgery.submodel import Source, Submodel
from surgery.width.corner import corner
from surgery.width.plan import indices
from surgery.width.solved import Atom, Axis, Product, Sum, atoms, digits, grouping_of, size_of, solve
from surgery.width.trace import traced


def rolling(model: nn.Module, small: nn.Module, *, example: Any) -> Callable[[int], Submodel]:
    """The plans of a smaller model whose window on every width begins at a channel other than 0.

    Args:
        model: any module; it is not changed.
        small: a smaller model of the same family, as for `surgery.corner(model, small)`.
        example: the model's input. One forward pass of the model shows which axes of which tensors are one width; it
            runs in evaluation mode, on the meta device if the model can.

    Returns:
        A function from the shift `by` to a plan. Of a width of C channels of which `small` has n the plan holds the
        channels (by + i) mod C, i < n, in ascending order; a width that `small` has entirely is held entirely, and one
        whose order matters (`surgery.widths` says why) holds its first n. Channels count, not positions: after a
        flattened image each channel has as many columns of a linear layer as there are pixels, and of an attention all
        heads stay, with the window inside each. `by=0` gives the plan of `corner`.

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
    solution = solve(traced(model, example).found)
    where = {joined(*key): found for key, found in solution.tensors.items()}
    wanted = dict(base.small_shapes)
    for edit in base.edits:
        if edit["do"] == "slice":  # a tensor that is not in the state
            name = joined(edit["module"], edit["attribute"])
            wanted[name] = tuple(a.size if runs is None else runs[0][1] for a, runs in zip(where[name], edit["index"]))
    kept = _solved([(name, axis, n) for name, sizes in wanted.items() for axis, n in zip(where[name], sizes)])

    def plan(by: int) -> Submodel:
        starts = {atom: 0 if atom.order else by for atom in kept}
        choice = {a: sorted((starts[a] + i) % a.size for i in range(n)) for a, n in kept.items() if n < a.size}
        index = indices(choice)
        entries = {name: (Source(name, index(where[name])),) for name in base.entries}
        edits = [
            {**edit, "index": index(where[joined(edit["module"], edit["attribute"])])}
            if edit["do"] == "slice"
            else edit
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


def _solved(equations: list[tuple[str, Axis, int]]) -> dict[Atom, int]:
    """How many positions of each atom stay, given for axes of tensors how many of theirs do: (tensor, axis, number).

    If a width is a product of several digits that may shrink, heads and groups are kept whole.
    """
    kept: dict[Atom, int] = {}
    for _, axis, n in equations:
        kept.update({atom: atom.size for atom in atoms(axis) if atom.why or n == axis.size})
    left = [equation for equation in equations if not _known(equation[1], kept)]
    while left:
        if not sum(_settle(axis, n, kept) for _, axis, n in left):
            groups = [
                digit for _, axis, _ in left for digit in digits(axis) if grouping_of(digit) and not _known(digit, kept)
            ]
            if not groups:
                name, axis, n = left[0]
                raise SurgeryError(
                    f"{axis.size} positions of {name!r} become {n}, and that does not show what each width keeps"
                )
            kept.update({atom: atom.size for atom in atoms(groups[0])})
        left = [equation for equation in left if not _known(equation[1], kept)]
    for name, axis, n in equations:
        if _new_size(axis, kept) != n:
            why = next(
                (atom.why.text for atom in atoms(axis) if atom.why), "its widths shrink to other sizes elsewhere"
            )
            raise SurgeryError(f"{axis.size} positions of {name!r} become {n}, and no window does that: {why}")
    return kept


def _known(axis: Axis, kept: dict[Atom, int]) -> bool:
    return all(atom in kept for atom in atoms(axis))


def _settle(axis: Axis, n: int, kept: dict[Atom, int]) -> bool:
    """Whether the number kept of an axis shows the number kept of one more part of it; `kept` then has it."""
    if isinstance(axis, Atom):
        kept[axis] = n
        return True
    known = [_new_size(part, kept) for part in axis.parts if _known(part, kept)]
    left = [part for part in axis.parts if not _known(part, kept)]
    if len(set(left)) != 1 or (isinstance(axis, Product) and len(left) > 1):
        return False
    n, rest = divmod(n - sum(known), len(left)) if isinstance(axis, Sum) else divmod(n, prod(known))
    return not rest and 0 < n <= left[0].size and _settle(left[0], n, kept)


def _new_size(axis: Axis, kept: dict[Atom, int]) -> int:
    return size_of(axis, {atom: range(kept[atom]) for atom in atoms(axis)})

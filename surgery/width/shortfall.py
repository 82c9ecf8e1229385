"""List what a narrow model keeps whole against the request, and why."""

from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

from torch import nn

from surgery.forward import named_tensors
from surgery.names import join, matches
from surgery.width.axes import ReasonKind, Why, firmest, lost
from surgery.width.choose import INSIDE, Chosen, Demand
from surgery.width.scales import Scaling
from surgery.width.solve import (
    Atom,
    Axis,
    Choice,
    Product,
    Solution,
    Sum,
    atoms,
    digits,
    find_summed,
    read_by_layers,
    size_of,
)

_SHIFTED = lost("the code computes with it and itself, shifted (differences of neighbours, say)")
_LISTED = 5  # widths that kept their size are listed up to this number


class UnshrunkWidth(NamedTuple):
    """A hidden width that keeps its size although it was to shrink.

    Attributes:
        module: the module that makes the width.
        tensor, shape, axis: a tensor along the width, and its axis.
        size: the number of positions.
        why: the reason.
    """

    module: str
    tensor: str
    shape: tuple[int, ...]
    axis: int
    size: int
    why: Why

    def __str__(self) -> str:
        part = f"a part of {self.size} of " if self.size < self.shape[self.axis] else ""
        return f"{part}axis {self.axis} of {self.tensor} {self.shape} stays whole: {self.why.text}"


def find_whole(solution: Solution, demand: Demand, chosen: Chosen) -> list[UnshrunkWidth]:
    """Return the hidden widths that keep their size against the request, with reasons.

    Each width is listed once. These were not to shrink, so they are left out: outputs that no layer reads (such as
    classes), features of the input, and with heads="drop" the positions inside heads.
    """
    widths: list[UnshrunkWidth] = []
    known: set[Atom] = set()  # the atoms of these widths
    read, by_layers = find_summed(solution), read_by_layers(solution)
    inside = _inside_heads(solution) if demand.heads == "drop" else set()
    made_axes = [(module, axis, True) for module, axis in solution.made]
    held = [(key[0], axis, False) for key, axes in solution.tensors.items() for axis in axes]
    for module, axis, is_made in made_axes + held:
        for part in _not_shrunk(axis, demand, chosen, inside):
            parts = {a for a in atoms(part) if a not in inside and demand.count_kept(a) < a.size}
            shifted = is_made and not parts and isinstance(part, Sum) and len(part.parts) > len(set(part.parts))
            parts = parts or set(atoms(part) if shifted else ())
            if parts <= known or (demand.numbers and any(atom in chosen.sliced for atom in atoms(part))):
                continue  # `numbers` keeps it, since other widths are worth less
            if not is_made and not all(map(chosen.why, parts)):
                continue  # the width shrinks by another digit
            why = _SHIFTED if shifted else _why_whole(part, [atom for atom in atoms(part) if atom in parts], chosen)
            if shifted:  # leaves out places that attention looks up by distance
                hidden = not parts.isdisjoint(by_layers)
            elif any(atom.makers for atom in parts):
                hidden = why.kind < ReasonKind.PLACE or (why.kind is ReasonKind.OUTPUT and not parts.isdisjoint(read))
            else:  # leaves out tokens, which attention sums
                hidden = why.kind in (ReasonKind.LOST, ReasonKind.UNMADE) and not parts.isdisjoint(by_layers)
            places = [place for a in atoms(part) if a in parts for place in solution.members.get(a, ())]
            if hidden and places:
                known |= parts
                key, position = min(
                    places, key=lambda at: (at[0][0] != module, solution.tensors[at[0]][at[1]] is not part)
                )
                shape = tuple(axis.size for axis in solution.tensors[key])
                widths.append(UnshrunkWidth(module, join(*key), shape, position, part.size, why))
    return list({str(width): width for width in widths}.values())  # lists an axis of several widths once


def _inside_heads(solution: Solution) -> set[Atom]:
    """Return the atoms of positions inside heads, where heads can be dropped."""
    inside: set[Atom] = set()
    for product in {product for axes in solution.tensors.values() for axis in axes for product in _products(axis)}:
        if any(atom.grouping == "heads" and not atom.why for digit in product.parts for atom in atoms(digit)):
            inside |= {atom for atom in atoms(product) if atom.grouping != "heads"}
    return inside


def _products(axis: Axis) -> Iterator[Product]:
    """Yield the products that an axis consists of."""
    if not isinstance(axis, Atom):
        yield from [axis] if isinstance(axis, Product) else []
        for part in axis.parts:
            yield from _products(part)


def _not_shrunk(axis: Axis, demand: Demand, chosen: Chosen, inside: Collection[Atom]) -> Iterator[Axis]:
    """Yield an axis, or parts of it, that keep all positions against the request."""
    target = min((demand.count_kept(atom, axis.size) for atom in atoms(axis) if atom not in inside), default=axis.size)
    if target == axis.size:
        return
    if size_of(axis, chosen.choice) == axis.size:
        yield axis
    elif not isinstance(axis, Atom):  # one digit of a product shrinks; it may be a sum
        for part in axis.parts:
            if isinstance(axis, Sum) or size_of(part, chosen.choice) < part.size:
                yield from _not_shrunk(part, demand, chosen, inside)


def _why_whole(axis: Axis, parts: Sequence[Atom], chosen: Chosen) -> Why:
    """Return the firmest reason why no part of an axis shrinks.

    What the caller asked of one part is no reason for another part.
    """
    reasons = [chosen.why(atom) for atom in parts]
    if all(why is INSIDE for why in reasons) and set(parts) == set(atoms(axis)):  # it has a number for each head
        return INSIDE
    several = sum(any(chosen.why(atom) is INSIDE for atom in atoms(digit)) for digit in digits(axis)) > 1
    if several or any(why is None or why.kind <= ReasonKind.PICKED for why in reasons):
        reason = firmest(*(why for why in reasons if why and why.kind < ReasonKind.ASKED))
        return reason or lost("no share of its parts shrinks it: they shrink, or stay, for other widths")
    undone = [why for why in reasons if why.kind is ReasonKind.LOST]  # without these the axis would shrink
    return firmest(*(undone or reasons))


def list_whole(model: nn.Module, whole: Sequence[UnshrunkWidth], verb: str = "shrink") -> str:
    """Return a message: which widths keep their size, and why; "" if none does."""
    if not whole:
        return ""
    some = f"{len(whole)} hidden widths" if len(whole) > 1 else "a hidden width"
    quantised = any(name in width.why.text for width in whole for name in ("fake_quantize", "_fq_"))
    last = (
        "its fake quantisers (torch.ao.quantization.FakeQuantize) hold scales of channels that no plan carries: narrow "
        "the model first, then prepare it for quantisation-aware training"
    )
    first = f"{some} of {type(model).__name__} cannot {verb}:"
    return _list(first, whole, "; surgery.widths lists all", last * quantised)


def _list(first: str, items: Sequence[Any], more: str = "", last: str = "") -> str:
    """Return lines: `first`, up to `_LISTED` items, the number of others, and `last`."""
    lines = [first, *(f"  {item}" for item in items[:_LISTED])]
    if len(items) > _LISTED:
        lines.append(f"  and {len(items) - _LISTED} more{more}")
    return "\n".join([*lines, last] if last else lines)


def constant_scales(model: nn.Module, constant: Sequence[Scaling]) -> str:
    """Return a message on scales that stay while sums become shorter, or ""."""
    if not constant:
        return ""
    return _list(
        f"numbers of {type(model).__name__} scale sums of products that become shorter, and stay:",
        list(dict.fromkeys(map(str, constant))),
        last="powers of the length follow in attributes, and in buffers that are not saved, if all sums that share one "
        "ask the same, and if the code computes them of shapes; what is right for other numbers is not known",
    )


def unused_tensors(
    solution: Solution, choice: Choice, model: nn.Module, keep: Sequence[str] = (), does: str = "shrink"
) -> str:
    """Return a message on unused tensors as long as a width that changes, or "".

    Args:
        choice: the positions of the widths that change.
        model: the model with the tensors, before or after the change.
        keep: patterns of modules whose tensors keep their size.
        does: what happens to the widths: they shrink, grow or are permuted.
    """
    if not solution.unused:
        return ""
    moved = {atom for atom, order in choice.items() if list(order) != [*range(atom.size)]}
    changed = {
        axis.size
        for tensor_axes in solution.tensors.values()
        for axis in tensor_axes
        if moved.intersection(atoms(axis))
    }
    unused = [
        f"{join(*key)} {tuple(tensor.shape)}"
        for key, tensor in named_tensors(model)
        if key in solution.unused
        and changed.intersection(tensor.shape)
        and not any(matches(key[0], pattern) for pattern in keep)
    ]
    if not unused:
        return ""
    why = solution.untrained
    which = "in evaluation mode" if why or does == "grow" else "in any mode"
    which += f", and it does not run in training mode ({why})" if why else ""
    wrong = "compute something else" if does == "are permuted" else "not run"
    return _list(
        f"tensors of {type(model).__name__} that the example does not use {which}, stay as they are, but are as long "
        f"as widths that {does}, so code that uses them may {wrong}:",
        unused,
        last="give an example that uses them, or remove them from the model"
        if does == "are permuted"
        else "give an example that uses them, keep=[...] what makes these widths or the tensors' own modules, or "
        "remove them from the model",
    )


def constants_differ(model: nn.Module, along: Sequence[str]) -> str:
    """Return a message on constants that differ along widths, or ""."""
    if not along:
        return ""
    return (
        f"{type(model).__name__} makes constants whose numbers depend on how many there are (linspace, say) "
        f"along {', '.join(along)}: the narrow model's are not the first of the full one's, so it does not compute "
        "what these positions do there. Register the constants as a buffer of their module, or keep=[...] the width "
        "whole"
    )

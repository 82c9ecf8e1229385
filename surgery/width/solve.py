"""Solve a trace: put a model's axes into a normal form that does not change.

In the normal form of the axes of `surgery.width.axes` a product's digits are atoms or sums, and a sum's terms are atoms
or products. Each atom is one object wherever it lies. A *choice* says which positions of each atom stay. The positions
of all other axes follow from it.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch import Tensor

from surgery.names import join
from surgery.width import axes
from surgery.width.axes import ReasonKind, Why
from surgery.width.provenance import Expression
from surgery.width.reads import Read
from surgery.width.steps import Step
from surgery.width.trace import Trace


@dataclass(frozen=True, eq=False)
class Atom:
    """A width: an axis that has no parts.

    Attributes:
        size: the number of positions.
        why: why all positions must stay; None if positions can be dropped.
        grouping: "heads" or "groups" if each position stands for a head or a group; else "".
        order: why positions can neither be chosen freely nor be permuted; only the first positions can be kept (or all,
            if `why` says so). "" if the order does not matter.
        makers: names of the modules whose layers make these features.
    """

    size: int
    why: Why | None = None
    grouping: str = ""
    order: str = ""
    makers: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"{self.size}{'!' if self.why else ''}"


@dataclass(frozen=True, eq=False)
class Product:
    """An axis numbered by digits (a mixed radix number); the last changes fastest."""

    parts: tuple["Atom | Sum", ...]

    @cached_property
    def size(self) -> int:
        """The number of positions."""
        return prod(part.size for part in self.parts)

    def __repr__(self) -> str:
        return f"({'*'.join(map(repr, self.parts))})"


@dataclass(frozen=True, eq=False)
class Sum:
    """An axis of several terms, one after the other."""

    parts: tuple["Atom | Product", ...]

    @cached_property
    def size(self) -> int:
        """The number of positions."""
        return sum(part.size for part in self.parts)

    def __repr__(self) -> str:
        return f"({'+'.join(map(repr, self.parts))})"


Axis: TypeAlias = Atom | Product | Sum
Axes: TypeAlias = tuple[Axis, ...]
Choice: TypeAlias = Mapping[Atom, Sequence[int]]
"""The positions that stay, by atom; atoms without an entry keep all positions."""


def digits(axis: Axis) -> list[Atom | Sum]:
    """Return the digits of an axis; a sum is one digit, and a single position is none."""
    return list(axis.parts) if isinstance(axis, Product) else [axis] if axis.size != 1 else []


def terms(axis: Axis) -> list[Atom | Product]:
    """Return the terms of an axis; a product is one term."""
    return list(axis.parts) if isinstance(axis, Sum) else [axis]


def atoms(axis: Axis) -> Iterator[Atom]:
    """Yield the atoms of an axis, each as often as it occurs."""
    if isinstance(axis, Atom):
        yield axis
    else:
        for part in axis.parts:
            yield from atoms(part)


def grouping_of(axis: Axis) -> str:
    """Return the grouping of all atoms of an axis; "" if they differ or for a product."""
    groupings = {atom.grouping for atom in atoms(axis)} if not isinstance(axis, Product) else {""}
    return groupings.pop() if len(groupings) == 1 else ""


def is_whole(axis: Axis) -> bool:
    """Return whether all positions of an axis must stay."""
    return all(atom.why for atom in atoms(axis))


def size_of(axis: Axis, choice: Choice) -> int:
    """Return how many positions of an axis stay."""
    if isinstance(axis, Atom):
        positions = choice.get(axis)
        return axis.size if positions is None else len(positions)
    sizes = [size_of(part, choice) for part in axis.parts]
    return sum(sizes) if isinstance(axis, Sum) else prod(sizes)


@dataclass(frozen=True)
class Solution:
    """The solved axes of each tensor and of each operation of a trace.

    Attributes:
        tensors: the axes of each tensor by (module name, attribute name): parameters, buffers and plain attributes.
        parameters: the keys in `tensors` of the parameters.
        steps: the operations in order, with solved axes.
        modes, lengths, outputs: for each forward pass, whether it was in training mode, its number of steps, and the
            axes of the output's tensors.
        returned: for each forward pass, where the output's tensors came from, in the form of `Step.sources`.
        made: (module, axis) for each axis along which a layer with weights makes features.
        ordered: (axis, why) for each axis whose kept positions must be 0, 1, 2, ... without a gap.
        written: digits of the results of reshapes that leave one size open (-1): the digits with a size in the call.
        unused: the keys in `tensors` of tensors that no operation used, if they have more than one element.
        untrained: why training mode was not traced although the model computes something else there; or "".
        reads: the operations that used numbers of the model's attributes, with the solved axes.
        compared: numbers of the model's attributes that the code found equal to another number.
        members: the places of each atom: keys of `tensors`, each with the number of the axis.
        axis_of: a function from an axis of the trace to its solved axis.
    """

    tensors: Mapping[tuple[str, str], Axes]
    parameters: frozenset[tuple[str, str]]
    steps: Sequence[Step[Axis]]
    modes: tuple[bool, ...]
    lengths: Sequence[int]
    outputs: Sequence[Sequence[Axes]]
    returned: Sequence[Sequence[Any]]
    made: Sequence[tuple[str, Axis]]
    ordered: Sequence[tuple[Axis, str]]
    written: frozenset[Axis]
    unused: Sequence[tuple[str, str]]
    untrained: str
    reads: Sequence[Read[Axis]]
    compared: Sequence[Expression]
    members: Mapping[Atom, Sequence[tuple[tuple[str, str], int]]] = field(repr=False)
    axis_of: Callable[[axes.Axis], Axis] = field(repr=False)


def solve(trace: Trace, whole: Mapping[axes.Axis, Why] = MappingProxyType({})) -> Solution:
    """Return the solution of a trace.

    After axes of the trace were unified, solve it again.

    Args:
        whole: why atoms of the trace keep their size, if the trace itself has no reason.
    """
    solver = Solver(trace.tensors.values(), trace.made, [*trace.ordered, *trace.foreign], whole, trace.steps)
    tensors = {key: solver.all(tensor_axes) for key, tensor_axes in trace.tensors.items()}
    members: dict[Atom, list[tuple[tuple[str, str], int]]] = {}
    for key, tensor_axes in tensors.items():
        for number, axis in enumerate(tensor_axes):
            for atom in dict.fromkeys(atoms(axis)):
                members.setdefault(atom, []).append((key, number))
    return Solution(
        tensors,
        frozenset(trace.parameters),
        [solver.step(step) for step in trace.steps],
        trace.modes,
        trace.lengths,
        [[solver.all(tensor_axes) for tensor_axes in output] for output in trace.outputs],
        trace.returned,
        [(module, solver(axis)) for module, axis in trace.made],
        list(dict.fromkeys((solver(axis), why) for axis, why in trace.ordered)),
        frozenset(digit for axis in trace.written for digit in digits(solver(axis))),
        trace.unused,
        trace.untrained,
        [Read(read.number, tuple(dict.fromkeys(solver.all(read.axes))), read.steps) for read in trace.reads],
        list(dict.fromkeys(trace.tracking.compared)),
        members,
        solver,
    )


SUMS = {
    "mm", "bmm", "addmm", "baddbmm", "matmul", "mv", "addmv", "linear", "convolution", "_convolution", "_grouped_mm",
}  # fmt: skip
"""Matrix products and convolutions: they sum over an axis of each of two inputs."""


def factors(step: Step[Axis]) -> Iterator[tuple[int, int, list[Atom]]]:
    """Yield (input, axis, atoms) for both axes that a step of `SUMS` sums over."""
    if step.name not in SUMS:
        return
    first = 1 if step.name in ("addmm", "baddbmm", "addmv") else 0
    x, w = step.inputs[first : first + 2]
    if "convolution" in step.name:
        x_axis, w_axis = (1 if len(x) == len(w) else 0), 0 if step.scalars.get("transposed") else 1
        group_axis: Any = step.numbers.get("groups")
        groups = set() if group_axis is None else set(atoms(group_axis))
        summed = [atom for atom in atoms(w[w_axis]) if atom not in groups]
    else:
        x_axis, w_axis = len(x) - 1, len(w) - 1 if step.name == "linear" or len(w) == 1 else len(w) - 2
        summed = list(atoms(x[x_axis]))
    yield first, x_axis, summed
    yield first + 1, w_axis, summed


def find_summed(solution: Solution) -> set[Atom]:
    """Return the atoms that products and convolutions sum over: layers read them."""
    return {atom for step in solution.steps for _, _, summed in factors(step) for atom in summed}


def read_by_layers(solution: Solution) -> set[Atom]:
    """Return the atoms that a product of features with a model's tensor sums over.

    Features are results that weights helped to compute. A fixed function of the input (such as its sines or a one-hot
    code) is not a feature.
    """
    has_weights: list[bool] = []  # for each step whether a parameter helped to compute its result

    def is_of_weights(source: Any) -> bool:
        if source is None:
            return False
        return source in solution.parameters if isinstance(source[0], str) else has_weights[source[0]]

    def is_feature(source: Any, atom: Atom) -> bool:
        """Return whether weights helped to compute an atom's positions.

        In a concatenation only the atom's part counts.
        """
        if not is_of_weights(source) or isinstance(source[0], str) or (step := solution.steps[source[0]]).name != "cat":
            return is_of_weights(source)
        parts = zip(step.sources, step.inputs)
        return any(is_feature(part, atom) for part, axes in parts if any(atom in atoms(axis) for axis in axes))

    def is_held(source: Any) -> bool:
        while source is not None and isinstance(source[0], int) and solution.steps[source[0]].name in _LAYOUTS:
            source = solution.steps[source[0]].sources[0]
        return source is not None and isinstance(source[0], str)

    read_atoms: set[Atom] = set()
    for step in solution.steps:
        has_weights.append(any(map(is_of_weights, step.sources)))
        (x, _, summed), (w, _, _) = tuple(factors(step)) or ((0, 0, []), (0, 0, []))
        for held, features in ((x, w), (w, x)) if summed else ():
            # a weight that multiplies a buffer (coordinates, say) reads it; the buffer does not read the weight
            is_input = is_held(step.sources[features]) and not is_of_weights(step.sources[held])
            if is_held(step.sources[held]) and not is_input:
                read_atoms |= {atom for atom in summed if is_feature(step.sources[features], atom)}
    return read_atoms


_LAYOUTS = {"t", "transpose", "permute", "view", "unsqueeze", "squeeze", "expand"}


class Solver:
    """Computes the solved axis of each class of unified axes.

    Args:
        held: the axes of tensors that a model holds. If nothing makes an atom of these axes, it must keep its size.
        made_axes: (module, axis) for each axis that a module makes.
        ordered: (axis, why) for each axis whose positions must stay in order.
        whole: why atoms must keep their size, if they have no other reason.
        steps: the operations.
    """

    def __init__(
        self,
        held: Iterable[Sequence[axes.Axis]] = (),
        made_axes: Iterable[tuple[str, axes.Axis]] = (),
        ordered: Iterable[tuple[axes.Axis, str]] = (),
        whole: Mapping[axes.Axis, Why] = MappingProxyType({}),
        steps: Iterable[Step[axes.Axis]] = (),
    ):
        self._whole = whole
        self._known: dict[axes.Axis, Axis] = {}
        self._held = {atom for tensor_axes in held for axis in tensor_axes for atom in axes.atoms(axis)}
        self._order: dict[axes.Axis, str] = {}
        for axis, why in ordered:
            for atom in axes.atoms(axis):
                self._order.setdefault(atom, why)
        self._makers: dict[axes.Axis, dict[str, None]] = {}
        made_axes = list(made_axes)
        # atoms that are part of a digit in an axis of several digits
        inside = {
            atom
            for axis in (*(axis for _, axis in made_axes), *(axis for tensor_axes in held for axis in tensor_axes))
            for term in axes.terms(axis)
            if len(parts := axes.digits(term)) > 1
            for part in parts
            for atom in axes.atoms(part)
        }
        for module, axis in made_axes:
            for atom in axes.atoms(axis):
                self._makers.setdefault(atom, {})[module] = None
        alone = {axes.find(axis) for _, axis in made_axes} - inside - set(_matrix_counts(steps, self._makers.keys()))
        self._no_heads = {axis for axis in alone if axis.kind == "atom"}  # channels that are not part of a head

    def __call__(self, axis: axes.Axis) -> Axis:
        axis = axes.find(axis)
        if axis not in self._known:
            self._known[axis] = self._new(axis)
        return self._known[axis]

    def all(self, tensor_axes: Sequence[axes.Axis]) -> Axes:
        return tuple(map(self, tensor_axes))

    def step(self, step: Step[axes.Axis]) -> Step[Axis]:
        def number(axis: Any) -> Any:
            return list(self.all(axis)) if isinstance(axis, list) else self(axis)

        return Step(
            step.name,
            step.module,
            [self.all(tensor_axes) for tensor_axes in step.inputs],
            [self.all(tensor_axes) for tensor_axes in step.outputs],
            step.sources,
            {key: number(axis) for key, axis in step.numbers.items()},
            step.scalars,
            list(self.all(step.summed)),
            step.decided,
        )

    def _new(self, axis: axes.Axis) -> Axis:
        if axis.kind == "atom":
            makers = tuple(self._makers.get(axis, ()))
            why = axis.why or self._whole.get(axis)
            if why is None and not makers and axis in self._held:
                why = Why(ReasonKind.UNMADE, "no layer makes it")
            order = why.text if why else self._order.get(axis, "")
            grouping = "" if axis.grouping == "heads" and axis in self._no_heads else axis.grouping
            return Atom(axis.size, why, grouping, order, makers)
        if axis.kind == "product":
            parts = tuple(part for digit in axes.digits(axis) for part in digits(self(digit)))
            return parts[0] if len(parts) == 1 else Product(parts)
        flat = tuple(part for term in axes.terms(axis) for part in terms(self(term)))
        return flat[0] if len(flat) == 1 else Sum(flat)


def _matrix_counts(steps: Iterable[Step[axes.Axis]], made_atoms: Collection[axes.Axis]) -> Iterator[axes.Axis]:
    """Yield the atoms that count matrices (as experts) from features to features."""
    for step in steps:
        if step.name in ("bmm", "baddbmm"):
            _, read, features = step.inputs[-1]
            if all(atom in made_atoms for axis in (read, features) for atom in axes.atoms(axis)) and features.size > 1:
                yield from axes.atoms(step.outputs[0][0])


SPLITS = {"split", "unsafe_split", "split_with_sizes", "unsafe_split_with_sizes", "chunk", "unbind", "slice"}


def named_widths(solution: Solution) -> dict[str, Atom]:
    """Return a model's widths by name.

    The name is of the axis that the width shares with the fewest others.
    """
    widths = {}
    for atom, members in solution.members.items():
        if atom.size > 1:
            places = [(key, axis, parts_of(solution.tensors[key][axis])) for key, axis in members]
            key, axis, parts = min(places, key=lambda place: len(place[2]))
            part = f":{parts.index(atom)}" if len(parts) > 1 else ""
            widths[f"{join(*key)}:{axis}{part}"] = atom
    return widths


def parts_of(axis: Axis) -> list[Atom]:
    """Return the widths that lie along an axis, from the left."""
    return [atom for atom in dict.fromkeys(atoms(axis)) if atom.size > 1]


def occurrences(axis: Axis, atom: Atom) -> Tensor:
    """Return the places of an atom's positions on an axis: [times, atom.size].

    >>> heads, width = Atom(2), Atom(3)
    >>> occurrences(Product((heads, width)), width).tolist()
    [[0, 1, 2], [3, 4, 5]]
    >>> occurrences(Product((heads, width)), heads).tolist()
    [[0, 3], [1, 4], [2, 5]]
    >>> occurrences(Sum((heads, heads, width)), width).tolist()
    [[4, 5, 6]]
    """
    return torch.cat([torch.empty(0, atom.size, dtype=torch.long), *_occurrences(axis, atom)])


def _occurrences(axis: Axis, atom: Atom) -> Iterator[Tensor]:
    if axis is atom:
        yield torch.arange(atom.size)[None]
    elif isinstance(axis, Sum):
        start = 0
        for part in axis.parts:
            yield from (start + places for places in _occurrences(part, atom))
            start += part.size
    elif isinstance(axis, Product):
        major, minor = 1, axis.size
        for digit in axis.parts:
            minor //= digit.size
            others = (torch.arange(major)[:, None] * digit.size * minor + torch.arange(minor)).view(-1, 1, 1)
            yield from ((others + places * minor).flatten(0, 1) for places in _occurrences(digit, atom))
            major *= digit.size


def onto_atoms(axis: Axis, values: Tensor) -> dict[Atom, Tensor]:
    """Sum the numbers of an axis's positions for each position of its atoms.

    >>> heads, width = Atom(2), Atom(3)
    >>> list(onto_atoms(Product((heads, width)), torch.arange(6)).values())
    [tensor([ 3, 12]), tensor([3, 5, 7])]
    """
    return {atom: values[occurrences(axis, atom)].sum(0) for atom in dict.fromkeys(atoms(axis))}

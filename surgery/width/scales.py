"""Numbers in the code that scale sums: which follow a sum's length, and how.

A network divides the products of queries and keys by the root of their length. It multiplies weights by one over
such a root, and embeddings by the root of their width. In the code these are plain numbers. Such a number follows if
it is, by its value, a power of the length of what it scales; any other one stays.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from surgery.forward import named_tensors
from surgery.names import join
from surgery.width.flow import ATTENTION, LENGTHS, LOOKUPS, Contraction, Flow
from surgery.width.provenance import Place, places
from surgery.width.solve import SUMS, Axis, Choice, Solution, digits, size_of
from surgery.width.steps import Step

_NEAR = 1e-6
_ROOT = math.sqrt(2)
_FACTORS = (_ROOT, 1 / _ROOT, 2.0, 0.5)
_ROOTS = {"sqrt", "pow", "add", "clamp", "clamp_min", "maximum"}  # between a sum of squares and the length
_LEAST = 8  # a layer's sum that is shorter may equal another number by chance

Divisors: TypeAlias = Iterable[tuple[float, float, float]]
"""(factor, new factor, power): sums of products are divided by factor * length ** power. The first that fits counts."""


class Scaling(NamedTuple):
    """A number that scales a sum of products of another length.

    Attributes:
        step: the number of the step that computes with it.
        value: the number; None if it is not known.
        new: what it becomes; None if it is no power of the length, and stays.
        contraction: the sum.
        held: (module, attribute) of the tensor that holds it, None for a plain number.
        module: the module whose code computes with it.
        places: the attributes that it is computed of.
    """

    step: int
    value: float | None
    new: float | None
    contraction: Contraction
    held: tuple[str, str] | None
    module: str
    places: Sequence[Place] = ()

    def __str__(self) -> str:
        number = "a number on the meta device" if self.value is None else f"{self.value:.6g}"
        attributes = ", ".join(join(*place[:2]) for place in self.places)
        where = join(*self.held) if self.held else attributes
        where = where or f"a constant in the code of {self.module or 'the model itself'}"
        (old, new), *_ = self.contraction.lengths
        return f"{number} ({where}), for sums of {old} products, {new} in the narrow model"


class Held(NamedTuple):
    """The number that a tensor holds, in all of its elements.

    Attributes:
        value: None on the meta device.
        precision: of the tensor's dtype, relative to the number.
    """

    value: float | None
    precision: float


def held_numbers(model: nn.Module) -> dict[tuple[str, str], Held]:
    """Return by (module, attribute) the one number that each untrained tensor holds.

    These are buffers and plain tensors with all elements the same.

    >>> held_numbers(nn.PReLU()), list(held_numbers(nn.BatchNorm1d(1)))
    ({}, [('', 'running_mean'), ('', 'running_var')])
    """
    numbers = {}
    for key, tensor in named_tensors(model):
        if tensor.is_floating_point() and not isinstance(tensor, nn.Parameter) and is_of_one_number(tensor):
            precision = max(_NEAR, torch.finfo(tensor.dtype).eps)
            numbers[key] = Held(None if tensor.is_meta else tensor.flatten()[0].item(), precision)
    return numbers


def is_of_one_number(tensor: Tensor) -> bool:
    """Return whether all elements of a tensor are one number, but not 0.

    On the meta device only a single element is known to be.
    """
    if tensor.numel() < 2 or tensor.is_meta or tensor.layout is not torch.strided:
        return tensor.numel() == 1
    first = tensor.flatten()[0]
    return bool(first != 0) and bool((tensor == first).all())


class Scales:
    """The numbers of a trace that scale sums or their factors, and their new values.

    Args:
        solution, choice: the axes of a model, and which positions stay.
        held: by (module, attribute) the number that a tensor holds in all of its elements.
    """

    def __init__(
        self,
        solution: Solution,
        choice: Choice,
        held: Mapping[tuple[str, str], Held] | None = None,
    ):
        self.steps, self.choice, self.held = solution.steps, choice, held or {}
        self._flow, self._reads = Flow(self.steps, choice), solution.reads

    def of(self, number: int) -> Iterator[tuple[float, float]]:
        """Yield (number, new value) of what a step computes with.

        The default scale of attention is one.
        """
        step = self.steps[number]
        for value in (value for value in step.scalars.values() if isinstance(value, float)):
            yield from ((value, new) for new in self.find_new_values(number, value))
            scaled = [contraction for contraction, before in self.find_scaled(number) if before]
            for old, new in {contraction.lengths[0] for contraction in scaled if not contraction.learned}:
                if _is(value, old**-0.25):  # the root of the default
                    yield old**-0.5, new**-0.5
        if step.name == ATTENTION and (attention := self._flow.contractions.get(number)):
            (old, new), *_ = attention.lengths
            yield old**-0.5, new**-0.5

    def find_new_values(self, number: int, value: float) -> set[float]:
        """Return the new values of a step's number; none if it is no power of a length.

        torch's own attention computes with the root of the number that it is given.
        """
        step = self.steps[number]
        used = [scalar for scalar in step.scalars.values() if type(scalar) in (int, float)]
        is_used = value > 0 and any(_is(scalar, value) or _is(scalar, math.sqrt(value)) for scalar in used)
        options = self.find_scaled(number) if is_used else []
        new_values = {new for scaled, before in options if (new := _renew(value, scaled, before, step)) is not None}
        if step.name in ("mul", "div"):
            up = 0.5 if step.name == "mul" else -0.5
            if not new_values and any(before and not scaled.learned for scaled, before in options):
                # the products of channel attention sum over tokens, and its code takes the width of a head even so
                last = dict.fromkeys(part for axes in step.inputs if axes for part in (axes[-1], *digits(axes[-1])))
                new_values = {self._size(axis) ** -up for axis in last if axis.size > 1 and _is(value, axis.size**-up)}
            vectors = self._find_vectors(step)
            new_values |= {self._size(axis) ** power for axis, power in vectors if _is(value, axis.size**power)}
            # a sum is divided by how many it has, or multiplied by one over that
            summed = [(axis, power) for axis in self._find_summed(step) for power in (1, -1)]
            new_values |= {self._size(axis) ** power for axis, power in summed if _is(value, axis.size**power)}
        return new_values

    def find_scaled(self, number: int) -> list[tuple[Contraction, bool]]:
        """Return the sums that a step scales, and whether it scales one of the factors."""
        flow = self._flow
        if contraction := flow.contractions.get(number):
            return [] if contraction.learned or flow.is_cosine(contraction) else [(contraction, False)]
        if self.steps[number].name not in ("mul", "div"):
            return []
        numbers = [(n, False) for n in flow.behind[number]] + [(n, True) for n in flow.ahead[number]]
        sums = [(flow.contractions[n], before) for n, before in numbers]
        return [(scaled, before) for scaled, before in sums if not flow.is_cosine(scaled)]

    def lengths(self, number: int) -> dict[int, set[int]]:
        """Return the lengths of sums that a step scales, or feeds, and their new values.

        An attribute that is as large as one, and by which the code divides, is that length. Short ones may well be
        something else where a layer has scales in its weights.
        """
        flow, new_lengths = self._flow, dict[int, set[int]]()
        for axis in self.steps[number].summed:
            new_lengths.setdefault(axis.size, set()).add(self._size(axis))
        scaled = self.find_scaled(number) if self.steps[number].name in ("mul", "div") else []
        later = (flow.contractions[reader] for reader in flow.readers.get(number, ()))
        for contraction in (*(contraction for contraction, _ in scaled), *later):
            for old, new in contraction.lengths:
                if not contraction.learned or old >= _LEAST:
                    new_lengths.setdefault(old, set()).add(new)
        return new_lengths

    def scalings(self) -> Iterator[Scaling]:
        """Yield the numbers that scale a sum whose length changes.

        A number that is no power of the length is left out if it only doubles (|q - k| ** 2), if a layer with weights
        computes the sum, if another number that scales the sum is a power of the length, or if a factor was divided by
        its own length.
        """
        numbers = range(len(self.steps))
        candidates = [scaling for number in numbers for scaling in self._scalings_of_products(number)]
        right = {scaling.contraction.step for scaling in candidates if scaling.new is not None}
        for scaling in candidates:
            contraction = scaling.contraction
            is_doubled = scaling.held is None and scaling.value in (2, -1, -2)  # as in |q - k| ** 2
            if scaling.new is not None or not (
                is_doubled or contraction.learned or contraction.step in right or self._flow.is_normalised(contraction)
            ):
                yield scaling
        for number in numbers:
            yield from self._scalings_of_vectors(number)

    def _scalings_of_products(self, number: int) -> Iterator[Scaling]:
        """Yield the numbers with which a step scales sums of products.

        Outputs of layers have no scale of their own.
        """
        step = self.steps[number]
        for contraction, before in self.find_scaled(number):
            if contraction.changes and (before or not contraction.learned):
                for key, value, precision in self._numbers(step):
                    new = None if value is None else _renew(value, contraction, before, step, precision)
                    yield Scaling(number, value, new, contraction, key, step.module, self._places(number))
        divides = step.name == "div" and step.inputs[0]
        for value in (v for v in step.scalars.values() if divides and type(v) in (int, float) and v >= _LEAST):
            for layer_sum in (self._flow.contractions[n] for n in self._flow.around(number)):
                if layer_sum.learned and (new := dict(layer_sum.lengths).get(value, value)) != value:
                    yield Scaling(number, value, new, layer_sum, None, step.module, self._places(number))

    def _scalings_of_vectors(self, number: int) -> Iterator[Scaling]:
        """Yield the numbers that scale embeddings, unit vectors or lengths of vectors, and change with them."""
        step = self.steps[number]
        for key, value, precision in self._numbers(step) if step.name in ("mul", "div") else ():
            for axis, power in self._find_vectors(step):
                old, new = axis.size, self._size(axis)
                if old != new and (value is None or _is(value, old**power, precision)):
                    contraction = Contraction(number, ((old, new),), (1, 1), False)
                    follows = None if value is None else new**power
                    yield Scaling(number, value, follows, contraction, key, step.module)

    def _places(self, number: int) -> list[Place]:
        """Return the attributes that a step's number is computed of."""
        expressions = (read.number for read in self._reads if number in read.steps)
        return list(dict.fromkeys(place for expression in expressions for place in places(expression)))

    def _numbers(self, step: Step[Axis]) -> Iterator[tuple[Any, float | None, float]]:
        """Yield (tensor's key or None, number, precision) of what a step scales with."""
        names = step.scalars if step.name in ("mul", "div") else {"alpha", "scale"} & step.scalars.keys()
        for value in (step.scalars[name] for name in names):
            if type(value) in (int, float) and value != 1:
                yield None, value, _NEAR
        for key in step.sources if step.name in ("mul", "div") else ():
            if key in self.held and self.held[key].value != 1:
                yield key, *self.held[key]

    def _size(self, axis: Axis) -> int:
        return size_of(axis, self.choice)

    def _find_maker(self, step: Step[Axis]) -> Step[Axis] | None:
        maker = self._flow.find_maker(step.sources[0]) if step.sources else None
        return None if maker is None else self.steps[maker]

    def _unit_length(self, step: Step[Axis]) -> Iterator[Axis]:
        """Yield the widths of embeddings, and of unit vectors, that a step scales."""
        maker = self._find_maker(step)
        if maker and maker.name in LOOKUPS | {"div"}:
            for axes in step.inputs:
                yield from dict.fromkeys([axes[-1], *digits(axes[-1])] if axes else [])

    def _find_vectors(self, step: Step[Axis]) -> Iterator[tuple[Axis, float]]:
        """Yield the widths of vectors that a step scales, or their lengths, and the power that would scale them."""
        up = 0.5 if step.name == "mul" else -0.5
        yield from ((axis, up) for axis in self._unit_length(step))
        yield from ((axis, -up) for axis in self._find_measured(step))

    def _find_measured(self, step: Step[Axis]) -> Iterator[Axis]:
        """Yield the widths whose vectors' length a step scales, as in RMS norms."""
        maker = self._find_maker(step)
        while maker and maker.name in _ROOTS:
            maker = self._find_maker(maker)
        if maker and maker.name in LENGTHS and maker.inputs and maker.inputs[0]:
            dims = maker.scalars.get("dim")
            for place in dims if isinstance(dims, tuple | list) else [] if dims is None else [dims]:
                axis = maker.inputs[0][place]
                yield from dict.fromkeys([axis, *digits(axis)])

    def _find_summed(self, step: Step[Axis]) -> Sequence[Axis]:
        """Return the axes summed in a step's input, except by layers with weights."""
        before = self._find_maker(step)
        by_a_layer = before is not None and before.name in SUMS and any(map(self._flow.is_of_weights, before.sources))
        return () if by_a_layer else step.summed


def _is(value: float, other: float, precision: float = _NEAR) -> bool:
    return math.isclose(value, other, rel_tol=precision)


def _divisors(contraction: Contraction, before: bool) -> Divisors:
    """Yield what sums of one kind are divided by.

    Args:
        before: whether one of the factors is scaled, rather than the sum.
    """
    yield 1, 1, 0.5
    if contraction.learned and not before:  # any other number is as likely to be a share of a residual branch
        return
    yield 1, 1, 1
    if not contraction.learned:
        yield 1, 1, 0.25
        (old, new) = contraction.heads
        for power in (0.5, 1, -0.5, -1) if old > 1 else ():
            yield old**power, new**power, 0.5
    for factor in _FACTORS:
        yield factor, factor, 0.5
    for factor in _FACTORS if not contraction.learned else ():
        yield factor, factor, 1


def _renew(
    value: float, contraction: Contraction, before: bool, step: Step[Axis], precision: float = _NEAR
) -> float | None:
    """Return a number's new value as a sum's scale; None if it is no power of length."""
    if value <= 0 or value == 1:
        return None
    divisor = value if step.name == "div" else 1 / value
    for factor, new_factor, power in _divisors(contraction, before):
        for old, new in contraction.lengths:
            if old > 1 and _is(divisor, factor * old**power, precision):
                return new_factor * new**power if step.name == "div" else new**-power / new_factor
    return None

"""Numbers of the code that scale what is summed: which of them follow the length of the sum, and what they become.

A network divides the products of queries and keys by the root of their length, multiplies weights by the root of the
inverse, embeddings by the root of their width. In the code these are plain numbers. Such a number follows if it is, by
its value, a power of the length of what it scales; any other one stays.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn

from surgery.forward import named_tensors
from surgery.names import joined
from surgery.width.replay import of_weights
from surgery.width.rules.registry import RULES
from surgery.width.solve import SUMS, Axis, Choice, Solution, atoms, digits, factors, size_of
from surgery.width.steps import Step

_ATTENTION = "scaled_dot_product_attention"
_LOOKUPS = {"embedding", "index", "index_select", "gather"}
_NORMS = {"native_layer_norm", "native_group_norm", "_fused_rms_norm", "rms_norm"}
_ENDS = {"_softmax", "_log_softmax", "_safe_softmax", "cumsum", *_NORMS}  # what they return has another scale
_KEEPS_SCALE = {"add", "sub", "mul", "div", "masked_fill", "where", "neg"}

_NEAR = 1e-6
_ROOT = math.sqrt(2)
_FACTORS = (_ROOT, 1 / _ROOT, 2.0, 0.5)

Divisors: TypeAlias = Iterable[tuple[float, float, float]]
"""(factor, new factor, power): sums of products are divided by factor * length ** power. The first that fits counts."""


class Contraction(NamedTuple):
    """A sum of products.

    Attributes:
        step: the number of the step that computes it.
        lengths: (old, new): over how many products it sums. For a convolution also with the positions of its window.
        heads: (old, new): how many heads lie beside each other.
        learned: whether one of the factors consists of weights.
    """

    step: int
    lengths: tuple[tuple[int, int], ...]
    heads: tuple[int, int]
    learned: bool

    @property
    def changes(self) -> bool:
        """Whether the narrow model sums over another number of products."""
        return any(old != new for old, new in self.lengths)

    def divisors(self, before: bool) -> Divisors:
        """Yield what sums of this kind are divided by.

        Args:
            before: whether one of the factors is scaled, rather than the sum.
        """
        yield 1, 1, 0.5
        if self.learned and not before:  # any other number is as likely to be a share of a residual branch
            return
        yield 1, 1, 1
        if not self.learned:
            yield 1, 1, 0.25
            (old, new) = self.heads
            for power in (0.5, 1, -0.5, -1) if old > 1 else ():
                yield old**power, new**power, 0.5
        for factor in _FACTORS:
            yield factor, factor, 0.5
        for factor in _FACTORS if not self.learned else ():
            yield factor, factor, 1


class Scaling(NamedTuple):
    """A number that scales a sum of products whose length changes.

    Attributes:
        step: the number of the step that computes with it.
        value: the number; None if it is not known.
        new: what it becomes; None if it is no power of the length, and stays.
        contraction: the sum.
        held: (module, attribute) of the tensor that holds it, None for a plain number.
        module: whose code computes with it.
    """

    step: int
    value: float | None
    new: float | None
    contraction: Contraction
    held: tuple[str, str] | None
    module: str

    def __str__(self) -> str:
        number = "a number on the meta device" if self.value is None else f"{self.value:.6g}"
        where = joined(*self.held) if self.held else f"a constant in the code of {self.module or 'the model itself'}"
        (old, new), *_ = self.contraction.lengths
        return f"{number} ({where}), for sums of {old} products, {new} in the narrow model"


class Held(NamedTuple):
    """The number that a tensor of one element holds.

    Attributes:
        value: None on the meta device.
        precision: of the tensor's dtype, relative to the number.
    """

    value: float | None
    precision: float


def held_numbers(model: nn.Module) -> dict[tuple[str, str], Held]:
    """Return the numbers that buffers and plain tensors of one element hold, by (module, attribute).

    What is trained is none.

    >>> held_numbers(nn.PReLU()), list(held_numbers(nn.BatchNorm1d(1)))
    ({}, [('', 'running_mean'), ('', 'running_var')])
    """
    return {
        key: Held(None if tensor.is_meta else tensor.item(), max(_NEAR, torch.finfo(tensor.dtype).eps))
        for key, tensor in named_tensors(model)
        if tensor.numel() == 1 and tensor.is_floating_point() and not isinstance(tensor, nn.Parameter)
    }


class Scales:
    """The numbers of a trace that scale sums, or what will be summed, and what they become.

    Args:
        solution, choice: the axes of a model, and which positions stay.
        held: by (module, attribute) the number that a tensor of one element holds.
    """

    def __init__(
        self,
        solution: Solution,
        choice: Choice,
        held: Mapping[tuple[str, str], Held] | None = None,
    ):
        self.steps, self.choice, self.held = solution.steps, choice, held or {}
        self._weights = of_weights(self.steps)
        self._contractions = dict(self._found())
        self._behind, self._ahead = self._flow_on(), self._flow_back()

    def of(self, number: int) -> Iterator[tuple[float, float]]:
        """Yield (number, what it becomes) of what a step computes with; attention's default scale is one."""
        step = self.steps[number]
        for value in (value for value in step.scalars.values() if isinstance(value, float)):
            yield from ((value, new) for new in self.become(number, value))
            for old, new in {one.lengths[0] for one, before in self.scaled(number) if before and not one.learned}:
                if _is(value, old**-0.25):  # the root of the default
                    yield old**-0.5, new**-0.5
        if step.name == _ATTENTION and (own := self._contractions.get(number)):
            (old, new), *_ = own.lengths
            yield old**-0.5, new**-0.5

    def become(self, number: int, value: float) -> set[float]:
        """Return what a number becomes that a step computes with; nothing if it is no power of a length.

        torch's own attention computes with the root of the number that it is given.
        """
        step = self.steps[number]
        used = [one for one in step.scalars.values() if type(one) in (int, float)]
        is_used = value > 0 and any(_is(one, value) or _is(one, math.sqrt(value)) for one in used)
        options = self.scaled(number) if is_used else []
        found = {new for one, before in options if (new := _renewed(value, one, before, step)) is not None}
        if step.name in ("mul", "div"):
            up = 0.5 if step.name == "mul" else -0.5
            if not found and any(before and not one.learned for one, before in options):
                # the products of channel attention sum over tokens, and its code takes the width of a head even so
                last = dict.fromkeys(part for axes in step.inputs if axes for part in (axes[-1], *digits(axes[-1])))
                found = {self._size(axis) ** -up for axis in last if axis.size > 1 and _is(value, axis.size**-up)}
            found |= {self._size(axis) ** up for axis in self._unit_length(step) if _is(value, axis.size**up)}
            # a sum is divided by how many it has
            found |= {self._size(axis) for axis in self._summed(step) if axis.size == value}
        return found

    def scaled(self, number: int) -> list[tuple[Contraction, bool]]:
        """Return the sums that a number scales with which a step computes, and whether it scales one of the factors."""
        if own := self._contractions.get(number):
            return [] if own.learned else [(own, False)]
        if self.steps[number].name not in ("mul", "div"):
            return []
        behind = [(self._contractions[one], False) for one in self._behind[number]]
        return behind + [(self._contractions[one], True) for one in self._ahead[number]]

    def scalings(self) -> Iterator[Scaling]:
        """Yield the numbers that scale a sum whose length changes.

        Numbers that are no powers of it count for products of computed numbers, unless another one is, or the products
        are of numbers that were divided by their length.
        """
        numbers = range(len(self.steps))
        found = [one for number in numbers for one in self._scalings_of_products(number)]
        right = {one.contraction.step for one in found if one.new is not None}
        for one in found:
            own, is_doubled = one.contraction, one.held is None and one.value in (2, -1, -2)  # as in |q - k| ** 2
            if one.new is not None or not (is_doubled or own.learned or own.step in right or self._is_normalised(own)):
                yield one
        for number in numbers:
            yield from self._scalings_of_vectors(number)

    def _scalings_of_products(self, number: int) -> Iterator[Scaling]:
        """Yield the numbers with which a step scales sums of products; outputs of layers have no scale of their own."""
        step = self.steps[number]
        for contraction, before in self.scaled(number):
            if contraction.changes and (before or not contraction.learned):
                for key, value, precision in self._numbers(step):
                    new = None if value is None else _renewed(value, contraction, before, step, precision)
                    yield Scaling(number, value, new, contraction, key, step.module)

    def _scalings_of_vectors(self, number: int) -> Iterator[Scaling]:
        """Yield the numbers with which a step scales embeddings and vectors of length 1, if they follow."""
        step = self.steps[number]
        power = 0.5 if step.name == "mul" else -0.5
        for key, value, precision in self._numbers(step) if step.name in ("mul", "div") else ():
            for axis in self._unit_length(step):
                old, new = axis.size, self._size(axis)
                if old != new and (value is None or _is(value, old**power, precision)):
                    contraction = Contraction(number, ((old, new),), (1, 1), False)
                    follows = None if value is None else new**power
                    yield Scaling(number, value, follows, contraction, key, step.module)

    def _numbers(self, step: Step[Axis]) -> Iterator[tuple[Any, float | None, float]]:
        """Yield (where, number, precision) of what a step scales with: where a tensor holds it, or None."""
        names = step.scalars if step.name in ("mul", "div") else {"alpha", "scale"} & step.scalars.keys()
        for value in (step.scalars[name] for name in names):
            if type(value) in (int, float) and value != 1:
                yield None, value, _NEAR
        for key in step.sources if step.name in ("mul", "div") else ():
            if key in self.held and self.held[key].value != 1:
                yield key, *self.held[key]

    def _is_normalised(self, contraction: Contraction) -> bool:
        """Return whether a factor of a sum was divided by its own length, so that the sum is of no other scale."""
        step = self.steps[contraction.step]
        makers = [self._made_by(step.sources[which]) for which, _, _ in self._factors(contraction.step)]
        return any(made is not None and (made.name in _NORMS or _by_tensor(made)) for made in makers)

    def _size(self, axis: Axis) -> int:
        return size_of(axis, self.choice)

    def _factors(self, number: int) -> list[tuple[int, int, list[Any]]]:
        """Return (input, axis, atoms) of the two axes that a step sums together."""
        step = self.steps[number]
        if step.name == _ATTENTION:
            return [(which, len(step.inputs[which]) - 1, [*atoms(step.inputs[which][-1])]) for which in (0, 1)]
        return [*factors(step)]

    def _found(self) -> Iterator[tuple[int, Contraction]]:
        """Yield the sums of products by the number of their step."""
        for number, step in enumerate(self.steps):
            if not (summed := self._factors(number)):
                continue
            first, axis, parts = summed[0]
            if "convolution" in step.name:
                length = (math.prod(a.size for a in parts), math.prod(size_of(a, self.choice) for a in parts))
                window = math.prod(a.size for a in step.inputs[summed[1][0]][2:])
                lengths = [length, (length[0] * window, length[1] * window)]
            else:
                along = step.inputs[first][axis]
                lengths = [(along.size, self._size(along))]
            around = (a for which, _, _ in summed for one in step.inputs[which] for a in atoms(one))
            heads = {a for a in around if a.grouping == "heads" and not a.why}.difference(parts)
            counted = math.prod(a.size for a in heads), math.prod(size_of(a, self.choice) for a in heads)
            learned = any(self._is_of_weights(step.sources[which]) for which, _, _ in summed)
            yield number, Contraction(number, tuple(lengths), counted, learned)

    def _flow_on(self) -> list[frozenset[int]]:
        """Return by step the sums that it takes, by their numbers: those that layers compute up to an addition."""
        given: list[frozenset[int]] = []  # by step the sums that its result holds
        taken: list[frozenset[int]] = []
        none: frozenset[int] = frozenset()
        for number, step in enumerate(self.steps):
            before = [given[one[0]] if _is_step(one) else none for one in step.sources]
            carries = step.name not in _LOOKUPS and (rule := RULES.get(step.name)) and rule.carries
            several = none.union(*before)
            if number in self._contractions:
                taken.append(none)
                given.append(frozenset({number}))
            elif carries:
                taken.append(none)
                given.append(before[0] if before else none)
            elif step.name in _KEEPS_SCALE:
                taken.append(several)
                given.append(frozenset(one for one in several if not self._contractions[one].learned))
            else:
                taken.append(none)
                given.append(none)
        return taken

    def _flow_back(self) -> list[frozenset[int]]:
        """Return by step the sums of which its result is a factor; weights count for those that layers compute."""
        ahead = [frozenset[int]() for _ in self.steps]
        for number, step in reversed([*enumerate(self.steps)]):
            own = self._contractions.get(number)
            if own is not None:
                for which, _, _ in self._factors(number):
                    source = step.sources[which]
                    if _is_step(source) and (not own.learned or self._weights[source[0]]):
                        ahead[source[0]] |= {number}
            elif ahead[number] and step.name not in _ENDS:
                for source in filter(_is_step, step.sources):
                    ahead[source[0]] |= {
                        one for one in ahead[number] if self._weights[source[0]] or not self._contractions[one].learned
                    }
        return ahead

    def _is_of_weights(self, source: Any) -> bool:
        return source is not None and (isinstance(source[0], str) or self._weights[source[0]])

    def _unit_length(self, step: Step[Axis]) -> Iterator[Axis]:
        """Yield the widths of embeddings, and of vectors that were divided by their length, that a step scales."""
        made = self._made_by(step.sources[0]) if step.sources else None
        if made and made.name in _LOOKUPS | {"div"}:
            for found in step.inputs:
                yield from dict.fromkeys([found[-1], *digits(found[-1])] if found else [])

    def _made_by(self, source: Any) -> Step[Axis] | None:
        """Return the step that made a tensor, other than by putting it elsewhere."""
        while _is_step(source):
            step = self.steps[source[0]]
            if not ((rule := RULES.get(step.name)) and rule.carries and step.name not in _LOOKUPS):
                return step
            source = step.sources[0] if step.sources else None
        return None

    def _summed(self, step: Step[Axis]) -> Sequence[Axis]:
        """Return the axes that were summed to compute what a step takes, but by layers with weights."""
        before = self._made_by(step.sources[0]) if step.sources else None
        by_a_layer = before is not None and before.name in SUMS and any(map(self._is_of_weights, before.sources))
        return () if by_a_layer else step.summed


def _is_step(source: Any) -> bool:
    return source is not None and not isinstance(source[0], str)


def _by_tensor(step: Step[Axis]) -> bool:
    """Return whether a step divides a tensor by another one."""
    return step.name == "div" and len(step.inputs) == 2


def _is(value: float, other: float, precision: float = _NEAR) -> bool:
    return math.isclose(value, other, rel_tol=precision)


def _renewed(
    value: float, contraction: Contraction, before: bool, step: Step[Axis], precision: float = _NEAR
) -> float | None:
    """Return what a number becomes that scales a sum; None if it is no power of the sum's length."""
    if value <= 0 or value == 1:
        return None
    divisor = value if step.name == "div" else 1 / value
    for factor, new_factor, power in contraction.divisors(before):
        for old, new in contraction.lengths:
            if old > 1 and _is(divisor, factor * old**power, precision):
                return new_factor * new**power if step.name == "div" else new**-power / new_factor
    return None

"""Numbers of the code that are roots of widths: what they scale shows which of them follow a width."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from surgery.width.replay import of_weights
from surgery.width.rules.registry import RULES
from surgery.width.solve import SUMS, Axis, Choice, Solution, digits, factors, size_of
from surgery.width.steps import Step

_ATTENTION = "scaled_dot_product_attention"
_LOOKUPS = {"embedding", "index", "index_select", "gather"}
_MIXED = {"_softmax", "_log_softmax", "_safe_softmax", "native_layer_norm", "native_group_norm", "cumsum"}


class Scales:
    """Numbers that scale sums, or what will be summed: roots of widths, which become those of the new widths.

    A number that only happens to be such a root (the scaling of an adapter, a temperature, a factor of a residual
    branch) is none: what counts is what it multiplies. Those are sums that are divided by the root of their length;
    queries and keys, which are multiplied with computed numbers later; weights; and, the other way, embeddings and
    normalised vectors.
    """

    def __init__(self, solution: Solution, choice: Choice):
        self.steps, self.choice = solution.steps, choice
        self._weights = of_weights(solution.steps)
        self._compared = [False] * len(self.steps)  # by step whether what it makes is multiplied with computed numbers
        for number, step in reversed(list(enumerate(self.steps))):
            after = self._compared[number]
            taken = (0, 1) if step.name == _ATTENTION else [which for which, _, _ in factors(step)]
            if taken:
                after = not any(self._is_of_weights(step.sources[which]) for which in taken)
            for source in step.sources if after and step.name not in _MIXED else ():
                if source is not None and not isinstance(source[0], str):
                    self._compared[source[0]] = True

    def of(self, number: int) -> Iterator[tuple[float, float]]:
        """(number, what it becomes) of a step; attention's default scale is one."""
        step, last = self.steps[number], [found[-1] for found in self.steps[number].inputs if found]
        used = [value for value in step.scalars.values() if isinstance(value, float)]
        if step.name == _ATTENTION:
            for axis in last[:2]:  # queries and keys are multiplied; values may have a width of their own
                yield from self._renewed([*used, last[0].size ** -0.5], axis, -0.5)
        elif step.name in SUMS:
            learned = any(map(self._is_of_weights, step.sources))
            for axis in () if learned else last:
                yield from self._renewed(used, axis, -0.5)
        elif step.name in ("mul", "div"):
            down, up = (-0.5, 0.5) if step.name == "mul" else (0.5, -0.5)
            for axis in step.summed:
                yield from self._renewed(used, axis, down)
            learned = any(map(self._is_of_weights, step.sources))
            made_by = self._made_by(step)
            for axis in last:
                for part in dict.fromkeys([axis, *digits(axis)]):  # of several heads side by side the width of one
                    if learned or self._compared[number]:
                        yield from self._renewed(used, part, down)
                        yield from self._renewed_root(used, part)
                if made_by and made_by.name in _LOOKUPS | {"div"}:
                    yield from self._renewed(used, axis, up)

    def become(self, number: int, value: float) -> set[float]:
        """Return what a number becomes that a step computes with; nothing if it is no root of a width."""
        found = {new for old, new in self.of(number) if math.isclose(old, value, rel_tol=1e-9)}
        step = self.steps[number]
        if step.name in ("mul", "div"):  # a sum is divided by how many it has
            found |= {size_of(axis, self.choice) for axis in self.summed(step) if axis.size == value}
        return found

    def _renewed(self, used: Sequence[float], axis: Axis, power: float) -> Iterator[tuple[float, float]]:
        new = size_of(axis, self.choice)
        for value in used if axis.size > 1 else ():
            if math.isclose(value, axis.size**power, rel_tol=1e-9):
                yield value, new**power

    def _renewed_root(self, used: Sequence[float], axis: Axis) -> Iterator[tuple[float, float]]:
        """torch's own attention scales queries and (transposed) keys by the root of the scale."""
        new = size_of(axis, self.choice)
        for value in used if new < axis.size else ():
            if math.isclose(value, axis.size**-0.25, rel_tol=1e-9):
                yield axis.size**-0.5, new**-0.5

    def _is_of_weights(self, source: Any) -> bool:
        return source is not None and (isinstance(source[0], str) or self._weights[source[0]])

    def _made_by(self, step: Step[Axis]) -> Step[Axis] | None:
        """The step that made what a step scales, other than by putting it elsewhere."""
        while step.sources and (source := step.sources[0]) is not None and not isinstance(source[0], str):
            step = self.steps[source[0]]
            if not ((rule := RULES.get(step.name)) and rule.carries and step.name not in _LOOKUPS):
                return step
        return None

    def summed(self, step: Step[Axis]) -> Sequence[Axis]:
        """The axes that were summed to compute what a step takes, but by layers with weights."""
        before = self._made_by(step)
        by_a_layer = before is not None and before.name in SUMS and any(map(self._is_of_weights, before.sources))
        return () if by_a_layer else step.summed

"""Sums of products in a trace: where they flow, and what their factors come from.

A number scales a sum if it is multiplied with the sum, or with one of its factors, before something gives the result
another scale: a softmax, a norm, a division by the length of a vector.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from surgery.width.replay import of_weights
from surgery.width.rules.registry import RULES
from surgery.width.solve import Axis, Choice, atoms, factors, size_of
from surgery.width.steps import Step

ATTENTION = "scaled_dot_product_attention"
LOOKUPS = {"embedding", "index", "index_select", "gather"}
_NORMS = {"native_layer_norm", "native_group_norm", "_fused_rms_norm", "rms_norm"}
_ENDS = {"_softmax", "_log_softmax", "_safe_softmax", "cumsum", *_NORMS}  # what they return has another scale
_KEEPS_SCALE = {
    "add", "sub", "mul", "div", "masked_fill", "where", "neg", "abs", "cat", "stack", "clamp", "clamp_min", "clamp_max",
    "hardtanh", "relu", "leaky_relu", "elu", "gelu", "silu", "softplus", "maximum", "minimum", "tril", "triu",
    "native_dropout", "sum", "mean", "amax", "max",
}  # fmt: skip
LENGTHS = {"linalg_vector_norm", "norm", "sum"}
_OF_LENGTHS = {"sqrt", "rsqrt", "pow", "reciprocal", "add", "mul", "clamp", "clamp_min", "maximum"}


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
        """True if the narrow model sums over another number of products."""
        return any(old != new for old, new in self.lengths)


class Flow:
    """The sums of products of a trace.

    Args:
        steps, choice: the operations, and which positions stay.

    Attributes:
        contractions: the sums by the number of their step.
        behind: by step the numbers of the sums that it takes; sums that layers compute count up to an addition.
        ahead: by step the sums that have its result as a factor; weights count for the sums that layers compute.
        readers: by step the sums of layers that take its result as it is.
    """

    def __init__(self, steps: Sequence[Step[Axis]], choice: Choice):
        self.steps, self.choice = steps, choice
        self._weights, self._lengths = of_weights(steps), self._lengths_of_vectors()
        self.contractions = dict(self._find())
        self.behind, self.ahead = self._flow_on(), self._flow_back()
        self.readers: dict[int, set[int]] = {}
        for number, contraction in self.contractions.items():
            for source in self._products(number) if contraction.learned else ():
                if not self.is_of_weights(source) and (maker := self.find_maker(source)) is not None:
                    self.readers.setdefault(maker, set()).add(number)

    def around(self, number: int) -> set[int]:
        """Return the sums that a step scales, and layers' sums of its result as it is."""
        return {*self.behind[number], *self.ahead[number], *self.readers.get(number, ())}

    def is_normalised(self, contraction: Contraction) -> bool:
        """Return whether a factor of a sum was divided by its own length.

        Then the sum has no other scale.
        """
        makers = [self.find_maker(source) for source in self._products(contraction.step)]
        return any(
            maker is not None and (self.steps[maker].name in _NORMS or self._by_tensor(maker) or self._is_unit(maker))
            for maker in makers
        )

    def is_cosine(self, contraction: Contraction) -> bool:
        """Return whether both factors have length 1, so that no width changes the sum."""
        makers = [self.find_maker(source) for source in self._products(contraction.step)]
        return all(maker is not None and self._is_unit(maker) for maker in makers)

    def is_of_weights(self, source: Any) -> bool:
        """Return whether a tensor is one of the model, or computed of these alone."""
        return source is not None and (isinstance(source[0], str) or self._weights[source[0]])

    def find_maker(self, source: Any) -> int | None:
        """Return the step that made a tensor, other than by putting it elsewhere."""
        while _is_step(source):
            step = self.steps[source[0]]
            if not ((rule := RULES.get(step.name)) and rule.carries and step.name not in LOOKUPS):
                return source[0]
            source = step.sources[0] if step.sources else None
        return None

    def _by_tensor(self, number: int) -> bool:
        """Return whether a step divides a tensor by another one."""
        return self.steps[number].name == "div" and len(self.steps[number].inputs) == 2

    def _is_unit(self, number: int) -> bool:
        """Return whether a step divides vectors by their length."""
        step = self.steps[number]
        return step.name in ("mul", "div") and any(
            _is_step(source) and self._lengths[source[0]] for source in step.sources[1:]
        )

    def _lengths_of_vectors(self) -> list[bool]:
        """Return by step whether it computes lengths of vectors, or from these alone."""
        flags: list[bool] = []
        for step in self.steps:
            rule, sources = RULES.get(step.name), [source for source in step.sources if _is_step(source)]
            keeps = step.name in _OF_LENGTHS or (rule is not None and rule.carries)
            flags.append(
                step.name in LENGTHS or (keeps and bool(sources) and all(flags[source[0]] for source in sources))
            )
        return flags

    def _factors(self, number: int) -> list[tuple[int, int, list[Any]]]:
        """Return (input, axis, atoms) of the axes that a step sums together.

        They are two, or one if the factors were multiplied before.
        """
        step = self.steps[number]
        if step.name in (ATTENTION, "_cdist_forward"):
            return [(which, len(step.inputs[which]) - 1, [*atoms(step.inputs[which][-1])]) for which in (0, 1)]
        if step.name == "sum" and self._find_multiplied(number):
            axis = step.scalars["dim"][0] % len(step.inputs[0])
            return [(0, axis, [*atoms(step.inputs[0][axis])])]
        return [*factors(step)]

    def _find_multiplied(self, number: int) -> list[Any]:
        """Return the sources of both tensors that a sum along an axis multiplies, or []."""
        step = self.steps[number]
        dims, maker = step.scalars.get("dim"), self.find_maker(step.sources[0])
        if type(dims) is not tuple or len(dims) != 1 or not step.inputs[0] or maker is None:
            return []
        before = self.steps[maker]
        is_product = before.name == "mul" and len(before.inputs) == 2 and before.sources[0] != before.sources[1]
        return [*before.sources] if is_product else []

    def _products(self, number: int) -> list[Any]:
        """Return where the factors of a sum come from."""
        step = self.steps[number]
        sources = [step.sources[which] for which, _, _ in self._factors(number)]
        return self._find_multiplied(number) if step.name == "sum" else sources

    def _find(self) -> Iterator[tuple[int, Contraction]]:
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
                lengths = [(along.size, size_of(along, self.choice))]
            around = (a for which, _, _ in summed for input_axis in step.inputs[which] for a in atoms(input_axis))
            heads = {a for a in around if a.grouping == "heads" and not a.why}.difference(parts)
            counted = math.prod(a.size for a in heads), math.prod(size_of(a, self.choice) for a in heads)
            learned = any(map(self.is_of_weights, self._products(number)))
            yield number, Contraction(number, tuple(lengths), counted, learned)

    def _flow_on(self) -> list[frozenset[int]]:
        sums: list[frozenset[int]] = []  # by step the sums that its result holds
        taken: list[frozenset[int]] = []
        none: frozenset[int] = frozenset()
        for number, step in enumerate(self.steps):
            before = [sums[source[0]] if _is_step(source) else none for source in step.sources]
            carries = step.name not in LOOKUPS and (rule := RULES.get(step.name)) and rule.carries
            several = none.union(*before)
            if number in self.contractions:
                taken.append(none)
                sums.append(frozenset({number}))
            elif carries:
                taken.append(none)
                sums.append(before[0] if before else none)
            elif step.name == "div" and self._is_unit(number):
                taken.append(none)
                sums.append(none)
            elif step.name in _KEEPS_SCALE:
                taken.append(several)
                sums.append(frozenset(n for n in several if not self.contractions[n].learned))
            else:
                taken.append(none)
                sums.append(none)
        return taken

    def _flow_back(self) -> list[frozenset[int]]:
        ahead = [frozenset[int]() for _ in self.steps]
        for number, step in reversed([*enumerate(self.steps)]):
            contraction = self.contractions.get(number)
            if contraction is not None:
                for which, _, _ in self._factors(number):
                    source = step.sources[which]
                    if _is_step(source) and (not contraction.learned or self._weights[source[0]]):
                        ahead[source[0]] |= {number}
            elif ahead[number] and step.name not in _ENDS:
                for source in filter(_is_step, step.sources):
                    ahead[source[0]] |= {
                        n for n in ahead[number] if self._weights[source[0]] or not self.contractions[n].learned
                    }
        return ahead


def _is_step(source: Any) -> bool:
    return source is not None and not isinstance(source[0], str)

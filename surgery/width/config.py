"""The configuration of a narrow model: the values from which its class makes exactly this model.

The class is the judge. Candidates are numbers of the configuration that are sizes of axes that shrink; they hold if the
model made from them has the narrow model's tensors, runs every operation as predicted, and computes the same buffers.
"""

import copy
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from surgery.configuration import (
    Fields,
    attribute_edits,
    field,
    fields,
    first_difference,
    holder_of,
    made_from,
    reread,
    set_field,
    shapes_of,
    warn,
)
from surgery.errors import SurgeryError, first_line
from surgery.forward import named_tensors
from surgery.names import joined
from surgery.states import owners
from surgery.submodel import Edit, Submodel
from surgery.width.attributes import Known, Sizes, merged

Difference = Callable[[nn.Module], tuple[int, str] | None]
"""How many operations of a narrow model do not run as predicted, and what the first of them does; None if all do."""

_WIDTH = re.compile(r"dim|channel|hidden|width|size|embd|inner|feat|planes|d_|ffn")
_COUNT = re.compile(r"heads?$|groups?$")
_FACTOR = re.compile(r"ratio|factor|mult|expan")
_LEAST = 4  # smaller numbers are no widths
_MOST_MADE = 80  # models that are made to find the values


class _Score(NamedTuple):
    """How far a model made from a configuration is from the narrow one; the smallest is best, and zeros are equality.

    Attributes:
        shapes: axes of tensors that have another size.
        steps: operations that do not run as predicted.
        buffers: tensors outside of the state with other values.
    """

    shapes: float
    steps: float
    buffers: float


class _Made(NamedTuple):
    """What came of a configuration.

    Attributes:
        config: the configuration, with all values that follow from others.
        edits: what gives the narrow model's modules the attributes of the one made from it.
        pairs: (size, size of the narrow model) of axes that differ.
        shares: the shares of sizes of the tensors outside of the state that differ.
        why: what differs, in words.
    """

    score: _Score
    config: Any
    edits: list[Edit]
    pairs: set[tuple[int, int]]
    shares: set[float]
    why: str


def config_edits(model: nn.Module, plan: Submodel, known: Mapping[str, Known], difference: Difference) -> list[Edit]:
    """Edits after which a narrow model's configuration says its widths; none, and a warning, if it cannot say them.

    Nothing happens for a model that its class does not make from a configuration that it holds.

    Args:
        model: the full model, or a copy on the meta device.
        plan: the plan of the narrow model, whose attributes are right.
        known: what axes of each module become.
        difference: where a narrow model does something else than predicted.
    """
    holder = holder_of(model)
    if holder is None or plan.small_shapes == dict(plan.shapes):
        return []
    config = getattr(model, holder)
    try:
        full = made_from(type(model), config)
    except Exception as error:  # it was not made so: whatever its constructor raises
        warn(model, f"its class raises {type(error).__name__} for it: {first_line(error)}")
        return []
    if what := first_difference(dict(plan.shapes), shapes_of(full)):
        warn(model, f"it does not describe the full model either: {what}")
        return []
    try:
        search = _Search(config, full, model, plan, known, difference)
    except SurgeryError as error:
        warn(model, f"it does not describe the full model either: {first_line(error)}")
        return []
    best = search.best()
    if any(best.score):
        warn(model, best.why)
        return []
    return best.edits


class _Search:
    """The search for the values from which the class makes the narrow model."""

    def __init__(
        self,
        config: Any,
        full: nn.Module,
        model: nn.Module,
        plan: Submodel,
        known: Mapping[str, Known],
        difference: Difference,
    ):
        self.config, self.full, self.model, self.plan, self.difference = config, full, model, plan, difference
        self.small = plan.build(full)
        self.plain, self.left = list(fields(reread(config))), _MOST_MADE
        self.widths = merged(found.widths for found in known.values())
        self.counts = merged(found.counts for found in known.values())

    def best(self) -> _Made:
        """The best values that were found."""
        first = self.made({}) or self.judged(self.config, self.full)
        values = dict(self.guess())
        here = self.made(values) if values else None
        if here is None or here.score > first.score:
            here, values = first, {}
        while any(here.score) and self.left > 0:
            tries = []
            for path, new in self.options(here):
                if (made := self.made({**values, path: new})) is not None:
                    tries.append((made.score, len(tries), made, {**values, path: new}))
                if tries and not any(tries[-1][0]):
                    break
            if not tries or min(tries)[0] >= here.score:
                return here
            _, _, here, values = min(tries)
        return self.pruned(here, values)

    def pruned(self, here: _Made, values: dict[Fields, Any]) -> _Made:
        """Without values that change nothing: they were guessed from their names."""
        for path in list(values):
            fewer = {key: value for key, value in values.items() if key != path}
            made = self.made(fewer)
            if made is not None and not any(made.score):
                here, values = made, fewer
        return here

    def made(self, values: Mapping[Fields, Any]) -> _Made | None:
        """What the class makes of the configuration with other values; None if it refuses them."""
        self.left -= 1
        config = copy.deepcopy(self.config)
        try:
            for path, value in values.items():
                set_field(config, path, value)
            after = dict(fields(reread(config)))
            for path, value in self.plain:  # what its class computes from other values
                if path in after and after[path] != value:
                    set_field(config, path, after[path])
            made = made_from(type(self.model), config)
        except Exception:  # whatever its class raises for values that do not go together
            return None
        return self.judged(config, made)

    def judged(self, config: Any, made: nn.Module) -> _Made:
        """How a model made from a configuration differs from the narrow one."""
        mine, other = self.plan.small_shapes, shapes_of(made)
        pairs = [
            pair
            for name in mine
            if len(mine[name]) == len(other.get(name, ()))
            for pair in zip(other[name], mine[name])
        ]
        wrong = [(got, want) for got, want in pairs if got != want]
        if why := first_difference(mine, other):
            missing = sum(len(mine[name]) != len(other.get(name, ())) for name in mine)
            score = _Score(len(wrong) + missing + len(other.keys() - mine), 0, 0)
            return _Made(score, config, [], set(wrong), set(), why)
        edits, computed = attribute_edits(self.small, made), _computed(self.small, made)
        if edits is None:
            return _Made(_Score(0, torch.inf, 0), config, [], set(), set(), "its class makes other modules from it")
        for (module, name), (mine, other) in computed.items():
            if _is_corner(mine, other) and mine.shape != other.shape:  # no operation uses it: narrow left it whole
                index = [None if old == new else [[0, new]] for old, new in zip(mine.shape, other.shape)]
                edits.append({"do": "slice", "module": module, "attribute": name, "index": index})
        adopted = Submodel(self.plan.entries, self.plan.shapes, (*self.plan.edits, *edits), self.plan.structure)
        if stuck := self.difference(adopted.build(self.model)):
            return _Made(_Score(0, stuck[0], 0), config, [], set(), set(), stuck[1])
        different = [key for key, (mine, other) in computed.items() if not _is_corner(mine, other)]
        before = dict(named_tensors(self.full))
        after = dict(named_tensors(self.small))
        shares = {
            a / b
            for key in different
            if key in before and key in after
            for a, b in zip(after[key].shape, before[key].shape)
            if a < b
        }
        why = f"its class computes another {joined(*different[0])}" if different else ""
        return _Made(_Score(0, 0, len(different)), config, edits, set(), shares, why)

    def guess(self) -> Iterator[tuple[Fields, Any]]:
        """Numbers whose names say that they are widths or count heads, and that become one other number."""
        for path, value in fields(self.config):
            sizes = self.counts if _COUNT.search(path[-1]) else self.widths if _WIDTH.search(path[-1]) else {}
            new = _renewed(value, {n: s for n, s in sizes.items() if n >= _LEAST or sizes is self.counts})
            if new is not None:
                yield path, new

    def options(self, here: _Made) -> Iterator[tuple[Fields, Any]]:
        """Other values that may bring the class nearer to the narrow model."""
        sizes = merged([self.widths, self.counts, *({got: {want}} for got, want in here.pairs)])
        for path, value in fields(here.config):
            old = field(self.config, path) if path in dict(self.plain) else value
            if _is_number(value, int) and value > 0:
                yield from ((path, new) for new in sorted({*sizes.get(value, ()), *sizes.get(old, ()), old} - {value}))
            if _is_list(value):
                yield from ((path, new) for new in _renewed_lists(value, sizes))
            if value is None and _WIDTH.search(path[-1]):
                yield from ((path, want) for _, want in sorted(here.pairs))
            if _is_number(value, int | float) and _FACTOR.search(path[-1]):
                yield from ((path, new) for got, want in sorted(here.pairs) if (new := _times(value, want, got)))
            if (
                _is_number(value, float) and value > 1
            ):  # the base of a rotary embedding's frequencies: base ** (i / size)
                yield from ((path, value**share) for share in sorted(here.shares))


def _is_number(value: Any, kind: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) > 0 and all(_is_number(item, int) for item in value)


def _renewed(value: Any, sizes: Sizes) -> Any:
    """The number, or the list of numbers, with sizes replaced; None if nothing changes in exactly one way."""
    if _is_list(value):
        new = [_renewed(item, sizes) or item for item in value]
        return type(value)(new) if new != list(value) else None
    changed = sizes.get(value, set()) - {value} if _is_number(value, int) else set()
    return next(iter(changed)) if len(changed) == 1 else None


def _renewed_lists(value: list | tuple, sizes: Sizes) -> Iterator[list | tuple]:
    """The list with all its sizes replaced, then with one of them."""
    if (new := _renewed(value, sizes)) is not None:
        yield new
    for place, item in enumerate(value):
        for size in sorted(sizes.get(item, set()) - {item}):
            yield type(value)([*value[:place], size, *value[place + 1 :]])


def _times(value: float, want: int, got: int) -> float | None:
    """A factor changed by a share; a whole one stays whole."""
    new = value * want / got
    return new if isinstance(value, float) else int(new) if new == int(new) > 0 else None


def _computed(small: nn.Module, made: nn.Module) -> dict[tuple[str, str], tuple[Tensor | None, Tensor | None]]:
    """The tensors of two models that are not in their states."""
    mine, other = (
        {key: tensor for key, tensor in named_tensors(model) if id(tensor) not in _held(model)}
        for model in (small, made)
    )
    return {key: (mine.get(key), other.get(key)) for key in {**mine, **other}}


def _held(model: nn.Module) -> set[int]:
    return {id(tensor) for _, _, own in owners(model) for tensor in own.values()}


def _is_corner(mine: Tensor | None, other: Tensor | None) -> bool:
    """Whether the other tensor is the leading corner of mine, up to rounding."""
    if mine is None or other is None or mine.ndim != other.ndim or mine.dtype != other.dtype:
        return False
    if any(a < b for a, b in zip(mine.shape, other.shape)):
        return False
    corner = mine[tuple(slice(size) for size in other.shape)]
    return corner.is_meta or other.is_meta or torch.allclose(corner, other, rtol=1e-5, atol=1e-8, equal_nan=True)

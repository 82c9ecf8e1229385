"""The configuration of a narrow model: values from which its class makes it.

The class is the judge. Candidates are numbers of the configuration that are sizes of axes that shrink; they hold if the
model made from them has the narrow model's tensors, runs every operation as predicted, and computes the same buffers.
"""

import copy
import logging
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from surgery.errors import first_line
from surgery.forward import named_tensors
from surgery.hooks import Difference
from surgery.names import join
from surgery.plan import Edit, Plan
from surgery.states import names_by_id, shapes_of
from surgery.transformers.settings import (
    Fields,
    attribute_edits,
    describe_mismatch,
    fields,
    first_difference,
    holder_of,
    make_from,
    mismatch,
    reread,
    set_field,
)
from surgery.width.constants import COUNT, LEAST, NewSizes, SizeChanges, merge_sizes, renew

_log = logging.getLogger(__name__)
_MOST_MADE = 40  # models that are made to find the values from one guess
_STARTS = 3  # other guesses from which they are looked for


class _MatchScore(NamedTuple):
    """The distance of a model made from a configuration to the narrow one; 0 is equal.

    What is not known before the rest is right is infinite.

    Attributes:
        shapes: axes of tensors that have another size.
        buffers: tensors outside of the state with other values.
        steps: operations that do not run as predicted.
    """

    shapes: float
    buffers: float = math.inf
    steps: float = math.inf


class _Made(NamedTuple):
    """The result of trying a configuration.

    Attributes:
        config: the configuration, with all values that follow from others.
        why: what differs, in words.
        edits: what gives the narrow model's modules the attributes of the one made from it.
        pairs: (size, size of the narrow model) of axes that differ.
        shares: the shares of sizes of the tensors outside of the state that differ.
    """

    score: _MatchScore
    config: Any
    why: str
    edits: Sequence[Edit] = ()
    pairs: Collection[tuple[int, int]] = ()
    shares: Collection[float] = ()


def width_edits(model: nn.Module, plan: Plan, sizes: NewSizes, difference: Difference) -> tuple[Sequence[Edit], str]:
    """Return edits that put a narrow model's widths in its configuration, or a reason.

    Of a configuration that did not describe the full model either, that is logged.

    Args:
        model: the full model, or a copy on the meta device, which its class makes from a configuration that it holds.
        plan: the plan of the narrow model, whose attributes are right.
        sizes: what sizes of axes become.
        difference: where a narrow model does something else than predicted.
    """
    if plan.small_shapes == dict(plan.shapes):
        return [], ""
    unsaved = getattr(model, "_keys_to_ignore_on_save", None) or ()  # as transformers' classes name them
    if cut := sorted(name for name in unsaved if plan.small_shapes.get(name) != plan.shapes.get(name)):
        module = cut[0].rpartition(".")[0]
        reason = f"its class does not save {cut[0]}, and computes another one for another width"
        return [], describe_mismatch(model, reason, f"leave that width as it is with keep={[module]}")
    config = getattr(model, str(holder_of(model)))
    try:
        full = make_from(type(model), config)
        reason = mismatch(model, full)
        search = None if reason else _ConfigSearch(config, full, model, plan, sizes, difference)
    except Exception as error:  # it was not made so: whatever its constructor raises
        search, reason = None, f"its class raises {type(error).__name__} for it: {first_line(error)}"
    if search is None:
        _log.warning(
            describe_mismatch(model, f"nor the full model: {reason}", "narrow a model that is as its class made it")
        )
        return [], ""
    best = search.best()
    if any(best.score):
        refused = f"; for other values that were tried, its class raises {search.refused}" if search.refused else ""
        hint = (
            "choose shares, rounding or heads with which its class can say the widths, or give those that it makes as "
            "long as before to keep=[...]"
        )
        return [], describe_mismatch(model, f"{best.why}{refused}", hint)
    return best.edits, ""


class _ConfigSearch:
    """The search for the values from which the class makes the narrow model."""

    def __init__(
        self,
        config: Any,
        full: nn.Module,
        model: nn.Module,
        plan: Plan,
        sizes: NewSizes,
        difference: Difference,
    ):
        self.config, self.full, self.model, self.plan, self.difference = config, full, model, plan, difference
        self.small = plan.build(full)
        self.plain, self.tries = list(fields(reread(config))), _MOST_MADE
        self.refused = ""  # what the class says of the values that were guessed
        self.sizes = sizes

    def best(self) -> _Made:
        """Return the best values from counts that change somewhere, or change everywhere."""
        counts = self.sizes.counts
        sure = {size: news for size, news in counts.items() if size not in news}
        attempt = self.find(counts)
        if any(attempt.score) and sure != counts:
            self.tries = _MOST_MADE
            attempt = min(attempt, self.find(sure), key=lambda candidate: candidate.score)
        return attempt

    def find(self, counts: SizeChanges) -> _Made:
        """Return the best values where numbers of heads and groups start as these."""
        start = self.judge(self.config, self.full)
        guess = dict(guess_values(self.config, self.sizes.widths, counts))
        attempt = self.make(guess)
        if attempt is not None and not attempt.score.shapes:
            return self.improve(guess, attempt, start)
        likely = {path: new for path, new in guess.items() if not self.contradicts(path, new)}
        best = self.improve(likely, self.make(likely), start)
        # One number may be as large as a width by chance, and the class may make up for it with others: all but one.
        fewer = [{key: new for key, new in likely.items() if key != path} for path in likely]
        tried = [
            (attempt.score, i, attempt)
            for i, values in enumerate(fewer if any(best.score) else ())
            if (attempt := self.make(values))
        ]
        for _, i, attempt in sorted(tried)[:_STARTS]:
            self.tries = _MOST_MADE
            best = min(best, self.improve(fewer[i], attempt, start), key=lambda candidate: candidate.score)
            if not any(best.score):
                break
        return best

    def improve(self, guess: dict[Fields, Any], attempt: _Made | None, best: _Made) -> _Made:
        """Return the best values found from a guess by changing one after the other.

        Args:
            guess, attempt: the guess, and what the class makes of it.
            best: what it makes of the full model's configuration; it counts if the guess is no better.
        """
        values: dict[Fields, Any] = {}
        if attempt is not None and attempt.score < best.score:
            best, values = attempt, guess
        while any(best.score) and self.tries > 0:
            tries = []
            for path, new in alternatives(best.config, self.config, self.sizes.numbers, best.pairs, best.shares):
                if (attempt := self.make({**values, path: new})) is not None:
                    tries.append((attempt.score, len(tries), attempt, {**values, path: new}))
                    if not any(attempt.score):
                        break
            if not tries or min(tries)[0] >= best.score:
                return best
            _, _, best, values = min(tries)
        for path in guess:  # what was guessed from a name, and changes nothing, stays as it was
            fewer = {key: value for key, value in values.items() if key != path}
            if path in values and (attempt := self.make(fewer)) is not None and not any(attempt.score):
                best, values = attempt, fewer
        return best

    def contradicts(self, path: Fields, new: Any) -> bool:
        """Return whether one value alone changes an axis of a tensor that should stay.

        It only happens to be as large as others. A value that the class refuses alone contradicts nothing.
        """
        config = copy.deepcopy(self.config)
        try:
            set_field(config, path, new)
            other = shapes_of(make_from(type(self.model), config))
        except Exception:  # whatever its class raises for values that do not go together
            return False
        return any(
            name not in other
            or len(other[name]) != len(shape)
            or any(a != b == c for a, b, c in zip(other[name], shape, self.plan.small_shapes[name]))
            for name, shape in self.plan.shapes.items()
        )

    def make(self, values: Mapping[Fields, Any]) -> _Made | None:
        """Try other values, see `judge`; None if the class refuses them."""
        self.tries -= 1
        config = copy.deepcopy(self.config)
        try:
            for path, value in values.items():
                set_field(config, path, value)
            after = dict(fields(reread(config)))
            for path, value in self.plain:  # what its class computes from other values
                if path in after and after[path] != value:
                    set_field(config, path, after[path])
            twin = make_from(type(self.model), config)
        except Exception as error:  # whatever its class raises for values that do not go together
            self.refused = self.refused or f"{type(error).__name__}: {first_line(error)}"
            return None
        return self.judge(config, twin)

    def judge(self, config: Any, twin: nn.Module) -> _Made:
        """Return how a model made from a configuration differs from the narrow one."""
        wanted, other = self.plan.small_shapes, shapes_of(twin)
        pairs = [
            pair
            for name in wanted
            if name in other and len(wanted[name]) == len(other[name])
            for pair in zip(other[name], wanted[name])
        ]
        wrong = [(got, want) for got, want in pairs if got != want]
        if why := first_difference(wanted, other):
            missing = sum(name not in other or len(wanted[name]) != len(other[name]) for name in wanted)
            score = _MatchScore(len(wrong) + missing + len(other.keys() - wanted.keys()))
            return _Made(score, config, why, pairs=set(wrong))
        ours, theirs, edits = _outside(self.small), _outside(twin), attribute_edits(self.small, twin)
        computed = {key: (ours.get(key), theirs.get(key)) for key in {**ours, **theirs}}
        if edits is None:
            return _Made(_MatchScore(0), config, "its class makes other modules from it")
        different = [key for key, (wanted, other) in computed.items() if not _is_corner(wanted, other)]
        if different:
            whole = dict(named_tensors(self.full))
            shares = {
                a / b
                for key in different
                if key in whole and computed[key][0] is not None
                for a, b in zip(computed[key][0].shape, whole[key].shape)
                if a < b
            }
            why = f"its class computes another {join(*different[0])}"
            return _Made(_MatchScore(0, len(different)), config, why, shares=shares)
        for (module, name), (tensor, twin_tensor) in computed.items():
            if tensor.shape != twin_tensor.shape:  # no operation uses it, so that it stayed whole
                index = [None if old == new else [[0, new]] for old, new in zip(tensor.shape, twin_tensor.shape)]
                edits.append({"do": "slice", "module": module, "attribute": name, "index": index})
        adopted = self.plan.with_edits((*self.plan.edits, *edits))
        steps, why = self.difference(adopted.build(self.model)) or (0, "")
        return _Made(_MatchScore(0, 0, steps), config, why, edits)


def _outside(model: nn.Module) -> dict[tuple[str, str], Tensor]:
    """Return the tensors of a model that are not in its state."""
    held = names_by_id(model)
    return {key: tensor for key, tensor in named_tensors(model) if id(tensor) not in held}


def _is_corner(full: Tensor | None, other: Tensor | None) -> bool:
    """Return whether the other tensor is the leading corner of mine, up to rounding."""
    if full is None or other is None or full.ndim != other.ndim or full.dtype != other.dtype:
        return False
    if any(a < b for a, b in zip(full.shape, other.shape)):
        return False
    corner = full[tuple(slice(size) for size in other.shape)]
    return corner.is_meta or other.is_meta or torch.allclose(corner, other, rtol=1e-5, atol=1e-8, equal_nan=True)


_WIDTH = re.compile(r"dim|channel|hidden|width|size|embd|inner|feat|planes|d_|ffn|rank")
_FACTOR = re.compile(r"ratio|factor|mult|expan")


def guess_values(config: Any, widths: SizeChanges, counts: SizeChanges) -> Iterator[tuple[Fields, Any]]:
    """Yield (path, new value) of numbers named as widths or counts, if only one is new.

    >>> from types import SimpleNamespace
    >>> list(guess_values(SimpleNamespace(hidden_size=8, labels=8, num_heads=4), {8: {6}}, {4: {2}}))
    [(('hidden_size',), 6), (('num_heads',), 2)]
    """
    widths = {size: news for size, news in widths.items() if size >= LEAST}
    for path, value in fields(config):
        sizes = counts if COUNT.search(path[-1]) else widths if _WIDTH.search(path[-1]) else {}
        if (new := renew(value, sizes)) is not None:
            yield path, new


def alternatives(
    config: Any, original: Any, sizes: SizeChanges, pairs: Collection[tuple[int, int]], shares: Collection[float]
) -> Iterator[tuple[Fields, Any]]:
    """Yield other values for one field of a configuration.

    Args:
        config: the configuration to change.
        original: the full model's configuration; its values are among the alternatives.
        sizes: what sizes become.
        pairs: (size, size that is wanted) of axes of the model made from the configuration.
        shares: how much shorter tables of computed numbers are to be, such as the frequencies of rotary embeddings,
            which are base ** (-position / length) for some base.
    """
    for path, value in fields(config):
        if _is_number(value, float) and value > 1:
            yield from ((path, value**share) for share in sorted(shares))
    old_values = dict(fields(original))
    sizes = merge_sizes([sizes, *({got: {want}} for got, want in pairs)])
    for path, value in fields(config):
        old = old_values.get(path, value)
        if _is_number(value, int) and value > 0:
            values = {*sizes.get(value, ()), old}
            if _is_number(old, int):
                values |= sizes.get(old, set())
            yield from ((path, new) for new in sorted(values - {value, None}))
        if isinstance(value, list | tuple) and value and all(_is_number(item, int) for item in value):
            yield from ((path, new) for new in _renew_lists(value, sizes))
        if value is None and _WIDTH.search(path[-1]):
            yield from ((path, want) for want in sorted({want for _, want in pairs}))
        if _is_number(value, int | float) and _FACTOR.search(path[-1]):
            yield from ((path, new) for got, want in sorted(pairs) if (new := _times(value, want, got)))


def _is_number(value: Any, kind: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)


def _renew_lists(value: list | tuple, sizes: SizeChanges) -> Iterator[list | tuple]:
    """Yield the list with all its sizes replaced, then with one of them."""
    if (new := renew(value, sizes)) is not None:
        yield new
    for place, item in enumerate(value):
        for size in sorted(sizes.get(item, set()) - {item}):
            yield type(value)([*value[:place], size, *value[place + 1 :]])


def _times(value: float, want: int, got: int) -> float | None:
    """Return a factor changed by a share; an integer remains an integer."""
    new = value * want / got
    return new if isinstance(value, float) else int(new) if new == int(new) > 0 else None

"""Rules in one line: axes of arguments and results, written as in einops."""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, wraps
from math import prod
from typing import Any, NamedTuple, NoReturn, overload

import torch
from torch import Tensor

from surgery.errors import SurgeryError, first_line
from surgery.forward import tensors_in
from surgery.width.axes import Axis, Why, atoms, fix, lost, mark_grouping, product, regroup, role, unify
from surgery.width.rules import registry
from surgery.width.rules.registry import (
    Rule,
    RuleError,
    RuleFunction,
    RuleResult,
    View,
    argument_names,
    broadcast_axes,
    canonical,
    results,
)

_FURTHER = "..."
_TOKEN = re.compile(r"->|\.\.\.|[A-Za-z_]\w*|\d+|\S")


@overload
def register_rule(name: str, notation: str, *, sizes: Collection[str] = (), replace: bool = False) -> None: ...
@overload
def register_rule(
    name: str, notation: None = None, *, sizes: Collection[str] = (), replace: bool = False
) -> Callable[[RuleFunction], RuleFunction]: ...
def register_rule(
    name: str, notation: str | None = None, *, sizes: Collection[str] = (), replace: bool = False
) -> Callable[[RuleFunction], RuleFunction] | None:
    """Teach `surgery.narrow` an operation by a rule, which says what it does to axes.

    With a notation this is one line; without one it decorates a function. The notation lists the arguments that are
    tensors by their names in the operation's schema, each with its axes, and after the arrow the axes of each result:

    - the same word is the same axis, position by position. As torch broadcasts, it may have one position elsewhere;
    - `...` stands for any further axes, which are broadcast;
    - `(a b)` is one axis with positions numbered by two, as in einops. Sizes are the sizes of other axes of this name,
      of integer arguments of this name, or what is left of the axis;
    - `a!` is an axis that keeps all positions, since the operation treats each in its own way; `_` has no name, and
      `3` has three positions: both keep their size, and in a result they are new;
    - `[a b] c`: the first axes may be missing, as in a bias that is broadcast;
    - axes called `heads` or `groups` count what is computed side by side.

    An axis in several arguments and in no result is summed over, as in a matrix product; one in a single argument is
    used up otherwise (a mean, a table that is read). An argument with such an axis makes features along its axes in the
    result if it consists of weights. Arguments that are None are skipped. Axes of a tensor that the notation does not
    list keep their size. One result stands for all if there are several.

    A function gets what it may ask (`view.axes_of(tensor)`, `view.is_weight(tensor)`), the call's arguments by their
    names in the operation's schema, and the result. It unifies axes that are the same, fixes axes that must keep all
    positions, and returns the axes of the result, or a `surgery.width.rules.RuleResult` if there is more to say.

    Args:
        name: of the operation: `namespace::name` without overload. An in-place variant `name_` has the same rule.
        notation: the axes; if it is not given, a decorator is returned.
        sizes: names of arguments that are sizes of the result's axes, which may shrink.
        replace: whether the rule may take the place of one that the operation has already.

    Raises:
        SurgeryError: if the name has no namespace, if the notation cannot be read, if it or `sizes` names an argument
            that the operation does not have, or if the operation has a rule and `replace` is not set. When a model is
            traced: if the rule fails, or gives other axes than the results have.

    >>> register_rule("doctest::linear", "x: ... i, weight: o i, bias: o -> ... o")
    >>> @register_rule("doctest::twice")
    ... def twice(view, args, out):
    ...     return view.axes_of(args["x"])
    >>> register_rule("doctest::twice", "x: ... -> ...")
    Traceback (most recent call last):
    ...
    surgery.errors.SurgeryError: doctest::twice has a rule already: pass replace=True to use another one
    """
    if not isinstance(name, str) or not isinstance(notation, str | None):
        raise SurgeryError(
            "a rule is registered for a name: write @register_rule('namespace::name') above a function, or "
            "register_rule('namespace::name', 'x: ... i, weight: o i -> ... o')",
            code="argument",
        )
    if isinstance(sizes, str):
        raise SurgeryError(f"sizes={sizes!r} is no set of names: write {{{sizes!r}}}", code="argument")
    namespace, colons, bare = name.partition("::")
    if not (namespace and colons and bare.isidentifier()):
        raise SurgeryError(
            f"{name!r} does not name an operation: write 'namespace::name', without an overload", code="argument"
        )
    key = canonical(name)
    if key in registry.RULES and not replace:
        raise SurgeryError(f"{name} has a rule already: pass replace=True to use another one", code="argument")

    known = argument_names(name)
    for argument in sizes if known else ():
        if argument not in known:
            raise SurgeryError(f"sizes: {argument!r} is no argument: {name} takes {', '.join(known)}", code="argument")

    listed = () if notation is None else Notation(notation).arguments
    unknown = () if known else (*sizes, *listed)

    def register(function: RuleFunction) -> RuleFunction:
        registry.RULES[key] = Rule(key, _watch(name, function, unknown), frozenset(sizes), taught=True)
        return function

    if notation is None:
        return register
    register(rule_of(notation, name))
    return None


def _watch(operation: str, function: RuleFunction, names: Collection[str]) -> RuleFunction:
    """Return a user's rule that raises RuleError if it, or its result, is wrong.

    Args:
        names: of arguments that the operation must have, which was not known when the rule was registered.
    """

    @wraps(function)
    def rule(view: View, args: dict[str, Any], out: Any) -> RuleResult:
        tensors, outs = tensors_in((list(args.values()), out)), tensors_in(out)

        def axes_of(tensor: Tensor) -> tuple[Axis, ...]:
            if not any(tensor is other for other in tensors):
                which = next((f"{name} is " for name, value in args.items() if value is tensor), "")
                description = "a tensor that the rule has made" if isinstance(tensor, Tensor) else repr(tensor)
                raise TypeError(f"view.axes_of: {which}{description}, and no tensor of the operation")
            return view.axes_of(tensor)

        try:
            answer = function(View(axes_of, view.is_weight), args, out)
            learnt = answer if isinstance(answer, RuleResult) else RuleResult(answer)
            if wrong := _wrong_axes(learnt.axes, outs):
                raise ValueError(wrong)
            for name in (*names, *(learnt.sizes if "::" in canonical(operation) else ())):
                args[name]  # an error if there is no such argument; torch's own layers have attributes, too
            return learnt
        except Exception as error:
            who = getattr(function, "__qualname__", type(function).__qualname__)
            hint = f": {operation} takes {', '.join(args)}" if isinstance(error, KeyError) else ""
            raise RuleError(
                f"the rule for {operation} ({function.__module__}.{who}) is wrong: {first_line(error)}{hint}",
                code="argument",
            ) from error

    return rule


def _wrong_axes(axes: Any, outs: Sequence[Tensor]) -> str:
    """Return what is wrong with a rule's axes of an operation's results, or ""."""
    needed = f"a list of axes, one for each axis of the result (here {outs[0].ndim if outs else 0}), is needed"
    if not isinstance(axes, list | tuple):
        return f"it returns {type(axes).__name__}: {needed}"
    rows = [axes for _ in outs] if all(isinstance(axis, Axis) for axis in axes) else axes
    if len(rows) != len(outs):
        return f"it gives the axes of {len(rows)} results where there are {len(outs)}"
    for row, tensor in zip(rows, outs):
        if not isinstance(row, list | tuple) or not all(isinstance(axis, Axis) for axis in row):
            return f"it returns {axes!r}: {needed}"
        if (sizes := [axis.size for axis in row]) != list(tensor.shape):
            return f"a result of shape {tuple(tensor.shape)} gets axes of sizes {sizes}"
        if odd := [atom for axis in row for atom in atoms(axis) if not isinstance(atom.why, Why | None)]:
            return f"a new axis keeps its size because of role('...'), picked('...') or lost('...'), not {odd[0].why!r}"
    return ""


@dataclass
class Pattern:
    """The written form of the axes of one tensor.

    Attributes:
        axes: for each axis the words of its digits: one, or several in parentheses.
        optional: how many leading axes may be missing.
    """

    axes: list[tuple[str, ...]] = field(default_factory=list)
    optional: int = 0

    def words(self) -> list[str]:
        """Return all words, in order."""
        return [word for digits in self.axes for word in digits]

    def align(self, tensor: Tensor, name: str) -> list[tuple[tuple[str, ...], list[int]]]:
        """Return each written axis with its dimensions: one, or any number for `...`.

        >>> Pattern([("n",), ("...",), ("c",)]).align(torch.zeros(2, 3, 4, 5), "x")
        [(('n',), [0]), (('...',), [1, 2]), (('c',), [3])]
        """
        is_open = (_FURTHER,) in self.axes
        more = tensor.ndim - len(self.axes) + is_open
        if more < 0 if is_open else not -self.optional <= more <= 0:
            hint = ": write ... for further axes" if more > 0 else ""
            raise ValueError(f"{name} has {tensor.ndim} axes, and {len(self.axes) - is_open} are written{hint}")
        dims = iter(range(tensor.ndim))
        return [
            (digits, [next(dims) for _ in range(more if digits == (_FURTHER,) else 1)])
            for digits in self.axes[0 if is_open else -more :]
        ]


class Notation:
    """A notation, read from left to right; an error shows the place that is wrong.

    Attributes:
        arguments: by the arguments' names how their axes are written.
        results: how the axes of each result are written.
        whole: words of axes that keep their size. `_` and numbers are words of their own, with their place: `_@5`.
    """

    def __init__(self, text: str):
        self.text = " ".join(text.split())
        self._tokens = [(match[0], match.start()) for match in _TOKEN.finditer(self.text)] + [("", len(self.text))]
        self.whole: set[str] = set()
        self.arguments: dict[str, Pattern] = {}
        self.results: list[Pattern] = []
        end = ","
        while end == ",":
            name, at = self._take()
            if not name.isidentifier() or name in self.arguments:
                self.fail(
                    "write the name of an argument, as in `x: ... c`"
                    if name not in self.arguments
                    else "it is there twice",
                    at,
                )
            self._take(":")
            self.arguments[name] = self._pattern(None)
            end, _ = self._take(",", "->")
        known = {word for pattern in self.arguments.values() for word in pattern.words()}
        end = ","
        while end == ",":
            self.results.append(self._pattern(known))
            end, _ = self._take(",", "")

    @cache  # noqa: B019, there are few, and they stay
    def split_words(self, arguments: tuple[tuple[str, bool], ...]) -> tuple[list[str], list[str]]:
        """Return the words of axes that weights make, and of axes that are summed over.

        An axis in several arguments and in no result is summed over. A factor is an argument with an axis in no result.
        A factor of weights makes features along its axes in the results that no factor of data has. If weights alone
        are multiplied, the last factor makes the features. An axis along which two matrices of weights are summed is
        made, too: it is the rank of their product, or the hidden width between two layers.

        Args:
            arguments: the names of the arguments, and whether each consists of weights.

        >>> Notation("x: n i, a: r i, b: o r -> n o").split_words((("x", False), ("a", True), ("b", True)))
        (['o', 'r'], ['i', 'r'])
        """
        result_words = {word for pattern in self.results for word in pattern.words()}
        words = {
            name: [word for word in pattern.words() if word[:2] != "1@"] for name, pattern in self.arguments.items()
        }
        factors = [
            (words[name], is_weight) for name, is_weight in arguments if not result_words.issuperset(words[name])
        ]
        having = {
            word: [factor for factor in factors if word in factor[0]] for its_words, _ in factors for word in its_words
        }
        summed = [word for word in having if len(having[word]) > 1 and word not in result_words]
        makers = [its_words for its_words, is_weight in factors if is_weight]
        alone = len(makers) == len(factors) and bool(summed)
        if alone:
            makers = [its_words for its_words in makers if not result_words.isdisjoint(its_words)][-1:]
        elif all(is_weight for _, is_weight in arguments):
            makers = []
        features = [
            word
            for its_words in makers
            for word in its_words
            if word in result_words
            and not any(other is not its_words if alone else not weights for other, weights in having[word])
        ]
        features += [
            word for word in summed if all(is_weight and len(its_words) > 1 for its_words, is_weight in having[word])
        ]
        return list(dict.fromkeys(features)), summed

    def fail(self, message: str, at: int) -> NoReturn:
        """Raise an error that shows the place."""
        raise SurgeryError(
            f"the notation of a rule cannot be read: {message}\n  {self.text}\n  {' ' * at}^", code="argument"
        )

    def _take(self, *expected: str) -> tuple[str, int]:
        token, at = self._tokens[0]
        if expected and token not in expected:
            self.fail(f"write {' or '.join(repr(text) for text in expected if text)}", at)
        return self._tokens.pop(0) if token else (token, at)

    def _pattern(self, known: Collection[str] | None) -> Pattern:
        """Read the axes of one tensor; words of a result must be known."""
        pattern, start = Pattern(), self._tokens[0]
        if start[0] == "[" and known is None:
            self._take()
            while self._tokens[0][0] != "]":
                pattern.axes.append(self._axis(known))
            self._take()
            pattern.optional = len(pattern.axes)
        while self._tokens[0][0] not in (",", "->", ""):
            pattern.axes.append(self._axis(known))
        if pattern.axes.count((_FURTHER,)) > (not pattern.optional):
            self.fail("'...' may stand once, and not beside axes in brackets", start[1])
        return pattern

    def _axis(self, known: Collection[str] | None) -> tuple[str, ...]:
        if self._tokens[0][0] != "(":
            return (self._word(known),)
        self._take()
        digits = []
        while self._tokens[0][0] != ")":
            at = self._tokens[0][1]
            digits.append(self._word(known))
            if digits[-1] == _FURTHER:
                self.fail("'...' cannot stand in parentheses", at)
        self._take()
        return tuple(digits) or ("1@",)

    def _word(self, known: Collection[str] | None) -> str:
        token, at = self._take()
        if token == "_" or token.isdigit():
            self.whole.add(word := f"{token}@{at}")
            return word
        if not token.isidentifier() and token != _FURTHER:
            self.fail("write the word of an axis", at)
        if known is not None and token not in known:
            self.fail(f"no argument has {token!r}; write _ for a new axis", at)
        if self._tokens[0][0] == "!":
            self._take()
            self.whole.add(token)
        return token


def rule_of(text: str, operation: str) -> RuleFunction:
    """Return the rule of an operation that a notation stands for.

    Raises:
        SurgeryError: if the notation cannot be read, or names an argument that the operation does not have.

    >>> rule_of("x: n c, weight: c) -> n c", "mylib::norm")
    Traceback (most recent call last):
    ...
    surgery.errors.SurgeryError: the notation of a rule cannot be read: write the word of an axis
      x: n c, weight: c) -> n c
                       ^
    """
    notation = Notation(text)
    known = argument_names(operation)
    for name in notation.arguments if known else ():
        if name not in known:
            place = re.search(rf"\b{name} ?:", notation.text)
            notation.fail(f"{operation} takes {', '.join(known)}", place.start() if place else 0)

    def rule(view: View, args: dict[str, Any], out: Any) -> RuleResult:
        outs = results(out)
        operands = [
            _Placed(name, tensor, pattern.align(tensor, name)) for name, pattern, tensor in _list_given(notation, args)
        ]
        patterns = notation.results * (len(outs) if len(notation.results) == 1 else 1)
        if outs and len(patterns) != len(outs):
            raise ValueError(f"it gives the axes of {len(patterns)} results where there are {len(outs)}")
        returned = [
            _Placed("a result", tensor, pattern.align(tensor, "a result")) for pattern, tensor in zip(patterns, outs)
        ]
        sizes = _sizes([*operands, *returned], args)
        axes = {word: [Axis(size)] for word, size in sizes.items()} | _unify(view, operands, sizes)
        for word in ("heads", "groups"):
            for axis in axes.get(word, ()):
                mark_grouping(axis, word)
        for axis in (axis for word in notation.whole for axis in axes.get(word, ())):
            fix(axis, role(f"the rule for {operation} keeps its positions"))
        listed = {id(item.tensor) for item in (*operands, *returned)}
        for name, value in args.items():
            if isinstance(value, Tensor) and id(value) not in listed:
                for axis in view.axes_of(value):
                    fix(axis, lost(f"the rule for {operation} does not list {name}"))
        features, summed = (
            [axis for word in words for axis in axes.get(word, ())]
            for words in notation.split_words(tuple((item.name, view.is_weight(item.tensor)) for item in operands))
        )
        return RuleResult(
            [[axis for digits, _ in item.axes for axis in _join(digits, axes)] for item in returned],
            {word: axes[word][0] for word in sizes if word in args},
            features,
            summed=product(summed) if summed else None,
        )

    rule.__module__, rule.__qualname__ = "surgery", f"register_rule({operation!r}, {text!r})"
    return rule


class _Placed(NamedTuple):
    """A tensor of a call, and the dimensions of each axis that is written for it."""

    name: str
    tensor: Tensor
    axes: list[tuple[tuple[str, ...], list[int]]]


def _list_given(notation: Notation, args: Mapping[str, Any]) -> Iterator[tuple[str, Pattern, Tensor]]:
    """Yield the tensors that are listed and not None; of a list of tensors each."""
    for name, pattern in notation.arguments.items():
        value = args.get(name)
        for tensor in value if isinstance(value, list | tuple) else [] if value is None else [value]:
            if not isinstance(tensor, Tensor):
                raise ValueError(f"{name} is {tensor!r}, which has no axes")
            yield name, pattern, tensor


def _sizes(placed: Sequence[_Placed], args: Mapping[str, Any]) -> dict[str, int]:
    """Return the size of each word.

    It is a number, an argument of this name, the size of axes, or the rest of a product.
    """
    exact: dict[str, int] = {}
    seen: dict[str, dict[str, set[int]]] = {}  # by word how many positions each tensor has
    products = []
    for name, tensor, axes in placed:
        for digits, dims in axes:
            for word in digits:
                number = int(word.partition("@")[0]) if word[0].isdigit() else args.get(word)
                if isinstance(number, int) and not isinstance(number, bool):
                    exact[word] = number
            if len(digits) > 1:
                products.append((name, digits, tensor.shape[dims[0]]))
            elif digits != (_FURTHER,):
                seen.setdefault(digits[0], {}).setdefault(name, set()).add(tensor.shape[dims[0]])
    sizes = {
        word: max(set().union(*by_tensor.values()), key=lambda size: size != 1) for word, by_tensor in seen.items()
    } | exact
    for word, by_tensor in seen.items():
        if not set().union(*by_tensor.values()) <= {1, sizes[word]}:
            where = ", ".join(f"{name} {' and '.join(map(str, sorted(these)))}" for name, these in by_tensor.items())
            expected = f", and should have {exact[word]}" if word in exact else ""
            raise ValueError(f"the axis {word.partition('@')[0]} has not one size: {where}{expected}")
    for _ in products:
        for _, digits, size in products:
            unknown = [word for word in digits if word not in sizes]
            if len(unknown) == 1:
                sizes[unknown[0]] = size // max(1, prod(sizes.get(word, 1) for word in digits))
    for name, digits, size in products:
        if unknown := [word.partition("@")[0] for word in digits if word not in sizes]:
            raise ValueError(f"nothing says the sizes of {' and '.join(unknown)} in {name}")
        if prod(sizes[word] for word in digits) != size:
            raise ValueError(f"{size} positions of {name} are no product of {[sizes[word] for word in digits]}")
    return sizes


def _unify(view: View, operands: Sequence[_Placed], sizes: Mapping[str, int]) -> dict[str, list[Axis]]:
    """Return the axes of each word, unified over arguments; `...` may have several."""
    by_word: dict[str, list[Axis]] = {}
    further = []
    for _, tensor, placed in operands:
        axes = view.axes_of(tensor)
        for digits, dims in placed:
            if digits == (_FURTHER,):
                further.append([axes[dim] for dim in dims])
                continue
            whole = [axes[dims[0]]]
            for word, axis in zip(digits, regroup(whole, [sizes[w] for w in digits]) if digits[1:] else whole):
                if axis.size == sizes[word]:  # otherwise it is one position, which is broadcast
                    unify(by_word.setdefault(word, [axis])[0], axis)
    if further:
        shape = torch.broadcast_shapes(*([axis.size for axis in axes] for axes in further))
        by_word[_FURTHER] = broadcast_axes(further, shape)
    return by_word


def _join(digits: tuple[str, ...], axes: Mapping[str, list[Axis]]) -> list[Axis]:
    return [product([axes[word][0] for word in digits])] if len(digits) > 1 else axes[digits[0]]

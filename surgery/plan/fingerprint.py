"""Hashes by which a plan knows its full model: names and shapes of its tensors, classes and settings of its modules."""

import dis
import functools
import hashlib
import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping
from types import CodeType
from typing import Any

from torch import nn

from surgery.configuration import is_plain

_CHANGES = {"append", "extend", "insert", "pop", "popitem", "clear", "remove", "update", "setdefault"}
_VERSION = "2:"  # what `structure` begins with: hashes of another version say nothing of a model
_ASIDE = {*vars(nn.Module()), "device", "dtype", "name_or_path"}  # may differ between models that compute the same
_KEYS = str | int  # of dictionaries in settings
_SWITCHES = re.compile("drop|checkpointing|fused")  # how much is dropped, and how the same is computed


def fingerprint(shapes: Mapping[str, tuple[int, ...]]) -> str:
    """A hash of the names and shapes of a model's tensors, whatever their order.

    >>> fingerprint({"a": (1,), "b": (2,)}) == fingerprint({"b": (2,), "a": (1,)})
    True
    """
    return _hash(sorted((name, list(shape)) for name, shape in shapes.items()))


def structure(model: nn.Module) -> str:
    """A hash of a model's modules: their names, classes and settings.

    A setting is a number, a string, a bool, None, or a tuple, list or dict of these, in a public attribute. Of
    torch's classes it is what the constructor takes or `__constants__` names, unless it has its default value, so that
    arguments that a later torch adds change nothing. Of other classes it is what `__init__`, or a method that it calls,
    assigns. What `forward`, or a method that it calls, assigns or changes is not a setting, so that a model has the
    same hash after it has run. Rates of dropout, and switches for checkpointing and fused kernels, may differ.

    >>> structure(nn.Conv2d(1, 2, 3)) == structure(nn.Conv2d(1, 2, 3, stride=2))
    False
    """
    counted = ((name, m) for name, m in model.named_modules() if "drop" not in type(m).__name__.lower())
    return _VERSION + _hash([[name, type(module).__qualname__, settings(module)] for name, module in counted])


def settings(module: nn.Module) -> dict[str, Any]:
    """A module's own settings by the attribute's name, as `structure` has them.

    >>> settings(nn.LayerNorm(3, eps=0.1))
    {'eps': 0.1, 'normalized_shape': (3,)}
    """
    if isinstance(module, nn.ParameterDict | nn.ParameterList):
        return {name: None if p is None else tuple(p.shape) for name, p in module._parameters.items()}
    kind: Any = type(module)
    known, changed = _known(kind)
    values, own = vars(module), _own_defaults(kind)
    return {
        name: value
        for name in sorted(filter(known, values))
        if is_plain(value := values[name], keys=_KEYS)
        and not (isinstance(value, list | dict) and name in changed)
        and not (name in own and type(own[name]) is type(value) and own[name] == value)
    }


@functools.cache
def _known(cls: type) -> tuple[Callable[[str], bool], set[str]]:
    """Whether a name is that of a setting of a class, and the attributes whose entries its `forward` changes."""
    theirs = [base for base in cls.__mro__ if _is_torch(base)]
    arguments = {name for base in theirs for name in (*_defaults(base), *vars(base).get("__constants__", ()))}
    of_torch = {name for base in theirs for name in _assigned(vars(base).get("__init__"))}
    makers, run = _reached(cls, "__init__"), _reached(cls, "forward")
    made = {name for function in makers for name in _assigned(function)}
    anything = any({"setattr", "__dict__", "vars"} & _names(function) for function in makers)
    others = _ASIDE | of_torch | {name for function in run for name in _assigned(function)}

    @functools.cache
    def known(name: str) -> bool:
        public = not name.startswith("_") and name not in _ASIDE and not _SWITCHES.search(name)
        own = name in made or anything or "head" in name or "group" in name  # their numbers are also set from outside
        return public and (name in arguments or (own and name not in others))

    return known, {name for function in run for name in _changed(function)}


def _reached(cls: type, start: str) -> set[Callable]:
    """The functions of a class, but not of torch's, that a method of it may call, and the method."""
    methods: dict[str, list[Callable]] = {}
    for base in cls.__mro__:
        for name, value in ({} if _is_torch(base) else vars(base)).items():
            function = inspect.unwrap(getattr(value, "__func__", value)) if callable(value) else None
            if hasattr(function, "__code__"):
                methods.setdefault(name, []).append(function)
    found: set[Callable] = set()
    waiting = list(methods.get(start, ()))
    while waiting:
        function = waiting.pop()
        if function not in found:
            found.add(function)
            waiting += [f for name in _names(function) if name != start for f in methods.get(name, ())]
    return found


def _assigned(function: Any) -> set[str]:
    """The attributes that a function assigns."""
    return {step.argval for step in _steps(function) if step.opname == "STORE_ATTR"}


def _changed(function: Callable) -> set[str]:
    """The attributes whose entries a function assigns, or that it appends to and the like."""
    result, held = set(), ""
    for step in _steps(function):
        loads = step.opname in ("LOAD_ATTR", "LOAD_METHOD")
        if held and (step.opname == "STORE_SUBSCR" or (loads and step.argval in _CHANGES)):
            result.add(held)
        if loads:
            held = step.argval
        elif not step.opname.startswith(("LOAD_CONST", "LOAD_FAST", "LOAD_SMALL", "BINARY_", "COPY", "SWAP")):
            held = ""
    return result


def _steps(function: Any) -> Iterator[dis.Instruction]:
    """The instructions of a function, and of the functions and comprehensions in it."""
    waiting = [getattr(inspect.unwrap(function), "__code__", None)] if callable(function) else []
    while waiting:
        if (code := waiting.pop(0)) is not None:
            yield from dis.get_instructions(code)
            waiting += [constant for constant in code.co_consts if isinstance(constant, CodeType)]


def _names(function: Callable) -> set[str]:
    return {step.argval for step in _steps(function) if step.opcode in dis.hasname}


@functools.cache
def _defaults(cls: type) -> dict[str, Any]:
    """The arguments of a class's own constructor, with their defaults."""
    init = vars(cls).get("__init__")
    parameters = list(inspect.signature(init).parameters.values())[1:] if hasattr(init, "__code__") else []
    return {p.name: p.default for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}


@functools.cache
def _own_defaults(cls: type) -> dict[str, Any]:
    """The values that constructors of torch's classes give the settings of one of them."""
    theirs = [base for base in reversed(cls.__mro__) if _is_torch(base)]
    return {name: value for base in theirs for name, value in _defaults(base).items()}


def _is_torch(cls: type) -> bool:
    return cls.__module__.partition(".")[0] == "torch"


def _hash(facts: Any) -> str:
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]

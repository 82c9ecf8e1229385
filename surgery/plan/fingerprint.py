"""Hashes by which a plan knows its full model: names and shapes of its tensors, classes and settings of its modules."""

import functools
import hashlib
import inspect
import json
import re
from collections.abc import Mapping
from typing import Any

from torch import nn

from surgery.plain import is_plain

_VERSION = "3:"  # what `structure` begins with; another version's hashes were made of other facts
_ASIDE = {"device", "dtype", "name_or_path"}  # may differ between models that compute the same
_COUNTS = re.compile("head|group")  # settings whatever the constructor calls them
_SWITCHES = re.compile("drop|checkpointing|fused")  # how much is dropped, and how the same is computed


def fingerprint(shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Return a hash of the names and shapes of a model's tensors, whatever their order.

    >>> fingerprint({"a": (1,), "b": (2,)}) == fingerprint({"b": (2,), "a": (1,)})
    True
    """
    return _hash(sorted((name, list(shape)) for name, shape in shapes.items()))


def structure(model: nn.Module) -> str:
    """Return a hash of a model's modules: their names, classes and settings.

    Rates of dropout, and switches for checkpointing and fused kernels, may differ.

    >>> structure(nn.Conv2d(1, 2, 3)) == structure(nn.Conv2d(1, 2, 3, stride=2))
    False
    """
    counted = ((name, m) for name, m in model.named_modules() if "drop" not in type(m).__name__.lower())
    return _VERSION + _hash([[name, type(module).__qualname__, settings(module)] for name, module in counted])


def has_structure(model: nn.Module, known: str) -> bool:
    """Return whether a model may be the one of which a hash is known; a hash of another version says nothing.

    >>> has_structure(nn.ReLU(), structure(nn.ReLU())), has_structure(nn.GELU(), structure(nn.ReLU()))
    (True, False)
    """
    return not known.startswith(_VERSION) or known == structure(model)


def settings(module: nn.Module) -> dict[str, Any]:
    """Return a module's own settings by the attribute's name, as `structure` has them.

    A setting is a number, a string, a bool, None, or a tuple, list or dict of these, in a public attribute that is
    called like an argument of the constructor, or counts heads or groups. What `forward` keeps in other attributes is
    none, so that a model has the same hash after it has run. With the default value of one of torch's constructors it
    is left out, so that arguments that a later torch adds change nothing.

    >>> settings(nn.LayerNorm(3, eps=0.1))
    {'eps': 0.1, 'normalized_shape': (3,)}
    """
    if isinstance(module, nn.ParameterDict | nn.ParameterList):
        return {name: None if p is None else tuple(p.shape) for name, p in module._parameters.items()}
    kind: Any = type(module)
    arguments, defaults = _arguments(kind), _torch_defaults(kind)
    return {
        name: value
        for name, value in sorted(vars(module).items())
        if (name in arguments or _COUNTS.search(name))
        and not (name.startswith("_") or name in _ASIDE or _SWITCHES.search(name))
        and is_plain(value, keys=str | int)
        and not (name in defaults and type(defaults[name]) is type(value) and defaults[name] == value)
    }


@functools.cache
def _arguments(cls: type) -> frozenset[str]:
    """Return the names of the arguments of a class's constructor, those of the classes that it inherits included."""
    constants = {name for base in cls.__mro__ for name in vars(base).get("__constants__", ())}
    return frozenset(constants.union(*map(_own_arguments, cls.__mro__)))


@functools.cache
def _torch_defaults(cls: type) -> dict[str, Any]:
    """Return the default values of the arguments of torch's constructors among those of a class."""
    theirs = [base for base in reversed(cls.__mro__) if base.__module__.partition(".")[0] == "torch"]
    return {name: default for base in theirs for name, default in _own_arguments(base).items()}


@functools.cache
def _own_arguments(cls: type) -> dict[str, Any]:
    """Return the arguments of the constructor that a class itself defines, with their defaults."""
    init = vars(cls).get("__init__")
    parameters = list(inspect.signature(init).parameters.values())[1:] if hasattr(init, "__code__") else []
    return {p.name: p.default for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}


def _hash(facts: Any) -> str:
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]

"""Hashes that identify a plan's full model by tensors, classes and settings."""

import functools
import hashlib
import inspect
import json
import re
from collections.abc import Mapping
from typing import Any

from torch import nn

from surgery.names import named_modules
from surgery.plain import is_plain

_VERSION = "3:"  # the first characters of `structure`; hashes of other versions cannot be compared
_IGNORED = {"device", "dtype", "name_or_path"}  # may differ between models that compute the same
_COUNTS = re.compile("head|group")  # settings even if they are no arguments of the constructor
_SWITCHES = re.compile("drop|checkpointing|fused")  # rates of dropout, and other ways to compute the same


def fingerprint(shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Return a hash of the names and shapes of tensors, whatever their order.

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
    counted = ((name, m) for name, m in named_modules(model) if "drop" not in type(m).__name__.lower())
    return _VERSION + _hash([[name, type(module).__qualname__, settings(module)] for name, module in counted])


def has_structure(model: nn.Module, known: str) -> bool:
    """Return whether a hash of `structure` may be the model's.

    Any hash of another version may be.

    >>> has_structure(nn.ReLU(), structure(nn.ReLU())), has_structure(nn.GELU(), structure(nn.ReLU()))
    (True, False)
    """
    return not known.startswith(_VERSION) or known == structure(model)


def settings(module: nn.Module) -> dict[str, Any]:
    """Return a module's own settings by the attribute's name, as `structure` has them.

    A setting is a number, a string, a bool, None, or a tuple, list or dict of these, in a public attribute. The
    attribute has the name of an argument of the constructor, or counts heads or groups. Values that `forward` stores in
    other attributes do not count, so that running a model does not change its hash. Settings with the default value of
    one of torch's constructors are skipped, so that new arguments in a later torch change nothing.

    >>> settings(nn.LayerNorm(3, eps=0.1))
    {'eps': 0.1, 'normalized_shape': (3,)}
    """
    if isinstance(module, nn.ParameterDict | nn.ParameterList):
        return {name: None if p is None else tuple(p.shape) for name, p in module._parameters.items()}
    kind: Any = type(module)
    arguments, defaults, held = _arguments(kind), _torch_defaults(kind), vars(module)
    named = sorted(name for name in held if _is_setting(name, name in arguments))
    return {
        name: value
        for name in named
        if is_plain(value := held[name], keys=str | int)
        and not (name in defaults and type(defaults[name]) is type(value) and defaults[name] == value)
    }


@functools.cache
def _is_setting(name: str, is_argument: bool) -> bool:
    """Return whether an attribute of this name may be a setting."""
    aside = name.startswith("_") or name in _IGNORED or bool(_SWITCHES.search(name))
    return not aside and (is_argument or bool(_COUNTS.search(name)))


@functools.cache
def _arguments(cls: type) -> frozenset[str]:
    """Return the names of the constructor's arguments, of a class and its bases."""
    constants = {name for base in cls.__mro__ for name in vars(base).get("__constants__", ())}
    return frozenset(constants.union(*map(_list_arguments, cls.__mro__)))


@functools.cache
def _torch_defaults(cls: type) -> dict[str, Any]:
    """Return the arguments of torch's constructors in a class, with their defaults."""
    torch_classes = [base for base in reversed(cls.__mro__) if base.__module__.partition(".")[0] == "torch"]
    return {name: default for base in torch_classes for name, default in _list_arguments(base).items()}


@functools.cache
def _list_arguments(cls: type) -> dict[str, Any]:
    """Return the arguments of a class's own constructor, with their defaults."""
    init = vars(cls).get("__init__")
    parameters = list(inspect.signature(init).parameters.values())[1:] if hasattr(init, "__code__") else []
    return {p.name: p.default for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}


def _hash(facts: Any) -> str:
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]

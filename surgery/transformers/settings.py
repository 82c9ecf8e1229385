"""Models that a class makes from a configuration, such as HuggingFace's.

No library is known here. Such a model holds, under the name of its constructor's first parameter (`config`), the object
that it was made from, and its class makes the same tensors from a copy of that object.
"""

import copy
import functools
import inspect
import logging
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

from surgery.names import join
from surgery.plain import is_like, is_plain, is_settings
from surgery.states import shapes_of

Fields = tuple[str, ...]  # where a value lies in a configuration: names of attributes, and keys of dicts


def holder_of(model: nn.Module) -> str | None:
    """Return the attribute with the configuration that made the model, or None.

    >>> class Net(nn.Linear):
    ...     def __init__(self, sizes): super().__init__(sizes.inputs, 2); self.sizes = sizes
    >>> from types import SimpleNamespace
    >>> holder_of(Net(SimpleNamespace(inputs=3))), holder_of(nn.Linear(3, 2))
    ('sizes', None)
    """
    first, *others = list(inspect.signature(type(model).__init__).parameters.values())[1:] or [None]
    if first is None or first.kind not in (first.POSITIONAL_ONLY, first.POSITIONAL_OR_KEYWORD):
        return None
    needed = [p for p in others if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    return first.name if not needed and is_settings(vars(model).get(first.name)) else None


def make_from(kind: type[nn.Module], config: Any) -> nn.Module:
    """Make a model from a copy of a configuration, parameters on the meta device.

    Buffers have their values. Whatever error the class raises is passed on.
    """
    with _quiet(kind), torch.random.fork_rng(devices=[]), _parameters_on_meta(), _Undrawn():
        return kind(copy.deepcopy(config))


class _Undrawn(TorchFunctionMode):
    """A mode that leaves meta tensors without initial weights, which take time."""

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in _DRAWING:
            tensor = args[0] if args else kwargs.get("tensor")
            if isinstance(tensor, Tensor) and tensor.is_meta:
                return tensor
        return func(*args, **kwargs)


_DRAWING = {name for name in vars(nn.init) if name.endswith("_") and not name.startswith("_")}
"""Names of functions and methods that fill a tensor with random values.

Libraries wrap torch's functions under these names.
"""


@contextmanager
def _quiet(kind: type) -> Iterator[None]:
    """Let a class's library log only errors while a model is made to be looked at."""
    library = logging.getLogger(kind.__module__.partition(".")[0])
    level = library.level
    library.setLevel(max(level, logging.ERROR))
    try:
        yield
    finally:
        library.setLevel(level)


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Put this thread's new parameters on the meta device, without initial weights."""
    thread = threading.get_ident()

    def put(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta or threading.get_ident() != thread:
            return None
        return nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)

    registered: Any = put  # torch says that such a hook returns nothing
    hook = register_module_parameter_registration_hook(registered)
    try:
        yield
    finally:
        hook.remove()


def mismatch(model: nn.Module, twin: nn.Module, but: Collection[str] = ()) -> str:
    """Return the first difference of a model and its class's model; "" without one.

    What counts are the names and shapes of their states, and the numbers that their modules hold, but for dropout.

    Args:
        but: the names of attributes whose numbers do not count.
    """
    differences = (text for key, text in other_numbers(model, twin) if key not in but)
    return first_difference(shapes_of(model), shapes_of(twin)) or next(differences, "")


def other_numbers(model: nn.Module, twin: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield (attribute, difference in words) of numbers in which two models differ."""
    others = dict(twin.named_modules())
    for name, module in model.named_modules():
        if "drop" in type(module).__name__.lower():
            continue
        for key, value in vars(module).items():
            other = getattr(others.get(name), key, value)
            if not key.startswith("_") and _is_number(value) and _is_number(other) and value != other:
                yield key, f"{join(name, key)} is {value} here and {other} in a model made from it"


def first_difference(own_shapes: Mapping[str, tuple[int, ...]], twin_shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Name the first tensor whose shape differs between a model and its class's."""
    for name in (*own_shapes, *twin_shapes):
        if own_shapes.get(name) != twin_shapes.get(name):
            has, gets = (f"{shapes[name]}" if name in shapes else "missing" for shapes in (own_shapes, twin_shapes))
            return f"{name} is {has} here and {gets} in a model made from it"
    return ""


def describe_mismatch(model: nn.Module, reason: str, hint: str) -> str:
    """Say that a model's configuration does not describe it, why, and what to do."""
    return (
        f"the configuration of this {type(model).__name__} does not describe it ({reason}). Its class alone cannot "
        f"load a checkpoint of it: save the plan and the state, and restore it with Plan.build; or {hint}"
    )


def fields(config: Any, path: Fields = ()) -> Iterator[tuple[Fields, Any]]:
    """Yield (place, value) of everything in a configuration, also nested and in dicts.

    >>> from types import SimpleNamespace
    >>> list(fields(SimpleNamespace(width=4, vision=SimpleNamespace(width=8), rope={"base": 1e4})))
    [(('width',), 4), (('vision', 'width'), 8), (('rope', 'base'), 10000.0)]
    """
    for name, value in (config if isinstance(config, dict) else vars(config)).items():
        if not isinstance(name, str):
            continue
        if is_settings(value) or isinstance(value, dict):
            yield from fields(value, (*path, name))
        else:
            yield (*path, name), value


def field(config: Any, path: Fields) -> Any:
    """Return the value at a place."""
    return functools.reduce(lambda at, name: at[name] if isinstance(at, dict) else getattr(at, name), path, config)


def set_field(config: Any, path: Fields, value: Any) -> None:
    """Set the value at a place."""
    owner = field(config, path[:-1])
    if isinstance(owner, dict):
        owner[path[-1]] = value
    else:
        setattr(owner, path[-1], value)


def reread(config: Any) -> Any:
    """Return the configuration as after saving and reading, if it can do both.

    Otherwise itself.

    Whatever error its class raises is passed on.
    """
    if hasattr(config, "to_dict") and hasattr(type(config), "from_dict"):
        with _quiet(type(config)):
            return type(config).from_dict(config.to_dict())
    return config


def attribute_edits(model: nn.Module, twin: nn.Module) -> list[dict[str, Any]] | None:
    """Return edits that give modules, and objects in them, another model's attributes.

    None if they differ in something that an edit cannot carry.
    """
    others, seen, edits = dict(twin.named_modules()), set(), []

    def compare(module: str, path: str, owner: Any, other: Any) -> bool:
        for name, value in list(vars(owner).items()):
            if name not in vars(other) or name in _OWN:
                continue
            new = vars(other)[name]
            if is_settings(value) and is_settings(new):
                if id(value) not in seen:
                    seen.add(id(value))
                    if not compare(module, join(path, name), value, new):
                        return False
            elif is_plain(value) and value != new:
                if not is_plain(new) or not is_like(value, new):
                    return False
                edits.append({"do": "set", "module": module, "attribute": join(path, name), "value": new})
        return True

    same = all(
        name in others and _kind(others[name]) == _kind(module) and compare(name, "", module, others[name])
        for name, module in model.named_modules()
    )
    return edits if same and len(others) == len(dict(model.named_modules())) else None


def _kind(module: nn.Module) -> tuple[str, str]:
    """Return a module's class name; parametrizations make a class for each module."""
    return type(module).__module__, type(module).__qualname__


_OWN = vars(nn.Module()).keys()  # what every module keeps for itself


def _is_number(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_number, value))
    return isinstance(value, int | float) and not isinstance(value, bool)

"""Copies of modules, and the exchange of their tensors."""

import copy
import inspect
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from functools import cache
from types import FunctionType, MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.weight_norm import WeightNorm

from surgery.errors import SurgeryError, first_line
from surgery.names import named_modules


def copy_sharing(model: nn.Module, shared: Mapping[int, Any] | None = None) -> tuple[nn.Module, dict[int, Tensor]]:
    """Return a deep copy that shares its state's and given tensors, with their ids."""
    tensors = {
        id(tensor): tensor
        for _, module in named_modules(model)
        for name, tensor in (*module._parameters.items(), *module._buffers.items())
        if tensor is not None and name not in module._non_persistent_buffers_set
    }
    return clone(model, {**(shared or {}), **tensors}), tensors


def plain_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's tensors in attributes that are neither parameters nor buffers."""
    held = vars(module)
    if _SIMPLE.issuperset(map(type, held.values())):
        return {}
    return {name: value for name, value in held.items() if isinstance(value, Tensor)}


def clone(model: nn.Module, instead: Mapping[int, Any] = MappingProxyType({})) -> nn.Module:
    """Return a deep copy of a module that shares nothing; SurgeryError if it fails.

    What is given by id of an object takes its place in the copy.
    """
    modules = [module for _, module in named_modules(model)]
    refuse_compiled(model)
    refuse_scripted(model)
    _refuse_closures(modules)
    # deepcopy refuses tensors that a hook computes from parameters before each pass (weight norm, pruning).
    computed = {
        id(value): value.detach().clone()
        for module in modules
        for value in (*plain_tensors(module).values(), *_find_cached(module))
        if value.grad_fn is not None
    }
    try:
        twin = _deepcopy(model, {**computed, **instead})
    except Exception as error:
        why = f"{type(model).__name__} cannot be copied ({first_line(error)})"
        raise SurgeryError(f"{why}: give a model that copy.deepcopy can copy", code="unsupported") from error
    for _, module in named_modules(twin):
        if _drops_caches(type(module)):  # they are of the old weights, and are dropped when the module is moved
            module._apply(lambda tensor: tensor)
    return twin


def refuse_scripted(model: nn.Module) -> None:
    """Raise SurgeryError for a model that is, or holds, a scripted module."""
    for name, module in named_modules(model):
        if isinstance(module, torch.jit.ScriptModule):
            part = f"module {name!r}" if name else "the model"
            raise SurgeryError(f"{part} is scripted (torch.jit): give the plain module before that", code="unsupported")


def refuse_compiled(model: nn.Module) -> None:
    """Raise SurgeryError for a model that is, or holds, a result of torch.compile."""
    for name, module in named_modules(model):
        if "_orig_mod" in module._modules:
            original = f"{name}._orig_mod"
            way = f"put {original} in its place: model.set_submodule({name!r}, model.get_submodule({original!r}))"
            raise SurgeryError(
                f"{f'module {name!r} is' if name else 'this is'} what torch.compile returned: "
                f"{way if name else 'give model._orig_mod'}, the module that was compiled, and compile afterwards",
                code="unsupported",
            )


def _refuse_closures(modules: list[nn.Module]) -> None:
    """Raise SurgeryError for functions of modules that hold modules, as closures do."""
    inside: set[int] = set()
    for module in modules:
        attributes = vars(module)
        if _SIMPLE.issuperset(map(type, attributes.values())) and not any(map(attributes.get, _HOOKS)):
            continue
        functions = [
            (f"{name} was replaced by", value)
            for name, value in attributes.items()
            if isinstance(value, FunctionType) and name != _COMPILED
        ]
        functions += [
            (f"{name[1:-1]} is", hook)
            for name in _HOOKS
            for hook in attributes.get(name, {}).values()
            if isinstance(hook, FunctionType)
        ]
        for change, value in functions:
            inside = inside or {id(part) for m in modules for part in (m, *m._parameters.values())} - {id(None)}
            if any(id(held) in inside for held in _find_held(value)):
                raise SurgeryError(
                    f"{type(module).__name__}: its {change} a function that holds modules: give types.MethodType",
                    code="unsupported",
                )


def _find_held(function: FunctionType, depth: int = 3) -> Iterator[Any]:
    """Yield what a function takes from around it; for methods their object."""
    try:
        around = inspect.getclosurevars(function)
    except ValueError:  # a variable around it has no value yet
        return
    for value in (*around.nonlocals.values(), *around.globals.values(), *(function.__defaults__ or ())):
        yield getattr(value, "__self__", value)
        if isinstance(value, FunctionType) and depth:
            yield from _find_held(value, depth - 1)


def _find_cached(module: nn.Module) -> list[Tensor]:
    """Return the tensors in dictionaries of a module that drops them when it is moved."""
    if not _drops_caches(type(module)):
        return []
    held = [values for name, values in vars(module).items() if name not in _OWN and isinstance(values, dict)]
    return [value for values in held for value in values.values() if isinstance(value, Tensor)]


def _drops_caches(kind: type[nn.Module]) -> bool:
    """Return whether a class, other than torch's own, reacts when it is moved."""
    return kind._apply is not nn.Module._apply and not kind._apply.__module__.startswith("torch.")


def _deepcopy(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Copy as `copy.deepcopy`, but fast for modules' plain and empty attributes."""
    kind: Any = type(module)
    if id(module) in memo or not _is_copied_plainly(kind):
        return copy.deepcopy(module, memo)
    twin = memo[id(module)] = kind.__new__(kind)
    state = vars(module).copy()
    for name, value in state.items():
        kind = type(value)
        if kind in _ATOMS:
            continue
        if kind in _EMPTY and not value and name in _OWN:  # which modules do not share
            new = kind()
        elif kind is tuple and _ATOMS.issuperset(map(type, value)):
            new = value
        elif name == _COMPILED:  # by `module.compile()`, for the original alone
            new = None
        elif id(value) in memo:
            new = memo[id(value)]
        elif kind in _EMPTY and not value and not getattr(value, "__dict__", None):
            new = memo[id(value)] = kind()
        elif name in _HELD and kind is dict:
            new, copied = memo.setdefault(id(value), {}), _deepcopy if name == "_modules" else copy.deepcopy
            new.update((key, None if part is None else copied(part, memo)) for key, part in value.items())
        else:
            new = copy.deepcopy(value, memo)
        state[name] = new
    if type(module).__setstate__ is nn.Module.__setstate__:
        vars(twin).update(state)  # which that does, after adding what old files lack
    else:
        twin.__setstate__(state)
    return twin


@cache
def _is_copied_plainly(kind: type) -> bool:
    return all(getattr(kind, name, None) is plain for name, plain in _PLAIN.items())


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_COMPILED = "_compiled_call_impl"
_ATOMS = {type(None), bool, int, float, str}
_EMPTY = {dict, OrderedDict, list, set}
_SIMPLE = _ATOMS | _EMPTY | {tuple}  # types of nearly all attributes of a module
_HELD = {"_modules", "_parameters", "_buffers"}
_OWN = vars(nn.Module()).keys()  # its empty dictionaries have no attributes
_PLAIN = {  # by name of what a class may say about copies of its instances, what it has if it says nothing
    f"__{name}__": getattr(nn.Module, f"__{name}__", None)
    for name in ("deepcopy", "reduce", "reduce_ex", "getstate", "getnewargs", "getnewargs_ex", "new", "slots")
}


def like(value: Tensor, tensor: Tensor) -> Tensor:
    """Return the value without history, as a parameter if the tensor is one."""
    value = value.detach()
    if isinstance(tensor, nn.Parameter):
        value = nn.Parameter(value, requires_grad=tensor.requires_grad)
        value.__dict__.update(tensor.__dict__)
    return value


def replace_tensors(model: nn.Module, values: Mapping[int, Tensor], originals: Mapping[int, Tensor]) -> None:
    """Replace the original tensors (by id) by new ones wherever they are registered."""
    new_tensors: dict[int, Tensor] = {}
    modules = [module for _, module in named_modules(model)]
    for module in modules:
        registries: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for registry in registries:
            for name, tensor in registry.items():
                key = id(tensor)
                if tensor is None or key not in originals or key not in values:
                    continue
                if key not in new_tensors:
                    new_tensors[key] = like(values[key], tensor)
                registry[name] = new_tensors[key]
    for module in modules:
        for attribute, held in vars(module).items():  # recurrent modules also keep them in a list
            if isinstance(held, list) and any(id(item) in new_tensors for item in held):
                vars(module)[attribute] = [new_tensors.get(id(item), item) for item in held]


def renew_computed(model: nn.Module) -> None:
    """Compute weights that torch's pruning and old weight_norm derive before a pass."""
    for module in model.modules():
        for hook in module._forward_pre_hooks.values() if module._forward_pre_hooks else ():
            if hasattr(hook, "apply_mask") or isinstance(hook, WeightNorm):
                with torch.no_grad():
                    hook(module, ())

"""Methods by name, and those of a user: pure functions of the tensors of one name."""

import inspect
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from typing import Any

from torch import Tensor

from surgery.errors import SurgeryError, explained
from surgery.lazy import LazyState, Pieces, Reader
from surgery.merging.driver import Group, merged, needed
from surgery.states import Models, State

METHODS: dict[str, Callable[..., Any]] = {}
"""The methods that need nothing but models and numbers; `fisher`, `regmean` and `greedy_soup` need more."""


def register_method(function: Callable[..., Tensor]) -> Callable[..., State | LazyState]:
    """Add a merge method: a function from the tensors of one name, one of each model, to the merged tensor.

    The tensors have the dtype to compute in. The method has the function's name, and takes what the others take:
    models as a stack or a list of states, modules or files; the rest of the function's parameters by keyword. `base`
    is there the base's tensor, `weights` a list of the models' weights. Any other parameter is a setting: a number, or
    numbers by patterns of tensor names. Models of weight 0 are left out, integer tensors carry the maximum, and the
    function is called with whole tensors, one name at a time.

    Args:
        function: of a list of tensors, and of whatever else it takes. Each setting has a default.

    Returns:
        The method, which is also `surgery.merging.METHODS[name]` and `surgery.merging.name`.

    Raises:
        SurgeryError: if there is a method of this name, or a setting has no default. When it is called: if the function
            fails, or gives no tensor of the shape that it was given.

    >>> import torch
    >>> @register_method
    ... def median(tensors, *, scale=1.0):
    ...     return scale * torch.stack(tensors).median(0).values
    >>> median([{"w": torch.tensor([x])} for x in (1.0, 2.0, 9.0)], scale={"w": 2.0})
    {'w': tensor([4.])}
    >>> del METHODS["median"]
    """
    name = getattr(function, "__name__", "")
    if not name.isidentifier() or name in METHODS or name in vars(import_module("surgery.merging")):
        why = (
            "is in surgery.merging already: give it another name"
            if name.isidentifier()
            else "has no name: write it with def"
        )
        raise SurgeryError(f"{name or function!r} {why}", code="argument")
    if not (every := [*inspect.signature(function).parameters.values()]):
        raise SurgeryError(f"{name} takes no argument: its first one is a list of tensors", code="argument")
    if any(one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD) for one in every):
        raise SurgeryError(f"{name} takes *arguments or **settings: name each of them", code="argument")
    tensors, *parameters = every
    keywords = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in parameters]
    own = {one.name: one.default for one in keywords if one.name not in ("base", "weights")}
    if required := [setting for setting, default in own.items() if default is inspect.Parameter.empty]:
        raise SurgeryError(
            f"{name} has no default for {', '.join(required)}: give one, such as {required[0]}=1.0", code="argument"
        )
    takes = {one.name for one in keywords}
    needs_base = any(one.name == "base" and one.default is inspect.Parameter.empty for one in keywords)

    def kernel(group: Group, **settings: Any) -> Reader:
        shape, size = group.tensors[0].shape, group.size
        for setting, value in settings.items():
            if isinstance(value, list | tuple):  # a number for each model
                settings[setting] = [value[k] for k in group.places]
        if "weights" in takes:
            settings["weights"] = group.weights

        def make() -> Tensor:
            values = [group.value(i, 0, size).reshape(shape) for i in range(len(group.tensors))]
            base = None if group.base is None else group.origin(0, size).reshape(shape)
            with explained(f"{name} fails on {group.name!r}"):
                result = function(values, **settings, **({"base": base} if "base" in takes else {}))
            if not isinstance(result, Tensor) or tuple(result.shape) != tuple(shape):
                got = f"a tensor {tuple(result.shape)}" if isinstance(result, Tensor) else type(result).__name__
                raise SurgeryError(
                    f"{name} gives {got} for {group.name!r}: a tensor {tuple(shape)} is needed", code="argument"
                )
            return result.to(group.dtype)

        return Pieces.computed(shape, group.dtype, make).read

    @wraps(function)
    def method(models: Models, **given: Any) -> State | LazyState:
        bound = signature.bind(models, **given)
        bound.apply_defaults()
        settings = dict(bound.arguments)
        base = needed(settings.get("base")) if needs_base else settings.get("base")
        return merged(
            kernel,
            models,
            base=base,
            weights=settings.get("weights"),
            method=name,
            settings={setting: (settings[setting], default) for setting, default in own.items()},
        )

    first = tensors.replace(name="models", kind=inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if "weights" in takes:
        keywords = [one.replace(default=None) if one.name == "weights" else one for one in keywords]
    signature = inspect.Signature([first, *keywords])
    vars(method)["__signature__"] = signature
    METHODS[name] = method
    return method

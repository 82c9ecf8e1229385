"""Methods by name, also a user's own: pure functions of the tensors of one name."""

import difflib
import inspect
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from typing import Any

from torch import Tensor

from surgery.errors import SurgeryError, explain
from surgery.lazy import LazyState, Pieces, Reader
from surgery.merging.driver import TensorGroup, merge_tensors
from surgery.states import Models, State

METHODS: dict[str, Callable[..., Any]] = {}
"""The methods that need nothing but models and numbers; `fisher`, `regmean` and `greedy_soup` need more."""


def register_method(function: Callable[..., Tensor]) -> Callable[..., State | LazyState]:
    """Add a merge method: a function from one tensor of each model to the merged one.

    The tensors are copies, in the dtype to compute in. The method has the function's name. It takes models as a stack
    or a list of states, modules or `surgery.files.open_state(path)`, and by keyword the rest of the function's
    parameters, `base` and `weights` only if they are among these. The function gets the base's tensor as `base`, and as
    `weights` a list of the models' weights: as they were given, 1 without any, not divided by their sum, and negative
    ones too. Any other parameter is a setting: a number, or numbers by patterns of tensor names. Models of weight 0 are
    left out, integer tensors carry the maximum, and the function is called with whole tensors, one name at a time.

    A function of the same module and name takes the place of the one before it, as when a notebook's cell runs again.

    Args:
        function: of a list of tensors, and of whatever else it takes. Each setting has a default.

    Returns:
        The method, which is also `surgery.merging.METHODS[name]` and `surgery.merging.name`.

    Raises:
        SurgeryError: if there is another method of this name, or a setting has no default. When it is called: for
            arguments that the method does not take, and if the function fails, or gives no tensor of the shape that it
            was given, or NaN or infinity.

    >>> import torch
    >>> @register_method
    ... def median(tensors, *, scale=1.0):
    ...     return scale * torch.stack(tensors).median(0).values
    >>> median([{"w": torch.tensor([x])} for x in (1.0, 2.0, 9.0)], scale={"w": 2.0})
    {'w': tensor([4.])}
    >>> del METHODS["median"]
    """
    name = getattr(function, "__name__", "")
    before = METHODS.get(name)
    again = before and (before.__module__, before.__qualname__) == (function.__module__, function.__qualname__)
    if not name.isidentifier() or (before and not again) or name in vars(import_module("surgery.merging")):
        why = (
            "is in surgery.merging already: give it another name"
            if name.isidentifier()
            else "has no name: write it with def"
        )
        raise SurgeryError(f"{name or function!r} {why}", code="argument")
    if not (every := [*inspect.signature(function).parameters.values()]):
        raise SurgeryError(f"{name} takes no argument: its first one is a list of tensors", code="argument")
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in every):
        raise SurgeryError(f"{name} takes *arguments or **settings: name each of them", code="argument")
    tensors, *parameters = every
    keywords = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
    defaults = {p.name: p.default for p in keywords if p.name not in ("base", "weights")}
    if required := [setting for setting, default in defaults.items() if default is inspect.Parameter.empty]:
        raise SurgeryError(f"{name} has no default for {', '.join(required)}: give one each", code="argument")
    takes = {p.name for p in keywords}
    needs_base = any(p.name == "base" and p.default is inspect.Parameter.empty for p in keywords)

    def kernel(group: TensorGroup, **settings: Any) -> Reader:
        shape, size = group.tensors[0].shape, group.size
        for setting, value in settings.items():
            if isinstance(value, list | tuple):  # a number for each model
                settings[setting] = [value[k] for k in group.places]
        if "weights" in takes:
            settings["weights"] = group.weights

        def make() -> Tensor:
            values = [group.value(i, 0, size).reshape(shape).clone() for i in range(len(group.tensors))]
            base = None if group.base is None else group.origin(0, size).reshape(shape).clone()
            with explain(f"{name} fails on {group.name!r}"):
                result = function(values, **settings, **({"base": base} if "base" in takes else {}))
            is_tensor = isinstance(result, Tensor)
            if not is_tensor or tuple(result.shape) != tuple(shape) or result.is_complex():
                got = f"a {result.dtype} tensor {tuple(result.shape)}" if is_tensor else type(result).__name__
                raise SurgeryError(f"{name} gives {got} for {group.name!r}, no real tensor {shape}", code="argument")
            result = result.to(group.dtype)
            if not bool(result.isfinite().all()):
                raise SurgeryError(f"{name} gives NaN or infinity for {group.name!r}: mend it", code="values")
            return result

        return Pieces.from_function(shape, group.dtype, make).read

    @wraps(function)
    def method(models: Models, *more: Any, **given: Any) -> State | LazyState:
        if more:
            raise SurgeryError(f"{name} takes the models as one list: {name}([a, b])", code="argument")
        for key in given.keys() - takes:
            near = difflib.get_close_matches(key, takes, n=1)
            choice = f"takes {', '.join(map(str, signature.parameters))}"
            raise SurgeryError(
                f"{name} takes no {key!r}: {f'did you mean {near[0]!r}?' if near else f'it {choice}'}", code="argument"
            )
        settings = {p.name: p.default for p in keywords if p.name != "base"} | given
        if needs_base and settings.get("base") is None:
            raise SurgeryError(f"{name} needs a base: give the model that was fine-tuned as base=...", code="argument")
        return merge_tensors(
            kernel,
            models,
            base=settings.get("base"),
            weights=settings.get("weights"),
            method=name,
            settings={setting: (settings[setting], default) for setting, default in defaults.items()},
        )

    first = tensors.replace(name="models", kind=inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if "weights" in takes:
        keywords = [p.replace(default=None) if p.name == "weights" else p for p in keywords]
    signature = inspect.Signature([first, *keywords])
    vars(method)["__signature__"] = signature
    METHODS[name] = method
    return method

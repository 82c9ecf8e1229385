"""The operations of a trace, and where they lie in the code of the model."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Generic, TypeVar

from torch import Tensor, nn

from surgery.names import outwards
from surgery.plain import is_plain
from surgery.width.rules.registry import rule_for

A = TypeVar("A")  # an axis: of `surgery.width.axes` while a model is traced, of `surgery.width.solve` afterwards


@dataclass
class Step(Generic[A]):
    """One operation.

    Attributes:
        name, module: the operation, and the module whose forward called it.
        inputs, outputs: the axes of the tensors that it took and returned.
        sources: where each input came from: a tensor of the model, or an output of an earlier step.
        numbers: arguments, or attributes of torch's own modules, that are sizes of these axes.
        scalars: the call's other numbers, strings and flags.
        summed: the axes that were summed to compute the inputs; a scale may come from their sizes.
        decided: what it decided by looking at numbers (indices, masks, how many there are), in place of its result's
            other parts None. None if it decides nothing, or on the meta device.
    """

    name: str
    module: str
    inputs: list[tuple[A, ...]]
    outputs: list[tuple[A, ...]]
    sources: list[Any]
    numbers: dict[str, A | list[A]]
    scalars: dict[str, Any]
    summed: list[A]
    decided: Any = None

    def axes(self) -> list[A]:
        """Return the axes of all tensors that it took and returned."""
        return [axis for tensor in (*self.inputs, *self.outputs) for axis in tensor]


def number_steps(steps: Sequence[Step]) -> dict[tuple[str, int, str], int]:
    """Return each step's number by its module, its place in the module, and its name.

    The place is how many operations ran before in the module.
    """
    calls: Counter[str] = Counter()
    numbers = {}
    for number, step in enumerate(steps):
        numbers[step.module, calls[step.module], step.name] = number
        calls[step.module] += 1
    return numbers


def alike(model: nn.Module, name: str) -> list[str]:
    """Return the names of all modules that run the code that a module runs.

    They are modules of its class. One of torch's own layers and containers counts only at the same place in a module
    of the same class around it; all entries of one list lie at one place.

    >>> net = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2), "c": nn.TransformerEncoderLayer(4, 2, 8)})
    >>> alike(net, "a"), alike(net, "c.linear1"), alike(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 4)), "0")
    (['a'], ['c.linear1'], ['0', '2'])
    """
    modules = dict(model.named_modules())

    def is_own(module: nn.Module) -> bool:
        return not type(module).__module__.startswith("torch.nn.") or (
            bool(module._modules) and type(module) not in (nn.Sequential, nn.ModuleList, nn.ModuleDict)
        )

    def place(name: str) -> tuple[type, type, str]:
        around = next((outer for outer in outwards(name) if is_own(modules[outer])), "")
        inside = ".".join("*" if part.isdigit() else part for part in name[len(around) :].split("."))
        return type(modules[name]), type(modules[around]), inside

    target = place(name)
    return [other for other in modules if place(other) == target]


def same_code(model: nn.Module, steps: Sequence[Step], number: int) -> list[Step]:
    """Return the operations at a step's place in the code of all `alike` modules."""
    numbers = number_steps(steps)
    module, call, name = [*numbers][number]
    matches = (numbers.get((other, call, name)) for other in alike(model, module))
    return [steps[match] for match in matches if match is not None]


def bind(func: Any, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of an operation by their names in its schema."""
    defaults = _defaults(func)
    return {**defaults, **dict(zip(defaults, args)), **kwargs}


@cache
def _defaults(func: Any) -> dict[str, Any]:
    return {argument.name: argument.default_value for argument in func._schema.arguments}


def scalars_of(func: Any, bound: dict[str, Any]) -> dict[str, Any]:
    """Return the numbers, strings and flags of a call, except sizes.

    The shapes of the results show the sizes.
    """
    rule = rule_for(func)
    sizes = rule.sizes if rule else ()
    scalars = {}
    for key, value in bound.items():
        if value is None or key in sizes or type(value) in _NOT_PLAIN:
            continue
        if type(value) in _PLAIN or is_plain(value):
            scalars[key] = tuple(value) if isinstance(value, list) else value
    return scalars


_PLAIN = {bool, int, float, str}
_NOT_PLAIN = {Tensor, nn.Parameter}  # most of what operations take, without a look through a list of types

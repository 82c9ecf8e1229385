"""Whether a model with repeated positions computes what it did, operation by operation, in float64."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from surgery.copying import clone
from surgery.errors import SurgeryError, first_line
from surgery.forward import call, copied, in_mode, tensors_in, watching
from surgery.states import state
from surgery.torch_private import TorchDispatchMode, tree_map
from surgery.width.activations import unfused
from surgery.width.rules.registry import operation_name, rule_for
from surgery.width.solved import Axes, Choice, Solution, positions

_NEAR = 1e-6  # of the largest number: rounding is far below that, another computation above


class Changed(NamedTuple):
    """An operation that computes something else in the wide model."""

    step: int
    name: str
    module: str


def trial(model: nn.Module, seed: int = 0) -> nn.Module:
    """A copy in float64, in evaluation mode, with weights a little off: those that begin at zero would hide much."""
    twin, generator = clone(model).double().eval(), torch.Generator().manual_seed(seed)
    for name, tensor in state(twin).items():
        if tensor.is_floating_point() and "running_" not in name:
            size = tensor.abs().mean().nan_to_num().clamp(min=0.02)
            tensor += 0.1 * size * torch.randn(tensor.shape, generator=generator, dtype=torch.float64).to(tensor)
    return twin


def trial_input(example: Any, seed: int = 0) -> Any:
    """The example in float64, with random numbers where all of them are equal."""
    generator = torch.Generator().manual_seed(seed)

    def tried(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point():
            return leaf
        if leaf.numel() > 1 and (leaf.is_meta or leaf.max() == leaf.min()):
            return torch.randn(leaf.shape, generator=generator, dtype=torch.float64).to(leaf.device)
        return leaf.double()

    return tree_map(tried, dict(example) if hasattr(example, "keys") else example)


@contextmanager
def one_by_one() -> Iterator[None]:
    """Attention and recurrent layers run as the same operations, whatever their sizes."""
    with unfused(), sdpa_kernel(SDPBackend.MATH):
        yield


def changed(model: nn.Module, wide: nn.Module, solution: Solution, choice: Choice, example: Any) -> Changed | None:
    """The first operation whose result in the wide model is not that of the model with positions repeated; or None."""
    kept: list[list[Tensor]] = []
    try:
        with in_mode(model, training=False), watching(model), _Keep(kept):
            call(model, copied(example))
    except Exception as error:
        raise SurgeryError(f"{type(model).__name__} does not run in float64: {first_line(error)}") from error
    compare = _Compare(kept, solution, choice)
    try:
        with in_mode(wide, training=False), watching(wide), compare:
            call(wide, copied(example))
    except Exception:  # it differs, or does not run, which is a difference, too
        step = solution.steps[compare.done]
        return Changed(compare.done, step.name, step.module)
    return None


class _Differs(Exception):
    """Raised within the wide model's forward pass."""


class _Keep(TorchDispatchMode):
    """Keeps the results of all operations that are steps."""

    def __init__(self, kept: list[list[Tensor]]):
        super().__init__()
        self.kept = kept

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if not ((rule := rule_for(func)) and rule.layout):
            self.kept.append([tensor.detach().clone() for tensor in tensors_in(result)])
        return result


class _Compare(TorchDispatchMode):
    """Compares the results with those that were kept."""

    def __init__(self, kept: list[list[Tensor]], solution: Solution, choice: Choice):
        super().__init__()
        self.kept, self.solution, self.choice, self.done = kept, solution, choice, 0
        self.held: list[bool] = []  # by step whether it computes something of the model's tensors alone: of weights

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if (rule := rule_for(func)) and rule.layout:
            return result
        step, before = self.solution.steps[self.done], self.kept[self.done]
        held = bool(step.sources) and all(map(self._is_held, step.sources))
        self.held.append(held)
        if step.name != operation_name(func) or not all(
            _same(repeated(old, axes, self.choice), new)
            for old, axes, new in zip(before, step.outputs, tensors_in(result))
            if not held and [axis.size for axis in axes] == list(old.shape)  # some kernels leave statistics empty
        ):
            raise _Differs
        self.kept[self.done] = []
        self.done += 1
        return result

    def _is_held(self, source: Any) -> bool:
        return source is not None and (isinstance(source[0], str) or self.held[source[0]])


def repeated(tensor: Tensor, axes: Axes, choice: Choice) -> Tensor:
    """The tensor with the positions along each axis that a choice says.

    >>> from surgery.width.solved import Atom
    >>> width = Atom(2)
    >>> repeated(torch.tensor([5, 6]), (width,), {width: [0, 1, 0]}).tolist()
    [5, 6, 5]
    """
    for dim, axis in enumerate(axes):
        places = positions(axis, choice)
        if places != list(range(axis.size)):
            tensor = tensor.index_select(dim, torch.tensor(places, device=tensor.device))
    return tensor


def _same(expected: Tensor, found: Tensor) -> bool:
    if expected.shape != found.shape:
        return False
    if not found.is_floating_point() or not found.numel():
        return found.dtype != expected.dtype or bool((found == expected).all())
    size = expected.abs().nan_to_num(0, 0, 0).max().item()
    near = _NEAR if found.dtype == torch.float64 else 1e-3
    return torch.allclose(expected, found, rtol=0, atol=near * max(size, 1e-30), equal_nan=True)

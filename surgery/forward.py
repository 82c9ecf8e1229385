"""Run a user's model to watch it: a copy, on the meta device if possible."""

import gc
import logging
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from surgery.copying import clone, like, plain_tensors
from surgery.errors import InternalError, SurgeryError, explain, first_line
from surgery.names import named_modules
from surgery.torch_private import BatchNorm, Dropout, Watch, tree_leaves, tree_map

T = TypeVar("T")

_log = logging.getLogger(__name__)


def named_tensors(model: nn.Module) -> Iterator[tuple[tuple[str, str], Tensor]]:
    """Yield ((module name, attribute), tensor) of all tensors, tied ones repeated."""
    for name, module in named_modules(model, tied=True):
        for attribute, tensor in (
            *module._parameters.items(),
            *module._buffers.items(),
            *plain_tensors(module).items(),
        ):
            if tensor is not None:
                yield (name, attribute), tensor


def tensors_in(tree: Any) -> list[Tensor]:
    """Return the tensors in nested lists, tuples, mappings and dataclasses' fields.

    >>> [tensor.item() for tensor in tensors_in({"a": [torch.tensor(1)], "b": (torch.tensor(2), None)})]
    [1, 2]
    """
    kind = type(tree)
    if kind is Tensor or kind is nn.Parameter:
        return [tree]
    if kind is tuple or kind is list or kind is dict:
        parts = tree.values() if kind is dict else tree
        held: list[Tensor] = []
        for part in parts:
            kind = type(part)
            if kind is Tensor or kind is nn.Parameter:
                held.append(part)
            elif kind not in _LEAVES and not (kind is list and _LEAVES.issuperset(map(type, part))):
                held += tensors_in(part)
        return held
    tensors: list[Tensor] = []
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor):
            tensors.append(leaf)
        elif isinstance(leaf, Mapping):  # one that torch does not look into, such as a UserDict
            tensors += tensors_in(dict(leaf))
        elif hasattr(leaf, "__dataclass_fields__"):
            tensors += [value for value in vars(leaf).values() if isinstance(value, Tensor)]
    return tensors


_LEAVES = {type(None), bool, int, float, str, torch.dtype, torch.device}  # most of what calls take besides tensors


@contextmanager
def watching(model: nn.Module) -> Iterator[list[str]]:
    """Yield a stack of the running modules' names; the outermost is ""."""
    stack, key = [""], object()  # without torch's handles: each is several objects
    hooks: list[dict[Any, Any]] = []

    def leave(module, args, output):
        stack.pop()

    module: Any
    for name, module in named_modules(model):

        def enter(module, args, name=name):
            stack.append(name)

        # Outside of the module's own hooks, so that what these compute counts as the module's.
        module._forward_pre_hooks[key], module._forward_hooks[key] = enter, leave
        module._forward_pre_hooks.move_to_end(key, last=False)
        hooks += module._forward_pre_hooks, module._forward_hooks
    try:
        yield stack
    finally:
        for held in hooks:
            held.pop(key, None)


class Uses(Watch):
    """Notes the order in which operations first take tensors; `names` are by id.

    >>> late, early = torch.ones(2), torch.ones(2)
    >>> with Uses({id(late): "late", id(early): "early"}) as uses: _ = (3 * early) * late
    >>> uses.order
    {'early': 0, 'late': 1}
    """

    def __init__(self, names: Mapping[int, str]):
        super().__init__()
        self.names, self.order = names, {}

    def before(self, operation, args, kwargs):
        for tensor in tensors_in((args, kwargs)):
            if id(tensor) in self.names:
                self.order.setdefault(self.names[id(tensor)], len(self.order))


class _Unfused:
    """A switch of torch's fused attention: off while any thread is inside."""

    def __init__(self) -> None:
        self._lock, self._inside, self._before = threading.Lock(), 0, True

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._before = torch.backends.mha.get_fastpath_enabled()
                torch.backends.mha.set_fastpath_enabled(False)
            self._inside += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                torch.backends.mha.set_fastpath_enabled(self._before)


_UNFUSED = _Unfused()


@contextmanager
def in_mode(model: nn.Module, training: bool, own_draws: bool = True) -> Iterator[None]:
    """Run in training or evaluation mode without gradients, and restore all flags.

    Attention and transformer layers run operation by operation, without torch's fused kernels for evaluation. In
    training mode batch norms and dropout evaluate all the same: the axes are as in training, which refuses a single
    value a channel. Random numbers are the same in every pass, and other code's generators do not change.

    Args:
        own_draws: False where the body also takes batches of the caller's, who may sample them.
    """
    flags = {module: module.training for _, module in named_modules(model)}
    if any(type(module).train is not nn.Module.train for module in flags):
        model.train(training)
    else:
        for module in flags:
            _set_training(module, training)
    for module in flags if training else ():
        if isinstance(module, (BatchNorm, Dropout)):
            _set_training(module, False)
    try:
        with torch.no_grad(), _UNFUSED, _fix_generators() if own_draws else nullcontext():
            yield
    finally:
        for module, flag in flags.items():
            _set_training(module, flag)


def _set_training(module: nn.Module, flag: bool) -> None:
    """Set a flag past the slow `__setattr__`; scripted modules keep theirs elsewhere."""
    if "training" in vars(module):
        vars(module)["training"] = flag
    else:
        module.training = flag


@contextmanager
def pause_collector() -> Iterator[None]:
    """Pause Python's collector of cyclic garbage in the block; also a decorator.

    A trace makes many objects. The collector would then scan all of torch's objects again, which doubles the time.
    """
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()


@contextmanager
def _fix_generators() -> Iterator[None]:
    """Fix the generators of torch, NumPy and Python in the block, then restore them.

    torch's start from a state that no seed has, so that a seed set by the code shows.
    """
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
    devices = range(len(torch.cuda.default_generators)) if torch.cuda.is_initialized() else ()
    with torch.random.fork_rng(devices):
        try:
            random.seed(0)
            np.random.seed(0)  # noqa: NPY002
            torch.manual_seed(0) if devices else torch.default_generator.manual_seed(0)
            torch.rand((), device="cpu")
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)  # noqa: NPY002


def check_runs(model: Any, example: Any, who: str) -> None:
    """Raise SurgeryError that names `who` unless it gets a module and an input."""
    if not isinstance(model, nn.Module):
        raise SurgeryError(f"{who} runs the model: give a module, not a {type(model).__name__}", code="argument")
    if example is None:
        raise SurgeryError(f"{who} runs one forward pass: give an input as `example`", code="argument")


def as_batches(batches: Iterable[Any], argument: str) -> list[Any]:
    """Return batches as a list; SurgeryError if there are none, or for one batch."""
    if isinstance(batches, Tensor | Mapping) or not isinstance(batches, Iterable):
        raise SurgeryError(f"batches is a list or another iterable, got {type(batches).__name__}", code="argument")
    batches = list(batches)
    if not batches:
        raise SurgeryError(f"{argument!r} needs `batches`, at least one", code="argument")
    return batches


def call(model: nn.Module, example: Any) -> Any:
    """Call a model with an example, see `arguments`."""
    args, kwargs = arguments(example)
    return model(*args, **kwargs)


def arguments(example: Any) -> tuple[tuple, dict[str, Any]]:
    """Return a model's positional and keyword arguments for an example.

    A tuple holds positional arguments. A mapping (a dict, a tokenizer's BatchEncoding) holds keyword arguments.
    Anything else is the one argument: a tensor, or a list where the model takes a list, as torchvision's detectors do.

    >>> arguments((1, 2)), arguments({"x": 1}), arguments([1, 2])
    (((1, 2), {}), ((), {'x': 1}), (([1, 2],), {}))
    """
    if isinstance(example, Mapping):
        return (), dict(example)
    return (example if isinstance(example, tuple) else (example,)), {}


def copy_tensors(example: Any) -> Any:
    """Return the example with copies of its tensors: models may write into them."""
    if isinstance(example, Mapping):
        example = dict(example)
    return tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, Tensor) else leaf, example)


def in_precision(kind: torch.dtype, real: torch.dtype) -> torch.dtype:
    """Return a dtype in another's precision; complex stays complex, integers stay.

    >>> in_precision(torch.complex64, torch.float64), in_precision(torch.int8, torch.float64)
    (torch.complex128, torch.int8)
    """
    if kind.is_complex:
        return real.to_complex()
    return real if kind.is_floating_point else kind


def vary(example: Any, dtype: torch.dtype | None = None) -> Any:
    """Return the example in a precision, with random numbers where all are equal.

    >>> tree = vary((torch.zeros(2, 3), torch.tensor([1.0, 2.0])))
    >>> tree[0].unique().numel(), tree[1].tolist()
    (6, [1.0, 2.0])
    """
    generator = torch.Generator().manual_seed(0)

    def tried(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not (leaf.is_floating_point() or leaf.is_complex()):
            return leaf
        kind = in_precision(leaf.dtype, dtype or leaf.dtype)
        if leaf.numel() > 1 and (leaf.is_meta or bool((leaf == leaf.flatten()[0]).all())):
            return torch.randn(leaf.shape, generator=generator, dtype=kind).to(leaf.device)
        return leaf.to(kind)

    return tree_map(tried, dict(example) if hasattr(example, "keys") else example)


class Observed(NamedTuple, Generic[T]):
    """A record of a model that ran.

    Attributes:
        found: what the observer returned.
        model, example: what it can be repeated with: a copy that has not run, and the example, both on the meta device;
            the given ones if the model cannot run there.
        on_meta: whether it ran on the meta device.
        why_not: if not, the error that it raised there.
    """

    found: T
    model: nn.Module
    example: Any
    on_meta: bool
    why_not: str


def observe(model: nn.Module, example: Any, watch: Callable[[nn.Module, Any], T], hint: str = "") -> Observed[T]:
    """Let `watch` run a copy of the model, if possible on the meta device.

    Models that look at numbers while they run (`item`, NumPy) cannot run on the meta device. They run on their own
    device; the result holds the reason, which is also logged. A copy runs, since a forward pass may change the model.

    Args:
        hint: the end of the error's text if the model does not run on the example.

    Raises:
        SurgeryError: if the model cannot be copied, does not run on the example, or runs only without `watch`.
    """
    if isinstance(example, Mapping):
        example = dict(example)  # torch looks into plain dicts, but not into every mapping
    on_meta = tree_map(lambda x: x.to("meta") if isinstance(x, Tensor) else x, example)
    try:
        ghost = ghost_of(model)
        return Observed(watch(ghost_of(model), on_meta), ghost, on_meta, True, "")
    except Exception as error:  # any error that is not about the meta device is raised again below
        why_not = first_line(error)
    name = type(model).__name__
    _log.info("%s cannot run on the meta device, so it runs where it is: %s", name, why_not)
    alone = clone(model)
    try:
        return Observed(watch(alone, copy_tensors(example)), model, example, False, why_not)
    except (SurgeryError, InternalError):
        raise
    except Exception as error:
        twin = clone(model)
        with explain(f"{name} does not run on the example", hint), in_mode(twin, training=False):
            call(twin, copy_tensors(example))
        raise SurgeryError(
            f"{name} runs on the example, but its computation cannot be followed ({first_line(error)}): let it compute "
            "with plain tensors, such as padded ones in the place of nested ones",
            code="unsupported",
        ) from error


def ghost_of(model: nn.Module) -> nn.Module:
    """Return a copy on the meta device."""
    held = {id(tensor): tensor for _, tensor in named_tensors(model)}
    return clone(model, {key: like(_on_meta(tensor), tensor) for key, tensor in held.items()})


def _on_meta(tensor: Tensor) -> Tensor:
    """Return `empty_like` of a tensor on the meta device, faster than torch does."""
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided and not tensor.is_quantized
    if plain and tensor.is_contiguous():
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    return torch.empty_like(tensor, device="meta")

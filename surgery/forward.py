"""Running somebody's model to watch it: on a copy, without memory where that can be, and its flags put back."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from surgery.edits import copy_sharing, replace_tensors
from surgery.errors import SurgeryError, first_line

T = TypeVar("T")


def named_tensors(model: nn.Module) -> Iterator[tuple[tuple[str, str], Tensor]]:
    """((module name, attribute name), tensor) for every tensor that a module holds, tied ones under each name."""
    for name, module in model.named_modules(remove_duplicate=False):
        plain = {key: value for key, value in vars(module).items() if isinstance(value, Tensor)}
        for attribute, tensor in (*module._parameters.items(), *module._buffers.items(), *plain.items()):
            if tensor is not None:
                yield (name, attribute), tensor


def tensors_in(tree: Any) -> list[Tensor]:
    """The tensors of any nesting of lists, tuples and dicts."""
    found = []
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif hasattr(leaf, "__dataclass_fields__"):
            found += [value for value in vars(leaf).values() if isinstance(value, Tensor)]
    return found


@contextmanager
def watching(model: nn.Module) -> Iterator[list[str]]:
    """A stack of the names of the modules whose forward is running; the outermost is ""."""
    names = {id(module): name for name, module in model.named_modules()}
    stack = [""]

    def enter(module, args):
        stack.append(names.get(id(module), stack[-1]))

    def leave(module, args, output):
        stack.pop()

    hooks = [
        nn.modules.module.register_module_forward_pre_hook(enter),
        nn.modules.module.register_module_forward_hook(leave, always_call=False),
    ]
    try:
        yield stack
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def in_mode(model: nn.Module, training: bool) -> Iterator[None]:
    """Training or evaluation mode without gradients; every module's training flag is put back afterwards."""
    flags = {module: module.training for module in model.modules()}
    model.train(training)
    try:
        with torch.no_grad():
            yield
    finally:
        for module, flag in flags.items():
            module.training = flag


def run(model: nn.Module, example: Any) -> Any:
    """Call a model with an example: a tensor, a tuple of arguments or a dict of keyword arguments."""
    if isinstance(example, dict):
        return model(**example)
    return model(*example) if isinstance(example, tuple) else model(example)


def observed(model: nn.Module, example: Any, watch: Callable[[nn.Module, Any], T]) -> tuple[T, nn.Module, Any]:
    """(what `watch` makes of a copy of the model and an example, a second copy that was not run, the example).

    All on the meta device, which computes nothing; but models that look at numbers while they run (`item`, NumPy)
    cannot run there, and run as they are. What runs is a copy, since a forward pass may leave things behind.
    """
    ghost_example = tree_map(lambda x: x.to("meta") if isinstance(x, Tensor) else x, example)
    try:
        ghost = ghost_of(model)
        return watch(ghost_of(model), ghost_example), ghost, ghost_example
    except Exception:  # whatever goes wrong there and matters goes wrong here again
        pass
    try:
        alone = copy.deepcopy(model)
    except Exception as error:
        raise SurgeryError(f"{type(model).__name__} cannot be copied: {first_line(error)}") from error
    try:
        return watch(alone, example), model, example
    except SurgeryError:
        raise
    except Exception as error:
        name = type(model).__name__
        raise SurgeryError(f"{name} does not run on the example: {first_line(error)}") from error


def ghost_of(model: nn.Module) -> nn.Module:
    """A copy on the meta device."""
    ghost, _ = copy_sharing(model)
    empty = {id(tensor): torch.empty_like(tensor, device="meta") for _, tensor in named_tensors(ghost)}
    for module in ghost.modules():
        plain = {key: value for key, value in vars(module).items() if isinstance(value, Tensor)}
        vars(module).update({key: empty[id(tensor)] for key, tensor in plain.items()})
    replace_tensors(ghost, empty, empty)
    return ghost

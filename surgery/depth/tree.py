"""Modules that stand for blocks: rows, gaps, and blocks known by state alone."""

import ast
import inspect
import textwrap
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from surgery.errors import SurgeryError
from surgery.states import owners, shapes_of, tensors


class Chain(nn.Sequential):
    """A block and the blocks grafted onto it; all get the first one's other arguments."""

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]  # takes more
        out, inputs = None, (x, *args)
        for block in self:
            before, named = (
                tuple(map(_copy_list, inputs)),
                {key: _copy_list(value) for key, value in kwargs.items()},
            )
            out = block(*inputs, **kwargs)
            inputs = pass_on(out, tuple(map(_as_before, inputs, before)))
            kwargs = {key: _as_before(value, named[key]) for key, value in kwargs.items()}
        return out


def _copy_list(value: Any) -> Any:
    return list(value) if type(value) is list else value


def _as_before(value: Any, before: Any) -> Any:
    """Return a list without what a block appended to it; slots that it filled stay."""
    return before if type(value) is list and len(value) != len(before) else value


def pass_on(out: Any, inputs: tuple) -> tuple:
    """Return the inputs of a chain's next block.

    If a block returns several values, those like its inputs replace these.
    """
    if not isinstance(out, tuple) or isinstance(inputs[0], tuple):
        return (out, *inputs[1:])
    rest = (o if _same_form(o, i) else i for o, i in zip(out[1:], inputs[1:]))
    return (out[0], *rest, *inputs[len(out) :])


class Skip(nn.Module):
    """Takes the place of a dropped block and returns its input."""

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        return x


def _same_form(a: Any, b: Any) -> bool:
    return type(a) is type(b) and getattr(a, "shape", None) == getattr(b, "shape", None)


def is_sequential(holder: nn.Module) -> bool:
    """Return whether a module is a Sequential that only runs its children in order.

    >>> is_sequential(nn.Sequential()), is_sequential(nn.ModuleList())
    (True, False)
    """
    return isinstance(holder, nn.Sequential) and type(holder).forward is nn.Sequential.forward


def returns_several(block: nn.Module) -> bool:
    """Return whether a block's forward returns `a, b`; False without its source.

    >>> returns_several(nn.Linear(2, 2)), returns_several(nn.MultiheadAttention(4, 2))
    (False, True)
    """
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(type(block).forward)))
    except (OSError, TypeError, SyntaxError):
        return False
    return any(isinstance(node, ast.Return) and isinstance(node.value, ast.Tuple) for node in ast.walk(tree))


class Part(nn.Module):
    """A module known by its tensors alone. `kind` is its name without its number."""

    kind = ""


def as_module(model: nn.Module | Mapping[str, Tensor]) -> nn.Module:
    """Return the module, or for a state a tree of `Part` modules with its tensors.

    Raises SurgeryError for anything else, and for a module whose weights do not exist yet.

    >>> [name for name, _ in as_module({"a.0.weight": Tensor(2)}).named_modules()]
    ['', 'a', 'a.0']
    """
    if isinstance(model, nn.Module):
        for name, _, own_tensors in owners(model):
            if any(map(is_lazy, own_tensors.values())):
                raise SurgeryError(f"module {name!r} is lazy: run one forward pass first", code="unsupported")
        return model
    if not isinstance(model, Mapping):
        raise SurgeryError(f"{type(model).__name__} is no module and no state: give one of these", code="argument")
    root = Part()
    for name, tensor in model.items():
        *path, last = name.split(".")
        module: Any = root
        for child in path:
            if child not in module._modules:
                module._modules[child] = Part()
                if child[-1:].isdigit():
                    module._modules[child].kind = child.rstrip("0123456789")
                else:
                    module._modules[child].kind = f".{child}"  # differs from all siblings' kinds
            module = module._modules[child]
        module._buffers[last] = tensor.detach()
    for parent in list(root.modules()):
        for name, module in parent._modules.items():
            if module.kind != f".{name}" and _is_chain(module, parent):
                for block in module.children():
                    block.kind = module.kind
                parent._modules[name] = Chain(*module.children())
    return root


def _is_chain(module: nn.Module, parent: nn.Module) -> bool:
    """Return whether a part is a chain of `graft`: equal children, like a sibling."""
    children = module._modules
    if module._buffers or len(children) < 2 or list(children) != [str(i) for i in range(len(children))]:
        return False
    forms = [shapes_of(tensors(child)) for child in children.values()]
    siblings = [s for s in parent.children() if isinstance(s, Part) and s.kind == module.kind and s is not module]
    return forms.count(forms[0]) == len(forms) and any(forms[0].keys() <= tensors(s).keys() for s in siblings)

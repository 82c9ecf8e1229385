"""Blocks that are put into a model, and taken out of it."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

from torch import Tensor, nn

from surgery.copying import copy_sharing, replace_tensors
from surgery.depth.tree import Chain, Part, is_sequential, returns_several
from surgery.errors import SurgeryError
from surgery.names import join
from surgery.plain import is_settings
from surgery.plan.edits import apply_edit


def copies_of(model: nn.Module, name: str, count: int, origin: dict[int, str]) -> list[nn.Module]:
    """Return copies of a block; tensors tied to outside tensors stay shared.

    `origin` is extended.

    Objects that modules outside of the block hold, too, such as the model's configuration, are shared with them.
    """
    block = model.get_submodule(name)
    inside = set(block.modules())
    outside = [module for module in model.modules() if module not in inside]
    tied = {id(tensor) for tensor in _list_tensors(outside)}
    settings = {id(value): value for module in outside for value in vars(module).values() if is_settings(value)}
    copies = []
    for _ in range(count):
        copy, originals = copy_sharing(block, settings)
        values = {key: t.detach().clone() for key, t in originals.items() if key not in tied}
        replace_tensors(copy, values, originals)
        for new, old in zip(_list_tensors(copy.modules()), _list_tensors(block.modules())):
            if id(old) in origin:
                origin[id(new)] = origin[id(old)]
        copies.append(copy)
    return copies


def is_list(holder: nn.Module) -> bool:
    """Return whether a module can hold more or fewer blocks: a list or a Sequential.

    >>> is_list(nn.ModuleList()), is_list(nn.ModuleDict())
    (True, False)
    """
    return isinstance(holder, nn.ModuleList) or (is_sequential(holder) and prefix_of(holder) == "")


def prefix_of(holder: nn.Module) -> str | None:
    """Return what precedes the numbers 0, 1, ... in all children's names, or None.

    >>> from collections import OrderedDict
    >>> prefix_of(nn.Sequential(nn.ReLU())), prefix_of(nn.Sequential(OrderedDict(a_0=nn.ReLU(), a_1=nn.ReLU())))
    ('', 'a_')
    """
    names = list(holder._modules)
    prefix = names[0].rstrip("0123456789") if names else ""
    return prefix if names == [f"{prefix}{i}" for i in range(len(names))] else None


def insert(model: nn.Module, name: str, copies: list[nn.Module], grow: bool) -> dict[str, Any]:
    """Insert copies behind a block: into its list (`grow`), or as a chain instead.

    Returns the edit that removes them.
    """
    parent, _, child = name.rpartition(".")
    owner = model.get_submodule(parent)
    position = list(owner._modules).index(child)
    if isinstance(owner, Chain) and position + 1 == len(owner):
        owner.extend(copies)
        return {"do": "unchain", "module": parent, "keep": position + 1}
    if grow or _is_numbered_part(owner) or isinstance(owner, Chain):
        _splice(owner, position + 1, 0, copies)
        return {"do": "remove", "module": parent, "first": position + 1, "count": len(copies)}
    block = owner._modules[child]
    if runs_nothing(block):
        raise SurgeryError(
            f"{name!r} is only a list, which nothing can be chained to: give the model's input as example=...",
            code="depth",
        )
    owner._modules[child] = Chain(block, *copies)
    owner._modules[child].training = block.training
    return {"do": "unchain", "module": name, "keep": 1}


def drop(model: nn.Module, names: Sequence[str], shrink: bool) -> tuple[list[dict[str, Any]], set[str]]:
    """Drop blocks of one section: out of their list (`shrink`), or by a `Skip`.

    Returns the edits that do so, and the names of those that a `Skip` stands for.
    """
    edits, skipped = [], set()
    # From the last to the first, so that renumbering does not move blocks that are still to be dropped.
    for parent, group in groupby(reversed(names), lambda name: name.rpartition(".")[0]):
        owner, children = model.get_submodule(parent), [name.rpartition(".")[2] for name in group]
        if isinstance(owner, Chain) and len(children) == len(owner):
            more, gone = drop(model, [parent], shrink)
            edits += more
            skipped |= {join(parent, children[-1])} if gone else set()
            continue
        for child in children:
            edit = _drop_child(model, parent, child, shrink)
            edits += edit
            skipped |= {join(parent, child)} if edit and edit[0]["do"] == "skip" else set()
        if isinstance(owner, Chain) and len(owner) == 1:
            edits.append({"do": "unchain", "module": parent, "keep": 1})
            apply_edit(model, edits[-1])
    return edits, skipped


def _drop_child(model: nn.Module, parent: str, child: str, shrink: bool) -> list[dict[str, Any]]:
    owner = model.get_submodule(parent)
    position = list(owner._modules).index(child)
    if _is_numbered_part(owner):
        _splice(owner, position, 1, [])
        return []
    if shrink or isinstance(owner, Chain):
        edit = {"do": "remove", "module": parent, "first": position, "count": 1}
    else:
        name, block = join(parent, child), owner._modules[child]
        if runs_nothing(block):
            raise SurgeryError(
                f"{name!r} is only a list, which no identity can replace: give the model's input as example=...",
                code="depth",
            )
        if returns_several(block):
            raise SurgeryError(
                f"block {name!r} ({type(block).__name__}) returns several values, so no identity can take its place: "
                + ("give the model's input as example=..., or " if is_list(owner) else "")
                + "leave its section as it is",
                code="depth",
            )
        edit = {"do": "skip", "module": name}
    apply_edit(model, edit)
    return [edit]


def runs_nothing(block: nn.Module) -> bool:
    """Return whether a block has no forward of its own, like a ModuleList.

    >>> runs_nothing(nn.ModuleList()), runs_nothing(nn.Linear(1, 1))
    (True, False)
    """
    return type(block).forward is nn.Module.forward and not isinstance(block, Part)


def _list_tensors(modules: Iterable[nn.Module]) -> Iterator[Tensor]:
    for module in modules:
        yield from (t for t in (*module._parameters.values(), *module._buffers.values()) if t is not None)


def _is_numbered_part(owner: nn.Module) -> bool:
    return isinstance(owner, Part) and all(child.isdigit() for child in owner._modules)


def _splice(owner: nn.Module, position: int, count: int, new: list[nn.Module]) -> None:
    """Replace `count` numbered children by new ones, and renumber those behind."""
    children = list(owner._modules.items())
    prefix = prefix_of(owner) or ""
    first = int(children[position - 1][0].removeprefix(prefix)) + 1 if position else 0
    later = [(str(int(n) + len(new) - count), child) for n, child in children[position + count :]]
    owner._modules.clear()
    owner._modules.update([*children[:position], *((f"{prefix}{first + i}", c) for i, c in enumerate(new)), *later])

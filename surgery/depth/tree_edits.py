"""Inserting blocks into the tree of a module and dropping them from it, with the edits for plans."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from torch import Tensor, nn

from surgery.depth.interface import returns_several
from surgery.depth.state_tree import Part
from surgery.edits import Chain, apply_edit, copy_sharing, replace_tensors
from surgery.errors import SurgeryError
from surgery.names import joined
from surgery.states import owners


def tensors(module: nn.Module) -> dict[str, Tensor]:
    """The registered tensors themselves (not detached), by state name."""
    return {name: tensor for _, _, own in owners(module) for name, tensor in own.items()}


def copy_block(model: nn.Module, name: str, origin: dict[int, str]) -> nn.Module:
    """A copy of a block with tensors of its own, except those tied to tensors outside of it. `origin` is extended."""
    block = model.get_submodule(name)
    inside = set(block.modules())
    outside = {id(tensor) for tensor in _registered(m for m in model.modules() if m not in inside)}
    copy, originals = copy_sharing(block)
    values = {key: t.detach().clone() for key, t in originals.items() if key not in outside}
    replace_tensors(copy, values, originals)
    for new, old in zip(_registered(copy.modules()), _registered(block.modules())):
        if id(old) in origin:
            origin[id(new)] = origin[id(old)]
    return copy


def insert(model: nn.Module, name: str, copies: list[nn.Module]) -> dict[str, Any]:
    """Insert copies behind a block. Returns the edit that removes them."""
    parent, _, child = name.rpartition(".")
    owner = model.get_submodule(parent)
    children = list(owner._modules.items())
    position = [n for n, _ in children].index(child)
    numbered = all(n == str(i) for i, (n, _) in enumerate(children))
    if isinstance(owner, Chain):
        owner.extend(copies)
        return {"do": "unchain", "module": parent, "keep": position + 1}
    if (_only_runs_children(owner) and numbered) or _is_numbered_part(owner):
        _splice(owner, position + 1, 0, copies)
        return {"do": "remove", "module": parent, "first": position + 1, "count": len(copies)}
    block = owner._modules[child]
    owner._modules[child] = Chain(block, *copies)
    owner._modules[child].training = block.training
    return {"do": "unchain", "module": name, "keep": 1}


def drop(model: nn.Module, names: Sequence[str]) -> list[dict[str, Any]]:
    """Drop blocks of one section, named in its order. Returns the edits that do so."""
    edits = []
    # From the last to the first, so that renumbering does not move blocks that are still to be dropped.
    for parent, group in groupby(reversed(names), lambda name: name.rpartition(".")[0]):
        owner, children = model.get_submodule(parent), [name.rpartition(".")[2] for name in group]
        if isinstance(owner, Chain) and len(children) == len(owner):
            edits += drop(model, [parent])
            continue
        for child in children:
            edits += _drop_child(model, parent, child)
        if isinstance(owner, Chain) and len(owner) == 1:
            edits.append({"do": "unchain", "module": parent, "keep": 1})
            apply_edit(model, edits[-1])
    return edits


def _drop_child(model: nn.Module, parent: str, child: str) -> list[dict[str, Any]]:
    owner = model.get_submodule(parent)
    position = list(owner._modules).index(child)
    if _is_numbered_part(owner):
        _splice(owner, position, 1, [])
        return []
    if _only_runs_children(owner) or isinstance(owner, Chain):
        edit = {"do": "remove", "module": parent, "first": position, "count": 1}
    else:
        name = joined(parent, child)
        if returns_several(block := owner._modules[child]):
            raise SurgeryError(
                f"block {name!r} ({type(block).__name__}) returns several values and cannot be left out: leave its "
                "section as it is"
            )
        edit = {"do": "skip", "module": name}
    apply_edit(model, edit)
    return [edit]


def _registered(modules: Iterator[nn.Module]) -> Iterator[Tensor]:
    for module in modules:
        yield from (t for t in (*module._parameters.values(), *module._buffers.values()) if t is not None)


def _only_runs_children(owner: nn.Module) -> bool:
    """Whether the module is a Sequential that only runs its children one after the other."""
    return isinstance(owner, nn.Sequential) and type(owner).forward is nn.Sequential.forward


def _is_numbered_part(owner: nn.Module) -> bool:
    return isinstance(owner, Part) and all(child.isdigit() for child in owner._modules)


def _splice(owner: nn.Module, position: int, count: int, new: list[nn.Module]) -> None:
    """Replace `count` numbered children by new ones, and renumber those behind; numbers may have gaps (activations)."""
    children = list(owner._modules.items())
    first = int(children[position - 1][0]) + 1 if position else 0
    later = [(str(int(n) + len(new) - count), child) for n, child in children[position + count :]]
    owner._modules.clear()
    owner._modules.update([*children[:position], *((str(first + i), c) for i, c in enumerate(new)), *later])

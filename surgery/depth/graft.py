"""Depth: `graft` repeats the last blocks of sections, `ungraft` drops them; both give the plan that relates the two."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, TypeAlias

from torch import Tensor, nn

from surgery.depth.check import check_depth
from surgery.depth.identity import silence
from surgery.depth.interface import returns_several
from surgery.depth.parts import Part, as_module
from surgery.depth.sections import Section, repeatable, sections
from surgery.edits import Chain, apply_edit, copy_sharing, replace_tensors
from surgery.errors import SurgeryError
from surgery.state import State, owners
from surgery.submodel import Source, Submodel, structure

Depths: TypeAlias = Sequence[int] | Mapping[str, int]


def graft(
    model: nn.Module | State,
    depths: Depths,
    mode: Literal["copy", "identity"] = "copy",
    example: Tensor | tuple | None = None,
) -> tuple[nn.Module | State, Submodel]:
    """Deepen a model: repeat the last block of each section until it has the depth asked for.

    Args:
        model: a module or a state; not changed, and no memory is shared with the result.
        depths: for each of `sections(model)` how many blocks it shall have, or by section name; unnamed ones stay.
        mode: `copy` repeats the weights (FedFA, Algorithm 2). `identity` also zeroes the last tensors on the residual
            branches of the new blocks, so that outputs stay the same (in eval mode, to 1e-5), and training can start
            from there; it needs a module and an example.
        example: the model's input, or a tuple of its inputs. Needed for `identity`; with `copy` it is a check that
            blocks follow each other, that the new ones are called, and that the output keeps its shape (on the meta
            device where the model runs there). Without it, what looks like a section is taken for one.

    Returns:
        The deeper model and the plan in which the given model is the small one and the deeper one the full:
        `plan.build(deeper)` is the given model again. With `copy` each tensor of a repeated block stands for all its
        copies, so `plan.embed(state(model))` is the deeper state. With `identity` new blocks have no counterpart in the
        small model: `embed`'s mask is False there.

    In a plain numbered Sequential new blocks become its children, and later ones move up. Elsewhere the last block
    makes room for a `Chain` of itself and its copies, which needs no change of the forward that calls it. A state does
    not tell where that is, so there numbered siblings are taken for a Sequential; its plan cannot `build`.

    Raises:
        SurgeryError: for a section that is deeper already or whose last block cannot be repeated.

    >>> block = lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    >>> deeper, plan = graft(nn.Sequential(nn.Linear(2, 4), block(), block(), nn.Linear(4, 2)), [3])
    >>> len(deeper), [source.name for source in plan.entries["2.0.weight"]]
    (5, ['2.0.weight', '3.0.weight'])
    """
    if mode not in ("copy", "identity"):
        raise SurgeryError(f"unknown mode {mode!r}: choose copy or identity")
    if mode == "identity" and (example is None or not isinstance(model, nn.Module)):
        raise SurgeryError("mode='identity' runs the model: give a module, and its input as example=")
    root = as_module(model)
    given = _tensors(root)
    origin = {id(tensor): name for name, tensor in given.items()}
    deeper, originals = copy_sharing(root)
    asked = _asked(model, depths)
    edits, made = _repeat(root, deeper, asked, origin)
    entries: dict[str, list[Source]] = {name: [] for name in given}
    new = {id(tensor) for copies in made.values() for block in copies for tensor in _tensors(block).values()}
    new -= set(originals)
    for name, tensor in _tensors(deeper).items():
        if mode == "copy" or id(tensor) not in new:
            entries[origin[id(tensor)]].append(_whole(name, tensor.shape))
    shapes = {name: tuple(tensor.shape) for name, tensor in _tensors(deeper).items()}
    replace_tensors(deeper, {key: tensor.detach().clone() for key, tensor in originals.items()}, originals)
    if mode == "identity":
        silence(model, deeper, made, example)
    elif example is not None:
        check_depth(root, deeper, example, asked)
    plan = Submodel(
        {name: tuple(sources) for name, sources in entries.items()}, shapes, tuple(edits), structure(deeper)
    )
    if isinstance(model, nn.Module):
        return deeper, plan
    return _tensors(deeper), Submodel(plan.entries, plan.shapes)


def _repeat(
    root: nn.Module, deeper: nn.Module, asked: list[tuple[Section, int]], origin: dict[int, str]
) -> tuple[list[dict[str, Any]], dict[str, list[nn.Module]]]:
    """Put copies behind the last blocks of `deeper`'s sections: the edits that this was, and the copies by block."""
    edits, made = [], {}
    # From the last section to the first, so that renumbering moves no block that is still to be repeated.
    for section, depth in reversed(asked):
        extra = depth - len(section.blocks)
        if extra < 0:
            raise SurgeryError(
                f"section {section.name!r} has {-extra} blocks more than {depth}: use ungraft to drop them"
            )
        if extra == 0:
            continue
        last = section.blocks[-1]
        if not repeatable(root, section):
            raise SurgeryError(_unrepeatable(root, section))
        made[last] = [_copy_block(deeper, last, origin) for _ in range(extra)]
        edits.insert(0, _insert(deeper, last, made[last]))
    return edits, made


def ungraft(
    model: nn.Module | State, depths: Depths, example: Tensor | tuple | None = None
) -> tuple[nn.Module | State, Submodel]:
    """Make a model shallower: drop the last blocks of each section; the inverse of `graft`, and more.

    Args:
        model: a module or a state; not changed, and no memory is shared with the result.
        depths: for each of `sections(model)` how many blocks to keep (at least 1), or by section name.
        example: the model's input, or a tuple of its inputs: a check as for `graft`. Without it nothing is run.

    Returns:
        The shallow model and the plan in which it is the small one and the given model the full. The last block
        that is kept stands for the dropped ones of its section, where their tensors have the same shapes (FedFA).
        A block dropped from a Sequential is gone and later ones move up; elsewhere a `Skip` takes its place.

    Raises:
        SurgeryError: for a depth below 1, or a section that is shallower already.

    >>> block = lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    >>> shallow, plan = ungraft(nn.Sequential(nn.Linear(2, 4), block(), block(), block(), nn.Linear(4, 2)), [1])
    >>> len(shallow), [source.name for source in plan.entries["1.0.bias"]]
    (3, ['1.0.bias', '2.0.bias', '3.0.bias'])
    """
    root = as_module(model)
    full = _tensors(root)
    name_of = {id(tensor): name for name, tensor in full.items()}
    shallow, _ = copy_sharing(root)
    edits, standing, asked = [], {}, _asked(model, depths)
    for section, depth in reversed(asked):
        if depth < 1:
            raise SurgeryError(f"section {section.name!r} cannot have {depth} blocks: keep at least 1")
        if depth > len(section.blocks):
            raise SurgeryError(f"section {section.name!r} has {len(section.blocks)} blocks, not {depth}: use graft")
        kept, dropped = section.blocks[depth - 1], section.blocks[depth:]
        own = _below(full, kept)
        for block in dropped:
            other = _below(full, block)
            if {n: t.shape for n, t in own.items()} == {n: t.shape for n, t in other.items()}:
                for name in own:
                    standing.setdefault(f"{kept}.{name}", []).append(f"{block}.{name}")
        for block in reversed(dropped):
            edits += _drop(shallow, block, dropped)
    left = {name: name_of[id(tensor)] for name, tensor in _tensors(shallow).items()}
    taken = set(left.values())  # a tensor of a dropped block that is tied to one outside of it stays itself
    entries = {
        name: tuple(
            _whole(source, full[source].shape)
            for source in (whole, *(s for s in standing.get(whole, ()) if s not in taken))
        )
        for name, whole in left.items()
    }
    shapes = {name: tuple(tensor.shape) for name, tensor in full.items()}
    if isinstance(model, nn.Module):
        plan = Submodel(entries, shapes, tuple(edits), structure(root))
        small = plan.build(model)
        if example is not None:
            check_depth(root, small, example, asked)
        return small, plan
    plan = Submodel(entries, shapes)
    return plan.extract(model), plan


def _asked(model: nn.Module | State, depths: Depths) -> list[tuple[Section, int]]:
    """The sections with the depths asked for them."""
    found = sections(model)
    have = f"has {len(found)}: {', '.join(f'{s.name!r} of {len(s.blocks)}' for s in found)}" if found else "has none"
    numbers = list(
        depths.values() if isinstance(depths, Mapping) else depths if isinstance(depths, Sequence) else [None]
    )
    if isinstance(depths, str) or not all(isinstance(n, int) for n in numbers):
        raise SurgeryError(f"depths={depths!r} are no numbers of blocks: the model {have}")
    if isinstance(depths, Mapping):
        if unknown := [name for name in depths if name not in {section.name for section in found}]:
            raise SurgeryError(f"there is no section {unknown[0]!r}; the model {have}")
        return [(section, depths.get(section.name, len(section.blocks))) for section in found]
    if len(depths) != len(found):
        raise SurgeryError(f"{len(depths)} depths were given, one a section is needed; the model {have}")
    return list(zip(found, depths))


def _unrepeatable(root: nn.Module, section: Section) -> str:
    last = section.blocks[-1]
    shapes = [tuple(tensor.shape) for tensor in _tensors(root.get_submodule(last)).values() if tensor.ndim > 1]
    return (
        f"section {section.name!r} cannot be deepened: its last block {last!r} ({shapes[0]} ... {shapes[-1]}) is not "
        "known to keep the shape of its input, or serves in several places; leave it at "
        f"{len(section.blocks)} and deepen another section"
        if shapes
        else f"section {section.name!r} cannot be deepened: its last block {last!r} has no matrices"
    )


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """The registered tensors themselves, by state name."""
    return {name: tensor for _, _, own in owners(module) for name, tensor in own.items()}


def _below(tensors: Mapping[str, Tensor], block: str) -> dict[str, Tensor]:
    return {name.removeprefix(f"{block}."): t for name, t in tensors.items() if name.startswith(f"{block}.")}


def _whole(name: str, shape: Sequence[int]) -> Source:
    return Source(name, (None,) * len(shape))


def _registered(modules: Iterator[nn.Module]) -> Iterator[Tensor]:
    for module in modules:
        yield from (t for t in (*module._parameters.values(), *module._buffers.values()) if t is not None)


def _copy_block(model: nn.Module, name: str, origin: dict[int, str]) -> nn.Module:
    """A copy of a block with tensors of its own, noted in `origin`; those tied to others outside stay tied."""
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


def _is_plain(owner: nn.Module) -> bool:
    """Whether the module is a Sequential that runs its children one after the other and does nothing else."""
    return isinstance(owner, nn.Sequential) and type(owner).forward is nn.Sequential.forward


def _insert(model: nn.Module, name: str, copies: list[nn.Module]) -> dict[str, Any]:
    """Put copies behind a block; the edit that takes them away."""
    parent, _, child = name.rpartition(".")
    owner = model.get_submodule(parent)
    children = list(owner._modules.items())
    position = [n for n, _ in children].index(child)
    numbered = all(n == str(i) for i, (n, _) in enumerate(children))
    if isinstance(owner, Chain):
        owner.extend(copies)
        return {"do": "unchain", "module": parent, "keep": position + 1}
    if (_is_plain(owner) and numbered) or _is_numbered_part(owner):
        _splice(owner, position + 1, 0, copies)
        return {"do": "remove", "module": parent, "first": position + 1, "count": len(copies)}
    block = owner._modules[child]
    owner._modules[child] = Chain(block, *copies)
    owner._modules[child].training = block.training
    return {"do": "unchain", "module": name, "keep": 1}


def _drop(model: nn.Module, name: str, dropped: Sequence[str]) -> list[dict[str, Any]]:
    """Drop a block, the last of its section, and give the edits that do so; what a chain loses goes at once."""
    parent, _, child = name.rpartition(".")
    owner = model.get_submodule(parent)
    position = list(owner._modules).index(child)
    if isinstance(owner, Chain):
        if position == 0:
            return _drop(model, parent, dropped)
        if f"{parent}.{list(owner._modules)[position - 1]}" in dropped:
            return []
        edit = {"do": "unchain", "module": parent, "keep": position}
    elif _is_numbered_part(owner):
        _splice(owner, position, 1, [])
        return []
    elif _is_plain(owner):
        edit = {"do": "remove", "module": parent, "first": position, "count": 1}
    else:
        if returns_several(block := owner._modules[child]):
            raise SurgeryError(
                f"block {name!r} ({type(block).__name__}) returns several values, and none can stand for them where it "
                "was: leave its section as it is"
            )
        edit = {"do": "skip", "module": name}
    apply_edit(model, edit)
    return [edit]


def _is_numbered_part(owner: nn.Module) -> bool:
    return isinstance(owner, Part) and all(child.isdigit() for child in owner._modules)


def _splice(owner: nn.Module, position: int, count: int, new: list[nn.Module]) -> None:
    """Replace `count` numbered children by others, and renumber what follows; there may be gaps (activations)."""
    children = list(owner._modules.items())
    first = int(children[position - 1][0]) + 1 if position else 0
    later = [(str(int(n) + len(new) - count), child) for n, child in children[position + count :]]
    owner._modules.clear()
    owner._modules.update([*children[:position], *((str(first + i), c) for i, c in enumerate(new)), *later])

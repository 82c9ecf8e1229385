"""Depth: `graft` repeats the last blocks of sections, `ungraft` drops blocks. Both return the plan, too."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

from torch import Tensor, nn

from surgery.deprecated import formerly
from surgery.depth.check import check_depth
from surgery.depth.identity import zero_branches
from surgery.depth.sections import Section, changes_shape, repeatable, sections
from surgery.depth.state_tree import as_module
from surgery.depth.tree_edits import copy_block, drop, insert, tensors
from surgery.edits import copy_sharing, replace_tensors
from surgery.errors import SurgeryError
from surgery.states import State
from surgery.submodel import Source, Submodel, structure

Depths: TypeAlias = Sequence[int] | Mapping[str, int]
Kept: TypeAlias = Sequence[int | Sequence[int]] | Mapping[str, int | Sequence[int]]  # how many blocks, or which
StandsFor: TypeAlias = Literal["equal", "corner", "none"]


@formerly("model depths mode example")
def graft(
    model: nn.Module | State,
    *,
    depths: Depths,
    mode: Literal["copy", "identity"] = "copy",
    example: Tensor | tuple | None = None,
) -> tuple[nn.Module | State, Submodel]:
    """Deepen a model: repeat the last block of each section until it has the given depth.

    Args:
        model: a module or a state; it is not changed and shares no memory with the result.
        depths: the number of blocks of each section, in the order of `sections(model)` or by section name; sections
            that are not named keep theirs.
        mode: `copy` repeats the weights (FedFA, Algorithm 2). `identity` also zeroes the last tensors on the residual
            branches of the new blocks, so that the outputs stay the same (in evaluation mode, to 1e-5) and training can
            continue from there; it needs a module and an example.
        example: the model's input, or a tuple of its inputs. `identity` needs it. With `copy` it is used to check that
            blocks follow each other, that the new ones are called, and that the output keeps its shape (on the meta
            device if the model runs there). Without an example, whatever looks like a section is taken for one.

    Returns:
        The deeper model, and the plan in which the given model is the small one and the deeper one the full one:
        `plan.build(deeper)` is the given model again. With `copy` each tensor of a repeated block stands for all its
        copies, so `plan.embed(state(model))` is the deeper state. With `identity` the new blocks have no counterpart in
        the small model, and the mask of `embed` is False there.

    In a plain numbered Sequential the new blocks become its children, and later children move up. Elsewhere the last
    block is replaced by a `Chain` of itself and its copies, so that the forward that calls it need not change. A state
    does not show which is the case: numbered siblings are then taken for a Sequential, and the plan cannot `build`.

    Raises:
        SurgeryError: for a section that is deeper already, or whose last block cannot be repeated.

    >>> block = lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    >>> deeper, plan = graft(nn.Sequential(nn.Linear(2, 4), block(), block(), nn.Linear(4, 2)), depths=[3])
    >>> len(deeper), [source.name for source in plan.entries["2.0.weight"]]
    (5, ['2.0.weight', '3.0.weight'])
    """
    if mode not in ("copy", "identity"):
        raise SurgeryError(f"unknown mode {mode!r}: choose copy or identity")
    if mode == "identity" and (example is None or not isinstance(model, nn.Module)):
        raise SurgeryError("mode='identity' runs the model: give a module, and its input as example=...")
    root = as_module(model)
    given = tensors(root)
    origin = {id(tensor): name for name, tensor in given.items()}
    deeper, originals = copy_sharing(root)
    asked = _asked(model, depths, lists=False)
    edits, made = _repeat(root, deeper, asked, origin)
    entries: dict[str, list[Source]] = {name: [] for name in given}
    new = {id(tensor) for copies in made.values() for block in copies for tensor in tensors(block).values()}
    new -= set(originals)
    for name, tensor in tensors(deeper).items():
        if mode == "copy" or id(tensor) not in new:
            entries[origin[id(tensor)]].append(_whole(name, tensor.shape))
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors(deeper).items()}
    replace_tensors(deeper, {key: tensor.detach().clone() for key, tensor in originals.items()}, originals)
    if mode == "identity":
        zero_branches(model, deeper, made, example)
    elif example is not None:
        check_depth(root, deeper, example, {s: {s.blocks[-1]: depth - len(s.blocks)} for s, depth in asked})
    dtypes = {name: tensor.dtype for name, tensor in tensors(deeper).items()}
    plan = Submodel(
        {name: tuple(sources) for name, sources in entries.items()}, shapes, tuple(edits), structure(deeper), dtypes
    )
    if isinstance(model, nn.Module):
        return deeper, plan
    return tensors(deeper), Submodel(plan.entries, plan.shapes, dtypes=dtypes)


def _repeat(
    root: nn.Module, deeper: nn.Module, asked: list[tuple[Section, int]], origin: dict[int, str]
) -> tuple[list[dict[str, Any]], dict[str, list[nn.Module]]]:
    """Insert copies behind the last blocks of `deeper`'s sections. Returns the edits that undo it, and the copies."""
    edits, made = [], {}
    # From the last section to the first, so that renumbering does not move blocks that are still to be repeated.
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
        made[last] = [copy_block(deeper, last, origin) for _ in range(extra)]
        edits.insert(0, insert(deeper, last, made[last]))
    return edits, made


@formerly("model keep example stands_for", depths="keep", stand="stands_for")
def ungraft(
    model: nn.Module | State,
    *,
    keep: Kept,
    stands_for: StandsFor = "equal",
    example: Tensor | tuple | None = None,
) -> tuple[nn.Module | State, Submodel]:
    """Make a model shallower: drop blocks of each section. This is the inverse of `graft`, but can drop any blocks.

    Args:
        model: a module or a state; it is not changed and shares no memory with the result.
        keep: for each section, in the order of `sections(model)` or by section name, how many blocks to keep (the first
            ones, at least 1), or which ones: ascending positions, as in NeFL's submodels. Sections that are not named
            keep all.
        stands_for: which of the dropped blocks between it and the next kept one a kept block stands for besides itself.
            `equal`: those whose tensors all have its shapes. `corner`: all of them, tensor by tensor with the leading
            corner [:C_o, :C_i, ...] of the tensor of the same name, if that is at least as large along every axis. So
            the first block of a section, whose input is narrower, covers what it can of the deeper ones (FedFA,
            Algorithm 1, lines 17-20, for a model that Algorithm 2 grafted). `none`: none (HeteroFL, NeFL).
        example: the model's input, or a tuple of its inputs, for a check as in `graft`. Without it nothing is run.

    Returns:
        The shallow model, and the plan in which it is the small one and the given model the full one. Blocks dropped
        from a Sequential are removed, and later ones move up; elsewhere a `Skip` takes their place.

    Raises:
        SurgeryError: for a depth below 1, for positions that a section does not have, for a section that is shallower
            already, and if the dropped first block of a section is not known to keep the shape of its input.

    >>> block = lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    >>> net = nn.Sequential(nn.Linear(2, 4), block(), block(), block(), nn.Linear(4, 2))
    >>> shallow, plan = ungraft(net, keep=[1])
    >>> len(shallow), [source.name for source in plan.entries["1.0.bias"]]
    (3, ['1.0.bias', '2.0.bias', '3.0.bias'])
    >>> shallow, plan = ungraft(net, keep=[(0, 2)], stands_for="none")
    >>> len(shallow), [source.name for source in plan.entries["2.0.bias"]]
    (4, ['3.0.bias'])
    """
    if stands_for not in ("equal", "corner", "none"):
        raise SurgeryError(f"unknown stands_for={stands_for!r}: choose equal, corner or none")
    root = as_module(model)
    full = tensors(root)
    name_of = {id(tensor): name for name, tensor in full.items()}
    shallow, _ = copy_sharing(root)
    edits, standing, changes = [], {}, {}
    for section, depth in reversed(_asked(model, keep)):
        kept = _positions(root, section, depth)
        for position, following in zip(kept, (*kept[1:], len(section.blocks))):
            for block in section.blocks[position + 1 : following]:
                for name, source in _stood_for(full, section.blocks[position], block, stands_for):
                    standing.setdefault(name, []).append(source)
        dropped = [block for position, block in enumerate(section.blocks) if position not in kept]
        changes[section] = dict.fromkeys(dropped, -1)
        edits += drop(shallow, dropped)
    left = {name: name_of[id(tensor)] for name, tensor in tensors(shallow).items()}
    taken = set(left.values())  # a dropped block's tensor that is tied to one outside of it is still there
    entries = {
        name: (
            _whole(whole, full[whole].shape),
            *(source for source in standing.get(whole, ()) if source.name not in taken),
        )
        for name, whole in left.items()
    }
    shapes = {name: tuple(tensor.shape) for name, tensor in full.items()}
    dtypes = {name: tensor.dtype for name, tensor in full.items()}
    if isinstance(model, nn.Module):
        plan = Submodel(entries, shapes, tuple(edits), structure(root), dtypes)
        small = plan.build(model)
        if example is not None:
            check_depth(root, small, example, changes)
        return small, plan
    plan = Submodel(entries, shapes, dtypes=dtypes)
    return plan.extract(model), plan


def _positions(root: nn.Module, section: Section, depth: int | Sequence[int]) -> Sequence[int]:
    """The positions of the blocks to keep."""
    have = len(section.blocks)
    if isinstance(depth, int):
        if depth < 1:
            raise SurgeryError(f"section {section.name!r} cannot have {depth} blocks: keep at least 1")
        if depth > have:
            raise SurgeryError(f"section {section.name!r} has {have} blocks, not {depth}: use graft")
        return range(depth)
    if not depth or sorted({*depth} & {*range(have)}) != list(depth):
        raise SurgeryError(
            f"section {section.name!r} has blocks 0 to {have - 1}: {tuple(depth)} are not ascending positions of blocks"
        )
    if depth[0] > 0 and changes_shape(root, section):
        raise SurgeryError(
            f"section {section.name!r} cannot do without its first block {section.blocks[0]!r}, which changes the "
            "shape of its input (or is not known to keep it): keep position 0"
        )
    return depth


def _stood_for(full: Mapping[str, Tensor], kept: str, dropped: str, stands_for: StandsFor) -> list[tuple[str, Source]]:
    """(name of a tensor of the kept block, the source in the dropped block that it stands for)."""
    own, other = _below(full, kept), _below(full, dropped)
    equal = {name: t.shape for name, t in own.items()} == {name: t.shape for name, t in other.items()}
    if stands_for == "none" or (stands_for == "equal" and not equal):
        return []
    pairs = [(name, t.shape, other[name].shape) for name, t in own.items() if name in other]
    return [
        (
            f"{kept}.{name}",
            Source(f"{dropped}.{name}", tuple(None if s == f else ((0, s),) for s, f in zip(small, large))),
        )
        for name, small, large in pairs
        if len(small) == len(large) and all(s <= f for s, f in zip(small, large))
    ]


def _asked(model: nn.Module | State, depths: Depths | Kept, lists: bool = True) -> list[tuple[Section, Any]]:
    """The sections with the depths given for them, which may be lists of positions."""
    found = sections(model)
    have = f"has {len(found)}: {', '.join(f'{s.name!r} of {len(s.blocks)}' for s in found)}" if found else "has none"
    given = list(depths.values() if isinstance(depths, Mapping) else depths if isinstance(depths, Sequence) else [None])
    single = [n for d in given for n in (d if lists and isinstance(d, Sequence) and not isinstance(d, str) else [d])]
    if isinstance(depths, str) or not all(isinstance(n, int) for n in single):
        raise SurgeryError(f"{depths!r} are not numbers of blocks: the model {have}")
    if isinstance(depths, Mapping):
        if unknown := [name for name in depths if name not in {section.name for section in found}]:
            raise SurgeryError(f"there is no section {unknown[0]!r}; the model {have}")
        return [(section, depths.get(section.name, len(section.blocks))) for section in found]
    if len(depths) != len(found):
        raise SurgeryError(f"{len(depths)} depths were given, but one is needed for each section; the model {have}")
    return list(zip(found, depths))


def _unrepeatable(root: nn.Module, section: Section) -> str:
    last = section.blocks[-1]
    shapes = [tuple(tensor.shape) for tensor in tensors(root.get_submodule(last)).values() if tensor.ndim > 1]
    return (
        f"section {section.name!r} cannot be deepened: its last block {last!r} ({shapes[0]} ... {shapes[-1]}) is not "
        "known to keep the shape of its input, or is used in several places; leave the section at "
        f"{len(section.blocks)} blocks and deepen another one"
        if shapes
        else f"section {section.name!r} cannot be deepened: its last block {last!r} has no matrices"
    )


def _below(full: Mapping[str, Tensor], block: str) -> dict[str, Tensor]:
    return {name.removeprefix(f"{block}."): t for name, t in full.items() if name.startswith(f"{block}.")}


def _whole(name: str, shape: Sequence[int]) -> Source:
    return Source(name, (None,) * len(shape))

"""`ungraft` drops blocks of sections, and returns the plan, too."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

from torch import Tensor, nn

from surgery.configuration import warn_if_lost
from surgery.depth.asked import Kept, asked, checked, positions
from surgery.depth.cache import check_cached
from surgery.depth.check import check_depth, watched
from surgery.depth.counts import recounted
from surgery.depth.forms import Form, first_that_works, forms
from surgery.depth.numbers import Shift, numbers, renumbered
from surgery.depth.sections import Section, sections
from surgery.depth.tree_edits import drop, tensors
from surgery.edits import copy_sharing
from surgery.errors import SurgeryError
from surgery.states import State
from surgery.submodel import Source, Submodel, structure

StandsFor: TypeAlias = Literal["equal", "corner", "none"]


def ungraft(
    model: nn.Module | State,
    *,
    keep: Kept,
    stands_for: StandsFor = "equal",
    example: Any = None,
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
        example: the model's input, for a check as in `graft`. Without it nothing is run.

    Returns:
        The shallow model, and the plan in which it is the small one and the given model the full one. Blocks dropped
        from a Sequential are removed, and later ones move up; so are those of a ModuleList if the example shows that
        the model then runs. Elsewhere a `Skip` takes their place. Where blocks are removed, numbers and counts of
        blocks follow as in `graft`.

    Raises:
        SurgeryError: for a depth below 1, for positions that a section does not have, for a section that is shallower
            already, if the dropped first block of a section is not known to keep the shape of its input, and as in
            `graft`.

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
    root = checked(model, example)
    full = tensors(root)
    shapes = {name: tuple(tensor.shape) for name, tensor in full.items()}
    dtypes = {name: tensor.dtype for name, tensor in full.items()}
    kept = {section: positions(root, section, depth) for section, depth in asked(model, keep)}
    standing: dict[str, list[Source]] = {}
    for section, places in kept.items():
        for place, following in zip(places, (*places[1:], len(section.blocks))):
            for block in section.blocks[place + 1 : following]:
                for name, source in _stood_for(full, section.blocks[place], block, stands_for):
                    standing.setdefault(name, []).append(source)
    kept = {section: places for section, places in kept.items() if len(places) < len(section.blocks)}
    dropped = {s: [b for i, b in enumerate(s.blocks) if i not in places] for s, places in kept.items()}
    before = watched(root, example, kept) if example is not None else None

    def attempt(ways: Mapping[Section, Form]) -> tuple[nn.Module, Submodel]:
        shallow, edits = _without(root, {section: dropped[section] for section in ways}, ways, before is not None)
        plan = Submodel(_entries(shallow, full, standing), shapes, tuple(edits), structure(root), dtypes)
        small = plan.build(root)
        if before is not None:
            check_depth(before, watched(small, example), {s: dict.fromkeys(dropped[s], -1) for s in ways})
            check_cached(root, small, example)
        return small, plan

    if isinstance(model, nn.Module):
        found = sections(root)
        ways = {s: forms(root, found, s, places, example) for s, places in kept.items()}
        small, plan = first_that_works(ways, attempt)
        warn_if_lost(model, small)
        return small, plan
    shallow, _ = _without(root, dropped, {section: Form(False, False) for section in dropped}, False)
    plan = Submodel(_entries(shallow, full, standing), shapes, dtypes=dtypes)
    return plan.extract(model), plan


def _without(
    root: nn.Module, dropped: Mapping[Section, Sequence[str]], ways: Mapping[Section, Form], runnable: bool
) -> tuple[nn.Module, list[dict[str, Any]]]:
    """A copy of the model without some blocks, which shares its tensors; and the edits that make it.

    `runnable` says whether the result will be tried with an example.
    """
    shallow, _ = copy_sharing(root)
    modules = dict(shallow.named_modules())
    edits, left = [], {}
    # From the last section to the first, so that renumbering does not move blocks that are still to be dropped.
    for section in reversed(dropped):
        more, skipped = drop(shallow, dropped[section], ways[section].resize)
        edits += more
        left[section] = [i for i, b in enumerate(section.blocks) if b in skipped or b not in dropped[section]]
        if section.blocks[0] in skipped and not runnable and (found := numbers(root, section)):
            raise SurgeryError(
                f"the blocks of section {section.name!r} are numbered ({found[0][1]}), and code that looks up the "
                "first number (a cache) would find nothing: give the model's input as example=..., or keep block 0"
            )
    shifts = {
        section: Shift(
            [sum(i < j for i in places) - j for j in range(len(section.blocks))], len(places) - len(section.blocks)
        )
        for section, places in left.items()
    }
    recount = {section: places for section, places in left.items() if ways[section].recount}
    names = {id(module): name for name, module in shallow.named_modules()}
    for (name, attribute), value in {**renumbered(root, shifts), **recounted(root, sections(root), recount)}.items():
        if (now := names.get(id(modules[name]))) is not None:
            edits.append({"do": "set", "module": now, "attribute": attribute, "value": value})
    return shallow, edits


def _entries(
    shallow: nn.Module, full: Mapping[str, Tensor], standing: Mapping[str, list[Source]]
) -> dict[str, tuple[Source, ...]]:
    name_of = {id(tensor): name for name, tensor in full.items()}
    left = {name: name_of[id(tensor)] for name, tensor in tensors(shallow).items()}
    taken = set(left.values())  # a dropped block's tensor that is tied to one outside of it is still there
    return {
        name: (
            whole(source, full[source].shape),
            *(other for other in standing.get(source, ()) if other.name not in taken),
        )
        for name, source in left.items()
    }


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


def _below(full: Mapping[str, Tensor], block: str) -> dict[str, Tensor]:
    return {name.removeprefix(f"{block}."): t for name, t in full.items() if name.startswith(f"{block}.")}


def whole(name: str, shape: Sequence[int]) -> Source:
    """The whole of a tensor."""
    return Source(name, (None,) * len(shape))

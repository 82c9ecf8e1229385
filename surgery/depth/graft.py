"""`graft` repeats blocks of sections, `ungraft` drops blocks; each returns a plan."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

from torch import Tensor, nn

from surgery.copying import copy_sharing, replace_tensors
from surgery.depth.constants import Shift, numbers, recount_blocks, renumber
from surgery.depth.depths import (
    DepthChange,
    KeptBlocks,
    check_model,
    check_order,
    depths_by_section,
    first_that_runs,
    origins_of,
    positions,
)
from surgery.depth.identity import zero_branches
from surgery.depth.sections import Section, ordered_sections
from surgery.depth.splice import copies_of, drop, insert
from surgery.errors import SurgeryError
from surgery.hooks import followers
from surgery.names import join, outwards
from surgery.plan import Plan, Source, structure
from surgery.plan.edits import apply_edit, attribute_of, set_attribute
from surgery.states import State, shapes_of, tensors

_log = logging.getLogger(__name__)

StandsFor: TypeAlias = Literal["equal", "corner", "none"]


def graft(
    model: nn.Module | State,
    *,
    depths: KeptBlocks,
    mode: Literal["copy", "identity"] = "copy",
    example: Any = None,
) -> tuple[nn.Module | State, Plan]:
    """Deepen a model: repeat each section's last block up to a depth, or given blocks.

    Args:
        model: a module or a state; it is not changed and shares no memory with the result.
        depths: the number of blocks of each section, in the order of `sections(model, example=example)` or by section
            name; sections that are not named keep theirs. Or, to repeat other blocks than the last, which block is at
            each position: [0, 1, 1, 2] puts a new block, made from block 1, between blocks 1 and 2.
        mode: `copy` repeats the weights (FedFA, Algorithm 2). `identity` also zeroes the tensors that the residual
            branches of the new blocks use last (under weight_norm the magnitudes), so that the outputs stay the same
            (in evaluation mode, to 1e-5) and training can continue from there; it needs a module and an example.
            Weights of the new blocks that the example does not use become zero, too, and a warning names them.
        example: the model's input: a tensor, a tuple of positional arguments or a mapping of keyword arguments. It
            shows which blocks run one after another, and with it the deeper model is tried: the new blocks have to run,
            and the output has to keep its shape (on the meta device if the model runs there). A model whose forward
            takes `use_cache` has to give the same outputs with its cache as without (not on the meta device).
            `identity` needs an example.
            Without one, blocks can be repeated whose structure shows their order: entries of a Sequential, and blocks
            that are declared (`register_block`, timm's metadata, this project's zoo). In a state only a root whose
            entries are numbers, and what it holds, is known to be a Sequential. By naming another section in `depths`
            the caller says that its blocks run one after another.

    Returns:
        The deeper model, and the plan in which the given model is the small one and the deeper one the full one:
        `plan.build(deeper)` is the given model again. With `copy` each tensor of a repeated block stands for all its
        copies, so `plan.embed(state(model))` is the deeper state. With `identity` the new blocks have no counterpart in
        the small model, and the mask of `embed` is False there.

    The new blocks become entries of the list that holds the repeated one, and later entries move up: in a plain
    numbered Sequential, and in a ModuleList if the example shows that the model then runs them. Elsewhere the repeated
    block is replaced by a `Chain` of itself and its copies, so that the forward that calls it need not change: in a
    ModuleList of declared blocks without an example, since the code that runs its entries may index them, and in any
    list for which the example shows that it does. A state does not show which is the case: numbered siblings are then
    taken for a Sequential, and the plan cannot `build`.

    Integers that number the blocks (`layer_idx`, by which a block finds its slot in a cache) continue through the new
    blocks. Attributes that count them (`config.num_hidden_layers`) follow where an example shows that the model runs
    so; without an example, where the blocks are numbered. Lists of a configuration with an entry for each block
    (`config.attention_window`) follow where the class could not make the model otherwise. The given model's
    configuration is not changed.

    Raises:
        SurgeryError: for a section that is deeper already, has a block that cannot be repeated, or whose blocks are not
            known to run one after another; for a deeper model that does not run as it should; for scripted, lazy and
            quantised models.

    >>> block = lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    >>> deeper, plan = graft(nn.Sequential(nn.Linear(2, 4), block(), block(), nn.Linear(4, 2)), depths=[3])
    >>> len(deeper), [source.name for source in plan.entries["2.0.weight"]]
    (5, ['2.0.weight', '3.0.weight'])
    """
    if mode not in ("copy", "identity"):
        raise SurgeryError(f"unknown mode {mode!r}: choose copy or identity", code="argument")
    if mode == "identity" and (example is None or not isinstance(model, nn.Module)):
        raise SurgeryError("mode='identity' runs the model: give a module, and example=...", code="argument")
    root = check_model(model)
    known = ordered_sections(model, example)
    origins: dict[Section, list[int]] = {}  # by position in a deeper section, the block that it is or repeats
    for section, depth in depths_by_section(model, [*known], depths):
        places = origins_of(root, section, depth)
        if len(places) > len(section.blocks):
            origins[section] = places
    check_order(model, known, origins, depths, example)
    deeper = first_that_runs(root, [*known], origins, example, lambda ways: _deepen(root, [*known], origins, ways))
    entries: dict[str, list[Source]] = {name: [] for name in tensors(root)}
    new = {id(tensor) for copies in deeper.copies.values() for block in copies for tensor in tensors(block).values()}
    new -= set(deeper.shared)
    for name, tensor in tensors(deeper.model).items():
        if mode == "copy" or id(tensor) not in new:
            entries[deeper.origin[id(tensor)]].append(_whole_source(name, tensor))
    shapes = shapes_of(tensors(deeper.model))
    dtypes = {name: tensor.dtype for name, tensor in tensors(deeper.model).items()}
    replace_tensors(
        deeper.model, {key: tensor.detach().clone() for key, tensor in deeper.shared.items()}, deeper.shared
    )
    if mode == "identity":
        zero_branches(root, deeper.model, deeper.copies, example)
    sources_by_name = {name: tuple(sources) for name, sources in entries.items()}
    if not isinstance(model, nn.Module):
        return tensors(deeper.model), Plan(sources_by_name, shapes, dtypes=dtypes)
    undo = [*deeper.undo]
    for edit in _configuration_edits(model, deeper.model, origins):
        value = attribute_of(deeper.model, edit["module"], edit["attribute"])
        undo.append({**edit, "value": value})
        apply_edit(deeper.model, edit)
    return deeper.model, Plan(sources_by_name, shapes, tuple(undo), structure(deeper.model), dtypes)


def _configuration_edits(
    before: nn.Module, after: nn.Module, origins: Mapping[Section, Sequence[int]]
) -> Iterator[Mapping[str, Any]]:
    """Yield edits that set the configuration of a model to its new depth."""
    moves = [(len(section.blocks), places) for section, places in origins.items()]
    for follower in followers(after):
        yield from follower.depth_edits(before, after, moves)


class _Deeper(NamedTuple):
    """A deeper model.

    Attributes:
        model: it shares the tensors `shared` (by id) with the given model.
        copies: the new blocks, by the name of the block that they repeat.
        origin: by id of a tensor, the name of the given model's tensor that it is or repeats.
        undo: the edits that turn the deeper model into the given one.
    """

    model: nn.Module
    shared: dict[int, Any]
    copies: dict[str, list[nn.Module]]
    origin: dict[int, str]
    undo: list[dict[str, Any]]


def _deepen(
    root: nn.Module, known: Sequence[Section], origins: Mapping[Section, list[int]], ways: Mapping[Section, DepthChange]
) -> _Deeper:
    deeper, shared = copy_sharing(root)
    origin = {id(tensor): name for name, tensor in tensors(root).items()}
    more = {section: len(origins[section]) - len(section.blocks) for section in ways}
    recount = {section: origins[section] for section in ways if ways[section].recount}
    changed = renumber(
        root, {s: Shift([origins[s].index(i) - i for i in range(len(s.blocks))], n) for s, n in more.items()}
    )
    changed |= recount_blocks(root, known, recount) if recount else {}
    undo = [
        {"do": "set", "module": name, "attribute": attribute, "value": attribute_of(root, name, attribute)}
        for name, attribute in changed
    ]
    for (name, attribute), value in changed.items():
        set_attribute(deeper, name, attribute, value)
    copies: dict[str, list[nn.Module]] = {}
    repeated = [(section, i) for section in ways for i in range(len(section.blocks)) if origins[section].count(i) > 1]
    # From the last to the first, so that renumbering does not move blocks that are still to be repeated.
    for section, place in reversed(repeated):
        first = section.blocks[place]
        copies[first] = copies_of(deeper, first, origins[section].count(place) - 1, origin)
        for by, block in enumerate(copies[first], 1):
            for attribute, modules in numbers(root, section).items():
                for path in (name[len(first) + 1 :] for name in modules[place]):
                    set_attribute(block, path, attribute, attribute_of(block, path, attribute) + by)
        undo.insert(0, insert(deeper, first, copies[first], ways[section].resize))
    return _Deeper(deeper, shared, copies, origin, undo)


def ungraft(
    model: nn.Module | State,
    *,
    keep: KeptBlocks,
    stands_for: StandsFor = "equal",
    example: Any = None,
) -> tuple[nn.Module | State, Plan]:
    """Make a model shallower: drop any blocks of each section; inverts `graft`.

    Args:
        model: a module or a state; it is not changed and shares no memory with the result.
        keep: for each section, in the order of `sections(model, example=example)` or by section name, how many blocks
            to keep (the first ones, at least 1), or which ones: ascending positions, as in NeFL's submodels. Sections
            that are not named keep all.
        stands_for: which dropped blocks a kept block stands for, of the blocks between it and the next kept block.
            `equal`: those whose tensors all have its shapes. `corner`: all of them, tensor by tensor with the leading
            corner [:C_o, :C_i, ...] of the tensor of the same name, if that is at least as large along every axis. So
            the first block of a section, whose input is narrower, covers what it can of the deeper ones (FedFA,
            Algorithm 1, lines 17-20, for a model that Algorithm 2 grafted). `none`: none (HeteroFL, NeFL).
        example: the model's input, for the same check as in `graft`, and needed in the same cases. Without it no
            forward pass runs.

    Returns:
        The shallow model, and the plan in which it is the small one and the given model the full one. Blocks dropped
        from a Sequential are removed, and later ones move up; so are blocks of a ModuleList if the example shows that
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
        raise SurgeryError(f"unknown stands_for={stands_for!r}: choose equal, corner or none", code="argument")
    root = check_model(model)
    known = ordered_sections(model, example)
    full = tensors(root)
    shapes = shapes_of(full)
    dtypes = {name: tensor.dtype for name, tensor in full.items()}
    targets = depths_by_section(model, [*known], keep)
    origins = {section: positions(root, section, depth) for section, depth in targets}
    _warn_of_numbered(root, origins)
    standing: dict[str, list[Source]] = {}
    for section, places in origins.items():
        for place, following in zip(places, (*places[1:], len(section.blocks))):
            for block in section.blocks[place + 1 : following]:
                for name, source in _find_sources_stood_for(full, section.blocks[place], block, stands_for):
                    standing.setdefault(name, []).append(source)
    origins = {section: places for section, places in origins.items() if len(places) < len(section.blocks)}
    check_order(model, known, origins, keep, example)

    def entries(shallow: nn.Module) -> dict[str, tuple[Source, ...]]:
        name_of = {id(tensor): name for name, tensor in full.items()}
        names_left = {name: name_of[id(tensor)] for name, tensor in tensors(shallow).items()}
        taken = set(names_left.values())  # a dropped block's tensor that is tied to one outside of it is still there
        more = {source: [extra for extra in standing.get(source, ()) if extra.name not in taken] for source in taken}
        return {name: (_whole_source(source, full[source]), *more[source]) for name, source in names_left.items()}

    if not isinstance(model, nn.Module):
        shallow, _ = _drop_blocks(root, [*known], origins, dict.fromkeys(origins, DepthChange(False, False)), example)
        plan = Plan(entries(shallow), shapes, dtypes=dtypes)
        return plan.extract(model), plan

    def attempt(ways: Mapping[Section, DepthChange]) -> tuple[nn.Module, Plan]:
        shallow, edits = _drop_blocks(root, [*known], origins, ways, example)
        plan = Plan(entries(shallow), shapes, tuple(edits), structure(root), dtypes)
        return plan.build(root), plan

    small, plan = first_that_runs(root, [*known], origins, example, attempt)
    edits = list(_configuration_edits(model, small, origins))
    for edit in edits:
        apply_edit(small, edit)
    return small, plan.with_edits((*plan.edits, *edits)) if edits else plan


def _drop_blocks(
    root: nn.Module,
    known: Sequence[Section],
    origins: Mapping[Section, Sequence[int]],
    ways: Mapping[Section, DepthChange],
    example: Any,
) -> tuple[nn.Module, list[dict[str, Any]]]:
    """Return a copy without some blocks, which shares tensors; and the edits to it."""
    shallow, _ = copy_sharing(root)
    modules = dict(shallow.named_modules())
    edits, positions_left = [], {}
    # From the last section to the first, so that renumbering does not move blocks that are still to be dropped.
    for section in reversed(list(ways)):
        dropped = [block for i, block in enumerate(section.blocks) if i not in origins[section]]
        more, skipped = drop(shallow, dropped, ways[section].resize)
        edits += more
        positions_left[section] = [
            i for i, block in enumerate(section.blocks) if block in skipped or block not in dropped
        ]
        if section.blocks[0] in skipped and example is None and (numbered := numbers(root, section)):
            raise SurgeryError(
                f"the blocks of section {section.name!r} are numbered ({next(iter(numbered))}), and code that looks up "
                "the first number (a cache) would find nothing: give the model's input as example=..., or keep block 0",
                code="depth",
            )
    shifts = {
        section: Shift(
            [sum(i < j for i in places) - j for j in range(len(section.blocks))], len(places) - len(section.blocks)
        )
        for section, places in positions_left.items()
        if ways[section].renumber
    }
    recount = {section: places for section, places in positions_left.items() if ways[section].recount}
    names = {id(module): name for name, module in shallow.named_modules()}
    changed = renumber(root, shifts) | (recount_blocks(root, known, recount) if recount else {})
    for (name, attribute), value in changed.items():
        if (now := names.get(id(modules[name]))) is not None:
            edits.append({"do": "set", "module": now, "attribute": attribute, "value": value})
    return shallow, edits


def _warn_of_numbered(root: nn.Module, origins: Mapping[Section, Sequence[int]]) -> None:
    """Warn of tensors with a position for each block, if a kept block moves up."""
    for section, places in origins.items():
        if [*places] == [*range(len(places))]:
            continue
        for name in outwards(section.blocks[0]):
            if name == section.blocks[0]:
                continue
            module = root.get_submodule(name)
            for key, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None and len(section.blocks) in tensor.shape:
                    _log.warning(
                        "%s has as many positions as section %r has blocks, and stays as it is: if each block reads "
                        "its own, blocks that move up read others'",
                        join(name, key),
                        section.name,
                    )


def _find_sources_stood_for(
    full: Mapping[str, Tensor], kept_block: str, dropped_block: str, stands_for: StandsFor
) -> list[tuple[str, Source]]:
    """Return (name of the kept block's tensor, its source in the dropped block)."""
    own_tensors, other = (
        {name.removeprefix(f"{block}."): t.shape for name, t in full.items() if name.startswith(f"{block}.")}
        for block in (kept_block, dropped_block)
    )
    if stands_for == "none" or (stands_for == "equal" and own_tensors != other):
        return []
    pairs = [(name, small, other[name]) for name, small in own_tensors.items() if name in other]
    return [
        (
            f"{kept_block}.{name}",
            Source(f"{dropped_block}.{name}", tuple(None if s == f else ((0, s),) for s, f in zip(small, large))),
        )
        for name, small, large in pairs
        if len(small) == len(large) and all(s <= f for s, f in zip(small, large))
    ]


def _whole_source(name: str, tensor: Tensor) -> Source:
    return Source(name, (None,) * tensor.ndim)

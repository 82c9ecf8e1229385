"""`graft` repeats the last blocks of sections, and returns the plan, too."""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from torch import nn

from surgery.configuration import warn_if_lost
from surgery.depth.asked import Depths, asked, check_repeatable, checked
from surgery.depth.cache import check_cached
from surgery.depth.check import check_depth, watched
from surgery.depth.counts import recounted
from surgery.depth.forms import Form, first_that_works, forms
from surgery.depth.identity import zero_branches
from surgery.depth.numbers import Shift, numbers, renumbered
from surgery.depth.sections import Section, sections
from surgery.depth.tree_edits import copies_of, insert, tensors
from surgery.depth.ungraft import ungraft, whole
from surgery.edits import attribute_of, copy_sharing, replace_tensors, set_attribute
from surgery.errors import SurgeryError
from surgery.states import State
from surgery.submodel import Source, Submodel, structure

__all__ = ["graft", "ungraft"]


def graft(
    model: nn.Module | State,
    *,
    depths: Depths,
    mode: Literal["copy", "identity"] = "copy",
    example: Any = None,
) -> tuple[nn.Module | State, Submodel]:
    """Deepen a model: repeat the last block of each section until it has the given depth.

    Args:
        model: a module or a state; it is not changed and shares no memory with the result.
        depths: the number of blocks of each section, in the order of `sections(model)` or by section name; sections
            that are not named keep theirs.
        mode: `copy` repeats the weights (FedFA, Algorithm 2). `identity` also zeroes the last tensors on the residual
            branches of the new blocks, so that the outputs stay the same (in evaluation mode, to 1e-5) and training can
            continue from there; it needs a module and an example.
        example: the model's input: a tensor, a tuple of positional arguments or a mapping of keyword arguments. With it
            the deeper model is tried: blocks have to follow each other, the new ones have to run, and the output has to
            keep its shape (on the meta device if the model runs there). A model whose forward takes `use_cache` has to
            give the same outputs with its cache as without (not on the meta device). `identity` needs an example.
            Without one, whatever looks like a section is taken for one.

    Returns:
        The deeper model, and the plan in which the given model is the small one and the deeper one the full one:
        `plan.build(deeper)` is the given model again. With `copy` each tensor of a repeated block stands for all its
        copies, so `plan.embed(state(model))` is the deeper state. With `identity` the new blocks have no counterpart in
        the small model, and the mask of `embed` is False there.

    The new blocks become entries of the list that holds the last one, and later entries move up: in a plain numbered
    Sequential, and in a ModuleList if the example shows that the model then runs them. Elsewhere the last block is
    replaced by a `Chain` of itself and its copies, so that the forward that calls it need not change: in a ModuleList
    without an example, since the code that runs its entries is not known and may index them, and in any list for which
    the example shows that it does. A state does not show which is the case: numbered siblings are then taken for a
    Sequential, and the plan cannot `build`.

    Integers that number the blocks (`layer_idx`, by which a block finds its slot in a cache) go on through the new
    blocks. Attributes that count them (`config.num_hidden_layers`) follow where an example shows that the model runs
    so; without an example, where the blocks are numbered. The given model's configuration is not changed.

    Raises:
        SurgeryError: for a section that is deeper already, or whose last block cannot be repeated; for a deeper model
            that does not run as it should; for scripted, lazy and quantised models.

    >>> block = lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    >>> deeper, plan = graft(nn.Sequential(nn.Linear(2, 4), block(), block(), nn.Linear(4, 2)), depths=[3])
    >>> len(deeper), [source.name for source in plan.entries["2.0.weight"]]
    (5, ['2.0.weight', '3.0.weight'])
    """
    if mode not in ("copy", "identity"):
        raise SurgeryError(f"unknown mode {mode!r}: choose copy or identity")
    if mode == "identity" and (example is None or not isinstance(model, nn.Module)):
        raise SurgeryError("mode='identity' runs the model: give a module, and its input as example=...")
    root = checked(model, example)
    grown = dict(asked(model, depths, lists=False))
    for section, depth in grown.items():
        check_repeatable(root, section, depth)
    grown = {section: depth for section, depth in grown.items() if depth > len(section.blocks)}
    before = watched(root, example, grown) if example is not None else None

    def attempt(ways: Mapping[Section, Form]) -> _Deeper:
        made = _deeper(root, {section: grown[section] for section in ways}, ways)
        if before is not None:
            changes = {s: {s.blocks[-1]: grown[s] - len(s.blocks)} for s in ways}
            check_depth(before, watched(made.model, example), changes)
            check_cached(root, made.model, example)
        return made

    found = sections(root)
    ways = {s: forms(root, found, s, _origins(s, depth), example) for s, depth in grown.items()}
    made = first_that_works(ways, attempt)
    entries: dict[str, list[Source]] = {name: [] for name in tensors(root)}
    new = {id(tensor) for copies in made.copies.values() for block in copies for tensor in tensors(block).values()}
    new -= set(made.shared)
    for name, tensor in tensors(made.model).items():
        if mode == "copy" or id(tensor) not in new:
            entries[made.origin[id(tensor)]].append(whole(name, tensor.shape))
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors(made.model).items()}
    dtypes = {name: tensor.dtype for name, tensor in tensors(made.model).items()}
    replace_tensors(made.model, {key: tensor.detach().clone() for key, tensor in made.shared.items()}, made.shared)
    if mode == "identity":
        zero_branches(root, made.model, made.copies, example)
    found = {name: tuple(sources) for name, sources in entries.items()}
    plan = Submodel(found, shapes, tuple(made.undo), structure(made.model), dtypes)
    if isinstance(model, nn.Module):
        warn_if_lost(model, made.model)
        return made.model, plan
    return tensors(made.model), Submodel(plan.entries, plan.shapes, dtypes=dtypes)


class _Deeper(NamedTuple):
    """A deeper model.

    Attributes:
        model: it shares the tensors `shared` (by id) with the model before.
        copies: the new blocks, by the name of the block that they repeat.
        origin: the name in the model before of what each tensor (by id) is or repeats.
        undo: the edits that make the model before of it.
    """

    model: nn.Module
    shared: dict[int, Any]
    copies: dict[str, list[nn.Module]]
    origin: dict[int, str]
    undo: list[dict[str, Any]]


def _deeper(root: nn.Module, grown: Mapping[Section, int], ways: Mapping[Section, Form]) -> _Deeper:
    deeper, shared = copy_sharing(root)
    origin = {id(tensor): name for name, tensor in tensors(root).items()}
    changed: dict[tuple[str, str], Any] = renumbered(
        root, {s: Shift([0] * len(s.blocks), depth - len(s.blocks)) for s, depth in grown.items()}
    )
    counted = {section: _origins(section, depth) for section, depth in grown.items() if ways[section].recount}
    changed |= recounted(root, sections(root), counted)
    undo = [
        {"do": "set", "module": name, "attribute": attribute, "value": attribute_of(root, name, attribute)}
        for name, attribute in changed
    ]
    for (name, attribute), value in changed.items():
        set_attribute(deeper, name, attribute, value)
    copies: dict[str, list[nn.Module]] = {}
    # From the last section to the first, so that renumbering does not move blocks that are still to be repeated.
    for section in reversed(grown):
        last = section.blocks[-1]
        copies[last] = copies_of(deeper, last, grown[section] - len(section.blocks), origin)
        for by, block in enumerate(copies[last], 1):
            for path, attribute in numbers(root, section):
                set_attribute(block, path, attribute, attribute_of(block, path, attribute) + by)
        undo.insert(0, insert(deeper, last, copies[last], ways[section].resize))
    return _Deeper(deeper, shared, copies, origin, undo)


def _origins(section: Section, depth: int) -> list[int]:
    """By position in the deeper section, the position of the block that it is or repeats."""
    last = len(section.blocks) - 1
    return [min(position, last) for position in range(depth)]

"""Read depths, and list the ways in which a section may reach them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple, TypeAlias, TypeVar

from torch import nn

from surgery.copying import refuse_scripted
from surgery.depth.check import check_cached, check_depth, check_skips, watch_run
from surgery.depth.constants import numbers, recount_blocks
from surgery.depth.sections import Section, changes_shape, repeatable, sections, shared_places
from surgery.depth.splice import is_list, prefix_of
from surgery.depth.tree import as_module, is_sequential
from surgery.errors import SurgeryError
from surgery.states import State, state, tensors

KeptBlocks: TypeAlias = Sequence[int | Sequence[int]] | Mapping[str, int | Sequence[int]]  # how many blocks, or which


def check_model(model: nn.Module | State) -> nn.Module:
    """Return the model as a module; SurgeryError if scripted, lazy or quantised."""
    if isinstance(model, nn.Module):
        refuse_scripted(model)
        state(model)
    return as_module(model)


def depths_by_section(
    model: nn.Module | State, known: Sequence[Section], depths: KeptBlocks
) -> list[tuple[Section, Any]]:
    """Return the sections with their given depths, which may be lists of positions."""
    have = f"has {len(known)}: {', '.join(f'{s.name!r} of {len(s.blocks)}' for s in known)}" if known else "has none"
    if beside := [section.name for section in sections(model) if section not in known]:
        have += f" (on the example modules of {', '.join(map(repr, beside))} do not follow each other: if they do, "
        have += "register their class by surgery.register_block, and leave the example out)"
    values = list(
        depths.values() if isinstance(depths, Mapping) else depths if isinstance(depths, Sequence) else [None]
    )
    single = [n for d in values for n in (d if isinstance(d, Sequence) and not isinstance(d, str) else [d])]
    if isinstance(depths, str) or not all(type(n) is int for n in single):
        raise SurgeryError(f"{depths!r} are not numbers of blocks: the model {have}", code="argument")
    if isinstance(depths, Mapping):
        if unknown := [name for name in depths if name not in {section.name for section in known}]:
            raise SurgeryError(f"there is no section {unknown[0]!r}; the model {have}", code="name")
        wanted = [(section, depths.get(section.name, len(section.blocks))) for section in known]
        targets = [section for section in known if section.name in depths]
    else:
        if len(depths) != len(known):
            raise SurgeryError(f"{len(depths)} depths: give one for each section; the model {have}", code="argument")
        wanted, targets = list(zip(known, depths)), [*known]
    for section in targets:
        if isinstance(model, nn.Module) and (again := shared_places(model, section)):
            place, block = again[0]
            raise SurgeryError(
                f"section {section.name!r} has the block {block!r} twice, also as {place!r}: give depths by name, "
                "without this section",
                code="depth",
            )
    return wanted


def check_order(
    model: nn.Module | State, known: Mapping[Section, bool], changing: Iterable[Section], depths: Any, example: Any
) -> None:
    """Raise SurgeryError unless blocks of changing sections run one after another.

    Of a state only its caller can know that, who says so by naming the section.
    """
    for section in changing:
        name = section.name
        if known[section] or (not isinstance(model, nn.Module) and isinstance(depths, Mapping) and name in depths):
            continue
        if example is not None:
            raise SurgeryError(
                f"the example does not run {name!r}: give one that does, or keep its depth", code="ambiguous"
            )
        reason = "a state does not show" if not isinstance(model, nn.Module) else "without an example it is not known"
        raise SurgeryError(
            f"{reason} whether the blocks of section {name!r} run one after another, or beside each other, as experts "
            "do: give the module and its input as example=..."
            + ("" if isinstance(model, nn.Module) else f", or name the section if they do ({{{name!r}: ...}})"),
            code="ambiguous",
        )


def positions(root: nn.Module, section: Section, depth: int | Sequence[int]) -> Sequence[int]:
    """Return the positions of the blocks to keep."""
    have = len(section.blocks)
    if isinstance(depth, int):
        if depth < 1:
            raise SurgeryError(f"section {section.name!r} cannot have {depth} blocks: keep at least 1", code="argument")
        if depth > have:
            raise SurgeryError(f"section {section.name!r} has {have} blocks, not {depth}: use graft", code="depth")
        return range(depth)
    if not depth or sorted({*depth} & {*range(have)}) != list(depth):
        raise SurgeryError(
            f"section {section.name!r} has blocks 0 to {have - 1}: {tuple(depth)} are no ascending positions",
            code="argument",
        )
    if depth[0] > 0 and changes_shape(root, section):
        raise SurgeryError(
            f"block {section.blocks[0]!r} of {section.name!r} may change the shape of its input: keep position 0",
            code="depth",
        )
    return depth


def origins_of(root: nn.Module, section: Section, depth: int | Sequence[int]) -> list[int]:
    """Return by position in a deeper section the block that it is or repeats.

    SurgeryError if the section has too many blocks, or a block that is repeated cannot be.
    """
    have = len(section.blocks)
    if isinstance(depth, int):
        if depth < have:
            raise SurgeryError(
                f"section {section.name!r} has {have - depth} blocks more than {depth}: use ungraft to drop them",
                code="depth",
            )
        depth = [min(position, have - 1) for position in range(depth)]
    if sorted(depth) != [*depth] or {*depth} != {*range(have)}:
        raise SurgeryError(
            f"section {section.name!r}: give each of 0 to {have - 1}, in order, not {tuple(depth)}", code="argument"
        )
    for place, name in enumerate(section.blocks):
        if list(depth).count(place) > 1 and not repeatable(root, section, place):
            shapes = [tuple(tensor.shape) for tensor in tensors(root.get_submodule(name)).values() if tensor.ndim > 1]
            why = (
                f"({shapes[0]} ... {shapes[-1]}) is not known to keep the shape of its input, or is used in several "
                f"places; leave the section at {have} blocks, repeat another block, or deepen another section"
                if shapes
                else "has no matrices"
            )
            raise SurgeryError(f"section {section.name!r} cannot be deepened: its block {name!r} {why}", code="depth")
    return [*depth]


Changed = TypeVar("Changed", bound=tuple)


class DepthChange(NamedTuple):
    """One way in which a section changes its depth.

    Attributes:
        resize: whether the list that holds the blocks changes its length. Otherwise it keeps it: new blocks are chained
            to the last one, and a `Skip` takes the place of a dropped one.
        recount: whether attributes that count the blocks (`config.num_hidden_layers`) follow.
        renumber: whether those that number them do. Otherwise blocks keep the slots that they have in a cache.
    """

    resize: bool
    recount: bool
    renumber: bool = True


def ways_to(
    model: nn.Module, known: Sequence[Section], section: Section, origins: Sequence[int], example: Any
) -> list[DepthChange]:
    """Return the ways to try, best first; without an example there is only one.

    That one leaves the length of a ModuleList alone, since the code that runs its entries is not known: it may index
    them. Counts then follow where blocks are numbered, since what a block looks up by its number has to be there.
    """
    holder = model.get_submodule(section.name.partition("#")[0])
    counted = bool(recount_blocks(model, known, {section: origins}))
    sequential, fewer = is_sequential(holder), len(origins) < len(section.blocks)
    last = bool(holder._modules) and section.blocks[-1].rpartition(".")[2] == list(holder._modules)[-1]
    resizable = is_list(holder) or (sequential and (fewer or (last and bool(prefix_of(holder)))))
    if example is None:
        return [DepthChange(resizable and sequential, counted and bool(numbers(model, section)))]
    ways = product([True, False] if resizable else [False], [True, False] if counted else [False])
    same = [DepthChange(True, False, renumber=False)] if resizable and fewer and numbers(model, section) else []
    return [*(DepthChange(resize, recount) for resize, recount in ways), *same]


def first_that_runs(
    root: nn.Module,
    known: Sequence[Section],
    origins: Mapping[Section, Sequence[int]],
    example: Any,
    make: Callable[[Mapping[Section, DepthChange]], Changed],
) -> Changed:
    """Return what `make` makes by the first way of each section that runs.

    If the first ways of all do not work together, each section's is found with the other sections left as they are.

    Args:
        known: all sections of the model.
        origins: for each section that changes, the block that each of its new blocks is or repeats, by position.
    """
    grown = [section for section, places in origins.items() if len(places) > len(section.blocks)]
    before = watch_run(root, example, grown) if example is not None else None

    def attempt(ways: Mapping[Section, DepthChange]) -> Changed:
        result = make(ways)
        if before is not None:
            try:
                after = watch_run(result[0], example, grown)
            except SurgeryError as error:
                changed = ", ".join(repr(section.name) for section in ways)
                raise SurgeryError(f"another depth of {changed}: {error}; keep the depth", code="depth") from error
            check_depth(before, after, {section: origins[section] for section in ways})
            check_skips(before, after)
            check_cached(root, result[0], example)
        return result

    every = {section: ways_to(root, known, section, places, example) for section, places in origins.items()}
    try:
        return attempt({section: options[0] for section, options in every.items()})
    except SurgeryError:
        if all(len(options) == 1 for options in every.values()):
            raise
    chosen = {}
    for section, options in every.items():
        errors = []
        for way in options:
            try:
                attempt({section: way})
            except SurgeryError as error:
                errors.append(error)
            else:
                chosen[section] = way
                break
        else:
            raise errors[0]
    return attempt(chosen)

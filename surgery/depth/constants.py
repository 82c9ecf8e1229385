"""Numbers in a model's attributes that count its blocks, or number them.

Some models run `layers[: config.num_hidden_layers]`, or give their cache as many slots as the configuration has layers,
and a block finds its slot by its number. Both stay true when the depth changes.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn

from surgery.depth.sections import Section
from surgery.depth.splice import is_list
from surgery.names import is_inside, join
from surgery.plain import is_settings

Key = tuple[str, str]  # a module's name, and an attribute of it or of an object that it holds: "config.num_layers"
_COUNTING = {"num", "n", "nb", "number", "of", "hidden"}
_COUNTED = {"layer", "layers", "block", "blocks", "depth", "depths"}


def recount_blocks(
    model: nn.Module, known: Sequence[Section], origins: Mapping[Section, Sequence[int]]
) -> dict[Key, Any]:
    """Return new values of attributes that count blocks or list something for each.

    Such an attribute belongs to a module around the section, or to an object that modules hold, such as a
    configuration. Its name says so (`n_layer`, `num_hidden_layers`, `decoder_layers` if the section is in a `decoder`,
    `layer_types`), and its value is the section's depth, or a list of that length; or the depth of the whole list
    of modules that the section is a part of. Where it may be another section's it is left alone.

    Args:
        known: all sections of the model.
        origins: for sections that change, which block each block of the new section comes from, by position.

    >>> class Net(nn.Module):
    ...     def __init__(self): super().__init__(); self.n_layer, self.layers = 1, nn.ModuleList([nn.Linear(2, 2)])
    >>> section = Section("layers", ("layers.0",))
    >>> recount_blocks(Net(), [section], {section: [0, 0, 0]})
    {('', 'n_layer'): 3}
    """
    lists = _whole_lists(model, known, origins)
    origins = {**origins, **lists}
    parts = {part for name, _ in model.named_modules() for part in name.split(".")}
    holders = list(_holders(model, [*known, *lists]))
    counted_in: dict[Section, list[int]] = {}  # of how many sections each configuration is that counts a section
    for _, holder, about in holders:
        for section in [] if isinstance(holder, nn.Module) else about:
            if _is_counted(section, vars(holder)):
                counted_in.setdefault(section, []).append(len(about))
    changes: dict[Key, Any] = {}
    for (module, path), holder, about in holders:
        served = [s for s in about if min(counted_in.get(s, [len(about)])) >= len(about)] or about
        depths = [section for section in served if section not in lists]
        for attribute, value in vars(holder).items():
            if not _words(attribute) & _COUNTED:
                continue
            if isinstance(value, list | tuple) and list(value) == [len(section.blocks) for section in depths]:
                new: Any = [len(origins.get(section, section.blocks)) for section in depths]
            elif (
                len(matches := _find_counted(attribute, value, holder, served, about, lists, parts)) == 1
                and matches[0] in origins
            ):
                new = (
                    len(origins[matches[0]])
                    if isinstance(value, int)
                    else [value[place] for place in origins[matches[0]]]
                )
            else:
                continue
            new = new if isinstance(value, int) else type(value)(new)
            if new != value:
                changes[module, join(path, attribute)] = new
    return changes


def _whole_lists(
    model: nn.Module, known: Sequence[Section], origins: Mapping[Section, Sequence[int]]
) -> dict[Section, list[int]]:
    """Return lists around the blocks of a changed section, and which entries stay."""
    whole = {}
    for parent in dict.fromkeys(block.rpartition(".")[0] for section in origins for block in section.blocks):
        entries = tuple(join(parent, name) for name in model.get_submodule(parent)._modules)
        inside = [section for section in known if {*section.blocks} < {*entries}]
        often = {b: list(origins[s]).count(i) for s in inside if s in origins for i, b in enumerate(s.blocks)}
        if often and is_list(model.get_submodule(parent)):
            whole[Section(parent, entries)] = [i for i, e in enumerate(entries) for _ in range(often.get(e, 1))]
    return whole


def _is_counted(section: Section, settings: Mapping[str, Any]) -> bool:
    """Return whether a configuration counts a section under a name that fits no other."""
    return any(
        _words(attribute) & _COUNTED and not _special(attribute) and _fits(value, section)
        for attribute, value in settings.items()
    )


def _find_counted(
    attribute: str,
    value: Any,
    holder: Any,
    served: Sequence[Section],
    about: Sequence[Section],
    lists: Iterable[Section],
    parts: set[str],
) -> list[Section]:
    """Return the sections that an attribute counts, or has an entry for each block of.

    More than one if that is not known.

    Args:
        served: the sections that the holder may count.
        about: those and others, which a nearer configuration counts, and which the holder counts only by their names.
        lists: those that are whole lists, which stand for the sections in them.
        parts: what modules of the model are called.
    """
    units = [s for s in served if not any({*s.blocks} < {*other.blocks} for other in lists)]
    fitting = [s for s in units if _fits(value, s)]
    if special := _special(attribute):
        named = [s for s in about if special <= _words(s.name) and _fits(value, s)]
        if named or any(special & _words(s.name) for s in about):
            return named
        if isinstance(value, list | tuple):  # whatever there is of a layer; integers may be the numbers of some
            known = hasattr(holder, "attribute_map") or _words(attribute) & {"type", "types"}
            return fitting if known and int not in map(type, value) else []
        if special & parts or not any(name == attribute and not _special(alias) for alias, name in _aliases(holder)):
            return []
    others = {s for s in units for name, v in vars(holder).items() if _names(name, s) and _fits(v, s)}
    candidates = [s for s in units if len(units) == 1 or s not in others]
    return candidates if len(candidates) == 1 and candidates[0] in fitting else []


def _fits(value: Any, section: Section) -> bool:
    """Return whether a value is a section's depth, or has an entry for each block."""
    if type(value) in (list, tuple):
        return len(value) == len(section.blocks) and all(isinstance(item, str | int | float) for item in value)
    return type(value) is int and value == len(section.blocks)


def _aliases(holder: Any) -> Iterator[tuple[str, str]]:
    """Yield (other name, name) of a configuration's attributes, as HuggingFace does."""
    aliases = getattr(holder, "attribute_map", None)
    yield from aliases.items() if isinstance(aliases, Mapping) else ()


def _special(attribute: str) -> set[str]:
    """Return the words of a name that say whose layers, or what of them, it counts."""
    return _words(attribute) - _COUNTING - _COUNTED - {"types", "type"}


def _names(attribute: str, section: Section) -> bool:
    """Return whether an attribute's name has a word of the section's name (`decoder`)."""
    return bool(_words(attribute) & _COUNTED and _special(attribute) & _words(section.name))


def _words(name: str) -> set[str]:
    return set(re.split(r"[._#]", name.lower())) - {""}


def _holders(model: nn.Module, known: Sequence[Section]) -> Iterator[tuple[Key, Any, list[Section]]]:
    """((module, path from it), module or object, the sections that it is about)."""
    places: dict[int, tuple[Key, Any]] = {}
    about: dict[int, set[Section]] = {}
    for name, module in model.named_modules():
        around = [s for s in known if any(is_inside(block, name) or is_inside(name, block) for block in s.blocks)]
        if any(is_inside(block, name) and block != name for s in known for block in s.blocks):
            yield (name, ""), module, around
        for attribute, value in vars(module).items():
            if is_settings(value):
                places.setdefault(id(value), ((name, attribute), value))
                about.setdefault(id(value), set()).update(around)
    for key, (place, value) in places.items():
        yield place, value, [section for section in known if section in about[key]]


# What numbers are called. The name decides where values alone could be a coincidence: in sections of one or two blocks.
_NUMBER = re.compile(
    r"^_?((layer|block)(_?(idx|index|id|i|nr|no|num|number|pos|position))?|idx|index|number|position)$"
)
# What sizes are called: they may grow from block to block (dilations), but are no numbers of blocks.
_SIZE = re.compile(
    r"dim|size|width|height|channel|head|group|dilat|strid|kernel|pad|feature|rank|scale|factor|rate|hidden|len"
)


class Shift(NamedTuple):
    """The shifts of numbers of a section's blocks, and of the blocks after it."""

    blocks: Sequence[int]
    later: int


def numbers(model: nn.Module, section: Section) -> dict[str, list[list[str]]]:
    """Return each block's modules by the attribute that numbers the section's blocks.

    It goes up by one from block to block, and is not called what sizes are called. Numbers may begin anywhere. With
    fewer than three blocks, or where it belongs to other modules in each block (an attention here, a convolution
    there), it must also be called what numbers are called (`layer_idx`, `block_id`, `index`, ...); a single block's
    must also be its position.

    >>> class Block(nn.Linear):
    ...     def __init__(self, i): super().__init__(2, 2); self.layer_idx, self.groups = i, 1
    >>> numbers(nn.ModuleList([Block(0), Block(1)]), Section("", ("0", "1")))
    {'layer_idx': [['0'], ['1']]}
    """
    counters: dict[str, list[dict[str, int]]] = {}  # by attribute, for each block by path what it is
    for place, block in enumerate(section.blocks):
        for path, module in model.get_submodule(block).named_modules():
            if type(module).__module__.startswith("torch.nn."):
                continue  # their integers are sizes
            for attribute, value in vars(module).items():
                if type(value) is int:
                    counters.setdefault(attribute, [{} for _ in section.blocks])[place][path] = value
    numbered = {}
    for attribute, values in counters.items():
        named = _NUMBER.match(attribute) is not None
        if named and len(values) > 1 and all(len({*row.values()}) == 1 for row in values):
            paths = [[*row] for row in values] if _ascend([next(iter(row.values())) for row in values]) else []
        elif (len(values) > 2 and not _SIZE.search(attribute)) or (named and len(values) < 3):
            same = [path for path in values[0] if _ascend([row.get(path) for row in values])]
            if len(values) == 1:
                same = [path for path in same if _is_position(model, section, values[0][path])]
            paths = [same for _ in values] if same else []
        else:
            paths = []
        if paths:
            numbered[attribute] = [
                [join(b, path) if path else b for path in those] for b, those in zip(section.blocks, paths)
            ]
    return numbered


def _ascend(values: Sequence[int | None]) -> bool:
    first = values[0]
    return first is not None and [*values] == [*range(first, first + len(values))]


def renumber(model: nn.Module, shifts: Mapping[Section, Shift]) -> dict[tuple[str, str], int]:
    """Return by (module, attribute) the numbers that change with sections' depths.

    Blocks of other sections are numbered on where they were numbered on before.
    """
    moves: Counter = Counter()
    for section, shift in shifts.items():
        for attribute, modules in numbers(model, section).items():
            for names, by in zip(modules, shift.blocks):
                moves.update({(name, attribute): by for name in names})
            moves.update(
                {(n, attribute): shift.later for n in _find_numbered(model, section, modules[-1][0], attribute)}
            )
    return {(name, key): getattr(model.get_submodule(name), key) + by for (name, key), by in moves.items() if by}


def _find_numbered(model: nn.Module, section: Section, last_module: str, attribute: str) -> Iterator[str]:
    """Yield the modules after the section whose numbers continue its last block's."""
    value = last = getattr(model.get_submodule(last_module), attribute)
    passed = False
    for name, module in model.named_modules():
        if any(is_inside(name, block) for block in section.blocks):
            passed = True
        elif passed and type(number := vars(module).get(attribute)) is int:
            if number not in (value, value + 1) or number == last:
                return
            yield name
            value = number


def _is_position(model: nn.Module, section: Section, value: int) -> bool:
    """Return whether a number is the place, from 0 or 1, of a section's only block."""
    parent, _, child = section.blocks[0].rpartition(".")
    place = list(model.get_submodule(parent)._modules).index(child)
    return value in (place, place + 1)

"""Numbers in a model's attributes that count its blocks (`config.num_hidden_layers`) or number them (`layer_idx`).

Some models run `layers[: config.num_hidden_layers]`, or give their cache as many slots as the configuration has layers,
and a block finds its slot by its number. Both stay true when the depth changes.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn

from surgery.configuration import is_settings
from surgery.depth.sections import Section
from surgery.names import is_inside, joined

Key = tuple[str, str]  # a module's name, and an attribute of it or of an object that it holds: "config.num_layers"
_COUNTING = {"num", "n", "nb", "number", "of", "hidden"}
_COUNTED = {"layer", "layers", "block", "blocks", "depth", "depths"}


def recounted(model: nn.Module, found: Sequence[Section], kept: Mapping[Section, Sequence[int]]) -> dict[Key, Any]:
    """The new values of attributes that count blocks, or list something for each block.

    Such an attribute belongs to a module around the section, or to an object that modules hold, such as a
    configuration. Its name says so (`n_layer`, `num_hidden_layers`, `decoder_layers` if the section is in a `decoder`,
    `layer_types`), and its value is the section's depth, or a list of that length. Where it may be another section's it
    is left alone.

    Args:
        found: all sections of the model.
        kept: for sections that change, which block each block of the new section comes from, by position.

    >>> class Net(nn.Module):
    ...     def __init__(self): super().__init__(); self.n_layer, self.layers = 1, nn.ModuleList([nn.Linear(2, 2)])
    >>> section = Section("layers", ("layers.0",))
    >>> recounted(Net(), [section], {section: [0, 0, 0]})
    {('', 'n_layer'): 3}
    """
    changes: dict[Key, Any] = {}
    for (module, path), holder, served in _holders(model, found):
        for attribute, value in vars(holder).items():
            new = _new_value(attribute, value, holder, served, kept)
            if new is not None and new != value:
                changes[module, joined(path, attribute)] = new
    return changes


def _new_value(
    attribute: str, value: Any, holder: Any, served: Sequence[Section], kept: Mapping[Section, Sequence[int]]
) -> Any:
    words = _words(attribute)
    if not words & _COUNTED:
        return None
    if isinstance(value, list | tuple) and list(value) == [len(section.blocks) for section in served]:
        return type(value)(len(kept.get(section, section.blocks)) for section in served)
    mine = [section for section in served if _counts(attribute, value, section) and words - _COUNTING - _COUNTED]
    if not mine and not words - _COUNTING - _COUNTED - {"types", "type"}:
        others = {s for s in served for name, v in vars(holder).items() if _names(name, s) and _counts(name, v, s)}
        mine = [section for section in served if len(served) == 1 or section not in others]
    if len(mine) != 1 or mine[0] not in kept or not _counts(attribute, value, mine[0]):
        return None
    positions = kept[mine[0]]
    return len(positions) if isinstance(value, int) else type(value)(value[p] for p in positions)


def _counts(attribute: str, value: Any, section: Section) -> bool:
    """Whether a value may be the depth of a section, or have an entry for each of its blocks."""
    if not _words(attribute) - _COUNTING - _COUNTED - {"types", "type"} <= _words(section.name):
        return False
    if type(value) in (list, tuple):
        plain = all(isinstance(item, str | int | float) for item in value)
        return plain and len(value) == len(section.blocks)
    return type(value) is int and value == len(section.blocks)


def _names(attribute: str, section: Section) -> bool:
    """Whether the name of an attribute has a word of the section's own name, such as `decoder`."""
    return bool((_words(attribute) - _COUNTING - _COUNTED) & _words(section.name))


def _words(name: str) -> set[str]:
    return set(re.split(r"[._#]", name.lower())) - {""}


def _holders(model: nn.Module, found: Sequence[Section]) -> Iterator[tuple[Key, Any, list[Section]]]:
    """((module, path from it), module or object, the sections that it is about)."""
    places: dict[int, tuple[Key, Any]] = {}
    about: dict[int, set[Section]] = {}
    for name, module in model.named_modules():
        around = [s for s in found if any(is_inside(block, name) or is_inside(name, block) for block in s.blocks)]
        if any(is_inside(block, name) and block != name for s in found for block in s.blocks):
            yield (name, ""), module, around
        for attribute, value in vars(module).items():
            if is_settings(value):
                places.setdefault(id(value), ((name, attribute), value))
                about.setdefault(id(value), set()).update(around)
    for key, (place, value) in places.items():
        yield place, value, [section for section in found if section in about[key]]


# What numbers are called. The name decides where values alone could be a coincidence: in sections of one or two blocks.
_NUMBER = re.compile(
    r"^_?((layer|block)(_?(idx|index|id|i|nr|no|num|number|pos|position))?|idx|index|number|position)$"
)
# What sizes are called: they may grow from block to block (dilations), but are no numbers of blocks.
_SIZE = re.compile(
    r"dim|size|width|height|channel|head|group|dilat|strid|kernel|pad|feature|rank|scale|factor|rate|hidden|len"
)


class Shift(NamedTuple):
    """How far numbers move: those of each block of a section, and those of the blocks that come after it."""

    blocks: Sequence[int]
    later: int


def numbers(model: nn.Module, section: Section) -> list[tuple[str, str]]:
    """(module inside the block, attribute) of each integer that numbers the section's blocks.

    It goes up by one from block to block, and is not called what sizes are called. Numbers may begin anywhere. With
    fewer than three blocks it must also be called what numbers are called (`layer_idx`, `block_id`, `index`, ...); a
    single block's must also be its position.

    >>> class Block(nn.Linear):
    ...     def __init__(self, i): super().__init__(2, 2); self.layer_idx, self.groups = i, 1
    >>> numbers(nn.ModuleList([Block(0), Block(1)]), Section("", ("0", "1")))
    [('', 'layer_idx')]
    """
    first, *rest = (model.get_submodule(block) for block in section.blocks)
    others = [dict(block.named_modules()) for block in rest]
    found = []
    for path, module in first.named_modules():
        if type(module).__module__.startswith("torch.nn."):
            continue  # their integers are sizes
        for attribute, value in vars(module).items():
            values = [value, *(vars(modules[path]).get(attribute) for modules in others if path in modules)]
            if all(type(v) is int for v in values) and values == [*range(value, value + len(section.blocks))]:
                named = _NUMBER.match(attribute) is not None
                if (len(values) > 2 and not _SIZE.search(attribute)) or (
                    named and (len(values) == 2 or _is_position(model, section, value))
                ):
                    found.append((path, attribute))
    return found


def renumbered(model: nn.Module, shifts: Mapping[Section, Shift]) -> dict[tuple[str, str], int]:
    """By (module, attribute) the new number of each module whose number changes when sections change their depth.

    Blocks of other sections are numbered on where they were numbered on before.
    """
    moves: Counter = Counter()
    for section, shift in shifts.items():
        found = numbers(model, section)
        for path, attribute in found:
            moves.update({(_inside(b, path), attribute): by for b, by in zip(section.blocks, shift.blocks)})
        for attribute in {attribute: None for _, attribute in found}:
            moves.update({(name, attribute): shift.later for name in _numbered_on(model, section, found, attribute)})
    return {(name, key): getattr(model.get_submodule(name), key) + by for (name, key), by in moves.items() if by}


def _numbered_on(model: nn.Module, section: Section, found: list, attribute: str) -> Iterator[str]:
    """The modules after the section whose numbers go on from those of the section."""
    path = next(path for path, other in found if other == attribute)
    value = last = getattr(model.get_submodule(_inside(section.blocks[-1], path)), attribute)
    passed = False
    for name, module in model.named_modules():
        if any(is_inside(name, block) for block in section.blocks):
            passed = True
        elif passed and type(number := vars(module).get(attribute)) is int:
            if number not in (value, value + 1) or number == last:
                return
            yield name
            value = number


def _inside(block: str, path: str) -> str:
    return joined(block, path) if path else block


def _is_position(model: nn.Module, section: Section, value: int) -> bool:
    """Whether a number is the place of the section's only block in the module that holds it, counted from 0 or 1."""
    parent, _, child = section.blocks[0].rpartition(".")
    place = list(model.get_submodule(parent)._modules).index(child)
    return value in (place, place + 1)

"""The numbers that blocks carry, such as `layer_idx`: with them a block finds its slot in a key-value cache."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import nn

from surgery.depth.sections import Section
from surgery.names import is_inside, joined

# What numbers are called. The name decides where values alone could be a coincidence: in sections of one or two blocks.
_NUMBER = re.compile(
    r"^_?((layer|block)(_?(idx|index|id|i|nr|no|num|number|pos|position))?|idx|index|number|position)$"
)


class Shift(NamedTuple):
    """How far numbers move: those of each block of a section, and those of the blocks that come after it."""

    blocks: Sequence[int]
    later: int


def numbers(model: nn.Module, section: Section) -> list[tuple[str, str]]:
    """(module inside the block, attribute) of each integer that numbers the section's blocks.

    It goes up by one from block to block. Numbers may begin anywhere. With fewer than three blocks it must also be
    called what numbers are called (`layer_idx`, `block_id`, `index`, ...); a single block's must also be its position.

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
                if len(values) > 2 or (named and (len(values) == 2 or _is_position(model, section, value))):
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

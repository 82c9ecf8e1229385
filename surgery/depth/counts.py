"""Attributes that say how many blocks a section has, such as `config.num_hidden_layers`, so that they stay true.

Some models run `layers[: config.num_hidden_layers]`, or give their cache as many slots as the configuration has layers.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

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


def is_settings(value: Any) -> bool:
    """Whether a value is an object whose attributes may be set, such as a configuration; no module, tensor or class."""
    frozen = getattr(getattr(type(value), "__dataclass_params__", None), "frozen", False)
    plain = hasattr(value, "__dict__") and not isinstance(value, nn.Module | Tensor | type) and not callable(value)
    return plain and not frozen

"""What libraries and users say about models: which of their modules are blocks.

A library's metadata are found by a method's name, so that none has to be installed.
"""

import re
from typing import TypeVar

from torch import nn

from surgery.depth.state_tree import Part
from surgery.errors import SurgeryError
from surgery.names import is_inside
from surgery.states import owners

BLOCKS: dict[type[nn.Module], None] = {}
"""The classes that `register_block` was told."""

Kind = TypeVar("Kind", bound=type[nn.Module])


def register_block(kind: Kind) -> Kind:
    """Say that modules of this class, or of one derived from it, are residual blocks. Returns the class.

    `surgery.sections` then takes consecutive ones in one module as a section, even if their names do not show that they
    follow each other. Blocks inside of such a block do not count. Register a class once, before you use its models.

    Raises:
        SurgeryError: if it is not a class of modules.

    >>> import surgery
    >>> block = surgery.register_block(type("Block", (nn.Sequential,), {}))
    >>> net = nn.Module()
    >>> net.coarse, net.fine = (block(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2))
    >>> surgery.sections(net)
    [Section(name='', blocks=('coarse', 'fine'))]
    """
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise SurgeryError(
            f"{kind!r} is not a class of modules: register the class, not one of its modules or its name"
        )
    BLOCKS[kind] = None
    return kind


def declared_blocks(model: nn.Module) -> list[str]:
    """The names of the modules that are declared to be blocks: by their class (`register_block`), or by metadata."""
    kinds = tuple(BLOCKS)
    found = [name for name, module in model.named_modules() if name and isinstance(module, kinds)]
    found = [name for name in found if not any(is_inside(name, other) for other in found if other != name)]
    others = [b for b in _matched_blocks(model) if not any(is_inside(b, name) or is_inside(name, b) for name in found)]
    return found + others


def _matched_blocks(model: nn.Module) -> list[str]:
    """The names of the modules that `group_matcher` declares to be blocks: the part of tensor names that it matches.

    timm's models have this method, and so have those of this project's zoo. In a state, modules called
    `section<i>.<j>` are blocks, as in the zoo. Empty for other models, and if no match ends where a module's name does.
    """
    matcher = getattr(model, "group_matcher", None)
    groups = matcher(coarse=False) if callable(matcher) else None
    if isinstance(model, Part):
        groups = {"blocks": r"^section(\d+)\.(\d+)"}
    if not isinstance(groups, dict):
        return []
    patterns = []  # patterns with an ordinal (downsample, final norm) and the stem's say what is not a block
    for group, spec in groups.items():
        pairs = spec if isinstance(spec, list | tuple) else [] if spec is None else [(spec, None)]
        patterns += [(re.compile(regex), group != "stem" and ordinal is None) for regex, ordinal in pairs]
    found: dict[str, None] = {}
    for _, _, own in owners(model):
        for name in own:
            match, is_block = next(((m, b) for p, b in patterns if (m := p.match(name))), (None, False))
            if is_block and name[match.end() : match.end() + 1] == ".":
                found[name[: match.end()]] = None
    return list(found)

"""What libraries say about their own models. It is found by a method's name, so that none has to be installed."""

import re

from torch import nn

from surgery.depth.state_tree import Part
from surgery.states import owners


def declared_blocks(model: nn.Module) -> list[str]:
    """The names of the modules that `group_matcher` declares to be blocks: the part of tensor names that it matches.

    timm's models have this method, and so have those of this project's zoo. In a state, modules called
    `section<i>.<j>` are blocks, as in the zoo. Empty for other models, and if no match ends where a module's name does.

    >>> declared_blocks(nn.Linear(2, 2))
    []
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

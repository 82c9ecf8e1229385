"""What libraries tell about their own models; asked for by method name, so that none need be installed."""

import re

from torch import nn

from surgery.depth.state_tree import Part
from surgery.states import owners


def declared_blocks(model: nn.Module) -> list[str]:
    """Modules that `group_matcher` names as blocks: what its patterns match of the tensors' names.

    timm's models have this method, and those of this project's zoo. Of a state, modules called `section<i>.<j>` are
    blocks, as the zoo's are. Empty for other models, and where the patterns do not end with a module's name.

    >>> declared_blocks(nn.Linear(2, 2))
    []
    """
    matcher = getattr(model, "group_matcher", None)
    groups = matcher(coarse=False) if callable(matcher) else None
    if isinstance(model, Part):
        groups = {"blocks": r"^section(\d+)\.(\d+)"}
    if not isinstance(groups, dict):
        return []
    patterns = []  # a pattern with an ordinal (downsample, final norm) or of the stem tells what is no block
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

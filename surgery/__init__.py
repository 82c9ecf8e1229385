"""Architecture manipulation on any `torch.nn.Module` or state dict."""

from importlib import import_module, metadata
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from surgery.averaging import average
    from surgery.batch_statistics import repair
    from surgery.decomposition import Layer, layers
    from surgery.depth.adapters import register_block
    from surgery.depth.graft import graft, ungraft
    from surgery.depth.sections import Section, repeatable, sections
    from surgery.errors import SurgeryError
    from surgery.libraries import example_input, named
    from surgery.recombine import inverse, permutations, segments, shuffle
    from surgery.robust import trimmed_mean, trimmed_mean_submodels
    from surgery.scale import match_norms, percentile_norm
    from surgery.similarity import SectionSimilarity, block_similarity, filter_similarity
    from surgery.states import (
        Stack,
        State,
        broadcast,
        check_same,
        cosine,
        distance,
        load,
        stack,
        stack_size,
        state,
        unstack,
    )
    from surgery.submodel import Submodel
    from surgery.submodel_average import average_submodels
    from surgery.submodel_scale import submodel_factors
    from surgery.variation import Variation, scale_variation
    from surgery.width.align import Aligned, Aligner, align
    from surgery.width.corner import corner
    from surgery.width.importance import importance
    from surgery.width.narrow import narrow
    from surgery.width.permute import permute, sort_by
    from surgery.width.roll import rolling
    from surgery.width.rules import register_rule
    from surgery.width.target import Target
    from surgery.width.widen import widen
    from surgery.width.widths import Width, widths

__all__ = [
    "Aligned",
    "Aligner",
    "Layer",
    "Section",
    "SectionSimilarity",
    "Stack",
    "State",
    "Submodel",
    "SurgeryError",
    "Target",
    "Variation",
    "Width",
    "align",
    "average",
    "average_submodels",
    "block_similarity",
    "broadcast",
    "check_same",
    "corner",
    "cosine",
    "distance",
    "example_input",
    "filter_similarity",
    "graft",
    "importance",
    "inverse",
    "layers",
    "load",
    "match_norms",
    "named",
    "narrow",
    "percentile_norm",
    "permutations",
    "permute",
    "register_block",
    "register_rule",
    "repair",
    "repeatable",
    "rolling",
    "scale_variation",
    "sections",
    "segments",
    "shuffle",
    "sort_by",
    "stack",
    "stack_size",
    "state",
    "submodel_factors",
    "trimmed_mean",
    "trimmed_mean_submodels",
    "ungraft",
    "unstack",
    "widen",
    "widths",
]

_WHERE = {
    "Aligned": "surgery.width.align",
    "Aligner": "surgery.width.align",
    "Layer": "surgery.decomposition",
    "Section": "surgery.depth.sections",
    "SectionSimilarity": "surgery.similarity",
    "Stack": "surgery.states",
    "State": "surgery.states",
    "Submodel": "surgery.submodel",
    "SurgeryError": "surgery.errors",
    "Target": "surgery.width.target",
    "Variation": "surgery.variation",
    "Width": "surgery.width.widths",
    "align": "surgery.width.align",
    "average": "surgery.averaging",
    "average_submodels": "surgery.submodel_average",
    "block_similarity": "surgery.similarity",
    "broadcast": "surgery.states",
    "check_same": "surgery.states",
    "corner": "surgery.width.corner",
    "cosine": "surgery.states",
    "distance": "surgery.states",
    "example_input": "surgery.libraries",
    "filter_similarity": "surgery.similarity",
    "graft": "surgery.depth.graft",
    "importance": "surgery.width.importance",
    "inverse": "surgery.recombine",
    "layers": "surgery.decomposition",
    "load": "surgery.states",
    "match_norms": "surgery.scale",
    "named": "surgery.libraries",
    "narrow": "surgery.width.narrow",
    "percentile_norm": "surgery.scale",
    "permutations": "surgery.recombine",
    "permute": "surgery.width.permute",
    "register_block": "surgery.depth.adapters",
    "register_rule": "surgery.width.rules",
    "repair": "surgery.batch_statistics",
    "repeatable": "surgery.depth.sections",
    "rolling": "surgery.width.roll",
    "scale_variation": "surgery.variation",
    "sections": "surgery.depth.sections",
    "segments": "surgery.recombine",
    "shuffle": "surgery.recombine",
    "sort_by": "surgery.width.permute",
    "stack": "surgery.states",
    "stack_size": "surgery.states",
    "state": "surgery.states",
    "submodel_factors": "surgery.submodel_scale",
    "trimmed_mean": "surgery.robust",
    "trimmed_mean_submodels": "surgery.robust",
    "ungraft": "surgery.depth.graft",
    "unstack": "surgery.states",
    "widen": "surgery.width.widen",
    "widths": "surgery.width.widths",
}
"""Names are imported when they are first used, so that `python -m surgery --help` does not wait for PyTorch."""


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        value = getattr(import_module(_WHERE[name]), name)
    elif name == "__version__":
        value = next((one.version for one in metadata.distributions(name="layer-surgery")), "not installed")
    elif not name.startswith("_") and find_spec(f"{__name__}.{name}"):
        value = import_module(f"{__name__}.{name}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

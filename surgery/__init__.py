"""Architecture manipulation on any `torch.nn.Module` or state dict."""

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
    count,
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
    "count",
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

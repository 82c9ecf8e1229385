"""Architecture manipulation on any `torch.nn.Module` or state dict."""

from surgery.average import average
from surgery.depth.graft import graft, ungraft
from surgery.depth.sections import Section, repeatable, sections
from surgery.errors import SurgeryError
from surgery.layers import Layer, layers
from surgery.named import example_input, named
from surgery.recombine import inverse, permutations, segments, shuffle
from surgery.scale import match_norms, percentile_norm
from surgery.state import (
    Stack,
    State,
    broadcast,
    check_same,
    cosine,
    count,
    distance,
    load,
    stack,
    state,
    unstack,
)
from surgery.submodel import Submodel
from surgery.submodel_average import average_submodels
from surgery.width.narrow import narrow
from surgery.width.widths import Width, widths

__all__ = [
    "Layer",
    "Section",
    "Stack",
    "State",
    "Submodel",
    "SurgeryError",
    "Width",
    "average",
    "average_submodels",
    "broadcast",
    "check_same",
    "cosine",
    "count",
    "distance",
    "example_input",
    "graft",
    "inverse",
    "layers",
    "load",
    "match_norms",
    "named",
    "narrow",
    "percentile_norm",
    "permutations",
    "repeatable",
    "sections",
    "segments",
    "shuffle",
    "stack",
    "state",
    "ungraft",
    "unstack",
    "widths",
]

"""Architecture manipulation on any `torch.nn.Module` or state dict."""

from surgery.average import average
from surgery.errors import SurgeryError
from surgery.layers import Layer, layers
from surgery.recombine import inverse, permutations, segments, shuffle
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

__all__ = [
    "Layer",
    "Stack",
    "State",
    "SurgeryError",
    "average",
    "broadcast",
    "check_same",
    "cosine",
    "count",
    "distance",
    "inverse",
    "layers",
    "load",
    "permutations",
    "segments",
    "shuffle",
    "stack",
    "state",
    "unstack",
]

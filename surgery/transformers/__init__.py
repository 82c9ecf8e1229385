"""Configurations follow a plan where a class makes the model, as in transformers."""

from torch import nn

from surgery.transformers.depth import depth_edits as depth_edits
from surgery.transformers.settings import holder_of
from surgery.transformers.width import width_edits as width_edits


def follows(model: nn.Module) -> bool:
    """Return whether a model's class makes it from a configuration that it holds."""
    return holder_of(model) is not None

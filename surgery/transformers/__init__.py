"""Configurations follow a plan: of models that a class makes from one, such as those of HuggingFace's transformers."""

from torch import nn

from surgery.transformers.depth import depth_edits as depth_edits
from surgery.transformers.settings import holder_of
from surgery.transformers.width import width_edits as width_edits


def follows(model: nn.Module) -> bool:
    """Return whether a model's class makes it from a configuration that the model holds."""
    return holder_of(model) is not None

"""Normalisation layers that federated averaging can handle, and widths."""

import math
from typing import Literal, TypeAlias

from torch import nn

from zoo.errors import ZooError

Norm: TypeAlias = Literal["none", "batch", "group"]


class BatchNorm2d(nn.BatchNorm2d):
    """Batch norm without a step counter.

    torch's `num_batches_tracked` is an integer, which has no mean over clients; with a fixed momentum
    nothing reads it. State dicts that carry one (torchvision's, timm's) load all the same.
    """

    def __init__(self, num_features: int) -> None:
        super().__init__(num_features)
        self.num_batches_tracked = None  # as a buffer that is absent: F.batch_norm then takes the fixed momentum

    def reset_running_stats(self) -> None:
        self.running_mean.zero_()
        self.running_var.fill_(1)

    def _load_from_state_dict(self, state_dict, prefix, *args) -> None:
        state_dict.pop(prefix + "num_batches_tracked", None)  # the caller's own copy: Module.load_state_dict made it
        nn.Module._load_from_state_dict(self, state_dict, prefix, *args)


def make_norm(kind: Norm, channels: int) -> nn.Module:
    """A norm layer by name. Group norm takes the most groups, up to 8, that divide the channels.

    >>> make_norm("group", 12).num_groups
    4
    """
    if kind == "batch":
        return BatchNorm2d(channels)
    if kind == "group":
        return nn.GroupNorm(math.gcd(8, channels), channels)
    if kind == "none":
        return nn.Identity()
    raise ZooError(f"unknown norm {kind!r}: choose batch, group or none")


def scaled(channels: int, width: float) -> int:
    """ceil(width * channels), at least 1: the number of hidden channels at a width rate.

    >>> [scaled(64, w) for w in (1.0, 0.5, 0.1)]
    [64, 32, 7]
    """
    if not 0 < width < math.inf:
        raise ZooError(f"width is a rate above 0 (1 is the full width), got {width}")
    return max(1, math.ceil(round(width * channels, 6)))  # 0.07 * 100 is 7, not 7.000000000000001

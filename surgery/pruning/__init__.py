"""Pruning: score positions of widths, and cut a model to a size, also in steps."""

from surgery.pruning.blocks import score_blocks as score_blocks
from surgery.pruning.criteria import importance as importance
from surgery.pruning.dropping import drop as drop
from surgery.pruning.dropping import drop_zeros as drop_zeros
from surgery.pruning.pruner import Pruned as Pruned
from surgery.pruning.pruner import prune as prune
from surgery.pruning.target import Target as Target

"""Adapters of low rank: small matrices beside the layers of a frozen model, whose rank is one more width.

Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (ICLR 2022). An adapted layer computes
y = W x + b + scale B A x with A: [rank, in] and B: [out, rank]. `scale` is one number that no change of the rank
touches; in peft's terms it is lora_alpha / r. DoRA (Liu et al., ICML 2024) also learns a norm for each output.
"""

from surgery.adapters.extract import Extracted, extract
from surgery.adapters.fold import fold
from surgery.adapters.layer import LowRank
from surgery.adapters.model import adapted_layers, add, attach, merge, remove, scales, state, unmerge
from surgery.adapters.peft import read_peft, write_peft
from surgery.adapters.rank import products, rank_of, resize, stack

__all__ = [
    "Extracted",
    "LowRank",
    "adapted_layers",
    "add",
    "attach",
    "extract",
    "fold",
    "merge",
    "products",
    "rank_of",
    "read_peft",
    "remove",
    "resize",
    "scales",
    "stack",
    "state",
    "unmerge",
    "write_peft",
]

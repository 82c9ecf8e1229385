"""Low-rank adapters: small matrices beside the layers of a frozen model.

Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (ICLR 2022). An adapted layer computes
y = W x + b + scale B A x with A: [rank, in] and B: [out, rank]. `scale` is one number that no change of the rank
touches; in peft's terms it is lora_alpha / r. DoRA (Liu et al., ICML 2024) also learns a norm for each output.
"""

from surgery.adapters.extract import Extracted as Extracted
from surgery.adapters.extract import extract as extract
from surgery.adapters.fold import fold as fold
from surgery.adapters.layer import LowRank as LowRank
from surgery.adapters.model import adapted_layers as adapted_layers
from surgery.adapters.model import add as add
from surgery.adapters.model import attach as attach
from surgery.adapters.model import merge as merge
from surgery.adapters.model import remove as remove
from surgery.adapters.model import scales as scales
from surgery.adapters.model import state as state
from surgery.adapters.model import unmerge as unmerge
from surgery.adapters.peft import read_peft as read_peft
from surgery.adapters.peft import write_peft as write_peft
from surgery.adapters.rank import products as products
from surgery.adapters.rank import rank_of as rank_of
from surgery.adapters.rank import resize as resize
from surgery.adapters.rank import stack as stack

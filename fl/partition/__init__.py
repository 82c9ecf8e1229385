"""Who holds which samples: one file for each way of dealing them out, whose `KIND` is found by `deal.py`.

>>> import torch
>>> from fl.base.rng import Rng
>>> labels = torch.arange(100) % 10
>>> parts, structure = deal(labels, "clusters", clients=4, rng=Rng(0).numpy("partition"), minimum=1, clusters=(2,))
>>> [len(part) for part in parts], structure.tolist()
([25, 25, 25, 25], [[0, 0, 1, 1]])
"""

from fl.partition.clusters import clusters
from fl.partition.contiguous import contiguous
from fl.partition.deal import KINDS, check_text_kind, deal
from fl.partition.dirichlet import dirichlet
from fl.partition.iid import iid
from fl.partition.kind import Kind, Partition
from fl.partition.natural import natural
from fl.partition.shards import shards
from fl.partition.split import Parts, Split, Splits, hold_out

__all__ = [
    "KINDS",
    "Kind",
    "Partition",
    "Parts",
    "Split",
    "Splits",
    "check_text_kind",
    "clusters",
    "contiguous",
    "deal",
    "dirichlet",
    "hold_out",
    "iid",
    "natural",
    "shards",
]

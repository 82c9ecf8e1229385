"""How many samples of each class every client holds."""

import numpy as np
import torch
from torch import Tensor

from fl.partition.kind import Partition


def counts(partition: Partition, labels: Tensor, classes: int) -> np.ndarray:
    """Samples of each client and class, int64 [clients, classes].

    >>> from fl.partition import Parts
    >>> parts = Parts.of([torch.tensor([0, 2]), torch.tensor([1])])
    >>> counts(Partition(parts, torch.zeros(1, 2)), torch.tensor([0, 1, 0]), 2)
    array([[2, 0],
           [0, 1]])
    """
    parts = partition.parts
    rows = torch.arange(len(parts)).repeat_interleave(parts.sizes)
    cells = rows * classes + labels[parts.samples].cpu()
    return cells.bincount(minlength=len(parts) * classes).view(-1, classes).numpy()

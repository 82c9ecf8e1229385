"""Every client has a piece of the data set."""

import numpy as np
from torch import Tensor

from fl.partition.iid import check_sizes, even
from fl.partition.kind import Kind, Partition, alone
from fl.partition.split import Parts


def contiguous(labels: Tensor, clients: int, minimum: int) -> Parts:
    """Cut the samples, in their order, into pieces of equal size: each client has the next part of a text.

    >>> import torch
    >>> [part.tolist() for part in contiguous(torch.zeros(7), 3, 1)]
    [[0, 1, 2], [3, 4], [5, 6]]
    """
    sizes = even(len(labels), clients)
    check_sizes(sizes, minimum)
    return Parts.owned(np.repeat(np.arange(clients), sizes), clients)


KIND = Kind(
    lambda task, _: Partition(contiguous(task.labels, task.clients, task.minimum), alone(task.clients)),
    text=True,
    about="pieces of the data set in its order",
)

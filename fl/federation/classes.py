"""Which classes clients have among their training samples."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fl.data import Dataset
from fl.partition.split import Parts
from surgery.transfer import upload


def classes_held(data: Dataset, parts: Parts, clients: Sequence[int]) -> Tensor:
    """Which classes (of text: tokens) each of the clients has: bool [K, classes], on the data's device.

    Args:
        parts: the samples of every client of the population.

    >>> from types import SimpleNamespace
    >>> data = SimpleNamespace(y=torch.tensor([0, 2, 1, 2]), classes=3, text=False)
    >>> classes_held(data, [torch.tensor([0, 1]), torch.tensor([3])], [1, 0]).int()
    tensor([[0, 0, 1],
            [1, 0, 1]], dtype=torch.int32)
    """
    table = torch.zeros(len(clients), data.classes, dtype=torch.bool, device=data.y.device)
    own = [parts[client] for client in clients]
    rows = torch.arange(len(own)).repeat_interleave(torch.tensor([len(part) for part in own]))
    index, rows = (upload(tensor, table.device) for tensor in (torch.cat(own), rows))
    for values in (data.y, data.x) if data.text else (data.y,):
        seen = values[index]
        places = rows.view(-1, *[1] * (seen.ndim - 1)).expand_as(seen), seen.long()
        table.index_put_(places, table.new_ones(()))
    return table

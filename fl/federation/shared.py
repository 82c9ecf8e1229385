"""A cohort that several processes train together: each its share, after which all of them have all results.

What is sent is whole trained models, whatever the method does with them. A client is trained by the same steps as in
one process, so with the backends that train one client after another its result has the same bits.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from fl.federation.cohort import States
from fl.parallel import current, deal
from surgery.transfer import upload

Some = Callable[[Sequence[int]], tuple[States, Tensor]]
"""Rows of a cohort -> their trained states, in the form of the cohort's, and their losses."""


def train_shared(work: Sequence[int], starts: States, train: Some) -> tuple[States, Tensor]:
    """The trained states of a whole cohort, in the form of its starts, and the losses [K].

    Args:
        work: of each row, in any unit, by which rows are dealt out, see `fl.parallel.deal`.
        train: trains the rows of this process.
    """
    ranks = current()
    dealt = deal(work, ranks.size)
    mine = dealt[ranks.rank]
    given: list[Tensor] = []
    if mine:
        states, loss = train(mine)
        each = [states] if isinstance(states, dict) else states
        given = [loss, *(tensor for state in each for tensor in state.values())]
    found = ranks.gather(given)
    losses = _rows(dealt, [tensors[0] for tensors in found if tensors])
    if isinstance(starts, dict):
        columns = zip(*(tensors[1:] for tensors in found if tensors))
        return {name: _rows(dealt, pieces) for name, pieces in zip(starts, columns)}, losses
    states = list(starts)
    for rows, tensors in zip(dealt, found):
        rest = iter(tensors[1:])
        for row in rows:
            states[row] = {name: next(rest).clone() for name in starts[row]}
    return states, losses


def _rows(dealt: Sequence[Sequence[int]], pieces: Sequence[Tensor]) -> Tensor:
    """[K, ...] from the rows that each rank has."""
    order = upload(torch.tensor([row for rows in dealt for row in rows]), pieces[0].device)
    return torch.cat(list(pieces)).index_select(0, order.argsort())


T = TypeVar("T")


def each_shared(items: Sequence[T], function: Callable[[T], Tensor]) -> list[Tensor]:
    """The function of every item, tensors of one shape; the ranks share the work.

    >>> each_shared([1, 2], torch.tensor)
    [tensor(1), tensor(2)]
    """
    ranks = current()
    if not ranks.sharing:
        return [function(item) for item in items]
    dealt = deal([1] * len(items), ranks.size)
    mine = [function(items[row]) for row in dealt[ranks.rank]]
    found = ranks.gather([torch.stack(mine)] if mine else [])
    return list(_rows(dealt, [piece for (piece,) in filter(None, found)]))

"""A cohort that several processes train together: each its share. Models stay where they were trained, see
`fl.federation.spread`.

A client is trained by the same steps as in one process, so with the backends that train one client after another its
result has the same bits.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fl.federation.cohort import States, per_client, select, stacks
from fl.federation.spread import Spread, joined_rows
from fl.parallel import current, deal
from surgery import Stack, State

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
    states, loss = train(mine) if mine else (select(starts, []), None)
    losses = joined_rows(dealt, [each["loss"] for each in ranks.gather({"loss": loss} if mine else {}) if each])
    if not isinstance(starts, list):
        return Spread(dealt, states), losses
    given = {f"{row}/{name}": tensor for row, state in zip(mine, states) for name, tensor in state.items()}
    every: list[State] = [{} for _ in starts]
    for key, tensor in (item for each in ranks.gather(given) for item in each.items()):
        row, name = key.split("/", 1)
        every[int(row)][name] = tensor.clone()
    return every, losses


def each_row(states: States, starts: States, function: Callable[[Stack, Stack], Tensor]) -> Tensor:
    """The function of every client's model and start, [K]; ranks compute those of their own clients.

    Args:
        function: (stack of models, stack of what they started from) -> a value for each of them.

    >>> one = {"w": torch.tensor([[1.0], [2.0]])}
    >>> each_row(one, one, lambda after, before: (after["w"] - before["w"]).sum(1))
    tensor([0., 0.])
    """
    if not isinstance(states, Spread):
        return torch.cat([function(after, before) for after, before in zip(stacks(states), stacks(starts))])
    given = {"row": function(states.mine, select(starts, states.rows))} if states.rows else {}
    return joined_rows(states.dealt, [each["row"] for each in current().gather(given) if each])


def each_shared(states: States, function: Callable[[int, State], Tensor]) -> list[Tensor]:
    """The function of every client's position and model, tensors of one shape; the ranks share the work.

    >>> each_shared({"w": torch.tensor([1.0, 2.0])}, lambda row, state: state["w"] + row)
    [tensor(1.), tensor(3.)]
    """
    ranks = current()
    if isinstance(states, Spread):
        dealt, own = states.dealt, per_client(states.mine) if states.rows else []
    else:
        every = per_client(states)
        if not ranks.sharing:
            return [function(row, state) for row, state in enumerate(every)]
        dealt = deal([1] * len(every), ranks.size)
        own = [every[row] for row in dealt[ranks.rank]]
    found = [function(row, state) for row, state in zip(dealt[ranks.rank], own)]
    given = {"found": torch.stack(found)} if found else {}
    return list(joined_rows(dealt, [each["found"] for each in ranks.gather(given) if each]))

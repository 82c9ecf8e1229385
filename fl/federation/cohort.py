"""The clients of a round: their classes, their states and objectives' inputs.

These are one stack if all have the same architecture and otherwise a list. Everything that has to know which of the two
it is lies here.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from fl.base.torch_private import tree_leaves, tree_map
from fl.data import Dataset
from fl.data.arrays import UNSCORED
from fl.engine import GroupResults
from fl.partition.split import Parts
from surgery import Stack, State, unstack
from surgery.transfer import upload

States: TypeAlias = Any
"""A stack [K, ...]; or a list of K states, where architectures differ."""


class Cohort(NamedTuple):
    """Some clients, with their models before or after training.

    Attributes:
        clients: their numbers in the population.
        models: the architecture of each; those that are the same object train together.
        states: a stack, or a list of states.
    """

    clients: Sequence[int]
    models: Sequence[nn.Module]
    states: States

    def select(self, rows: Sequence[int]) -> "Cohort":
        """Return some of its clients, by their positions in the cohort."""
        models = [self.models[k] for k in rows]
        return Cohort([self.clients[k] for k in rows], models, select(self.states, rows))


def stacks(states: States) -> list[Stack]:
    """View states as stacks: a stack as one, a list as a stack of one per client.

    >>> [each["w"].shape for each in stacks([{"w": torch.zeros(3)}, {"w": torch.zeros(2)}])]
    [torch.Size([1, 3]), torch.Size([1, 2])]
    """
    return [tree_map(lambda tensor: tensor[None], state) for state in states] if isinstance(states, list) else [states]


def as_before(states: States, changed: Sequence[Stack]) -> States:
    """Undo `stacks`: return what became of the stacks in the form of these states."""
    return [tree_map(lambda tensor: tensor[0], stack) for stack in changed] if isinstance(states, list) else changed[0]


def per_client(states: States) -> list[State]:
    """View states as a list with one state for each client."""
    return states if isinstance(states, list) else unstack(states)


def select(entries: Any, rows: Sequence[int], stacked: bool = False) -> Any:
    """Pick rows of states, or of an objective's input, in the same form.

    Consecutive rows of a stack are views.

    Args:
        rows: positions, such as clients' positions in a cohort.
        stacked: whether the result has a leading axis also where the entries are a list; they are then of one
            architecture.

    >>> select({"w": torch.tensor([[1.0], [2.0], [3.0]])}, [2, 0])["w"].flatten()
    tensor([3., 1.])
    """
    if isinstance(entries, list):
        chosen = [entries[k] for k in rows]
        return tree_map(lambda *each: torch.stack(each), *chosen) if stacked else chosen
    if rows and list(rows) == list(range(rows[0], rows[0] + len(rows))):
        return tree_map(lambda tensor: tensor[rows[0] : rows[0] + len(rows)], entries)
    index = {device: _index(rows, device) for device in {tensor.device for tensor in tree_leaves(entries)}}
    return tree_map(lambda tensor: tensor.index_select(0, index[tensor.device]), entries)


def replace_rows(states: States, rows: Sequence[int], new: States) -> States:
    """Replace the states of some clients in a copy.

    >>> replace_rows({"w": torch.zeros(3, 1)}, [1], {"w": torch.ones(1, 1)})["w"].flatten()
    tensor([0., 1., 0.])
    """
    if isinstance(states, list):
        replaced = dict(zip(rows, new))
        return [replaced.get(k, state) for k, state in enumerate(states)]
    index = _index(rows, next(iter(states.values())).device)
    return {name: tensor.index_copy(0, index, new[name]) for name, tensor in states.items()}


def with_entry(context: Any, name: str, values: Tensor) -> Any:
    """Add an entry to an objective's input for each client: values [K, ...]."""
    if isinstance(context, list):
        return [{**entries, name: value} for entries, value in zip(context, values)]
    return {**context, name: values}


def join_results(parts: Sequence[tuple[Sequence[int], GroupResults]], starts: States) -> tuple[States, Tensor]:
    """Join the results of a cohort that was trained in parts: states and losses [K].

    The states have the form of the starts.

    Args:
        parts: each part's rows and results; rows of a stack follow one another.
    """
    if not isinstance(starts, list):
        results = [part for _, part in parts]
        return tree_map(lambda *entries: torch.cat(entries), *results) if results[1:] else results[0]
    by_row = {k: pair for rows, part in parts for k, *pair in zip(rows, unstack(part.states), part.loss)}
    states, losses = zip(*(by_row[k] for k in range(len(by_row))))
    return list(states), torch.stack(losses)


def classes_held(data: Dataset, parts: Parts, clients: Sequence[int]) -> Tensor:
    """Return the classes of each client's training samples: bool [K, classes].

    The result is on the device. The classes of text are tokens. Of masks they are the classes of all pixels that count.

    Args:
        parts: the samples of every client of the population.

    >>> table, labels = torch.zeros(4, 1), [0, 2, 1, 2]
    >>> data = Dataset.from_arrays(table, labels, table, labels)
    >>> classes_held(data, [torch.tensor([0, 1]), torch.tensor([3])], [1, 0]).int()
    tensor([[0, 0, 1],
            [1, 0, 1]], dtype=torch.int32)
    """
    if data.y.is_floating_point():  # every client has numbers, or labels that are 0 or 1, for all outputs
        return torch.ones(len(clients), data.classes, dtype=torch.bool, device=data.device)
    table = torch.zeros(len(clients), data.classes, dtype=torch.bool, device=data.device)
    samples = [parts[client] for client in clients]
    rows = torch.arange(len(samples)).repeat_interleave(torch.tensor([len(part) for part in samples]))
    index, rows = data.beside(torch.cat(samples)), upload(rows, table.device)
    for values_at in (data.labels_at, data.samples_at) if data.text else (data.labels_at,):
        seen = values_at(index)
        if data.dense:
            seen = seen.flatten(1)
            seen = torch.where(seen == UNSCORED, seen.amax(1, keepdim=True), seen)
        elif data.unscored:
            seen = torch.where(seen == UNSCORED, data.samples_at(index), seen)  # whose tokens it has anyway
        places = rows.view(-1, *[1] * (seen.ndim - 1)).expand_as(seen), seen.long()
        table.index_put_(places, table.new_ones(()))
    return table


def _index(rows: Sequence[int], device: torch.device) -> Tensor:
    return upload(torch.tensor(rows, dtype=torch.int64), device)

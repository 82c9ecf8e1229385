"""The clients of a round and their states: one stack if all have the same architecture, otherwise a list of states.

Everything that has to know which of the two it is lies here. The objectives' inputs come in the same two forms.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from fl.base.torch_private import tree_leaves, tree_map
from fl.engine import Results
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
        """Some of its clients, by their positions in the cohort."""
        models = [self.models[k] for k in rows]
        return Cohort([self.clients[k] for k in rows], models, select(self.states, rows))


def stacks(states: States) -> list[Stack]:
    """The states as stacks, which are views: a stack is the only one; a list gives a stack of one for each client.

    >>> [each["w"].shape for each in stacks([{"w": torch.zeros(3)}, {"w": torch.zeros(2)}])]
    [torch.Size([1, 3]), torch.Size([1, 2])]
    """
    if not isinstance(states, list):
        return [states]
    return [{name: tensor[None] for name, tensor in state.items()} for state in states]


def as_before(states: States, changed: Sequence[Stack]) -> States:
    """The inverse of `stacks`: what became of the stacks of these states, in the form that the states have."""
    if not isinstance(states, list):
        return changed[0]
    return [{name: tensor[0] for name, tensor in stack.items()} for stack in changed]


def per_client(states: States) -> list[State]:
    """Each client's own state, as views."""
    return states if isinstance(states, list) else unstack(states)


def select(entries: Any, rows: Sequence[int]) -> Any:
    """The entries of some clients, in the same form: of states, or of an objective's input. Rows in a row give views.

    Args:
        rows: the clients' positions in the cohort.

    >>> select({"w": torch.tensor([[1.0], [2.0], [3.0]])}, [2, 0])["w"].flatten()
    tensor([3., 1.])
    """
    if isinstance(entries, list):
        return [entries[k] for k in rows]
    if rows and list(rows) == list(range(rows[0], rows[0] + len(rows))):
        return tree_map(lambda tensor: tensor[rows[0] : rows[0] + len(rows)], entries)
    index = {device: _index(rows, device) for device in {tensor.device for tensor in tree_leaves(entries)}}
    return tree_map(lambda tensor: tensor.index_select(0, index[tensor.device]), entries)


def select_stacked(entries: Any, rows: Sequence[int]) -> Any:
    """The same with a leading axis, whatever the form: the clients have the same architecture."""
    chosen = select(entries, rows)
    return tree_map(lambda *each: torch.stack(each), *chosen) if isinstance(chosen, list) else chosen


def replace_rows(states: States, rows: Sequence[int], new: States) -> States:
    """The states with those of some clients replaced; the given ones are unchanged.

    >>> replace_rows({"w": torch.zeros(3, 1)}, [1], {"w": torch.ones(1, 1)})["w"].flatten()
    tensor([0., 1., 0.])
    """
    if isinstance(states, list):
        replaced = dict(zip(rows, new))
        return [replaced.get(k, state) for k, state in enumerate(states)]
    index = _index(rows, next(iter(states.values())).device)
    return {name: tensor.index_copy(0, index, new[name]) for name, tensor in states.items()}


def add_to_rows(states: States, rows: Sequence[int], steps: States) -> States:
    """The states with steps added to those of some clients. Tensors without a step and the given ones are unchanged.

    >>> add_to_rows({"w": torch.zeros(3, 1)}, [1], {"w": torch.ones(1, 1)})["w"].flatten()
    tensor([0., 1., 0.])
    """
    if isinstance(states, list):
        moved = [{name: states[k][name] + step for name, step in some.items()} for k, some in zip(rows, steps)]
        return replace_rows(states, rows, [states[k] | some for k, some in zip(rows, moved)])
    index = _index(rows, next(iter(states.values())).device)
    return states | {name: states[name].index_add(0, index, step) for name, step in steps.items()}


def with_entry(context: Any, name: str, values: Tensor) -> Any:
    """An objective's input with one more entry for each client: values [K, ...]."""
    if isinstance(context, list):
        return [{**each, name: value} for each, value in zip(context, values)]
    return {**context, name: values}


def joined(parts: Sequence[tuple[Sequence[int], Results]], starts: States) -> tuple[States, Tensor]:
    """The states, in the form of the starts, and the losses [K] of a cohort that was trained in several parts.

    Args:
        parts: each part's rows and results; those of a stack follow one another.
    """
    if not isinstance(starts, list):
        results = [part for _, part in parts]
        return tree_map(lambda *each: torch.cat(each), *results) if results[1:] else results[0]
    each = {k: one for rows, part in parts for k, *one in zip(rows, unstack(part.states), part.loss)}
    states, losses = zip(*(each[k] for k in range(len(each))))
    return list(states), torch.stack(losses)


def _index(rows: Sequence[int], device: torch.device) -> Tensor:
    return upload(torch.tensor(rows, dtype=torch.int64), device)

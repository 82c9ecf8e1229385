"""A cohort's models where every rank has those that it trained, and what can be done with them without moving them all.

This is the only place that knows where rows lie. A method reads a `Spread` as the stack that it stands for, and what it
reads is gathered. `by_layer` does with less: all that treats each tensor on its own, such as an average of any kind,
happens where the tensor's rows meet.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fl.parallel import current, deal
from surgery import Stack
from surgery.errors import InternalError
from surgery.transfer import upload


class Spread(Mapping[str, Tensor]):
    """A stack of K models whose rows lie on ranks. All ranks read it at the same time, since they run the same program.

    Args:
        dealt: the rows that each rank has.
        mine: those of this rank, in the order of `dealt`; a stack of no models if it has none.
    """

    def __init__(self, dealt: Sequence[Sequence[int]], mine: Stack) -> None:
        self.dealt, self.mine = dealt, mine
        self.rows = list(dealt[current().rank])
        self._read: Stack = {}
        self._met: Stack | None = None

    def __iter__(self) -> Iterator[str]:
        return iter(self.mine)

    def __len__(self) -> int:
        return len(self.mine)

    def __contains__(self, name: object) -> bool:
        """Asked without gathering anything."""
        return name in self.mine

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._read:
            self._gather([name])
        return self._read[name]

    def values(self) -> Any:
        """All tensors, which are gathered together."""
        return self.whole().values()

    def items(self) -> Any:
        """Names and tensors, which are gathered together."""
        return self.whole().items()

    def whole(self) -> Stack:
        """The stack itself, on every rank."""
        self._gather([name for name in self.mine if name not in self._read])
        return {name: self._read[name] for name in self.mine}

    @property
    def is_whole(self) -> bool:
        """Whether all of it has been gathered."""
        return self._read.keys() == self.mine.keys()

    def met(self) -> Stack:
        """The rows of all ranks of the tensors that meet on this rank: each tensor meets on one, those of a layer
        together, and ranks have about as many bytes each.
        """
        if self._met is None:
            ranks, homes = current(), _homes(self.mine, current().size)
            mine = homes[ranks.rank]
            kinds = [[(self.mine[n].dtype, [len(rows), *self.mine[n].shape[1:]]) for n in mine] for rows in self.dealt]
            found = ranks.swap([[self.mine[name] for name in names] for names in homes], kinds)
            self._met = {name: self._joined([each[i] for each in found]) for i, name in enumerate(mine)}
        return self._met

    def select(self, rows: Sequence[int]) -> "Spread":
        """Some of its models, in that order."""
        if list(rows) == list(range(sum(map(len, self.dealt)))):
            return self
        new = {row: k for k, row in enumerate(rows)}
        if len(new) < len(rows):
            raise InternalError(f"rows {list(rows)} of models that lie on ranks are selected more than once")
        dealt = [[new[row] for row in mine if row in new] for mine in self.dealt]
        kept = [k for k, row in enumerate(self.rows) if row in new]
        result = Spread(dealt, _rows(self.mine, kept))
        result._read = _rows(self._read, rows)
        result._met = None if self._met is None else _rows(self._met, rows)
        return result

    def replaced(self, mine: Stack) -> "Spread":
        """The same with other models on some ranks: new on all of them, so that all know the same of it."""
        return Spread(self.dealt, mine)

    def _gather(self, names: Sequence[str]) -> None:
        if names:
            found = current().gather({name: self.mine[name] for name in names})
            self._read |= {name: self._joined([each[name] for each in found]) for name in names}

    def _joined(self, pieces: Sequence[Tensor]) -> Tensor:
        return joined_rows(self.dealt, pieces)


def joined_rows(dealt: Sequence[Sequence[int]], pieces: Sequence[Tensor]) -> Tensor:
    """[K, ...] from the rows that each rank has.

    >>> joined_rows([[2, 0], [1]], [torch.tensor([5, 6]), torch.tensor([7])])
    tensor([6, 7, 5])
    """
    rows = upload(torch.tensor([row for rows in dealt for row in rows]), pieces[0].device)
    return torch.cat(list(pieces)).index_select(0, rows.argsort())


def whole(models: Stack) -> Stack:
    """A stack that is all here, whether it was spread over ranks or not.

    >>> whole({"w": torch.ones(1, 1)})
    {'w': tensor([[1.]])}
    """
    return models.whole() if isinstance(models, Spread) else models


def by_layer(models: Stack, function: Callable[[Stack], Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """What a function makes of a stack, if it treats every tensor on its own and names its results as the tensors that
    they come from.

    Of a stack that is spread over ranks, each computes the function of the tensors that meet on it, from the same rows
    in the same order as one process would: the result has the same bits. What moves is each model once, in pieces, and
    the results.

    >>> by_layer({"w": torch.tensor([[1.0], [3.0]])}, lambda part: {name: t.sum(0) for name, t in part.items()})
    {'w': tensor([4.])}
    """
    if not isinstance(models, Spread) or models.is_whole:
        return dict(function(whole(models)))
    met = models.met()
    found: dict[str, Tensor] = {}
    for each in current().gather(function(met) if met else {}):
        found |= each
    return {name: found[name].clone() for name in models if name in found}  # not parts of one large buffer


def _homes(models: Stack, ranks: int) -> list[list[str]]:
    """The names of the tensors that meet on each rank."""
    layers: dict[str, list[str]] = {}
    for name in models:
        layers.setdefault(name.rpartition(".")[0], []).append(name)
    sizes = [sum(math.prod(models[n].shape[1:]) * models[n].itemsize for n in layer) for layer in layers.values()]
    names = list(layers.values())
    return [[name for layer in mine for name in names[layer]] for mine in deal(sizes, ranks)]


def _rows(stack: Stack, rows: Sequence[int]) -> Stack:
    return {name: tensor[list(rows)] for name, tensor in stack.items()}

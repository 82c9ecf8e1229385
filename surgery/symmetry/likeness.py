"""Compare the positions of two models' widths by weights, or by what layers read."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from surgery.states import State, as_real, compute_dtype
from surgery.width.plan import place, repeat
from surgery.width.replay import read_batch
from surgery.width.solve import Atom, Axes, Axis, Choice, Product, Solution, Sum, atoms, occurrences

_MOST = 4096  # samples of a batch and layer whose activations are compared
_JOINT = 4096  # positions of several axes of one tensor that are compared like one axis


class WeightLikeness:
    """The likeness of two models' parameters: their inner product.

    Gains are in the parameters' precision, single at least, and values in float64.

    Args:
        places: by state name of a parameter its axes.
        reference, other: the models' states.
    """

    def __init__(self, places: Mapping[str, Axes], reference: State, other: State):
        self.places, self.beside = places, _beside(places.values())
        self.a = {name: as_real(reference[name].detach()) for name in places}
        self.b = {name: as_real(other[name].detach()) for name in places}
        self._gains: dict[Atom, tuple[Tensor, dict[Atom, Sequence[int]]]] = {}
        self.along: dict[Atom, list[tuple[str, int]]] = {}
        for name, axes in places.items():
            for dim, axis in enumerate(axes):
                for atom in dict.fromkeys(atoms(axis)):
                    self.along.setdefault(atom, []).append((name, dim))

    def first(self, atom: Atom) -> Tensor:
        def in_order(rows: Tensor) -> Tensor:
            return torch.from_numpy(np.sort(rows.numpy()))  # several times as fast as torch's, which is stable

        return self._sum(atom, self.b.__getitem__, in_order)

    def gain(self, atom: Atom, choice: Choice) -> Tensor:
        if atom in self.beside[atom]:
            return self._sum(atom, partial(self._reorder, choice=choice), lambda rows: rows)
        others = {other: choice[other] for other in self.beside[atom] if other in choice}
        if atom not in self._gains:
            ordered = partial(self._reorder, choice=others)
            self._gains[atom] = self._sum(atom, ordered, lambda rows: rows), others
        else:
            self._gains[atom] = self._update_gain(atom, *self._gains[atom], others), others
        return self._gains[atom][0].index_select(1, torch.tensor(choice[atom]))

    def value(self, choice: Choice, atom: Atom | None = None) -> float:
        names = self.places if atom is None else dict.fromkeys(name for name, _ in self.along[atom])
        return sum((self.a[name].double() * self._reorder(name, choice).double()).sum().item() for name in names)

    def _sum(self, atom: Atom, other: Callable[[str], Tensor], view: Callable[[Tensor], Tensor]) -> Tensor:
        dtypes = [_at_least_single(self.a[name][:0]).dtype for name, _ in self.along[atom]]
        result = torch.zeros(atom.size, atom.size, dtype=max(dtypes, key=lambda dtype: dtype.itemsize))
        pairs: list[tuple[Tensor, Tensor]] = []
        for name, dim in self.along[atom]:
            axis = self.places[name][dim]
            left, right = (view(_at_least_single(_rows(t, dim, axis, atom)).cpu()) for t in (self.a[name], other(name)))
            pairs.append((left, right))
        _add_products(result, pairs)
        return result

    def _update_gain(self, atom: Atom, gain: Tensor, before: Choice, after: Choice) -> Tensor:
        """Return the gain in another order of some widths, updated where they moved."""
        pairs: list[tuple[Tensor, Tensor]] = []
        for name, dim in self.along[atom]:
            axes, a, b = self.places[name], self.a[name], self.b[name]
            both = [[place(axis, choice).to(a.device) for axis in axes] for choice in (before, after)]
            moved = [other for other, (old, new) in enumerate(zip(*both)) if not torch.equal(old, new)]
            if not moved:
                continue
            if len(moved) == 1 and moved[0] != dim:  # of the other axis only the positions that have moved
                (other,) = moved
                old, new = both[0][other], both[1][other]
                where = (old != new).nonzero().flatten()
                a, old, new = (t.index_select(other, at) for t, at in ((a, where), (b, old[where]), (b, new[where])))
                for d, at in enumerate(both[0]):
                    if d != other and axes[d] is not atom:
                        old, new = old.index_select(d, at), new.index_select(d, at)
            else:
                old, new = self._reorder(name, before), self._reorder(name, after)
            difference = _at_least_single(new) - _at_least_single(old)
            left, right = (_rows(tensor, dim, axes[dim], atom).cpu() for tensor in (_at_least_single(a), difference))
            pairs.append((left, right))
        _add_products(gain, pairs)
        return gain

    def _reorder(self, name: str, choice: Choice) -> Tensor:
        """Return a tensor of the other model in the present order of all widths."""
        return repeat(self.b[name], self.places[name], choice)


def _add_products(result: Tensor, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Add the products of pairs of matrices, the second transposed.

    Narrow pairs are joined, since each product runs over the whole result.
    """
    narrow = []
    for left, right in pairs:
        if left.shape[1] < len(result):
            narrow.append((left, right))
        else:
            result.addmm_(left.to(result), right.T.to(result))
    if narrow:
        left, right = (torch.cat(rows, 1).to(result) for rows in zip(*narrow))
        result.addmm_(left, right.T)


def _at_least_single(tensor: Tensor) -> Tensor:
    return tensor.to(compute_dtype(tensor.dtype))


def _rows(tensor: Tensor, dim: int, axis: Axis, atom: Atom) -> Tensor:
    """[size, elements]: what lies at each position of an atom."""
    if axis is atom:
        return tensor.movedim(dim, 0).reshape(atom.size, -1)
    where = occurrences(axis, atom)
    rows = tensor.index_select(dim, where.flatten().to(tensor.device)).movedim(dim, 0)
    return rows.reshape(*where.shape, -1).transpose(0, 1).reshape(atom.size, -1)


class Activations:
    """The likeness of what two models' layers read: the correlation over samples.

    Positions and batches count as samples. Li et al., "Convergent Learning" (2016). Each axis that layers read has one
    matrix, the sum over all that read it.
    """

    def __init__(
        self, solution: Solution, models: tuple[nn.Module, nn.Module], batches: Sequence[Any], free: set[Atom]
    ):
        moments: dict[tuple[int, int], list[Tensor]] = {}
        self.axes: dict[tuple[int, int], Axis] = {}
        self._joints: dict[Axes, Axis] = {}
        for number, batch in enumerate(batches):
            seen = [self._read(solution, model, batch, free, number) for model in models]
            for key, first in seen[0].items():
                second = seen[1][key]
                new = [first @ second.T, first.sum(1), second.sum(1), first.square().sum(1), second.square().sum(1)]
                new.append(torch.tensor(float(first.shape[1]), dtype=torch.float64))
                moments[key] = [a + b for a, b in zip(moments[key], new)] if key in moments else new
        together: dict[Axis, Tensor] = {}
        for key, (cross, first, second, first_squares, second_squares, n) in moments.items():
            spread = [
                (square / n - (total / n) ** 2).clamp(min=0).sqrt()
                for square, total in ((first_squares, first), (second_squares, second))
            ]
            covariance = cross / n - torch.outer(first / n, second / n)
            scale = torch.outer(*spread)
            correlation = torch.where(scale > 1e-12, covariance / scale.clamp(min=1e-12), 0)
            together[self.axes[key]] = together.get(self.axes[key], 0) + correlation
        self.of, self.beside = together, _beside((axis,) for axis in together)
        self.along: dict[Atom, list[Axis]] = {}
        for axis in together:
            for atom in dict.fromkeys(atoms(axis)):
                self.along.setdefault(atom, []).append(axis)

    def first(self, atom: Atom) -> Tensor:
        result = torch.zeros(atom.size, atom.size, dtype=torch.float64)
        for axis in self.along.get(atom, ()):
            where = occurrences(axis, atom)
            blocks = self.of[axis][where.flatten()][:, where.flatten()].view(len(where), atom.size, -1, atom.size)
            result += blocks.amax(2).sum(0)
        return result

    def gain(self, atom: Atom, choice: Choice) -> Tensor:
        result = torch.zeros(atom.size, atom.size, dtype=torch.float64)
        for axis in self.along.get(atom, ()):
            present = self.of[axis][:, place(axis, choice)]
            for places in occurrences(axis, atom):
                result += present[places][:, places]
        return result

    def value(self, choice: Choice, atom: Atom | None = None) -> float:
        axes = self.of if atom is None else self.along.get(atom, ())
        return sum(self.of[axis][range(axis.size), place(axis, choice)].sum().item() for axis in axes)

    def _read(self, solution, model, batch, free, number) -> dict[tuple[int, int], Tensor]:
        """Return what products and convolutions read along widths: [positions, samples]."""
        reads: dict[tuple[int, int], Tensor] = {}

        def keep(place: tuple[int, int], tensor: Tensor, axes: Axes) -> None:
            dims = [dim for dim, axis in enumerate(axes) if free & set(atoms(axis))]
            if not dims or any(tensor.shape[dim] != axes[dim].size for dim in dims):
                return  # samples would lie along heads, which the other model has in another order
            axis = self._joint(tuple(axes[dim] for dim in dims))
            if len(dims) > 1 and axis.size > _JOINT:
                return
            rows = as_real(tensor.detach()).movedim(dims, [*range(len(dims))]).reshape(axis.size, -1)
            rows = rows[:, :: max(1, rows.shape[1] // _MOST)]
            reads[place] = rows.double().cpu()
            self.axes[place] = axis

        read_batch(model, batch, solution, keep, where=f"batches[{number}]", by="activations")
        return reads

    def _joint(self, axes: Axes) -> Axis:
        """Return one axis for some: always the same one for the same axes."""
        if len(axes) == 1:
            return axes[0]
        digits = [part for axis in axes for part in (axis.parts if isinstance(axis, Product) else (axis,))]
        return self._joints.setdefault(axes, Product(tuple(digits)))


def _beside(places: Iterable[Axes]) -> dict[Atom, set[Atom]]:
    """Return by atom the atoms that share a tensor with it.

    It is one of them if it lies along a tensor more than once.
    """
    neighbours: dict[Atom, set[Atom]] = {}
    for axes in places:
        along = dict.fromkeys(atom for axis in axes for atom in atoms(axis))
        for atom in along:
            again = sum(_degree(axis, atom) for axis in axes) > 1
            neighbours.setdefault(atom, set()).update(other for other in along if other is not atom or again)
    return neighbours


def _degree(axis: Axis, atom: Atom) -> int:
    """Return how many of a position's digits an atom is."""
    if isinstance(axis, Atom):
        return axis is atom
    return (max if isinstance(axis, Sum) else sum)(_degree(part, atom) for part in axis.parts)

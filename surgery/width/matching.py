"""How alike two models' widths are, by weights and by activations, and the search for the order that fits best."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from surgery.errors import SurgeryError, first_line
from surgery.forward import call, copied, in_mode, tensors_in, watching
from surgery.states import State
from surgery.torch_private import TorchDispatchMode
from surgery.width.rules.registry import operation_name, rule_for
from surgery.width.scores import occurrences
from surgery.width.solved import SUMS, Atom, Axes, Axis, Choice, Solution, atoms, positions

_MOST = 4096  # samples of a batch and layer whose activations are compared
_PASSES = 100


class Likeness(Protocol):
    """What two models have in common, position by position."""

    def first(self, atom: Atom) -> Tensor:
        """[size, size]: how alike positions are, whatever the order along all other widths."""

    def gain(self, atom: Atom, choice: Choice) -> Tensor:
        """[size, size]: how alike positions of the reference and of the other model in its present order are."""

    def value(self, atom: Atom, choice: Choice) -> float:
        """How well all fits that lies along a width."""


def best_choice(likeness: Likeness, free: Sequence[Atom]) -> dict[Atom, list[int]]:
    """The orders of the other model's widths in which it fits the reference best, by coordinate ascent.

    Ainsworth et al., "Git Re-Basin" (ICLR 2023), algorithm 1: all widths but one are held, and the best order of that
    one is a linear assignment. A step is taken only if the fit improves, so that it ends. It starts from the order as
    it is, and from an assignment by what does not depend on the order of other widths (of the heads by all that is in
    them, say), which finds a permuted copy at once; the better end counts.
    """
    ends = []
    for start in (
        {atom: assignment(likeness.first(atom)) for atom in free},
        {atom: list(range(atom.size)) for atom in free},
    ):
        choice = dict(start)
        for _ in range(_PASSES):
            better = False
            for atom in free:
                order = assignment(likeness.gain(atom, choice))
                if order == list(range(atom.size)):
                    continue
                trial = {**choice, atom: [choice[atom][place] for place in order]}
                before, after = likeness.value(atom, choice), likeness.value(atom, trial)
                if after > before + 1e-9 * abs(before):
                    choice, better = trial, True
            if not better:
                break
        ends.append((sum(likeness.value(atom, choice) for atom in free), choice))
    (first, choice), (second, other) = ends
    return other if second >= first * (1 - 1e-12) else choice


def assignment(gain: Tensor) -> list[int]:
    """For each row another column, so that the sum of the chosen entries is as large as it can be.

    >>> assignment(torch.tensor([[1.0, 5.0], [4.0, 6.0]]))
    [1, 0]
    """
    from scipy.optimize import linear_sum_assignment  # takes a second to import

    return linear_sum_assignment(gain.double().cpu().numpy(), maximize=True)[1].tolist()


class Weights:
    """The likeness of two models' parameters: the inner product of those of the one and of the other, in float64.

    Args:
        places: by state name of a parameter its axes.
        reference, other: the models' states.
    """

    def __init__(self, places: Mapping[str, Axes], reference: State, other: State):
        self.places = places
        self.a = {name: reference[name].detach().double() for name in places}
        self.b = {name: other[name].detach().double() for name in places}
        self.along: dict[Atom, list[tuple[str, int]]] = {}
        for name, axes in places.items():
            for dim, axis in enumerate(axes):
                for atom in dict.fromkeys(atoms(axis)):
                    self.along.setdefault(atom, []).append((name, dim))

    def first(self, atom: Atom) -> Tensor:
        return self._summed(atom, self.b, lambda rows: rows.sort(1).values)

    def gain(self, atom: Atom, choice: Choice) -> Tensor:
        return self._summed(atom, self._ordered(atom, choice), lambda rows: rows)

    def value(self, atom: Atom, choice: Choice) -> float:
        ordered = self._ordered(atom, choice)
        return sum((self.a[name] * tensor).sum().item() for name, tensor in ordered.items())

    def _summed(self, atom: Atom, other: Mapping[str, Tensor], view: Any) -> Tensor:
        result = torch.zeros(atom.size, atom.size, dtype=torch.float64)
        for name, dim in self.along[atom]:
            where = occurrences(self.places[name][dim], atom)
            one, two = (view(_rows(of[name], dim, where)) for of in (self.a, other))
            result += (one @ two.T).cpu()
        return result

    def _ordered(self, atom: Atom, choice: Choice) -> dict[str, Tensor]:
        """What lies along a width, in the present order of all widths."""
        names = dict.fromkeys(name for name, _ in self.along[atom])
        return {name: ordered(self.b[name], self.places[name], choice) for name in names}


def ordered(tensor: Tensor, axes: Axes, choice: Choice) -> Tensor:
    """The tensor with its positions in the order that a choice says."""
    for dim, axis in enumerate(axes):
        if any(atom in choice for atom in atoms(axis)):
            tensor = tensor.index_select(dim, torch.tensor(positions(axis, choice), device=tensor.device))
    return tensor


def _rows(tensor: Tensor, dim: int, where: Tensor) -> Tensor:
    """[size, elements]: what lies at each position of an atom, of which `occurrences` says where it is."""
    found = tensor.index_select(dim, where.flatten().to(tensor.device)).movedim(dim, 0)
    return found.reshape(*where.shape, -1).transpose(0, 1).reshape(where.shape[1], -1)


class Activations:
    """The likeness of what two models' layers read: the correlation over samples, positions and batches.

    Li et al., "Convergent Learning" (2016). Each axis that layers read has one matrix, the sum over all that read it.
    """

    def __init__(
        self, solution: Solution, models: tuple[nn.Module, nn.Module], batches: Sequence[Any], free: set[Atom]
    ):
        moments: dict[tuple[int, int, int], list[Tensor]] = {}
        self.axes: dict[tuple[int, int, int], Axis] = {}
        for number, batch in enumerate(batches):
            seen = [self._read(solution, model, batch, free, number) for model in models]
            for key, one in seen[0].items():
                two = seen[1][key]
                new = [one @ two.T, one.sum(1), two.sum(1), one.square().sum(1), two.square().sum(1)]
                new.append(torch.tensor(float(one.shape[1]), dtype=torch.float64))
                moments[key] = [a + b for a, b in zip(moments.get(key, [0] * 6), new)]
        together: dict[Axis, Tensor] = {}
        for key, (cross, one, two, ones, twos, n) in moments.items():
            spread = [
                (square / n - (total / n) ** 2).clamp(min=0).sqrt() for square, total in ((ones, one), (twos, two))
            ]
            covariance = cross / n - torch.outer(one / n, two / n)
            scale = torch.outer(*spread)
            correlation = torch.where(scale > 1e-12, covariance / scale.clamp(min=1e-12), 0)
            together[self.axes[key]] = together.get(self.axes[key], 0) + correlation
        self.of = together
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
            present = self.of[axis][:, positions(axis, choice)]
            for places in occurrences(axis, atom):
                result += present[places][:, places]
        return result

    def value(self, atom: Atom, choice: Choice) -> float:
        axes = self.along.get(atom, ())
        return sum(self.of[axis][range(axis.size), positions(axis, choice)].sum().item() for axis in axes)

    def _read(self, solution, model, batch, free, number) -> dict[tuple[int, int, int], Tensor]:
        reads = _Reads(solution, free, self.axes)
        try:
            with in_mode(model, training=False), watching(model), reads:
                call(model, copied(batch))
        except SurgeryError:
            raise
        except Exception as error:
            raise SurgeryError(
                f"{type(model).__name__} does not run on batches[{number}]: {first_line(error)}; by='activations' "
                "takes batches of inputs, without labels"
            ) from error
        return reads.found


class _Reads(TorchDispatchMode):
    """Keeps what matrix products and convolutions read along free widths, as [positions, samples]."""

    def __init__(self, solution: Solution, free: set[Atom], axes: dict[tuple[int, int, int], Axis]):
        super().__init__()
        self.solution, self.free, self.axes, self.done = solution, free, axes, 0
        self.found: dict[tuple[int, int, int], Tensor] = {}
        self.held: list[bool] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = tensors_in((args, kwargs or {}))
        if not ((rule := rule_for(func)) and rule.layout):
            name, steps, here = operation_name(func), self.solution.steps, self.done
            if here >= len(steps) or steps[here].name != name:
                raise SurgeryError(f"the model computes something else on a batch than on the example: {name}")
            for which, (tensor, axes) in enumerate(zip(given, steps[here].inputs) if name in SUMS else ()):
                if not self._is_held(steps[here].sources[which]):
                    self._keep((here, which), tensor, axes)
            self.held.append(bool(given) and all(map(self._is_held, steps[here].sources)))
            self.done += 1
        return func(*args, **(kwargs or {}))

    def _is_held(self, source: Any) -> bool:
        return source is not None and (isinstance(source[0], str) or self.held[source[0]])

    def _keep(self, place: tuple[int, int], tensor: Tensor, axes: Axes) -> None:
        for dim, axis in enumerate(axes):
            if tensor.shape[dim] == axis.size and self.free & set(atoms(axis)):
                rows = tensor.detach().movedim(dim, 0).reshape(axis.size, -1)
                rows = rows[:, :: max(1, rows.shape[1] // _MOST)]
                self.found[(*place, dim)] = rows.double().cpu()
                self.axes[(*place, dim)] = axis

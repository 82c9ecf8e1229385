"""Models of one architecture brought into one order: permutations by which their widths match."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, get_args

import numpy as np
import torch
from torch import Tensor, nn

from surgery.copying import clone
from surgery.errors import SurgeryError
from surgery.forward import named_tensors
from surgery.names import joined
from surgery.plan import Submodel
from surgery.states import State, as_state, check_same, load, names_by_id, state
from surgery.width.permute import solved_for
from surgery.width.plan import placed, plan_of, repeated
from surgery.width.replay import read_batch
from surgery.width.rotate import Rotatable, check_same_outputs, folded, procrustes, rotatable, rotated
from surgery.width.solve import Atom, Axes, Axis, Choice, Solution, Sum, atoms, named_widths, occurrences, solve
from surgery.width.trace import one_by_one, traced_in_place

By = Literal["weights", "activations"]
Maps = Literal["permutations", "orthogonal"]
Progress: TypeAlias = Callable[[int, int], None]
"""Told how many widths have their best order for the present, and of how many."""


class Search(NamedTuple):
    """How the best match is looked for: the last three arguments of `align`."""

    starts: int = 1
    generator: torch.Generator | None = None
    progress: Progress | None = None


_ONCE = Search()


class _Ordered(NamedTuple):
    models: list[nn.Module]
    permutations: list[dict[str, Tensor]]


class Aligned(_Ordered):
    """Models in one order, a pair of models and permutations.

    Attributes:
        models: each computes what it did.
        permutations: by which each was permuted, as `surgery.permute` takes them; they are empty for the reference.
        rotations: the orthogonal matrices of the other widths, as `surgery.width.rotate.rotate` takes them; they are
            empty for the reference, and without maps="orthogonal".
        only_permuted: by width why it was not rotated; empty without maps="orthogonal".
    """

    rotations: list[dict[str, Tensor]]
    only_permuted: dict[str, str]


def align(
    models: Sequence[nn.Module],
    *,
    example: Any,
    to: int = 0,
    by: By = "weights",
    batches: Iterable[Any] = (),
    maps: Maps = "permutations",
    output: Callable[[Any], Any] | None = None,
    starts: int = 1,
    generator: torch.Generator | None = None,
    progress: Progress | None = None,
) -> Aligned:
    """Permute the hidden widths of models of one architecture so that they match those of one of them.

    Networks that were trained apart have alike features in another order. After that they can be averaged and
    recombined with less loss. What may be permuted is found by one forward pass, for any module: residual streams,
    heads of an attention as wholes and the positions within them, groups of convolutions likewise.

    Args:
        models: modules of one architecture; they are not changed.
        example: an input, as for `surgery.narrow`.
        to: the number of the reference, which stays.
        by: `weights` maximises the inner product of all parameters (Ainsworth et al., "Git Re-Basin", ICLR 2023,
            section 3.2), `activations` the correlation of what layers read (section 3.1; Li et al., 2016).
        batches: inputs like the example, for `activations`.
        maps: `orthogonal` rotates residual streams instead of permuting them, by weights only, where all that touches
            them is linear but for RMS and layer norms (Theus et al., "Generalized Linear Mode Connectivity for
            Transformers", 2025). Weights of these norms are folded into what reads them, those of the reference too,
            so that it has other weights and computes what it did. Other widths are permuted as ever.
        output: as for `surgery.narrow`.
        starts: the first looks for the best match from the order as it is, and from one that does not depend on it;
            each further one from a drawn order. The best match counts.
        generator: of the drawn orders, on the CPU; by default they are the same in every call.
        progress: told how many widths have their best order for the present, and of how many.

    Returns:
        The models in the reference's order, and the permutations.

    Raises:
        SurgeryError: for models of different architectures, for `activations` without batches or with orthogonal maps,
            for a norm whose weight cannot be folded since it is 0 where its bias is not, and for no start.

    >>> net, x = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1)), torch.zeros(1, 2)
    >>> from surgery import permute
    >>> copy, _ = permute(net, {"0.weight:0": torch.randperm(8)}, example=x)
    >>> models, permutations = align([net, copy], example=x)
    >>> torch.equal(models[1][0].weight, net[0].weight)
    True
    """
    models = list(models) if isinstance(models, list | tuple) else []
    if not models or not all(isinstance(model, nn.Module) for model in models):
        raise SurgeryError("align takes a list of models of one architecture")
    if isinstance(to, bool) or not isinstance(to, int) or not 0 <= to < len(models):
        raise SurgeryError(f"to is the number of one of {len(models)} models, from 0 on, got {to!r}")
    if by not in get_args(By):
        raise SurgeryError(f"unknown by={by!r}: choose {' or '.join(get_args(By))}")
    if maps not in get_args(Maps):
        raise SurgeryError(f"unknown maps={maps!r}: choose {' or '.join(get_args(Maps))}")
    if maps == "orthogonal" and by != "weights":
        raise SurgeryError("orthogonal maps are found by weights: give by='weights', or maps='permutations'")
    aligner, given = Aligner(models[to], example=example, output=output), list(batches)
    search = Search(starts, generator or torch.Generator().manual_seed(0), progress)
    if maps == "orthogonal":
        return aligner.orthogonally(models, to, search)
    found: list[dict[str, Tensor]] = []
    for number, model in enumerate(models):
        if number == to:
            found.append({})
        elif by == "weights":
            found.append(aligner.by_weights(models[to], model, search))
        else:
            found.append(aligner.by_activations(models[to], model, given, search))
    return _aligned([aligner.plan(orders).build(model) for orders, model in zip(found, models)], found)


def _aligned(models, permutations, rotations=(), only_permuted=MappingProxyType({})) -> Aligned:
    result = Aligned(models, permutations)
    result.rotations, result.only_permuted = list(rotations) or [{} for _ in models], dict(only_permuted)
    return result


class Aligner:
    """What may be permuted in models of one architecture, found once; `align` for states, as federated clients' are.

    Args:
        model, example, output: as for `align`; the model's weights do not matter.

    >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    >>> aligner = Aligner(net, example=torch.zeros(1, 2))
    >>> orders = aligner.by_weights(state(net), state(net))
    >>> orders, torch.equal(aligner.plan(orders).extract(state(net))["0.bias"], net[0].bias)
    ({'0.weight:0': tensor([0, 1, 2])}, True)
    """

    def __init__(self, model: nn.Module, *, example: Any, output: Callable[[Any], Any] | None = None):
        self._model, self._solution = solved_for(model, example, output, "align")
        self._shapes, self._example, self._output = state(model), example, output
        self._free = {name: a for name, a in named_widths(self._solution).items() if not a.order}

    def by_weights(
        self,
        reference: State | nn.Module,
        other: State | nn.Module,
        search: Search = _ONCE,
        without: Collection[str] = (),
    ) -> dict[str, Tensor]:
        """The permutations of the other model's widths with which its parameters match the reference's best.

        Args:
            without: widths that stay as they are.
        """
        reference, other = self._checked(reference, "the reference"), self._checked(other, "the other model")
        held = names_by_id(self._model)
        places = {}
        for key, tensor in named_tensors(self._model):
            if id(tensor) in held and isinstance(tensor, nn.Parameter):
                places.setdefault(held[id(tensor)], self._solution.tensors[key])
        free = {a: name for name, a in self._free.items() if name not in without}
        places = {n: axes for n, axes in places.items() if any(a in free for axis in axes for a in atoms(axis))}
        likeness = Weights(places, reference, other)
        return self._named(best_choice(likeness, [a for a in free if a in likeness.along], search), free)

    def by_activations(
        self, reference: nn.Module, other: nn.Module, batches: Sequence[Any], search: Search = _ONCE
    ) -> dict[str, Tensor]:
        """The permutations of the other model's widths with which what its layers read matches best."""
        self._checked(reference, "the reference"), self._checked(other, "the other model")
        if not batches:
            raise SurgeryError("by='activations' needs `batches`, at least one batch of inputs")
        one, two = clone(reference), clone(other)
        with one_by_one():
            solution = solve(traced_in_place(reference, self._example, self._output))
            free = self._in(solution)
            likeness = Activations(solution, (one, two), batches, set(free))
        return self._named(best_choice(likeness, [a for a in free if a in likeness.along], search), free)

    def orthogonally(self, models: Sequence[nn.Module], to: int, search: Search) -> Aligned:
        """The models with widths rotated where they may be, and permuted elsewhere; see `align`."""
        states = [self._checked(model, f"model {number}") for number, model in enumerate(models)]
        widths, why = rotatable(self._model, self._solution, states)
        states = [folded(values, widths) for values in states]
        result, orders, matrices = [], [], []
        for number, (model, values) in enumerate(zip(models, states)):
            found: tuple[dict[str, Tensor], dict[str, Tensor]] = {}, {}
            if number != to:
                found = self._by_maps(states[to], values, widths, search)
                check_same_outputs(model, widths, found[1], self._example, self._output)
                values = rotated(values, widths, found[1])
            result.append(self.plan(found[0]).build(load(clone(model), values)))
            orders.append(found[0])
            matrices.append(found[1])
        return _aligned(result, orders, matrices, {name: why[name] for name in self._free if name not in widths})

    def _by_maps(
        self, reference: State, other: State, widths: Mapping[str, Rotatable], search: Search
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Permutations and rotations of a folded state, in turn the one with the other held, until neither helps.

        It starts from no rotation, and from the best one by the tensors along which no other free width lies, as
        embeddings and biases, which finds a rotated and permuted copy at once. The better end counts.
        """
        free = {atom: name for name, atom in self._free.items()}
        along: dict[str, set[str]] = {}
        for name, atom in self._free.items():
            for key, _ in self._solution.members[atom]:
                along.setdefault(joined(*key), set()).add(name)
        best: tuple[dict[str, Tensor], dict[str, Tensor]] = {}, {}
        most = -math.inf
        for anchored in (False, True) if widths else (False,):
            present = {name: torch.eye(width.size, dtype=torch.float64) for name, width in widths.items()}
            if anchored:
                for name, width in widths.items():
                    fixed = [tensor for tensor in width.turned if along.get(tensor) == {name}]
                    present[name] = procrustes(reference, other, width, present[name], fixed)
            orders = {name: torch.arange(a.size) for a, name in free.items() if name not in widths}
            value = -math.inf
            for _ in range(_PASSES):
                ordered = self.plan(orders).extract(other)
                found = self.by_weights(reference, rotated(ordered, widths, present), search, widths)
                orders |= {name: orders[name][order] for name, order in found.items()}
                ordered = self.plan(orders).extract(other)
                for name, width in widths.items():
                    others = {n: w for n, w in widths.items() if n != name}
                    seen = rotated(ordered, others, present)
                    present[name] = procrustes(reference, seen, width, present[name], width.turned)
                before, value = value, _inner(reference, rotated(ordered, widths, present))
                if not widths or value <= before + 1e-9 * abs(before):
                    break
            if value > most:
                best, most = (orders, present), value
        return best

    def plan(self, permutations: Mapping[str, Sequence[int] | Tensor]) -> Submodel:
        """The plan that permutes a state or a model: `plan.extract(state)`, `plan.build(model)`."""
        choice = {self._free[name]: torch.as_tensor(order).tolist() for name, order in permutations.items()}
        return plan_of(self._model, self._shapes, self._solution, choice)

    def _in(self, solution: Solution) -> dict[Atom, str]:
        """The free widths of another trace of the model, which has the same names."""
        names = named_widths(solution)
        return {names[name]: name for name in self._free if name in names and not names[name].order}

    def _checked(self, given: State | nn.Module, what: str) -> State:
        values = as_state(given, what)
        check_same(
            {name: tensor.to("meta") for name, tensor in self._shapes.items()},
            {name: tensor.to("meta") for name, tensor in values.items()},
            "the model that was traced",
            what,
        )
        if any(tensor.is_meta for tensor in values.values()):
            raise SurgeryError(f"{what} has no weights to compare (meta device): load some first")
        if odd := [n for n, t in values.items() if t.is_floating_point() and not t.isfinite().all()]:
            raise SurgeryError(f"{odd[0]!r} of {what} is not finite: there is no order in which it matches")
        return dict(values)

    @staticmethod
    def _named(choice: Mapping[Atom, list[int]], names: Mapping[Atom, str]) -> dict[str, Tensor]:
        return {names[atom]: torch.tensor(order) for atom, order in choice.items()}


def _inner(one: State, other: State) -> float:
    return sum((one[n].double() * other[n].double()).sum().item() for n in one if one[n].is_floating_point())


_MOST = 4096  # samples of a batch and layer whose activations are compared
_PASSES = 100
_FEW = 64  # columns: matrices of fewer are multiplied together


class Likeness(Protocol):
    """What two models have in common, position by position.

    Attributes:
        beside: by width those on whose order `gain` depends; the width itself is one where it is not linear in it.
    """

    beside: dict[Atom, set[Atom]]

    def first(self, atom: Atom) -> Tensor:
        """[size, size]: how alike positions are, whatever the order along all other widths."""

    def gain(self, atom: Atom, choice: Choice) -> Tensor:
        """[size, size]: how alike positions of the reference and of the other model in its present order are."""

    def value(self, choice: Choice, atom: Atom | None = None) -> float:
        """How well all fits, or all that lies along a width."""


def best_choice(likeness: Likeness, free: Sequence[Atom], search: Search) -> dict[Atom, list[int]]:
    """The orders of the other model's widths in which it fits the reference best, by coordinate ascent.

    It starts from the order as it is, and from an assignment by what does not depend on the order of other widths (of
    the heads by all that is in them, say), which finds a permuted copy at once. Each start beyond the first one adds a
    drawn order. The best end counts.
    """
    starts = search.starts
    if isinstance(starts, bool) or not isinstance(starts, int) or starts < 1:
        raise SurgeryError(f"starts is a number of searches, 1 or more, got {starts!r}")

    def drawn(atom: Atom) -> list[int]:
        return torch.randperm(atom.size, generator=search.generator).tolist()

    begins = [
        lambda atom: list(range(atom.size)),
        lambda atom: assignment(likeness.first(atom)),
        *[drawn] * (starts - 1),
    ]
    best, most = {}, -math.inf
    for begin in begins:
        choice = _climbed(likeness, free, {atom: begin(atom) for atom in free}, search.progress)
        value = likeness.value(choice)
        if not best or value > most + 1e-12 * abs(most):
            best, most = choice, value
    return best


def _climbed(
    likeness: Likeness, free: Sequence[Atom], start: dict[Atom, list[int]], progress: Progress | None
) -> dict[Atom, list[int]]:
    """The orders that no change of a single width's makes better, from a start on.

    Ainsworth et al., "Git Re-Basin" (ICLR 2023), algorithm 1: all widths but one are held, and the best order of that
    one is a linear assignment. A step is taken only if the fit improves, so that it ends. A width is looked at again
    only when one beside it has moved.
    """
    choice, settled = start, set[Atom]()
    for _ in range(_PASSES):
        if len(settled) == len(free):
            break
        for atom in free:
            if atom in settled:
                continue
            settled.add(atom)
            gain = likeness.gain(atom, choice)
            order = assignment(gain)
            if order != list(range(atom.size)):
                trial = {**choice, atom: [choice[atom][place] for place in order]}
                if atom in likeness.beside[atom]:
                    before, after = likeness.value(choice, atom), likeness.value(trial, atom)
                else:
                    before, after = gain.trace().item(), gain[range(atom.size), order].sum().item()
                if after > before + 1e-9 * abs(before):
                    choice = trial
                    settled -= likeness.beside[atom]
            if progress:
                progress(len(settled), len(free))
    return choice


def _beside(places: Iterable[Axes]) -> dict[Atom, set[Atom]]:
    """By atom those that lie along a tensor with it; itself where it lies along one more than once."""
    found: dict[Atom, set[Atom]] = {}
    for axes in places:
        along = dict.fromkeys(atom for axis in axes for atom in atoms(axis))
        for atom in along:
            again = sum(_degree(axis, atom) for axis in axes) > 1
            found.setdefault(atom, set()).update(other for other in along if other is not atom or again)
    return found


def _degree(axis: Axis, atom: Atom) -> int:
    """How many of a position's digits an atom is."""
    if isinstance(axis, Atom):
        return axis is atom
    return (max if isinstance(axis, Sum) else sum)(_degree(part, atom) for part in axis.parts)


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
        self.places, self.beside = places, _beside(places.values())
        self.a = {name: reference[name].detach() for name in places}
        self.b = {name: other[name].detach() for name in places}
        self._gains: dict[Atom, tuple[Tensor, dict[Atom, Sequence[int]]]] = {}
        self.along: dict[Atom, list[tuple[str, int]]] = {}
        for name, axes in places.items():
            for dim, axis in enumerate(axes):
                for atom in dict.fromkeys(atoms(axis)):
                    self.along.setdefault(atom, []).append((name, dim))

    def first(self, atom: Atom) -> Tensor:
        def in_order(rows: Tensor) -> Tensor:
            plain = rows.float() if rows.dtype in (torch.float16, torch.bfloat16) else rows
            return torch.from_numpy(np.sort(plain.cpu().numpy()))  # several times as fast as torch's, which is stable

        return self._summed(atom, self.b.__getitem__, in_order)

    def gain(self, atom: Atom, choice: Choice) -> Tensor:
        if atom in self.beside[atom]:
            return self._summed(atom, partial(self._ordered, choice=choice), lambda rows: rows)
        others = {other: choice[other] for other in self.beside[atom] if other in choice}
        if atom not in self._gains:
            ordered = partial(self._ordered, choice=others)
            self._gains[atom] = self._summed(atom, ordered, lambda rows: rows), others
        else:
            self._gains[atom] = self._moved(atom, *self._gains[atom], others), others
        return self._gains[atom][0][:, torch.tensor(choice[atom])]

    def value(self, choice: Choice, atom: Atom | None = None) -> float:
        names = self.places if atom is None else dict.fromkeys(name for name, _ in self.along[atom])
        return sum((self.a[name].double() * self._ordered(name, choice).double()).sum().item() for name in names)

    def _summed(self, atom: Atom, other: Callable[[str], Tensor], view: Callable[[Tensor], Tensor]) -> Tensor:
        result = torch.zeros(atom.size, atom.size, dtype=torch.float64)
        pairs: list[tuple[Tensor, Tensor]] = []
        for name, dim in self.along[atom]:
            axis = self.places[name][dim]
            one, two = (view(_rows(tensor, dim, axis, atom)).double().cpu() for tensor in (self.a[name], other(name)))
            pairs.append((one, two))
        _add_products(result, pairs)
        return result

    def _moved(self, atom: Atom, gain: Tensor, before: Choice, after: Choice) -> Tensor:
        """The gain in the order of some other widths, from that in another one: what did not move stays."""
        pairs: list[tuple[Tensor, Tensor]] = []
        for name, dim in self.along[atom]:
            axes, a, b = self.places[name], self.a[name], self.b[name]
            both = [[placed(axis, choice).to(a.device) for axis in axes] for choice in (before, after)]
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
                old, new = self._ordered(name, before), self._ordered(name, after)
            difference = new.double() - old.double()
            one, two = (_rows(tensor, dim, axes[dim], atom).double().cpu() for tensor in (a, difference))
            pairs.append((one, two))
        _add_products(gain, pairs)
        return gain

    def _ordered(self, name: str, choice: Choice) -> Tensor:
        """A tensor of the other model in the present order of all widths."""
        return repeated(self.b[name], self.places[name], choice)


def _add_products(result: Tensor, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Add the products of matrices and transposed others; narrow ones are multiplied together, which is faster."""
    narrow = []
    for one, two in pairs:
        if one.shape[1] < _FEW:
            narrow.append((one, two))
        else:
            result.addmm_(one, two.T)
    if narrow:
        one, two = (torch.cat(rows, 1) for rows in zip(*narrow))
        result.addmm_(one, two.T)


def _rows(tensor: Tensor, dim: int, axis: Axis, atom: Atom) -> Tensor:
    """[size, elements]: what lies at each position of an atom."""
    if axis is atom:
        return tensor.movedim(dim, 0).reshape(atom.size, -1)
    where = occurrences(axis, atom)
    found = tensor.index_select(dim, where.flatten().to(tensor.device)).movedim(dim, 0)
    return found.reshape(*where.shape, -1).transpose(0, 1).reshape(atom.size, -1)


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
                moments[key] = [a + b for a, b in zip(moments[key], new)] if key in moments else new
        together: dict[Axis, Tensor] = {}
        for key, (cross, one, two, ones, twos, n) in moments.items():
            spread = [
                (square / n - (total / n) ** 2).clamp(min=0).sqrt() for square, total in ((ones, one), (twos, two))
            ]
            covariance = cross / n - torch.outer(one / n, two / n)
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
            present = self.of[axis][:, placed(axis, choice)]
            for places in occurrences(axis, atom):
                result += present[places][:, places]
        return result

    def value(self, choice: Choice, atom: Atom | None = None) -> float:
        axes = self.of if atom is None else self.along.get(atom, ())
        return sum(self.of[axis][range(axis.size), placed(axis, choice)].sum().item() for axis in axes)

    def _read(self, solution, model, batch, free, number) -> dict[tuple[int, int, int], Tensor]:
        """What matrix products and convolutions read along free widths, as [positions, samples]."""
        found: dict[tuple[int, int, int], Tensor] = {}

        def keep(place: tuple[int, int], tensor: Tensor, axes: Axes) -> None:
            for dim, axis in enumerate(axes):
                if tensor.shape[dim] == axis.size and free & set(atoms(axis)):
                    rows = tensor.detach().movedim(dim, 0).reshape(axis.size, -1)
                    rows = rows[:, :: max(1, rows.shape[1] // _MOST)]
                    found[(*place, dim)] = rows.double().cpu()
                    self.axes[(*place, dim)] = axis

        read_batch(model, batch, solution, keep, where=f"batches[{number}]", by="activations")
        return found

"""Models of one architecture brought into one order: permutations by which their widths match."""

import logging
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from surgery.copying import clone
from surgery.errors import SurgeryError
from surgery.forward import named_tensors
from surgery.names import joined
from surgery.plan import Submodel
from surgery.states import State, as_real, as_state, check_same, load, names_by_id, state
from surgery.width.assignment import ONCE, PASSES, Progress, Search, best_choice
from surgery.width.likeness import Activations, Weights
from surgery.width.permute import solved_for
from surgery.width.plan import plan_of
from surgery.width.rotate import Rotatable, check_same_outputs, folded, procrustes, rotatable, rotated
from surgery.width.shortfall import unused_tensors
from surgery.width.solve import Atom, Solution, atoms, named_widths, solve
from surgery.width.trace import one_by_one, traced_in_place

_log = logging.getLogger(__name__)
_LISTED = 5  # widths that keep their order are named up to this number

By = Literal["weights", "activations"]
Maps = Literal["permutations", "orthogonal"]


class Aligned(NamedTuple):
    """Models in one order.

    Attributes:
        models: each computes what it did.
        permutations: by which each was permuted, as `surgery.permute` takes them; they are empty for the reference.
        rotations: the orthogonal matrices of the other widths, as `surgery.width.rotate.rotate` takes them; they are
            empty for the reference, and without maps="orthogonal".
        only_permuted: by width why it was not rotated; empty without maps="orthogonal".
        unaligned: the widths that could be permuted and keep their order, since nothing that is compared lies along
            them: with by="activations" those that no layer reads, such as positions within heads.
    """

    models: list[nn.Module]
    permutations: list[dict[str, Tensor]]
    rotations: list[dict[str, Tensor]]
    only_permuted: dict[str, str]
    unaligned: list[str]


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
        starts: the first looks for the best match from the order as it is, and from one that does not depend on it (to
            the end from the better of both where a width is above 256); each further one from a drawn order. The best
            match counts.
        generator: of the drawn orders, on the CPU; by default they are the same in every call.
        progress: told how many widths have their best order for the present, and of how many.

    Returns:
        The models in the reference's order, the permutations, and the widths that keep their order, which a warning
        names as well.

    Raises:
        SurgeryError: for models of different architectures, for `activations` without batches or with orthogonal maps,
            for a norm whose weight cannot be folded since it is 0 where its bias is not, and for no start.

    >>> net, x = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1)), torch.zeros(1, 2)
    >>> from surgery import permute
    >>> copy, _ = permute(net, {"0.weight:0": torch.randperm(8)}, example=x)
    >>> aligned = align([net, copy], example=x)
    >>> torch.equal(aligned.models[1][0].weight, net[0].weight)
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
    ordered = [aligner.plan(orders).build(model) for orders, model in zip(found, models)]
    unaligned = aligner.unaligned([orders for number, orders in enumerate(found) if number != to])
    return Aligned(ordered, found, [{} for _ in models], {}, unaligned)


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
        any_order = {atom: range(atom.size)[::-1] for atom in self._free.values()}
        if unused := unused_tensors(self._solution, any_order, model, does="are permuted"):
            _log.warning(unused)

    def by_weights(
        self,
        reference: State | nn.Module,
        other: State | nn.Module,
        search: Search = ONCE,
        without: Collection[str] = (),
        mask: State | None = None,
    ) -> dict[str, Tensor]:
        """The permutations of the other model's widths with which its parameters match the reference's best.

        Args:
            without: widths that stay as they are.
            mask: where the reference has values. The other model's are to be near to these, and elsewhere do not count.
        """
        reference, other = self._checked(reference, "the reference"), self._checked(other, "the other model")
        held = names_by_id(self._model)
        places = {}
        for key, tensor in named_tensors(self._model):
            if id(tensor) in held and isinstance(tensor, nn.Parameter):
                places.setdefault(held[id(tensor)], self._solution.tensors[key])
        free = {a: name for name, a in self._free.items() if name not in without}
        places = {n: axes for n, axes in places.items() if any(a in free for axis in axes for a in atoms(axis))}
        if mask is not None:  # x y - y^2 / 2 is largest where (x - y)^2 is least
            reference = {**reference, **{f"{n} squared": mask[n].double() for n in places}}
            other = {**other, **{f"{n} squared": -other[n].double().square() / 2 for n in places}}
            places |= {f"{n} squared": axes for n, axes in places.items()}
        likeness = Weights(places, reference, other)
        return _best(likeness, free, search)

    def by_activations(
        self, reference: nn.Module, other: nn.Module, batches: Sequence[Any], search: Search = ONCE
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
        return _best(likeness, free, search)

    def orthogonally(self, models: Sequence[nn.Module], to: int, search: Search) -> Aligned:
        """The models with widths rotated where they may be, and permuted elsewhere; see `align`."""
        states = [self._checked(model, f"model {number}", all_finite=True) for number, model in enumerate(models)]
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
        only_permuted = {name: why[name] for name in self._free if name not in widths}
        return Aligned(result, orders, matrices, only_permuted, [])

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
            for _ in range(PASSES):
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

    def unaligned(self, orders: Sequence[Mapping[str, Any]]) -> list[str]:
        """The widths that permutations leave as they are, since nothing along them was compared; a warning says so."""
        found = [name for name in self._free if orders and not any(name in order for order in orders)]
        if found:
            more = f" and {len(found) - _LISTED} more" if len(found) > _LISTED else ""
            _log.warning(
                "align leaves %d of %d widths in their order, along which it compares nothing: %s%s; by='weights' "
                "compares all that parameters lie along",
                len(found),
                len(self._free),
                ", ".join(found[:_LISTED]),
                more,
            )
        return found

    def outside_of_states(self) -> set[str]:
        """The widths along which a tensor lies that no state holds, which would stay in the old order beside it."""
        held, members = self._model.state_dict(), self._solution.members
        return {n for n, atom in self._free.items() if any(joined(*key) not in held for key, _ in members[atom])}

    def plan(self, permutations: Mapping[str, Sequence[int] | Tensor]) -> Submodel:
        """The plan that permutes a state or a model: `plan.extract(state)`, `plan.build(model)`."""
        choice = {self._free[name]: torch.as_tensor(order).tolist() for name, order in permutations.items()}
        return plan_of(self._model, self._shapes, self._solution, choice)

    def _in(self, solution: Solution) -> dict[Atom, str]:
        """The free widths of another trace of the model, which has the same names."""
        names = named_widths(solution)
        return {names[name]: name for name in self._free if name in names and not names[name].order}

    def _checked(self, given: State | nn.Module, what: str, all_finite: bool = False) -> State:
        values = as_state(given, what)
        check_same(self._shapes, values, "the model that was traced", what)
        if any(tensor.is_meta for tensor in values.values()):
            raise SurgeryError(f"{what} has no weights to compare (meta device): load some first")
        members = self._solution.members  # other tensors may hold infinity, as ranges of clipping do
        ordered = {joined(*key) for atom in self._free.values() for key, _ in members[atom]}
        for name, tensor in values.items():
            real = tensor.dtype.to_real().is_floating_point
            if (all_finite or name in ordered) and real and not tensor.isfinite().all():
                raise SurgeryError(f"{name!r} of {what} is not finite: there is no order in which it matches")
        return dict(values)


def _best(likeness: Weights | Activations, free: Mapping[Atom, str], search: Search) -> dict[str, Tensor]:
    """The best orders by the names of their widths, of those along which something is compared."""
    choice = best_choice(likeness, [atom for atom in free if atom in likeness.along], search)
    return {free[atom]: torch.tensor(order) for atom, order in choice.items()}


def _inner(one: State, other: State) -> float:
    real = {n: (as_real(one[n]), as_real(other[n])) for n in one if one[n].dtype.to_real().is_floating_point}
    return sum((a.double() * b.double()).sum().item() for a, b in real.values())

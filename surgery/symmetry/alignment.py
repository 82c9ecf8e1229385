"""Bring models of one architecture into one order, in which their widths match."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from surgery.copying import clone
from surgery.errors import SurgeryError
from surgery.forward import named_tensors
from surgery.names import join
from surgery.plan import Plan
from surgery.states import State, as_state, check_same, names_by_id, state
from surgery.symmetry.assignment import ONCE, Progress, Search, best_choice
from surgery.symmetry.likeness import Activations, WeightLikeness
from surgery.symmetry.permutation import trace_and_solve
from surgery.width.plan import plan_of
from surgery.width.shortfall import unused_tensors
from surgery.width.solve import Atom, Solution, atoms, named_widths, solve
from surgery.width.trace import run_one_by_one, trace_in_place

_log = logging.getLogger(__name__)
_LISTED = 5  # widths that keep their order are named up to this number

By = Literal["weights", "activations"]


class Aligned(NamedTuple):
    """Models in one order.

    Attributes:
        models: the models; each computes the same as before.
        permutations: the permutations of each model, as `surgery.symmetry.permute` takes them; none for the reference.
        unaligned: the widths that could be permuted and keep their order, since nothing that is compared lies along
            them: with by="activations" widths that no layer reads, such as positions within heads.
    """

    models: list[nn.Module]
    permutations: list[dict[str, Tensor]]
    unaligned: list[str]


def align(
    models: Sequence[nn.Module],
    *,
    example: Any,
    to: int = 0,
    by: By = "weights",
    batches: Iterable[Any] = (),
    output: Callable[[Any], Any] | None = None,
    starts: int = 1,
    generator: torch.Generator | None = None,
    progress: Progress | None = None,
) -> Aligned:
    """Permute the hidden widths of models so that they match a reference's widths.

    The models have one architecture, and the reference is one of them. Networks that were trained separately have
    similar features in different orders. Aligned models can be averaged and recombined with less loss. One forward pass
    finds what may be permuted, for any module: residual streams, whole heads of an attention and the positions within
    them, and groups of convolutions likewise.

    Args:
        models: modules of one architecture; they are not changed.
        example: an input, as for `surgery.narrow`.
        to: the number of the reference, which stays.
        by: `weights` maximises the inner product of all parameters (Ainsworth et al., "Git Re-Basin", ICLR 2023,
            section 3.2), `activations` the correlation of what layers read (section 3.1; Li et al., 2016).
        batches: inputs like the example, for `activations`.
        output: as for `surgery.narrow`.
        starts: the number of searches. The first has two starts: the order as it is, and an order that does not depend
            on it. (Where a width is above 256, only the better of the two is searched to the end.) Each further search
            starts from a random order. The best match counts.
        generator: of the random orders, on the CPU; by default they are the same in every call.
        progress: called with the number of widths that have their best order at present, and the number of all widths.

    Returns:
        The models in the reference's order, the permutations, and the widths that keep their order, which a warning
        names as well.

    Raises:
        SurgeryError: for models of different architectures, for `activations` without batches, and if `starts` is below
            1.

    >>> net, x = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1)), torch.zeros(1, 2)
    >>> from surgery.symmetry import permute
    >>> copy, _ = permute(net, {"0.weight:0": torch.randperm(8)}, example=x)
    >>> aligned = align([net, copy], example=x)
    >>> torch.equal(aligned.models[1][0].weight, net[0].weight)
    True
    """
    models = list(models) if isinstance(models, list | tuple) else []
    if not models or not all(isinstance(model, nn.Module) for model in models):
        raise SurgeryError("align takes a list of models of one architecture", code="argument")
    if isinstance(to, bool) or not isinstance(to, int) or not 0 <= to < len(models):
        raise SurgeryError(f"to is the number of one of {len(models)} models, from 0 on, got {to!r}", code="argument")
    if by not in get_args(By):
        raise SurgeryError(f"unknown by={by!r}: choose {' or '.join(get_args(By))}", code="argument")
    aligner, batch_list = Aligner(models[to], example=example, output=output), list(batches)
    search = Search(starts, generator or torch.Generator().manual_seed(0), progress)
    permutations: list[dict[str, Tensor]] = []
    for number, model in enumerate(models):
        if number == to:
            permutations.append({})
        elif by == "weights":
            permutations.append(aligner.by_weights(models[to], model, search))
        else:
            permutations.append(aligner.by_activations(models[to], model, batch_list, search))
    ordered = [aligner.plan(orders).build(model) for orders, model in zip(permutations, models)]
    unaligned = aligner.find_unaligned([orders for number, orders in enumerate(permutations) if number != to])
    return Aligned(ordered, permutations, unaligned)


class Aligner:
    """The permutable widths of an architecture, computed once.

    Aligns states, such as federated clients', as `align` does models.

    Args:
        model, example, output: as for `align`; the model's weights do not matter.

    >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    >>> aligner = Aligner(net, example=torch.zeros(1, 2))
    >>> orders = aligner.by_weights(state(net), state(net))
    >>> orders, torch.equal(aligner.plan(orders).extract(state(net))["0.bias"], net[0].bias)
    ({'0.weight:0': tensor([0, 1, 2])}, True)
    """

    def __init__(self, model: nn.Module, *, example: Any, output: Callable[[Any], Any] | None = None):
        self._model, self._solution = trace_and_solve(model, example, output, "align")
        self._state, self._example, self._output = state(model), example, output
        self._free = {name: a for name, a in named_widths(self._solution).items() if not a.order}
        any_order = {atom: range(atom.size)[::-1] for atom in self._free.values()}
        if unused := unused_tensors(self._solution, any_order, model, does="are permuted"):
            _log.warning(unused)

    def by_weights(
        self, reference: State | nn.Module, other: State | nn.Module, search: Search = ONCE
    ) -> dict[str, Tensor]:
        """Return the permutations by which the other model's parameters match best."""
        reference, other = self._check(reference, "the reference"), self._check(other, "the other model")
        held = names_by_id(self._model)
        places = {}
        for key, tensor in named_tensors(self._model):
            if id(tensor) in held and isinstance(tensor, nn.Parameter):
                places.setdefault(held[id(tensor)], self._solution.tensors[key])
        free = {a: name for name, a in self._free.items()}
        places = {n: axes for n, axes in places.items() if any(a in free for axis in axes for a in atoms(axis))}
        likeness = WeightLikeness(places, reference, other)
        return _best(likeness, free, search)

    def by_activations(
        self, reference: nn.Module, other: nn.Module, batches: Sequence[Any], search: Search = ONCE
    ) -> dict[str, Tensor]:
        """Return the permutations by which the inputs of the other model's layers match."""
        self._check(reference, "the reference"), self._check(other, "the other model")
        if not batches:
            raise SurgeryError("by='activations' needs `batches`, at least one batch of inputs", code="argument")
        copies = clone(reference), clone(other)
        with run_one_by_one():
            solution = solve(trace_in_place(reference, self._example, self._output))
            free = self._in(solution)
            likeness = Activations(solution, copies, batches, set(free))
        return _best(likeness, free, search)

    def find_unaligned(self, orders: Sequence[Mapping[str, Any]]) -> list[str]:
        """Return the widths that keep their order, since nothing along them was compared.

        A warning says so.
        """
        unaligned = [name for name in self._free if orders and not any(name in order for order in orders)]
        if unaligned:
            more = f" and {len(unaligned) - _LISTED} more" if len(unaligned) > _LISTED else ""
            _log.warning(
                "align leaves %d of %d widths in their order, along which it compares nothing: %s%s; by='weights' "
                "compares all that parameters lie along",
                len(unaligned),
                len(self._free),
                ", ".join(unaligned[:_LISTED]),
                more,
            )
        return unaligned

    def plan(self, permutations: Mapping[str, Sequence[int] | Tensor]) -> Plan:
        """Return the plan that permutes: `plan.extract(state)`, `plan.build(model)`."""
        choice = {self._free[name]: torch.as_tensor(order).tolist() for name, order in permutations.items()}
        return plan_of(self._model, self._state, self._solution, choice)

    def _in(self, solution: Solution) -> dict[Atom, str]:
        """Return the free widths of another trace of the model, which has the same names."""
        names = named_widths(solution)
        return {names[name]: name for name in self._free if name in names and not names[name].order}

    def _check(self, source: State | nn.Module, label: str) -> State:
        values = as_state(source, label)
        check_same(self._state, values, "the model that was traced", label)
        if any(tensor.is_meta for tensor in values.values()):
            raise SurgeryError(f"{label} has no weights to compare (meta device): load some first", code="values")
        members = self._solution.members  # other tensors may hold infinity, as ranges of clipping do
        ordered = {join(*key) for atom in self._free.values() for key, _ in members[atom]}
        for name, tensor in values.items():
            real = tensor.dtype.to_real().is_floating_point
            if name in ordered and real and not tensor.isfinite().all():
                raise SurgeryError(f"{name!r} of {label} is not finite, so that no order matches", code="values")
        return dict(values)


def _best(likeness: WeightLikeness | Activations, free: Mapping[Atom, str], search: Search) -> dict[str, Tensor]:
    """Return the best orders of the compared widths, by name."""
    choice = best_choice(likeness, [atom for atom in free if atom in likeness.along], search)
    return {free[atom]: torch.tensor(order) for atom, order in choice.items()}

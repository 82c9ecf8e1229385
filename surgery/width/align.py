"""Models of one architecture brought into one order: permutations by which their widths match."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from surgery.copying import clone
from surgery.errors import InternalError, SurgeryError, first_line
from surgery.forward import copied, named_tensors
from surgery.plan import Submodel
from surgery.states import State, as_state, check_same, owners, state
from surgery.width.matching import Activations, Weights, best_choice
from surgery.width.permute import seen_for
from surgery.width.plan import plan_of
from surgery.width.scores import named_widths
from surgery.width.solved import Atom, Solution, atoms, solve
from surgery.width.trace import Trace
from surgery.width.unchanged import one_by_one

By = Literal["weights", "activations"]


class Aligned(NamedTuple):
    """Models in one order.

    Attributes:
        models: each computes what it did.
        permutations: by which each was permuted, as `surgery.permute` takes them; they are empty for the reference.
    """

    models: list[nn.Module]
    permutations: list[dict[str, Tensor]]


def align(
    models: Sequence[nn.Module],
    *,
    example: Any,
    to: int = 0,
    by: By = "weights",
    batches: Iterable[Any] = (),
    output: Callable[[Any], Any] | None = None,
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
        output: as for `surgery.narrow`.

    Returns:
        The models in the reference's order, and the permutations.

    Raises:
        SurgeryError: for models of different architectures, and for `activations` without batches.

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
    aligner, given = Aligner(models[to], example=example, output=output), list(batches)
    found: list[dict[str, Tensor]] = []
    for number, model in enumerate(models):
        if number == to:
            found.append({})
        elif by == "weights":
            found.append(aligner.by_weights(models[to], model))
        else:
            found.append(aligner.by_activations(models[to], model, given))
    return Aligned([aligner.plan(orders).build(model) for orders, model in zip(found, models)], found)


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
        seen = seen_for(model, example, output, "align")
        self._model, self._example, self._output = seen.model, example, output
        self._shapes, self._solution = state(model), solve(seen.found)
        self._free = {name: a for name, a in named_widths(self._solution).items() if not a.order}

    def by_weights(self, reference: State | nn.Module, other: State | nn.Module) -> dict[str, Tensor]:
        """The permutations of the other model's widths with which its parameters match the reference's best."""
        reference, other = self._checked(reference, "the reference"), self._checked(other, "the other model")
        held = {id(t): name for _, _, own in owners(self._model) for name, t in own.items()}
        places = {}
        for key, tensor in named_tensors(self._model):
            if id(tensor) in held and isinstance(tensor, nn.Parameter):
                places.setdefault(held[id(tensor)], self._solution.tensors[key])
        free = {a: name for name, a in self._free.items()}
        places = {n: axes for n, axes in places.items() if any(a in free for axis in axes for a in atoms(axis))}
        likeness = Weights(places, reference, other)
        return self._named(best_choice(likeness, [a for a in free if a in likeness.along]), free)

    def by_activations(self, reference: nn.Module, other: nn.Module, batches: Sequence[Any]) -> dict[str, Tensor]:
        """The permutations of the other model's widths with which what its layers read matches best."""
        self._checked(reference, "the reference"), self._checked(other, "the other model")
        if not batches:
            raise SurgeryError("by='activations' needs `batches`, at least one batch of inputs")
        one, two = clone(reference), clone(other)
        with one_by_one():
            try:
                solution = solve(Trace(clone(reference), copied(self._example), output=self._output))
            except (SurgeryError, InternalError):
                raise
            except Exception as error:
                raise SurgeryError(
                    f"{type(reference).__name__} does not run on the example: {first_line(error)}"
                ) from error
            free = self._in(solution)
            likeness = Activations(solution, (one, two), batches, set(free))
        return self._named(best_choice(likeness, [a for a in free if a in likeness.along]), free)

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

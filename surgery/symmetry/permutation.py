"""Reorder the widths of a network so that its outputs stay as before."""

import difflib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from surgery.errors import SurgeryError, first_line
from surgery.forward import check_runs
from surgery.names import join
from surgery.plan import Plan
from surgery.states import state
from surgery.width.choose import Scores, check_scores
from surgery.width.plan import plan_of
from surgery.width.shortfall import unused_tensors
from surgery.width.solve import Atom, Choice, Solution, named_widths, parts_of, solve
from surgery.width.trace import trace_model

_log = logging.getLogger(__name__)


def permute(
    model: nn.Module,
    permutations: Mapping[str, Sequence[int] | Tensor] | None = None,
    *,
    by: Scores | None = None,
    example: Any,
    output: Callable[[Any], Any] | None = None,
) -> tuple[nn.Module, Plan]:
    """Copy any module with its hidden widths in another order and the same outputs.

    Every tensor that lies along a width is put in order along it: what makes its features, the norm after it, what
    reads them, and all that is added to it. Heads of an attention and groups of a convolution are a width, and the
    positions within a head or a group are another one, the same for all of them.

    Args:
        model: any module; it is not changed.
        permutations: by width the present positions in their new order: `[2, 0, 1]` puts position 2 first. A width is
            named by an axis of its own, `layer1.conv.weight:0`. If several widths lie along an axis, a third number
            says which one, from the left, `proj.weight:1:0`. `surgery.widths(model, ...)` lists the names, and why some
            widths cannot be put in another order. Other widths keep their order.
        by: in place of permutations, scores by width as `surgery.pruning.importance` gives them. The positions with the
            highest scores come first; positions with equal scores keep their order. One network then serves every
            width: `narrow(sorted, r, x)` is `narrow(model, r, x, scores=by)` up to the order of positions, for every
            share r (Cai et al., "Once-for-All", ICLR 2020, section 3.3). A width keeps its order if it has no scores,
            or if its order matters.
        example: an input, as for `surgery.narrow`. One forward pass shows the widths, on the meta device if possible.
        output: what of the output has to stay the same, as for `surgery.narrow`.

    Returns:
        The permuted module, and the plan that maps its state to the model's. Permuting by the inverses
        (`permutation.argsort()`) gives the model back bit for bit.

    Raises:
        SurgeryError: for a width that the model does not have or whose order matters, for what is no permutation, and
            for scores of another model.

    >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    >>> x = torch.randn(5, 2)
    >>> other, plan = permute(net, {"0.weight:0": [2, 0, 1]}, example=x)
    >>> torch.allclose(other(x), net(x)), torch.equal(other[0].bias, net[0].bias[[2, 0, 1]])
    (True, True)
    >>> plan.entries["2.weight"][0].index
    (None, ((2, 3), (0, 2)))
    >>> best_first, _ = permute(net, by={"0.weight:0": torch.tensor([1, 3, 2])}, example=x)
    >>> torch.equal(best_first[0].weight, net[0].weight[[1, 2, 0]])
    True
    """
    if (permutations is None) == (by is None):
        raise SurgeryError("permute takes either permutations or by, the scores to sort by: give one", code="argument")
    if by is None and not isinstance(permutations, Mapping):
        raise SurgeryError(f"permute takes orders, {{'fc1.weight:0': [1, 0]}}, got {permutations!r}", code="argument")
    twin, solution = trace_and_solve(model, example, output, "permute")
    choice = _by_name(solution, permutations or {}) if by is None else _best_first(solution, by)
    if unused := unused_tensors(solution, choice, model, does="are permuted"):
        _log.warning(unused)
    plan = plan_of(twin, state(model), solution, choice)
    return plan.build(model), plan


def _by_name(solution: Solution, permutations: Mapping[str, Sequence[int] | Tensor]) -> Choice:
    """Return the orders of widths that the caller names."""
    places = _places(solution)
    choice: dict[Atom, list[int]] = {}
    for name, order in permutations.items():
        atom = _atom(name, places)
        if atom in choice:
            raise SurgeryError(f"{name!r} is a width with a permutation under another name", code="argument")
        choice[atom] = _order(name, atom, order)
    return choice


def _best_first(solution: Solution, scores: Scores) -> Choice:
    """Return the positions of widths by descending score.

    Widths are left out if their order matters.
    """
    widths = named_widths(solution)
    return {
        widths[name]: values.argsort(descending=True, stable=True).tolist()
        for name, values in check_scores(scores, widths, "by").items()
        if not widths[name].order
    }


def trace_and_solve(
    model: nn.Module, example: Any, output: Callable[[Any], Any] | None, who: str
) -> tuple[nn.Module, Solution]:
    """Return the model as it was traced, on the meta device if possible, and its axes."""
    check_runs(model, example, who)
    seen = trace_model(model, example, output)
    return seen.model, solve(seen.found)


def _places(solution: Solution) -> dict[str, Atom]:
    """Return the widths by each name that they could have, one for each axis."""
    widths_by_name = {}
    for key, axes in solution.tensors.items():
        for position, axis in enumerate(axes):
            parts = parts_of(axis)
            for number, atom in enumerate(parts):
                widths_by_name[f"{join(*key)}:{position}" + (f":{number}" if len(parts) > 1 else "")] = atom
    return widths_by_name


def _atom(name: str, places: Mapping[str, Atom]) -> Atom:
    if name not in places:
        several = [place for place in places if str(place).startswith(f"{name}:")]
        near = several or difflib.get_close_matches(str(name), places, n=2)
        hint = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
        why = "several widths lie along it" if several else "the model has no such width"
        raise SurgeryError(f"{name!r} cannot be permuted, {why}: {hint}surgery.widths lists all by name", code="name")
    if why := places[name].order:
        raise SurgeryError(f"the {places[name].size} positions of {name!r} keep their order: {why}", code="width")
    return places[name]


def _order(name: str, atom: Atom, value: Any) -> list[int]:
    try:
        order = torch.as_tensor(value)
        whole = not order.is_floating_point() and order.dtype != torch.bool
        positions = order.tolist() if whole else None
    except (TypeError, ValueError, RuntimeError) as error:
        raise SurgeryError(f"the permutation of {name!r}: {first_line(error)}", code="argument") from error
    if order.shape != (atom.size,) or positions is None or sorted(positions) != list(range(atom.size)):
        raise SurgeryError(
            f"the permutation of {name!r} must hold each of 0 to {atom.size - 1} once, got {str(value)[:60]}",
            code="argument",
        )
    return positions

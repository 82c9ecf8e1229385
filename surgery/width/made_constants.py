"""Check that narrow code makes the full model's constants, less what was cut."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from surgery.copying import clone
from surgery.errors import SurgeryError, first_line
from surgery.forward import Observed, copy_tensors, tensors_in
from surgery.plan import Plan
from surgery.states import state
from surgery.width.plan import repeat
from surgery.width.solve import Atom, Axes, Axis, Choice, Solution, atoms, named_widths
from surgery.width.trace import Trace


def other_constants(
    model: nn.Module,
    example: Any,
    output: Callable[[Any], Any] | None,
    seen: Observed[Trace],
    solution: Solution,
    choice: Choice,
    plan: Plan,
) -> list[str]:
    """Return the widths along which the narrow code makes other constants.

    Args:
        model, example, output: as for `surgery.narrow`.
        seen: the trace, and what was traced.

    Raises:
        SurgeryError: if such constants lie along heads that are dropped, or other numbers are used there.
    """
    trace, heads, problem, others = seen.found, {atom for atom in choice if atom.grouping == "heads"}, "", []
    small = Trace(plan.build(seen.model), copy_tensors(seen.example), trace.modes, output) if heads else None
    for old, new in zip(solution.steps, small.steps) if small else ():
        plain = {key: value for key, value in old.scalars.items() if key not in old.numbers}
        if heads & _among(old.axes()) and any(new.scalars.get(key) != value for key, value in plain.items()):
            problem = f"computes with other numbers ({old.name} in {old.module or 'the model itself'}) for fewer heads"
    compared: dict[int, tuple[Axes, set[Atom]]] = {}  # by place of a constant its axes, and the widths to look at
    for place, (constant, along, results) in enumerate(trace.constants):
        its_axes = tuple(map(solution.axis_of, along))
        cut = choice.keys() & _among(its_axes)
        if constant.numel() == 1:
            cut = heads & _among([solution.axis_of(axis) for result in results for axis in result])
        if cut & heads or any(atom.order for atom in cut):
            compared[place] = its_axes, cut
    (full, narrow), unknown = _constants_of_both(model, example, output, trace, plan) if compared else (([], []), "")
    for place, (its_axes, cut) in compared.items():
        if not unknown and _same_numbers(repeat(full[place][0], its_axes, choice), narrow[place][0]):
            continue
        if cut & heads and (its_axes or not unknown):
            problem = "makes constants for each head (slopes of positions, say), which are others with fewer heads"
            problem += f", or not known ({unknown})" if unknown else ""
        elif not unknown:
            others += [name for name, atom in named_widths(solution).items() if atom in cut]
    if problem:
        raise SurgeryError(
            f"{type(model).__name__} {problem}: the heads that stay would not do what they did. Take "
            "heads='inside', or register what is computed from their number as a buffer of its module",
            code="width",
        )
    return list(dict.fromkeys(others))


def _constants_of_both(
    model: nn.Module, example: Any, output: Callable[[Any], Any] | None, trace: Trace, plan: Plan
) -> tuple[tuple[list, list], str]:
    """Return the constants of both models; or why their numbers are not known."""
    if any(tensor.is_meta for tensor in (*state(model).values(), *tensors_in(example))):
        return ([], []), "meta device"
    try:
        full, small = (
            Trace(copy, copy_tensors(example), trace.modes, output).constants
            for copy in (clone(model), plan.build(model))
        )
    except Exception as error:  # whatever the code raises there
        return ([], []), first_line(error)
    if not len(full) == len(small) == len(trace.constants):
        return ([], []), "the code makes others on the meta device"
    return (full, small), ""


def _among(several: Iterable[Axis]) -> set[Atom]:
    """Return the atoms of some axes."""
    return {atom for axis in several for atom in atoms(axis)}


def _same_numbers(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors hold the same numbers but for rounding."""
    exact = torch.promote_types(a.dtype, torch.float64)
    same = a.shape == b.shape and a.dtype == b.dtype
    return same and torch.allclose(a.to(exact), b.to(exact), equal_nan=True)

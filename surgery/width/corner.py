"""A smaller model of a family in a larger one: its corner, or a window that rolls.

Alam et al., "FedRolex: Model-Heterogeneous Federated Learning with Rolling Sub-Model Extraction" (NeurIPS 2022),
section 3.2: in round j a client that holds n of C channels holds (j + i) mod C, i < n, so that after C rounds every
channel was trained as often as any other.
"""

import copy
import logging
import math
from collections.abc import Callable
from math import prod
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from surgery.copying import refuse_compiled
from surgery.errors import SurgeryError
from surgery.forward import named_tensors
from surgery.names import join
from surgery.plain import is_plain
from surgery.plan import Index, Plan, Source, structure
from surgery.states import State, load, names_by_id, shapes_of, state
from surgery.width.plan import plan_of
from surgery.width.scales import held_numbers, is_of_one_number
from surgery.width.solve import Atom, Axis, Product, Sum, atoms, digits, grouping_of, size_of, solve
from surgery.width.trace import trace_model

_log = logging.getLogger(__name__)
_LEAST = 8  # powers of shorter widths are equal to other numbers by chance
_OWN = vars(nn.Module()).keys() - {"training"}  # what every module keeps for itself


def corner(model: nn.Module, small: nn.Module) -> tuple[nn.Module, Plan]:
    """Copy `small` with the leading corner of the model's weights.

    This is `surgery.narrow(model, like=small)`.

    Args:
        model: any module; it is not changed.
        small: a smaller model of the same family, with the same names of tensors.

    Returns:
        The copy, and the plan that maps its state to the model's.

    Raises:
        SurgeryError: if the two differ in their tensors' names (in depth, say), or `small` is larger somewhere.

    >>> net, half = nn.Linear(4, 2), nn.Linear(2, 2)
    >>> small, plan = corner(net, half)
    >>> bool((small.weight == net.weight[:, :2]).all()), plan.entries["weight"][0].index
    (True, (None, ((0, 2),)))
    """
    for name, module in (("model", model), ("like", small)):
        if not isinstance(module, nn.Module):
            raise SurgeryError(
                f"{name} is a module, got a {type(module).__name__}: for a state, load it into its model",
                code="argument",
            )
        refuse_compiled(module)
    full, values = state(model), state(small)
    _check_names(full, values)
    entries = {name: (Source(name, _leading(name, tensor, full[name])),) for name, tensor in values.items()}
    shapes = shapes_of(full)
    dtypes = {name: tensor.dtype for name, tensor in full.items()}
    plan = Plan(entries, shapes, (*_attributes(model, small), *_slices(model, small)), structure(model), dtypes)
    if warning := _find_kept_scales(model, small, plan):
        _log.warning(warning)
    result = copy.deepcopy(small)
    if all(tensor.is_meta for tensor in (*full.values(), *values.values())):
        return result, plan
    return load(result, plan.extract(full)), plan


def _check_names(full: State, values: State) -> None:
    names = [n for n in (*full, *values) if n not in full or n not in values]
    if names:
        where = "large" if names[0] in full else "small"
        raise SurgeryError(
            f"only the {where} model has a tensor {names[0]!r}: give both the same depth first, with graft or ungraft",
            code="mismatch",
        )


def _leading(name: str, small: Tensor, full: Tensor) -> Index:
    if small.ndim != full.ndim or any(s > f for s, f in zip(small.shape, full.shape)):
        raise SurgeryError(
            f"{name!r} has shape {tuple(small.shape)} in the small model and {tuple(full.shape)} in the large one, of "
            "which it is no leading corner",
            code="mismatch",
        )
    return tuple(None if s == f else ((0, s),) for s, f in zip(small.shape, full.shape))


def _attributes(model: nn.Module, small: nn.Module) -> list[dict[str, Any]]:
    """Edits for plain attributes in which the two differ."""
    edits = []
    others = dict(small.named_modules())
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            new = vars(others[name]).get(attribute, value) if name in others else value
            if attribute in _OWN or not is_plain(value) or not is_plain(new) or new == value:
                continue
            edits.append({"do": "set", "module": name, "attribute": attribute, "value": new})
    return edits


def _slices(model: nn.Module, small: nn.Module) -> list[dict[str, Any]]:
    """Edits for tensors that are not in the state."""
    edits: list[dict[str, Any]] = []
    others = dict(named_tensors(small))
    held = names_by_id(model)  # tied ones under all their names
    for (module, attribute), tensor in named_tensors(model):
        other = others.get((module, attribute), tensor)
        if id(tensor) in held:
            continue
        is_number = tensor.is_floating_point() and is_of_one_number(tensor) and is_of_one_number(other)
        if is_number and not (tensor.is_meta or other.is_meta) and tensor.flatten()[0] != other.flatten()[0]:  # a scale
            edits.append({"do": "fill", "module": module, "attribute": attribute, "value": other.flatten()[0].item()})
        if other.shape != tensor.shape:
            index = _leading(join(module, attribute), other, tensor)
            edits.append({"do": "slice", "module": module, "attribute": attribute, "index": index})
    return edits


def _find_kept_scales(model: nn.Module, small: nn.Module, plan: Plan) -> str:
    """Return which saved numbers that the copy takes may be scales; "" if none.

    They are others in `small`, or powers of a width that it has less of. Statistics of norms are none.
    """
    modules, saved, others = dict(model.named_modules()), names_by_id(model), held_numbers(small)
    tensors = dict(named_tensors(model))
    pairs = ((plan.shapes[name], shape) for name, shape in plan.small_shapes.items())
    shorter = {old for full, less in pairs for old, new in zip(full, less) if new < old and old >= _LEAST}
    heads = {old // n for old in shorter for n in range(1, old // _LEAST + 1) if old % n == 0}  # the width of each
    powers = [old**power for old in heads for power in (0.5, 1, -0.5, -1)]
    named = []
    for (module, attribute), (value, precision) in held_numbers(model).items():
        other = others.get((module, attribute))
        if value is None or id(tensors[module, attribute]) not in saved or isinstance(modules[module], _NormBase):
            continue
        differs = other and other.value is not None and not math.isclose(value, other.value, rel_tol=precision)
        if differs or any(math.isclose(value, power, rel_tol=precision) for power in powers):
            there = f" ({other.value:.6g} in the small one)" if other and differs else ""
            named.append(f"{join(module, attribute)}, {value:.6g}{there}")
    if not named:
        return ""
    return (
        f"the smaller {type(model).__name__} gets the model's numbers {'; '.join(named)}, since they are saved with "
        "its weights: if they scale what becomes narrower, set them again in the copy"
    )


def rolling(model: nn.Module, small: nn.Module, *, example: Any) -> Callable[[int], Plan]:
    """Return the plans of a smaller model with a shifted window on every width.

    Args:
        model: any module; it is not changed.
        small: a smaller model of the same family, as for `surgery.narrow(model, like=small)`.
        example: the model's input. One forward pass shows which axes of the model's tensors are one width. It runs in
            evaluation mode, on the meta device if the model can.

    Returns:
        A function from the shift `by` to a plan. If a width has C channels and `small` has n of them, the plan holds
        the channels (by + i) mod C, i < n, in ascending order. A width that `small` has entirely is held entirely. If
        the order of a width matters (`surgery.widths` says why), the plan holds its first n channels. Channels count,
        not positions: after a flattened image each channel has as many columns of a linear layer as there are pixels.
        All heads of an attention stay, with the window inside each. `by=0` gives the plan of `narrow`.

    Raises:
        SurgeryError: if the leading corner that `narrow(model, like=small)` takes is not the first channels of every
            width: a rolled one would not be a narrower model.

    >>> import torch
    >>> net, small = (nn.Sequential(nn.Conv2d(1, c, 1), nn.Flatten(), nn.Linear(2 * c, 3)) for c in (4, 3))
    >>> plan = rolling(net, small, example=torch.zeros(1, 1, 1, 2))(2)
    >>> plan.entries["0.bias"][0].index, plan.entries["2.weight"][0].index
    ((((0, 1), (2, 4)),), (None, ((0, 2), (4, 8))))
    """
    _, base = corner(model, small)
    seen, full = trace_model(model, example), state(model)
    solution = solve(seen.found)
    where = {join(*key): tensor_axes for key, tensor_axes in solution.tensors.items()}
    wanted, sets = dict(base.small_shapes), []
    for edit in base.edits:
        if edit["do"] != "slice":
            sets.append(edit)
        else:  # a tensor that is not in the state
            name = join(edit["module"], edit["attribute"])
            wanted[name] = tuple(a.size if runs is None else runs[0][1] for a, runs in zip(where[name], edit["index"]))
    counts = _solve([(name, axis, n) for name, sizes in wanted.items() for axis, n in zip(where[name], sizes)])

    def plan(by: int) -> Plan:
        starts = {atom: 0 if atom.order else by for atom in counts}
        choice = {a: sorted((starts[a] + i) % a.size for i in range(n)) for a, n in counts.items() if n < a.size}
        window = plan_of(seen.model, full, solution, choice)
        return window.with_edits((*sets, *window.edits))

    for name, sources in plan(0).entries.items():
        if sources != base.entries[name]:
            raise SurgeryError(
                f"the leading corner {base.small_shapes[name]} of {name!r} {base.shapes[name]} is not the first "
                "channels of its widths, since their parts (heads, groups, padding) lie one after the other: it cannot "
                "roll; take models whose narrow versions are their leading corners (another norm or shortcut may do)",
                code="width",
            )
    return plan


def _solve(equations: list[tuple[str, Axis, int]]) -> dict[Atom, int]:
    """Return how many positions of each atom stay, by (tensor, axis, number).

    The number is how many positions of the tensor's axis stay. If a width is a product of several digits that may
    shrink, heads and groups are kept whole.
    """
    counts: dict[Atom, int] = {}
    for _, axis, n in equations:
        counts.update({atom: atom.size for atom in atoms(axis) if atom.why or n == axis.size})
    unknown = [equation for equation in equations if not _is_known(equation[1], counts)]
    while unknown:
        if not sum(_settle(axis, n, counts) for _, axis, n in unknown):
            parts = [digit for _, axis, _ in unknown for digit in digits(axis)]
            groups = [digit for digit in parts if grouping_of(digit) and not _is_known(digit, counts)]
            if not groups:
                name, axis, n = unknown[0]
                raise SurgeryError(
                    f"{axis.size} positions of {name!r} become {n}, and that does not show what each width keeps",
                    code="width",
                )
            counts.update({atom: atom.size for atom in atoms(groups[0])})
        unknown = [equation for equation in unknown if not _is_known(equation[1], counts)]
    for name, axis, n in equations:
        if _new_size(axis, counts) != n:
            why = next(
                (atom.why.text for atom in atoms(axis) if atom.why), "its widths shrink to other sizes elsewhere"
            )
            raise SurgeryError(
                f"{axis.size} positions of {name!r} become {n}, and no choice of them does that: {why}", code="width"
            )
    return counts


def _is_known(axis: Axis, counts: dict[Atom, int]) -> bool:
    return all(atom in counts for atom in atoms(axis))


def _settle(axis: Axis, n: int, counts: dict[Atom, int]) -> bool:
    """Return whether the count of an axis shows the count of one more part.

    `counts` then has it.
    """
    if isinstance(axis, Atom):
        counts[axis] = n
        return True
    known = [_new_size(part, counts) for part in axis.parts if _is_known(part, counts)]
    unknown = [part for part in axis.parts if not _is_known(part, counts)]
    if len(set(unknown)) != 1 or (isinstance(axis, Product) and len(unknown) > 1):
        return False
    n, rest = divmod(n - sum(known), len(unknown)) if isinstance(axis, Sum) else divmod(n, prod(known))
    return not rest and 0 < n <= unknown[0].size and _settle(unknown[0], n, counts)


def _new_size(axis: Axis, counts: dict[Atom, int]) -> int:
    return size_of(axis, {atom: range(counts[atom]) for atom in atoms(axis)})

"""Turn a choice of positions into places on an axis, in a tensor, and a plan."""

from collections.abc import Mapping
from functools import cache
from itertools import accumulate

import torch
from torch import Tensor, nn

from surgery.forward import named_tensors
from surgery.plan import Plan, Ranges, Source, as_runs, structure
from surgery.plan.positions import merge_ranges
from surgery.states import names_by_id, shapes_of
from surgery.width.solve import Atom, Axes, Axis, Choice, Solution, Sum


def runs_of(axis: Axis, choice: Choice) -> Ranges:
    """Return the positions that stay, as ranges."""
    if isinstance(axis, Atom):
        positions = choice.get(axis)
        if positions is None:
            return ((0, axis.size),)
        return (
            ((positions.start, positions.stop),)
            if isinstance(positions, range) and positions.step == 1
            else as_runs(positions)
        )
    parts = [(part.size, runs_of(part, choice)) for part in axis.parts]
    if isinstance(axis, Sum):
        starts = accumulate((size for size, _ in parts), initial=0)
        return merge_ranges((start + a, start + b) for start, (_, runs) in zip(starts, parts) for a, b in runs)
    result: Ranges = ((0, 1),)
    size = 1
    for radix, runs in reversed(parts):
        if result == ((0, size),):
            result = tuple((a * size, b * size) for a, b in runs)
        else:
            result = tuple((p * size + a, p * size + b) for x, y in runs for p in range(x, y) for a, b in result)
        size *= radix
    return merge_ranges(result)


def place(axis: Axis, choice: Choice) -> Tensor:
    """Return the positions that stay, in the order in which a choice has them.

    >>> from surgery.width.solve import Product
    >>> heads, width = Atom(2), Atom(4)
    >>> place(Product((heads, width)), {heads: [1, 0], width: (0, 2)}).tolist()
    [4, 6, 0, 2]
    """
    if isinstance(axis, Atom):
        positions = choice.get(axis)
        return torch.arange(axis.size) if positions is None else torch.tensor(positions, dtype=torch.long)
    parts = [place(part, choice) for part in axis.parts]
    if isinstance(axis, Sum):
        starts = accumulate((part.size for part in axis.parts), initial=0)
        return torch.cat([start + part for start, part in zip(starts, parts)])
    result = parts[0]
    for digit, part in zip(axis.parts[1:], parts[1:]):
        result = (result[:, None] * digit.size + part).flatten()
    return result


def repeat(tensor: Tensor, axes: Axes, choice: Choice) -> Tensor:
    """Return a tensor with the chosen positions of each axis, also repeated ones.

    >>> width = Atom(2)
    >>> repeat(torch.tensor([5, 6]), (width,), {width: [0, 1, 0]}).tolist()
    [5, 6, 5]
    """
    for dim, axis in enumerate(axes):
        where = place(axis, choice)
        if not torch.equal(where, torch.arange(axis.size)):
            tensor = tensor.index_select(dim, where.to(tensor.device))
    return tensor


def plan_of(model: nn.Module, values: Mapping[str, Tensor], solution: Solution, choice: Choice) -> Plan:
    """Return the plan that keeps the chosen positions of every tensor.

    Its edits slice the tensors that are not in the state.

    Args:
        model: the full model, or a copy of it on the meta device.
        values: its state.
        solution, choice: the axes of its tensors, and which of their positions stay.
    """
    held = names_by_id(model)
    entries, slices, done = {}, [], set()
    runs_along = cache(lambda axis: runs_of(axis, choice))  # many tensors lie along one axis
    for (module, attribute), tensor in named_tensors(model):
        axes = solution.tensors[module, attribute]
        where = tuple(None if (runs := runs_along(axis)) == ((0, axis.size),) else runs for axis in axes)
        if id(tensor) in held:
            name = held[id(tensor)]
            entries[name] = (Source(name, where),)
        elif (
            any(runs is not None for runs in where)
            and (owner := id(model.get_submodule(module)), attribute) not in done
        ):
            done.add((owner, attribute))  # a module may be registered under several names
            slices.append({"do": "slice", "module": module, "attribute": attribute, "index": where})
    shapes = shapes_of(values)
    dtypes = {name: tensor.dtype for name, tensor in values.items()}
    return Plan({name: entries[name] for name in values}, shapes, tuple(slices), structure(model), dtypes)

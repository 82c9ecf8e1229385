"""Plans that keep given positions of given tensors: words, or experts."""

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from torch import Tensor, nn

from surgery.forward import ghost_of, named_tensors
from surgery.hooks import followers
from surgery.names import is_inside, join
from surgery.plan import Edit, Plan, Source, as_runs, structure
from surgery.states import names_by_id, shapes_of, state
from surgery.width.constants import NewSizes

_log = logging.getLogger(__name__)


TensorAxes: TypeAlias = Mapping[tuple[str, str], int]
"""By (module, attribute) of tensors the axis along which they have one position for each token or expert."""


def tensors_along(model: nn.Module, axes: TensorAxes) -> dict[str, tuple[Tensor, int]]:
    """Return the state's tensors along such an axis by name, tied ones once, and axes."""
    held = names_by_id(model)
    named = [(tensor, axes[place]) for place, tensor in named_tensors(model) if place in axes]
    return {held[id(tensor)]: (tensor, axis) for tensor, axis in named if id(tensor) in held}


def keep_rows(model: nn.Module, axes: TensorAxes, positions: Sequence[int]) -> tuple[dict[str, Source], list[Edit]]:
    """Return where kept positions lie, and edits that slice tensors outside a state."""
    runs, held = as_runs(positions), names_by_id(model)
    entries: dict[str, Source] = {}
    edits: list[Edit] = []
    for (module, key), axis in axes.items():
        tensor = getattr(model.get_submodule(module), key)
        index = tuple(runs if i == axis else None for i in range(tensor.ndim))
        if name := held.get(id(tensor)):
            entries[name] = Source(name, index)
        else:
            edits.append({"do": "slice", "module": module, "attribute": key, "index": [*index]})
    return entries, edits


def plan_of_rows(model: nn.Module, entries: Mapping[str, Source], edits: Sequence[Edit]) -> Plan:
    """Return a plan of these entries; a model's or part's configuration follows.

    What a configuration cannot say is logged.

    Args:
        model: the full model; it is not changed.
        entries: by state name of the new model where its tensor lies in the full one.
        edits: what gives the new model its modules and their attributes.
    """
    ghost, values = ghost_of(model), state(model)
    dtypes = {name: tensor.dtype for name, tensor in values.items()}
    sources = {name: (source,) for name, source in entries.items()}
    plan = Plan(sources, shapes_of(values), tuple(edits), structure(model), dtypes)
    more: list[Edit] = []
    for name, part in find_configured(ghost):
        part_plan = _restrict(plan, name, part)
        if part_plan.small_shapes == dict(part_plan.shapes):
            continue
        for follower in followers(part):
            part_edits, problem = follower.width_edits(part, part_plan, NewSizes({}, {}, []), lambda _: None)
            if problem:
                _log.warning(problem)
            more += [{**edit, "module": join(name, edit["module"]).removesuffix(".")} for edit in part_edits]
    return plan.with_edits((*plan.edits, *more))


def find_configured(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the outermost modules, with names, made from a configuration."""
    inside: list[str] = []
    for name, module in model.named_modules():
        if not any(is_inside(name, other) for other in inside) and followers(module):
            inside.append(name)
            yield name, module


def _restrict(plan: Plan, module: str, part: nn.Module) -> Plan:
    """Return the part of a plan that lies in one module."""
    start = len(module) + bool(module)

    def within(named: Mapping[str, Any]) -> dict[str, Any]:
        return {name[start:]: value for name, value in named.items() if is_inside(name, module)}

    entries = {
        n: tuple(s._replace(name=s.name[start:]) for s in sources) for n, sources in within(plan.entries).items()
    }
    edits = [{**e, "module": e["module"][start:]} for e in plan.edits if is_inside(e["module"], module)]
    return Plan(entries, within(plan.shapes), tuple(edits), structure(part), within(plan.dtypes))


def count_edits(modules: Mapping[str, nn.Module], names: re.Pattern, old: int, new: int) -> list[Edit]:
    """Return edits of integers equal to `old` whose names say what they count."""
    return [
        {"do": "set", "module": module, "attribute": key, "value": new}
        for module, held in modules.items()
        for key, value in vars(held).items()
        if type(value) is int and value == old != new and names.search(key)
    ]

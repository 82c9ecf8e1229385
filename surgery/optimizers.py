"""Optimizers that continue after surgery: their states change with the weights."""

import copy
import re
from collections import defaultdict
from collections.abc import Mapping
from functools import cache
from typing import Any, Literal, NamedTuple, TypeVar, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from surgery.errors import SurgeryError
from surgery.plan import Plan, Ranges
from surgery.plan.positions import is_whole, merge_ranges, positions, put, take
from surgery.states import names_by_id, shapes_of, tensors

New = Literal["repeat", "zero"]
AnyOptimizer = TypeVar("AnyOptimizer", bound=Optimizer)


def follow(
    optimizer: AnyOptimizer, before: nn.Module, after: nn.Module, plan: Plan, *, new: New = "repeat"
) -> AnyOptimizer:
    """Return the optimizer of a model after surgery, so that training continues.

    The moments lie as the weights do.

    Of every parameter the entries of its state that have its shape (momentum, first and second moments) are read by
    the plan, as its weights were; counters such as `step` and all that is no tensor stay what they are. A parameter
    without a state, and one that no tensor of the plan lies in, has none afterwards either, and begins at step 0.
    Parameter groups keep their order and options, and their parameters the order that they had.

    Hooks and learning rate schedulers stay with the old optimizer: `scheduler.optimizer = optimizer` takes one along.

    Args:
        optimizer: of any class with states of the parameters' shapes: SGD, Adam, AdamW, NAdam, Adagrad, RMSprop,
            Muon, ... It is not changed and shares no memory with the result.
        before: the model that it trains.
        after: the model that the operation has made.
        plan: the plan that the operation has returned. Either model may be its full one, so that it may come from
            `narrow`, `ungraft`, `prune`, `permute`, `widen` and `graft` alike, or from `compose`.
        new: the moments of positions that only the larger model has, along axes that both have. `repeat`: the moments
            of old positions, in turn, as `widen` repeats weights. `zero`: zeros; for Adam, whose counter continues, it
            means steps up to some 7 times as long there for a while. (Where one tensor is made of several, it is
            zeros in any case.)

    Returns:
        An optimizer of the same class. A new tensor (of a grafted block) joins the group of the tensor before it that
        has its name but for numbers, and no group if that one is in none.

    Raises:
        SurgeryError: if the plan is not one between these models, if the optimizer has parameters of another model, for
            states of other shapes than their tensors that are cut (Adafactor's rows and columns), for LBFGS, and for
            optimizers around others.

    >>> import surgery
    >>> net, x = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 1)), torch.randn(5, 2)
    >>> optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    >>> net(x).sum().backward(), optimizer.step()
    (None, None)
    >>> small, plan = surgery.narrow(net, 0.5, x)
    >>> optimizer = follow(optimizer, net, small, plan)
    >>> {name: tuple(value.shape) for name, value in optimizer.state[small[0].weight].items()}
    {'step': (), 'exp_avg': (2, 2), 'exp_avg_sq': (2, 2)}
    >>> optimizer.param_groups[0]["lr"]
    0.1
    """
    _check(optimizer, before, after, plan, new)
    way = _way(plan, before, after, new)
    old, new_parameters = _parameters(before), _parameters(after)
    groups = _group(optimizer, before, new_parameters, way)
    moved = type(optimizer).__new__(type(optimizer))
    # What else holds a parameter of the old model holds the new one that it has become.
    twins: dict[int, Any] = {
        id(old[o]): tensor for name, tensor in new_parameters.items() for o in way.origins(name) if o in old
    }
    other_state = {key: value for key, value in optimizer.state.items() if not isinstance(key, Tensor)}
    state = defaultdict(dict, copy.deepcopy(other_state, twins))
    elsewhere = _other_shapes(optimizer)
    with torch.no_grad():
        for name in [name for names in groups for name in names]:
            states = {o: optimizer.state[old[o]] for o in way.origins(name) if old.get(o) in optimizer.state}
            if values := _carry(name, states, way, elsewhere, type(optimizer).__name__):
                state[new_parameters[name]] = values
    options: list[dict[str, Any]] = []
    for names, group in zip(groups, optimizer.param_groups):
        rest = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        named = {"param_names": names} if "param_names" in group else {}
        options.append({"params": [new_parameters[name] for name in names], **copy.deepcopy(rest, twins), **named})
    moved.__setstate__({"defaults": copy.deepcopy(optimizer.defaults), "state": state, "param_groups": options})
    for name, value in vars(optimizer).items():
        if name not in vars(moved) and not callable(value):  # schedulers put a `step` of their own there
            setattr(moved, name, copy.deepcopy(value, twins))
    return moved


def _check(optimizer: Any, before: Any, after: Any, plan: Any, new: Any) -> None:
    for label, value, kind in (
        ("optimizer", optimizer, Optimizer),
        ("before", before, nn.Module),
        ("after", after, nn.Module),
        ("plan", plan, Plan),
    ):
        if not isinstance(value, kind):
            raise SurgeryError(f"follow: {label} is a {type(value).__name__}, not a {kind.__name__}", code="argument")
    if new not in get_args(New):
        raise SurgeryError(f"unknown new={new!r}: choose {' or '.join(get_args(New))}", code="argument")
    if isinstance(optimizer, torch.optim.LBFGS) and optimizer.state:
        raise SurgeryError("the state of LBFGS is one vector and cannot follow: make a new one", code="unsupported")
    if around := [name for name, value in vars(optimizer).items() if isinstance(value, Optimizer)]:
        raise SurgeryError(
            f"{type(optimizer).__name__} is around an optimizer, {around[0]!r}: let that one follow instead",
            code="unsupported",
        )


class _PlanDirection(NamedTuple):
    """A plan in an operation's direction: from a model to a part, or to the whole."""

    plan: Plan
    cuts: bool
    new: New

    def origins(self, name: str) -> list[str]:
        """Return which tensors before a tensor after is made of; none for a new one."""
        return [self.plan.entries[name][0].name] if self.cuts else [small for small, _ in self.plan.parts[name]]

    def is_same(self, name: str) -> bool:
        """Return whether a tensor after is one tensor before as it was."""
        held = self.plan.entries[name][:1] if self.cuts else self.plan.parts[name]
        return len(held) == 1 and is_whole(held[0][1])

    def shape_before(self, origin: str) -> tuple[int, ...]:
        return (self.plan.shapes if self.cuts else self.plan.small_shapes)[origin]

    def carry(self, name: str, values: Mapping[str, Tensor]) -> Tensor:
        """Return elements of tensors before, by name, where they lie in a tensor after."""
        if self.cuts:
            ((_, index), *_) = self.plan.entries[name]
            return take(next(iter(values.values())), index)
        held, like = self.plan.parts[name], next(iter(values.values()))
        shape = self.plan.shapes[name]
        if len(held) == 1 and self.new == "repeat":
            for axis, (runs, size) in enumerate(zip(held[0][1], shape)):
                if runs is not None:
                    like = like.index_select(axis, torch.tensor(_repeats(runs, size), device=like.device))
            return like
        result = like.new_zeros(shape)
        for small, index in held:
            if small in values:
                put(result, index, values[small])
        return result


def _way(plan: Plan, before: nn.Module, after: nn.Module, new: New) -> _PlanDirection:
    old_shapes, new_shapes = shapes_of(before), shapes_of(after)
    for cuts, full, small in ((True, old_shapes, new_shapes), (False, new_shapes, old_shapes)):
        if plan.shapes == full and plan.small_shapes == small:
            return _PlanDirection(plan, cuts, new)
    raise SurgeryError(
        "the plan is not one between these two models: give the model that the optimizer trains, the model that the "
        "operation has made of it, and its plan",
        code="mismatch",
    )


@cache  # many tensors lie along one width
def _repeats(runs: Ranges, size: int) -> list[int]:
    """Return for each position of a longer axis the old position it holds or repeats.

    >>> _repeats(((0, 3),), 5), _repeats(((0, 2), (3, 5)), 6), _repeats(((2, 4),), 5)
    ([0, 1, 2, 0, 1], [0, 1, 0, 2, 3, 2], [0, 1, 0, 1, 0])
    """
    first: dict[int, int] = {}
    for place, position in enumerate(positions(runs)):
        first.setdefault(position, place)
    stretches = merge_ranges((p, p + 1) for p in sorted(first))
    result = []
    for position in range(size):
        start, stop = next((s for s in reversed(stretches) if s[0] <= position), stretches[0])
        result.append(first[start + (position - start) % (stop - start)])
    return result


def _parameters(model: nn.Module) -> dict[str, Tensor]:
    """Return a model's parameters by state name; of tied ones the first."""
    return {name: tensor for name, tensor in tensors(model).items() if isinstance(tensor, nn.Parameter)}


def _group(
    optimizer: Optimizer, before: nn.Module, new_parameters: Mapping[str, Tensor], way: _PlanDirection
) -> list[list[str]]:
    """Return the new parameters' names of each group, in the order of the old ones."""
    names = names_by_id(before)
    place: dict[str, tuple[int, int]] = {}  # by name before the group, and where in it
    for number, group in enumerate(optimizer.param_groups):
        for at, tensor in enumerate(group["params"]):
            if id(tensor) not in names:
                raise SurgeryError(
                    f"parameter {at} of group {number} is no tensor of `before`: give the model that is trained",
                    code="mismatch",
                )
            place[names[id(tensor)]] = number, at
    homes: dict[str, tuple[int, int] | None] = {}
    for name in new_parameters:
        if origins := way.origins(name):
            homes[name] = next((place[origin] for origin in origins if origin in place), None)
    order = {name: number for number, name in enumerate(new_parameters)}
    alike = {name: re.sub(r"\d+", "#", name) for name in new_parameters}
    for name in [name for name in new_parameters if name not in homes]:
        kin = [other for other in order if alike[other] == alike[name] and way.origins(other)]
        earlier = [other for other in kin if order[other] < order[name]]
        if not kin and len(optimizer.param_groups) > 1:
            raise SurgeryError(
                f"which of the optimizer's {len(optimizer.param_groups)} groups the new {name!r} joins is not known: "
                "no tensor of the model before has its name but for numbers; use one group, or leave the tensor out "
                "of the plan's full model and add it with add_param_group",
                code="ambiguous",
            )
        homes[name] = homes[(earlier or kin)[-1 if earlier else 0]] if kin else (0, len(names))
    rank = {name: number for number, name in enumerate(names.values())}
    result = []
    for number, group in enumerate(optimizer.param_groups):
        inside = [name for name, home in homes.items() if home and home[0] == number]
        ranks = [rank[names[id(tensor)]] for tensor in group["params"]]
        of_group = {name: home[1] for name, home in homes.items() if home}
        inside.sort(key=order.get if ranks == sorted(ranks) else of_group.get)  # type: ignore[arg-type]
        result.append(inside)
    return result


def _is_count(key: str, value: Tensor, shape: tuple[int, ...]) -> bool:
    """Return whether an entry of a parameter's state is one number for all of it."""
    return key == "step" or value.ndim == 0 or (value.numel() == 1 and value.shape != shape)


def _other_shapes(optimizer: Optimizer) -> dict[str, tuple[int, ...]]:
    """Return shapes of entries that differ from their parameter's, by kind of entry.

    A factor of a square matrix may have its shape all the same.
    """
    return {
        key: tuple(value.shape)
        for tensor, entries in optimizer.state.items()
        if isinstance(tensor, Tensor)
        for key, value in entries.items()
        if isinstance(value, Tensor) and value.shape != tensor.shape and not _is_count(key, value, tensor.shape)
    }


def _carry(
    name: str,
    states: Mapping[str, Mapping[str, Any]],
    way: _PlanDirection,
    other: Mapping[str, tuple[int, ...]],
    kind: str,
) -> dict[str, Any]:
    """Return a new parameter's state from the states of its old parameters."""
    result: dict[str, Any] = {}
    for key in dict.fromkeys(key for entries in states.values() for key in entries):
        values = {origin: entries[key] for origin, entries in states.items() if key in entries}
        tensors = {origin: value for origin, value in values.items() if isinstance(value, Tensor)}
        value: Any = next(iter((tensors or values).values()))
        if way.is_same(name) or isinstance(value, int | float | str | None):
            result[key] = value.clone() if tensors else copy.deepcopy(value)
        elif tensors and _is_count(key, value, way.shape_before(next(iter(tensors)))):
            result[key] = value.clone()
        elif not tensors or key in other:
            reason = f"has the shape {other[key]} for some parameters" if tensors else f"is a {type(value).__name__}"
            raise SurgeryError(
                f"{key!r} in the state of {kind} {reason}, so that it cannot follow {name!r}, which is cut or grown: "
                "make a new optimizer, or use one whose states have the parameters' shapes (AdamW)",
                code="unsupported",
            )
        else:
            result[key] = way.carry(name, tensors)
    return result

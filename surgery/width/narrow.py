"""Contiguous width slicing: a narrower network that keeps the first positions of every hidden width."""

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from surgery.deprecated import formerly, warn_of
from surgery.errors import SurgeryError
from surgery.forward import named_tensors
from surgery.names import joined
from surgery.states import owners, state
from surgery.submodel import Runs, Source, Submodel, as_runs, structure
from surgery.width.axes import Axis, atoms, find, is_fixed, new_size, positions
from surgery.width.corner import corner
from surgery.width.repair import couple, repaired
from surgery.width.trace import Trace, traced
from surgery.width.widths import Heads, Keep, Rounding, choose

_PATIENCE = 4  # couplings that may fail to bring the narrow model further
_NOT_WIDTHS = (
    "order of its positions",
    "by an index",
    "by data",
    "diagonal",
)  # reasons why a layer's channels must not be cut, though the layer makes them


@formerly("model rate example")
def narrow(
    model: nn.Module,
    *,
    rate: float | None = None,
    example: Any = None,
    heads: Heads = "inside",
    rounding: Rounding = math.ceil,
    like: nn.Module | None = None,
) -> tuple[nn.Module, Submodel]:
    """A narrower copy of any module: the first ceil(rate * C) positions of every hidden width C.

    One forward pass in evaluation mode shows which axes of which tensors are one width; another compares every
    operation of the narrow model with what the algebra of axes predicts, so that no wrong model is returned. Both
    run on the meta device if the model can, so that they cost little.

    Args:
        model: any module; it is not changed.
        rate: in (0, 1]; needed.
        example: an input: a tensor, a tuple of arguments or a dict of keyword arguments; needed. Its axes, and those of
            the output (classes), stay whole; so does everything that the forward pass does not use.
        heads: `inside` keeps all heads of an attention and slices inside each of them; `drop` keeps the first heads.
        rounding: from rate * C to the number of positions kept, which is at least one and at most C. `zoo.divisor8`
            gives multiples of 8.
        like: deprecated; use `corner`.

    Returns:
        The narrow module, and the plan that maps its state to the model's.

    Raises:
        SurgeryError: if a width cannot be followed, or the model cannot be made to run with narrow widths.

    >>> import torch
    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(32, 5))
    >>> small, plan = narrow(net, rate=0.5, example=torch.zeros(2, 3, 4, 4))
    >>> small[0], small[3]
    (Conv2d(3, 4, kernel_size=(3, 3), stride=(1, 1)), Linear(in_features=16, out_features=5, bias=True))
    >>> torch.equal(plan.extract(state(net))["0.weight"], net[0].weight[:4])
    True
    """
    if like is not None and rate is None:
        warn_of("narrow(model, like=small)", "corner(model, small)")
        return corner(model, like)
    if rate is None or like is not None:
        raise SurgeryError("narrow takes a rate and an example; to copy the widths of a smaller model use corner")
    if example is None:
        raise SurgeryError("narrow runs one forward pass: give an input as `example`")
    if isinstance(rate, str) or not 0 < rate <= 1:
        raise SurgeryError(f"rate is a share of the width in (0, 1], got {rate}")
    if heads not in ("inside", "drop"):
        raise SurgeryError(f"unknown heads={heads!r}: choose inside or drop")
    values = state(model)
    trace, ghost, example, *_ = traced(model, example)
    keep = choose(trace, rate, heads, rounding)
    if rate < 1:
        _check_followed(trace)
    furthest, patience = -1, _PATIENCE
    while True:
        outcome = repaired(ghost, _plan(ghost, values, trace, keep), trace, keep, example)
        if isinstance(outcome, Submodel):
            return outcome.build(model), outcome
        patience = _PATIENCE if outcome.step > furthest else patience - 1
        furthest = max(furthest, outcome.step)
        again = _coupled(trace, outcome.step, keep, rate, heads, rounding) if patience else None
        if again is None:
            raise SurgeryError(outcome.message)
        keep = again


def _coupled(trace: Trace, step: int, keep: Keep, rate: float, heads: Heads, rounding: Rounding) -> Keep | None:
    """The choice after two widths around a step became one; None if there are no two, or nothing shrinks any more.

    Code may take one width for another of the same size (a head's share from its input's channels).
    """
    if not couple(trace, step, keep):
        return None
    try:
        keep = choose(trace, rate, heads, rounding)
    except SurgeryError:
        return None
    return None if all(map(is_fixed, trace.made)) else keep


def _plan(model: nn.Module, values: Mapping[str, Tensor], trace: Trace, keep: Keep) -> Submodel:
    """Where the kept positions of every tensor lie, and edits that slice the tensors that are not in the state."""
    held = {id(tensor): name for _, _, own in owners(model) for name, tensor in own.items()}
    entries, slices, done = {}, [], set()
    for (module, attribute), tensor in named_tensors(model):
        where = tuple(_runs(axis, keep) for axis in trace.tensors[module, attribute])
        if id(tensor) in held:
            name = held[id(tensor)]
            entries[name] = (Source(name, where),)
        elif (
            any(runs is not None for runs in where)
            and (owner := id(model.get_submodule(module)), attribute) not in done
        ):
            done.add((owner, attribute))  # a module may be registered under several names
            slices.append({"do": "slice", "module": module, "attribute": attribute, "index": where})
    shapes = {name: tuple(tensor.shape) for name, tensor in values.items()}
    dtypes = {name: tensor.dtype for name, tensor in values.items()}
    return Submodel({name: entries[name] for name in values}, shapes, tuple(slices), structure(model), dtypes)


def _runs(axis: Axis, keep: Keep) -> Runs | None:
    kept = new_size(axis, keep)
    return None if kept == axis.size else as_runs(positions(axis, keep))


def _check_followed(trace: Trace) -> None:
    """SurgeryError if an axis could not be followed, or a layer's channels must not be cut for what is done to them."""
    made = {id(find(atom)) for axis in trace.made if is_fixed(axis) for atom in atoms(axis)}
    for (module, attribute), found in trace.tensors.items():
        for i, axis in enumerate(found):
            for atom in atoms(axis):
                why = atom.fixed
                if why.startswith("cannot") or (id(find(atom)) in made and any(word in why for word in _NOT_WIDTHS)):
                    raise SurgeryError(
                        f"axis {i} of {joined(module, attribute)} {tuple(a.size for a in found)} stays whole: {why}; "
                        "narrow the parts around it, or give surgery.width.rules a rule for it"
                    )

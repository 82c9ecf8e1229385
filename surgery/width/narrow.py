"""Contiguous width slicing: a narrower network that keeps the first positions of every hidden width."""

import math
from typing import Any

from torch import nn

from surgery.errors import SurgeryError
from surgery.forward import named_tensors
from surgery.state import owners, state
from surgery.submodel import Runs, Source, Submodel, as_runs, structure
from surgery.width.axes import atoms, find, is_fixed, new_size, positions
from surgery.width.corner import corner
from surgery.width.repair import Stuck, couple, repaired
from surgery.width.trace import Trace, traced
from surgery.width.widths import Rounding, choose

_ATTEMPTS = 200

_PATIENCE = 4  # couplings that may fail to bring the narrow model further
_NOT_WIDTHS = (
    "order of its positions",
    "by an index",
    "by data",
    "diagonal",
)  # a layer's channels, and yet not to be cut


def narrow(
    model: nn.Module,
    rate: float | None = None,
    example: Any = None,
    *,
    like: nn.Module | None = None,
    heads: str = "inside",
    rounding: Rounding = math.ceil,
) -> tuple[nn.Module, Submodel]:
    """A narrower copy of any module: the first ceil(rate * C) positions of every hidden width C.

    One forward pass in evaluation mode shows which axes of which tensors are one width; another compares every
    operation of the narrow model with what the algebra of axes predicts, so that no wrong model is returned. Both
    run on the meta device where the model can, so that they cost little.

    Args:
        model: any module; it is not changed.
        rate: in (0, 1].
        example: needed with a rate, an input: a tensor, a tuple of arguments or a dict of keyword arguments. Its axes,
            and those of the output (classes), stay; so does what the forward pass does not use.
        like: instead of a rate, a smaller model of the same family, with the same names of tensors: the result is a
            copy of it with the leading corner of this model's weights. No forward pass is run.
        heads: `inside` keeps all heads of an attention and slices inside of each; `drop` keeps the first heads.
        rounding: from rate * C to the number of positions kept, which is at least one.

    Returns:
        The narrow module, and the plan that maps its state to the model's.

    Raises:
        SurgeryError: where a width cannot be followed or the model cannot be made to run with it.

    >>> import torch
    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(32, 5))
    >>> small, plan = narrow(net, 0.5, torch.zeros(2, 3, 4, 4))
    >>> small[0], small[3]
    (Conv2d(3, 4, kernel_size=(3, 3), stride=(1, 1)), Linear(in_features=16, out_features=5, bias=True))
    >>> torch.equal(plan.extract(state(net))["0.weight"], net[0].weight[:4])
    True
    """
    if (rate is None) == (like is None):
        raise SurgeryError("give a rate and an example, or a smaller model as `like`")
    if like is not None:
        return corner(model, like)
    if example is None:
        raise SurgeryError("narrow by rate runs one forward pass: give an input as `example`, or a model as `like`")
    if isinstance(rate, str) or not 0 < rate <= 1:
        raise SurgeryError(f"rate is a share of the width in (0, 1], got {rate}")
    if heads not in ("inside", "drop"):
        raise SurgeryError(f"unknown heads={heads!r}: choose inside or drop")
    values = state(model)
    trace, ghost, example = traced(model, example)
    keep = choose(trace, rate, heads, rounding)
    if rate < 1:
        _check_followed(trace)
    furthest, patience = -1, _PATIENCE
    while True:
        try:
            plan = repaired(ghost, _plan(ghost, values, trace, keep), trace, keep, example)
            return plan.build(model), plan
        except Stuck as stuck:
            # Code may take one width for another of the same size (a head's share from its input's channels).
            patience = _PATIENCE if stuck.step > furthest else patience - 1
            furthest = max(furthest, stuck.step)
            if not patience or not couple(trace, stuck.step, keep):
                raise SurgeryError(stuck.message) from None
            try:
                keep = choose(trace, rate, heads, rounding)
            except SurgeryError:
                raise SurgeryError(stuck.message) from None
            if all(map(is_fixed, trace.made)):  # to keep everything is no way out
                raise SurgeryError(stuck.message) from None


def _plan(model: nn.Module, values, trace: Trace, keep) -> Submodel:
    """Where the kept positions of every tensor lie, and edits that slice the tensors that no state holds."""
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
    return Submodel({name: entries[name] for name in values}, shapes, tuple(slices), structure(model))


def _runs(axis, keep) -> Runs | None:
    kept = new_size(axis, keep)
    return None if kept == axis.size else as_runs(positions(axis, keep))


def _check_followed(trace: Trace) -> None:
    """Every axis could be followed, and no layer's width must stay whole because of what is done to its positions."""
    made = {id(find(atom)) for axis in trace.made if is_fixed(axis) for atom in atoms(axis)}
    for (module, attribute), found in trace.tensors.items():
        for i, axis in enumerate(found):
            for atom in atoms(axis):
                why = atom.fixed
                if why.startswith("cannot") or (id(find(atom)) in made and any(word in why for word in _NOT_WIDTHS)):
                    raise SurgeryError(
                        f"axis {i} of {module + '.' if module else ''}{attribute} {tuple(a.size for a in found)} stays "
                        f"whole: {why}; narrow the parts around it, or give surgery.width.rules a rule for it"
                    )

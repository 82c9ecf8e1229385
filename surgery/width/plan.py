"""From a choice of positions to a plan."""

from collections.abc import Callable, Mapping
from functools import cache

from torch import Tensor, nn

from surgery.forward import named_tensors
from surgery.plan import Index, Source, Submodel, structure
from surgery.states import owners
from surgery.width.solved import Axes, Choice, Solution, runs_of


def plan_of(model: nn.Module, values: Mapping[str, Tensor], solution: Solution, choice: Choice) -> Submodel:
    """Where the kept positions of every tensor lie, with edits that slice the tensors that are not in the state.

    Args:
        model: the full model, or a copy of it on the meta device.
        values: its state.
        solution, choice: the axes of its tensors, and which of their positions stay.
    """
    held = {id(tensor): name for _, _, own in owners(model) for name, tensor in own.items()}
    entries, slices, done, index = {}, [], set(), indices(choice)
    for (module, attribute), tensor in named_tensors(model):
        where = index(solution.tensors[module, attribute])
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


def indices(choice: Choice) -> Callable[[Axes], Index]:
    """A function from a tensor's axes to the positions that stay of each; None for an axis that stays whole."""
    places = cache(lambda axis: runs_of(axis, choice))  # many tensors lie along one axis

    def index(found: Axes) -> Index:
        return tuple(None if places(axis) == ((0, axis.size),) else places(axis) for axis in found)

    return index

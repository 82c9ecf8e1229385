"""Operations on several checkpoints: merges, and blocks and layers of several models put together."""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal, cast

import torch
from torch import nn
from torch.nn import functional as F

import surgery
from surgery import merge
from surgery.errors import SurgeryError, explained
from surgery.lazy import LazyState, metas
from surgery.operations.arguments import Blocks, Function, Outside, Whole, batches_of, function_of, shown
from surgery.operations.checkpoint import Built, InBlocks, Model
from surgery.states import check_same


def shuffle(
    models: Sequence[Model],
    *,
    unit: Literal["layer", "block", "tensor"] = "layer",
    seed: Whole = 0,
    derange: bool = False,
) -> list[Model]:
    """Exchange layers between checkpoints: every layer of every one is used exactly once, in a new one.

    Args:
        models: at least two checkpoints of one architecture
        unit: what moves as one piece
        seed: of the draw
        derange: no piece stays in its place

    Returns:
        a new folder, which gets 0.safetensors, 1.safetensors, ...
    """
    if len(models) < 2:
        raise SurgeryError("shuffle exchanges layers between models: give at least two checkpoints")
    firsts = models[0].values.first_names()
    for other in models[1:]:
        check_same(metas(models[0].values), metas(other.values), models[0].what, other.what)
        if other.values.first_names() != firsts:
            raise SurgeryError(f"{models[0].what} and {other.what} tie different tensors: save both in one format")
    tensors = {name: tensor for name, tensor in metas(models[0].values).items() if firsts[name] == name}
    parts = surgery.segments(surgery.layers(tensors, unit=unit))
    draw = torch.Generator().manual_seed(seed)
    swaps = surgery.permutations(len(parts), k=len(models), generator=draw, derange=derange).tolist()
    mixed = []
    for k, model in enumerate(models):
        places = {name: models[swaps[i][k]].values for i, names in enumerate(parts) for name in names}
        mixed.append(model.alike(LazyState({n: places[firsts[n]].pieces(n) for n in models[0].values})))
    return mixed


def passthrough(models: Sequence[InBlocks], *, blocks: Blocks, outside: Outside | None = None) -> Model:
    """Put a network together from blocks of several, as mergekit's passthrough does; models count from 0.

    Args:
        models: the checkpoints; the first says what all looks like that is not named. To repeat a block, give a file
            twice
        blocks: a section of the first model and its new blocks, MODEL:BLOCK or MODEL:FIRST-LAST, such as
            layer3=0:0-4,1:3-5; may be given for several sections
        outside: tensors outside of these sections that another model gives, by name or pattern, such as fc=1

    Returns:
        the new checkpoint; the plan, which cuts the network out of all tensors, those of model K under K.NAME
    """
    if not models or not blocks:
        raise SurgeryError("passthrough needs checkpoints and the new blocks: give --blocks layer3=0:0-4,1:3-5")
    chosen = {str(name): _blocks(str(name), value) for name, value in blocks.items()}
    for pattern, k in (outside or {}).items():
        if type(k) is not int or not 0 <= k < len(models):
            raise SurgeryError(f"outside has {shown(k)} for {pattern!r}: give the number of a model, from 0")
    nets = [model.built() if model.described else model.values for model in models]
    example = models[0].example() if models[0].described else None
    net, plan = merge.passthrough(nets, blocks=chosen, outside=outside, example=example)
    values = plan.extract(merge.union([model.values for model in models]))
    return models[0].becomes(values, cast(nn.Module, net) if models[0].described else None, plan)


def _blocks(section: str, value: Any) -> list[tuple[int, int]]:
    """(model, block) of each.

    >>> _blocks("layer1", "0:0-1,1:1")
    [(0, 0), (0, 1), (1, 1)]
    """
    found: list[tuple[int, int]] = []
    for one in value.split(",") if isinstance(value, str) else value if isinstance(value, list | tuple) else [value]:
        match = re.fullmatch(r"(\d{1,9}):(\d{1,9})(?:-(\d{1,9}))?", one.strip()) if isinstance(one, str) else None
        if match:
            first, last = int(match[2]), int(match[3] or match[2])
            found += [(int(match[1]), block) for block in range(first, min(last, first + 10**5) + 1)]
        elif isinstance(one, list | tuple) and len(one) == 2 and all(type(n) is int for n in one):
            found.append((one[0], one[1]))
        else:
            raise SurgeryError(
                f"the blocks of {section!r} are {shown(value)}: give MODEL:BLOCK or MODEL:FIRST-LAST, several with "
                "commas, such as 0:0-3,1:2"
            )
    return found


def by_numbers(name: str) -> Callable[..., Model]:
    """A method of `surgery.merge` that needs checkpoints and numbers, as an operation with the same arguments."""
    method = getattr(merge, name)

    def operation(models: Sequence[Model], *, base: Model | None = None, **settings: Any) -> Model:
        every = [*models, *([] if base is None else [base])]
        if any(model.module for model in every):  # of tied tensors these have one name only, and so must the others
            for model in every:
                if model.described:
                    model.built()
        if base is not None:
            settings["base"] = base.values
        return models[0].alike(method([model.values for model in models], **settings))

    signature, own = inspect.signature(method), inspect.signature(operation).parameters
    parameters = [
        p.replace(annotation=own[p.name].annotation) if p.name in own else p for p in signature.parameters.values()
    ]
    vars(operation)["__signature__"] = signature.replace(parameters=parameters)
    return operation


def fisher(models: Sequence[Built], *, data: Function, loss: Function | None = None, weights: Any = None) -> Model:
    """Average checkpoints, weighted by their Fisher information on some data.

    Args:
        data: module:function, which gives batches as pairs of inputs and targets
        loss: module:function of outputs and targets [cross-entropy]
        weights: as for `surgery.merge.fisher`
    """
    measure = F.cross_entropy if loss is None else function_of(loss, "loss")
    batches = batches_of(data)
    if odd := [one for one in batches if not isinstance(one, list | tuple) or len(one) != 2]:
        raise SurgeryError(f"data {data} gives a {type(odd[0]).__name__}: give pairs of inputs and targets")
    with _measuring("fisher", data):
        known = [merge.fisher_information(model.loaded(), batches, loss=measure) for model in models]
    return models[0].alike(merge.fisher([model.values for model in models], fishers=known, weights=weights))


def regmean(models: Sequence[Built], *, data: Function, alpha: Any = 0.9, weights: Any = None) -> Model:
    """Merge linear layers so that their outputs are closest to those of all models on some data.

    Args:
        data: module:function, which gives batches of inputs
        alpha, weights: as for `surgery.merge.regmean`
    """
    batches = batches_of(data)
    with _measuring("regmean", data):
        known = [merge.input_grams(model.loaded(), batches) for model in models]
    values = [model.values for model in models]
    return models[0].alike(merge.regmean(values, grams=known, weights=weights, alpha=alpha))


def greedy_soup(models: Sequence[Built], *, score: Function) -> Model:
    """Average those checkpoints that do not lower a score.

    Args:
        score: module:function, from a model in evaluation mode, or where the model is not known from a state dict, to
            a number; larger is better
    """
    function = function_of(score, "score")
    models[0].before()
    known = models[0].described
    if known:
        for model in models:
            model.built()

    def scored(values: Mapping[str, torch.Tensor]) -> float:
        found = function(surgery.load(models[0].built(), dict(values)).eval() if known else dict(values))
        try:
            return float(found)
        except (TypeError, ValueError, RuntimeError):
            raise SurgeryError(f"score {score} gives a {type(found).__name__}, and should give a number") from None

    return models[0].alike(merge.greedy_soup([model.values for model in models], score=scored).state)


def _measuring(method: str, data: str) -> AbstractContextManager[None]:
    hint = "; give batches that the model takes, and for models that return more than logits a loss"
    return explained(f"{method} cannot be measured on data {data}", hint)

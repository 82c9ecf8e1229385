"""Operations on several checkpoints: merges."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.nn import functional as F

import surgery
from surgery import merging
from surgery.errors import SurgeryError, explained
from surgery.operations.arguments import Function, batches_of, function_of
from surgery.operations.checkpoint import Built, Model


def by_numbers(name: str) -> Callable[..., Model]:
    """A method of `surgery.merging` that needs checkpoints and numbers, as an operation with the same arguments."""
    method = getattr(merging, name)

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
        weights: as for `surgery.merging.fisher`
    """
    measure = F.cross_entropy if loss is None else function_of(loss, "loss")
    batches = batches_of(data)
    if odd := [one for one in batches if not isinstance(one, list | tuple) or len(one) != 2]:
        raise SurgeryError(f"data {data} gives a {type(odd[0]).__name__}: give pairs of inputs and targets")
    with _measuring("fisher", data):
        known = [merging.fisher_information(model.loaded(), batches, loss=measure) for model in models]
    return models[0].alike(merging.fisher([model.values for model in models], fishers=known, weights=weights))


def regmean(models: Sequence[Built], *, data: Function, alpha: Any = 0.9, weights: Any = None) -> Model:
    """Merge linear layers so that their outputs are closest to those of all models on some data.

    Args:
        data: module:function, which gives batches of inputs
        alpha, weights: as for `surgery.merging.regmean`
    """
    batches = batches_of(data)
    with _measuring("regmean", data):
        known = [merging.input_grams(model.loaded(), batches) for model in models]
    values = [model.values for model in models]
    return models[0].alike(merging.regmean(values, grams=known, weights=weights, alpha=alpha))


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

    return models[0].alike(merging.greedy_soup([model.values for model in models], score=scored).state)


def _measuring(method: str, data: str) -> AbstractContextManager[None]:
    hint = "; give batches that the model takes, and for models that return more than logits a loss"
    return explained(f"{method} cannot be measured on data {data}", hint)

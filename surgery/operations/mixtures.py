"""Operations on several checkpoints, other than the methods of `surgery.merge` that need numbers only."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from surgery.decomposition import layers
from surgery.errors import SurgeryError, first_line
from surgery.lazy import LazyState, metas, pieces_of
from surgery.merge.assembly import passthrough as assembled
from surgery.merge.assembly import union
from surgery.merge.averages import fisher as fisher_mean
from surgery.merge.averages import greedy_soup as soup_of
from surgery.merge.averages import regmean as regression_mean
from surgery.merge.driver import check_patterns, switch
from surgery.merge.information import fisher_information, input_grams
from surgery.operations.given import choice, function_of, whole
from surgery.operations.orders import batches_of
from surgery.operations.subject import Subject
from surgery.operations.texts import shown
from surgery.recombine import permutations, segments
from surgery.states import check_same, load
from surgery.width.choose import matches

UNITS = ("layer", "block", "tensor")
"""What moves as one piece when models are shuffled."""


def shuffle(models: Sequence[Subject], *, unit: str = "layer", seed: int = 0, derange: bool = False) -> list[Subject]:
    """Exchange pieces between models: every piece of every one is used exactly once, in a new one."""
    if len(models) < 2:
        raise SurgeryError("shuffle exchanges layers between models: give at least two checkpoints")
    for other in models[1:]:
        check_same(metas(models[0].values), metas(other.values), models[0].what, other.what)
    parts = segments(layers(metas(models[0].values), unit=choice("unit", unit, UNITS)))
    draw = torch.Generator().manual_seed(whole("seed", seed))
    swaps = permutations(len(parts), k=len(models), generator=draw, derange=switch("derange", derange)).tolist()
    mixed = []
    for k, model in enumerate(models):
        places = {name: models[swaps[i][k]].values for i, names in enumerate(parts) for name in names}
        mixed.append(model.alike(LazyState({n: places[n].pieces(n) for n in models[0].values})))
    return mixed


def passthrough(
    models: Sequence[Subject],
    *,
    blocks: Mapping[str, Any],
    outside: Mapping[str, int] | None = None,
) -> Subject:
    """Put a network together from the blocks of several.

    Args:
        blocks: by name of a section of the first model its new blocks in order, as text `0:0-3,1:2` (blocks 0 to 3 of
            model 0, then block 2 of model 1) or as pairs [model, block]; all numbers count from 0.
        outside: by patterns of names of other tensors the model that they come from; the first model, if none matches.
    """
    if not isinstance(blocks, Mapping) or not blocks:
        raise SurgeryError(f"blocks={shown(blocks)}: give entries SECTION: BLOCKS, such as layer1: 0:0-1,1:1")
    if not isinstance(outside or {}, Mapping):
        raise SurgeryError(f"outside={shown(outside)}: give entries PATTERN: MODEL, such as fc: 1")
    chosen = {str(name): _blocks(str(name), value) for name, value in blocks.items()}
    for pattern, k in (outside or {}).items():
        if type(k) is not int or not 0 <= k < len(models):
            raise SurgeryError(f"outside has {shown(k)} for {pattern!r}: give the number of a model, from 0")
        check_patterns("outside", {pattern: k}, models[0].values)
    nets = [model.built() if model.described else model.values for model in models]
    example = models[0].example() if models[0].described else None
    net, plan = assembled(nets, blocks=chosen, outside=outside, example=example)
    values = plan.extract(union([model.values for model in models]))
    return models[0].becomes(values, net if models[0].described else None, plan)


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


def replace(first: Subject, *, others: Mapping[str, Subject]) -> Subject:
    """The first model with the tensors that match a pattern taken from another one."""
    for pattern in others:
        check_patterns("others", {pattern: 0}, first.values)
    entries = {}
    for name in first.values:
        source = next((one.values for pattern, one in others.items() if matches(name, pattern)), first.values)
        if name not in source or pieces_of(source, name).shape != first.values.pieces(name).shape:
            raise SurgeryError(f"tensor {name!r} is missing in the other model, or has another shape")
        entries[name] = pieces_of(source, name)
    return first.alike(LazyState(entries))


def fisher(models: Sequence[Subject], *, data: str, loss: str | None = None, weights: Any = None) -> Subject:
    """The mean of models weighted by their Fisher information, which is measured on some data; needs their model.

    Args:
        data: module:function, which gives batches as pairs of inputs and targets.
        loss: module:function of outputs and targets [cross-entropy].
    """
    measure = F.cross_entropy if loss is None else function_of(loss, "loss")
    batches = batches_of(data)
    if odd := [one for one in batches if not isinstance(one, list | tuple) or len(one) != 2]:
        raise SurgeryError(f"data {data} gives a {type(odd[0]).__name__}: give pairs of inputs and targets")
    known = [
        _measured("fisher", data, lambda m=m: fisher_information(m.loaded(), batches, loss=measure)) for m in models
    ]
    return _merged(models, fisher_mean([model.values for model in models], fishers=known, weights=weights))


def regmean(models: Sequence[Subject], *, data: str, alpha: Any = 0.9, weights: Any = None) -> Subject:
    """Linear layers whose outputs are closest to those of all models on some data; needs their model.

    Args:
        data: module:function, which gives batches of inputs.
        alpha: as for `surgery.merge.regmean`.
    """
    batches = batches_of(data)
    known = [_measured("regmean", data, lambda m=m: input_grams(m.loaded(), batches)) for m in models]
    return _merged(models, regression_mean([m.values for m in models], grams=known, weights=weights, alpha=alpha))


def greedy_soup(models: Sequence[Subject], *, score: str) -> Subject:
    """The mean of those models that do not lower a score.

    Args:
        score: module:function, from a model in evaluation mode, or where the model is not known from a state dict, to
            a number; larger is better.
    """
    function = function_of(score, "score")
    models[0].before()
    values = [model.values for model in models]
    if models and models[0].described:
        net = models[0].built()
        values = [model.values for model in models if model.built() is not None]

    def scored(values: LazyState) -> float:
        found = function(load(net, dict(values)).eval() if models[0].described else dict(values))
        try:
            return float(found)
        except (TypeError, ValueError, RuntimeError):
            raise SurgeryError(f"score {score} gives a {type(found).__name__}, and should give a number") from None

    return _merged(models, soup_of(values, score=scored).state)


def _measured(method: str, data: str, measure) -> Any:
    try:
        return measure()
    except SurgeryError:
        raise
    except Exception as error:  # of the user's model on the user's data
        raise SurgeryError(
            f"{method} cannot be measured on data {data} ({type(error).__name__}: {first_line(error)}): give batches "
            "that the model takes, and for models that return more than logits a loss"
        ) from None


def _merged(models: Sequence[Subject], values: Any) -> Subject:
    return models[0].alike(values)

"""Whether a model that caches keys and values gives the same outputs with its cache as without it."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from surgery.copying import clone
from surgery.errors import SurgeryError, first_line
from surgery.forward import arguments, in_mode, tensors_in

_TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-4}  # half precision: 0.05
_TOKENS = ("decoder_input_ids", "decoder_inputs_embeds", "input_ids", "inputs_embeds")


def offers_cache(model: nn.Module) -> bool:
    """Whether the model's forward takes `use_cache`, as HuggingFace's decoders do.

    >>> offers_cache(nn.Linear(2, 2))
    False
    """
    return "use_cache" in _parameters(model)


def uncached(model: nn.Module, example: Any) -> tuple[tuple, dict[str, Any]]:
    """What to call a model with for an example so that it does not cache: a deeper model's cache has more tensors."""
    args, kwargs = arguments(example)
    return args, {**kwargs, "use_cache": False} if "use_cache" in _parameters(model)[len(args) :] else kwargs


def check_cached(before: nn.Module, after: nn.Module, example: Any) -> None:
    """Check that `after` gives the same outputs with its cache as without, if `before` does.

    The outputs of one pass are compared with those of a pass with `use_cache=True`, and with those of a pass over all
    tokens but the last and another that goes on from its cache. Nothing is done for models whose forward does not take
    `use_cache`, nor on the meta device, where nothing has a value.

    Raises:
        SurgeryError: if outputs differ: two blocks share a slot of the cache, or a block has none.
    """
    tensors = (*after.parameters(), *tensors_in(arguments(example)))
    if not offers_cache(after) or any(tensor.is_meta for tensor in tensors):
        return
    why = _difference(after, example)
    if why and not _difference(before, example):
        raise SurgeryError(
            f"{type(after).__name__} would {why}: its blocks have to find their slots in the cache; give each "
            "block its number as an integer attribute (layer_idx), or leave the sections as they are"
        )


def _difference(model: nn.Module, example: Any) -> str:
    """How outputs with and without the cache differ; "" if they do not."""
    try:
        model = clone(model)
        with in_mode(model, training=False):
            given = _by_name(model, example)
            expected = _outputs(model(**{**given, "use_cache": False}))
            if far := _distance(_outputs(model(**{**given, "use_cache": True})), expected):
                return f"give other outputs with use_cache=True, by {far:.2g}"
            begin, rest = _split(given)
            first = _outputs(model(**{**begin, "use_cache": True})) if begin else {}
            takes = _parameters(model)
            carried = {key: value for key, value in first.items() if key in takes and key not in given}
            if carried and (far := _distance(_outputs(model(**{**rest, **carried, "use_cache": True})), expected)):
                return f"give other outputs when it goes on from its cache, by {far:.2g}"
    except SurgeryError:
        raise
    except Exception as error:  # a forward pass may raise anything
        return f"not run with its cache ({first_line(error)})"
    return ""


def _by_name(model: nn.Module, example: Any) -> dict[str, Any]:
    args, kwargs = arguments(example)
    return {**dict(zip(_parameters(model), args)), **kwargs}


def _parameters(model: nn.Module) -> list[str]:
    """The names of the parameters of a model's forward; none if its signature cannot be read."""
    try:
        return list(inspect.signature(model.forward).parameters)
    except (TypeError, ValueError):
        return []


def _split(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments for all tokens but the last, and those for the last; nothing if that is not known.

    Masks of the tokens stay whole in the second: they are about the cached tokens, too.
    """
    tokens = next((name for name in _TOKENS if isinstance(given.get(name), Tensor)), None)
    if tokens is None or given[tokens].ndim < 2 or given[tokens].shape[1] < 2:
        return {}, {}
    shape, decoder = given[tokens].shape[:2], tokens.startswith("decoder_")
    along = {
        key: value
        for key, value in given.items()
        if isinstance(value, Tensor) and value.shape[:2] == shape and key.startswith("decoder_") == decoder
    }
    rest = {key: value[:, -1:] for key, value in along.items() if not key.endswith("mask")}
    return {**given, **{key: value[:, :-1] for key, value in along.items()}}, {**given, **rest}


def _outputs(output: Any) -> dict[str, Any]:
    """Outputs by name; the fields of a mapping or of an object with attributes, otherwise by position."""
    if isinstance(output, Mapping):
        return dict(output)
    if isinstance(output, tuple):
        return output._asdict() if hasattr(output, "_asdict") else {str(i): value for i, value in enumerate(output)}
    return {"0": output} if isinstance(output, Tensor) else dict(vars(output))


def _distance(outputs: Mapping[str, Any], expected: Mapping[str, Any]) -> float:
    """The largest difference of outputs of one name; 0 if it is that of rounding. The last token may stand alone."""
    largest = 0.0
    for key, value in outputs.items():
        other = expected.get(key)
        if not isinstance(value, Tensor) or not isinstance(other, Tensor) or not value.is_floating_point():
            continue
        if value.ndim > 1 and value.shape[1] == 1:
            other = other[:, -1:]
        if value.shape == other.shape:
            far = float((value - other).abs().max())
            close = _TOLERANCE.get(value.dtype, 0.05) * (1 + float(other.abs().max()))
            largest = max(largest, 0.0 if far <= close else far if far == far else float("inf"))
    return largest

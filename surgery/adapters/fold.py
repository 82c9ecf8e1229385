"""Adapters folded into states, tensor by tensor, with no model around them."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from surgery.adapters.layer import add_change, product
from surgery.adapters.peft import check_tied, read_files, scales_of, without_base
from surgery.adapters.rank import Factors, factors
from surgery.errors import SurgeryError
from surgery.lazy import LazyState, Pieces, pieces_of
from surgery.names import join


def fold(values: Mapping[str, Tensor], folder: str | Path, *, subtract: bool = False) -> LazyState:
    """Return a state with the adapter of peft's folder in its weights.

    Each weight becomes W + scale B A, or as in DoRA, and is computed when it is read.

    Sums are computed in float32 at least, and have the state's dtypes. In float32 it is what `merge` makes of the
    model, bit for bit. Two names of one tensor are refused. A state with one of them, or one that is read from a file,
    does not say that modules share it; `read_peft` refuses these.

    Args:
        values: of the base, by the names that the adapter's model has.
        folder: as `write_peft` or peft's save_pretrained wrote it. What was trained whole replaces the base's.
        subtract: take the adapter out of weights again that it was folded into.

    Raises:
        SurgeryError: for an adapter that `read_peft` refuses, that does not fit, or that cannot be taken out.
    """
    config, tensors = read_files(folder)
    without_base(folder, tensors, None if subtract else values)
    (adapters, rest), scales = factors(tensors), scales_of(config, tensors)
    if subtract and (dora := [name for name, adapter in adapters.items() if adapter.magnitude is not None]):
        raise SurgeryError(
            f"{folder}: the adapter of {dora[0]!r} is DoRA's: use surgery.adapters.unmerge, on the model",
            code="unsupported",
        )
    if subtract and rest:
        raise SurgeryError(
            f"{folder}: {next(iter(rest))!r} was trained whole: what it was before is not known", code="unsupported"
        )
    if not isinstance(values, LazyState):
        check_tied(values.items(), rest, "merge it in peft")
        check_tied(values.items(), {join(name, "weight") for name in adapters}, "merge it in peft", "has an adapter")
    result = {name: pieces_of(values, name) for name in values}
    for name, tensor in rest.items():
        if _of(folder, name, name, result).shape != tuple(tensor.shape):
            raise SurgeryError(f"{folder}: {name!r} is {list(tensor.shape)}, not {result[name].shape}", code="mismatch")
        result[name] = Pieces.of(tensor.to(result[name].dtype))
    turned = _find_turned(folder, config, adapters, result)
    for module, adapter in adapters.items():
        name = join(module, "weight")
        scale = -scales[module] if subtract else scales[module]
        base = result[name]
        make = partial(_fold, base, adapter, scale, turned[module])
        result[name] = Pieces.from_function(base.shape, base.dtype, make, base.device)
    return LazyState(result, getattr(values, "label", ""))


def _of(folder: str | Path, name: str, adapted: str, entries: Mapping[str, Pieces]) -> Pieces:
    """Return the tensor of the base that one of the adapter belongs to."""
    if name not in entries:
        raise SurgeryError(f"{folder}: {adapted!r} belongs to {name!r}, which the base does not have", code="mismatch")
    return entries[name]


def _find_turned(
    folder: str | Path, config: Mapping[str, Any], adapters: Mapping[str, Factors], entries: Mapping[str, Pieces]
) -> dict[str, bool]:
    """Return whether each adapted weight is [in, out], as in embeddings and Conv1D.

    The shape says it, but for square ones: for these the configuration does, which has one word for all modules.
    """
    result, square = {}, []
    declared = bool(config.get("fan_in_fan_out"))
    linear = set()
    for module, adapter in adapters.items():
        base = _of(folder, join(module, "weight"), adapter.names[0], entries)
        shape = (len(adapter.b), *adapter.a.shape[1:])
        table = "lora_embedding_A" in adapter.names[0]
        ways = (shape[::-1],) if table else (shape, shape[::-1]) if len(shape) == 2 else (shape,)
        if not base.dtype.is_floating_point or base.shape not in ways:
            raise SurgeryError(
                f"{folder}: the adapter of {module!r} makes {shape}; the weight is {base.shape}, {base.dtype}",
                code="mismatch",
            )
        result[module] = table or base.shape != shape
        if not table and shape == shape[::-1]:
            square.append(module)
        elif not table and len(shape) == 2:
            linear.add(result[module])
    if square and linear - {declared}:
        raise SurgeryError(
            f"{folder}: is the square weight of {square[0]!r} [out, in]? use read_peft and merge, on the model",
            code="ambiguous",
        )
    return result | dict.fromkeys(square, declared)


def _fold(base: Pieces, adapter: Factors, scale: float, turned: bool) -> Tensor:
    dtype = torch.promote_types(torch.promote_types(base.dtype, adapter.a.dtype), torch.float32)
    change = product(adapter.a.to(base.device, dtype), adapter.b.to(base.device, dtype), scale)
    magnitude = None if adapter.magnitude is None else adapter.magnitude.to(base.device)
    return add_change(base.whole(), change.T if turned else change.view(base.shape), magnitude, turned)

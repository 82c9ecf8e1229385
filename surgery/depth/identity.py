"""Make grafted blocks start as the identity: zero the last tensors of their residual branches, and check by running."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from surgery.edits import passed_on
from surgery.errors import SurgeryError
from surgery.forward import tensors_in

_TOLERANCE = 1e-5


@torch.no_grad()
def zero_branches(
    model: nn.Module, deeper: nn.Module, grafted: Mapping[str, Sequence[nn.Module]], example: Any
) -> None:
    """Zero parameters of the new blocks of `deeper`, in place, so that its outputs are those of `model`.

    Args:
        model: the model before; not changed.
        deeper: the model with the new blocks.
        grafted: the copies (modules of `deeper`) of each repeated block, by its name in `model`.
        example: an input of the model, or a tuple of inputs.

    Raises:
        SurgeryError: if a block is not the identity when its weights are zero: it has no residual branch, or ends with
            a norm, as in post-norm transformers.
    """
    inputs = example if isinstance(example, tuple) else (example,)
    if any(tensor.is_meta for tensor in (*model.parameters(), *tensors_in(inputs))):
        raise SurgeryError(
            "mode='identity' compares outputs, but meta tensors have no values: move the model to another device"
        )
    reference = copy.deepcopy(model).eval()
    calls: dict[str, tuple] = {}
    for name in grafted:
        reference.get_submodule(name).register_forward_hook(
            lambda _, args, kwargs, out, name=name: calls.__setitem__(name, (args, kwargs, out)), with_kwargs=True
        )
    expected = reference(*inputs)
    for name, copies in grafted.items():
        if name not in calls:
            raise SurgeryError(
                f"block {name!r} is not called on the example, so its copies cannot be made the identity"
            )
        args, kwargs, out = calls[name]
        names = _to_zero(name, copy.deepcopy(copies[0]).eval(), passed_on(out, args), kwargs)
        for block in copies:
            for parameter, tensor in block.named_parameters():
                if parameter in names:
                    tensor.zero_()
    if not _close(copy.deepcopy(deeper).eval()(*inputs), expected):
        raise SurgeryError(f"the copies of {', '.join(grafted)} change the model's output: use mode='copy'")


def _to_zero(name: str, block: nn.Module, inputs: tuple, kwargs: Mapping[str, Any]) -> set[str]:
    """Parameters that make the block the identity when they are zero: as few and as late ones as possible."""
    parameters = dict(block.named_parameters())
    values = {n: p.clone() for n, p in parameters.items()}
    for parameter in parameters.values():
        parameter.zero_()
    silent = block(*inputs, **kwargs)
    if not _close(silent, inputs[0] if not isinstance(silent, tuple) or isinstance(inputs[0], tuple) else inputs):
        raise SurgeryError(
            f"block {name!r} is not the identity when its weights are zero (it ends with a norm, or has no residual "
            "branch): use mode='copy'"
        )
    zero = set(parameters)
    for n, parameter in parameters.items():
        parameter.copy_(values[n])
        # If it is still multiplied by a zero later on, it changes nothing at all, so equality is exact.
        if all(map(torch.equal, tensors_in(block(*inputs, **kwargs)), tensors_in(silent))):
            zero.remove(n)
        else:
            parameter.zero_()
    return zero


def _close(a: Any, b: Any) -> bool:
    pairs = list(zip(tensors_in(a), tensors_in(b)))
    return bool(pairs) and all(
        x.shape == y.shape and torch.allclose(x, y, rtol=_TOLERANCE, atol=_TOLERANCE * (1 + float(y.abs().max())))
        for x, y in pairs
        if x.is_floating_point()
    )

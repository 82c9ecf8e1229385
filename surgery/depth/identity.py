"""Make grafted blocks start as the identity: zero the last tensors of their residual branches, and check by running."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from surgery.depth.cache import offers_cache
from surgery.depth.tree_edits import runs_nothing
from surgery.edits import clone
from surgery.errors import SurgeryError
from surgery.forward import arguments, tensors_in

_TOLERANCE = 1e-5


@torch.no_grad()
def zero_branches(
    model: nn.Module, deeper: nn.Module, grafted: Mapping[str, Sequence[nn.Module]], example: Any
) -> None:
    """Zero parameters of the new blocks of `deeper`, in place, so that its outputs are those of `model`.

    A new block's first output then equals its first input. What else it returns may differ, as long as the model's
    outputs stay the same.

    Args:
        model: the model before; not changed.
        deeper: the model with the new blocks.
        grafted: the copies (modules of `deeper`) of each repeated block, by its name in `model`.
        example: the model's input, see `surgery.forward.arguments`.

    Raises:
        SurgeryError: if a block is not the identity when its weights are zero: it has no residual branch, or ends with
            a norm, as in post-norm transformers.
    """
    args, kwargs = arguments(example)
    if any(tensor.is_meta for tensor in (*model.parameters(), *tensors_in((args, kwargs)))):
        raise SurgeryError(
            "mode='identity' compares outputs, but meta tensors have no values: move the model to another device"
        )
    if offers_cache(model):
        kwargs["use_cache"] = False
    expected = clone(model).eval()(*args, **kwargs)
    for name, copies in grafted.items():
        zero = _to_zero(name, deeper, copies, (args, kwargs), expected)
        for block in copies:
            for parameter, tensor in block.named_parameters():
                if parameter in zero:
                    tensor.zero_()
    if not _close(clone(deeper).eval()(*args, **kwargs), expected):
        raise SurgeryError(f"the copies of {', '.join(grafted)} change the model's output: use mode='copy'")


def _to_zero(
    name: str, deeper: nn.Module, copies: Sequence[nn.Module], given: tuple[tuple, dict], expected: Any
) -> set[str]:
    """Parameters that make the copies of a block the identity when they are zero: as few and as late as possible."""
    names = {id(module): place for place, module in deeper.named_modules()}
    whole = clone(deeper).eval()
    blocks = [whole.get_submodule(names[id(block)]) for block in copies]
    if runs_nothing(copies[0]):  # such as a list of an attention and a feed-forward: only the model's outputs show it

        def run() -> list[Tensor]:
            return tensors_in(whole(*given[0], **given[1]))

        _zero(blocks)
        silent = run()
        identical = _close(silent, expected)
    else:
        inputs = _inputs(name, whole, blocks[0], given)
        blocks = blocks[:1]
        _zero(blocks)
        args, kwargs = copy.deepcopy(inputs)
        streams = _unchanged(blocks[0](*args, **kwargs), *inputs)
        identical = 0 in streams

        def run() -> list[Tensor]:
            args, kwargs = copy.deepcopy(inputs)  # a block may change a list or a cache that it is given
            found = _entries(blocks[0](*args, **kwargs))
            return tensors_in([found[i] for i in streams])

        silent = run()
    if not identical:
        raise SurgeryError(
            f"block {name!r} is not the identity when its weights are zero (it ends with a norm, or has no residual "
            "branch): use mode='copy'"
        )
    zero = set()
    for parameter, value in copies[0].named_parameters():
        for block in blocks:
            block.get_parameter(parameter).copy_(value)
        # If it is still multiplied by a zero later on, it changes nothing at all, so equality is exact.
        if not all(map(torch.equal, run(), silent)):
            zero.add(parameter)
            for block in blocks:
                block.get_parameter(parameter).zero_()
    return zero


def _zero(blocks: Sequence[nn.Module]) -> None:
    for block in blocks:
        for parameter in block.parameters():
            parameter.zero_()


def _inputs(name: str, model: nn.Module, block: nn.Module, given: tuple[tuple, dict]) -> tuple[tuple, dict]:
    """What the model calls a block with."""
    seen: list[tuple[tuple, dict]] = []

    def note(_: nn.Module, args: tuple, kwargs: dict) -> None:
        seen.append(copy.deepcopy((args, kwargs)))

    handle = block.register_forward_pre_hook(note, with_kwargs=True)
    model(*given[0], **given[1])
    handle.remove()
    if not seen:
        raise SurgeryError(f"block {name!r} is not called on the example, so its copies cannot be made the identity")
    return seen[0]


def _unchanged(output: Any, args: tuple, kwargs: Mapping[str, Any]) -> list[int]:
    """Which of a block's outputs equal the inputs in their places."""
    inputs = (args[0] if isinstance(args[0], tuple) else args) if args else tensors_in(kwargs)
    return [i for i, (out, given) in enumerate(zip(_entries(output), inputs)) if _close(out, given)]


def _entries(output: Any) -> Sequence[Any]:
    return output if isinstance(output, tuple) else [output]


def _close(a: Any, b: Any) -> bool:
    pairs = list(zip(tensors_in(a), tensors_in(b)))
    return bool(pairs) and all(
        x.shape == y.shape and torch.allclose(x, y, rtol=_TOLERANCE, atol=_TOLERANCE * (1 + float(y.abs().max())))
        for x, y in pairs
        if x.is_floating_point()
    )

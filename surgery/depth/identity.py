"""Make grafted blocks start as the identity: zero the last tensors of their residual branches, and check by running."""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from surgery.copying import clone
from surgery.depth.check import uncached
from surgery.depth.splice import runs_nothing
from surgery.errors import SurgeryError
from surgery.forward import tensors_in

Call: TypeAlias = tuple[tuple, dict[str, Any]]  # the arguments of a call
Runs: TypeAlias = Callable[[], list[Tensor]]  # runs something, for those of its outputs that must not change

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
    args, kwargs = uncached(model, example)
    if any(tensor.is_meta for tensor in (*model.parameters(), *tensors_in((args, kwargs)))):
        raise SurgeryError(
            "mode='identity' compares outputs, but meta tensors have no values: move the model to another device"
        )
    expected = clone(model).eval()(*args, **kwargs)
    names = {id(module): name for name, module in deeper.named_modules()}
    trial = clone(deeper).eval()
    tried = {name: [trial.get_submodule(names[id(block)]) for block in copies] for name, copies in grafted.items()}
    inputs = _inputs(trial, [blocks[0] for blocks in tried.values()], (args, kwargs))
    for parameter in (p for blocks in tried.values() for block in blocks for p in block.parameters()):
        parameter.zero_()
    for name, copies in grafted.items():
        blocks = tried[name]
        if runs_nothing(copies[0]):  # such as a list of two modules: only the model's outputs show what it does
            runs = _model_runs(trial, (args, kwargs), expected)
        elif id(blocks[0]) in inputs:
            runs, blocks = _block_runs(blocks[0], *inputs[id(blocks[0])]), blocks[:1]
        else:
            raise SurgeryError(
                f"block {name!r} is not called on the example, so its copies cannot be made the identity"
            )
        if runs is None:
            raise SurgeryError(
                f"block {name!r} is not the identity when its weights are zero (it ends with a norm, or has no "
                "residual branch): use mode='copy'"
            )
        zero = _to_zero(copies[0], blocks, runs)
        for parameter in (p for block in copies for key, p in block.named_parameters() if key in zero):
            parameter.zero_()
    if not _close(clone(deeper).eval()(*args, **kwargs), expected):
        raise SurgeryError(f"the copies of {', '.join(grafted)} change the model's output: use mode='copy'")


def _model_runs(model: nn.Module, given: Call, expected: Any) -> Runs | None:
    """Run the model; None if its outputs are not the expected ones."""

    def run() -> list[Tensor]:
        return tensors_in(model(*given[0], **given[1]))

    return run if _close(run(), expected) else None


def _block_runs(block: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Runs | None:
    """Run a block for those of its outputs that equal inputs; None if the first does not."""

    def outputs() -> Sequence[Any]:
        given, named = copy.deepcopy((args, kwargs))  # a block may change a list or a cache that it is given
        output = block(*given, **named)
        return output if isinstance(output, tuple) else [output]

    inputs = (args[0] if isinstance(args[0], tuple) else args) if args else tensors_in(kwargs)
    same = [i for i, (output, given) in enumerate(zip(outputs(), inputs)) if _close(output, given)]

    def run() -> list[Tensor]:
        found = outputs()
        return tensors_in([found[i] for i in same])

    return run if 0 in same else None


def _to_zero(block: nn.Module, zeroed: Sequence[nn.Module], run: Runs) -> set[str]:
    """The parameters of a block that must be zero, as few and as late ones as possible.

    `zeroed` are copies of it that `run` runs, with zeros for parameters; the values of the others are put back.
    """
    silent, zero = run(), set()
    for name, value in block.named_parameters():
        for copied in zeroed:
            copied.get_parameter(name).copy_(value)
        # If it is still multiplied by a zero later on, it changes nothing at all, so equality is exact.
        if not all(map(torch.equal, run(), silent)):
            zero.add(name)
            for copied in zeroed:
                copied.get_parameter(name).zero_()
    return zero


def _inputs(model: nn.Module, blocks: Sequence[nn.Module], given: Call) -> dict[int, Call]:
    """What the model calls blocks with, by their ids."""
    seen: dict[int, Call] = {}

    def note(block: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        seen.setdefault(id(block), copy.deepcopy((args, kwargs)))

    handles = [block.register_forward_pre_hook(note, with_kwargs=True) for block in blocks]
    model(*given[0], **given[1])
    for handle in handles:
        handle.remove()
    return seen


def _close(a: Any, b: Any) -> bool:
    pairs = list(zip(tensors_in(a), tensors_in(b)))
    return bool(pairs) and all(
        x.shape == y.shape and torch.allclose(x, y, rtol=_TOLERANCE, atol=_TOLERANCE * (1 + float(y.abs().max())))
        for x, y in pairs
        if x.is_floating_point()
    )

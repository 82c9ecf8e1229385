"""Make grafted blocks start as the identity: zero last tensors, check by running."""

import copy
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from surgery.copying import clone, plain_tensors
from surgery.depth.check import without_cache
from surgery.depth.splice import runs_nothing
from surgery.errors import SurgeryError
from surgery.forward import Uses, tensors_in, vary
from surgery.names import join

BlockCall: TypeAlias = tuple[tuple, dict[str, Any]]  # the arguments of a call
BlockRuns: TypeAlias = Callable[[], list[Tensor]]  # runs something and returns the outputs that must not change

_TOLERANCE = 1e-5
_DRAWS = 4  # random inputs of a block beside what the example gives it

_log = logging.getLogger(__name__)


@torch.no_grad()
def zero_branches(
    model: nn.Module, deeper: nn.Module, grafted: Mapping[str, Sequence[nn.Module]], example: Any
) -> None:
    """Zero parameters of new blocks of `deeper` in place: its outputs equal `model`'s.

    A new block's first output then equals its first input, on the example and on random inputs: activations of zero
    say nothing. What else it returns may differ, as long as the model's outputs stay the same. The parameters that a
    branch uses last become zero, since only these then have a gradient: behind a norm of zeros a gated feed-forward
    part would have none, for ever. Parameters that none of these use (of an expert that gets no token, of an optional
    input) become zero, too, and a warning names them.

    Args:
        model: the model before; not changed.
        deeper: the model with the new blocks.
        grafted: the copies (modules of `deeper`) of each repeated block, by its name in `model`.
        example: the model's input, see `surgery.forward.arguments`; where all its numbers are equal others are sampled.

    Raises:
        SurgeryError: if a block is not the identity when its weights are zero: it has no residual branch, or ends with
            a norm, as in post-norm transformers, or with a weight that is never zero, as under spectral_norm; if its
            zeros have no gradient, as before a ReLU that ends a branch.
    """
    args, kwargs = without_cache(model, example)
    if any(tensor.is_meta for tensor in (*model.parameters(), *tensors_in((args, kwargs)))):
        raise SurgeryError("mode='identity' compares outputs: move the model off the meta device", code="values")
    args, kwargs = vary((args, kwargs))
    expected = clone(model).eval()(*args, **kwargs)
    names = {id(module): name for name, module in deeper.named_modules()}
    trial = clone(deeper).eval()
    tried = {name: [trial.get_submodule(names[id(block)]) for block in copies] for name, copies in grafted.items()}
    inputs = _inputs(trial, [blocks[0] for blocks in tried.values()], (args, kwargs))
    for name, blocks in tried.items():
        called, arguments = (blocks[0], inputs[id(blocks[0])]) if id(blocks[0]) in inputs else (trial, (args, kwargs))
        _zero(grafted[name][0], blocks, called, arguments)
    for name, copies in grafted.items():
        blocks, way = tried[name], "use mode='copy'"
        if computed := _never_zero(blocks[0]):
            way += f", or first remove what makes {', '.join(map(repr, computed))}, which can never be zero (by "
            way += "torch.nn.utils.parametrize.remove_parametrizations or remove_spectral_norm)"
        if runs_nothing(copies[0]):  # such as a list of two modules: only the model's outputs show what it does
            runs = every = _model_runs(trial, (args, kwargs), expected)
        elif id(blocks[0]) in inputs:
            (runs, every), blocks = _block_runs(blocks[0], *inputs[id(blocks[0])]), blocks[:1]
        else:
            raise SurgeryError(f"block {name!r} is not called on the example: give one that calls it", code="depth")
        if runs is None or every is None:
            raise SurgeryError(f"block {name!r} is no identity with zeros (a norm ends it, say): {way}", code="depth")
        zero = _to_zero(copies[0], blocks, runs)
        if still := zero & _without_gradient(blocks, zero, runs):
            raise SurgeryError(
                f"copies of {name!r} with zeros for {min(still)!r} have no gradient (a ReLU ends it, say): {way}",
                code="depth",
            )
        if unused := _find_unused(copies[0], blocks, every) - zero:
            zero |= unused
            _log.warning(
                "the example does not use %s of %s, so they are zero in its copies, and may not learn: give an example "
                "that uses them",
                ", ".join(sorted(unused)),
                name,
            )
        for key, value in copies[0].named_parameters():
            for block in blocks:  # of the model that runs for the next ones, too
                block.get_parameter(key).copy_(value * (key not in zero))
        for parameter in (p for block in copies for key, p in block.named_parameters() if key in zero):
            parameter.zero_()
    if not _close(clone(deeper).eval()(*args, **kwargs), expected):
        raise SurgeryError(f"the copies of {', '.join(grafted)} change the output: use mode='copy'", code="depth")


def _zero(block: nn.Module, trials: Sequence[nn.Module], called: nn.Module, arguments: BlockCall) -> None:
    """Zero the parameters of copies of a block in place, unless zeros give NaN."""
    values = dict(block.named_parameters())

    def breaks(zero: Collection[str]) -> bool:
        for trial in trials:
            for name, value in values.items():
                trial.get_parameter(name).copy_(value * (name not in zero))
        args, kwargs = copy.deepcopy(arguments)  # a block may change a list or a cache that it is given
        return any(tensor.isnan().any() for tensor in tensors_in(called(*args, **kwargs)))

    if breaks(values):
        breaks([name for name in values if not breaks([name])])


def _never_zero(block: nn.Module) -> list[str]:
    """Return a block's computed weights that are not zero although its parameters are."""
    weights = []
    for path, module in block.named_modules():
        hooked = [
            key for key in plain_tensors(module) if any(part.startswith(f"{key}_") for part in module._parameters)
        ]
        computed = module.parametrizations if parametrize.is_parametrized(module) else hooked
        weights += [join(path, key) for key in computed if getattr(module, key).any()]
    return weights


def _model_runs(model: nn.Module, arguments: BlockCall, expected: Any) -> BlockRuns | None:
    """Run the model; None if its outputs are not the expected ones."""

    def run() -> list[Tensor]:
        return tensors_in(model(*arguments[0], **arguments[1]))

    return run if _close(run(), expected) else None


def _block_runs(block: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[BlockRuns | None, BlockRuns]:
    """Run a block for the outputs that equal inputs, and for all of its outputs."""
    first = next(iter(tensors_in((args, kwargs))))

    def draw(which: int) -> BlockCall:
        """Return the arguments with random numbers for the first tensor.

        None below 0 if the example has none (after a ReLU, say).
        """
        arguments = copy.deepcopy((args, kwargs))  # a block may change a list or a cache that it is given
        if not which:
            return arguments
        numbers = torch.randn(first.shape, generator=torch.Generator().manual_seed(which)).to(first)
        tensors_in(arguments)[0].copy_(numbers.abs() if first.min() >= 0 else numbers)
        return arguments

    def outputs(arguments: BlockCall) -> Sequence[Any]:
        output = block(*arguments[0], **arguments[1])
        return output if isinstance(output, tuple) else [output]

    draws = range(1 + _DRAWS * first.is_floating_point())

    def equal(which: int) -> set[int]:
        arguments = draw(which)
        before = copy.deepcopy(arguments)
        inputs = (before[0][0] if isinstance(before[0][0], tuple) else before[0]) if args else tensors_in(before[1])
        return {i for i, (output, old) in enumerate(zip(outputs(arguments), inputs)) if _close(output, old)}

    same = set.intersection(*map(equal, draws))

    def equal_ones() -> list[Tensor]:
        results = map(outputs, map(draw, draws))
        return [tensor for result in results for tensor in tensors_in([result[i] for i in sorted(same)])]

    def every() -> list[Tensor]:
        return [tensor for which in draws for tensor in tensors_in(outputs(draw(which)))]

    return equal_ones if 0 in same else None, every


def _to_zero(block: nn.Module, zeroed: Sequence[nn.Module], run: BlockRuns) -> set[str]:
    """Return the fewest block parameters that must be zero, the last ones of branches.

    `zeroed` are copies of it that `run` runs, with zeros for parameters; the values of the others are put back.
    """
    # The code may use a tensor after others that were registered behind it, such as a norm before what it norms.
    with Uses({id(p): name for copied in zeroed for name, p in copied.named_parameters()}) as uses:
        silent = run()
    zero, values = set(), dict(block.named_parameters())
    for name in sorted(values, key=lambda name: uses.order.get(name, len(values))):
        for copied in zeroed:
            copied.get_parameter(name).copy_(values[name])
        # If it is still multiplied by a zero later on, it changes nothing at all, so equality is exact.
        if not all(map(torch.equal, run(), silent)):
            zero.add(name)
            for copied in zeroed:
                copied.get_parameter(name).zero_()
    return zero


def _without_gradient(blocks: Sequence[nn.Module], names: Iterable[str], run: BlockRuns) -> set[str]:
    """Return parameters without first-order effect on `run`'s outputs, if known."""
    places = [(name, block.get_parameter(name)) for name in sorted(names) for block in blocks]
    required = [parameter.requires_grad for _, parameter in places]
    generator = torch.Generator().manual_seed(0)
    try:
        with torch.enable_grad():
            for _, parameter in places:
                parameter.requires_grad_(True)
            outputs = [output for output in run() if output.requires_grad]
            along = [torch.randn(output.shape, generator=generator).to(output) for output in outputs]
            wanted = [parameter for _, parameter in places]
            gradients = torch.autograd.grad(outputs, wanted, along, allow_unused=True) if outputs else ()
    except RuntimeError:  # code may have no derivative in evaluation mode, such as cuDNN's recurrent layers
        return set()
    finally:
        for (_, parameter), before in zip(places, required):
            parameter.requires_grad_(before)
    moving = {name for (name, _), gradient in zip(places, gradients) if gradient is not None and gradient.any()}
    return set(names) - moving if gradients else set()


def _find_unused(block: nn.Module, trials: Sequence[nn.Module], run: BlockRuns) -> set[str]:
    """Return non-zero parameters of a block that change nothing of what `run` runs.

    They are zeroed one by one where all weights are a little off, since those that begin at zero would hide much.
    """
    generator, before = torch.Generator().manual_seed(0), {}
    for name, value in block.named_parameters():
        noise = torch.randn(value.shape, generator=generator).to(value) * value.abs().mean().clamp(min=0.02)
        before[name] = value + noise
        for trial in trials:
            trial.get_parameter(name).copy_(before[name])
    whole, unused = run(), set()
    for name, value in block.named_parameters():
        for trial in trials:
            trial.get_parameter(name).zero_()
        if value.any() and all(map(torch.equal, run(), whole)):
            unused.add(name)
        for trial in trials:
            trial.get_parameter(name).copy_(before[name])
    return unused


def _inputs(model: nn.Module, blocks: Sequence[nn.Module], arguments: BlockCall) -> dict[int, BlockCall]:
    """Return what the model calls blocks with, by their ids."""
    seen: dict[int, BlockCall] = {}

    def note(block: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        seen.setdefault(id(block), copy.deepcopy((args, kwargs)))

    handles = [block.register_forward_pre_hook(note, with_kwargs=True) for block in blocks]
    model(*arguments[0], **arguments[1])
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

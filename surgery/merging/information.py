"""Measure what Fisher- and regression-weighted merging need to know of each model."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from surgery.errors import SurgeryError
from surgery.forward import call, in_mode
from surgery.states import State, names_by_id, tensors


def fisher_information(
    model: nn.Module, batches: Iterable[tuple[Any, Any]], *, loss: Callable[[Any, Tensor], Tensor] = F.cross_entropy
) -> State:
    """Return each parameter's empirical Fisher information.

    It is the mean squared gradient of single samples.

    Args:
        model: any module; it runs in evaluation mode, sample by sample, and is not changed.
        batches: pairs of inputs and targets [B, ...]. Inputs are a tensor [B, ...], a tuple of arguments or a dict of
            keyword arguments; what is no tensor in these is given to the model for each sample.
        loss: the negative log-likelihood of a batch of outputs and targets, its mean over the batch.

    Returns:
        By name of `surgery.state(model)` tensors of the parameters' shapes; 0 where a parameter has no gradient.

    >>> net = nn.Linear(2, 2)
    >>> fisher_information(net, [(torch.ones(3, 2), torch.tensor([0, 1, 1]))])["bias"].shape
    torch.Size([2])
    """
    parameters = {
        name: p
        for name, p in tensors(model).items()
        if isinstance(p, nn.Parameter) and (p.is_floating_point() or p.is_complex())  # others have no gradient
    }
    if not parameters:
        raise SurgeryError(f"{type(model).__name__} has no parameters to measure information about", code="unsupported")
    total, count = {name: torch.zeros_like(p) for name, p in parameters.items()}, 0
    needs = {name: p.requires_grad for name, p in parameters.items()}
    with in_mode(model, training=False, own_draws=False):
        try:
            for p in parameters.values():
                p.requires_grad_(True)
            with torch.enable_grad():
                for inputs, targets in _samples(batches):
                    value = loss(call(model, inputs), targets)
                    for name, gradient in zip(
                        parameters, torch.autograd.grad(value, [*parameters.values()], allow_unused=True)
                    ):
                        if gradient is not None:
                            total[name] += gradient.square()
                    count += 1
        finally:
            for name, p in parameters.items():
                p.requires_grad_(needs[name])
    if not count:
        raise SurgeryError("there are no samples to measure information on: give a batch", code="argument")
    return {name: (value / count).detach() for name, value in total.items()}


def _samples(batches: Iterable[Any]) -> Iterator[tuple[Any, Any]]:
    """Yield the inputs and targets of one sample after another, as batches of one."""
    for number, batch in enumerate(batches):
        if not isinstance(batch, list | tuple) or len(batch) != 2:
            raise SurgeryError(f"batch {number} is {type(batch).__name__}: give (inputs, targets)", code="argument")
        if len(sizes := set(_sizes(tuple(batch)))) != 1:
            sizes_text = (
                f"tensors of {' and '.join(map(str, sorted(sizes)))} samples" if sizes else "no tensors of samples"
            )
            raise SurgeryError(
                f"batch {number} has {sizes_text}: give inputs and targets of one length", code="argument"
            )
        for i in range(*sizes):
            yield _sample(batch[0], i), _sample(batch[1], i)


def _sizes(values: Any) -> Iterator[int]:
    """Yield the number of samples in every tensor of a batch."""
    if (isinstance(values, Tensor) and values.ndim) or isinstance(values, list):
        yield len(values)
    elif isinstance(values, tuple | Mapping):
        for value in values.values() if isinstance(values, Mapping) else values:
            yield from _sizes(value)


def _sample(values: Any, i: int) -> Any:
    """Sample i of a batch, as a batch of one."""
    if isinstance(values, Mapping):
        return {name: _sample(value, i) for name, value in values.items()}
    if isinstance(values, tuple):
        return tuple(_sample(value, i) for value in values)
    return values[i : i + 1] if (isinstance(values, Tensor) and values.ndim) or isinstance(values, list) else values


def input_grams(model: nn.Module, batches: Iterable[Any]) -> State:
    """Return inner products X^T X of the inputs of linear layers and convolutions.

    They are [I, I]. Convolutions with groups have none.

    Args:
        model: any module; it runs in evaluation mode and is not changed.
        batches: inputs: tensors, tuples of arguments or dicts of keyword arguments.

    Returns:
        By the state name of the layer's weight, float32 or the inputs' dtype if that is more precise.

    >>> input_grams(nn.Sequential(nn.Linear(2, 3)), [torch.tensor([[1.0, 2.0]])])
    {'0.weight': tensor([[1., 2.],
            [2., 4.]])}
    """
    names = names_by_id(model)
    result: State = {}

    def seen(module: nn.Module, inputs: tuple[Tensor, ...], named: Mapping[str, Tensor]) -> None:
        rows = _rows(module, inputs[0] if inputs else named["input"])
        rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
        name = names[id(module.weight)]
        result[name] = result.get(name, 0) + rows.T @ rows

    measured = [module for module in model.modules() if _is_linear(module)]
    if computed := [type(module).__name__ for module in measured if "weight" not in module._parameters]:
        raise SurgeryError(f"a {computed[0]}'s weight is computed (weight norm): remove that first", code="unsupported")
    hooks = [module.register_forward_pre_hook(seen, with_kwargs=True) for module in measured]
    if not hooks:
        raise SurgeryError(f"{type(model).__name__} has no linear layer or convolution to measure", code="unsupported")
    try:
        with in_mode(model, training=False, own_draws=False):
            for batch in batches:
                call(model, batch)
    finally:
        for hook in hooks:
            hook.remove()
    if not result:
        raise SurgeryError("no layer was run: give at least one batch of inputs", code="argument")
    return result


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or (
        isinstance(module, nn.Conv2d) and module.groups == 1 and module.padding_mode == "zeros"
        and not isinstance(module.padding, str)
    )  # fmt: skip


def _rows(module: Any, x: Tensor) -> Tensor:
    if isinstance(module, nn.Linear):
        return x.reshape(-1, x.shape[-1])
    x = x if x.ndim == 4 else x[None]
    patches = F.unfold(x, module.kernel_size, module.dilation, module.padding, module.stride)
    return patches.transpose(1, 2).reshape(-1, patches.shape[1])

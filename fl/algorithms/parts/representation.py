"""A model's representation of a sample: the input of its last linear layer."""

import torch
from torch import Tensor, nn

from fl.base.errors import FLError
from fl.federation import Federation


def head_of(fed: Federation, method: str) -> str:
    """Return the name of the last linear layer, which makes the model's output.

    It is found by running the model on two samples, so that it does not matter what it is called, nor where it is
    registered.

    Raises:
        FLError: for a model that ends otherwise, or that trains no other layer.
    """
    outputs: list[tuple[str, Tensor]] = []
    hooks = [
        module.register_forward_hook(lambda _, inputs, out, name=name: outputs.append((name, out)))
        for name, module in fed.model.named_modules()
        if isinstance(module, nn.Linear)
    ]
    dtype = next(fed.model.parameters()).dtype
    try:
        with torch.no_grad():
            logits = fed.model.eval()(fed.data.example(dtype=dtype))
    finally:
        for hook in hooks:
            hook.remove()
    name, out = outputs[-1] if outputs else ("", None)
    kind = type(fed.model).__name__
    if out is None or not isinstance(logits, Tensor) or not out.is_set_to(logits):
        raise FLError(
            f"{method} compares representations, the inputs of the linear layer that makes the logits, and {kind} does "
            "not end in one: choose another --model or --algorithm",
            code="unsupported",
        )
    head = {f"{name}.{part}".removeprefix(".") for part in ("weight", "bias")}
    if head.issuperset(fed.trainable):
        raise FLError(
            f"{method} trains representations, the inputs of the last layer, and of {kind} nothing before that is "
            "trained: choose another --model or --algorithm",
            code="unsupported",
        )
    return name


def represent(model: nn.Module, head: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the model's logits for a batch, and the inputs of its head.

    >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 5))
    >>> [tensor.shape[1] for tensor in represent(net, "2", torch.ones(4, 2))]
    [5, 3]
    """
    seen: list[Tensor] = []
    hook = model.get_submodule(head).register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    try:
        return model(x), seen[-1]
    finally:
        hook.remove()

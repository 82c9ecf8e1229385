"""How alike the models of a cohort are, wherever they lie."""

from collections.abc import Mapping

import torch
from torch import Tensor

from fl.federation.spread import by_layer
from surgery import Stack, State
from surgery.states import compute_dtype


def cosines(models: Stack, parameters: Mapping[str, Tensor]) -> Tensor:
    """`surgery.cosine` of K models, over their parameters: [K, K], with the same bits. Of models that are spread over
    ranks, only the products of each layer move.

    Args:
        parameters: by name, as the architecture has them.

    >>> cosines({"w": torch.tensor([[1.0, 0.0], [0.0, 2.0]])}, {"w": torch.zeros(2)})
    tensor([[1., 0.],
            [0., 1.]])
    """
    names = [name for name, tensor in parameters.items() if tensor.is_floating_point() and tensor.numel()]
    dtype = max((compute_dtype(parameters[name].dtype) for name in names), key=lambda dtype: dtype.itemsize)

    def flat(part: Stack) -> dict[str, Tensor]:
        return {name: part[name].reshape(len(part[name]), -1).to(dtype) for name in names if name in part}

    def largest(part: Stack) -> State:
        return {name: x.abs().amax(1) for name, x in flat(part).items()}

    def products(part: Stack) -> State:
        scaled = {name: x / scale for name, x in flat(part).items()}
        return {name: torch.cat([x @ x.T, x.square().sum(1)[None]]) for name, x in scaled.items()}

    tops = by_layer(models, largest)
    top = torch.stack([tops[name] for name in names]).amax(0)
    scale = torch.where(top == 0, torch.ones_like(top), top)[:, None]  # so that squares neither overflow nor underflow
    found = by_layer(models, products)
    dot, norm = sum(found[name][:-1] for name in names), sum(found[name][-1] for name in names).sqrt()
    both = norm[:, None] * norm[None, :]
    return torch.where(both == 0, torch.zeros_like(dot), dot / both).clamp(-1, 1)

"""Recombination: segments of layers travel between the models of a stack.

Hu et al., "Is Aggregation the Only Choice? Federated Learning via Layer-wise Model Recombination"
(KDD 2024), section 4.2.2. Every segment of every model is used exactly once, so sums over the models and
sums of squared distances to any point stay what they were (Lemma 4.4).
"""

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import TypeAlias

import torch
from torch import Tensor

from surgery.errors import SurgeryError
from surgery.layers import Layer
from surgery.state import Stack, count

Segment: TypeAlias = tuple[str, ...]


def segments(layers: Sequence[Layer], fraction: float = 0.0) -> list[Segment]:
    """Group consecutive layers into segments that travel together (FedMR-px of the paper's Fig. 11).

    Layer j of N (from 1) belongs to segment ceil(j / (fraction * N)).

    Args:
        layers: as `surgery.layers(model)` gives them.
        fraction: share of the layers that one segment holds, in [0, 1]. 1 makes the whole model one
            segment; 1/N or less (0, the default) makes each layer its own.

    Returns:
        The state names of each segment, in order.

    >>> five = [Layer(str(j), "Linear", (f"{j}.weight",)) for j in range(5)]
    >>> segments(five, 0.4)
    [('0.weight', '1.weight'), ('2.weight', '3.weight'), ('4.weight',)]
    >>> len(segments(five)), len(segments(five, 1.0))
    (5, 1)
    """
    if not 0 <= fraction <= 1:
        raise SurgeryError(f"fraction is a share of the layers in [0, 1], got {fraction}")
    # A Fraction, because 3 / (0.1 * 30) must be 1 and floats may make it a little more.
    size = max(Fraction(fraction).limit_denominator(10**6) * len(layers), Fraction(1))
    groups: dict[int, list[str]] = {}
    for j, layer in enumerate(layers, 1):
        groups.setdefault(math.ceil(j / size), []).extend(layer.tensors)
    return [tuple(names) for names in groups.values()]


def permutations(n: int, k: int, generator: torch.Generator | None = None) -> Tensor:
    """n independent uniform permutations of k slots: [n, k], int64, on the generator's device.

    >>> permutations(3, 4, torch.Generator().manual_seed(0)).sort(1).values[0]
    tensor([0, 1, 2, 3])
    """
    device = "cpu" if generator is None else generator.device
    rows = [torch.randperm(k, generator=generator, device=device) for _ in range(n)]
    return torch.stack(rows) if rows else torch.empty(0, k, dtype=torch.int64, device=device)


def inverse(permutations: Tensor) -> Tensor:
    """The permutations that undo the given ones, row by row: [n, k].

    >>> inverse(torch.tensor([[2, 0, 1]]))
    tensor([[1, 2, 0]])
    """
    return permutations.argsort(dim=-1)


def shuffle(models: Mapping[str, Tensor], segments: Sequence[Segment], permutations: Tensor) -> Stack:
    """Recombine K models: slot k of the result takes segment s from slot permutations[s, k].

    One index gather a tensor, on the stack's device. `shuffle(..., inverse(permutations))` undoes it.

    Args:
        models: a stack, tensors [K, *S].
        segments: groups of state names that together hold each name of the stack exactly once.
        permutations: [len(segments), K], each row a permutation of range(K).

    Raises:
        SurgeryError: if segments miss, repeat or invent a tensor, or the permutations are not permutations.
            (Permutations that live on an accelerator are checked for their shape only: reading them back
            would stall it.)

    >>> models = {"a": torch.tensor([1, 2]), "b": torch.tensor([3, 4])}
    >>> shuffle(models, [("a",), ("b",)], torch.tensor([[1, 0], [0, 1]]))
    {'a': tensor([2, 1]), 'b': tensor([3, 4])}
    """
    k = count(models)
    owner: dict[str, int] = {}
    for s, names in enumerate(segments):
        for name in names:
            if name in owner:
                raise SurgeryError(f"tensor {name!r} is in segments {owner[name]} and {s}: it can travel only once")
            owner[name] = s
    if missing := [name for name in models if name not in owner]:
        raise SurgeryError(
            f"no segment holds {missing[0]!r} ({len(missing)} missing): segments must cover the stack; take "
            "states with surgery.state(model), which names tied tensors once"
        )
    if unknown := [name for name in owner if name not in models]:
        raise SurgeryError(f"segments name {unknown[0]!r}, which the stack has not ({len(unknown)} unknown)")
    if not isinstance(permutations, Tensor) or permutations.is_floating_point():
        raise SurgeryError("permutations are an integer tensor: see surgery.permutations")
    if permutations.shape != (len(segments), k):
        raise SurgeryError(
            f"permutations have shape {tuple(permutations.shape)}: expected [{len(segments)} segments, {k} models]"
        )
    if permutations.device.type == "cpu" and not torch.equal(
        permutations.sort(1).values, torch.arange(k).expand(len(segments), k)
    ):
        raise SurgeryError(f"each row of permutations must hold every slot 0..{k - 1} once")
    sources: dict[torch.device, Tensor] = {}  # one transfer a device, not one a tensor
    result = {}
    for name, tensor in models.items():
        if tensor.device not in sources:
            sources[tensor.device] = permutations.to(tensor.device)
        result[name] = tensor.index_select(0, sources[tensor.device][owner[name]])
    return result

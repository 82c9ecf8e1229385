"""Measure the similarity of a section's blocks: Pearson correlations under a greedy one-to-one matching.

FedFA (Flexible Architectures, ECML-PKDD 2024; two other methods share the name), appendix 0.B.3, Tables 7-9. Because
blocks are similar, FedFA lets a last block stand for deeper ones.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fl.base.errors import FLError
from surgery.depth.sections import sections
from surgery.states import State, as_state
from surgery.transfer import double

_TILE = 1 << 18  # correlations computed at once on the CPU, which fit into its cache
_TILE_CUDA = 1 << 24  # so many that launches do not dominate the time
_CONSTANT = 1e-12  # a map that varies by less, relative to its norm, is constant up to rounding


def filter_similarity(a: Tensor, b: Tensor) -> float:
    """Return the similarity of two layers' filters, in [-1, 1]; 1 for equal filters, in any order of filters and maps.

    R^ij [Ci, Ci] are the Pearson correlations of the weight maps of filter i of `a` with those of filter j of `b`. Row
    by row we take the highest entry (of equal ones the first) in a column that is still free; the mean of the Ci
    entries is r^ij. The filters are matched in the same way by r [Co, Co], and the mean of the Co entries is the
    result. Since rows are matched in order, (a, b) and (b, a) may differ a little. A constant map has correlation 0
    with all others.

    If a map would be a single weight (1x1 convolutions, linear layers), which has no correlation, the Ci weights of a
    filter are taken as one map, in their given order. (The paper does not say what it does.)

    This computes Co^2 Ci^2 correlations: on a CPU core 0.1 s for 64 channels and 3x3 kernels, 6 s for 256 and minutes
    for 512. Besides a few copies of the weights it needs some tiles of 1 MiB (CUDA: 64 MiB) for them.

    Args:
        a, b: floating weights [Co, Ci, *kernel] or [Co, Ci] of one shape, on one device.

    Raises:
        FLError: for shapes that differ or have fewer than two axes, for integers, for tensors without data, and
            for NaN or infinity.

    >>> w = torch.randn(4, 3, 3, 3, generator=torch.Generator().manual_seed(0))
    >>> round(filter_similarity(w, w[[2, 0, 3, 1]][:, [1, 2, 0]]), 5), round(filter_similarity(w, 5 * w + 1), 5)
    (1.0, 1.0)
    """
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        raise FLError("filter_similarity compares two weights: give tensors, such as model.conv1.weight")
    if a.shape != b.shape or a.ndim < 2 or not a.numel():
        raise FLError(
            f"weights of shapes {tuple(a.shape)} and {tuple(b.shape)} have no similarity: give two of one shape "
            "[Co, Ci, *kernel] or [Co, Ci]",
            code="mismatch",
        )
    if not (a.is_floating_point() and b.is_floating_point()) or a.is_meta or b.is_meta:
        raise FLError(
            f"weights of {a.dtype} on {a.device} have no similarity: give floats with data", code="unsupported"
        )
    first, second = _standard_maps(a.detach()), _standard_maps(b.detach())
    side = max(1, math.isqrt((_TILE if a.device.type == "cpu" else _TILE_CUDA) // first.shape[1]))
    tiles = [[_map_similarity(x, y) for y in second.split(side)] for x in first.split(side)]
    value = _greedy(torch.cat([torch.cat(row, 1) for row in tiles])).item()
    if not math.isfinite(value):
        raise FLError("the weights hold NaN or infinity: take the model from before it diverged", code="diverged")
    return max(-1.0, min(1.0, value))


def _standard_maps(weight: Tensor) -> Tensor:
    """Scale maps [Co, Ci, P] to mean 0 and norm 1, so that products are correlations; constant maps become 0."""
    maps = weight.flatten(2) if weight.ndim > 2 else weight[:, :, None]
    maps = double(maps.mT if maps.shape[2] == 1 else maps)
    centred = maps - maps.mean(-1, keepdim=True)
    norm = centred.norm(dim=-1, keepdim=True)
    constant = norm <= _CONSTANT * maps.norm(dim=-1, keepdim=True)
    return (centred / norm).masked_fill(constant, 0).to(weight.dtype if weight.dtype == torch.float64 else torch.float)


def _map_similarity(x: Tensor, y: Tensor) -> Tensor:
    """Return r [I, J] of maps [I, Ci, P] and [J, Ci, P]; correlations [I, J, Ci, Ci] are computed row by row."""
    columns = y.flatten(0, 1).mT
    return _greedy((x[:, k] @ columns).view(len(x), *y.shape[:2]) for k in range(x.shape[1]))


def _greedy(rows: Iterable[Tensor]) -> Tensor:
    """Return the mean over rows [..., N] of each row's highest entry in a column that no earlier row took."""
    best, taken = [], None
    for row in rows:
        taken = torch.zeros_like(row) if taken is None else taken
        value, column = (row + taken).max(-1, keepdim=True)
        taken.scatter_(-1, column, -math.inf)
        best.append(value[..., 0])
    return torch.stack(best).mean(0)


class SectionSimilarity(NamedTuple):
    """The similarities of a section's blocks.

    Attributes:
        name: of the section.
        blocks: names of the B blocks that were compared.
        layers: for each convolution, by its name within a block, a symmetric matrix [B, B] on the CPU. Entry (i, j),
            i < j, is `filter_similarity` of block i with block j, and the diagonal is 1. It is NaN if one of the blocks
            has no such convolution, or the shapes differ.
    """

    name: str
    blocks: tuple[str, ...]
    layers: dict[str, Tensor]

    @property
    def matrix(self) -> Tensor:
        """Return [B, B], the mean over the convolutions that both blocks have."""
        return torch.stack(list(self.layers.values())).nanmean(0)

    def mean(self, layer: str | None = None) -> float:
        """Return the mean over pairs of different blocks, of one convolution or of all."""
        chosen = [self.layers[layer]] if layer is not None else list(self.layers.values())
        i, j = torch.triu_indices(len(self.blocks), len(self.blocks), 1)
        return torch.stack(chosen)[:, i, j].nanmean().item()


def block_similarity(model: nn.Module | State, *, first: bool = False, example: Any = None) -> list[SectionSimilarity]:
    """Measure the similarity of each section's blocks in pairs, convolution by convolution (FedFA, Tables 7-9).

    Args:
        model: a module or a state; without an example no forward pass is run.
        first: also compare the first block of each section, in which some convolutions often have other shapes. The
            paper leaves it out.
        example: the module's input, which shows what is a section, see `surgery.sections`; without one modules beside
            each other, such as experts, may be compared as well.

    Returns:
        One entry for each section that has at least two blocks to compare.

    Raises:
        FLError: if there is no such section.

    >>> block = lambda: nn.Sequential(nn.Conv1d(4, 4, 3), nn.ReLU(), nn.Conv1d(4, 4, 3))
    >>> net = nn.Sequential(nn.Conv1d(2, 4, 3), *(block() for _ in range(4)))
    >>> (section,) = block_similarity(net)
    >>> section.blocks, list(section.layers), section.layers["0.weight"].shape
    (('2', '3', '4'), ['0.weight', '2.weight'], torch.Size([3, 3]))
    """
    values = dict(as_state(model, "the model"))
    names = convolutions(values)
    result = []
    for section in sections(model, example=example):
        blocks = section.blocks if first else section.blocks[1:]
        inside = {name.removeprefix(f"{b}."): None for b in blocks for name in names if name.startswith(f"{b}.")}
        if len(blocks) < 2 or not inside:
            continue
        layers = {name: _pairs([values.get(f"{block}.{name}") for block in blocks]) for name in inside}
        if similarities := {name: pairs.fill_diagonal_(1) for name, pairs in layers.items() if not pairs.isnan().all()}:
            result.append(SectionSimilarity(section.name, blocks, similarities))
    if not result:
        needed = "two blocks" if first else "two blocks after its first"
        raise FLError(
            f"no section has {needed} to compare: give a deeper model"
            + ("" if first else ", or compare the first blocks as well (`first`)"),
            code="unsupported",
        )
    return result


def _pairs(weights: list[Tensor | None]) -> Tensor:
    """Compare each pair of weights [B, B]; NaN on the diagonal, for different shapes, and for missing weights."""
    matrix = torch.full((len(weights), len(weights)), math.nan, dtype=torch.float64)
    for i, a in enumerate(weights):
        for j, b in enumerate(weights[i + 1 :], i + 1):
            if a is not None and b is not None and a.shape == b.shape:
                matrix[i, j] = matrix[j, i] = filter_similarity(a, b)
    return matrix


def convolutions(values: Mapping[str, Tensor]) -> list[str]:
    """List the weights of convolutions (three or more axes), or of linear layers if there are none.

    >>> from surgery.states import state
    >>> convolutions(state(nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(2, 2))))
    ['0.weight']
    """
    weights = {n: t.ndim for n, t in values.items() if n.endswith("weight") and t.is_floating_point() and t.ndim > 1}
    return [name for name, axes in weights.items() if axes > 2] or list(weights)

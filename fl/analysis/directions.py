"""Random directions in the space of a model's weights, and a function's values on the plane that two of them span."""

import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.func import vmap
from tqdm import tqdm

from fl.base.errors import FLError
from fl.base.torch_private import BatchOrInstanceNorm
from surgery import State

_NORMS = (BatchOrInstanceNorm, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)
_AGREE = 1e-2  # relative difference allowed between a loss computed side by side and alone (bf16 rounds as much)


def random_direction(model: nn.Module, generator: torch.Generator) -> State:
    """A Gaussian direction, each filter scaled to the norm of the model's own (Li et al., "Visualizing the Loss
    Landscape of Neural Nets", NeurIPS 2018, section 4).

    A filter is a slice along the first axis: what makes one output of a convolution or a linear layer, or one row of an
    embedding. Biases and the parameters of norm layers do not move, as in the released default, and neither do buffers.

    Args:
        generator: on the CPU. With the same generator, models of one architecture get the same direction up to the
            scale of the filters.

    Returns:
        The tensors that move, by state name, with device and dtype of the parameters.

    Raises:
        FLError: if no tensor is left to move.

    >>> net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU())
    >>> direction = random_direction(net, torch.Generator().manual_seed(0))
    >>> list(direction)
    ['0.weight']
    >>> torch.allclose(direction["0.weight"][1].norm(), net[0].weight[1].norm())
    True
    """
    result = {}
    for name, weight in model.named_parameters():
        owner = model.get_submodule(name.rpartition(".")[0])
        if weight.ndim < 2 or isinstance(owner, _NORMS):
            continue
        noise = torch.randn(weight.shape, generator=generator).to(weight)
        filters = weight.detach().flatten(1).norm(dim=1) / noise.flatten(1).norm(dim=1)
        result[name] = noise * filters.view(-1, *[1] * (weight.ndim - 1))
    if not result:
        raise FLError(f"{type(model).__name__} has no weights with filters (tensors of two axes or more) to move along")
    return result


def grid(points: int, radius: float) -> Tensor:
    """An axis of the plane, float64 [points] from -radius to radius, with an exact 0 in the middle.

    >>> grid(5, 1.0)
    tensor([-1.0000, -0.5000,  0.0000,  0.5000,  1.0000], dtype=torch.float64)
    """
    if points < 3 or points % 2 == 0:
        raise FLError(f"--points {points}: give an odd number, 3 or more, so that one point is the centre")
    half = points // 2
    return torch.arange(-half, half + 1, dtype=torch.float64) / half * radius


@torch.no_grad()
def surface(
    loss: Callable[[State], Tensor],
    centre: State,
    directions: Sequence[State],
    axis: Tensor,
    together: int = 1,
    label: str | None = None,
) -> Tensor:
    """loss(centre + a u + b v) for all a and b of the axis.

    Args:
        loss: from a state of the tensors that move to a scalar on their device.
        centre: a state that has all tensors that move.
        directions: u and v, tensors by name.
        axis: float64 [P], P odd, 0 in the middle.
        together: how many points are computed as one program (torch.func.vmap). The centre is always computed alone. If
            the model does not allow vmap, or has another loss in the centre with it, all points are.
        label: of a progress bar; None shows no bar.

    Returns:
        float64 [P, P] on the CPU; entry (i, j) is at a = axis[i], b = axis[j].

    >>> a = {"w": torch.tensor([[1.0, 0.0]])}, {"w": torch.tensor([[0.0, 2.0]])}
    >>> surface(lambda state: state["w"].square().sum(), {"w": torch.zeros(1, 2)}, a, grid(3, 1.0)).tolist()
    [[5.0, 1.0, 5.0], [4.0, 0.0, 4.0], [5.0, 1.0, 5.0]]
    """
    u, v = directions
    some = next(iter(u.values()))
    points = torch.cartesian_prod(axis, axis).to(some)  # [P * P, 2]

    def at(point: Tensor) -> Tensor:
        return loss({name: centre[name] + point[0] * u[name] + point[1] * v[name] for name in u})

    middle = len(points) // 2
    exact = at(points[middle])
    values = []
    pause = 0.1 if sys.stderr.isatty() else 30
    with tqdm(total=len(points), desc=label, unit="point", disable=label is None, mininterval=pause) as bar:
        if together > 1 and _agrees(at, points[middle : middle + together], exact):
            for batch in points.split(together):
                values.append(vmap(at)(batch))
                bar.update(len(batch))
        else:
            for point in points:
                values.append(at(point)[None])
                bar.update()
    flat = torch.cat(values).double()
    flat[middle] = exact
    return flat.view(len(axis), len(axis)).cpu()


def _agrees(at: Callable[[Tensor], Tensor], points: Tensor, first: Tensor) -> bool:
    """Whether the points can be computed side by side, and the first one has the same value as alone."""
    try:
        return torch.isclose(vmap(at)(points)[0], first, rtol=_AGREE, atol=1e-6).item()
    except RuntimeError:  # torch.func cannot do it, or memory is too small
        return False


def rise(values: Tensor, axis: Tensor, radius: float) -> tuple[float, float]:
    """How sharp a minimum is: the loss at all points within `radius` of the centre, minus the loss in the centre, as
    (mean, maximum). Distances are in norms of the weights' own filters.

    >>> rise(torch.tensor([[9.0, 3.0, 9.0], [3.0, 1.0, 3.0], [9.0, 5.0, 9.0]]), grid(3, 1.0), 1.0)
    (2.5, 4.0)
    """
    distance = torch.cdist(torch.cartesian_prod(axis, axis), axis.new_zeros(1, 2)).view(values.shape)
    near = (distance > 0) & (distance <= radius * (1 + 1e-9))
    over = (values - values[len(axis) // 2, len(axis) // 2])[near]
    return over.mean().item(), over.max().item()

"""The loss around trained models, along two random directions."""

import logging
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from tqdm import tqdm

from fl.analysis.groups import RecordedRun, group
from fl.base.errors import FLError
from fl.base.rng import Rng, draw
from fl.base.tables import align_columns, write_csv
from fl.base.torch_private import BatchOrInstanceNorm
from fl.data import Dataset
from fl.data.inputs import Inputs, map_inputs, split_inputs
from fl.engine.losses import Loss, cross_entropy, measure, weights_of
from fl.engine.precision import arithmetic
from fl.federation import Federation
from fl.runs.assembly import build
from fl.runs.folder import load_initial_weights, load_model
from surgery import State, state
from surgery.transfer import double, upload, widest

_log = logging.getLogger("fl")
_CHUNK = 500  # samples of one forward pass, as in evaluation
_TWICE = 100  # samples whose loss is differentiated twice at a time
_LOGITS = 2**24  # in memory at a time
_ON_CUDA = 16  # models side by side; on the CPU one is faster, since vmap turns convolutions into grouped ones


@dataclass(frozen=True)
class Landscape:
    """The loss on a grid around the trained model of a run, the mean of some samples."""

    title: str
    folder: Path
    axis: Tensor  # float64 [P]
    values: Tensor  # float64 [P, P], see `surface`
    samples: int
    traces: Tensor | None = None  # estimates of the Hessian's trace, see `hessian_traces`; None: there are none

    @property
    def centre(self) -> float:
        """The loss of the model itself."""
        return self.values[len(self.axis) // 2, len(self.axis) // 2].item()

    @property
    def trace(self) -> tuple[float, float]:
        """The trace of the Hessian, and the standard error of this estimate.

        >>> traces = torch.tensor([1.0, 3.0]).double()
        >>> Landscape("fedmr", Path("runs/a"), grid(3, 1.0), torch.zeros(3, 3), 100, traces).trace
        (2.0, 1.0)
        """
        if self.traces is None:
            return math.nan, math.nan
        return self.traces.mean().item(), self.traces.std().item() / len(self.traces) ** 0.5

    def rise(self) -> tuple[float, float]:
        """Measure how far the loss rises around the centre, as (mean, maximum).

        It is the loss at all points of the plane as near to the centre as the ends of the axis are, minus the loss in
        the centre. Distances are in norms of the weights' filters.

        >>> values = torch.tensor([[9.0, 3.0, 9.0], [3.0, 1.0, 3.0], [9.0, 5.0, 9.0]])
        >>> Landscape("fedmr", Path("runs/a"), grid(3, 1.0), values, 100).rise()
        (2.5, 4.0)
        """
        distance = torch.cdist(torch.cartesian_prod(self.axis, self.axis), self.axis.new_zeros(1, 2))
        distance = distance.view(self.values.shape)
        over = (self.values - self.centre)[(distance > 0) & (distance <= self.axis[-1] * (1 + 1e-9))]
        return over.mean().item(), over.max().item()


def table(landscapes: Sequence[Landscape]) -> str:
    """Make a table of the loss of each model and how it rises around it."""
    lines = [["model", "loss", "mean rise", "largest", "trace of H"]]
    lines += [
        [
            entry.title,
            *(f"{number:.4f}" for number in (entry.centre, *entry.rise())),
            "{:.3g} ± {:.2g}".format(*entry.trace),
        ]
        for entry in landscapes
    ]
    return align_columns(lines)


def write_grid(landscapes: Sequence[Landscape], path: Path) -> None:
    """Write all losses as a table: model, folder, a, b, loss.

    Weights are moved by a and b along the directions.
    """
    rows = [
        [entry.title, entry.folder, a, b, loss]
        for entry in landscapes
        for a, row in zip(entry.axis.tolist(), entry.values.tolist())
        for b, loss in zip(entry.axis.tolist(), row)
    ]
    write_csv(path, ["model", "folder", "a", "b", "loss"], rows)


def landscape(
    run: RecordedRun,
    title: str,
    dataset: Dataset,
    axis: Tensor,
    part: str,
    number: int,
    seed: int,
    together: int,
    device: str,
) -> Landscape:
    """Measure the loss around the global model of a run.

    Args:
        title: the model's label.
        axis: of the plane, see `grid`.
        part: "test" or "train": the samples on which the loss is computed.
        number: how many of them; 0 for all.
        seed: of the directions and the samples.
        together: how many models are computed side by side; 0 chooses by the device.
    """
    fed, _ = build(run.config.replace(device=device), dataset, start=load_initial_weights(run.folder, run.config))
    where = fed.data.device
    model = load_model(run.folder).to(where)
    rng = Rng(seed)
    directions = [random_direction(model, rng.torch("direction", number)) for number in (0, 1)]
    x, y = samples(fed, part, number, rng)
    together = together or (_ON_CUDA if where.type == "cuda" else 1)
    with arithmetic(fed.local.precision, where):
        loss = mean_loss(model, fed.data, x, y, together, fed.local.loss)
        values = surface(loss, state(model), directions, axis, together, title)
        try:
            traces = _traces(model, fed, x, y, rng)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # an operation without a second derivative
            _log.warning("%s: the trace of the Hessian cannot be estimated: %s", title, error)
            traces = None
    return Landscape(title, run.folder, axis, values, len(y), traces)


def _traces(model: nn.Module, fed: Federation, x: Inputs, y: Tensor, rng: Rng) -> Tensor:
    """Of the mean loss, some samples at a time: the graph of a derivative is kept."""
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}

    def part(some: Inputs, labels: Tensor) -> Tensor:  # of all with the same signs
        loss = mean_loss(model, fed.data, some, labels, 1, fed.local.loss)
        share = weights_of(fed.local.loss, labels).sum() / weights_of(fed.local.loss, y).sum()
        return share.item() * hessian_traces(loss, trained, rng.torch("signs"))

    return torch.stack([part(*some) for some in zip(split_inputs(x, _TWICE), y.split(_TWICE))]).sum(0)


def samples(fed: Federation, part: str, number: int, rng: Rng) -> tuple[Inputs, Tensor]:
    """Choose samples and their labels: all, or as many as asked for.

    They are masked for a model trained with masks.
    """
    data = fed.data
    if part == "test":
        x, y = map_inputs(lambda values: upload(values, data.device), data.test_x), upload(data.test_y, data.device)
    else:
        x, y = data.gather(fed.clients.train.samples)
    if 0 < number < len(y):
        index = torch.tensor(draw(len(y), number, rng.torch("samples"))).sort().values.to(y.device)
        x, y = map_inputs(lambda values: values[index], x), y[index]
    if fed.local.augment.mask:
        x = fed.local.augment(x, torch.zeros((), dtype=torch.int32, device=y.device))
    return x, y


def mean_loss(
    model: nn.Module, data: Dataset, x: Inputs, y: Tensor, together: int, of: Loss = cross_entropy
) -> Callable[[State], Tensor]:
    """Make a function of some of a model's tensors: the mean loss, float64.

    It is the mean over all samples (of text and masks: over what counts of them) in evaluation mode. The other tensors
    are the model's own.
    """
    model.eval()
    dtype = next(model.parameters()).dtype
    size = min(_CHUNK, max(1, _LOGITS // (math.prod(data.outputs) * together)))
    number = weights_of(of, y).sum()

    def loss(values: State) -> Tensor:
        total = torch.zeros((), dtype=widest(y.device), device=y.device)
        for some, labels in zip(split_inputs(x, size), y.split(size)):
            total = total + measure(of, functional_call(model, values, (data.normalise(some, dtype),)), labels).sum()
        return total / number

    return loss


def hessian_traces(loss: Callable[[State], Tensor], at: State, generator: torch.Generator, probes: int = 16) -> Tensor:
    """Estimate the trace of the Hessian of a loss, without the Hessian.

    Returns float64 [probes]; the estimate is their mean. Each is v·Hv for a vector v of random signs (Hutchinson, "A
    stochastic estimator of the trace of the influence matrix", 1989). Unlike `Landscape.rise`, the trace changes where
    weights are scaled and a norm layer undoes it.

    Args:
        loss: from a state to a scalar that can be differentiated twice.
        at: the tensors that it is differentiated by.
        generator: on the CPU; draws the signs.
        probes: how many vectors.

    >>> at, signs = {"w": torch.tensor([1.0, 2.0])}, torch.Generator().manual_seed(0)
    >>> hessian_traces(lambda state: (state["w"] ** 2 * torch.tensor([3.0, 5.0])).sum(), at, signs, probes=2)
    tensor([16., 16.], dtype=torch.float64)
    """
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in at.items()}
    tensors = list(leaves.values())
    estimates = tensors[0].new_zeros(probes)  # stays on the device
    with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):  # fused attention has no second derivative
        first = torch.autograd.grad(loss(leaves), tensors, create_graph=True, materialize_grads=True)
        for i in range(probes):
            signs = [torch.randint(2, t.shape, generator=generator).mul(2).sub(1).to(t) for t in tensors]
            slope = sum((g * v).sum() for g, v in zip(first, signs))
            if slope.requires_grad:  # else the loss is linear
                second = torch.autograd.grad(slope, tensors, retain_graph=True, materialize_grads=True)
                estimates[i] = sum((h * v).sum() for h, v in zip(second, signs)).detach()
    return estimates.cpu().double()


def titles(runs: Sequence[RecordedRun]) -> list[str]:
    """Make a title for each run: the method, differing settings, seeds if several."""
    labels = {id(run): label for label, members in group(runs).items() for run in members}
    several = len({run.config.seed for run in runs}) > 1
    return [labels[id(run)] + (f", seed {run.config.seed}" if several else "") for run in runs]


_NORMS = (BatchOrInstanceNorm, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)
_AGREE = 1e-2  # relative difference allowed between a loss computed side by side and alone (bf16 rounds as much)


def random_direction(model: nn.Module, generator: torch.Generator) -> State:
    """Draw a Gaussian direction, each filter scaled to the norm of the model's.

    (Li et al., "Visualizing the Loss Landscape of Neural Nets", NeurIPS 2018, section 4.)

    A filter is a slice along the first axis: what makes one output of a convolution or a linear layer, or one row of an
    embedding. Biases and the parameters of norm layers do not move, as in the released default, and neither do buffers.

    Args:
        generator: on the CPU. With the same generator, models of one architecture get the same direction up to the
            scale of the filters.

    Returns:
        The tensors that move, by state name, with device and dtype of the parameters. Raises FLError if there is none.

    >>> net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU())
    >>> list(random_direction(net, torch.Generator().manual_seed(0)))
    ['0.weight']
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
        raise FLError(
            f"{type(model).__name__} has no weights with filters (tensors of two axes or more) to move along",
            code="unsupported",
        )
    return result


def grid(points: int, radius: float) -> Tensor:
    """Make an axis, float64 [points], from -radius to radius, exactly 0 in the middle.

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
    together: int,
    label: str | None = None,
) -> Tensor:
    """Compute loss(centre + a u + b v) for all a and b of the axis.

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
    >>> surface(lambda state: state["w"].square().sum(), {"w": torch.zeros(1, 2)}, a, grid(3, 1.0), 1).tolist()
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
    flat = double(torch.cat(values))
    flat[middle] = exact
    return flat.view(len(axis), len(axis)).cpu()


def _agrees(at: Callable[[Tensor], Tensor], points: Tensor, first: Tensor) -> bool:
    """Return whether points can be computed together, with the same value as alone."""
    try:
        return torch.isclose(vmap(at)(points)[0], first, rtol=_AGREE, atol=1e-6).item()
    except RuntimeError:  # torch.func cannot do it, or memory is too small
        return False

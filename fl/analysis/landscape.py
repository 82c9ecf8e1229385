"""The loss around trained models, along two random directions."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from fl.analysis.directions import grid, random_direction, rise, surface
from fl.analysis.groups import group
from fl.analysis.outcome import Run
from fl.base.rng import Rng, draw
from fl.base.tables import aligned, write_csv
from fl.data import Dataset
from fl.engine.precision import arithmetic
from fl.federation import Federation
from fl.runs.assembly import build
from fl.runs.folder import load_initial_weights, load_model
from surgery import State, state

_CHUNK = 500  # samples of one forward pass, as in evaluation
_LOGITS = 2**24  # in memory at a time
_ON_CUDA = 16  # models side by side; on the CPU one is faster, since vmap turns convolutions into grouped ones


@dataclass(frozen=True)
class Landscape:
    """The loss around a trained model.

    Attributes:
        title: the model's label in tables and figures.
        folder: of its run.
        axis: float64 [P].
        values: float64 [P, P], see `surface`.
        samples: how many samples the loss is the mean of.
        mean, largest: the rise of the loss within the radius, see `rise`.
    """

    title: str
    folder: Path
    axis: Tensor
    values: Tensor
    samples: int
    mean: float
    largest: float

    @property
    def centre(self) -> float:
        """The loss of the model itself."""
        return self.values[len(self.axis) // 2, len(self.axis) // 2].item()


def table(found: Sequence[Landscape]) -> str:
    """The loss of each model and how it rises around it.

    >>> axis = torch.tensor([-1.0, 0.0, 1.0])
    >>> print(table([Landscape("fedmr", Path("a"), axis, torch.eye(3).double(), 9, -0.5, 0.0)]))
    model       loss   mean rise   largest
    fedmr     1.0000     -0.5000    0.0000
    """
    lines = [["model", "loss", "mean rise", "largest"]]
    lines += [[one.title, f"{one.centre:.4f}", f"{one.mean:.4f}", f"{one.largest:.4f}"] for one in found]
    return aligned(lines, [max(len(line[0]) for line in lines), 11, 12, 10])


def write_grid(found: Sequence[Landscape], path: Path) -> None:
    """Write all losses as a table: model, folder, a, b, loss. Weights are moved by a and b along the directions."""
    rows = [
        [one.title, one.folder, a, b, loss]
        for one in found
        for a, row in zip(one.axis.tolist(), one.values.tolist())
        for b, loss in zip(one.axis.tolist(), row)
    ]
    write_csv(path, ["model", "folder", "a", "b", "loss"], rows)


def landscape(
    run: Run,
    title: str,
    dataset: Dataset,
    points: int = 21,
    radius: float = 1.0,
    part: str = "test",
    number: int = 1000,
    seed: int = 0,
    together: int = 0,
    device: str = "auto",
) -> Landscape:
    """Measure the loss around the global model of a run.

    Args:
        title: the model's label.
        points, radius: see `fl.analysis.directions.grid`.
        part: "test" or "train": the samples on which the loss is computed.
        number: how many of them; 0 for all.
        seed: of the directions and the samples.
        together: how many models are computed side by side; 0 chooses by the device.
    """
    fed, _ = build(replace(run.config, device=device), dataset, start=load_initial_weights(run.folder, run.config))
    where = fed.data.x.device
    model = load_model(run.folder).to(where)
    rng = Rng(seed)
    directions = [random_direction(model, rng.torch("direction", number)) for number in (0, 1)]
    x, y = samples(fed, part, number, rng)
    together = together or (_ON_CUDA if where.type == "cuda" else 1)
    axis = grid(points, radius)
    with arithmetic(fed.local.precision, where):
        values = surface(mean_loss(model, fed.data, x, y, together), state(model), directions, axis, together, title)
    return Landscape(title, run.folder, axis, values, len(y), *rise(values, axis, radius))


def samples(fed: Federation, part: str, number: int, rng: Rng) -> tuple[Tensor, Tensor]:
    """Samples (masked, for a model that is trained with masks) and their labels: all, or as many as asked for."""
    data = fed.data
    if part == "test":
        x, y = data.test_x, data.test_y
    else:
        index = fed.clients.train.samples.to(data.x.device)
        x, y = data.x[index], data.y[index]
    if 0 < number < len(y):
        index = torch.tensor(draw(len(y), number, rng.torch("samples"))).sort().values.to(x.device)
        x, y = x[index], y[index]
    if fed.local.augment.mask:
        x = fed.local.augment(x, torch.zeros((), dtype=torch.int32, device=x.device))
    return x, y


def mean_loss(model: nn.Module, data: Dataset, x: Tensor, y: Tensor, together: int = 1) -> Callable[[State], Tensor]:
    """A function of some of a model's tensors: the mean cross entropy, float64, of all samples (of text: all tokens) in
    evaluation mode. The other tensors are the model's own.

    >>> from fl.data import load
    >>> data = load("digits")
    >>> net = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    >>> mean_loss(net, data, data.test_x, data.test_y)({"1.weight": torch.zeros(10, 64), "1.bias": torch.zeros(10)})
    tensor(2.3026, dtype=torch.float64)
    """
    model.eval()
    dtype = next(model.parameters()).dtype
    size = min(_CHUNK, max(1, _LOGITS // (data.classes * y[0].numel() * together)))

    def loss(values: State) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=y.device)
        for some, labels in zip(x.split(size), y.split(size)):
            logits = functional_call(model, values, (data.normalise(some, dtype),)).flatten(0, -2)
            total = total + F.cross_entropy(logits.double(), labels.flatten(), reduction="sum")
        return total / y.numel()

    return loss


def titles(runs: Sequence[Run]) -> list[str]:
    """A title for each run: the method, the settings in which runs differ, and the seed if there are several."""
    labels = {id(run): label for label, members in group(runs).items() for run in members}
    several = len({run.config.seeds for run in runs}) > 1
    return [labels[id(run)] + (f", seed {run.config.seeds[0]}" if several else "") for run in runs]

"""How alike the residual blocks of models are, before and after training (FedFA, appendix 0.B, Tables 7-9)."""

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
import tyro
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from torch import nn

from fl import checkpoint, models, plot
from fl.assembly import pick_device
from fl.config import Config
from fl.errors import FLError
from fl.flags import Depths, Rates
from fl.rng import Rng
from fl.simulation import load_model
from surgery import SectionSimilarity, block_similarity

_MOST = 6  # models in one figure
_WRITTEN = 5  # blocks up to which a panel says its numbers


class Compared(NamedTuple):
    """How alike a model's blocks are untrained, and trained if it is a run's."""

    title: str
    before: list[SectionSimilarity]
    after: list[SectionSimilarity] | None = None


def initial_model(folder: Path) -> nn.Module:
    """The model that a run began with, made again from its seed; on the CPU."""
    spec, _ = checkpoint.read_model(folder)
    return models.create(Rng(Config.read(folder).seeds[0]).torch("weights"), spec)


def table(compared: Compared) -> str:
    """A line for each convolution of each section: the mean over pairs of blocks, untrained, trained and the change.

    >>> layers = {"conv1.weight": torch.tensor([[1.0, 0.5], [0.5, 1.0]])}
    >>> print(table(Compared("a model", [SectionSimilarity("section1", ("section1.1", "section1.2"), layers)])))
    a model
    section   convolution    pairs   untrained
    section1  conv1              1      0.5000
              all                1      0.5000
    """
    columns = ["untrained"] + (["trained", "change"] if compared.after else [])
    names = [[_short(layer) for layer in section.layers] for section in compared.before]
    first = max(7, *(len(section.name) for section in compared.before)) + 2
    second = max(11, *(len(name) for layers in names for name in layers)) + 2
    lines = [f"{'section':{first}}{'convolution':{second}}{'pairs':>7}" + "".join(f"{name:>12}" for name in columns)]
    for at, before in enumerate(compared.before):
        upper = torch.triu_indices(len(before.blocks), len(before.blocks), 1)
        pairs = {layer: int((~matrix[*upper].isnan()).sum()) for layer, matrix in before.layers.items()}
        pairs |= {None: sum(pairs.values())}
        for number, layer in enumerate([*before.layers, None]):
            values = [before.mean(layer)] + ([compared.after[at].mean(layer)] if compared.after else [])
            cells = "".join(f"{value:12.4f}" for value in values)
            cells += f"{values[1] - values[0]:+12.4f}" if compared.after else ""
            name = before.name if number == 0 else ""
            lines.append(f"{name:{first}}{_short(layer) if layer else 'all':{second}}{pairs[layer]:7}{cells}")
    return "\n".join([compared.title, *lines])


def _short(layer: str) -> str:
    return layer.removesuffix(".weight")


def heat_maps(found: Sequence[Compared]) -> Figure:
    """A panel for each section of each model: blocks x blocks, the mean over convolutions; trained ones below untrained
    ones, all in the same colours. Raises FLError for too many models.
    """
    if len(found) > _MOST:
        raise FLError(f"{len(found)} models are too many for one figure: give at most {_MOST}")
    rows = [2 if one.after else 1 for one in found]
    columns = max(len(one.before) for one in found)
    width = max(4.8, 1.6 + 2.1 * columns)
    titles = [textwrap.fill(one.title, int(12 * width)) for one in found]
    heights = [0.95 + 0.2 * title.count("\n") + 2.0 * n for title, n in zip(titles, rows)]
    figure = Figure(figsize=(width, sum(heights)), layout="constrained")
    parts = figure.subfigures(len(found), 1, squeeze=False, height_ratios=heights)[:, 0]
    matrices = [section.matrix for one in found for part in (one.before, one.after or []) for section in part]
    apart = torch.cat([matrix[~torch.eye(len(matrix), dtype=torch.bool)] for matrix in matrices])
    apart = apart[~apart.isnan()]
    low, high = math.floor(10 * apart.min().item()) / 10, math.ceil(10 * apart.max().item()) / 10
    for part, title, one, number in zip(parts, titles, found, rows):
        panels = part.subplots(number, columns, squeeze=False)
        for stage, sections, line in zip(("untrained", "trained"), (one.before, one.after or []), panels):
            for panel, section in zip(line, sections):
                image = _panel(panel, section, low, high)
            for panel in line[len(sections) :]:
                panel.set_visible(False)
            line[0].set_ylabel(f"{stage}\nblock", fontsize=8)
        for top, bottom, section in zip(panels[0], panels[-1], one.before):
            top.set_title(section.name, fontsize=9)
            bottom.set_xlabel("block", fontsize=8)
        part.suptitle(title, fontsize=10)
        bar = part.colorbar(image, ax=panels, pad=0.02, aspect=14 * number, shrink=0.9)
        bar.set_label("mean similarity", fontsize=8)
        bar.ax.tick_params(labelsize=7)
    return figure


def _panel(panel: Axes, section: SectionSimilarity, low: float, high: float) -> AxesImage:
    """One heat map; the diagonal, a block and itself, and pairs without a value are grey."""
    size = len(section.blocks)
    values = section.matrix.clone().fill_diagonal_(float("nan"))
    panel.set_facecolor("0.88")
    image = panel.imshow(values.numpy(), vmin=low, vmax=high, cmap="cividis", interpolation="nearest")
    start = len(_parent(section.blocks))
    step = 1 if size <= 8 else -(-size // 8)
    for axis in (panel.xaxis, panel.yaxis):
        axis.set_ticks(range(0, size, step), [block[start:] for block in section.blocks[::step]], fontsize=7)
    if size <= _WRITTEN:
        for i, row in enumerate(values.tolist()):
            for j, value in enumerate(row):
                if value == value:
                    color = "white" if value < (low + high) / 2 else "black"
                    panel.text(j, i, f"{value:.2f}", ha="center", va="center", fontsize=7.5, color=color)
    return image


def _parent(blocks: Sequence[str]) -> str:
    """What the names have in common, up to a dot.

    >>> _parent(["section1.1", "section1.12"])
    'section1.'
    """
    common = blocks[0]
    while not all(block.startswith(common) for block in blocks) or (common and not common.endswith(".")):
        common = common[:-1]
    return common


@dataclass(frozen=True)
class Similarity:
    """Print and draw how alike the blocks of each section are: of runs untrained and trained, of --model untrained.

    From -1 to 1: Pearson correlations of weight maps, which are matched one to one, and so are filters (FedFA, appendix
    0.B). Random weights score far above 0 already, the more the wider the layers. Two 3x3 convolutions of 256 channels
    take some seconds on a CPU core, of 512 minutes: wide and deep models want a GPU.
    """

    folders: tyro.conf.Positional[tuple[Path, ...]] = ()
    """run folders"""
    model: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """also this one, with random weights: of the zoo, timm:NAME or torchvision:NAME"""
    width: Rates = (1.0,)
    """of --model: rates of the hidden widths, one for all or one for each section"""
    depth: Depths = ()
    """of --model: blocks of the sections, one number for all or one for each"""
    seed: int = 0
    """of --model's weights"""
    first: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """compare the first block of each section as well, where shapes agree"""
    out: Annotated[Path, tyro.conf.arg(metavar="FILE")] = Path("similarity.png")
    """the figure; must be new"""
    device: str = "auto"
    """cpu, cuda, cuda:1, ...; auto takes a GPU if there is one"""

    def run(self) -> int:
        """Measure, print and draw."""
        if not self.folders and self.model is None:
            raise FLError("give run folders, or an untrained --model")
        if self.model is None and (self.width, self.depth, self.seed) != ((1.0,), (), 0):
            raise FLError("--width, --depth and --seed are --model's: name one, or leave them out")
        if not 0 <= self.seed < 2**32:
            raise FLError(f"--seed must be at least 0 and below 2^32, got {self.seed}")
        if not self.width:
            raise FLError("give at least one --width")
        if self.out.exists():
            raise FLError(f"{self.out} exists already: choose another --out")
        plot.check_file(self.out)
        device = pick_device(self.device)
        found = []
        for folder in self.folders:
            trained = load_model(folder)
            pair = [block_similarity(net.to(device), self.first) for net in (initial_model(folder), trained)]
            found.append(Compared(f"{folder} ({checkpoint.read_model(folder)[0].name})", *pair))
        if self.model is not None:
            width, depth = (one[0] if len(one) == 1 else one or None for one in (self.width, self.depth))
            spec = models.make_spec(self.model, width=width, depth=depth)
            net = models.create(Rng(self.seed).torch("weights"), spec)
            found.append(Compared(f"{self.model}, untrained", block_similarity(net.to(device), self.first)))
        plot.save(heat_maps(found), self.out)
        print("\n\n".join(map(table, found)))
        print(f"\nfigure: {self.out}")
        return 0

"""How far apart the weights of models of different size lie (FedFA, appendix 0.F, Table 10 and Figs. 7-9)."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import tyro
from matplotlib.figure import Figure
from torch import Tensor, nn

from fl import checkpoint, plot
from fl.errors import FLError
from fl.simulation import load_model
from surgery import Submodel, SurgeryError, Variation, layers, narrow, scale_variation, sections, state, ungraft
from surgery.similarity import convolutions
from zoo import Spec

_COLORS = ["black", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"]  # those of Okabe and Ito
_STYLES = ["-", "--", "-.", ":"]  # with them, 28 kinds of lines that differ in black and white as well
_MOST = 12  # lines that can be told apart
_BINS = 8  # at least
_SHOWN = 0.998  # share of a model's weights that the axis is wide enough for


class Member(NamedTuple):
    """A trained model of a family."""

    name: str
    spec: Spec
    model: nn.Module

    @property
    def parameters(self) -> int:
        """How many it has."""
        return sum(parameter.numel() for parameter in self.model.parameters())


def read(folders: Sequence[Path]) -> list[Member]:
    """The models of run folders, the one with the fewest parameters first. Raises FLError if they are no family."""
    if len(folders) < 2:
        raise FLError("give two run folders or more: the smallest model, and larger ones to compare with it")
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise FLError("give each run folder once")
    found = [Member(str(folder), checkpoint.read_model(folder)[0], load_model(folder)) for folder in folders]
    for one in found:
        if one.spec.name != found[0].spec.name:
            raise FLError(
                f"{found[0].name} holds a {found[0].spec.name} and {one.name} a {one.spec.name}: give widths and "
                "depths of one model"
            )
    found.sort(key=lambda one: one.parameters)
    for small, large in itertools.pairwise(found):
        if (small.spec.width, small.spec.depth) == (large.spec.width, large.spec.depth):
            raise FLError(f"{small.name} and {large.name} hold models of one width and depth: give different ones")
    return found


def place(small: nn.Module, large: nn.Module) -> Submodel:
    """The plan of a model within a wider and deeper one of its family: leading channels of the first blocks.

    Raises FLError or SurgeryError if it is no such.

    >>> import zoo
    >>> plan = place(zoo.create("resnet20", width=0.5, depth=1), zoo.create("resnet20", depth=2))
    >>> plan.small_shapes["section1.0.conv1.weight"], plan.shapes["section1.1.conv1.weight"]
    ((8, 8, 3, 3), (16, 16, 3, 3))
    """
    depths = [len(section.blocks) for section in sections(small)]
    if len(depths) != (number := len(sections(large))):
        raise FLError(f"the smaller model has {len(depths)} sections and the larger one {number}")
    shallow, dropped = ungraft(large, depths)
    return dropped.compose(narrow(shallow, like=small)[1])


def measure(members: Sequence[Member]) -> Variation:
    """The distance of every model from the first, which is the smallest."""
    smallest, *larger = members
    plans = []
    for one in larger:
        try:
            plans.append(place(smallest.model, one.model))
        except (FLError, SurgeryError) as error:
            raise FLError(f"{smallest.name} is no part of {one.name}: {error}") from None
    return scale_variation([state(one.model) for one in members], plans)


def table(members: Sequence[Member], variation: Variation) -> str:
    """Table 10: mean magnitude of the smallest model, distance of each other from it, and their ratio."""
    rows = [["model", "width", "depth", "parameters", "magnitude", "distance", "ratio"]]
    cells = [[f"{variation.magnitude.mean():.4f}", "-", "-"]]
    cells += [["-", f"{row.mean():.4f}", f"{ratio:.3f}"] for row, ratio in zip(variation.distance, variation.ratio)]
    for one, last in zip(members, cells):
        rows.append([one.name, _text(one.spec.width), _text(one.spec.depth), f"{one.parameters:,}", *last])
    widths = [max(map(len, column)) + 2 for column in zip(*rows)]
    return "\n".join(row[0].ljust(widths[0]) + "".join(map(str.rjust, row[1:], widths[1:])) for row in rows)


def _text(values: Sequence[float] | None) -> str:
    """Rates or depths, one number if all are the same.

    >>> _text((0.5, 0.5)), _text((1, 2)), _text(None)
    ('0.5', '1,2', '-')
    """
    texts = [f"{value:g}" for value in values or ()]
    return "-" if not texts else texts[0] if len(set(texts)) == 1 else ",".join(texts)


def ends(one: Member) -> dict[str, Tensor]:
    """The weights of the first and the last convolution in the order of execution, by name."""
    values = state(one.model)
    known = set(convolutions(values))
    order = [name for layer in layers(one.model, one.spec.example()) for name in layer.tensors if name in known]
    return {name: values[name] for name in (order[0], order[-1])}


def histograms(members: Sequence[Member]) -> Figure:
    """How the weights of each model's first and last convolution are distributed, one line a model (Figs. 7-9).

    Raises FLError for too many models.
    """
    if len(members) > _MOST:
        raise FLError(f"{len(members)} models are too many for one figure: give at most {_MOST}")
    figure = Figure(figsize=(9.6, 3.6), layout="constrained")
    weights = [[tensor.flatten().numpy() for tensor in ends(one).values()] for one in members]
    for panel, title, at in zip(figure.subplots(1, 2), ("first convolution", "last convolution"), (0, -1)):
        chosen = [arrays[at] for arrays in weights]
        edge = max(np.quantile(np.abs(values), _SHOWN) for values in chosen) or 1.0
        for number, (label, values) in enumerate(zip(_labels(members), chosen)):
            bins = np.linspace(-edge, edge, max(_BINS, round(2 * len(values) ** (1 / 3))) + 1)  # Rice's rule
            share = np.histogram(values, bins)[0] / len(values) / (bins[1] - bins[0])
            look = {"color": _COLORS[number % len(_COLORS)], "ls": _STYLES[number % len(_STYLES)]}
            panel.plot((bins[:-1] + bins[1:]) / 2, share, label=label, lw=1.4, **look)
        panel.set(title=title, xlabel="weight", ylabel="density", xlim=(-edge, edge))
        panel.title.set_fontsize(10)
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{members[0].spec.name}: weights of models of different size", fontsize=11)
    plot.legend_below(figure, 44)
    return figure


def _labels(members: Sequence[Member]) -> list[str]:
    """What tells the models apart: width and depth, and the folder where these do not."""
    sizes = [
        f"width {_text(one.spec.width)}" + (f", depth {_text(one.spec.depth)}" if one.spec.depth else "")
        for one in members
    ]
    return [size if sizes.count(size) == 1 else f"{size} ({one.name})" for one, size in zip(members, sizes)]


@dataclass(frozen=True)
class Scales:
    """Print how far models of one family lie from the smallest of them, and draw how their weights are distributed.

    Magnitude: mean L1 norm of the smallest model's weight maps (kernels of one filter and input channel), averaged over
    its convolutions. Distance: the same of its difference from the leading channels of the first blocks of a larger
    model. Ratio: distance over magnitude.
    """

    folders: tyro.conf.Positional[tuple[Path, ...]]
    """run folders, each with another width or depth of one model"""
    out: Annotated[Path, tyro.conf.arg(metavar="FILE")] = Path("scales.png")
    """the figure; must be new"""

    def run(self) -> int:
        """Measure, print and draw."""
        if self.out.exists():
            raise FLError(f"{self.out} exists already: choose another --out")
        plot.check_file(self.out)
        members = read(self.folders)
        variation = measure(members)
        plot.save(histograms(members), self.out)
        print(table(members, variation))
        print(f"\nfigure: {self.out}")
        return 0

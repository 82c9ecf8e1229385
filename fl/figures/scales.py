"""How the weights of models of different size are distributed (FedFA, Figs. 7-9)."""

from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from fl.analysis.scales import Member, brief, ends
from fl.base.errors import FLError
from fl.figures.style import caption, shorten

_COLORS = ["black", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"]  # those of Okabe and Ito
_STYLES = ["-", "--", "-.", ":"]  # with the colours, 28 kinds of lines; styles differ in black and white as well
_MOST = 12  # lines that can be told apart
_BINS = 8  # at least
_SHOWN = 0.998  # share of a model's weights that lie within the axis


def histograms(members: Sequence[Member]) -> Figure:
    """How the weights of each model's first and last convolution are distributed; a line for each model (Figs. 7-9).

    Raises FLError for too many models.
    """
    if len(members) > _MOST:
        raise FLError(f"{len(members)} models are too many for one figure: give at most {_MOST}")
    figure = Figure(figsize=(9.6, 3.6), layout="constrained")
    figure.get_layout_engine().set(w_pad=0.12)
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
    caption(figure, [], {line.get_label(): line for line in figure.axes[0].lines})
    return figure


def _labels(members: Sequence[Member]) -> list[str]:
    """Labels of the models: width and depth, and the folder if these are not enough to tell them apart."""
    sizes = [
        f"width {brief(one.spec.width)}" + (f", depth {brief(one.spec.depth)}" if one.spec.depth else "")
        for one in members
    ]
    return [size if sizes.count(size) == 1 else f"{size} ({shorten(one.name)})" for one, size in zip(members, sizes)]

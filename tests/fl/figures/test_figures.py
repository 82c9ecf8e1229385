"""Properties of the figures: axes, names, captions, and that texts do not lie on each other."""

import itertools
import math
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from selection import some

from fl.figures import curves
from fl.figures.clients import partition_map
from fl.figures.curves import MOST
from fl.partition import deal

DOCS = Path(__file__).resolve().parents[3] / "docs"
NAMES = ["fedavg", "fedprox", "fedmr", "fedgen", "clusamp", "fedexp", "fedasam", "fedmut", "indep", "fedavg_plus"]
NAMES += ["local"]


def rows(last=0.9, number=3, **more):
    """Rows of a run whose accuracy comes to `last`; further columns are given as lists or for all rounds."""
    result = []
    for at in range(number):
        row = {"round": at + 1, "seconds": 1.0, "accuracy": last * (at + 1) / number, "loss": 1.0 / (at + 1)}
        row |= {"models_cosine": 0.9, "tmac": 1e-4 * (at + 1), "megabytes": 1.0 * (at + 1)}
        result.append(row | {key: one[at] if isinstance(one, list) else one for key, one in more.items()})
    return result


@pytest.fixture
def draw(monkeypatch, tmp_path):
    """A function that makes a comparison of runs."""
    figures = []
    monkeypatch.setattr(curves, "save", lambda figure, _: figures.append(figure))

    def make(groups, title="title", along="round"):
        curves.comparison_figure(groups, title, tmp_path / "f.png", along)
        return figures[-1]

    return make


def caption(figure):
    return " ".join(legend.get_title().get_text().replace("\n", " ") for legend in figure.legends)


def legends(figure):
    """Those of panels."""
    return [one for one in (axis.get_legend() for axis in figure.axes) if one]


def legend(figure):
    return [text.get_text() for legend in legends(figure) for text in legend.get_texts()]


@pytest.mark.drawn
@pytest.mark.parametrize("number", some([2, 8, len(NAMES)], [len(NAMES)]))
def test_figures__the_legend_names_every_line_and_no_text_lies_on_another(draw, number):
    """Also of lines that end in one point; the renderer says where texts are."""
    figure = draw({name: [rows()] for name in NAMES[:number]})
    split = math.ceil(number / MOST)
    rows_of_legends = 3 if split > 1 else 1
    assert legend(figure) == NAMES[:number] * rows_of_legends
    shown = [line for one in legends(figure)[:split] for line in one.get_lines()]
    looks = [(line.get_color(), line.get_linestyle()) for line in shown]
    assert len(set(looks)) == number
    first, second, *_ = shown
    assert first.get_linewidth() > second.get_linewidth()  # lines on each other are both seen
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw_without_rendering()
    for key in range(3):
        panels = figure.axes[split * key : split * (key + 1)]
        assert all(len(axis.lines) == number for axis in panels)  # the others are behind
        assert len({axis.get_ylim() for axis in panels}) == 1
        named = [line for axis in panels for line in axis.lines if line.get_label() in NAMES]
        assert [(line.get_color(), line.get_linestyle()) for line in named] == looks
        for axis in panels:
            own = [line for line in axis.lines if line.get_label() in NAMES]
            assert len({line.get_color() for line in own}) == len(own) <= MOST
            assert len({line.get_linestyle() for line in own}) == min(len(own), 4)
    for axis in figure.axes[: split * rows_of_legends]:  # a legend is above its panel
        own = [line.get_label() for line in axis.lines if line.get_label() in NAMES]
        assert [text.get_text() for text in axis.get_legend().get_texts()] == own
    texts = [text for axis in figure.axes for text in [axis.xaxis.label, axis.yaxis.label, axis.title]]
    texts += [figure._suptitle, *figure.legends, *legends(figure)]
    boxes = [text.get_window_extent(renderer) for text in texts if getattr(text, "_text", "legend")]
    assert not [(a, b) for a, b in itertools.combinations(boxes, 2) if a.overlaps(b)]
    axes = [axis.get_window_extent(renderer) for axis in figure.axes]
    assert not [(a, b) for a, b in itertools.product(axes, boxes) if a.overlaps(b)]
    assert ("light grey" in caption(figure)) == (number > MOST)


def test_figures__axes_do_not_zoom_into_noise(draw):
    high = [0.9991, 0.9993, 0.9992]
    figure = draw({"fedavg": [rows(accuracy=high, models_cosine=[0.99998, 0.99999, 0.99999], loss=[2.3, 2.3001, 2.3])]})
    spans = {axis.get_ylabel(): np.ptp(axis.get_ylim()) for axis in figure.axes}
    assert spans["test accuracy"] == pytest.approx(0.02)
    assert spans["mean pairwise cosine\nof the models"] == pytest.approx(0.01)
    assert spans["test loss"] >= 0.02
    assert figure.axes[0].get_ylim()[1] < 1.001
    assert figure.axes[0].yaxis.get_major_formatter()(0.985, 0) == "98.5%"
    text = draw({"fedavg": [rows(perplexity=[40.0, 40.001, 40.0])]})
    (axis,) = (axis for axis in text.axes if axis.get_ylabel() == "test perplexity")
    low, high = axis.get_ylim()
    assert high / low == pytest.approx(1.1)
    assert axis.yaxis.get_major_formatter()(40.0, 0) == "40"
    assert draw({"fedavg": [rows(1.0)]}).axes[0].get_ylim()[1] < 1.02
    for value in (0.0, 1.0):  # one round is a point, on an axis that stays within 0 and 100 %
        axis = draw({"fedavg": [rows(value, number=1)]}).axes[0]
        low, high = axis.get_ylim()
        assert -0.01 < low <= value <= high < 1.01
        assert high - low >= 0.02
        assert axis.lines[0].get_marker() == "o"


def test_figures__the_caption_says_what_bands_are_and_they_stay_within_the_values(draw):
    figure = draw({"fedavg": [rows(0.99), rows(0.1)], "fedmr": [rows(0.5)]})
    assert caption(figure) == "line: mean, band: ± one standard deviation over 1 to 2 seeds (no band: one seed)"
    (band,) = figure.axes[0].collections
    heights = band.get_paths()[0].vertices[:, 1]
    assert heights.min() == 0
    assert heights.max() == 1
    assert caption(draw({"fedavg": [rows()]})) == ""


def test_figures__lines_that_stop_being_finite_say_so(draw):
    lost = [rows(loss=[1.0, math.nan, math.nan])]
    figure = draw({"fedavg": [rows()], "fedmr": lost, "indep": [rows(loss=math.inf)]})
    assert figure.axes[1].get_xlabel() == "round\nnot finite at the end: fedmr (nan), indep (inf)"
    assert figure.axes[0].get_xlabel() == "round"
    without = [[{name: value for name, value in row.items() if name != "loss"} for row in rows()]]
    assert draw({"fedavg": [rows()], "indep": without}).axes[1].get_xlabel() == "round\nnot measured: indep"
    alone = draw({"indep": [rows(loss=math.nan)]})
    assert "no finite value" in [text.get_text() for text in alone.axes[1].texts]


def test_figures__long_names_and_the_title_hold_no_absolute_path(draw):
    groups = {f"fedfa dataset=text:/home/me/data/{name}.txt": [rows()] for name in "ab"}
    figure = draw(groups, title="text:/home/me/data/a.txt, cnn")
    assert legend(figure) == [f"fedfa dataset=text:data/{n}.txt" for n in "ab"]
    assert figure.get_suptitle() == "text:data/a.txt, cnn"


@pytest.mark.parametrize(
    ("along", "scale", "label", "number"),
    [
        ("tmac", 10, "GMAC of all clients, forward passes only", "3"),
        ("tmac", 1e-4, "kMAC of all clients, forward passes only", "30"),
        ("megabytes", 500, "GB sent and received by a client (mean)", "1.5"),
        ("megabytes", 1, "MB sent and received by a client (mean)", "3"),
    ],
)
def test_figures__costs_have_units_that_suit_them(draw, along, scale, label, number):
    spent = [row[along] * scale for row in rows()]
    axis = draw({"fedavg": [rows(**{along: spent})]}, along=along).axes[0]
    assert axis.get_xlabel() == label
    assert axis.xaxis.get_major_formatter()(spent[-1], 0) == number


@pytest.mark.drawn
def test_figures__a_runs_curves_say_what_they_are(monkeypatch, tmp_path):
    figures = []
    monkeypatch.setattr(curves, "save", lambda figure, _: figures.append(figure))
    measured = rows(models_accuracy=0.99, models_std=0.2, loss=[1.0, 0.5, math.nan], train_loss=0.5)
    curves.run_figure(measured, "a run", tmp_path / "f.png")
    accuracy, loss, _ = figures[0].axes
    labels = [text.get_text() for axis in (accuracy, loss) for text in axis.get_legend().get_texts()]
    assert "participants' models: mean,\nband: ± standard deviation" in labels
    assert "test, global model, then nan" in labels
    assert accuracy.collections[0].get_paths()[0].vertices[:, 1].max() == 1


@pytest.mark.drawn
def test_figures__curves_of_a_run_before_its_first_evaluation_warn_of_nothing(recwarn, tmp_path):
    curves.run_figure([{"round": 1, "seconds": 1.0, "train_loss": 2.0}], "a run", tmp_path / "f.png")
    assert not recwarn.list


def test_deal__the_partition_says_its_colours_and_has_whole_numbers():
    y = torch.arange(1000) % 10
    partition = deal(y, "clusters", 10, np.random.default_rng(0), clusters=(2, 5), cluster_classes=(2, 1))
    figure = partition_map(partition, y, 10, "title /home/me/x/y")
    ticks = next(axis.get_yticks() for axis in figure.axes if "square root" in axis.get_ylabel())
    assert len(ticks) >= 3
    assert all(tick == int(tick) for tick in ticks)
    assert "cluster" in figure._supxlabel.get_text()
    assert figure.get_suptitle() == "title x/y"


def test_deal__the_partition_names_its_clients():
    y = torch.arange(1000) % 10
    partition = deal(y, "iid", 3, np.random.default_rng(0))
    labels = partition_map(partition, y, 10, "title", ["oslo", "lima", "x" * 40]).axes[0].get_yticklabels()
    assert [label.get_text() for label in labels] == ["oslo", "lima", "x" * 23 + "…"]


def test_figures__recombination_numbers_its_cells_and_explains_them(monkeypatch, tmp_path):
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    monkeypatch.setattr(sys, "argv", ["recombination.py", str(tmp_path / "r.png")])
    runpy.run_path(str(DOCS / "recombination.py"), run_name="__main__")
    (figure,) = figures
    assert "the trained model that the block comes from" in figure.legends[0].get_title().get_text()
    for axis in figure.axes:
        cells = axis.collections[0].get_array()
        assert [int(text.get_text()) - 1 for text in axis.texts] == cells.flatten().tolist()
        assert all(sorted(row) == list(range(5)) for row in cells.tolist())

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
from matplotlib.text import Text
from selection import some

from fl.analysis.similarity import Compared
from fl.figures import comparison, curves
from fl.figures.ends import spread
from fl.figures.lines import MOST
from fl.figures.partition import partition_map
from fl.figures.similarity import heat_maps
from fl.figures.style import COLORS, finish
from fl.partition import deal
from surgery import SectionSimilarity

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

    def make(groups, title="title", along="round"):
        figures = []
        monkeypatch.setattr(comparison, "save", lambda figure, _: figures.append(figure))
        comparison.comparison_figure(groups, title, tmp_path / "f.png", along)
        return figures[0]

    return make


def caption(figure):
    return " ".join(legend.get_title().get_text().replace("\n", " ") for legend in figure.legends)


@pytest.mark.drawn
@pytest.mark.parametrize("number", some([2, 5, len(NAMES)], [len(NAMES)]))
def test_names_stand_at_the_ends_of_lines_and_no_text_lies_on_another(draw, number):
    """Also of lines that end in one point; the renderer says where texts are."""
    figure = draw({name: [rows()] for name in NAMES[:number]})
    shown = [axis for axis in figure.axes if axis.get_visible()]
    for key in ("test accuracy", "test loss"):
        panels = [axis for axis in shown if axis.get_ylabel() == key]
        assert len(panels) == math.ceil(number / MOST)
        named = [text.get_text() for axis in panels for text in axis.texts]
        assert sorted(named) == sorted(NAMES[:number])
        assert all(len(axis.texts) <= MOST for axis in panels)
        assert all(len(axis.lines) == number for axis in panels)  # the others are behind
        assert len({axis.get_ylim() for axis in panels}) == 1
        for axis in panels:
            colors = [line.get_color() for line in axis.lines if line.get_label() in NAMES]
            assert colors == list(COLORS[: len(colors)])
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw_without_rendering()
    texts = [text for axis in shown for text in [*axis.texts, axis.xaxis.label, axis.yaxis.label, axis.title]]
    # the texts alone, without the lines that lead to them
    boxes = [Text.get_window_extent(text, renderer) for text in [*texts, figure._suptitle] if text.get_text()]
    assert not [(a, b) for a, b in itertools.combinations(boxes, 2) if a.overlaps(b)]
    axes = [axis.get_window_extent(renderer) for axis in shown]
    assert not [(a, b) for a, b in itertools.product(axes, boxes) if a.overlaps(b)]
    assert ("light grey" in caption(figure)) == (number > MOST)


def test_names_of_lines_that_end_early_stand_beside_their_ends(draw):
    short = [1e-5 * (at + 1) for at in range(3)]
    figure = draw({"fedavg": [rows()], "fedmr": [rows(tmac=short)], "local": [rows(0.5, tmac=short)]}, along="tmac")
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw_without_rendering()
    for axis in figure.axes:
        for text in axis.texts:
            (end, _), left = axis.transData.transform(text.xy), Text.get_window_extent(text, renderer).x0
            assert 0 < left - end < 0.5 * figure.dpi
    high = draw({"fedavg": [rows()], "local": [rows(megabytes=0.0)]}, along="megabytes").axes[0]
    assert [text.get_position()[0] for text in high.texts if text.get_text() == "local"] == [1]


def test_figures_of_three_panels_are_two_panels_wide(draw):
    """So that they can be read on a narrow screen; the accuracy has the first row."""
    figure = draw({"fedavg": [rows()], "fedmr": [rows()]})
    assert figure.get_figwidth() < 8
    figure.draw_without_rendering()
    accuracy, loss, cosine = (axis.get_position() for axis in figure.axes)
    assert accuracy.y0 > loss.y1
    assert accuracy.width > loss.width + cosine.width


def test_axes_do_not_zoom_into_noise(draw):
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


def test_the_caption_says_what_bands_are_and_they_stay_within_the_values(draw):
    figure = draw({"fedavg": [rows(0.99), rows(0.1)], "fedmr": [rows(0.5)]})
    assert caption(figure) == "line: mean, band: ± one standard deviation over 1 to 2 seeds (no band: one seed)"
    (band,) = figure.axes[0].collections
    heights = band.get_paths()[0].vertices[:, 1]
    assert heights.min() == 0
    assert heights.max() == 1
    assert not draw({"fedavg": [rows()]}).legends


def test_lines_that_stop_being_finite_say_so(draw):
    lost = [rows(loss=[1.0, math.nan, math.nan])]
    figure = draw({"fedavg": [rows()], "fedmr": lost, "indep": [rows(loss=math.inf)]})
    assert {text.get_text() for text in figure.axes[1].texts} == {"fedavg", "fedmr (nan)", "indep (inf)"}
    alone = draw({"indep": [rows(loss=math.nan)]})
    assert "no finite value" in [text.get_text() for text in alone.axes[1].texts]


def test_long_names_are_letters_that_the_legend_explains(draw):
    groups = {f"fedfa dataset=text:/home/me/data/{name}.txt": [rows()] for name in "ab"}
    figure = draw(groups, title="text:/home/me/data/a.txt, cnn")
    assert {text.get_text() for text in figure.axes[0].texts} == {"A", "B"}
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [
        f"{n.upper()}  fedfa dataset=text:data/{n}.txt" for n in "ab"
    ]
    assert figure.get_suptitle() == "text:data/a.txt, cnn"


@pytest.mark.parametrize(
    ("along", "scale", "label", "number"),
    [
        ("tmac", 1, "MMAC of all clients, forward passes only", "300"),
        ("tmac", 1e4, "TMAC of all clients, forward passes only", "3"),
        ("tmac", 10, "GMAC of all clients, forward passes only", "3"),
        ("tmac", 1e-4, "kMAC of all clients, forward passes only", "30"),
        ("megabytes", 1e3, "GB sent and received by a client (mean)", "3"),
        ("megabytes", 1, "MB sent and received by a client (mean)", "3"),
    ],
)
def test_costs_have_units_that_suit_them(draw, along, scale, label, number):
    spent = [row[along] * scale for row in rows()]
    axis = draw({"fedavg": [rows(**{along: spent})]}, along=along).axes[0]
    assert axis.get_xlabel() == label
    assert axis.xaxis.get_major_formatter()(spent[-1], 0) == number


def test_one_round_is_a_point_with_a_name(draw):
    axis = draw({"fedavg": [rows(number=1)]}).axes[0]
    assert axis.lines[0].get_marker() == "o"
    assert [text.get_text() for text in axis.texts] == ["fedavg"]
    assert all(tick == int(tick) for tick in axis.get_xticks())


def test_a_runs_curves_say_what_they_are(monkeypatch, tmp_path):
    figures = []
    monkeypatch.setattr(curves, "save", lambda figure, _: figures.append(figure))
    measured = rows(models_accuracy=0.99, models_std=0.2, loss=[1.0, 0.5, math.nan], train_loss=0.5)
    curves.run_figure(measured, "a run", tmp_path / "f.png")
    accuracy, loss, _ = figures[0].axes
    labels = [text.get_text() for axis in (accuracy, loss) for text in axis.get_legend().get_texts()]
    assert "participants' models: mean,\nband: ± standard deviation" in labels
    assert "test, global model, then nan" in labels
    assert accuracy.collections[0].get_paths()[0].vertices[:, 1].max() == 1


def test_spread_places_keep_their_order_and_distance():
    generator = np.random.default_rng(0)
    for number in (1, 2, 5, 9):
        wanted = generator.random(number)
        places = spread(wanted, 0.1)
        assert np.argsort(places).tolist() == np.argsort(wanted).tolist()
        assert (np.diff(sorted(places)) > 0.1 - 1e-9).all()
        assert 0 <= min(places) <= max(places) <= 1 + 1e-9


def test_a_flat_axis_of_a_share_stays_within_0_and_100_percent():
    for value in (0.0, 1.0):
        axis = Figure().subplots()
        axis.plot([1, 2], [value, value])
        finish(axis, "accuracy")
        low, high = axis.get_ylim()
        assert high - low >= 0.02
        assert low <= value <= high
        assert low > -0.01
        assert high < 1.01


def test_the_partition_says_its_colours_and_has_whole_numbers():
    y = torch.arange(1000) % 10
    partition = deal(y, "clusters", 10, np.random.default_rng(0), clusters=(2, 5), cluster_classes=(2, 1))
    figure = partition_map(partition, y, 10, "title /home/me/x/y")
    bar = next(axis for axis in figure.axes if "square root" in axis.get_ylabel())
    assert all(tick == int(tick) for tick in bar.get_yticks())
    assert len(bar.get_yticks()) >= 3
    assert "cluster" in figure._supxlabel.get_text()
    assert figure.get_suptitle() == "title x/y"


def test_recombination_numbers_its_cells_and_explains_them(monkeypatch, tmp_path):
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


def test_titles_of_heat_maps_hold_no_absolute_path():
    section = SectionSimilarity("one", ("one.1", "one.2"), {"w": torch.tensor([[1.0, 0.5], [0.5, 1.0]])})
    figure = heat_maps([Compared("/home/me/runs/pair/fedavg-seed0 (preresnet20)", [section])])
    assert [part.get_suptitle() for part in figure.subfigs] == ["pair/fedavg-seed0 (preresnet20)"]

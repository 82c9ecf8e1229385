import re

import numpy as np
import pytest
import torch
from refusals import fl_refused
from torch import nn

from benchmarks.papers.models.__main__ import main
from benchmarks.papers.models.figures import heat_maps, histograms
from benchmarks.papers.models.similarity import SectionSimilarity, block_similarity
from benchmarks.papers.models.weights import Compared, Member, ends, initial_model, measure, read, similarity_table
from fl import load_model, models, simulate
from fl.base.errors import FLError
from fl.base.rng import Rng
from fl.runs import checkpoint
from fl.runs.assembly import build
from fl.settings import Config
from surgery import state
from zoo import Spec

CONFIG = Config.of(algorithm="fedavg", model="preresnet20", width=0.25, depth=(2, 1, 3), seed=3)


@pytest.fixture
def make_run(tmp_path):
    """A function that writes a run folder with random weights."""

    def make(name="run", **changes):
        config = CONFIG.replace(**changes)
        folder, spec = tmp_path / name, config.model.spec(config.data, 10, 1, 8)
        folder.mkdir()
        (folder / "config.yaml").write_text(config.to_yaml())
        model = models.create(torch.Generator().manual_seed(7), spec)
        checkpoint.save(folder, {"global": state(model)}, 1, spec, {})
        return folder

    return make


@pytest.mark.slow
def test_models__a_run_is_compared_with_the_weights_it_began_with(tmp_path):
    config = CONFIG.replace(rounds=1, clients=2, participants=1, local_epochs=1, batch_size=500)
    began = build(config)[1].init()["global"]
    simulate(config, tmp_path / "run")
    again = state(initial_model(tmp_path / "run"))
    assert all(torch.equal(began[name], again[name]) for name in began)
    assert not torch.equal(state(load_model(tmp_path / "run"))["stem.conv.weight"], again["stem.conv.weight"])


@pytest.mark.nightly
@pytest.mark.drawn
def test_models__similarity_of_a_run_and_of_an_untrained_model(make_run, tmp_path, capsys):
    folder, out = make_run(depth=(3, 1, 4)), tmp_path / "a.png"
    flags = ["--model", "preresnet20", "--width", "0.25", "--depth", "3,1,1", "--seed", "5", "--out", str(out)]
    assert main(["similarity", str(folder), *flags]) == 0
    text = capsys.readouterr().out
    before, after = block_similarity(initial_model(folder)), block_similarity(load_model(folder))
    assert [section.name for section in before] == ["section1", "section3"]
    for one, two, pairs in zip(before, after, (1, 3)):
        for layer, name in (("conv1.weight", "conv1"), ("conv2.weight", "conv2"), (None, "all")):
            a, b = one.mean(layer), two.mean(layer)
            line = f"{name} {pairs if layer else 2 * pairs} {a:.4f} {b:.4f} {b - a:+.4f}"
            assert re.search(r" +".join(map(re.escape, line.split())) + "\n", text)
    net = Spec("preresnet20", width=0.25, depth=(3, 1, 1)).build(Rng(5).torch("weights"))
    (untrained,) = block_similarity(net)
    assert re.search(rf"all +2 +{untrained.mean():.4f}\n", text)
    assert str(out) in text
    assert out.stat().st_size > 10_000
    shallow = str(make_run("b", depth=(2, 1, 1)))
    assert main(["similarity", shallow, "--out", str(tmp_path / "b.png")]) == 2
    assert "deeper model" in capsys.readouterr().err
    assert main(["similarity", shallow, "--first", "--out", str(tmp_path / "b.png")]) == 0
    assert re.search(r"conv2 +1 ", capsys.readouterr().out)


def test_models__pairs_without_a_value_do_not_count():
    nan = float("nan")
    layers = {"a.weight": torch.tensor([[1, nan, nan], [nan, 1, 0.25], [nan, 0.25, 1]])}
    section = SectionSimilarity("one", ("one.1", "one.2", "one.3"), layers)
    assert re.search(r"a +1 +0.2500\n +all +1 +0.2500$", similarity_table(Compared("", [section])))
    assert heat_maps([Compared("", [section])]).axes[0].images[0].get_array().count() == 2


def test_models__heat_maps_show_every_section_before_and_after():
    def section(name, value, blocks=3):
        matrix = torch.full((blocks, blocks), value).fill_diagonal_(1)
        return SectionSimilarity(name, tuple(f"{name}.{1 + b}" for b in range(blocks)), {"w": matrix, "v": matrix / 2})

    before, after = ([section("one", low), section("two", high, 9)] for low, high in ((0.2, 0.4), (0.4, 0.6)))
    figure = heat_maps([Compared("/home/me/runs/pair/a (net)", before, after), Compared("y", before[:1])])
    assert [part.get_suptitle() for part in figure.subfigs] == ["pair/a (net)", "y"]  # no absolute path
    panels = [axis for axis in figure.axes if axis.images and axis.get_visible()]
    assert [(panel.get_title(), panel.get_ylabel().split("\n")[0]) for panel in panels] == [
        ("one", "untrained"), ("two", ""), ("", "trained"), ("", ""), ("one", "untrained"),
    ]  # fmt: skip
    means = [panel.images[0].get_array().mean() for panel in panels]
    assert means == pytest.approx([0.15, 0.3, 0.3, 0.45, 0.15])  # without the diagonal
    assert {panel.images[0].get_clim() for panel in panels} == {(0.1, 0.5)}
    assert [text.get_text() for text in panels[0].texts] == ["0.15"] * 6
    with fl_refused("argument"):
        heat_maps([Compared("x", before)] * 7)


@pytest.mark.nightly
@pytest.mark.drawn
def test_models__scales_of_a_family(make_run, tmp_path, capsys):
    larger = make_run("b", width=(0.5, 0.25, 1.0), depth=(3, 1, 2))
    wider, smallest = make_run("a", width=(0.5,), depth=(1,)), make_run("c", depth=(1,))
    out = tmp_path / "s.png"
    assert main(["scales", *map(str, (larger, wider, smallest)), "--out", str(out)]) == 0
    text = capsys.readouterr().out
    members = read([larger, wider, smallest])
    assert [one.name for one in members] == [str(smallest), str(wider), str(larger)]
    magnitude, sums = 0.0, [0.0, 0.0]
    small, *others = (one.model for one in members)
    convolutions = [name for name, module in small.named_modules() if isinstance(module, nn.Conv2d)]
    for name in convolutions:  # they have the same names in the larger ones, whose first blocks are meant
        weight = small.get_submodule(name).weight
        maps = weight.shape[0] * weight.shape[1] * len(convolutions)
        magnitude += weight.abs().sum().item() / maps
        for k, other in enumerate(others):
            corner = other.get_submodule(name).weight[: weight.shape[0], : weight.shape[1]]
            sums[k] += (weight - corner).abs().sum().item() / maps
    assert re.search(rf"{smallest} +0.25 +1 +[\d,]+ +{magnitude:.4f} +- +-\n", text)
    assert re.search(rf"{wider} +0.5 +1 +[\d,]+ +- +{sums[0]:.4f} +{sums[0] / magnitude:.3f}\n", text)
    assert re.search(rf"{larger} +0.5,0.25,1 +3,1,2 +[\d,]+ +- +{sums[1]:.4f} +{sums[1] / magnitude:.3f}\n", text)
    assert f"figure: {out}" in text
    assert out.stat().st_size > 10_000
    with pytest.raises(FLError, match="hold models of one width and depth: give different ones"):
        read([smallest, wider, make_run("d", width=(0.5,), depth=(1,))])


def test_models__the_first_and_the_last_convolution_are_those_of_the_forward_pass(make_run):
    members = read([make_run("a", depth=(1,)), make_run("b", depth=(1, 1, 2))])
    assert [list(ends(one)) for one in members] == [
        ["stem.conv.weight", "section3.0.conv2.weight"],  # registered before the shortcut
        ["stem.conv.weight", "section3.1.conv2.weight"],
    ]
    figure = histograms(members)
    for panel, at in zip(figure.axes, (0, 1)):
        for line, one in zip(panel.lines, members, strict=True):
            x, y = line.get_data()
            weights = list(ends(one).values())[at].flatten().numpy()
            assert y.sum() * (x[1] - x[0]) == pytest.approx(1, abs=0.1)
            assert np.sqrt((y * x**2).sum() / y.sum()) == pytest.approx(weights.std(), rel=0.15)
        looks = {(line.get_color(), line.get_linestyle()) for line in panel.lines}
        assert len(looks) == 2
    assert [text.get_text() for text in figure.legends[0].texts] == ["width 0.25, depth 1", "width 0.25, depth 1,1,2"]
    with fl_refused("argument"):
        histograms(members * 7)


def test_models__that_are_no_family_are_refused(make_run):
    small, wide, other = make_run("a"), make_run("b", width=(0.5,), depth=(1,)), make_run("c", model="cnn", depth=())
    for folders, reason in (
        ([small], "two run folders or more"),
        ([small, small], "each run folder once"),
        ([small, other], "a preresnet20 and .* a cnn"),
    ):
        with pytest.raises(FLError, match=reason):
            read(folders)
    with fl_refused("mismatch", "'section1'"):
        measure(read([small, wide]))  # the wider one is shallower
    with fl_refused("mismatch", "'stem.conv.weight'"):
        measure([Member("x", one.spec, one.model) for one in read([small, wide])[::-1]])


def test_models__what_cannot_be_measured_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for flags, said in (
        ("", "give run folders, or an untrained --model"),
        ("nowhere", "nowhere"),
        ("--model nothing", "nothing"),
        ("--model cnn", "no section"),
        ("--model resnet20 --out a.doc", "'doc'"),
    ):
        assert main(["similarity", *flags.split()]) == 2
        assert said in capsys.readouterr().err

import math
import re

import pytest
from matplotlib.collections import LineCollection, PathCollection
from matplotlib.colors import to_hex
from refusals import fl_refused

from fl import compare
from fl.algorithms.fedmr import FedMROptions
from fl.analysis import groups
from fl.analysis.groups import summarise_run
from fl.extensions.attack import AttackOptions
from fl.extensions.defence import Defence
from fl.figures import curves as plot
from fl.figures.style import COLORS
from fl.models.architectures import ArchitectureOptions
from fl.runs.metrics import Metrics, read
from fl.settings import Config, Experiment


def left_by(folder, rows, **settings):
    """What a run of these rows leaves, which are numbered from 1."""
    folder.mkdir()
    (folder / "config.yaml").write_text(Config.of(**settings).to_yaml())
    metrics = Metrics(folder / "metrics.csv")
    for number, row in enumerate(rows, 1):
        metrics.add({"round": number, "seconds": 2.0, "train_loss": 1.0, **row})
    return folder


def fake_run(folder, accuracies, **settings):
    return left_by(folder, [{"accuracy": one, "f1": one, "loss": 2.0} for one in accuracies], **settings)


@pytest.mark.drawn
def test_compare__runs_are_grouped_by_what_differs_beside_the_seed(tmp_path, capsys):
    """Those of one command in its order of methods."""
    (tmp_path / "config.yaml").write_text(Experiment.of(algorithms=("fedmr", "fedavg")).to_yaml())
    fake_run(tmp_path / "a", [0.1, 0.5], algorithm="fedavg", seed=0)
    fake_run(tmp_path / "b", [0.2, 0.7], algorithm="fedavg", seed=1)
    fake_run(tmp_path / "c", [0.3, 0.8], algorithm="fedmr")
    fake_run(tmp_path / "d", [0.3, 0.9], algorithm="fedmr", fedmr=FedMROptions(segment_fraction=0.5))
    out = tmp_path / "figure.png"
    assert compare.main([str(tmp_path), "--out", str(out)]) == 0
    rows = [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()[1:4]]
    assert rows == ["fedmr segment_fraction=0.0", "fedmr segment_fraction=0.5", "fedavg"]
    assert out.read_bytes().startswith(b"\x89PNG")


def found(*folders):
    """Their runs in groups."""
    return groups.group(groups.find_runs(folders))


def test_compare__a_run_without_an_evaluated_round_is_left_out_and_named(tmp_path, caplog):
    fake_run(tmp_path / "a", [0.1, 0.5], algorithm="fedavg")
    left_by(tmp_path / "b", [{"train_loss": 1.0}], algorithm="fedmr")
    assert [*found(tmp_path)] == ["fedavg"]
    assert str(tmp_path / "b") in caplog.text
    assert str(tmp_path / "a") not in caplog.text
    for named in ([tmp_path / "b"], [tmp_path / "a", tmp_path / "b"]):
        with fl_refused("folder"):
            found(*named)


def test_compare__the_table_has_mean_and_sample_standard_deviation(tmp_path):
    for seed, last in enumerate((0.5, 0.7)):
        fake_run(tmp_path / f"s{seed}", [0.1, 0.9, *[last] * 9], algorithm="fedavg", seed=seed)
    (row,) = groups.make_table(found(tmp_path)).splitlines()[1:]
    assert f"60.00 ± {100 * math.sqrt(0.02):.2f}" in row  # final: 50 and 70
    assert "63.00 ±" in row  # the last ten: 54 and 72
    assert "90.00 ± 0.00" in row  # best


@pytest.mark.parametrize(("sent", "heading", "traffic"), [(4e4, "kB", "40.00"), (4e6, "MB", "4.00")])
def test_compare__small_traffic_is_in_kilobytes(tmp_path, sent, heading, traffic):
    row = {"accuracy": 0.5, "f1": 0.5, "loss": 2.0, "bytes_down": sent, "bytes_up": 0}
    left_by(tmp_path / "a", [row], algorithm="fedavg", clients=4, participants=4)
    for text in (groups.make_table(found(tmp_path)), groups.target_table(found(tmp_path), 0.5)):
        head, line = map(cells, text.splitlines()[-2:])
        assert line[head.index(heading)] == traffic


@pytest.mark.drawn
def test_compare__what_cannot_be_compared_is_refused(tmp_path, capsys):
    run, out = fake_run(tmp_path / "a", [0.5]), str(tmp_path / "f.png")
    for against, lacking in (("traffic", "bytes"), ("macs", "macs")):
        assert compare.main([str(run), "--out", out, "--against", against]) == 2
        assert f"a/metrics.csv does not have the {lacking} of every round" in capsys.readouterr().err
    with fl_refused("folder"):
        groups.find_runs([fake_run(tmp_path / "none", [])])
    fake_run(tmp_path / "twin", [0.6])
    with fl_refused("argument"):
        found(run, tmp_path / "twin")
    assert len(groups.find_runs([run, run])) == 1  # the same folder twice is one run
    assert compare.main([str(run), "--out", str(tmp_path / "figure.svg")]) == 0
    assert "<svg" in (tmp_path / "figure.svg").read_text()


def own_run(folder, accuracies, losses, more=(), **settings):
    """A run whose clients' own test accuracy is `accuracies`, and macro-F1 half of that."""
    rows = []
    for number, (accuracy, loss) in enumerate(zip(accuracies, losses, strict=True)):
        local = {"accuracy": accuracy, "std": 0.0, "f1": accuracy / 2, "f1_std": 0.0}
        row = {"accuracy": 0.1, "loss": 2.0, "f1": 0.1, "local_valid_loss": loss}
        rows.append(row | {f"local_test_{key}": one for key, one in local.items()} | (more[number] if more else {}))
    return left_by(folder, rows, local_valid=0.1, local_test=0.2, **settings)


@pytest.fixture
def drawn(monkeypatch):
    """The figures that would have been written."""
    figures = []
    monkeypatch.setattr(plot, "save", lambda figure, _: figures.append(figure))
    return figures


def test_compare__clients_own_data_count_in_the_round_that_validation_selects(tmp_path, drawn):
    for seed, chosen in enumerate((0.5, 0.7)):
        own_run(tmp_path / f"a{seed}", [0.2, chosen, 0.9], [3.0, 1.0, 2.0], algorithm="fedavg", seed=seed)
    own_run(tmp_path / "b", [0.3], [1.0], algorithm="fedprox")
    head, averaged, proximal = compare.compare([tmp_path], tmp_path / "f.png").splitlines()
    scores = ["clients' acc. %", "clients' F1 %", "global acc. %", "global loss", "global F1 %"]
    assert cells(head) == ["method", "seeds", "rounds", *scores, "seconds"]
    own = [f"60.00 ± {100 * math.sqrt(0.02):.2f}", f"30.00 ± {50 * math.sqrt(0.02):.2f}"]
    assert cells(averaged)[:5] == ["fedavg", "2", "3", *own]
    assert cells(proximal) == ["fedprox", "1", "1", "30.00", "15.00", "10.00", "2.000", "10.00", "2.0"]
    label = "mean test accuracy\non clients' own data"
    assert [axis.get_ylabel() for axis in drawn[0].axes] == ["test accuracy", label, "test loss"]
    assert drawn[0].axes[1].lines[0].get_ydata().tolist() == pytest.approx([0.2, 0.6, 0.9])

    fake_run(tmp_path / "c", [0.5], algorithm="fedmut")  # whose clients hold nothing out
    mixed = compare.compare([tmp_path], tmp_path / "f.png").splitlines()[0]
    assert cells(mixed)[3:6] == ["final acc. %", "best acc. %", "final loss"]
    assert "clients' acc" not in mixed
    assert "global" not in mixed
    assert [axis.get_ylabel() for axis in drawn[1].axes] == ["test accuracy", "test loss"]


def cells(line):
    return re.split(" {2,}", line)


def test_compare__costs_are_those_of_the_whole_run(tmp_path):
    """Of all rounds, evaluated or not; megabytes of a client of the whole population, with what peers sent it."""
    quarter = {"clients": 20, "participants": 5}
    for seed in (0, 1):
        more = [traffic(1e6, (1 + seed) * 1e6), traffic(1e6, 1e6, peers=3e6)]
        path = own_run(tmp_path / f"a{seed}", [0.2, 0.4], [2.0, 1.0], more, **quarter, seed=seed) / "metrics.csv"
        Metrics(path, read(path)).add({"round": 3, "seconds": 0.5, "train_loss": 1.0, **traffic(4e6, 0.0)})
    own_run(tmp_path / "old", [0.3], [1.0], algorithm="fedprox", **quarter)  # counted no bytes
    results = [summarise_run(run) for runs in found(tmp_path).values() for run in runs]
    assert [run.get("megabytes") for run in results] == [(2 + 8 + 4) / 4, (3 + 8 + 4) / 4, None]
    assert [run["seconds"] for run in results] == [4.5, 4.5, 2]
    rows = [cells(line)[-2:] for line in groups.make_table(found(tmp_path)).splitlines()]
    assert rows == [["MB", "seconds"], ["3.62", "4.5"], ["-", "2.0"]]


def traffic(down, up, level=None, peers=None):
    more = {"bytes_down": down, "bytes_up": up, "level": level, "bytes_peers": peers}
    return {key: value for key, value in more.items() if value is not None}


def test_compare__curves_against_traffic_and_time(tmp_path, drawn):
    """Megabytes of a client of the whole population; seeds are averaged round by round in both directions."""
    silent, half = [traffic(0.0, 0.0)] * 2, {"clients": 20, "participants": 10}
    for seed, up in enumerate((1e6, 3e6)):
        more = [traffic(1e6, up), traffic(1e6, up, peers=2e6)]
        own_run(tmp_path / f"a{seed}", [0.2, 0.4 + 0.2 * seed], [2.0, 1.0], more, **half, seed=seed)
        local = {**half, "algorithm": "indep", "seed": seed}
        own_run(tmp_path / f"l{seed}", [0.3 + 0.2 * seed, 0.9], [1.0, 2.0], silent, **local)
    every = {"algorithm": "fedprox", "clients": 20, "participants": 20}
    own_run(tmp_path / "p", [0.1, 0.2], [2.0, 1.0], [traffic(1e6, 1e6)] * 2, **every)
    out = tmp_path / "f.png"
    assert compare.main([str(tmp_path), "--out", str(out), "--against", "traffic"]) == 0
    axis = drawn[0].axes[1]
    assert axis.get_xlabel() == "MB sent and received by a client (mean)"
    lines = {line.get_label().split()[0]: line for line in axis.lines}
    # (2 + 4) / 2 / 2, then also 2 * 2 / 2 to peers
    assert lines["fedmr"].get_xydata().flatten() == pytest.approx([1.5, 0.2, 5.0, 0.5])
    assert lines["fedprox"].get_xdata().tolist() == pytest.approx([2, 4])
    assert (lines["indep"].get_linestyle(), lines["indep"].get_marker()) == ("--", "None")
    assert list(lines["indep"].get_ydata()) == pytest.approx([0.4, 0.4])  # the selected rounds' mean
    said = drawn[0].legends[0].get_title().get_text().replace("\n", " ")
    assert "dashed line from edge to edge: a method that spends nothing" in said
    assert compare.main([str(tmp_path), "--out", str(out), "--against", "seconds"]) == 0
    assert {tuple(line.get_xdata()) for line in drawn[1].axes[0].lines} == {(2.0, 4.0)}


def marks(axis):
    """Places and colour of the vertical lines."""
    found = [c for c in axis.collections if isinstance(c, LineCollection)]
    return [(line.get_segments()[0][0][0], to_hex(line.get_color()[0][:3])) for line in found]


@pytest.mark.slow
@pytest.mark.drawn
def test_compare__new_levels_are_vertical_lines_and_a_curve_that_ends_upright_has_a_dot(tmp_path, drawn):
    """The last level of femam trains what no one sends."""
    more = [traffic(1e6, 1e6, level) for level in (1, 1, 2, 2)] + [traffic(0.0, 0.0, 3)]
    folder = own_run(tmp_path / "a", [0.1, 0.1, 0.1, 0.1, 0.6], [1.0] * 5, more, participants=20)
    rows = read(folder / "metrics.csv")
    assert [type(row["level"]) for row in rows] == [int] * 5
    own_run(tmp_path / "b", [0.1] * 5, [1.0] * 5, more[:1] * 5, algorithm="fedavg", participants=20)
    for against, places, dots in (("rounds", [3, 5], []), ("traffic", [6, 8], [[[8, 0.6]]]), ("seconds", [6, 10], [])):
        compare.compare([tmp_path / "b", tmp_path / "a"], tmp_path / "f.png", against)
        for axis in drawn[-1].axes:
            assert marks(axis) == [(place, COLORS[1]) for place in places]
        own = drawn[-1].axes[1]
        assert [c.get_offsets().tolist() for c in own.collections if isinstance(c, PathCollection)] == dots
        (caption,) = drawn[-1].legends
        assert caption.get_title().get_text() == "vertical lines: the next level of fedmr"
    compare.compare([tmp_path / "b"], tmp_path / "f.png")
    assert not drawn[-1].legends  # no caption
    plot.run_figure(rows, "title", tmp_path / "f.png")
    for axis in drawn[-1].axes:
        assert [place for place, _ in marks(axis)] == [3, 5]
        assert [text.get_text() for text in axis.texts] == ["level 2", "level 3"]


def mac_run(folder, accuracies, macs=2e12, **settings):
    """Two clients of four a round, which takes 3 MB of a participant; what is None is not evaluated."""
    rows = []
    for number, accuracy in enumerate(accuracies, 1):
        row = traffic(1e6, 2e6) | ({"macs": number * macs} if macs else {})
        rows.append(row | ({"accuracy": accuracy, "loss": 1.0} if accuracy is not None else {}))
    return left_by(folder, rows, **{"algorithm": "fedfa", "clients": 4, "participants": 2} | settings)


@pytest.mark.slow
def test_compare__a_target_tells_what_runs_took_to_it(tmp_path, drawn):
    """Up to the first round that was evaluated and had it, also if it was lost again."""
    compare.compare([mac_run(tmp_path / "a0", [0.1, 0.7, 0.3])], tmp_path / "f.png", "macs")
    assert drawn[0].axes[0].lines[0].get_xdata().tolist() == pytest.approx([4, 12, 24])  # 2 clients, 2, 4 and 6 each
    assert drawn[0].axes[0].get_xlabel() == "TMAC of all clients, forward passes only"
    mac_run(tmp_path / "a1", [0.8, None, 0.9], seed=1)
    mac_run(tmp_path / "b0", [0.1, 0.69999], algorithm="nefl")
    mac_run(tmp_path / "b1", [None, None, 0.9], algorithm="nefl", seed=1)
    mac_run(tmp_path / "c0", [0.1], algorithm="heterofl")
    mac_run(tmp_path / "d0", [0.9], algorithm="fedrolex", macs=None)
    plain = compare.compare([tmp_path], tmp_path / "f.png")
    text = compare.compare([tmp_path], tmp_path / "f.png", target=0.7)
    assert text.startswith(plain + "\n\n")
    said, unit_of_traffic, unit, *lines = text.removeprefix(plain).strip().splitlines()
    assert "global test accuracy of 70% or more" in said
    assert unit_of_traffic.startswith("MB")
    assert "forward passes" in unit
    assert sorted(map(cells, lines)) == [
        ["fedfa", "2", "1.5", "2.25", "8.00", "3.0"],  # rounds 2 and 1
        ["fedrolex", "1", "1", "1.50", "-", "2.0"],
        ["heterofl", "0 of 1", "-", "-", "-", "-"],
        ["method", "seeds", "rounds", "MB", "TMAC", "seconds"],
        ["nefl", "1 of 2", "3", "4.50", "24.00", "6.0"],
    ]
    few = groups.target_table(found(mac_run(tmp_path / "e", [1.0], macs=1e8)), 1.0)
    assert [cells(line)[4] for line in few.splitlines()[3:]] == ["GMAC", "0.20"]


def test_compare__a_target_above_one_is_a_perplexity(tmp_path):
    row = {"accuracy": 0.1, "loss": 1.0}
    rows = [row | {"perplexity": one, "models_perplexity": one + 5} for one in (90.0, 50.0, 40.0)]
    folder = left_by(tmp_path / "a", rows, dataset="pydoc", model="transformer", partition="iid")
    text = compare.compare([folder], tmp_path / "f.png", target=50)
    head, line, _, said, *_, reached = text.splitlines()
    assert dict(zip(cells(head), cells(line), strict=True))["local perplexity"] == "45.00"
    assert "global test perplexity of 50 or less" in said
    assert cells(reached) == ["fedmr", "1", "2", "4.0"]
    image = fake_run(tmp_path / "b", [0.5], algorithm="fedavg")
    _, *mixed = map(cells, groups.make_table(found(folder, image)).splitlines())
    assert sum(row.count("-") for row in mixed) == 2  # neither has what is of the other's kind


def test_compare__local_accuracy_and_epsilon_have_columns(tmp_path, drawn):
    """The last that was measured; epsilon's also where some runs have none."""
    spent = {"epsilon": 0.5, "update_clip": 0.1}
    more = [{"models_own_accuracy": 0.25, **spent}, {"models_own_accuracy": 0.75}, {}]
    own_run(tmp_path / "a", [0.1] * 3, [1.0] * 3, more, algorithm="fedfa")
    own_run(tmp_path / "b", [0.1], [1.0], more[1:2], algorithm="nefl")
    text = compare.compare([tmp_path], tmp_path / "f.png")
    head, private, plain = map(cells, text.splitlines())
    assert head[8:] == ["local acc. %", "epsilon", "seconds"]
    assert (private[8:10], plain[8:10]) == (["75.00", "0.50"], ["75.00", "-"])
    assert drawn[0].axes[3].get_ylabel() == "longest update of a client"

    own_run(tmp_path / "c", [0.1], [1.0], algorithm="flexifed")  # whose models were not asked
    assert "local" not in compare.compare([tmp_path], tmp_path / "f.png")


def test_compare__labels_name_what_differs_and_was_given(tmp_path):
    """As the flags are written; architectures only of methods whose clients may differ in them."""
    few, many = ArchitectureOptions(widths=(0.5,)), ArchitectureOptions(widths=(0.5, 1.0), choose="cycle")
    for name, settings in {
        "a": {"attack": AttackOptions(share=0.2)},
        "b": {"defence": Defence("median")},
        "c": {"architectures": few},
        "d": {"architectures": many},
        "e": {"algorithm": "fedavg"},
        "f": {"algorithm": "fedavg", "participation": 0.5, "seed": 1},
    }.items():
        mac_run(tmp_path / name, [0.5], **settings)
    for names, labels in {
        "ab": ["fedfa attack.share=0.2 defence.rule=mean", "fedfa attack.share=0.0 defence.rule=median"],
        "cd": [
            "fedfa architectures.widths=0.5 architectures.choose=zico",
            "fedfa architectures.widths=0.5,1.0 architectures.choose=cycle",
        ],
        "ce": ["fedfa", "fedavg"],
        "ef": ["fedavg participants=2", "fedavg participation=0.5"],
    }.items():
        assert list(found(*(tmp_path / name for name in names))) == labels

import csv
import itertools
import math
import shutil
from operator import attrgetter
from pathlib import Path

import numpy as np
import pytest
from fl_flags import TINY
from matplotlib.collections import LineCollection
from matplotlib.colors import LogNorm, to_hex
from matplotlib.figure import Figure
from rounds import results

import fl
from fl import run as cli
from fl import sweep
from fl.analysis.groups import Run, find_runs, group
from fl.base.errors import FLError
from fl.federation import Federation
from fl.figures import sweep as sweep_figures
from fl.figures.style import COLORS
from fl.runs.metrics import read, selected
from fl.settings import Config
from fl.sweep import Sweep

pytestmark = pytest.mark.slow


def names(folder):
    return {str(path.parent.relative_to(folder)) for path in folder.rglob("metrics.csv")}


def table(folder):
    with open(folder / "sweep.csv", newline="") as file:
        return list(csv.DictReader(file))


QUICK = [*TINY, "--rounds", "2", "--backend", "loop"]


def swept(tmp_path, *arguments, name="s", code=0):
    quick = [word for k in range(0, len(QUICK), 2) if QUICK[k] != f"--{arguments[0]}" for word in QUICK[k : k + 2]]
    assert sweep.main([*arguments[:2], *quick, *arguments[2:], "--out", str(tmp_path), "--name", name]) == code
    return tmp_path / name


@pytest.fixture(autouse=True)
def no_figures_of_single_runs(monkeypatch):
    """To save time: they are tested with fl.run."""
    monkeypatch.setattr("fl.figures.curves.run_figure", lambda *_: None)


@pytest.fixture
def drawn(monkeypatch):
    """The figures that would have been written."""
    figures: list[Figure] = []
    monkeypatch.setattr(sweep_figures, "save", lambda figure, path: figures.append(figure))
    return figures


def stop_at(monkeypatch, number):
    """Ctrl-C in the number-th training of a round."""
    original, calls = Federation.train, []

    def train(fed, *rest):
        calls.append(1)
        if len(calls) == number:
            raise KeyboardInterrupt
        return original(fed, *rest)

    monkeypatch.setattr(Federation, "train", train)
    return calls


@pytest.mark.slow
@pytest.mark.drawn
def test_every_value_runs_with_every_method_and_seed_and_is_a_plain_run(tmp_path, capsys):
    folder = swept(tmp_path, "participants", "4,1", "--algorithm", "fedavg,indep", "--seeds", "0,1", "--rounds", "1")
    runs = {f"participants={k}/{m}-seed{s}" for k in (4, 1) for m in ("fedavg", "indep") for s in (0, 1)}
    assert names(folder) == runs
    flags = ["--participants", "1", "--algorithm", "indep", "--seeds", "1", "--rounds", "1"]
    assert cli.main([*QUICK, *flags, "--out", str(tmp_path), "--name", "plain"]) == 0
    assert results(folder / "participants=1/indep-seed1") == results(tmp_path / "plain")

    text = (folder / "sweep.txt").read_text()
    assert text in capsys.readouterr().out + "\n"
    labels = [tuple(line.split()[:2]) for line in text.splitlines()[1:]]
    assert labels == [(f"participants={k}", m) for k in (4, 1) for m in ("fedavg", "indep")]
    for row in table(folder):
        k, method = row["participants"], row["method"]
        last = [read(folder / f"participants={k}/{method}-seed{s}/metrics.csv")[-1]["accuracy"] for s in (0, 1)]
        assert float(row["accuracy"]) == pytest.approx(np.mean(last))
        assert float(row["accuracy_std"]) == pytest.approx(np.std(last, ddof=1))
        assert row["seeds"] == "2"
        costs = find_runs([folder / f"participants={k}/{method}-seed0"])[0].rows
        share = int(k) / 4 / 1e6
        assert float(row["megabytes"]) == pytest.approx(share * sum(r["bytes_down"] + r["bytes_up"] for r in costs))
        assert float(row["seconds"]) > 0
    for figure in ("curves.png", "values.png"):
        assert (folder / figure).read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("option", "values", "sizes"), [("samples", "400,600", [400, 600]), ("pool-test-set", "false,true", [1437, 1797])]
)
def test_every_value_has_the_data_that_it_asks_for(tmp_path, option, values, sizes):
    every = ["--samples", "0"] if option == "pool-test-set" else []
    folder = swept(tmp_path, option, values, *every, "--algorithm", "fedavg", "--rounds", "1", "--local-test", "0.2")
    dealt = []
    for value in values.split(","):
        with open(folder / f"{option}={value}/fedavg-seed0/clients.csv") as file:
            dealt.append(sum(int(row[part]) for row in csv.DictReader(file) for part in ("train", "valid", "test")))
    assert dealt == sizes


@pytest.mark.slow
def test_a_method_that_does_not_read_the_option_runs_once(tmp_path, drawn):
    """And is the dashed line of the figures, whose form follows from what is compared."""
    folder = swept(tmp_path, "fedmr.segment-fraction", "0.02,0.5", "--algorithm", "fedavg,fedmr", "--rounds", "1")
    parts = {f"fedmr.segment-fraction={x}/fedmr-seed0" for x in (0.02, 0.5)}
    assert names(folder) == {"fedavg-seed0", *parts}
    paths = [folder / f"fedmr.segment-fraction={x}/fedmr-seed0" for x in ("0.02", "0.5")]
    assert [Config.read(path).fedmr.segment_fraction for path in paths] == [0.02, 0.5]
    lines = (folder / "sweep.txt").read_text().splitlines()[1:]
    assert lines[-1].startswith("fedavg (no fedmr.segment-fraction)  ")
    assert len(lines) == 3

    (axis,), (ends,) = (figure.axes for figure in drawn)  # one method: a line a value
    said = drawn[0].legends[0].get_title().get_text()
    assert "broken grey line: a method that does not read segment-fraction" in said
    assert [(line.get_label(), line.get_linestyle()) for line in axis.lines] == [
        ("segment-fraction = 0.02", "-"),
        ("segment-fraction = 0.5", "-"),
        ("fedavg", "--"),
    ]
    last = [read(path / "metrics.csv")[-1]["accuracy"] for path in paths]
    assert ends.lines[0].get_xydata().flatten() == pytest.approx([0.02, last[0], 0.5, last[1]])
    assert ends.get_xscale() == "log"

    drawn.clear()  # several methods: a panel a value; words side by side
    a, b, reference = (find_runs([path]) for path in (*paths, folder / "fedavg-seed0"))
    found = {("x", "m"): a, ("x", "n"): b, ("y", "m"): b, ("y", "n"): a, ("", "r"): reference}
    sweep_figures.curves_figure("fedmr.unit", found, "title", tmp_path / "f.png")
    sweep_figures.values_figure("fedmr.unit", found, "title", tmp_path / "f.png")
    assert [(axis.get_title(), len(axis.lines)) for axis in drawn[0].axes] == [("unit = x", 3), ("unit = y", 3)]
    assert drawn[1].axes[0].get_xticks().tolist() == [0, 1]
    assert drawn[1].axes[0].get_xscale() == "linear"


@pytest.mark.slow
def test_clients_own_data_are_in_table_file_and_figure(tmp_path, drawn):
    """Of several values of a tuple option, whose long names stand askew below the axis."""
    flags = ["--algorithm", "fedavg", "--lr-schedule", "step", "--local-test", "0.2", "--seeds", "0,1"]
    values = ["0.5,0.625,0.75,0.875", "0.25,0.5,0.75,0.96875"]
    folder = swept(tmp_path, "lr-steps", "/".join(values), *flags)
    selections = {}
    for value in values:
        rows = [read(folder / f"lr-steps={value}/fedavg-seed{seed}/metrics.csv") for seed in (0, 1)]
        selections[value] = [selected(run)["local_test_accuracy"] for run in rows]
    for row in table(folder):
        own = selections[row["lr-steps"]]
        assert float(row["local_test_accuracy"]) == pytest.approx(np.mean(own))
        assert float(row["local_test_accuracy_std"]) == pytest.approx(np.std(own, ddof=1))
    assert "clients' F1 %" in (folder / "sweep.txt").read_text().splitlines()[0]
    common, own = drawn[-1].axes
    assert own.get_ylabel() == "mean test accuracy\non clients' own data"
    assert own.lines[0].get_ydata().tolist() == pytest.approx([np.mean(v) for v in selections.values()])
    for axis in (common, own):
        assert [text.get_text() for text in axis.get_xticklabels()] == values
        assert all(text.get_rotation() > 0 for text in axis.get_xticklabels())


def fake(config, rows):
    """A run that measured these rows, which are numbered from 1."""
    same = {"seconds": 1.0, "accuracy": 0.1, "loss": 1.0}
    return Run(Path("nowhere"), config, [{"round": number, **same, **row} for number, row in enumerate(rows, 1)])


def test_curves_on_clients_own_data_with_marks_of_levels(tmp_path, drawn):
    """Where all runs have such data: a stranger's model says nothing of methods with a model a client."""

    def own(seed, level, method):
        rows = [{"level": at, "local_test_accuracy": n / 10 + seed / 5} for n, at in enumerate((1, 1, level, level), 1)]
        return fake(Config(algorithm=(method,), seeds=(seed,)), rows)

    femam = [own(seed, 2, "femam") for seed in (0, 1)]
    found = {("1", "femam"): femam, ("2", "femam"): femam[:1], ("", "fedavg"): [own(0, 1, "fedavg")]}
    sweep_figures.curves_figure("femam.prune", found, "title", tmp_path / "f.png")
    (axis,) = drawn[0].axes
    assert axis.get_ylabel() == "mean test accuracy\non clients' own data"
    assert [line.get_ydata()[-1] for line in axis.lines] == pytest.approx([0.5, 0.4, 0.4])
    lines = [c for c in axis.collections if isinstance(c, LineCollection)]
    assert [line.get_segments()[0][0][0] for line in lines] == [3, 3]
    assert [to_hex(line.get_color()[0][:3]) for line in lines] == list(COLORS[:2])
    assert "vertical lines: the next level of femam" in drawn[0].legends[0].get_title().get_text().replace("\n", " ")
    found["", "fedavg"] = [fake(Config(algorithm=("fedavg",)), [{}] * 4)]
    sweep_figures.curves_figure("femam.prune", found, "title", tmp_path / "f.png")
    assert drawn[1].axes[0].get_ylabel() == "test accuracy"


@pytest.mark.slow
def test_an_interrupted_sweep_goes_on_where_it_stopped(tmp_path, monkeypatch, capsys):
    whole = swept(tmp_path, "fedmr.stage1-rounds", "0,1", name="whole")
    with monkeypatch.context() as patch:
        stop_at(patch, 4)  # in the second value's second round
        broken = swept(tmp_path, "fedmr.stage1-rounds", "0,1", name="broken", code=130)
    assert f"python -m fl.sweep --resume {broken}" in capsys.readouterr().out
    assert not (broken / "sweep.txt").exists()
    with monkeypatch.context() as patch:
        trained = stop_at(patch, 0)
        assert sweep.main(["--resume", str(broken)]) == 0
    assert len(trained) == 1  # only the round that was missing
    assert names(broken) == names(whole)
    for name in names(whole):
        assert results(broken / name) == results(whole / name)
    tables = [[line.split()[:-1] for line in (one / "sweep.txt").read_text().splitlines()] for one in (broken, whole)]
    assert tables[0] == tables[1]  # but for the seconds
    assert sweep.main(["--resume", str(broken), "--rounds", "3"]) == 0
    assert [len(run.rows) for run in find_runs([broken])] == [3, 3]

    capsys.readouterr()
    for arguments, message in (
        (["--resume", str(broken), "--lr", "1"], "--lr cannot change"),
        (["--resume", str(broken), "--fedmr.stage1-rounds", "3"], "--fedmr.stage1-rounds is what is swept"),
        (["participants", "1,2", "--resume", str(broken)], "leave 'participants' out"),
        (["--resume", str(broken / "fedmr.stage1-rounds=0")], "is not the folder of a sweep"),
        (["--resume", str(run := next(broken.rglob("config.yaml")).parent)], f"`python -m fl.run --resume {run}`"),
    ):
        assert sweep.main(arguments) == 2
        assert message in capsys.readouterr().err
    assert cli.main(["--resume", str(broken)]) == 2  # no run, which fl.run would make something else of
    assert f"`python -m fl.sweep --resume {broken}`" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "values", "found"),
    [
        ("participants", "3,1", [3, 1]),
        ("lr", "1e-3,0.1", [0.001, 0.1]),
        ("fedmr.unit", "layer,tensor", ["layer", "tensor"]),
        ("width", "0.5,1", [(0.5,), (1.0,)]),
        ("lr-steps", "0.5,0.75/0.3", [(0.5, 0.75), (0.3,)]),
        ("flip", "true,false", [True, False]),
        ("dropout", "None,0.5", [None, 0.5]),
    ],
)
def test_values_are_of_the_flags_kind(option, values, found):
    config = Config(lr_schedule="step" if option == "lr-steps" else "constant", participation=0.5)
    made = Sweep.make([(option, values)], config)
    at, ((name, texts),) = attrgetter(option.replace("-", "_")), made.options.items()
    assert [(at(one), type(at(one))) for one in map(made.at, texts)] == [(value, type(value)) for value in found]
    assert Sweep.make([(name, "/".join(texts) if "/" in values else values)], config) == made


def test_a_sweep_survives_being_written(tmp_path):
    made = Sweep.make([("clusters", "2,5/3")], Config(partition="clusters", seeds=(0, 1), participation=0.5))
    (tmp_path / "sweep.yaml").write_text(made.write())
    assert Sweep.read(tmp_path) == made
    assert made.options == {"clusters": ("2,5", "3")}
    for text in ("a: [", "- 1", "option: lr", made.write().replace("clusters", "nonsense", 1)):
        (tmp_path / "sweep.yaml").write_text(text)
        with pytest.raises(FLError, match="nonsense" if "nonsense" in text else "is not a sweep"):
            Sweep.read(tmp_path)


@pytest.mark.slow
def test_a_value_that_diverges_is_left_out_and_the_others_go_on(tmp_path, caplog, capsys):
    folder = swept(tmp_path, "lr", "0.02,1e20,0.05", "--algorithm", "fedavg", code=1)
    assert "lr=1e%2B20" in caplog.text or "lr=1e20" in caplog.text
    assert "is left out: training diverged" in caplog.text
    assert [row["lr"] for row in table(folder)] == ["0.02", "0.05"]
    said = capsys.readouterr().out.split("training has failed in 1 of the runs:\n")[1]
    assert "fedavg-seed0: training diverged: in round 1 loss or weights of every client" in said
    assert swept(tmp_path, "lr", "1e20,1e21", "--algorithm", "fedavg", name="all", code=1)
    assert "error: training diverged" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("values", "scale"),
    [
        ("0 0.01 0.2", "symlog"),  # FedFA's Fig. 3
        ("0.2 0 0.01", "symlog"),
        ("0 0.1 0.2", "linear"),
        ("0 5 10 20 30 40", "linear"),
        ("0.001 0.01 1", "log"),
        ("1 1.1 100", "log"),
        ("-1 0 100", "linear"),
        ("3", "linear"),
        ("1 inf", "linear"),
    ],
)
def test_numbers_stand_at_their_own_place(values, scale):
    places = [0, 1] if "inf" in values else [float(text) for text in values.split()]
    assert sweep_figures.positions(values.split()) == (places, scale)


def test_values_of_methods_do_not_hide_each_other_nor_names_of_values_each_other(tmp_path, drawn):
    runs = [fake(Config(), [{"accuracy": share}]) for share in (0.5, 0.6)]
    values = ["0", "0.01", "0.011", "0.1", "1"]
    found = {(value, method): runs for value in values for method in ("fedavg", "fedmr")}
    sweep_figures.values_figure("fedprox.mu", found, "title", tmp_path / "f.png")
    (figure,) = drawn
    figure.draw_without_rendering()
    (axis,) = figure.axes
    lines = [line for line in axis.lines if line.get_label() in ("fedavg", "fedmr")]
    a, b = ([axis.transData.transform(xy)[0] for xy in line.get_xydata()] for line in lines)
    assert all(4 < abs(x - y) < 12 for x, y in zip(a, b, strict=True))
    assert [label.get_text() for label in axis.get_xticklabels()] == ["0", "0.01", "", "0.1", "1"]
    assert axis.get_xticks().tolist() == [float(value) for value in values]


@pytest.mark.parametrize(
    ("command", "runs", "check"),
    [
        ("lr 0.1,0.2 pydoc --rounds 3", "0.1 0.2", lambda one: one.lr),
        ("participants 3,4 fashion-mnist", "3 4", lambda one: one.cohort()),  # whose recipe names a share
        ("attack.amplify 1,20 --algorithm fedavg,fedfa --attack.share 0.2", "1 20", lambda one: one.attack.amplify),
        ("masked-loss false,true --algorithm fedavg,fedfa", "false true", lambda one: one.masked_loss),
        (
            "architectures.widths 1/0.5,1 --algorithm fedfa,nefl,fedavg",
            "1 0.5,1",
            lambda one: ",".join(f"{width:g}" for width in one.architectures.widths),
        ),
    ],
)
def test_every_method_that_reads_the_option_has_all_values(command, runs, check):
    made, _, resumed = sweep.command([*command.split(), "--name", "a"])
    assert not resumed
    found, last = made.runs(Path("a")), made.config.algorithm[-1:] * ("architectures" in command)
    methods = [name for name in made.config.algorithm if name not in last]
    assert list(found) == [*((value, m) for value in runs.split() for m in methods), *(("", m) for m in last)]
    for (text, _), members in found.items():
        for config in members.values():
            config.check()
            assert not text or str(check(config)).lower() in (text, f"{text}.0")


@pytest.mark.slow
@pytest.mark.drawn
def test_a_grid_has_a_run_for_each_pair_of_values_that_a_method_reads(tmp_path, capsys, monkeypatch):
    pairs = ["lr", "0.02,0.1", "fedmr.segment-fraction", "0.5,1"]
    flags = [*TINY, "--rounds", "1", "--algorithm", "fedavg,fedmr", "--out", str(tmp_path), "--name"]
    assert sweep.main([*pairs, *flags, "s"]) == 0
    folder = tmp_path / "s"
    said = capsys.readouterr().out
    assert "6 runs: 2 values of lr by 2 values of fedmr.segment-fraction, methods fedavg,fedmr" in said
    assert f"curves of all runs: python -m fl.compare {folder}" in said
    found = [(lr, x) for lr in ("0.02", "0.1") for x in ("0.5", "1")]
    fedmr = [f"lr={lr}/fedmr.segment-fraction={x}/fedmr-seed0" for lr, x in found]
    assert names(folder) == {*fedmr, "lr=0.02/fedavg-seed0", "lr=0.1/fedavg-seed0"}
    configs = [Config.read(folder / name) for name in fedmr]
    assert [(one.lr, one.fedmr.segment_fraction) for one in configs] == [tuple(map(float, at)) for at in found]
    rows = [(row["lr"], row["fedmr.segment-fraction"], row["method"], row["accuracy"]) for row in table(folder)]
    assert [row[:3] for row in rows] == [
        *((*at, "fedmr") for at in found),
        *((lr, "", "fedavg") for lr in ["0.02", "0.1"]),
    ]
    assert float(rows[1][3]) == read(folder / fedmr[1] / "metrics.csv")[-1]["accuracy"]
    lines = [line.split("  ")[0] for line in (folder / "sweep.txt").read_text().splitlines()[1:]]
    assert lines[1] == "lr=0.02 fedmr.segment-fraction=1 fedmr"
    assert lines[-1] == "lr=0.1 fedavg (no fedmr.segment-fraction)"
    assert (folder / "values.png").read_bytes().startswith(b"\x89PNG")
    assert not (folder / "curves.png").exists()
    assert set(group(fl.results(folder).runs)) == {
        *(f"fedmr lr={lr} segment_fraction={float(x)}" for lr, x in found), "fedavg lr=0.02", "fedavg lr=0.1"
    }  # fmt: skip

    assert sweep.main([*pairs, *flags, "s"]) == 2
    way = f"choose another --name, or go on with `python -m fl.sweep --resume {folder}`"
    assert f"{folder} exists already: {way}" in capsys.readouterr().err
    made, _, _ = sweep.command([*pairs, *flags, "s"])
    assert list(made.options) == pairs[::2]
    assert Sweep.read(folder) == made
    shutil.rmtree(folder / fedmr[2])
    trained = stop_at(monkeypatch, 0)
    assert sweep.main(["--resume", str(folder)]) == 0
    assert len(trained) == 1  # only the run that was missing
    assert sweep.main(["--resume", str(folder), "--fedmr.segment-fraction", "1"]) == 2
    assert "--fedmr.segment-fraction is what is swept" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "keys"),
    [
        (
            "partition iid,dirichlet alpha 0.1,1 --algorithm fedavg",  # iid has no alpha: one run, and not two alike
            ["dirichlet 0.1 fedavg", "dirichlet 1 fedavg", "iid  fedavg"],
        ),
        ("optimizer sgd,adam momentum 0,0.9 --algorithm fedavg", ["sgd 0 fedavg", "sgd 0.9 fedavg", "adam  fedavg"]),
        ("lr 0.1,0.2 fedmr.stage1-rounds 0,1 --algorithm fedavg,fedmr,indep", None),
        ("participants 3,4 lr 0.1,0.2 fashion-mnist", None),  # whose recipe names a share
        ("participation 0,0.2 participants 3,4 --algorithm fedavg", ["0 3 fedavg", "0 4 fedavg", "0.2  fedavg"]),
    ],
)
def test_an_option_is_swept_where_it_is_read(command, keys):
    made, _, _ = sweep.command([*command.split(), "--name", "a"])
    found = made.runs(Path("a"))
    assert keys is None or [" ".join(key) for key in found] == keys
    paths = [path for members in found.values() for path in members]
    assert len({*paths}) == len(paths)
    configs = [config for members in found.values() for config in members.values()]
    assert not [one for k, one in enumerate(configs) if one in configs[:k]]
    for key, members in found.items():
        for config in members.values():
            config.check()
            flags = {setting.flag: setting.value for setting in config.settings()}
            for option, text in zip(made.options, key[:-1], strict=True):
                assert (option in flags) == bool(text)
                assert not text or str(flags[option]) in (text, f"{text}.0")


@pytest.mark.parametrize(
    ("rows", "cols"),
    [
        ("0.001 0.01 0.1 1", "5 10 50 100"),
        ("sgd adamw", "0.0001 0.001 0.003 0.01 0.03 0.1 1"),
        ("0 1", "0.5,0.625 0.25,0.75,0.9"),
    ],
)
def test_heat_maps_have_one_scale_and_numbers_within_their_cells(tmp_path, drawn, rows, cols):
    options = {"lr": tuple(rows.split()), "batch-size": tuple(cols.split())}
    runs = {at: [fake(Config(seeds=(s,)), [{"accuracy": n / 40 + s / 100}]) for s in (0, 1)]
            for n, at in enumerate(itertools.product(*options.values()))}  # fmt: skip
    found = {(*at, "fedmr"): members for at, members in runs.items()}
    lost = (options["lr"][0], options["batch-size"][0], "fedmr")  # the order of values stays
    del found[lost]
    found |= {(row, "", "fedavg"): runs[row, options["batch-size"][0]] for row in options["lr"]}
    found["", "", "indep"] = runs[options["lr"][-1], options["batch-size"][-1]]
    sweep_figures.grid_figure(options, found, "title", tmp_path / "f.png")
    (figure,) = drawn
    figure.draw_without_rendering()
    *maps, _ = figure.axes
    assert [axis.get_title() for axis in maps] == ["fedmr", "fedavg", "indep"]
    means = np.arange(len(runs)).reshape(len(options["lr"]), -1) / 40 + 0.005
    numbers = {axis.get_title(): [text.get_text() for text in axis.texts] for axis in maps}
    assert sorted(numbers["fedmr"]) == sorted(["–", *(f"{100 * mean:.2f}" for mean in means.flatten()[1:])])
    assert numbers["fedavg"] == [f"{100 * mean:.2f}" for mean in means[:, 0]]
    assert numbers["indep"] == [f"{100 * means[-1, -1]:.2f}"]
    shown = maps[0].images[0].get_array()
    assert shown.mask.nonzero()[0].tolist() == shown.mask.nonzero()[1].tolist() == [0]
    assert shown.compressed() == pytest.approx(means.flatten()[1:])
    assert np.allclose(maps[1].images[0].get_array(), means[:, :1])
    assert len({axis.images[0].norm for axis in maps}) == 1
    assert maps[0].images[0].norm.vmin == pytest.approx(means.min())
    assert maps[0].images[0].norm.vmax == pytest.approx(means.max())
    for axis in maps:
        assert [one.get_text() for one in axis.get_yticklabels()] == list(options["lr"])
        for text, cell in zip(axis.texts, axis.patches, strict=True):
            box, room = text.get_window_extent(), cell.get_window_extent()
            assert room.x0 < box.x0 < box.x1 < room.x1
            assert room.y0 < box.y0 < box.y1 < room.y1
        boxes = [one.get_window_extent() for one in axis.get_xticklabels()]
        assert "," in cols or all(a.x1 < b.x0 for a, b in itertools.pairwise(boxes))
    (said,) = (legend.get_title().get_text().replace("\n", " ") for legend in figure.legends)
    for note in ("mean over 2 seeds", "a number across several cells", "–: no run, since training failed"):
        assert note in said


@pytest.mark.parametrize(
    ("values", "least", "most"), [((9.0, 900.0, math.inf), 9, 900), ((math.inf,), 1, 1.1), ((5.0,), 5, 5.5)]
)
def test_heat_maps_of_perplexity(tmp_path, drawn, values, least, most):
    """On a logarithmic scale, on which less is brighter; what is not finite has no colour."""
    options = {"lr": ("1", "2", "3")[: len(values)], "batch-size": ("5", "9")}
    found = {(row, col, "fedavg"): [fake(Config(), [{"perplexity": value}])]
             for row, value in zip(options["lr"], values) for col in ("5", "9")}  # fmt: skip
    sweep_figures.grid_figure(options, found, "title", tmp_path / "f.png")
    image = drawn[0].axes[0].images[0]
    assert (image.norm.vmin, image.norm.vmax) == pytest.approx((least, most))
    assert isinstance(image.norm, LogNorm)
    assert image.cmap.name == "cividis_r"
    assert [text.get_text() for text in drawn[0].axes[0].texts][-1] == ("inf" if math.isinf(values[-1]) else "5.00")
    assert image.get_array().mask.any() == math.isinf(values[-1])


@pytest.mark.slow
def test_what_cannot_be_swept_is_told_before_anything_trains(tmp_path, capsys):
    assert sweep.main(["min-samples", "5,900", *TINY, "--out", str(tmp_path), "--name", "a"]) == 2
    assert "900" in capsys.readouterr().err
    assert not (tmp_path / "a").exists()
    with pytest.raises(SystemExit) as end:
        sweep.main(["participants", "--help"])
    assert end.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "python -m fl.sweep OPTION VALUE,VALUE,..." in text
    assert "--fedmr.stage1-rounds" in text

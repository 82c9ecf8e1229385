import math

import pytest

from fl import compare, plot
from fl.algorithms import FedMROptions
from fl.config import Config
from fl.errors import FLError
from fl.metrics import Metrics, read


def fake_run(folder, accuracies, **settings):
    folder.mkdir()
    (folder / "config.yaml").write_text(Config(**settings).to_yaml())
    metrics = Metrics(folder / "metrics.csv")
    for number, accuracy in enumerate(accuracies, 1):
        metrics.add(
            {"round": number, "seconds": 1.0, "train_loss": 1.0, "accuracy": accuracy, "loss": 2.0, "f1": accuracy}
        )
    return folder


def test_runs_are_grouped_by_what_differs_beside_the_seed(tmp_path, capsys):
    folders = [
        fake_run(tmp_path / "a", [0.1, 0.5], algorithm=("fedavg",), seeds=(0,)),
        fake_run(tmp_path / "b", [0.2, 0.7], algorithm=("fedavg",), seeds=(1,)),
        fake_run(tmp_path / "c", [0.3, 0.8], algorithm=("fedmr",)),
        fake_run(tmp_path / "d", [0.3, 0.9], algorithm=("fedmr",), fedmr=FedMROptions(fraction=0.5)),
    ]
    out = tmp_path / "figure.png"
    assert compare.main([*map(str, folders), "--out", str(out)]) == 0
    rows = [line.split("  ")[0] for line in capsys.readouterr().out.splitlines()[1:4]]
    assert rows == ["fedavg", "fedmr fraction=0.0", "fedmr fraction=0.5"]
    assert out.read_bytes().startswith(b"\x89PNG")


def test_the_table_has_mean_and_sample_standard_deviation(tmp_path):
    for seed, last in enumerate((0.5, 0.7)):
        fake_run(tmp_path / f"s{seed}", [0.9, last], algorithm=("fedavg",), seeds=(seed,))
    groups = compare.group(compare.find_runs([tmp_path]))
    (row,) = compare.table(groups).splitlines()[1:]
    assert f"60.00 ± {100 * math.sqrt(0.02):.2f}" in row  # final: 50 and 70
    assert "75.00 ±" in row  # late mean: 70 and 80
    assert "90.00 ± 0.00" in row  # best


def test_settings_that_differ_are_in_the_label(tmp_path):
    for i, alpha in enumerate((0.1, 0.5)):
        fake_run(tmp_path / str(i), [0.5], algorithm=("fedavg",), alpha=alpha)
    assert list(compare.group(compare.find_runs([tmp_path]))) == ["fedavg alpha=0.1", "fedavg alpha=0.5"]


def test_curves_use_the_rounds_that_all_seeds_measured():
    runs = [[{"round": 1, "loss": 1.0}, {"round": 2, "loss": 2.0}], [{"round": 2, "loss": 4.0}]]
    rounds, mean, std = plot.mean_and_std(runs, "loss")
    assert (rounds, mean.tolist()) == ([2], [3.0])
    assert std.tolist() == pytest.approx([math.sqrt(2)])


def test_what_cannot_be_compared_is_refused(tmp_path, capsys):
    run = fake_run(tmp_path / "a", [0.5])
    fake_run(tmp_path / "twin", [0.6])
    (tmp_path / "empty").mkdir()
    out = str(tmp_path / "figure.png")
    for folders, message in (
        ([tmp_path / "nowhere"], "is not a folder"),
        ([tmp_path / "empty"], "holds no run"),
        ([run, tmp_path / "twin"], "same settings and seed"),
        ([], "at least one"),
    ):
        assert compare.main([*map(str, folders), "--out", out]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
    assert len(compare.find_runs([run, run])) == 1  # the same folder twice is one run
    for figure, message in (("figure.xyz", "not written as 'xyz'"), ("nowhere/figure.png", "there is no folder")):
        assert compare.main([str(run), "--out", str(tmp_path / figure)]) == 2
        assert message in capsys.readouterr().err
    assert compare.main([str(run), "--out", str(tmp_path / "figure.svg")]) == 0
    assert "<svg" in (tmp_path / "figure.svg").read_text()
    taken = tmp_path / "taken.png"
    taken.write_text("mine")
    assert compare.main([str(run), "--out", str(taken)]) == 2
    assert taken.read_text() == "mine"


def test_metrics_survive_a_cut_off_line_and_drop_later_rounds(tmp_path):
    path = tmp_path / "metrics.csv"
    metrics = Metrics(path)
    for number in (1, 2, 3):
        metrics.add({"round": number, "seconds": 0.1, "train_loss": 1 / 3})
    path.write_text(path.read_text()[:-20])
    assert [row["round"] for row in read(path)] == [1, 2]
    kept = Metrics(path, keep=1).rows
    assert kept == [{"round": 1, "seconds": 0.1, "train_loss": 1 / 3}]
    assert read(path) == kept


def test_a_run_without_an_evaluated_round_says_so(tmp_path):
    run = fake_run(tmp_path / "a", [])
    with pytest.raises(FLError, match="no evaluated round"):
        compare.find_runs([run])

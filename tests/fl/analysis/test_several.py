"""Several methods and seeds from Python, and their results as tables."""

import math
import statistics
import sys

import pytest
import torch
from refusals import fl_refused
from torch import nn

import fl
from fl import run as cli
from fl.analysis.groups import group
from fl.runs.metrics import read

EXPERIMENT = fl.Experiment.of(
    algorithms=("fedavg", "fedprox"), seeds=(0, 1), clients=4, participants=2, rounds=2, local_epochs=1, width=0.1,
    batch_size=50, samples=200,
)  # fmt: skip


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return fl.simulate_all(EXPERIMENT, tmp_path_factory.mktemp("several") / "all")


def test_several__runs_on_other_data_or_with_another_model_are_no_seeds_of_one_result(tmp_path):
    x, y = torch.randn(60, 6, generator=torch.Generator().manual_seed(0)), torch.arange(60) % 3
    sets = {name: fl.Dataset.from_arrays(x + shift, y, x, y) for name, shift in (("a", 0), ("b", 1))}
    small = EXPERIMENT.replace(algorithms="fedavg", clients=2, rounds=1, width=1.0, batch_size=10, samples=0)

    def train(name, seeds, data, model=lambda: nn.Linear(6, 3)):
        fl.simulate_all(small.replace(seeds=seeds), tmp_path / name, dataset=sets[data], model=model)

    def labels(*names):
        return {label: len(runs) for label, runs in group(fl.results(*(tmp_path / one for one in names)).runs).items()}

    train("one", (0, 1), "a")
    train("two", (2, 3), "b")
    train("same", (2, 3), "a")
    train("net", (2, 3), "a", lambda: nn.Sequential(nn.Linear(6, 3)))
    assert [*labels("one", "two").values()] == [2, 2]
    assert labels("one", "same") == {"fedavg": 4}
    assert [label.split("model=")[1].split("-")[0] for label in labels("one", "net")] == ["Linear", "Sequential"]
    assert [*labels("two", "same").values()] == [2, 2]  # the same seeds
    train("first", (0,), "a")
    train("second", (1,), "b")
    found = fl.results(tmp_path / "first", tmp_path / "second")
    assert [len(runs) for runs in group(found.runs).values()] == [2]
    assert "Each seed has its own data." in str(found)
    assert "own data" not in str(fl.results(tmp_path / "one"))


@pytest.mark.slow
def test_several__all_runs_are_those_of_the_command_and_of_simulate(found, tmp_path, capsys):
    (tmp_path / "settings.yaml").write_text(EXPERIMENT.to_yaml())
    assert cli.main(["--config", str(tmp_path / "settings.yaml"), "--out", str(tmp_path), "--name", "command"]) == 0
    folder = found.runs[0].folder.parent
    assert [run.folder.name for run in found.runs] == ["fedavg-seed0", "fedavg-seed1", "fedprox-seed0", "fedprox-seed1"]
    for run in found.runs:
        places = run.folder, tmp_path / "command" / run.folder.name
        one, two = (fl.load_model(place).state_dict() for place in places)
        assert all(torch.equal(one[name], two[name]) for name in one)
    lines = [line.rsplit(maxsplit=1)[0] for line in str(found).splitlines()]  # without the seconds
    assert lines == [line.rsplit(maxsplit=1)[0] for line in str(fl.results(tmp_path / "command")).splitlines()]
    assert str(fl.results(folder)) == str(found)
    assert not found.failed


@pytest.mark.slow
def test_several__are_refused_by_simulate_and_resumed_together(found, tmp_path):
    with fl_refused("argument", "fl.simulate_all"):
        fl.simulate(EXPERIMENT, tmp_path / "run")
    folder = found.runs[0].folder.parent
    with fl_refused("folder"):
        fl.simulate_all(EXPERIMENT, folder)
    again = fl.simulate_all(EXPERIMENT, folder, resume=True)
    assert [run.rows for run in again.runs] == [run.rows for run in found.runs]


@pytest.mark.slow
def test_several__data_and_a_model_of_ones_own_and_failures(tmp_path):
    x, y = torch.randn(200, 6, generator=torch.Generator().manual_seed(0)), torch.arange(200) % 3
    data = fl.Dataset.from_arrays(x, y, x, y)
    config = EXPERIMENT.replace(algorithms="fedavg", rounds=1, width=1.0, batch_size=10)
    found = fl.simulate_all(config, tmp_path / "own", dataset=data, model=lambda: nn.Linear(6, 3))
    assert [run.config.model.name for run in found.runs] == ["given", "given"]
    config = EXPERIMENT.replace(algorithms=("fedavg", "fedexp"), seeds=0, rounds=1, clip=1.0)
    with pytest.MonkeyPatch.context() as patch:
        real = fl.Federation.train

        def diverging(fed, *args, **more):
            update = real(fed, *args, **more)
            return update._replace(loss=update.loss * math.nan) if len(done) < 1 and not done.append(1) else update

        done = []
        patch.setattr(fl.Federation, "train", diverging)
        found = fl.simulate_all(config, tmp_path / "failing")
    assert [path.name for path in found.failed] == ["fedavg-seed0"]
    assert "fedavg-seed0: " in str(found)


@pytest.mark.slow
def test_several__tables_of_pandas(found):
    pytest.importorskip("pandas", reason="pandas, an extra, is not installed")
    frame, means, rounds = found.frame(), found.means(), found.rounds()
    assert [*zip(frame["method"], frame["seed"])] == [("fedavg", 0), ("fedavg", 1), ("fedprox", 0), ("fedprox", 1)]
    rows = [read(run.folder / "metrics.csv") for run in found.runs]
    assert [*frame["accuracy"]] == [each[-1]["accuracy"] for each in rows]
    of_fedprox = [each[-1]["accuracy"] for each in rows[2:]]
    assert means.loc["fedprox", ("accuracy", "mean")] == pytest.approx(statistics.mean(of_fedprox))
    assert means.loc["fedprox", ("accuracy", "std")] == pytest.approx(statistics.stdev(of_fedprox))
    assert len(rounds) == 8
    assert [*rounds["loss"]] == [row["loss"] for each in rows for row in each]
    assert [*rounds["round"]] == [1, 2] * 4


def test_several__a_missing_pandas_is_told_with_the_way_out(found, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    for ask in (found.frame, found.means, found.rounds):
        with fl_refused("missing", "'layer-surgery[pandas]'"):
            ask()
    assert "fedprox" in str(found)

"""clients.csv, and what is said of clients' own data at the end of a run."""

import csv
import dataclasses
import json

import numpy as np
import pytest
import torch
from fl_flags import TINY
from refusals import fl_refused

import fl
from fl import run as cli
from fl.federation import Federation
from fl.partition import Split
from fl.runs.assembly import build
from fl.runs.metrics import CLIENTS as FILE
from fl.runs.metrics import ClientTable, find_judged, read
from fl.settings import Config

FLAGS = [*TINY, "--local-test", "0.2", "--backend", "loop"]


@pytest.fixture(autouse=True)
def no_curves(monkeypatch):
    monkeypatch.setattr("fl.figures.curves.run_figure", lambda *_: None)


def run(tmp_path, name, *flags, code=0):
    assert cli.main([*FLAGS, "--out", str(tmp_path), "--name", name, *flags]) == code
    return tmp_path / name


def rows_of(folder, number):
    """A round's."""
    with open(folder / FILE, newline="") as file:
        return [row for row in csv.DictReader(file) if row["round"] == str(number)]


def test_client_scores__a_row_a_client_and_round_and_the_one_with_the_smallest_validation_loss_is_told(
    tmp_path, capsys
):
    folder = run(tmp_path, "a")
    best = find_judged(read(folder / "metrics.csv"))
    assert best["local_valid_loss"] == min(row["local_valid_loss"] for row in read(folder / "metrics.csv"))
    for row in read(folder / "metrics.csv"):
        losses = [float(one["valid_loss"]) for one in rows_of(folder, row["round"])]
        assert sum(losses) / len(losses) == pytest.approx(row["local_valid_loss"], abs=1e-12)
    rows = rows_of(folder, best["round"])
    fed = build(Config.read(folder))[0]
    for k, (row, split) in enumerate(zip(rows, fed.clients, strict=True)):
        counts = [int(row[name]) for name in ("client", "round", "train", "valid", "test")]
        assert counts == [k, best["round"], *map(len, split)]
    for name in ("valid_accuracy", "valid_loss", "valid_f1", "test_accuracy", "test_loss", "test_f1"):
        column = torch.tensor([float(row[name]) for row in rows], dtype=torch.float64)
        assert column.mean().item() == pytest.approx(best[f"local_{name}"], abs=1e-12)
        assert column.std() > 0
        if name.endswith("accuracy"):
            sizes = torch.tensor([float(row[name.partition("_")[0]]) for row in rows], dtype=torch.float64)
            assert best[f"local_{name}_by_samples"] == pytest.approx((sizes @ column / sizes.sum()).item())

    chosen = json.loads((folder / "summary.json").read_text())["selected"]
    assert chosen == {key: value for key, value in best.items() if key == "round" or key.startswith("local_")}
    said = f"clients' own test data in round {best['round']}, of the smallest validation loss: "
    said += f"accuracy {best['local_test_accuracy']:.2%} ± {best['local_test_std']:.2%}, "
    said += f"macro-F1 {best['local_test_f1']:.2%} ± {best['local_test_f1_std']:.2%} (± over clients)\n"
    assert said in capsys.readouterr().out


def test_simulate__owners_have_a_column(tmp_path):
    """Which owners are drawn depends on the seed."""
    names = np.repeat(["zurich", "berlin", "oslo", "athens", "lima"], [14, 10, 12, 11, 3])
    x, y = torch.rand(len(names), 4), torch.arange(len(names)) % 3
    data, net = fl.Dataset.from_arrays(x, y, x, y, owners=names), torch.nn.Linear(4, 3)
    for seed, expected in ((0, ["athens", "oslo", "zurich"]), (1, ["athens", "berlin", "oslo"])):
        given = {"partition": "natural", "participants": 2, "rounds": 2, "local_test": 0.3, "min_samples": 5}
        config, folder = Config.of(algorithm="fedavg", clients=3, seed=seed, **given), tmp_path / str(seed)
        fl.simulate(config, folder, dataset=data, model=net)
        table = (folder / FILE).read_text()
        rows = rows_of(folder, 1) + rows_of(folder, 2)
        assert [row["owner"] for row in rows] == 2 * expected
        fed, _ = build(config, dataset=data, model=net)
        assert fed.client_names == expected == [names[int(split.train[0])] for split in fed.clients]
    (folder / FILE).write_text(table.replace("oslo", "osla"))
    with fl_refused("file"):
        fl.simulate(config, folder, resume=True, dataset=data, model=net)


@pytest.mark.slow
def test_client_scores__a_run_in_pieces_leaves_the_table_of_a_run_in_one(tmp_path, monkeypatch):
    """Stopped by Ctrl-C, with rounds added, and with other evaluations than before."""
    flags = ("--rounds", "6", "--eval-every", "2")
    whole = run(tmp_path, "whole", *flags)
    original, tables = Federation.train, set()
    for stop, first in ((5, flags), (5, ("--rounds", "6")), (None, ("--rounds", "5"))):
        with monkeypatch.context() as patch:

            def train(fed, starts, clients, rng, *rest, stop=stop, **named):
                if rng.round == stop:
                    raise KeyboardInterrupt
                return original(fed, starts, clients, rng, *rest, **named)

            patch.setattr(Federation, "train", train)
            broken = run(tmp_path, f"{stop}{len(first)}", *first, code=130 if stop else 0)
        tables.add((broken / FILE).read_bytes())
        assert cli.main(["--resume", str(broken), *flags]) == 0
        assert (broken / FILE).read_bytes() == (whole / FILE).read_bytes()
    assert len(tables - {(whole / FILE).read_bytes()}) == 3


def test_client_scores__without_held_out_samples_there_is_no_table(tmp_path):
    folder = run(tmp_path, "a", "--local-valid", "0", "--local-test", "0", "--rounds", "1")
    assert not (folder / FILE).exists()
    assert json.loads((folder / "summary.json").read_text())["selected"] == {}


def test_client_scores__rounds_that_the_metrics_drop_are_dropped(tmp_path, make_federation):
    fed, path = make_federation("cnn"), tmp_path / FILE
    table = ClientTable(tmp_path, fed, [])
    for number in (1, 2, 3):
        score = {"accuracy": number / 3, "loss": 1.0, "f1": 0.0}
        table.add(number, {part: [score] * len(table.sizes) for part in table.parts})
    whole, rows = path.read_bytes(), [{"round": number, "accuracy": 0.5} for number in (1, 2, 3)]
    ClientTable(tmp_path, fed, rows)
    assert path.read_bytes() == whole
    path.write_bytes(whole + b"0,4,")  # cut off
    ClientTable(tmp_path, fed, [rows[0], {"round": 2}, rows[2]])
    assert {row["round"] for number in (1, 2, 3) for row in rows_of(tmp_path, number)} == {"1", "3"}
    assert float(rows_of(tmp_path, 3)[-1]["valid_accuracy"]) == 1.0


def test_client_scores__clients_that_only_test_have_no_validation_columns(tmp_path, make_federation):
    fed = make_federation("cnn")
    clients = [Split(split.train, split.valid[:0], split.test) for split in fed.clients]
    ClientTable(tmp_path, dataclasses.replace(fed, clients=clients), [])
    assert (tmp_path / FILE).read_text() == "client,round,train,valid,test,test_accuracy,test_loss,test_f1\n"

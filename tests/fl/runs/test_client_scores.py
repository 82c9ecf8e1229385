"""clients.csv, and what is said of clients' own data at the end of a run."""

import csv
import dataclasses
import json

import pytest
import torch
from fl_flags import TINY

from fl import run as cli
from fl.config import Config
from fl.federation import Federation
from fl.partition import Split
from fl.runs.assembly import build
from fl.runs.client_scores import FILE, HISTORY, ClientTable
from fl.runs.metrics import read, selected

FLAGS = [*TINY, "--local-test", "0.2", "--models-every", "0", "--backend", "loop"]


@pytest.fixture(autouse=True)
def no_curves(monkeypatch):
    monkeypatch.setattr("fl.figures.curves.run_figure", lambda *_: None)


def run(tmp_path, name, *flags, code=0):
    assert cli.main([*FLAGS, "--out", str(tmp_path), "--name", name, *flags]) == code
    return tmp_path / name


def rows_of(folder):
    with open(folder / FILE, newline="") as file:
        return list(csv.DictReader(file))


def test_a_row_a_client_of_the_round_with_the_smallest_validation_loss(tmp_path, capsys):
    folder = run(tmp_path, "a")
    best = selected(read(folder / "metrics.csv"))
    assert best["local_valid_loss"] == min(row["local_valid_loss"] for row in read(folder / "metrics.csv"))
    rows = rows_of(folder)
    fed = build(Config.read(folder))[0]
    for k, (row, split) in enumerate(zip(rows, fed.clients, strict=True)):
        counts = [int(row[name]) for name in ("client", "round", "train", "valid", "test")]
        assert counts == [k, best["round"], *map(len, split)]
    for name in ("valid_accuracy", "valid_loss", "valid_f1", "test_accuracy", "test_loss", "test_f1"):
        column = torch.tensor([float(row[name]) for row in rows], dtype=torch.float64)
        assert column.mean().item() == pytest.approx(best[f"local_{name}"], abs=1e-12)
        assert column.std() > 0

    chosen = json.loads((folder / "summary.json").read_text())["selected"]
    assert chosen == {key: value for key, value in best.items() if key == "round" or key.startswith("local_")}
    said = f"clients' own test data in round {best['round']}, of the smallest validation loss: "
    said += f"accuracy {best['local_test_accuracy']:.2%} ± {best['local_test_std']:.2%}, "
    said += f"macro-F1 {best['local_test_f1']:.2%} ± {best['local_test_f1_std']:.2%} (± over clients)\n"
    assert said in capsys.readouterr().out


def test_a_run_in_pieces_leaves_the_table_of_a_run_in_one(tmp_path, monkeypatch):
    """Stopped by Ctrl-C, with rounds added, and with other evaluations than before."""
    flags = ("--rounds", "6", "--eval-every", "2")
    whole = run(tmp_path, "whole", *flags)
    original = Federation.train
    for stop, first in ((5, flags), (5, ("--rounds", "6")), (None, ("--rounds", "5"))):
        with monkeypatch.context() as patch:

            def train(fed, starts, clients, rng, *rest, stop=stop, **named):
                if rng.round == stop:
                    raise KeyboardInterrupt
                return original(fed, starts, clients, rng, *rest, **named)

            patch.setattr(Federation, "train", train)
            broken = run(tmp_path, f"{stop}{len(first)}", *first, code=130 if stop else 0)
        before = (broken / FILE).read_bytes()
        assert cli.main(["--resume", str(broken), *flags]) == 0
        for name in (FILE, HISTORY):
            assert (broken / name).read_bytes() == (whole / name).read_bytes()
    assert before != (whole / FILE).read_bytes()


def test_without_held_out_samples_there_is_no_table(tmp_path):
    folder = run(tmp_path, "a", "--local-valid", "0", "--local-test", "0", "--rounds", "1")
    assert not {FILE, HISTORY} & {path.name for path in folder.iterdir()}
    assert json.loads((folder / "summary.json").read_text())["selected"] == {}


class Played:
    """A table that is fed by hand: each client's validation loss in a round is the given one, its accuracy the round's
    number.
    """

    def __init__(self, folder, fed, losses=()):
        self.rows = [self.row(number, loss) for number, loss in losses]
        self.table, self.path = ClientTable(folder, fed, self.rows), folder / FILE
        self.parts = self.table.parts

    def row(self, number, loss):
        return {"round": number, "accuracy": 0.5} | ({} if loss is None else {"local_valid_loss": loss})

    def play(self, *losses):
        for number, loss in losses:
            self.rows.append(self.row(number, loss))
            score = {"accuracy": number, "loss": 1.0 if loss is None else loss, "f1": 0.0}
            self.table.add(self.rows, {part: [score] * len(self.table.sizes) for part in self.parts})
        return self

    def shown(self):
        """(round, the accuracy of the last client)."""
        (*_, row) = rows_of(self.path.parent)
        return int(row["round"]), float(row[f"{self.parts[-1]}_accuracy"])


def test_the_table_is_of_the_best_of_the_rounds_that_are_kept(tmp_path, make_federation):
    fed = make_federation("cnn")
    losses = [(1, 3.0), (2, 1.0), (3, 1.0), (4, float("nan")), (5, 0.5), (6, 2.0)]
    played = Played(tmp_path, fed)
    assert not (tmp_path / FILE).exists()
    assert [played.play(one).shown()[0] for one in losses] == [1, 2, 2, 2, 5, 5]
    assert Played(tmp_path, fed, [losses[0], losses[2]]).shown() == (3, 3.0)  # others were dropped from metrics.csv
    again = Played(tmp_path, fed, [losses[0]])
    assert again.shown() == (1, 1.0)
    (tmp_path / HISTORY).write_bytes((tmp_path / HISTORY).read_bytes() + b"cut off")
    assert Played(tmp_path, fed, [losses[0]]).play((2, 0.1)).shown() == (2, 2.0)
    (tmp_path / HISTORY).unlink()
    lost = Played(tmp_path, fed, [losses[1]])
    assert not (tmp_path / FILE).exists()  # rather none than that of another round
    assert lost.play((3, 0.2)).shown() == (3, 3.0)


def test_without_validation_the_last_evaluated_round_counts(tmp_path, make_federation):
    fed = make_federation("cnn")
    clients = [Split(split.train, split.valid[:0], split.test) for split in fed.clients]
    played = Played(tmp_path, dataclasses.replace(fed, clients=clients)).play((2, None), (4, None))
    assert played.parts == ["test"]
    assert played.shown() == (4, 4.0)

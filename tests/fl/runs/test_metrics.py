from typing import get_args

import pytest
from refusals import fl_refused

from fl.algorithms import ALGORITHMS
from fl.algorithms.fedavg import METHOD as fedavg
from fl.algorithms.method import Method
from fl.base.columns import Due
from fl.runs.metrics import Metrics, best, checksums, evaluations_since_best, read, read_kept


def test_metrics__a_metric_without_a_column_is_refused_before_its_row_is_written(tmp_path):
    metrics = Metrics(tmp_path / "metrics.csv")
    metrics.add({"round": 1, "train_loss": 2.0})
    with fl_refused("run", "'drift'"):
        metrics.add({"round": 2, "drift": 0.5})
    assert [row["round"] for row in metrics.rows] == [1]
    assert read(tmp_path / "metrics.csv") == [{"round": 1, "train_loss": 2.0}]


def test_metrics__the_table_has_the_columns_that_some_round_has_filled(tmp_path):
    path = tmp_path / "metrics.csv"
    metrics = Metrics(path)
    assert path.read_text().splitlines() == ["round"]
    metrics.add({"round": 1, "train_loss": 2.0})
    metrics.add({"round": 2, "train_loss": 1.0, "accuracy": 0.5})
    metrics.add({"round": 3, "train_loss": 0.5})
    assert path.read_text().splitlines() == ["round,train_loss,accuracy", "1,2.0,", "2,1.0,0.5", "3,0.5,"]
    Metrics(path, read(path)[:1])  # an end that a resumed run does not keep takes its columns along
    assert path.read_text().splitlines() == ["round,train_loss", "1,2.0"]


def test_metrics__evaluations_that_only_ended_a_run_are_dropped_when_it_goes_on(tmp_path):
    path, row = tmp_path / "metrics.csv", {"train_loss": 2.0, "accuracy": 0.5, "models_accuracy": 0.25}
    metrics = Metrics(path)
    for number in (1, 2, 3):
        metrics.add({"round": number, **row})
    found = read_kept(path, 2, lambda row: {"global"} if row["round"] == 1 else set())
    assert found == [{"round": 1, "train_loss": 2.0, "accuracy": 0.5}, {"round": 2, "train_loss": 2.0}]
    assert read_kept(path, 1, lambda row: {"global", "models"}) == [{"round": 1, **row}]


def test_metrics__columns_of_methods_that_are_gone_are_read(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setitem(ALGORITHMS, "mine", Method(fedavg.make, columns={"drift": float}))
        Metrics(tmp_path / "metrics.csv", method="mine").add({"round": 1, "drift": 0.25})
    assert read(tmp_path / "metrics.csv") == [{"round": 1, "drift": 0.25}]


def test_metrics__a_method_cannot_take_a_column_that_every_run_has(tmp_path, monkeypatch):
    monkeypatch.setitem(ALGORITHMS, "mine", Method(fedavg.make, columns={"loss": int}))
    with fl_refused("name", "'loss'"):
        Metrics(tmp_path / "metrics.csv", method="mine")


def test_metrics__a_line_without_its_end_may_lack_digits_and_is_not_read(tmp_path):
    path = tmp_path / "metrics.csv"
    path.write_bytes(b"round,loss\r\n1,2.5\r\n2,0.12")
    assert read(path) == [{"round": 1, "loss": 2.5}]
    path.write_bytes(b"round,loss\r\n1,2.5\r\n2,0.125\r\n")
    assert read(path)[1] == {"round": 2, "loss": 0.125}


@pytest.mark.parametrize(("rounds", "message"), [("112", "round 1 twice"), ("132", "round 2 out of order")])
def test_metrics__rounds_of_two_processes_are_refused(tmp_path, rounds, message):
    path = tmp_path / "metrics.csv"
    path.write_text("".join(f"{line}\n" for line in ["round,loss", *(f"{number},0.5" for number in rounds)]))
    with fl_refused("file", message):
        read(path)


def test_metrics__before_the_first_evaluation_none_was_in_vain():
    assert evaluations_since_best([]) == 0
    assert evaluations_since_best([{"round": 1}]) == 0


@pytest.mark.parametrize("by", ["local_test_std", "local_valid_f1_std", "local_test_mae_std"])
def test_metrics__the_best_round_is_that_of_the_most_equal_clients(by):
    rows = [{"round": r, "accuracy": 0.5, by: value} for r, value in ((1, 0.2), (2, 0.1), (3, 0.3))]
    assert best(rows, by)["round"] == 2


def test_metrics__the_column_of_an_attack_that_is_gone_counts_as_one_of_the_global_model():
    plain, attacked = (checksums([{"round": 1, **more}])[0].split(" ") for more in ({}, {"attack_success": 0.5}))
    assert [one != other for one, other in zip(plain, attacked)] == [due == "global" for due in get_args(Due)]

"""Run folders of version 0.1 can be resumed, and end as that version ended them."""

import shutil
from pathlib import Path

import pytest

from fl import load_model
from fl import run as cli
from fl.runs.metrics import read

STORED = Path(__file__).parents[2] / "stored"


@pytest.mark.parametrize("name", ["fedmr", "femam"])
def test_a_run_of_an_earlier_version_goes_on(tmp_path, name):
    folder = tmp_path / name
    shutil.copytree(STORED / name, folder, ignore=shutil.ignore_patterns("whole.csv"))
    before = read(folder / "metrics.csv")
    assert cli.main(["--resume", str(folder), "--rounds", "4"]) == 0
    rows, whole = read(folder / "metrics.csv"), read(STORED / name / "whole.csv")
    for row in (*rows, *whole, *before):
        del row["seconds"], row["macs"]  # of another machine; without the last batches' filling, in version 0.1
    assert rows[:2] == before
    assert [row["round"] for row in rows] == [1, 2, 3, 4]
    for row, expected in zip(rows, whole):
        assert row.keys() >= expected.keys() - {"accuracy", "loss", "f1"}
        for key in row.keys() & expected.keys():  # up to what another processor rounds otherwise
            assert row[key] == pytest.approx(expected[key], rel=1e-3, abs=2e-3), (row["round"], key)
    assert sum(p.numel() for p in load_model(folder).parameters())

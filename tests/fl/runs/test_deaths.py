"""A run that dies at any of its writes is resumed, and leaves the same files, byte for byte."""

import csv
import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from fl_flags import TINY
from refusals import fl_refused
from selection import some

from fl import run as cli
from fl import simulate
from fl.runs import evaluate
from fl.runs.lock import is_unused
from fl.settings import Config

CONFIG = Config.of(
    algorithm="fedavg", clients=3, participants=1, samples=90, rounds=2, local_epochs=1, batch_size=50, width=0.1,
    local_valid=0.1, local_test=0.1, checkpoint_every=1, backend="loop",
)  # fmt: skip


class Dead(BaseException):
    """The process is no more."""


class Death:
    """Dies at the n-th write: nothing is written after it, and the file that was being written lacks its end."""

    def __init__(self, monkeypatch, number):
        self.left, self.replace, self.fsync = number, os.replace, os.fsync
        monkeypatch.setattr(os, "replace", lambda *paths: self.at(lambda: self.replace(*paths)))
        monkeypatch.setattr(os, "fsync", lambda handle: self.at(lambda: self.fsync(handle), handle))

    def at(self, write, handle=None):
        self.left -= 1
        if self.left > 0:
            return write()
        if self.left == 0 and handle is not None:
            os.ftruncate(handle, max(0, os.fstat(handle).st_size - 4))
        raise Dead


def contents(folder):
    """The files, without times."""
    return {path.name: timeless(path) for path in folder.iterdir()}


def timeless(path):
    if path.name == "metrics.csv":
        with open(path, newline="") as file:
            return [[cell for at, cell in enumerate(line) if at != 1] for line in csv.reader(file)]
    if path.name == "summary.json":
        return json.loads(path.read_text(), object_pairs_hook=lambda pairs: [p for p in pairs if p[0] != "seconds"])
    return path.read_bytes()


@pytest.fixture(scope="module")
def data():
    return CONFIG.load()


@pytest.mark.slow
@pytest.mark.parametrize("first", some(range(8), [1]))
def test_simulate__a_run_that_dies_at_a_write_is_resumed_byte_for_byte(tmp_path, monkeypatch, data, first):
    simulate(CONFIG, tmp_path / "whole", dataset=data)
    whole, number, before = contents(tmp_path / "whole"), 1 + first, set()
    while True:
        folder = tmp_path / str(number)
        with monkeypatch.context() as patch:
            death = Death(patch, number)
            with suppress(Dead):
                simulate(CONFIG, folder, dataset=data)
        begun = (folder / "config.yaml").exists()
        before.add((begun, (folder / "checkpoint.safetensors").exists()))
        assert begun or is_unused(folder)
        simulate(CONFIG, folder, resume=begun, dataset=data)
        assert contents(folder) == whole, number
        if death.left > 0:
            break
        number += 8
    assert (True, True) in before


def test_simulate__a_disk_that_is_full_says_how_to_go_on(tmp_path, monkeypatch, data):
    simulate(CONFIG, tmp_path / "whole", dataset=data)
    saved = []

    def full(_):
        saved.append(1)
        if len(saved) > 8:
            raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with fl_refused("file", "--resume"):
            simulate(CONFIG, tmp_path / "a", dataset=data)
    simulate(CONFIG, tmp_path / "a", resume=True, dataset=data)
    assert contents(tmp_path / "a") == contents(tmp_path / "whole")


@pytest.mark.nightly
def test_deaths__runs_that_are_killed_for_good(tmp_path):
    """The program that tries 200 kills, here a few."""
    program = Path(__file__).parents[3] / "benchmarks" / "kills.py"
    command = [sys.executable, str(program), "--trials", "2", "--seed", "1", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "kills-cpu.json").read_text())
    assert (found["trials"], found["lost"]) == (2, 0)
    assert found["second process"] == 1  # refused or, where the first had ended already, without anything to do


@pytest.mark.slow
def test_deaths__a_loss_that_is_nan_is_told_by_summary_and_exit_code(tmp_path, monkeypatch, capsys):
    original = evaluate.evaluate_global
    monkeypatch.setattr(evaluate, "evaluate_global", lambda *a: original(*a) | {"loss": float("nan")})
    flags = [*TINY, "--rounds", "1", "--out", str(tmp_path)]
    assert cli.main([*flags, "--name", "a"]) == 1
    said = capsys.readouterr().out
    assert "training has failed: the loss is nan in round 1; start a new run with a smaller --lr" in said
    assert json.loads((tmp_path / "a" / "summary.json").read_text())["failed"] == "the loss is nan in round 1"
    assert cli.main([*flags, "--name", "b", "--seeds", "0,1"]) == 1
    assert "training has failed in 2 of the runs:" in capsys.readouterr().out

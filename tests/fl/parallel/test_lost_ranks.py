"""A rank that fails, dies or hangs ends the run in time, with one line that names it, and the run can be resumed."""

import os
import signal
import time
from dataclasses import replace

import pytest
from ranks import assert_equal, ran, tiny

from fl.base.console import guarded
from fl.base.errors import FLError
from fl.federation import training
from fl.parallel import watch
from fl.simulation import simulate

CONFIG = replace(tiny("fedavg"), rounds=4, local_valid=0.0, checkpoint_every=100)


def refuse():
    raise FLError("there is no such thing here")


def crash():
    raise RuntimeError("a fault of the program")


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)


ENDS = {
    "refuses": (refuse, "there is no such thing here"),
    "crashes": (crash, "RuntimeError: a fault of the program"),
    "dies": (lambda: os.kill(os.getpid(), signal.SIGKILL), "died"),
    "stops": (lambda: os.kill(os.getpid(), signal.SIGSTOP), "has not computed or answered for 3 seconds"),
    "sleeps": (lambda: time.sleep(60), "has not computed or answered for 3 seconds"),
}


def one_ends(rank, bad, how, folder):
    """A run in which a rank ends, or hangs, in the third round."""
    honest, rounds = training.train, iter(range(1, 100))

    def train(*arguments):
        if next(rounds) == 3 and rank == bad:
            ENDS[how][0]()
        return honest(*arguments)

    training.train = train
    raise SystemExit(guarded(lambda: len(simulate(CONFIG, folder)) * 0))


@pytest.mark.parametrize("how", ["dies", *[pytest.param(how, marks=pytest.mark.slow) for how in ENDS if how != "dies"]])
def test_a_lost_rank_is_named_and_nothing_is_lost(tmp_path, capfd, monkeypatch, how):
    monkeypatch.setattr(watch, "SILENT", 3)
    began = time.monotonic()
    codes = ran(2, one_ends, 1, how, tmp_path / "run", seconds=50, hung=[1] if how in ("stops", "sleeps") else [])
    assert time.monotonic() - began < 50
    said = capfd.readouterr().err
    lines = [line for line in said.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, said
    assert lines[0].startswith("error: rank 1 (")
    assert lines[0].endswith(ENDS[how][1])
    assert codes[0] == 2
    assert ("Traceback" in said) == (how == "crashes")

    simulate(CONFIG, tmp_path / "run", resume=True)  # with another number of ranks
    simulate(CONFIG, tmp_path / "whole")
    assert_equal(tmp_path / "whole", tmp_path / "run")

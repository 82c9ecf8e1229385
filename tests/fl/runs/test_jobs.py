"""Runs in processes of their own, side by side."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from fl_flags import TINY

import fl
from fl import run as cli
from fl import sweep
from fl.runs import checkpoint
from fl.runs.metrics import read


def tensors(folder):
    return fl.load_model(folder).state_dict()


@pytest.mark.slow
def test_jobs_leave_what_runs_in_turn_leave(tmp_path, capsys):
    flags = ["lr", "0.05,1e30", "--algorithm", "fedavg", *TINY, "--out", str(tmp_path)]
    assert sweep.main([*flags, "--name", "turn"]) == 1  # one value diverges
    assert sweep.main([*flags, "--name", "jobs", "--jobs", "2"]) == 1
    assert "training has failed in 1 of the runs" in capsys.readouterr().out
    names = [{path.relative_to(tmp_path / at) for path in (tmp_path / at).rglob("*")} for at in ("turn", "jobs")]
    assert names[0] == names[1]
    one, two = (tensors(tmp_path / at / "lr=0.05/fedavg-seed0") for at in ("turn", "jobs"))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert cli.main([*TINY, "--jobs", "2", "--out", str(tmp_path), "--name", "single"]) == 2
    assert "--jobs 2 is for several runs, and this is one" in capsys.readouterr().err


@pytest.mark.nightly
@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_and_sigterm_end_all_jobs_and_they_go_on(tmp_path, stop):
    """Of which a terminal sends the first to all processes, and others send the second to the one they know."""
    flags = ["--algorithm", "fedavg", *TINY, "--rounds", "60", "--out", str(tmp_path), "--name", "sweep"]
    command = [sys.executable, "-m", "fl.sweep", "lr", "0.01,0.05", *flags, "--jobs", "2"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    runs = [tmp_path / f"sweep/lr={lr}/fedavg-seed0" for lr in ("0.01", "0.05")]
    for _ in range(600):
        if all((run / "metrics.csv").exists() and len(read(run / "metrics.csv")) for run in runs):
            break
        time.sleep(0.1)
    (os.killpg if stop == signal.SIGINT else os.kill)(process.pid, stop)
    said, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + stop, errors
    assert "--resume" in said
    assert "Traceback" not in errors
    assert not [*tmp_path.rglob(".lock")]  # nobody is left
    done = [checkpoint.read_header(run)["round"] for run in runs]
    assert all(number > 0 for number in done)
    assert sweep.main(["--resume", str(tmp_path / "sweep"), "--jobs", "2"]) == 0
    assert [len(read(run / "metrics.csv")) for run in runs] == [60, 60]

"""A rank that fails, dies or hangs ends the run in time, with one line of why, and the run can be resumed."""

import os
import shutil
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
from ranks import assert_equal, ran, tiny

from fl import simulate
from fl.base.console import guard
from fl.base.errors import FLError
from fl.distributed import ranks
from fl.federation import federation as training
from fl.run import main
from fl.runs import checkpoint

CONFIG = tiny("fedavg").replace(rounds=4, local_valid=0.0, checkpoint_every=100)


def refuse():
    raise FLError("there is no such thing here", code="name")


def crash():
    raise RuntimeError("a fault of the program")


ENDS = {
    "refuses": (refuse, "there is no such thing here"),
    "crashes": (crash, "RuntimeError: a fault of the program"),
    "dies": (lambda: os.kill(os.getpid(), signal.SIGKILL), ""),
    "stops": (lambda: os.kill(os.getpid(), signal.SIGSTOP), ""),
}


def run_to_its_end(config, folder):
    with guard() as ended:
        simulate(config, folder)
    raise SystemExit(ended.code)


def in_the_third_round(do):
    """From now on local training calls `do` when its third round begins."""
    honest, rounds = training.train, iter(range(1, 100))

    def train(*arguments):
        if next(rounds) == 3:
            do()
        return honest(*arguments)

    training.train = train


def one_ends(rank, bad, how, folder):
    """A run in which a rank ends, or hangs."""
    if rank == bad:
        in_the_third_round(ENDS[how][0])
    run_to_its_end(CONFIG, folder)


@pytest.mark.slow
@pytest.mark.parametrize("how", ENDS)
def test_simulate__a_lost_rank_is_named_and_nothing_is_lost(tmp_path, capfd, monkeypatch, how):
    if how == "stops":
        monkeypatch.setattr(ranks, "TIMEOUT", timedelta(seconds=20))  # shorter than it is, and long for a busy machine
    simulate(CONFIG, tmp_path / "whole")
    began = time.monotonic()
    codes = ran(2, one_ends, 1, how, tmp_path / "run", seconds=50, hung=[1] if how == "stops" else [])
    assert time.monotonic() - began < 50
    said = capfd.readouterr().err
    lines = [line for line in said.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, said
    if reason := ENDS[how][1]:
        assert lines[0].startswith("error: rank 1 (")
        assert lines[0].endswith(reason)
    else:
        assert lines[0].startswith("error: another rank has ended, or does not answer: ")
    assert codes[0] == 2
    assert ("Traceback" in said) == (how == "crashes")

    simulate(CONFIG, tmp_path / "run", resume=True)  # with another number of ranks
    assert_equal(tmp_path / "whole", tmp_path / "run")


def other(rank, bad, folder):
    """Rank `bad` has other settings."""
    run_to_its_end(CONFIG.replace(lr=0.5) if rank == bad else CONFIG, folder)


@pytest.mark.slow
def test_lost_ranks__a_rank_with_other_settings_is_refused(tmp_path, capfd):
    assert ran(3, other, 2, tmp_path / "run") == [2, 2, 2]
    (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
    assert line == (
        "error: rank 2 has --lr 0.5, and rank 0 has 0.02: start all ranks with the same command on the same data"
    )
    assert not (tmp_path / "run").exists()


def several_methods(rank, folder):
    flags = f"--out {folder} --name all --algorithm fedavg,fedmr --rounds 1 --clients 3 --participants 2 --width 0.1"
    raise SystemExit(main(flags.split()))


@pytest.mark.slow
def test_lost_ranks__a_command_with_several_methods_prints_once(tmp_path, capfd):
    assert ran(2, several_methods, tmp_path) == [0, 0]
    said = capfd.readouterr()
    assert said.out.count("results   ") == 1
    assert said.err.count("fedavg seed 0: 100%") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["all"]


def interrupted(rank, folder, number):
    """Ctrl-C or SIGTERM, which torchrun passes on to all ranks."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # pytest's workers ignore it
    in_the_third_round(lambda: signal.raise_signal(number))  # in this thread, wherever the others are
    run_to_its_end(CONFIG, folder)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_simulate__ctrl_c_and_sigterm_save(tmp_path, capfd, number, code):
    assert ran(2, interrupted, tmp_path / "run", number)[0] == code
    assert "error" not in capfd.readouterr().err
    simulate(CONFIG, tmp_path / "run", resume=True)
    simulate(CONFIG, tmp_path / "whole")
    assert_equal(tmp_path / "whole", tmp_path / "run")


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "fl.run"]
FLAGS = ["--clients", "4", "--participants", "3", "--width", "0.1", "--backend", "loop"]


@pytest.mark.nightly
@pytest.mark.parametrize("how", ["a rank is killed", "SIGTERM"])
def test_lost_ranks__torchrun_ends_all_ranks_and_what_was_done_is_saved(tmp_path, how):
    flags = [*FLAGS, "--rounds", "100000", "--checkpoint-every", "100000", "--out", str(tmp_path), "--name", "run"]
    with subprocess.Popen([*TORCHRUN, *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        table, limit = tmp_path / "run" / "metrics.csv", time.monotonic() + 120
        while not table.exists() or table.read_text().count("\n") < 4:
            assert time.monotonic() < limit
            time.sleep(0.2)
        if how == "a rank is killed":
            os.kill(started_by(process.pid)["1"], signal.SIGKILL)
        else:
            process.send_signal(getattr(signal, how))
        began = time.monotonic()
        _, said = process.communicate(timeout=60)
        assert time.monotonic() - began < 25  # torchrun ends with SIGKILL what has not ended after 30
    assert process.returncode
    assert how != "a rank is killed" or "Signal 9 (SIGKILL)" in said  # the report of torchrun, which names the rank
    assert "Traceback" not in said.split("torch/distributed")[0], said
    done = checkpoint.read_header(tmp_path / "run")["round"]
    assert done >= 2  # of three rows: a signal may come between a row and the end of its round
    assert main(["--resume", str(tmp_path / "run"), "--rounds", str(done + 1)]) == 0
    assert main([*FLAGS, "--rounds", str(done + 1), "--out", str(tmp_path), "--name", "whole"]) == 0
    assert_equal(tmp_path / "whole", tmp_path / "run")


def started_by(parent):
    """The processes of the ranks that torchrun has started."""
    (children,) = (path.read_text().split() for path in Path(f"/proc/{parent}/task/{parent}").glob("children"))
    settings = {pid: Path(f"/proc/{pid}/environ").read_text().split("\0") for pid in children}
    found = {pid: dict(line.split("=", 1) for line in lines if "=" in line) for pid, lines in settings.items()}
    return {of["RANK"]: int(pid) for pid, of in found.items() if "RANK" in of}


@pytest.mark.slow
def test_lost_ranks__the_command_as_written(tmp_path):
    """torchrun itself, whose other ranks say nothing. Rarely a process aborts after its run, while Python ends: threads
    of torch that still hold tensors do that (pytorch/pytorch#190489).
    """
    flags = [*FLAGS, "--out", str(tmp_path), "--rounds", "2"]
    for _ in range(3):
        done = subprocess.run([*TORCHRUN, *flags, "--name", "two"], capture_output=True, text=True, timeout=300)
        if "terminate called without an active exception" not in done.stderr:
            break
        shutil.rmtree(tmp_path / "two")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("test accuracy") == 1
    assert main([*flags, "--name", "one"]) == 0
    assert_equal(tmp_path / "one", tmp_path / "two")

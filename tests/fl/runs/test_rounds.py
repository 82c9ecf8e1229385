"""`fl.Run`: the rounds of a run as a loop of the user's, which may be left at any moment and goes on exactly."""

import gc
import logging
import os
import signal
import subprocess
import sys
import weakref
from contextlib import nullcontext, suppress

import pytest
import torch
from refusals import fl_refused

import fl
from fl import run as cli
from fl.base.errors import Diverged, FLError, Terminated
from fl.runs import checkpoint, simulation
from fl.runs.export import client_model
from fl.runs.lock import folder_lock
from fl.runs.metrics import read

CONFIG = fl.Config.of(algorithm="fedavg", clients=4, participants=2, rounds=4, local_epochs=1, width=0.1, batch_size=50)


def same(a, b):
    a, b = a.state_dict(), b.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def is_locked(folder):
    try:
        with folder_lock(folder):
            return False
    except FLError:
        return True


def without_time(rows):
    return [{name: value for name, value in row.items() if name != "seconds"} for row in rows]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    fl.simulate(CONFIG, folder)
    return folder


def test_rounds__checkpoints_are_written_after_every_second_round_and_the_last(tmp_path, monkeypatch):
    done, save = [], checkpoint.save

    def noting(folder, server, number, *rest, **options):
        done.append(number)
        return save(folder, server, number, *rest, **options)

    monkeypatch.setattr("fl.runs.state.checkpoint.save", noting)
    fl.simulate(CONFIG.replace(rounds=5, checkpoint_every=2), tmp_path / "run")
    assert done == [2, 4, 5]


def test_rounds__clients_models_are_evaluated_in_every_second_round_and_the_last(tmp_path):
    fl.simulate(CONFIG.replace(rounds=3, eval_client_models_every=2), tmp_path / "run")
    rows = read(tmp_path / "run" / "metrics.csv")
    assert [row["round"] for row in rows if "models_accuracy" in row] == [2, 3]


def left_at_break(config, folder):
    for round in fl.Run(config, folder):
        if round.number == 2:
            break


def left_by_an_error(config, folder):
    for round in fl.Run(config, folder):
        assert round.number < 2


def left_by_ctrl_c(config, folder):
    for round in fl.Run(config, folder):
        if round.number == 2:
            raise KeyboardInterrupt


def left_by_sigterm(config, folder):
    for round in fl.Run(config, folder):
        if round.number == 2:
            signal.raise_signal(signal.SIGTERM)


def dropped(config, folder):
    rounds = iter(fl.Run(config, folder))
    next(rounds), next(rounds)
    assert is_locked(folder)
    del rounds
    gc.collect()


def closed_by_with(config, folder):
    with fl.Run(config, folder) as run:
        for _ in run:
            break
        assert is_locked(folder)
        assert run.summary is None
        for round in run:  # goes on
            if round.number == 2:
                break
    assert run.summary["rounds"] == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("leave", "error"),
    [
        (left_at_break, None),
        (left_by_an_error, AssertionError),
        (left_by_ctrl_c, KeyboardInterrupt),
        (left_by_sigterm, KeyboardInterrupt),
        (dropped, None),
        (closed_by_with, None),
    ],
)
def test_rounds__a_loop_may_be_left_and_goes_on_exactly(tmp_path, whole, leave, error):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # another test's library may have left a handler, which runs before
    handlers, loggers = signal.getsignal(signal.SIGTERM), list(logging.root.handlers)
    with pytest.raises(error) if error else nullcontext():
        leave(CONFIG, tmp_path / "run")
    assert not is_locked(tmp_path / "run")
    assert signal.getsignal(signal.SIGTERM) is handlers
    assert logging.root.handlers == loggers
    assert checkpoint.read_header(tmp_path / "run")["round"] == 2
    assert {"summary.json", "curves.png", "config.yaml"} <= {path.name for path in (tmp_path / "run").iterdir()}
    with fl_refused("folder", "resume=True"):
        next(iter(fl.Run(CONFIG, tmp_path / "run")))
    assert [round.number for round in fl.Run(CONFIG, tmp_path / "run", resume=True)] == [3, 4]
    assert same(fl.load_model(tmp_path / "run"), fl.load_model(whole))
    assert without_time(read(tmp_path / "run/metrics.csv")) == without_time(read(whole / "metrics.csv"))


@pytest.mark.slow
def test_rounds__a_second_loop_over_a_run_goes_on(tmp_path, whole):
    run = fl.Run(CONFIG, tmp_path / "run")
    assert run.summary is None
    for _ in run:
        break
    assert (run.summary["rounds"], run.summary["complete"]) == (1, False)
    assert [round.number for round in run] == [2, 3, 4]
    assert run.summary["complete"]
    assert [*run] == []
    assert same(fl.load_model(tmp_path / "run"), fl.load_model(whole))


def test_rounds__a_loop_that_ended_before_its_first_round_goes_on_in_its_folder(tmp_path, monkeypatch):
    """Once the folder has settings; a run that was never begun there is not resumed, whosever folder it is."""
    config = CONFIG.replace(rounds=1, local_valid=0.0)
    run, other = (fl.Run(config, tmp_path / "run") for _ in range(2))

    def interrupted(run):
        raise KeyboardInterrupt

    monkeypatch.setattr(simulation, "AT_START", [interrupted])
    with pytest.raises(KeyboardInterrupt):
        next(iter(run))
    assert (run.resume, other.resume) == (True, False)
    monkeypatch.setattr(simulation, "AT_START", [])
    monkeypatch.setattr(simulation, "AT_END", [])
    with fl_refused("folder", "resume=True"):
        next(iter(other))
    assert not other.resume
    assert [round.number for round in run] == [1]
    assert [*run] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fedavg", "fedrep"])
def test_rounds__a_round_has_its_models_and_keeps_them(tmp_path, name):
    config = CONFIG.replace(algorithm=name, local_valid=0.0)
    kept = []
    for round in fl.Run(config, tmp_path / "looked"):
        kept.append((round, {part: {n: t.clone() for n, t in state.items()} for part, state in round.server.items()}))
        round.model.load_state_dict({n: torch.zeros_like(t) for n, t in round.model.state_dict().items()})  # a copy
        round.client_model(1), round.client_model(3)
        round.row.clear()
        torch.manual_seed(0)
    for round, server in kept:
        assert all(torch.equal(t, server[part][n]) for part, state in round.server.items() for n, t in state.items())
    fl.simulate(config, tmp_path / "not looked")
    assert without_time(read(tmp_path / "looked/metrics.csv")) == without_time(
        read(tmp_path / "not looked/metrics.csv")
    )
    assert same(round.model, fl.load_model(tmp_path / "not looked"))
    assert same(round.client_model(1), client_model(tmp_path / "not looked", 1))
    assert not round.model.training
    assert same(kept[0][0].client_model(0), round.client_model(0)) is False
    with fl_refused("argument", "client 4"):
        round.client_model(4)


class Told:
    """It sends SIGTERM when it is deleted, where Python drops what a handler raises."""

    def __del__(self):
        signal.raise_signal(signal.SIGTERM)


def dropped_by_del():
    Told()


def dropped_by_a_callback():
    one = Told.__new__(type("Plain", (), {}))
    weakref.finalize(one, signal.raise_signal, signal.SIGTERM)
    reference = weakref.ref(one, lambda _: signal.raise_signal(signal.SIGTERM))
    del one, reference


def dropped_by_the_user():
    with suppress(KeyboardInterrupt):
        signal.raise_signal(signal.SIGTERM)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("last", [2, 4])
@pytest.mark.parametrize(
    "drop",
    [
        dropped_by_del,
        pytest.param(dropped_by_a_callback, marks=pytest.mark.slow),
        pytest.param(dropped_by_the_user, marks=pytest.mark.slow),
    ],
)
def test_rounds__a_sigterm_that_python_drops_ends_the_run_after_the_round(tmp_path, whole, drop, last):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    rows = []

    def on_round(row):
        rows.append(row)
        if row["round"] == last:
            drop()

    with pytest.raises(Terminated):
        fl.simulate(CONFIG, tmp_path / "run", on_round=on_round)
    assert len(rows) == last == checkpoint.read_header(tmp_path / "run")["round"]
    fl.simulate(CONFIG, tmp_path / "run", resume=True)
    losses = [[row["train_loss"] for row in read(folder / "metrics.csv")] for folder in (tmp_path / "run", whole)]
    assert losses[0] == pytest.approx(losses[1])
    after, expected = (fl.load_model(folder).state_dict() for folder in (tmp_path / "run", whole))
    torch.testing.assert_close(after, expected)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("leave", [lambda: True, lambda: signal.raise_signal(signal.SIGTERM)])
def test_rounds__a_second_sigterm_ends_at_once_and_one_while_the_run_is_left_is_not_lost(tmp_path, leave):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def on_round(row):
        dropped_by_del()
        left = leave()
        assert left, "it goes on"
        return left

    with pytest.raises(Terminated):
        fl.simulate(CONFIG, tmp_path / "run", on_round=on_round)
    assert checkpoint.read_header(tmp_path / "run")["round"] == 1


@pytest.mark.parametrize("last", [1, 2])
def test_rounds__a_command_that_is_stopped_says_whether_rounds_are_left(tmp_path, monkeypatch, capsys, last):
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    saves = fl.runs.state.RunState.advance

    def advance(run, server, number):
        saves(run, server, number)
        if number == last:
            dropped_by_del() if last == 1 else signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr("fl.runs.state.RunState.advance", advance)
    flags = ["--algorithm", "fedavg", "--rounds", "2", "--clients", "4", "--participants", "2", "--width", "0.1"]
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    assert cli.main([*flags, "--local-epochs", "1", "--samples", "80", "--out", str(tmp_path), "--name", "a"]) == 143
    said = capsys.readouterr().out
    assert ("continue with" in said, "stopped after the last round" in said) == (last == 1, last == 2)


@pytest.mark.slow
def test_rounds__two_runs_side_by_side_are_those_alone(tmp_path, whole):
    handler, loggers, other = signal.getsignal(signal.SIGTERM), list(logging.root.handlers), CONFIG.replace(seed=1)
    for one, two in zip(fl.Run(CONFIG, tmp_path / "a"), fl.Run(other, tmp_path / "b")):
        assert one.number == two.number
    assert signal.getsignal(signal.SIGTERM) is handler
    assert logging.root.handlers == loggers
    assert same(fl.load_model(tmp_path / "a"), fl.load_model(whole))
    fl.simulate(other, tmp_path / "alone")
    assert same(two.model, fl.load_model(tmp_path / "alone"))
    longer = fl.Run(CONFIG.replace(rounds=6), tmp_path / "a", resume=True)
    with fl_refused("folder", str(os.getpid())):
        list(zip(longer, longer))


def test_rounds__errors_are_those_of_simulate(tmp_path, monkeypatch):
    run = fl.Run(CONFIG.replace(lr=1e30), tmp_path / "run")
    with pytest.raises(Diverged):
        list(run)
    assert run.summary["failed"]
    with fl_refused("name", "fl.Experiment"):
        [*fl.Run(CONFIG.replace(seeds=(0, 1)), tmp_path / "several")]
    assert not (tmp_path / "several").exists()
    with fl_refused("argument", "on_round="):
        fl.simulate(CONFIG, tmp_path / "new", on_round=3)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with fl_refused("unsupported", "fl.Run"):
        [*fl.Run(CONFIG, tmp_path / "new")]


@pytest.mark.slow
def test_rounds__a_program_that_ends_in_a_round_leaves_what_it_did(tmp_path):
    (tmp_path / "settings.yaml").write_text(CONFIG.to_yaml())
    config = "fl.Config.from_yaml(pathlib.Path('settings.yaml').read_text())"
    lines = ["import fl, pathlib", f"rounds = iter(fl.Run({config}, 'run'))", "next(rounds)"]
    said = subprocess.run([sys.executable, "-c", "; ".join(lines)], cwd=tmp_path, capture_output=True, text=True)
    assert (said.returncode, "Exception" in said.stderr) == (0, False), said.stderr
    assert not (tmp_path / "run/.lock").exists()
    assert checkpoint.read_header(tmp_path / "run")["round"] == 1

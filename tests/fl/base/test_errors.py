"""Errors name flags; from Python a note says what these are called there."""

import pickle
import traceback

import numpy as np
import pytest
import torch
from refusals import fl_refused
from torch import nn

import fl
from fl.base.console import guard
from fl.base.errors import Diverged, Refused, Unwritable, ask_memory
from fl.distributed.ranks import Lost
from fl.extensions.flower.messages import InvalidMessage
from fl.run import main

SETTINGS = {"rounds": 1, "clients": 2, "samples": 60, "local_epochs": 1}


def test_simulate__a_folder_that_is_there_is_refused_in_the_words_of_the_caller(tmp_path, capsys):
    fl.simulate(fl.Config.of(algorithm="fedavg", **SETTINGS), tmp_path / "run")
    with fl_refused("folder", "resume=") as caught:
        fl.simulate(fl.Config.of(algorithm="fedavg", **SETTINGS), tmp_path / "run")
    assert "--" not in str(caught.value)
    assert not hasattr(caught.value, "__notes__")
    capsys.readouterr()
    assert main(["--algorithm", "fedavg", "--out", str(tmp_path), "--name", "run"]) == 2
    said = capsys.readouterr().err
    assert "--resume" in said
    assert "resume=True" not in said


def test_errors__flags_in_a_message_have_a_note_that_names_the_arguments():
    error = fl.FLError("choose another --name", code="folder")
    for one in (error, pickle.loads(pickle.dumps(error))):
        (note,) = one.__notes__
        assert "folder=" in note
        assert note in "".join(traceback.format_exception(one))


def test_errors__an_option_of_a_method_is_named_as_config_takes_it():
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    with pytest.raises(fl.FLError) as caught:
        fl.build(fl.Config.of(algorithm="femam", **SETTINGS), model=net)
    assert any('femam={"start": ...}' in note for note in caught.value.__notes__)


def test_errors__an_error_without_flags_has_no_note():
    assert not hasattr(fl.FLError("no such thing -- not here", code="name"), "__notes__")


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (Diverged, "diverged"),
        (Refused, "unsupported"),
        (Unwritable, "file"),
        (Lost, "peers"),
        (InvalidMessage, "peers"),
    ],
)
def test_errors__classes_of_their_own_have_one_code(kind, code):
    for error in (kind("lost"), pickle.loads(pickle.dumps(kind("lost")))):
        assert (type(error), error.code, str(error)) == (kind, code, "lost")


def test_errors__a_pickled_error_keeps_its_code_and_what_was_added():
    error = fl.FLError("no such thing", code="name")
    error.add_note("seen")
    again = pickle.loads(pickle.dumps(error))
    assert (again.code, str(again), again.__notes__) == ("name", "no such thing", ["seen"])


def test_errors__training_that_diverges_has_a_code_and_an_exit_code_of_its_own(tmp_path, capsys):
    config = fl.Config.of(algorithm="fedavg", lr=1e30, **SETTINGS)
    with fl_refused("diverged: --lr") as caught:
        fl.simulate(config, tmp_path / "run")
    with guard() as ended:
        raise caught.value
    assert ended.code == 1
    with guard() as ended:
        raise fl.FLError("no such thing", code="name")
    assert ended.code == 2


def weights_of_another_model(folder):
    torch.save({"weight": torch.zeros(3, 3)}, folder / "other.pt")
    return fl.Config.of(algorithm="fedavg", init=str(folder / "other.pt"))


REFUSED = {
    "argument: --rounds": lambda folder: fl.Config.of(algorithm="fedavg", rounds=0).check(),
    "name: fedavgg": lambda folder: fl.Config.of(algorithm="fedavgg").check(),
    "unsupported: --exits": lambda folder: fl.build(fl.Config.of(algorithm="fedavg", exits=True)),
    "run: ZeroDivisionError": lambda folder: fl.build(fl.Config.of(algorithm="fedavg"), model=lambda: 1 / 0),
    "data: y[3]": lambda folder: fl.Dataset.from_arrays(np.ones((4, 2)), [0, 1, 0, np.nan], np.ones((2, 2)), [0, 1]),
    "file: x.yaml": lambda folder: fl.Experiment.from_file(folder / "x.yaml"),
    "folder: config.yaml": lambda folder: fl.load_model(folder),
    "mismatch: --init": lambda folder: fl.build(weights_of_another_model(folder)),
    "memory: a batch": lambda folder: ask_memory(10**18, "a batch", "use less"),
}


@pytest.mark.parametrize("code", REFUSED)
def test_errors__of_each_kind_have_its_code(code, tmp_path):
    with fl_refused(code):
        REFUSED[code](tmp_path)

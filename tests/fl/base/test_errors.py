"""Errors name flags; from Python a note says what these are called there."""

import pickle
import traceback

import pytest
from torch import nn

import fl
from fl.run import main

SETTINGS = {"rounds": 1, "clients": 2, "samples": 60, "local_epochs": 1}


def test_simulate__a_folder_that_is_there_is_refused_in_the_words_of_the_caller(tmp_path, capsys):
    fl.simulate(fl.Config.of(algorithm="fedavg", **SETTINGS), tmp_path / "run")
    with pytest.raises(fl.FLError, match="resume=True") as caught:
        fl.simulate(fl.Config.of(algorithm="fedavg", **SETTINGS), tmp_path / "run")
    assert "--" not in str(caught.value)
    assert not hasattr(caught.value, "__notes__")
    capsys.readouterr()
    assert main(["--algorithm", "fedavg", "--out", str(tmp_path), "--name", "run"]) == 2
    said = capsys.readouterr().err
    assert "--resume" in said
    assert "resume=True" not in said


def test_errors__flags_in_a_message_have_a_note_that_names_the_arguments():
    error = fl.FLError("choose another --name")
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
    assert not hasattr(fl.FLError("no such thing -- not here"), "__notes__")

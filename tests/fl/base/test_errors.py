"""Errors name flags; from Python a note says what these are called there."""

import pickle
import traceback

import pytest
from torch import nn

import fl
from fl.run import main

SETTINGS = {"rounds": 1, "clients": 2, "samples": 60, "local_epochs": 1}


def test_a_folder_that_is_there_names_the_arguments(tmp_path, capsys):
    fl.simulate(fl.Config.of(algorithm="fedavg", **SETTINGS), tmp_path / "run")
    with pytest.raises(fl.FLError) as caught:
        fl.simulate(fl.Config.of(algorithm="fedavg", **SETTINGS), tmp_path / "run")
    for error in (caught.value, pickle.loads(pickle.dumps(caught.value))):
        (note,) = error.__notes__
        assert "folder=" in note
        assert "resume=True" in note
        assert note in "".join(traceback.format_exception(error))
    capsys.readouterr()
    assert main(["--algorithm", "fedavg", "--out", str(tmp_path), "--name", "run"]) == 2
    assert "resume=True" not in capsys.readouterr().err


def test_an_option_of_a_method_is_named_as_config_takes_it():
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    with pytest.raises(fl.FLError) as caught:
        fl.build(fl.Config.of(algorithm="femam", **SETTINGS), model=net)
    assert any('femam={"start": ...}' in note for note in caught.value.__notes__)


def test_an_error_without_flags_has_no_note():
    assert not hasattr(fl.FLError("no such thing -- not here"), "__notes__")

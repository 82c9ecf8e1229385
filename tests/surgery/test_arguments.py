"""A mistake in a command line is an error of one line."""

import os
from typing import Literal

import pytest
from refusals import refused

from surgery.__main__ import run
from surgery.arguments import parse


def train(file: str, /, *, rounds: int = 1, other_rounds: int = 1, rate: float = 0.5, how: Literal["a", "b"] = "a"):
    return file, rounds, other_rounds, rate, how


@pytest.mark.parametrize("columns", ["20", "80", None])
@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("f --round 5", "did you mean --rounds?"),
        ("f --other_round 5", "did you mean --other-rounds?"),
        ("--round 5", "did you mean --rounds?"),
        ("f --xyzzy=5", "`go --help` lists the flags"),
        ("", "STR"),
        ("f --rounds", "--rounds"),
        ("f --rounds x", "--rounds INT: 'x' is not a whole number"),
        ("f --rate x", "--rate FLOAT: 'x' is not a number"),
        ("f --how c", "--how: 'c' is none of 'a', 'b'"),
        ("f 5", "5"),
    ],
)
def test_parse__names_what_is_wrong_in_one_line(monkeypatch, capsys, line, name, columns):
    monkeypatch.delenv("COLUMNS", raising=False) if columns is None else monkeypatch.setenv("COLUMNS", columns)
    with refused(f"argument: {name}") as caught:
        parse(train, line.split(), "go")
    assert "\n" not in str(caught.value)
    assert capsys.readouterr() == ("", "")
    assert os.environ.get("COLUMNS") == columns


def test_parse__calls_what_it_parses_for():
    assert parse(train, ["f", "--rounds", "3"], "go") == ("f", 3, 1, 0.5, "a")


@pytest.mark.parametrize(
    ("line", "names"),
    [("a.pt --width fc=5", ["--width SHARE", "'fc=5'"]), ("timm:resnet18 --width 1", ["--model timm:resnet18"])],
)
def test_narrow__takes_a_checkpoint_and_a_share(line, names):
    with refused("argument", *names):
        run("narrow", [*line.split(), "--out", "b.pt"])

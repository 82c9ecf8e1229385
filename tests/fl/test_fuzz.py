"""Whatever flags a user types: a command works, or says why not; it does not end in a traceback, and it does end."""

import contextlib
import os
import tempfile
from pathlib import Path

import pytest
from fuzzing import EVERY, TINY, flags, helped, others, wrong
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import surgery.__main__
import zoo.__main__
from fl import compare, landscape, run, sweep
from fl.algorithms import ALGORITHMS

LANDSCAPE = {
    "--radius": ("1e-9", "1000", "1001", "0.5"), "--points": ("3", "4", "2"), "--samples": ("0", "1", "5"),
    "--part": ("test", "train"), "--together": ("0", "1", "4"), "--seed": ("0", str(2**32)), 
    "--device": ("cpu", "cuda:9"),
    "--out": ("a.gif", "/proc/x.png"),
}  # fmt: skip
COMPARE = {"--against": ("rounds", "traffic", "macs", "seconds"), "--target": ("0.1", "1", "2"), "--out": ("a.gif",)}
INSPECT = {
    "--width": ("0.5", "1", "1.1", "1e-9"), "--depth": ("1,1,1,1", "2", "1,2,3,4,5", "501,1,1,1", "0,0,0,0"),
    "--heads": ("inside", "drop"), "--input": ("3,32,32", "1,32,32", "3", "3,99999999,99999999", "3,1,1"),
    "--plot": ("a.gif",), "--seconds": ("20", "1e-9"),
}  # fmt: skip
ZOO = {
    "--width": ("0.5", "100", "101", "1e-9", "1,0.5"), "--depth": ("1", "2,2", "501", "all"),
    "--num-classes": ("1", "2147483649"), "--in-channels": ("1", "1048577"), "--image-size": ("1", "32", "65537"),
    "--norm": ("batch", "static_batch", "group", "layer", "none"),
}  # fmt: skip
NAMED = ("cnn", "resnet20", "vgg11", "transformer", "mobilenetv2", "nope", "timm:nope", "torchvision:resnet18")
MODELS = ("torchvision:resnet18", "torchvision:nope", "timm:", ":", "resnet18", "")


@pytest.fixture(scope="module")
def folder():
    """A run folder in a folder that is removed, and in which the commands leave what they write."""
    with tempfile.TemporaryDirectory() as root, contextlib.chdir(root):
        assert wrong(run.main, [*TINY.split(), "--algorithm", "fedavg", "--out", root, "--name", "run"]) == ""
        yield Path(root)


def runs(folder):
    """Commands of fl.run."""
    algorithm = st.sampled_from(sorted(ALGORITHMS))
    where = ["--out", str(folder / "runs"), "--data-root", str(folder), "--no-download"]
    return st.builds(
        lambda name, more: (run.main, [*TINY.split(), *where, "--algorithm", name, *more]), algorithm, flags()
    )


def sweeps(folder):
    """Commands of fl.sweep, of which those that would train have one value that is refused."""
    option = st.sampled_from([flag for flag, _ in EVERY])
    word = st.sampled_from(["1,nan", "x", "0,-1", "", ",", "1/2/nan", "-1"])
    where = ["--out", str(folder / "sweeps"), "--no-download"]
    return st.builds(lambda o, v, more: (sweep.main, [o, v, *TINY.split(), *where, *more]), option, word, flags(1))


def helps():
    """Commands that ask fl.run and fl.sweep for help."""
    return st.builds(lambda main, argv: (main, argv), st.sampled_from([run.main, sweep.main]), helped())


def looks(folder):
    """Commands of fl.landscape and fl.compare."""
    of = st.sampled_from([[str(folder / "run")], [str(folder)], [str(folder / "none")], []])
    quick = ["--samples", "5", "--points", "3", "--out", str(folder / "l.png")]
    return st.one_of(
        st.builds(lambda where, more: (landscape.main, [*where, *quick, *more]), of, others(LANDSCAPE)),
        st.builds(
            lambda where, more: (compare.main, [*where, "--out", str(folder / "c.png"), *more]), of, others(COMPARE)
        ),
    )


def tables():
    """Commands of surgery and the zoo."""
    small = ["--input", "3,32,32", "--seconds", "20"]
    return st.one_of(
        st.builds(
            lambda model, more: (surgery.__main__.main, ["inspect", model, *small, *more]),
            st.sampled_from(MODELS), others(INSPECT),
        ),
        st.builds(
            lambda name, more: (zoo.__main__.main, [name, *more]), st.sampled_from(NAMED), others(ZOO),
        ),
    )  # fmt: skip


def tried(commands, number):
    """Try so many commands."""

    @hypothesis_settings(
        max_examples=number, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck)
    )
    @given(commands)
    def ends_well(command):
        assert wrong(*command) == ""

    ends_well()


def test_some_commands(folder):
    tried(runs(folder), 8)  # of which some train
    tried(sweeps(folder), 13)
    tried(helps(), 13)
    tried(looks(folder), 13)
    tried(tables(), 13)


MANY = int(os.environ.get("FUZZ_COMMANDS", "1000"))
"""How many commands the slow tests try, of all kinds together. CONTRIBUTING.md says when to try more."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["runs", "sweeps", "helps", "looks", "tables"])
def test_many_commands(folder, kind):
    commands = {"helps": helps, "tables": tables}
    made = commands[kind]() if kind in commands else {"runs": runs, "sweeps": sweeps, "looks": looks}[kind](folder)
    tried(made, MANY // 5)


@pytest.mark.parametrize(
    "command",
    ["--algorithm fedavg --model timm:resnet10t --width 0.25 --batch-size 1", "--local-epochs 100000000000"],
)
def test_a_run_that_cannot_be_trained_is_told_in_a_line(folder, capsys, command):
    assert run.main([*TINY.split(), "--out", str(folder / "known"), *command.split()]) == 2
    assert [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]

"""Whatever flags a user types: a command works, or says why not; it does not end in a traceback, and it does end."""

import contextlib
import os
import tempfile
from pathlib import Path

import pytest
from fuzzing import TINY, flags, helped, others, wrong
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import surgery.__main__
import zoo.__main__
from fl import compare, landscape, run
from fl.algorithms import ALGORITHMS

LANDSCAPE = "radius samples part together seed device out"
COMPARE = "against target out"
INSPECT = "width depth heads input plot seconds"
ZOO = "width depth num-classes in-channels image-size norm"
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


def helps(_):
    """Commands that ask fl.run for help."""
    return st.tuples(st.just(run.main), helped())


def looks(folder):
    """Commands of fl.landscape and fl.compare."""
    of = st.sampled_from([[str(folder / "run")], [str(folder)], [str(folder / "none")], []])
    quick = ["--samples", "5", "--points", "3"]
    look = st.builds(lambda where, more: [*where, *quick, "--out", str(folder / "l.png"), *more], of, others(LANDSCAPE))
    set_off = st.builds(lambda where, more: [*where, "--out", str(folder / "c.png"), *more], of, others(COMPARE))
    return st.one_of(st.tuples(st.just(landscape.main), look), st.tuples(st.just(compare.main), set_off))


def tables(_):
    """Commands of surgery and the zoo."""
    small = ["--input", "3,32,32", "--seconds", "20"]
    inspect = st.builds(lambda model, more: ["inspect", model, *small, *more], st.sampled_from(MODELS), others(INSPECT))
    sizes = st.builds(lambda name, more: [name, *more], st.sampled_from(NAMED), others(ZOO))
    return st.one_of(st.tuples(st.just(surgery.__main__.main), inspect), st.tuples(st.just(zoo.__main__.main), sizes))


def tried(commands, number):
    """Try so many commands."""

    @hypothesis_settings(max_examples=number, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(commands)
    def ends_well(command):
        assert wrong(*command) == ""

    ends_well()


@pytest.mark.slow
@pytest.mark.parametrize(("commands", "number"), [(runs, 8), (helps, 13), (looks, 13), (tables, 13)])
def test_fuzz__some_commands(folder, commands, number):
    tried(commands(folder), number)


MANY = int(os.environ.get("FUZZ_COMMANDS", "600"))
"""How many commands the slow tests try, of all kinds together. CONTRIBUTING.md says when to try more."""


@pytest.mark.nightly
@pytest.mark.parametrize("commands", [runs, helps, looks, tables])
def test_fuzz__many_commands(folder, commands):
    tried(commands(folder), MANY // 4)


@pytest.mark.parametrize(
    "command", ["--algorithm fedavg --model timm:resnet10t --width 0.25 --batch-size 1", "--local-epochs 100000000000"]
)
def test_fuzz__a_run_that_cannot_be_trained_is_told_in_a_line(folder, capsys, command):
    assert run.main([*TINY.split(), "--out", str(folder / "known"), *command.split()]) == 2
    assert [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]

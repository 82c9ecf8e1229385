"""benchmarks/gpu.sh says what it does not know, and runs cells of the papers that there are."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from benchmarks.papers import find

SCRIPT = Path(__file__).parent.parent / "benchmarks/gpu.sh"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["tset"], "unknown part tset: there are tests, engine, rounds, step, peers, paper, all and wheels"),
        (["--device"], "--device takes cuda or cpu"),
        (["--device", "tpu", "tests"], "--device tpu: there are cuda and cpu"),
        ([], "What waits for a GPU"),
        (["--quick"], "What waits for a GPU"),
    ],
)
def test_what_the_script_does_not_know_it_says(arguments, said):
    done = subprocess.run(["bash", SCRIPT, *arguments], capture_output=True, text=True)
    assert done.returncode
    assert said in done.stdout + done.stderr
    assert "set -euo" not in done.stdout


def test_the_script_names_cells_that_there_are():
    ids = re.findall(r"\b(?:fedmr|femam|fedfa)\.[\w.-]+", SCRIPT.read_text())
    assert len(ids) == 5
    assert all(find(name).arms for name in ids)


@pytest.mark.slow
def test_the_papers_part_runs_and_goes_on(tmp_path):
    command = ["bash", SCRIPT, "--device", "cpu", "--quick", "paper"]
    outputs = []
    for _ in range(2):
        done = subprocess.run(command, env={**os.environ, "OUT": str(tmp_path)}, capture_output=True, text=True)
        assert not done.returncode, done.stdout + done.stderr
        outputs.append(done.stdout)
    ran = "fedfa.lambda.digits.0/fedavg seed 0: 1 of 1 rounds"
    assert [ran in text for text in outputs] == [True, False]
    assert (tmp_path / "papers/fedfa.lambda.digits.5/fedfa-seed0.csv").exists()

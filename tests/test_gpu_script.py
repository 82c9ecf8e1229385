"""benchmarks/gpu.sh says what it does not know, and paper_runs.py goes on with runs from what came back of them."""

import importlib.util
import math
import subprocess
import time
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest

from fl.config.recipes import RECIPES

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture
def paper_runs():
    spec = importlib.util.spec_from_file_location("paper_runs", BENCHMARKS / "paper_runs.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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
    done = subprocess.run(["bash", BENCHMARKS / "gpu.sh", *arguments], capture_output=True, text=True)
    assert done.returncode
    assert said in done.stdout + done.stderr
    assert "set -euo" not in done.stdout


def begun_run(folder, name, rounds, size, complete=False):
    run = folder / name
    run.mkdir(parents=True)
    (run / "config.yaml").write_text("seed: 0\n")
    (run / "summary.json").write_text(
        f'{{"rounds": {rounds}, "complete": {str(complete).lower()}, "final": {{"accuracy": 0.5}}}}'
    )
    (run / "checkpoint.safetensors").write_bytes(name.encode() * (size // len(name)))
    return run


def test_what_is_packed_in_pieces_comes_back(paper_runs, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(paper_runs, "_PIECE", 100_000)
    here, out, there = tmp_path / "here", tmp_path / "out", tmp_path / "there"
    for name, rounds, size in (("early", 1, 90_000), ("far", 9, 150_000), ("middle", 5, 500_000)):
        begun_run(here, name, rounds, size)
    begun_run(here, "whole", 10, 200_000, complete=True)
    (out / "old").mkdir(parents=True)
    (out / "paper-checkpoints.tar.7").write_bytes(b"of another call")
    paper_runs.pack(here, out)
    assert "middle begins anew" in capsys.readouterr().out
    pieces = sorted(path for path in out.iterdir() if path.name.startswith("paper-checkpoints"))
    assert 1 < len(pieces) <= 3
    assert all(path.stat().st_size <= 100_000 for path in pieces)

    there.mkdir()
    paper_runs.unpack(out, there)
    for name in ("early", "far"):
        assert (there / name / "checkpoint.safetensors").read_bytes() == (
            here / name / "checkpoint.safetensors"
        ).read_bytes()
        assert (there / name / "config.yaml").exists()
    assert paper_runs.rounds_done(there / "whole") == (10, True, 0.5)
    assert not (there / "middle").exists()
    assert [path.name.startswith("middle-") for path in (there / "without-checkpoint").iterdir()] == [True]


@pytest.mark.slow
def test_runs_that_were_stopped_go_on_elsewhere(paper_runs, tmp_path, monkeypatch):
    flags = ["digits", "--algorithm", "fedavg", "--rounds", "100000", "--clients", "4", "--participants", "2"]
    flags += ["--local-epochs", "1", "--samples", "200", "--checkpoint-every", "1", "--eval-every", "1"]
    monkeypatch.setattr(paper_runs, "runs", lambda quick: {"one": flags, "other": flags})
    rounds = [[0, 0]]
    for number in range(2):
        folder, out = tmp_path / f"folder{number}", tmp_path / f"out{number}"
        folder.mkdir()
        if number:
            paper_runs.unpack(tmp_path / f"out{number - 1}", folder)
            assert [paper_runs.rounds_done(folder / name)[0] for name in ("one", "other")] == rounds[-1]

        def clock(tables=(folder / "one/metrics.csv", folder / "other/metrics.csv")):
            """The time is over as soon as both runs have gone on."""
            lines = [len(table.read_text().splitlines()) if table.exists() else 0 for table in tables]
            return math.inf if all(n > 1 + done for n, done in zip(lines, rounds[-1])) else time.monotonic()

        monkeypatch.setattr(paper_runs, "time", SimpleNamespace(monotonic=clock, sleep=time.sleep))
        args = Namespace(folder=folder, quick=True, minutes=2, jobs=2, device="cpu", precision="float32")
        assert paper_runs.play(args) == []
        rounds.append([paper_runs.rounds_done(folder / name)[0] for name in ("one", "other")])
        assert all(more > before for more, before in zip(rounds[-1], rounds[-2])), (folder / "one.log").read_text()
        paper_runs.pack(folder, out)


def test_the_list_of_runs_names_recipes_that_there_are(paper_runs, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["paper_runs.py", "--list"])
    paper_runs.main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 30
    for line in lines:
        assert line.split("fl.run ")[1].split()[0] in RECIPES

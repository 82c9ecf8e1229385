"""What lies beside the packages and is run by hand: examples/, and gpu.sh, peers.py, population.py of benchmarks/."""

import csv
import importlib
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file

from fl.algorithms import ALGORITHMS
from fl.data import load

ROOT = Path(__file__).parent.parent
GPU = ROOT / "benchmarks/gpu.sh"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs an example in a folder of its own; what it added to the methods goes away again."""
    before = dict(ALGORITHMS)

    def call(name, *arguments):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        return runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")

    yield call
    ALGORITHMS.clear()
    ALGORITHMS.update(before)


def test_programs__examples_are_short():
    lengths = [len(path.read_text().splitlines()) for path in (ROOT / "examples").glob("*.py")]
    assert len(lengths) == 4
    assert max(lengths) <= 25


def test_programs__images_without_arguments_say_what_to_give(run):
    with pytest.raises(SystemExit, match=r"python examples/images\.py FOLDER WEIGHTS"):
        run("images.py")


@pytest.mark.slow
def test_programs__a_table(run):
    assert run("table.py")["summary"]["final"]["accuracy"] > 0.9


@pytest.mark.slow
def test_programs__a_method(run, tmp_path):
    assert run("method.py")["summary"]["final"]["accuracy"] > 0.8
    assert len(list(csv.DictReader((tmp_path / "runs/careful/metrics.csv").open()))) == 10


@pytest.mark.slow
def test_programs__a_search_with_optuna(run, tmp_path):
    pytest.importorskip("optuna", reason="optuna is not installed")
    study = run("optuna_search.py")["study"]
    states = [trial.state.name for trial in study.trials]
    assert (len(states), {*states}) == (10, {"COMPLETE", "PRUNED"})
    for trial in study.trials:
        rows = list(csv.DictReader((tmp_path / f"runs/optuna/trial{trial.number}/metrics.csv").open()))
        assert len(rows) == len(trial.intermediate_values)
        assert (tmp_path / f"runs/optuna/trial{trial.number}/summary.json").exists()


@pytest.mark.nightly
def test_programs__images(run, tmp_path):
    digits = load("digits")
    for part, (x, y) in {"train": (digits.x[:300], digits.y[:300]), "test": (digits.test_x, digits.test_y)}.items():
        for k, (image, label) in enumerate(zip(x[:, 0], y.tolist())):
            folder = tmp_path / "digits" / part / str(label)
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray((image * 15).numpy()).save(folder / f"{k}.png")
    torch.manual_seed(0)
    weights = timm.create_model("resnet10t").state_dict()
    save_file(weights, tmp_path / "weights.safetensors")
    scope = run("images.py", tmp_path / "digits", tmp_path / "weights.safetensors")
    made = scope["model"]().state_dict()
    assert torch.equal(made["conv1.0.weight"], weights["conv1.0.weight"])
    assert made["fc.weight"].shape == (10, 512)
    assert scope["summary"]["final"]["accuracy"] > 0.3


@pytest.mark.parametrize("arguments", [["tset"], []])
def test_programs__what_the_gpu_script_does_not_know_is_an_error(arguments):
    done = subprocess.run(["bash", GPU, *arguments], capture_output=True, text=True)
    assert done.returncode == 2
    assert "What waits for a GPU" in done.stdout


@pytest.mark.slow
def test_programs__steps_that_take_too_long_are_ended_and_the_others_go_on(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    gpu = importlib.import_module("gpu")
    commands = {"sleeps": "import time; time.sleep(60)", "tests": "print('3 passed, 1 failed in 2s'); exit(1)"}
    steps = [gpu.Step(name, [sys.executable, "-c", code], 2) for name, code in commands.items()]
    late, failed = gpu.run(steps, scale=1)
    assert (late["in_time"], failed["in_time"], failed["status"]) == (False, True, 1)
    assert late["seconds"] < 30
    assert failed["tests"] == {"passed": 3, "failed": 1}


def test_programs__a_backend_is_admitted_by_its_first_round(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    gpu = importlib.import_module("gpu")
    assert gpu.admitted_backend(tmp_path, "cuda") == "loop"
    seconds = {"loop float32": [3, 2, 2], "vmap float32": [1, 1, 1], "graphs float32": [0.5] * 3, "graphs bf16": [0.1]}
    distances = {"loop float32": 0.0, "vmap float32": 1e-5, "graphs float32": 0.3, "graphs bf16": 1e-5}
    known = {"seconds": seconds, "distance": distances}
    (tmp_path / "rounds-cuda.json").write_text(json.dumps(known))
    assert gpu.admitted_backend(tmp_path, "cuda") == "vmap"


@pytest.mark.nightly
def test_programs__the_gpu_scripts_first_tests_are_there(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    gpu = importlib.import_module("gpu")
    command = gpu.pytest_command("cuda", "--collect-only", "-q", "-p", "no:xdist")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    ids = re.findall(r"test_gpu\.py::(\S+)", done.stdout)
    for chosen in gpu.TESTS.values():
        words = chosen.split(" and ")
        assert 1 <= sum(all(word in name for word in words) for name in ids) <= 6, chosen


@pytest.mark.nightly
def test_programs__the_plain_loop_of_peers_trains_the_same_model(tmp_path):
    command = ["benchmarks/peers.py", "--quick", "--settings", "B", "--device", "cpu", "--data-root", "none"]
    subprocess.run([sys.executable, *command, "--backend", "loop", "--out", tmp_path], cwd=ROOT, check=True)
    result = json.loads((tmp_path / "peers-cpu-quick.json").read_text())
    ours, plain = result["settings"]["B"]["rows"]
    assert (ours["side"], plain["side"]) == ("ours", "plain")
    assert plain["check"]["parameters"] < 1e-10
    assert len(plain["seconds"]) == 2
    assert plain["ratio"] > 0


def test_programs__clients_of_mapped_files_are_those_of_memory(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    worker = importlib.import_module("sides.worker")
    x, y = torch.arange(6 * 4, dtype=torch.uint8).view(6, 1, 2, 2), torch.arange(6)
    torch.save({"x": x, "y": y}, tmp_path / "data.pt")
    for name, values in {"x": x, "y": y}.items():
        np.save(tmp_path / f"{name}.npy", values.numpy())
    job = {"check": False, "clients": 3, "sizes": 2}
    memory = worker.client_data(worker.Job(data=str(tmp_path / "data.pt"), **job), "cpu")
    mapped = worker.client_data(worker.Job(data=str(tmp_path), **job), "cpu")
    assert len(memory) == len(mapped) == 3
    for client in (2, 0, 1):
        for ours, theirs in zip(mapped[client], memory[client], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.nightly
def test_programs__the_memory_of_a_population_is_measured(tmp_path):
    command = ["benchmarks/population.py", "--memory", "--quick", "--out", tmp_path]
    subprocess.run([sys.executable, *command], cwd=ROOT, check=True)
    (row,) = json.loads((tmp_path / "population-memory-cpu-quick.json").read_text())["rows"]
    assert (row["side"], row["clients"], row["actors_mb"]) == ("ours", 1000, 0)
    assert 0 < row["low"] == row["peak_mb"] < 5000
    assert 0 < row["round_s"] < row["first_s"]

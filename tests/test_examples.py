"""The scripts in examples/ are short and do what they say."""

import csv
import runpy
import sys
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import save_file

from fl.algorithms import ALGORITHMS
from fl.data import load

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs a script in a folder of its own; what it added to the methods goes away again."""
    before = dict(ALGORITHMS)

    def call(name, *arguments):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        return runpy.run_path(str(EXAMPLES / name), run_name="__main__")

    yield call
    ALGORITHMS.clear()
    ALGORITHMS.update(before)


def test_they_are_short():
    lengths = {path.name: len(path.read_text().splitlines()) for path in EXAMPLES.glob("*.py")}
    assert len(lengths) == 3
    assert max(lengths.values()) <= 25


@pytest.mark.slow
def test_a_table(run):
    assert run("table.py")["summary"]["final"]["accuracy"] > 0.9


@pytest.mark.slow
def test_a_method(run, tmp_path):
    assert run("method.py")["summary"]["final"]["accuracy"] > 0.8
    assert len(list(csv.DictReader((tmp_path / "runs/careful/metrics.csv").open()))) == 10


@pytest.mark.slow
def test_images(run, tmp_path):
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

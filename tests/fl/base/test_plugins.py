"""What lies outside this project: import paths, and entry points of installed packages."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch import nn

import fl
from fl.base.errors import FLError
from fl.base.plugins import find
from fl.data import is_custom, is_text
from fl.data import load as load_data
from fl.models import custom_model
from fl.runs import checkpoint

ROOT = Path(__file__).parents[3]

MODULE = """
import numpy as np
import fl
from torch import nn


def load():
    y = np.arange(90) % 3
    x = np.eye(7, dtype="float32")[y]
    return fl.Dataset.from_arrays(x[:60], y[:60], x[60:], y[60:])


class MyNet(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(7, 8), nn.ReLU(), nn.Linear(8, 3))


class Nets:
    Small = MyNet


def fails():
    raise OSError("no disk")


def needs(argument):
    pass


def three():
    return 3


number = 3
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "my_own_module.py").write_text(MODULE)
    (tmp_path / "my_broken_module.py").write_text("import nothing_of_that_name")
    (tmp_path / "my_failing_module.py").write_text("\n1 / 0")
    monkeypatch.chdir(tmp_path)
    path = list(sys.path)
    yield "my_own_module"
    sys.path[:] = path
    for name in [name for name in sys.modules if name.startswith("my_")]:
        del sys.modules[name]


WRONG = [
    ("nowhere:load", "there is no module nowhere, neither in .* nor among the installed packages"),
    ("my_own_module:lod", "my_own_module has no lod; did you mean load"),
    ("my_broken_module:load", "my_broken_module needs nothing_of_that_name, which is not installed"),
    ("my_failing_module:load", r"cannot be imported: ZeroDivisionError: .*\(my_failing_module.py, line 2\)"),
    ("my_own_module:number", "is an int"),
    ("my_own_module:fails", r"called without arguments, fails: OSError: no disk \(my_own_module.py, line \d+\)"),
    ("my_own_module:needs", "called without arguments, fails: TypeError: .*missing 1 required"),
    ("my_own_module:three", "returns an int: let it return an"),
]


@pytest.mark.parametrize(("name", "said"), WRONG)
def test_each_way_to_fail_is_one_line(name, said, module):
    for call in (
        lambda: load_data(name),
        lambda: fl.build(fl.Config.of(dataset="my_own_module:load", model=name, clients=2, participants=1)),
    ):
        with pytest.raises(FLError, match=said) as error:
            call()
        assert "\n" not in str(error.value)


def test_a_run_by_import_path(module, tmp_path):
    config = fl.Config.of(dataset=f"{module}:load", model=f"{module}:Nets.Small", clients=2, participants=1, rounds=1)
    fl.simulate(config, "run")
    saved = fl.Config.read(tmp_path / "run")
    assert (saved.data.dataset, saved.model.name) == (config.data.dataset, config.model.name)
    assert fl.simulate(saved.replace(rounds=2), "run", resume=True)["rounds"] == 2
    assert fl.load_model("run")[0].in_features == 7
    # of another length, as Python takes a file of the same length that is written in the same second for unchanged
    (tmp_path / "my_own_module.py").write_text(MODULE.replace("7, 8", "7, 16").replace("8, 3", "16, 3"))
    del sys.modules[module]
    with pytest.raises(FLError, match="another MyNet"):
        fl.load_model("run")


def test_what_a_colon_meant_it_still_means(module):
    assert is_text("text:notes.txt")
    assert not is_custom("text:notes")
    assert not custom_model.is_custom("timm:resnet18")
    assert not custom_model.is_custom("torchvision:resnet18")
    with pytest.raises(FLError, match="did you mean 'timm:resnet18'"):
        fl.Config.of(model="timn:resnet18").check()
    assert find("models", "torch.nn:Linear") is nn.Linear


@pytest.mark.slow
def test_entry_points_of_packages(tmp_path):
    """A package that is installed beside this project; one of its methods is broken, which stops nothing."""
    (tmp_path / "my_package.py").write_text(
        MODULE + "\n\nfrom fl.algorithms.fedavg import fedavg\nfrom fl.algorithms.method import Method\n\n\n"
        "def mine(fed):\n    return fedavg(fed)\n\n\nMETHOD = Method(mine)\n"
    )
    info = tmp_path / "my_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: my-package\nVersion: 1.0\n")
    groups = {
        "datasets": "my-table = my_package:load",
        "models": "my-net = my_package:MyNet",
        "algorithms": "mine = my_package:METHOD\nbroken = my_package:nothing\nfedavg = my_package:METHOD",
    }
    points = "".join(f"[layer_surgery.{group}]\n{lines}\n" for group, lines in groups.items())
    (info / "entry_points.txt").write_text(points)
    flags = "--dataset my-table --model my-net --algorithm mine --clients 2 --participants 1 --rounds 2 --name run"
    done = subprocess.run(
        [sys.executable, "-W", "error::RuntimeWarning", "-m", "fl.run", *flags.split()],
        cwd=tmp_path, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"},
    )  # fmt: skip
    assert not done.returncode, done.stderr
    assert "mine, seed 0: test accuracy" in done.stdout
    assert "method broken of an installed package (my_package:nothing) is left out" in done.stderr
    assert "method fedavg of an installed package (my_package:METHOD) is left out" in done.stderr
    given = checkpoint.read_header(tmp_path / "runs/run")["given"]
    assert given["data"]["x"].startswith("float32")
    assert given["model"]["class"] == "MyNet"

"""What lies outside this project: import paths, and entry points of installed packages."""

import sys

import numpy as np
import pytest
import torch
from refusals import fl_refused
from torch import nn

import fl
from fl import compare, run
from fl.algorithms import ALGORITHMS, OPTIONS, SOURCES
from fl.base.errors import FLError
from fl.base.plugins import find
from fl.data import is_custom, is_text
from fl.data import load as load_data
from fl.models import custom_model
from fl.partition import KINDS, deal

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


def needs(argument, other):
    pass


def three():
    return 3


number = 3
"""

STRANGE = """
from dataclasses import dataclass, replace

import numpy as np
import torch

from fl.algorithms.fedavg import fedavg
from fl.algorithms.method import Method
from fl.base.settings import Share
from fl.partition.kind import Kind, Partition, together
from fl.partition.split import Parts


@dataclass(frozen=True)
class CarefulOptions:
    factor: Share = 0.5


@dataclass(frozen=True)
class SkewOptions:
    skew: Share = 0.5


@dataclass(frozen=True)
class Hiding:
    lr: Share = 0.5


def careful(fed, options):
    def aggregate(server, clients, update, rng):
        before, mean = server["global"], fed.average(update.received, update.sizes)
        return {"global": {name: t + options.factor * (mean[name] - t) for name, t in before.items()}}

    return replace(fedavg(fed), aggregate=aggregate)


def fedprox(fed):
    return fedavg(fed)


def privacy(fed, options):
    return fedavg(fed)


def first(task, options):
    owners = np.arange(len(task.labels)) % (task.clients - 1) + 1
    owners[: int(options.skew * len(owners))] = 0
    return Partition(Parts.of_owners(owners, task.clients), together(task.clients))


def evenly(task):
    parts = torch.arange(len(task.labels)).chunk(task.clients)
    return Partition(parts, together(task.clients))


def listed(task):
    return [torch.arange(len(task.labels))]


def few(task):
    return Partition([torch.arange(3)], together(1))


def beyond(task):
    return Partition([torch.arange(3), torch.tensor([len(task.labels)])], together(2))


METHOD, TAKEN = Method(careful, CarefulOptions()), Method(fedprox)
UNNAMED = Kind(lambda task, options: evenly(task))
HIDING = Method(privacy, CarefulOptions())
KIND, CLASH = Kind(first, SkewOptions(), word=lambda options: f"{options.skew:g}"), Kind(first, Hiding())
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "my_own_module.py").write_text(MODULE)
    (tmp_path / "my_broken_module.py").write_text("import nothing_of_that_name")
    (tmp_path / "my_failing_module.py").write_text("\n1 / 0")
    (tmp_path / "my_strange_module.py").write_text(STRANGE)
    monkeypatch.chdir(tmp_path)
    path, tables = list(sys.path), [(table, dict(table)) for table in (ALGORITHMS, SOURCES, KINDS)]
    yield "my_own_module"
    sys.path[:] = path
    forget(tables)


def forget(tables):
    """Put tables back, and unload the modules."""
    for table, before in tables:
        table.clear()
        table.update(before)
    for name in [name for name in sys.modules if name.startswith("my_")]:
        del sys.modules[name]


WRONG = [
    ("nowhere:load", "there is no module nowhere, neither in .* nor among the installed packages"),
    ("my_own_module:lod", "my_own_module has no lod; did you mean load"),
    ("my_broken_module:load", "my_broken_module needs nothing_of_that_name, which is not installed"),
    ("my_failing_module:load", r"cannot be imported: ZeroDivisionError: .*\(my_failing_module.py, line 2\)"),
    ("my_own_module:number", "is an int"),
    ("my_own_module:fails", r"called without arguments, fails: OSError: no disk \(my_own_module.py, line \d+\)"),
    ("my_own_module:needs", "called without arguments, fails: TypeError: .*missing 2 required"),
    ("my_own_module:three", "returns an int: let it return an"),
]


@pytest.mark.parametrize(("name", "said"), WRONG)
def test_plugins__each_way_to_fail_is_one_line(name, said, module):
    for call in (
        lambda: load_data(name),
        lambda: fl.build(fl.Config.of(dataset="my_own_module:load", model=name, clients=2, participants=1)),
    ):
        with pytest.raises(FLError, match=said) as error:
            call()
        assert "\n" not in str(error.value)


def test_simulate__a_run_by_import_path(module, tmp_path):
    config = fl.Config.of(dataset=f"{module}:load", model=f"{module}:Nets.Small", clients=2, participants=1, rounds=1)
    fl.simulate(config, "run")
    saved = fl.Config.read(tmp_path / "run")
    assert (saved.data.dataset, saved.model.name) == (config.data.dataset, config.model.name)
    assert fl.simulate(saved.replace(rounds=2), "run", resume=True)["rounds"] == 2
    assert fl.load_model("run")[0].in_features == 7
    # of another length, as Python takes a file of the same length that is written in the same second for unchanged
    (tmp_path / "my_own_module.py").write_text(MODULE.replace("7, 8", "7, 16").replace("8, 3", "16, 3"))
    del sys.modules[module]
    with fl_refused("folder", "MyNet"):
        fl.load_model("run")


TINY = {"clients": 4, "participants": 2, "local_epochs": 1, "width": 0.1, "samples": 200}


def test_simulate__a_method_and_a_partition_by_import_path(module, tmp_path, caplog):
    before = [(table, dict(table)) for table in (ALGORITHMS, SOURCES, KINDS)]
    flags = [word for name, value in TINY.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    flags += ["--algorithm", "my_strange_module:METHOD", "--careful.factor", "0.25", "--rounds", "1"]
    flags += ["--partition", "my_strange_module:KIND", "--skew", "0.6"]
    config = run.parse(flags).one_run()
    assert config.title() == "careful-digits-cnn-first0.6-seed0"
    assert (config.method.name, config.method.options.factor) == ("careful", 0.25)
    options = type(config.method.options)(0.25)
    assert config == fl.Config.of(
        algorithm="my_strange_module:METHOD", careful=options, partition="my_strange_module:KIND", skew=0.6, rounds=1,
        **TINY,
    )  # fmt: skip
    fl.simulate(config, "run")
    assert fl.build(config)[0].clients.train.sizes.tolist() == [120, 27, 27, 26]

    forget(before)
    assert fl.Config.read("run").to_yaml() == config.to_yaml()
    assert fl.simulate(fl.Config.read("run").replace(rounds=2), "run", resume=True)["algorithm"] == "careful"

    forget(before)
    (tmp_path / "my_strange_module.py").unlink()
    gone = fl.Config.read("run")
    assert (gone.method.name, gone.method.options, gone.data.partition.name) == (
        "careful", None, "my_strange_module:KIND",
    )  # fmt: skip
    assert "there is no module my_strange_module" in caplog.text
    assert fl.load_model("run")
    assert compare.main(["run", "--out", "c.png"]) == 0
    with fl_refused("name", "my_strange_module"):
        fl.simulate(gone, "run", resume=True)


def test_plugins__several_methods_keep_the_paths_of_their_own(module):
    asked = ("fedavg", "my_strange_module:METHOD")
    several = fl.Experiment.of(algorithms=asked, **TINY)
    several = several.replace(careful=type(OPTIONS["careful"])(0.25))
    assert several.algorithms == ("fedavg", "careful")
    assert several.replace(algorithms=asked, careful=several.options["careful"]) == several
    text = several.to_yaml()
    del ALGORITHMS["careful"], SOURCES["careful"]
    assert fl.Experiment.from_yaml(text).runs() == several.runs()
    written = "algorithm: [fedavg, my_strange_module:METHOD]\npartition: my_strange_module:evenly\n"
    read = fl.Experiment.from_yaml(written)
    assert (read.algorithms, read.config.data.spread()) == (("fedavg", "careful"), "evenly")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"algorithm": "nowhere:METHOD"}, "--algorithm.*METHOD"),
        ({"algorithm": "my_strange_module:METOD"}, "my_strange_module.*METOD.*METHOD"),
        ({"algorithm": "my_failing_module:METHOD"}, "my_failing_module.*ZeroDivisionError"),
        ({"algorithm": "my_strange_module:careful"}, "my_strange_module"),
        ({"algorithm": "my_strange_module:TAKEN"}, "TAKEN"),
        ({"algorithm": "my_strange_module:HIDING"}, "HIDING"),
        ({"partition": "nowhere:KIND"}, "--partition.*KIND"),
        ({"partition": "my_strange_module:SkewOptions"}, "SkewOptions"),
        ({"partition": "my_strange_module:CLASH"}, "'lr'"),
        ({"partition": "my_strange_module:listed"}, "listed returns a list: let it return a Partition"),
        ({"partition": "my_strange_module:few"}, "few makes 1 parts of 200 samples for 4 clients"),
        ({"partition": "my_strange_module:beyond", "clients": 2}, "beyond makes sample 200 of 200 samples"),
    ],
)
def test_plugins__what_is_no_method_or_partition_is_one_line(settings, said, module):
    tables = [(table, dict(table)) for table in (ALGORITHMS, SOURCES)]
    with pytest.raises(FLError, match=said) as error:
        fl.build(fl.Config.of(**{**TINY, **settings}))
    assert "\n" not in str(error.value)
    assert all(table == before for table, before in tables)


def test_deal__a_function_is_a_partition_also_from_python(module):
    evenly = find("partitions", "my_strange_module:evenly")
    config = fl.Config.of(partition=evenly, **TINY)
    assert config.data.partition.name == "my_strange_module:evenly"
    assert fl.Config.of(partition="my_strange_module:UNNAMED").data.spread() == "UNNAMED"
    assert fl.build(config)[0].clients.train.sizes.tolist() == [50] * 4
    parts, _ = deal(torch.zeros(9), "my_strange_module:evenly", 3, np.random.default_rng(0))
    assert parts.sizes.tolist() == [3] * 3


def test_plugins__a_method_of_ours_needs_no_path(module):
    assert fl.Config.of(algorithm="fl.algorithms.fedprox:METHOD") == fl.Config.of(algorithm="fedprox")
    assert "fedprox" not in SOURCES


def test_plugins__what_a_colon_meant_it_still_means(module):
    assert is_text("text:notes.txt")
    assert not is_custom("text:notes")
    assert not custom_model.is_custom("timm:resnet18")
    assert not custom_model.is_custom("torchvision:resnet18")
    with fl_refused("name", "'timm:resnet18'"):
        fl.Config.of(model="timn:resnet18").check()
    assert find("models", "torch.nn:Linear") is nn.Linear

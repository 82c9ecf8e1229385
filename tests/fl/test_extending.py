"""A method, a data set or a partition is one new file that nothing else names; a figure is a function in a
list.
"""

import ast
import csv
import os
import re
import shutil
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import dataclass, make_dataclass
from importlib import import_module
from pathlib import Path

import pytest
import yaml
from fl_flags import TINY
from refusals import fl_refused
from torch import nn

from fl.algorithms import ALGORITHMS
from fl.algorithms.fedavg import METHOD as fedavg
from fl.algorithms.method import Method
from fl.analysis.groups import find_other_columns
from fl.base.columns import Column
from fl.base.console import refuse_import
from fl.base.errors import FLError
from fl.base.plugins import collect
from fl.data import LOADERS
from fl.partition import KINDS, Kind
from fl.settings.extensions import EXTENSIONS, model_change
from fl.settings.places import check_names

ROOT = Path(__file__).parents[2]

FILES = {
    "extensions/late.py": '''
"""The last clients of a round send nothing, and the others half of what they learnt."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from fl.algorithms.extension import Extension, Order
from fl.base.columns import Column
from fl.base.settings import Natural
from fl.federation import trainer
from fl.federation.divergence import restore


@dataclass(frozen=True)
class LateOptions:
    """Late."""

    clients: Natural = 0
    """how many clients are late"""


class Late(NamedTuple):
    clients: int
    stage = trainer.Stage.ARRIVAL

    def __call__(self, fed, train):
        def run(training):
            update, start = train(training), training.cohort.states
            sizes = tuple(size if row >= self.clients else 0 for row, size in enumerate(update.sizes))
            fed.meter.metrics["absent"] = float(self.clients)
            return update._replace(sizes=sizes, received=restore(update.received, start, sizes))

        return run


def halved(algorithm):
    algorithm.check({"changed_updates": "--late.clients"})

    def client(message, client_states, clients, rng):
        update, start = algorithm.client(message, client_states, clients, rng), message["model"]
        sent, names = update.received, algorithm.fed.trainable
        return update._replace(received={**sent, **{n: (start[n] + sent[n]) / 2 for n in names}})

    return replace(algorithm, client=client)


EXTENSION = Extension(
    LateOptions(),
    needs=lambda options: {"changed_updates": "--late.clients"},
    federation=lambda fed, config, rng: replace(fed, training=(*fed.training, Late(config.extensions["late"].clients))),
    algorithm=lambda algorithm, config, rng: halved(algorithm),
    order=Order.SENDING,
    columns={"absent": Column(heading="absent")},
)
''',
    "algorithms/halfway.py": '''
"""FedAvg that moves a share of the way."""

from dataclasses import dataclass, replace

from fl.algorithms.fedavg import fedavg
from fl.algorithms.method import Method
from fl.base.columns import Column
from fl.base.settings import Share


@dataclass(frozen=True)
class HalfwayOptions:
    """Halfway."""

    share: Share = 0.5
    """share of the way to move"""


def halfway(fed, options=HalfwayOptions()):
    def aggregate(server, clients, update, rng):
        before, mean = server["global"], fed.average(update.received, update.sizes)
        moved = {name: t + options.share * (mean[name] - t) for name, t in before.items()}
        return {"global": moved}, {"moved": options.share}

    return replace(fedavg(fed), aggregate=aggregate)


METHOD = Method(
    halfway,
    HalfwayOptions(),
    columns={"moved": Column(heading="moved %", factor=100)},
    lacks={"masked_logits"},
)
''',
    "data/stripes.py": '''
"""Images of one colour."""

import torch

from fl.data.dataset import Dataset
from fl.data.loader import Loader


def load(root, download):
    y = torch.arange(200) % 2
    x = (255 * y).byte().view(-1, 1, 1, 1).expand(-1, 1, 8, 8).contiguous()
    return Dataset("stripes", x, y, x[:20], y[:20], classes=2)


LOADERS = {"stripes": Loader(load, bundled=True)}
''',
    "partition/largest.py": '''
"""The first client has most of the samples."""

from dataclasses import dataclass

import numpy as np

from fl.partition.kind import Kind, Partition, together
from fl.partition.split import Parts


@dataclass(frozen=True)
class LargestOptions:
    """Largest."""

    first_share: float = 0.5
    """largest: share of the first client"""


def deal(task, options):
    owners = np.arange(len(task.labels)) % (task.clients - 1) + 1
    owners[: int(options.first_share * len(owners))] = 0
    return Partition(Parts.of_owners(owners, task.clients), together(task.clients))


KIND = Kind(deal, LargestOptions(), about="one client has most", word=lambda options: f"{options.first_share:g}")
''',
}
LINES = {
    "runs/simulation.py": '''

def draw(run):
    """How many samples each client has."""
    from matplotlib.figure import Figure

    from fl.figures.style import save

    figure = Figure()
    figure.subplots().bar(range(len(run.fed.clients)), run.fed.clients.train.sizes.tolist())
    save(figure, run.folder / "sizes.png")


AT_START.append(draw)
''',
}
"""What is added to files."""


PACKAGE = {
    **{name.rpartition("/")[2]: text for name, text in FILES.items()},
    "__init__.py": "",
    "net.py": """
from torch import nn


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 2))
""",
    "table.py": """
from stranger.stripes import load


def stripes():
    return load(None, False)
""",
}
"""Files of a package outside of fl; `late` is a transform and a middleware."""
POINTS = """
[layer_surgery.extensions]
late = stranger.late:EXTENSION

[layer_surgery.algorithms]
halfway = stranger.halfway:METHOD

[layer_surgery.partitions]
largest = stranger.largest:KIND
broken = stranger.net:Net

[layer_surgery.models]
net = stranger.net:Net

[layer_surgery.datasets]
stripes = stranger.table:stripes
"""


@pytest.fixture
def fresh():
    """A function that imports a module of fl, which is imported anew meanwhile."""
    before = {name: sys.modules.pop(name) for name in [*sys.modules] if name.split(".")[0] == "fl"}
    yield import_module
    for name in [name for name in sys.modules if name.split(".")[0] in ("fl", "stranger")]:
        del sys.modules[name]
    sys.modules.update(before)


@pytest.fixture
def copied(tmp_path, monkeypatch, fresh):
    """A function that imports `fl.run` of a copy of the package, which is all of fl that is imported meanwhile."""
    shutil.copytree(ROOT / "fl", tmp_path / "fl")
    monkeypatch.syspath_prepend(tmp_path)
    return lambda: fresh("fl.run")


@pytest.fixture
def extended(copied, tmp_path):
    """`fl.run` with these files and lines."""
    for name, text in FILES.items():
        (tmp_path / "fl" / name).write_text(text)
    for name, text in LINES.items():
        with open(tmp_path / "fl" / name, "a") as file:
            file.write(text)
    return copied()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gone", "asked"),
    [
        ("extensions", 'main([*flags, "--attack.share", "0.2"])'),
        ("language", 'main([*flags, "--adapters.kind", "lora"])'),
        ("flower", 'import_module("fl.__main__").main(["deploy"])'),
    ],
)
def test_extending__without_extensions_the_command_works(gone, asked, tmp_path):
    """Methods of the three papers, and resuming; flags and commands are gone with the files."""
    shutil.copytree(ROOT / "fl", tmp_path / "fl", ignore=shutil.ignore_patterns(gone, "__pycache__"))
    flags = [*TINY, "--rounds", "2", "--out", str(tmp_path), "--name", "mine"]
    script = f"""
import sys
sys.meta_path[:] = [one for one in sys.meta_path if "editable" not in str(one).lower()]  # finds what is installed
from importlib import import_module
from fl.run import main
flags = {flags}
sys.exit(
    main([*flags, "--algorithm", "fedmr,femam,fedfa"])
    or main(["--resume", "{tmp_path}/mine", "--rounds", "3"])
    or {asked}
)
"""
    path = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "OMP_NUM_THREADS": "1", "COLUMNS": "100"}
    command = [sys.executable, "-c", script]
    ended = subprocess.run(command, cwd=tmp_path, env={**os.environ, **path}, capture_output=True, text=True)
    assert ended.returncode == 2, ended.stderr
    assert {"extensions": "attack", "language": "adapters", "flower": "deploy"}[gone] in ended.stderr
    for method in ("fedmr", "femam", "fedfa"):
        assert len((tmp_path / f"mine/{method}-seed0/metrics.csv").read_text().splitlines()) == 4


def test_extending__a_folder_of_extensions_adds_to_rooms(copied, fresh, tmp_path):
    folder = tmp_path / "fl/extensions/mine"
    (folder / "algorithms").mkdir(parents=True)
    for name, text in {
        "__init__": "",
        "algorithms/__init__": "",
        "algorithms/same": "from fl.algorithms.fedavg import fedavg\nfrom fl.algorithms.method import Method\n"
        "def same(fed):\n    return fedavg(fed)\nMETHOD = Method(same)\n",
        "data": "from fl.data.loader import Loader\nLOADERS = {'few': Loader(lambda root, download: None)}\n",
        "commands": "COMMANDS = {'mine': ('fl.extensions.mine.run', 'Do it')}\n",
        "export": "from fl.runs.export import Format\n"
        "FORMATS = {'coreml': Format(lambda net, path, origin: path.write_text('a model'))}\n",
    }.items():
        (folder / f"{name}.py").write_text(text)
    assert Path(copied().__file__).is_relative_to(tmp_path)
    assert fresh("fl.algorithms").ALGORITHMS["same"].name == "same"
    assert "few" in fresh("fl.data").LOADERS
    assert fresh("fl.__main__").commands()["mine"][1] == "Do it"
    export = fresh("fl.runs.export").export_model
    assert export(nn.Linear(1, 1), tmp_path / "model", format="coreml").read_text() == "a model"
    with pytest.raises(fresh("fl.base.errors").FLError):  # without a suffix it is hf's, as without the folder
        export(nn.Linear(1, 1), tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_extending__one_extension_changes_the_model(monkeypatch):
    monkeypatch.setitem(EXTENSIONS, "second", EXTENSIONS["adapters"])
    assert model_change(["attack", "second"])[0] == "second"
    with fl_refused("argument", "--adapters", "--second"):
        model_change(["adapters", "second"])


@pytest.mark.slow
def test_extending__each_is_one_new_file(extended, tmp_path, capsys, monkeypatch):
    """All of them in one run."""
    assert Path(extended.__file__).is_relative_to(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    flags = [*TINY, "--algorithm", "fedavg,halfway", "--halfway.share", "0.25", "--dataset", "stripes"]
    flags += [
        "--samples",
        "0",
        "--eval-every",
        "2",
        "--partition",
        "largest",
        "--first-share",
        "0.75",
        "--late.clients",
        "1",
    ]
    flags += ["--name", "mine", "--out", str(tmp_path)]
    refused = [[*flags, "--masked-loss"], [*flags, "--architectures.widths", "0.5,1"]]
    refused += [[*flags, "--partition", "iid"], [*flags, "--algorithm", "fedavg"]]
    without = [word for word in flags if word not in ("--halfway.share", "0.25")]
    refused += [[*without, "--algorithm", "scaffold"]]
    assert extended.main(flags) == 0
    assert [extended.main(one) for one in refused] == [2] * len(refused)
    errors = capsys.readouterr().err
    with pytest.raises(SystemExit):
        extended.main([*flags, "--help"])
    shown = capsys.readouterr().out
    shown = " ".join(shown.split())
    for words in (
        "stripes (bundled)", "largest (one client has most)", "--first-share FLOAT largest: share of the first client",
        "--halfway.share 0<=FLOAT<=1 share of the way to move",
    ):  # fmt: skip
        assert words in shown

    for words in (
        "halfway has an objective of more than one model's logits, which it does not mask: leave --masked-loss out",
        "fedavg gives all clients one model",
        "--first-share is for --partition largest, not for iid", "--halfway.share is for halfway",
        "scaffold sends no updates of a model that may be changed on their way: leave --late.clients out",
    ):  # fmt: skip
        assert words in errors

    folder = tmp_path / "mine"
    settings = yaml.safe_load((folder / "config.yaml").read_text())
    assert settings["halfway"] == {"share": 0.25}
    assert settings["late"] == {"clients": 1}
    assert settings["data"]["dataset"] == "stripes"
    assert settings["data"]["partition"] == {"name": "largest", "first_share": 0.75}
    rows = list(csv.DictReader((folder / "halfway-seed0/metrics.csv").open()))
    assert [row["moved"] for row in rows] == ["0.25"] * 4
    assert [(row["absent"], row["dropped"]) for row in rows] == [("1.0", "1")] * 4
    first, *_ = csv.DictReader((folder / "halfway-seed0/clients.csv").open())
    assert (first["train"], first["valid"]) == ("135", "15")  # three quarters of 200
    table = (re.split("  +", line.strip()) for line in (folder / "comparison.txt").read_text().splitlines())
    head, *lines = table
    fedavg, halfway = (dict(zip(head, line, strict=True)) for line in lines)
    assert [line["moved %"] for line in (fedavg, halfway)] == ["-", "25.00"]
    assert (folder / "halfway-seed0/sizes.png").exists()


@pytest.fixture
def package(tmp_path):
    """The package of a stranger, installed in a folder."""
    (tmp_path / "stranger").mkdir()
    for name, text in PACKAGE.items():
        (tmp_path / "stranger" / name).write_text(text)
    info = tmp_path / "stranger-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: stranger\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(POINTS)
    return tmp_path


def commands(folder):
    """Return the command lines that train with all of the package, go on, and compare."""
    flags = ["--clients", "4", "--participants", "2", "--rounds", "1", "--local-epochs", "1"]
    flags += ["--algorithm", "halfway", "--halfway.share", "0.25", "--dataset", "stripes", "--model", "net"]
    flags += ["--partition", "largest", "--first-share", "0.75", "--late.clients", "1"]
    return (
        ["fl.run", *flags, "--out", f"{folder}/runs", "--name", "mine"],
        ["fl.run", "--resume", f"{folder}/runs/mine", "--rounds", "2"],
        ["fl.compare", f"{folder}/runs", "--out", f"{folder}/c.png"],
    )


def check_package(folder, printed):
    """Assert that what the commands have written is of all of the package."""
    assert "\nhalfway " in printed
    settings = yaml.safe_load((folder / "runs/mine/config.yaml").read_text())
    assert settings["method"] == {"name": "halfway", "share": 0.25}
    assert settings["data"]["partition"] == {"name": "largest", "first_share": 0.75}
    assert (settings["late"], settings["data"]["dataset"]) == ({"clients": 1}, "stripes")
    assert settings["model"]["name"] == "net"
    rows = list(csv.DictReader((folder / "runs/mine/metrics.csv").open()))
    assert [(row["moved"], row["absent"], row["dropped"]) for row in rows] == [("0.25", "1.0", "1")] * 2


def test_extending__a_package_of_a_stranger(package, fresh, monkeypatch, capsys):
    """A transform, a middleware, a method, a partition, a model and a data set; they resume and compare."""
    monkeypatch.syspath_prepend(package)
    for module, *words in commands(package):
        assert fresh(module).main(words) == 0
    check_package(package, capsys.readouterr().out)


@pytest.mark.slow
def test_extending__a_package_of_a_stranger_on_the_command_line(package):
    path = {"PYTHONPATH": f"{package}:{ROOT}", "OMP_NUM_THREADS": "1", "COLUMNS": "100"}
    for words in commands(package):
        command = [sys.executable, "-m", *words]
        ended = subprocess.run(command, cwd=package, env={**os.environ, **path}, capture_output=True, text=True)
        assert ended.returncode == 0, ended.stderr
        assert "broken of an installed package (stranger.net:Net) is left out of the partitions" in ended.stderr
    check_package(package, ended.stdout)


@pytest.mark.slow
def test_extending__nothing_outside_knows_a_data_set_or_a_partition_by_name():
    names = {"data": LOADERS.keys(), "partition": KINDS.keys() - {"clusters"}}  # FeSEM has an option of that name
    known = set()
    for file in (ROOT / "fl").rglob("*.py"):
        where = file.relative_to(ROOT)
        for node in ast.walk(ast.parse(file.read_text())):
            for room in names:
                adds = where.parts[1] == "extensions" and where.stem == room
                mine = adds or {room, "recipes.py"} & {*where.parts}
                if not mine and isinstance(node, ast.Constant) and node.value in names[room]:
                    known.add((str(where), node.value))
    assert known == {("fl/settings/data.py", "digits"), ("fl/settings/data.py", "dirichlet")}  # the defaults


@dataclass(frozen=True)
class Options:
    samples: int = 1


def test_extending__a_partition_cannot_hide_a_setting(monkeypatch):
    monkeypatch.setitem(KINDS, "mine", Kind(KINDS["iid"].deal, Options()))
    with fl_refused("name", "--partition", "'samples'"):
        check_names()


@pytest.mark.parametrize("options", [Options, {"a": 1}, make_dataclass("Loose", ["samples"])(1)])
def test_extending__options_of_a_partition_are_a_frozen_dataclass(options):
    with fl_refused("argument"):
        Kind(KINDS["iid"].deal, options)


@pytest.mark.parametrize(
    ("wrong", "said"), [({"kind": str}, "int or float"), ({"due": "later"}, "global, models, round")]
)
def test_extending__what_is_no_column_is_refused(wrong, said, monkeypatch):
    with fl_refused("argument", said):
        Column(**wrong)
    monkeypatch.setitem(ALGORITHMS, "mine", Method(fedavg.make, columns={"best": Column(heading="best")}))
    with fl_refused("name", "'best'"):
        find_other_columns(["best"])


def test_extending__a_file_may_declare_one_or_several_of_a_type_and_none_twice(tmp_path, monkeypatch):
    (tmp_path / "ours").mkdir()
    files = {"many": "KIND = {'b': 2, 'a': 1}", "more": "KIND = 3\nTWICE = {'many': 4}", "most": "TWICE = {'many': 5}"}
    for name, text in {**files, "__init__": "", "__main__": "raise AssertionError", "other": ""}.items():
        (tmp_path / f"ours/{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    assert [*collect("ours", "KIND", int).items()] == [("a", 1), ("b", 2), ("more", 3)]
    for name, kind, message in (("KIND", str, r"ours\.many.*KIND.*'b'"), ("TWICE", int, r"ours\.most.*TWICE.*'many'")):
        with pytest.raises(FLError, match=message):
            collect("ours", name, kind)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("import nothing_there", "ModuleNotFoundError: No module named 'nothing_there'"),
        ("def f(:", "SyntaxError: invalid syntax"),
        ("raise ValueError('of two\\nlines')", "ValueError: of two lines"),
        ("raise SystemExit(3)", "SystemExit: 3"),
    ],
)
def test_extending__a_file_that_cannot_be_imported_is_named_in_one_line(text, said, tmp_path, monkeypatch):
    (tmp_path / "broken").mkdir()
    for name, content in {"__init__": "", "good": "KIND = 1", "mine": f"import sys\n{text}\n"}.items():
        (tmp_path / f"broken/{name}.py").write_text(content)
    monkeypatch.syspath_prepend(tmp_path)
    try:
        with pytest.raises(FLError) as refused:
            collect("broken", "KIND", int)
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] == "broken"]:
            del sys.modules[name]
    assert str(refused.value) == f"broken.mine cannot be imported: {said} (mine.py, line 2)"


@pytest.mark.parametrize(("program", "code"), [("-m", 2), ("/usr/bin/layer-surgery", 2), ("mine.py", None), ("", None)])
def test_extending__commands_end_in_a_line_where_the_package_cannot_be_imported(program, code, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [program])
    with nullcontext() if code is None else pytest.raises(SystemExit) as ended:
        refuse_import(FLError("fl.extensions.mine cannot be imported", code="run"))
    assert (ended and ended.value.code) == code
    assert capsys.readouterr().err == ("error: fl.extensions.mine cannot be imported\n" if code else "")


@pytest.mark.nightly
@pytest.mark.parametrize("room", ["extensions", "algorithms", "partition", "data"])
def test_extending__a_broken_file_in_a_room_is_one_line_of_every_command(room, tmp_path):
    shutil.copytree(ROOT / "fl", tmp_path / "fl", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / f"fl/{room}/mine.py").write_text("1 / 0\n")
    path = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    command = [sys.executable, "-m", "fl.run", "--help"]
    ended = subprocess.run(command, cwd=tmp_path, env=path, capture_output=True, text=True)
    assert ended.returncode == 2
    assert ended.stderr == (
        f"error: fl.{room}.mine cannot be imported: ZeroDivisionError: division by zero (mine.py, line 1)\n"
    )

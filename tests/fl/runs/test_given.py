"""Runs on data and with models of one's own."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import fl
import zoo
from fl.algorithms import fedavg
from fl.base.errors import FLError
from fl.data import load
from fl.models import architectures
from fl.runs import checkpoint
from surgery import state

ROOT = Path(__file__).parents[3]
FEW = {"rounds": 2, "clients": 4, "participants": 2, "local_epochs": 1, "batch_size": 50, "samples": 200}
FEW |= {"partition": "iid", "eval_every": 2, "eval_client_models_every": 0}
SMALL = {**FEW, "width": 0.1}


@pytest.fixture(scope="module")
def digits():
    return load("digits")


def arrays(data, **changed):
    parts = {name: getattr(data, name).numpy() for name in ("x", "y", "test_x", "test_y")}
    return fl.Dataset.from_arrays(**{**parts, "top": 16, **changed})


def perceptron(hidden=16, inputs=64):
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, 10))


class Net(nn.Module):
    """A convolution, whose stride is a setting."""

    def __init__(self, stride=1, classes=10):
        super().__init__()
        self.stride = stride
        self.conv = nn.Conv2d(1, 6, 3, padding=1)
        self.last = nn.Linear(6, classes)

    def forward(self, x):
        return self.last(self.conv(x)[..., :: self.stride, :].relu().mean((2, 3)))


def files(folder):
    """What two equal runs share: the tables but for the seconds, and the server."""
    rows = [line.split(",") for line in (folder / "metrics.csv").read_text().splitlines()]
    seconds = rows[0].index("seconds")
    server = {name: tensor.tolist() for name, tensor in load_file(folder / checkpoint.FILE).items()}
    return [row[:seconds] + row[seconds + 1 :] for row in rows], server


MORE = [{"pad": 2, "samples": 150}, {"pool_test_set": True, "local_test": 0.2, "samples": 0}]


@pytest.mark.parametrize("settings", [{}, *(pytest.param(one, marks=pytest.mark.slow) for one in MORE)])
def test_digits_as_arrays_are_the_digits_by_name(settings, digits, tmp_path):
    config = fl.Config(**{**SMALL, **settings})
    fl.simulate(config, tmp_path / "named")
    fl.simulate(config, tmp_path / "given", dataset=arrays(digits))
    assert files(tmp_path / "given") == files(tmp_path / "named")
    assert fl.Config.read(tmp_path / "given").dataset == "given"
    kept = [checkpoint.read_header(tmp_path / name)["given"]["data"] for name in ("named", "given")]
    assert [one is None for one in kept] == [True, False]


def test_data_that_were_changed_since_they_were_loaded_are_given(digits, tmp_path):
    config, other = fl.Config(**SMALL), replace(digits, x=digits.x * 0)
    assert other.name == config.dataset
    fl.simulate(config, tmp_path / "run", dataset=other)
    assert fl.Config.read(tmp_path / "run").dataset == "given"
    for same in (None, digits, config.load()):
        with pytest.raises(FLError, match="holds a run on data of your own, with x uint8"):
            fl.simulate(replace(config, rounds=3), tmp_path / "run", resume=True, dataset=same)
    assert fl.simulate(replace(config, rounds=3), tmp_path / "run", resume=True, dataset=other)["rounds"] == 3


MANY = {"pad": 1, "pool_test_set": True, "samples": 100, "local_test": 0.2}


def test_loaded_data_are_prepared_once_as_the_settings_say(digits):
    config = fl.Config(**{**SMALL, **MANY})
    named, _ = fl.build(config)
    assert len(named.data.x) == 100
    assert named.data.x.shape[-1] == 10
    for same in (digits, config.load(), config.load().to("cpu"), config.prepare(config.load()), arrays(digits)):
        fed, _ = fl.build(config, same)
        assert all(torch.equal(getattr(fed.data, part), getattr(named.data, part)) for part in ("x", "y", "test_x"))
    for less in (digits, config.load()):
        assert config.names(less)
        assert not config.names(replace(less))
    fewer = replace(config, samples=50)  # of data that were prepared by other settings
    assert not fewer.names(config.load())
    with pytest.raises(FLError, match="--samples 3,000"):
        fl.build(replace(config, samples=3000), digits)


def test_floats_that_are_normalised_are_the_integers(digits, tmp_path):
    floats = {name: digits.normalise(getattr(digits, name)).numpy() for name in ("x", "test_x")}
    fl.simulate(fl.Config(**SMALL), tmp_path / "floats", dataset=arrays(digits, **floats))
    fl.simulate(fl.Config(**SMALL), tmp_path / "integers", dataset=arrays(digits))
    assert files(tmp_path / "floats") == files(tmp_path / "integers")


def test_a_module_is_the_federation_made_by_hand(digits, tmp_path):
    """Its weights are the start, it is not changed, and all that is drawn besides is as with a model by name."""
    net = perceptron()
    before = {name: tensor.clone() for name, tensor in state(net).items()}
    config = fl.Config(algorithm="fedavg", **FEW)
    fl.simulate(config, tmp_path / "run", model=net)
    base, _ = fl.build(config)
    fed = fl.Federation(net, base.data, base.clients, 2, base.local)
    server = fedavg(fed).init()
    for number in (1, 2):
        rng = fl.Rng(0, number)
        server, _ = fedavg(fed).round(server, fed.sample(rng), rng)
    assert all(torch.equal(t, state(net)[name]) for name, t in before.items())
    trained = state(fl.load_model(tmp_path / "run", model=perceptron()))
    assert all(torch.equal(tensor, trained[name]) for name, tensor in server["global"].items())


def test_a_function_that_builds_a_zoo_model_is_that_model(digits, tmp_path):
    """It draws from torch's generator, which is seeded by the run."""
    one, again = (fl.build(fl.Config(seeds=(seed,), **FEW), model=Net)[0].initial() for seed in (0, 0))
    other = fl.build(fl.Config(seeds=(1,), **FEW), model=Net)[0].initial()
    assert torch.equal(one["conv.weight"], again["conv.weight"])
    assert not torch.equal(one["conv.weight"], other["conv.weight"])
    config = fl.Config(**SMALL)
    named = fl.build(config)[0].initial()
    net = zoo.create("cnn", num_classes=10, in_channels=1, image_size=8, width=0.1)
    net.load_state_dict(named)
    fl.simulate(config, tmp_path / "named")
    fl.simulate(replace(config, width=1.0), tmp_path / "given", model=net)
    one, other = (checkpoint.read_parts(tmp_path / name, model=m)[1] for name, m in (("named", None), ("given", net)))
    assert all(torch.equal(t, other["global"][name]) for name, t in one["global"].items())


def test_the_global_generator_is_left_alone():
    torch.manual_seed(5)
    fl.build(fl.Config(**FEW), model=Net)
    drawn = torch.rand(1)
    torch.manual_seed(5)
    assert torch.equal(drawn, torch.rand(1))


@pytest.mark.parametrize("name", ["fedmr", pytest.param("ditto", marks=pytest.mark.slow)])
def test_a_resumed_run_ends_like_an_uninterrupted_one(name, digits, tmp_path):
    """Also with another start in the module, since the checkpoint has all weights."""
    given, net = {"dataset": arrays(digits)}, perceptron()
    config = fl.Config(algorithm=name, **{**FEW, "rounds": 3})
    fl.simulate(config, tmp_path / "whole", model=net, **given)
    fl.simulate(replace(config, rounds=2), tmp_path / "parts", model=net, **given)
    fl.simulate(config, tmp_path / "parts", resume=True, model=perceptron(), **given)
    (rows, tensors), (other, same) = map(files, (tmp_path / "whole", tmp_path / "parts"))
    assert tensors == same
    assert rows[-1] == other[-1]


REFUSED = {
    "no data": ({}, "data of your own, with x uint8"),
    "other labels": ({"y": lambda y: (y + 1) % 10}, "other data: of the same shapes, and with other values"),
    "other type": ({"x": lambda x: x / 8 - 1, "test_x": lambda x: x / 8 - 1}, "x was uint8 .*, and is float32"),
    "other size": ({"test_x": lambda x: x[:9], "test_y": lambda y: y[:9]}, r"test_x was uint8 \[360, 1, 8, 8\]"),
}


def test_a_folder_refuses_other_data_and_another_model(digits, tmp_path):
    config, data = fl.Config(**FEW), arrays(digits)
    fl.simulate(config, tmp_path / "run", dataset=data, model=Net)
    before = {path: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    more = replace(config, rounds=3)

    def refused(said, **given):
        with pytest.raises(FLError, match=said) as error:
            fl.simulate(more, tmp_path / "run", resume=True, **given)
        assert "\n" not in str(error.value)
        assert {path: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before

    for changed, said in REFUSED.values():
        other = {"dataset": arrays(digits, **{k: f(getattr(digits, k).numpy()) for k, f in changed.items()})}
        refused(said, **(other if changed else {}), model=Net)
    refused("run of the model Net, and this is Sequential", dataset=data, model=perceptron)
    refused("another Net: its modules or their settings", dataset=data, model=lambda: Net(stride=2))
    refused("holds a run of the model Net, given", dataset=data)
    with pytest.raises(FLError, match="data that were given from Python: give them again"):
        fl.simulate(fl.Config.read(tmp_path / "run"), tmp_path / "run", resume=True, model=Net)


def test_a_model_is_loaded_with_its_own_class_only(digits, tmp_path):
    fl.simulate(fl.Config(**FEW), tmp_path / "run", model=Net)
    for given, said in (
        ({}, r"a model of your own, Net: give it from Python, as model="),
        ({"model": perceptron()}, "the model Net, and this is Sequential"),
        ({"model": Net(stride=2)}, "another Net"),
        ({"model": 3}, "model= is an int"),
    ):
        with pytest.raises(FLError, match=said):
            fl.load_model(tmp_path / "run", **given)
    net = Net()
    loaded = fl.load_model(tmp_path / "run", model=net)
    assert not torch.equal(loaded.last.weight, net.last.weight)


def test_a_model_by_name_takes_no_other(digits, tmp_path):
    fl.simulate(fl.Config(**SMALL), tmp_path / "run")
    with pytest.raises(FLError, match="the model cnn, which is found by its name"):
        fl.load_model(tmp_path / "run", model=Net)


TABLE = np.random.default_rng(0).normal(size=(120, 7)).astype(np.float32)


def table(classes=3):
    y = np.arange(120) % classes
    x = TABLE + 3 * np.eye(7, dtype=np.float32)[y]
    return fl.Dataset.from_arrays(x, y, x[:60], y[:60], owners=y)


def test_a_table_and_a_perceptron(tmp_path):
    config = fl.Config(**{**FEW, "samples": 0, "rounds": 4, "batch_size": 10, "lr": 0.1})
    net = lambda: nn.Sequential(nn.Linear(7, 16), nn.ReLU(), nn.Linear(16, 3))  # noqa: E731
    summary = fl.simulate(config, tmp_path / "run", dataset=table(), model=net)
    assert summary["final"]["accuracy"] > 0.9
    assert summary["final"]["macs"] > 0


def test_a_model_by_name_takes_images_only():
    with pytest.raises(FLError, match=r"--model cnn takes images, and samples are \[7\]"):
        fl.build(fl.Config(**{**FEW, "samples": 0}), table())


def test_images_that_are_not_square():
    x, y = np.zeros((80, 1, 8, 12), np.uint8), np.arange(80) % 2
    data = fl.Dataset.from_arrays(x, y, x, y)
    config = fl.Config(**{**FEW, "samples": 0, "width": 0.25})
    with pytest.raises(FLError, match="--model cnn cannot take images of 1x8x12"):
        fl.build(config, data)
    fed, algorithm = fl.build(replace(config, model="resnet9"), data)
    assert algorithm.predict(algorithm.init(), fed.data.test_x, None).shape == (80, 2)


def test_tokens_with_a_label_each_and_with_one_for_all():
    x = np.arange(240).reshape(40, 6) % 11
    config = fl.Config(**{**FEW, "samples": 0, "local_epochs": 1})
    text = fl.Dataset.from_arrays(x[:, :-1], x[:, 1:], x[:, :-1], x[:, 1:])
    fed, algorithm = fl.build(replace(config, model="transformer", width=0.1), text)
    assert algorithm.predict(algorithm.init(), fed.data.test_x, None).shape == (40, 5, 11)
    with pytest.raises(FLError, match="made for text"):
        fl.build(replace(config, model="transformer"), table())
    with pytest.raises(FLError, match="made for images, and the data set is text"):
        fl.build(config, text)
    bag = nn.Sequential(nn.EmbeddingBag(11, 4), nn.Linear(4, 2))
    whole = fl.Dataset.from_arrays(x, x[:, 0] % 2, x, x[:, 0] % 2)
    fed, algorithm = fl.build(replace(config, algorithm=("fedavg",)), whole, bag)
    server, _ = algorithm.round(algorithm.init(), [0, 1], fl.Rng(0, 1))
    assert not torch.equal(server["global"]["1.weight"], bag[1].weight)


class Tuple(Net):
    def forward(self, x):
        return (super().forward(x),)


class Loud(Net):
    def forward(self, x):
        raise KeyError("a")


def broken():
    raise OSError("no such file")


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (3, "model= is an int: give an nn.Module, or a function"),
        (broken, r"model=broken, called without arguments, fails: OSError: no such file \(test_given.py, line \d+\)"),
        (lambda size: Net(size), "called without arguments, fails: TypeError: .*missing 1 required"),
        (dict, "model=dict returns a dict"),
        (nn.Flatten(), "a Flatten, has no parameters to train"),
        (nn.Sequential(nn.Flatten(), nn.LazyLinear(10)), "has lazy modules"),
        (nn.Linear(64, 10), r"model=Linear does not take samples of 1x8x8 numbers"),
        (Net(classes=9), r"gives \[2, 9\] for two samples in training, and the data have 10 classes"),
        (Tuple(), "gives a tuple for two samples"),
        (Loud, "model=Loud does not take samples .*'a'"),
    ],
)
def test_what_is_no_model_is_refused_in_one_line(model, said):
    with pytest.raises(FLError, match=said) as error:
        fl.build(fl.Config(**FEW), model=model)
    assert "\n" not in str(error.value)


def test_settings_that_a_model_of_ones_own_does_not_have():
    for settings, said in (
        ({"norm": "group"}, "--norm group is for models of the zoo"),
        ({"dropout": 0.1}, "--dropout 0.1 is for models of the zoo"),
        ({"width": 2.0}, "can only be made narrower"),
        ({"depth": 2}, "has no sections of blocks"),
        ({"model": "given"}, "whose model was given from Python: give it again"),
    ):
        given = {} if "model" in settings else {"model": Net}
        with pytest.raises(FLError, match=said):
            fl.build(fl.Config(**FEW, **settings), **given)


def test_a_narrow_module_keeps_its_first_channels(tmp_path):
    net = Net()
    fed, _ = fl.build(fl.Config(width=0.5, **FEW), model=net)
    assert torch.equal(fed.initial()["conv.weight"], net.conv.weight[:3])
    fl.simulate(fl.Config(width=0.5, **FEW), tmp_path / "run", model=net)
    assert fl.load_model(tmp_path / "run", model=net).conv.out_channels == 3


@pytest.mark.parametrize("name", [pytest.param("heterofl", marks=pytest.mark.slow), "fedfa"])
def test_clients_have_parts_of_it(name, tmp_path):
    mix = fl.ArchitectureOptions(widths=(0.5, 1.0), choose="cycle")
    fl.simulate(fl.Config(algorithm=name, architectures=mix, **FEW), tmp_path / "run", model=Net)
    assert [row[:4] for row in (tmp_path / "run/architectures.csv").read_text().splitlines()[1:]] == ["0.5,", "1,fu"]


def test_zico_looks_at_the_data_that_are_given(digits, monkeypatch):
    """Its choices are kept for the next method, and not for the next data."""
    mix = fl.ArchitectureOptions(widths=(0.25, 0.5, 1.0), weak=0.0)
    config = fl.Config(algorithm="heterofl", architectures=mix, **SMALL)
    monkeypatch.setattr(architectures, "_CHOSEN", {})
    for x, choices in ((digits.x.numpy(), 1), (digits.x.numpy(), 1), (digits.x.numpy()[::-1], 2)):
        fl.build(config, arrays(digits, x=x))
        assert len(architectures._CHOSEN) == choices


def test_methods_that_start_several_models_need_a_function(tmp_path):
    femam = replace(fl.Config().femam, level_rounds=(1,), levels=("global", "personal"))
    config = fl.Config(algorithm="femam", **FEW, local_valid=0.2, femam=femam)
    with pytest.raises(FLError, match=r"one module has only one start: give a function .* or --femam\.start global"):
        fl.simulate(config, tmp_path / "module", model=Net())
    assert fl.simulate(config, tmp_path / "function", model=Net)["final"]["level"] == 2
    with pytest.raises(FLError, match=r"a model of your own, Net: give it"):
        fl.Pathways.load(tmp_path / "function")
    pathways = fl.Pathways.load(tmp_path / "function", model=Net)
    pathways.save(tmp_path / "pathways.safetensors")
    with pytest.raises(FLError, match=r"a model of your own, Net: give it from Python"):
        fl.Pathways.load(tmp_path / "pathways.safetensors")
    again, x = fl.Pathways.load(tmp_path / "pathways.safetensors", Net), pathways.spec.example(2)
    assert torch.equal(again.predict(0, x), pathways.predict(0, x))
    same = replace(config, femam=replace(femam, start="global"))
    assert fl.simulate(same, tmp_path / "module", model=Net())["final"]["level"] == 2


@pytest.mark.slow
def test_a_fresh_process_loads_and_resumes(digits, tmp_path):
    (tmp_path / "mine.py").write_text(
        "import numpy as np, fl\nfrom torch import nn\n"
        "def load():\n    x = np.arange(60 * 4, dtype='f4').reshape(60, 4) % 7\n    y = np.arange(60) % 2\n"
        "    return fl.Dataset.from_arrays(x, y, x, y)\n"
        "class MyNet(nn.Sequential):\n    def __init__(self):\n        super().__init__(nn.Linear(4, 2))\n"
    )
    first = "import fl, mine; fl.simulate(fl.Config(clients=2, participants=1, rounds=1), 'run', dataset=mine.load(), "
    first += "model=mine.MyNet())"
    again = "import fl, mine; fl.simulate(fl.Config(clients=2, participants=1, rounds=2), 'run', resume=True, "
    again += "dataset=mine.load(), model=mine.MyNet()); print(fl.load_model('run', model=mine.MyNet))"
    for code in (first, again):
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        assert not done.returncode, done.stderr
    assert "Linear(in_features=4" in done.stdout


class Tied(nn.Module):
    """A model of text whose last layer is its embedding."""

    def __init__(self):
        super().__init__()
        self.embed, self.last = nn.Embedding(50, 4), nn.Linear(4, 50, bias=False)
        self.last.weight = self.embed.weight

    def forward(self, x):
        return self.last(self.embed(x))


def test_a_model_with_tied_weights_is_loaded_again(tmp_path):
    x = torch.randint(50, (40, 6), generator=torch.Generator().manual_seed(0))
    data, settings = fl.Dataset.from_arrays(x, x, x, x, classes=50), {**FEW, "samples": 0}
    fl.simulate(fl.Config(algorithm=("fedavg",), **settings), tmp_path / "run", dataset=data, model=Tied)
    net = fl.load_model(tmp_path / "run", Tied)
    assert net.last.weight is net.embed.weight
    assert torch.equal(
        net.embed.weight, checkpoint.read_parts(tmp_path / "run", model=Tied)[1]["global"]["embed.weight"]
    )


def test_data_of_another_kind_are_refused(tmp_path):
    pairs = torch.utils.data.TensorDataset(torch.zeros(4, 3), torch.zeros(4).long())
    with pytest.raises(FLError, match="dataset is a TensorDataset: give what"):
        fl.simulate(fl.Config(), tmp_path / "run", dataset=pairs)


def test_what_cannot_be_called_is_refused_before_anything_is_made(tmp_path, digits):
    with pytest.raises(FLError, match="give a function of a row"):
        fl.simulate(fl.Config(), tmp_path / "run", on_round=3)
    assert not (tmp_path / "run").exists()

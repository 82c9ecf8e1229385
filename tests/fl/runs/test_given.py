"""Runs on data and with models of one's own."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from refusals import fl_refused
from rounds import results
from torch import nn

import fl
from fl.algorithms.fedavg import METHOD as fedavg
from fl.algorithms.femam import FeMAMOptions
from fl.base.errors import FLError
from fl.data import load
from fl.runs import checkpoint
from surgery import state

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


def test_given__digits_as_arrays_are_the_digits_by_name(digits, tmp_path):
    config = fl.Config.of(**SMALL)
    fl.simulate(config, tmp_path / "named")
    fl.simulate(config, tmp_path / "given", dataset=arrays(digits))
    assert results(tmp_path / "given") == results(tmp_path / "named")
    assert fl.Config.read(tmp_path / "given").data.dataset == "given"
    kept = [checkpoint.read_header(tmp_path / name)["given"]["data"] for name in ("named", "given")]
    assert [one is None for one in kept] == [True, False]


def test_given__data_that_were_changed_since_they_were_loaded_are_given(digits, tmp_path):
    config, other = fl.Config.of(**SMALL), replace(digits, x=digits.x * 0)
    assert other.name == config.data.dataset
    fl.simulate(config, tmp_path / "run", dataset=other)
    assert fl.Config.read(tmp_path / "run").data.dataset == "given"
    for same in (None, digits, config.load()):
        with fl_refused("folder", "uint8"):
            fl.simulate(config.replace(rounds=3), tmp_path / "run", resume=True, dataset=same)
    assert fl.simulate(config.replace(rounds=3), tmp_path / "run", resume=True, dataset=other)["rounds"] == 3


MANY = {"pad": 1, "pool_test_set": True, "samples": 100, "local_test": 0.2}


def test_given__loaded_data_are_prepared_once_as_the_settings_say(digits):
    config = fl.Config.of(**{**SMALL, **MANY})
    named, _ = fl.build(config)
    assert len(named.data.x) == 100
    assert named.data.x.shape[-1] == 10
    for same in (digits, config.load(), config.load().to("cpu"), config.data.prepare(config.load()), arrays(digits)):
        fed, _ = fl.build(config, same)
        assert all(torch.equal(getattr(fed.data, part), getattr(named.data, part)) for part in ("x", "y", "test_x"))
    for less in (digits, config.load()):
        assert config.data.names(less)
        assert not config.data.names(replace(less))
    fewer = config.replace(samples=50)  # of data that were prepared by other settings
    assert not fewer.data.names(config.load())
    with fl_refused("argument", "--samples", "3,000"):
        fl.build(config.replace(samples=3000), digits)


def test_given__a_module_is_the_federation_made_by_hand(digits, tmp_path):
    """Its weights are the start, it is not changed, and all that is drawn besides is as with a model by name."""
    net = perceptron()
    before = {name: tensor.clone() for name, tensor in state(net).items()}
    config = fl.Config.of(algorithm="fedavg", **FEW)
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


def test_given__a_resumed_run_ends_like_an_uninterrupted_one(digits, tmp_path):
    """Also with another start in the module, since the checkpoint has all weights."""
    data, net, config = arrays(digits), perceptron(), fl.Config.of(**{**FEW, "rounds": 3, "eval_every": 1})
    fl.simulate(config, tmp_path / "whole", model=net, dataset=data)
    fl.simulate(config.replace(rounds=2), tmp_path / "parts", model=net, dataset=data)
    fl.simulate(config, tmp_path / "parts", resume=True, model=perceptron(), dataset=data)
    assert results(tmp_path / "whole") == results(tmp_path / "parts")


TABLE = np.random.default_rng(0).normal(size=(120, 7)).astype(np.float32)


def table(classes=3):
    y = np.arange(120) % classes
    x = TABLE + 3 * np.eye(7, dtype=np.float32)[y]
    return fl.Dataset.from_arrays(x, y, x[:60], y[:60], owners=y)


def test_given__a_narrow_module_keeps_its_first_channels_and_clients_have_parts_of_it(tmp_path):
    net = Net()
    fed, _ = fl.build(fl.Config.of(width=0.5, **FEW), model=net)
    assert torch.equal(fed.initial()["conv.weight"], net.conv.weight[:3])
    fl.simulate(fl.Config.of(width=0.5, **FEW), tmp_path / "run", model=net)
    assert fl.load_model(tmp_path / "run", model=net).conv.out_channels == 3
    mix = fl.ArchitectureOptions(widths=(0.5, 1.0), choose="cycle")
    fl.simulate(fl.Config.of(algorithm="fedfa", architectures=mix, **FEW), tmp_path / "mixed", model=Net)
    assert [row[:4] for row in (tmp_path / "mixed/architectures.csv").read_text().splitlines()[1:]] == ["0.5,", "1,fu"]


@pytest.mark.slow
def test_given__methods_that_start_several_models_need_a_function(tmp_path):
    femam = FeMAMOptions(level_rounds=(1,), levels=("global", "personal"))
    config = fl.Config.of(algorithm="femam", **FEW, local_valid=0.2, femam=femam)
    with fl_refused("argument", "--femam.start"):
        fl.simulate(config, tmp_path / "module", model=Net())
    assert fl.simulate(config, tmp_path / "function", model=Net)["final"]["level"] == 2
    with fl_refused("argument", "Net"):
        fl.Pathways.load(tmp_path / "function")
    pathways = fl.Pathways.load(tmp_path / "function", model=Net)
    pathways.save(tmp_path / "pathways.safetensors")
    with fl_refused("argument", "model="):
        fl.Pathways.load(tmp_path / "pathways.safetensors")
    again, x = fl.Pathways.load(tmp_path / "pathways.safetensors", Net), pathways.spec.example(2)
    assert torch.equal(again.predict(0, x), pathways.predict(0, x))
    same = config.replace(femam=replace(femam, start="global"))
    assert fl.simulate(same, tmp_path / "module", model=Net())["final"]["level"] == 2


class Tied(nn.Module):
    """A model of text whose last layer is its embedding."""

    def __init__(self):
        super().__init__()
        self.embed, self.last = nn.Embedding(50, 4), nn.Linear(4, 50, bias=False)
        self.last.weight = self.embed.weight

    def forward(self, x):
        return self.last(self.embed(x))


def test_given__a_model_with_tied_weights_is_loaded_again(tmp_path):
    x = torch.randint(50, (40, 6), generator=torch.Generator().manual_seed(0))
    data, settings = fl.Dataset.from_arrays(x, x, x, x, classes=50), {**FEW, "samples": 0}
    fl.simulate(fl.Config.of(algorithm="fedavg", **settings), tmp_path / "run", dataset=data, model=Tied)
    net = fl.load_model(tmp_path / "run", Tied)
    assert net.last.weight is net.embed.weight
    _, server = checkpoint.read_parts(tmp_path / "run", model=Tied)
    assert torch.equal(net.embed.weight, server["global"]["embed.weight"])


class WithLogits(Net):
    """Logits as a part of an output object, as those of transformers."""

    def forward(self, x):
        return SimpleNamespace(logits=super().forward(x))


def test_given__trained_models_give_what_their_class_gives_and_carry_nothing_of_fl(digits, tmp_path):
    net, images = WithLogits(), digits.test_x[:4].float()
    run = fl.Run(fl.Config.of(**FEW), tmp_path / "run", dataset=arrays(digits), model=net)
    shown = [turn.model for turn in run]
    for model in (*shown, fl.load_model(tmp_path / "run", model=net)):
        assert model(images).logits.shape == (4, 10)
        assert not model._forward_hooks
    assert not net._forward_hooks


def test_given__a_function_draws_its_weights_from_the_run_s_seed_alone():
    torch.manual_seed(5)
    one, again, other = (fl.build(fl.Config.of(seed=seed, **FEW), model=Net)[0].initial() for seed in (0, 0, 1))
    drawn = torch.rand(1)
    torch.manual_seed(5)
    assert torch.equal(drawn, torch.rand(1))
    assert torch.equal(one["conv.weight"], again["conv.weight"])
    assert not torch.equal(one["conv.weight"], other["conv.weight"])


@pytest.mark.slow
def test_given__a_folder_refuses_other_data_and_another_model(digits, tmp_path):
    config, data = fl.Config.of(**FEW), arrays(digits)
    folder = tmp_path / "run"
    fl.simulate(config, folder, dataset=data, model=Net)
    fl.simulate(fl.Config.of(**SMALL), tmp_path / "named")
    before = {path: path.read_bytes() for path in folder.iterdir()}
    x, y = digits.x.numpy(), digits.y.numpy()
    test_x, test_y = digits.test_x.numpy(), digits.test_y.numpy()

    def resume(**given):
        return lambda: fl.simulate(config.replace(rounds=3), folder, resume=True, **given)

    for call, said in (
        (resume(model=Net), "data of your own, with x uint8"),
        (resume(model=Net, dataset=arrays(digits, y=(y + 1) % 10)), "of the same shapes, and with other values"),
        (resume(model=Net, dataset=arrays(digits, x=x / 8 - 1, test_x=test_x / 8 - 1)), "x was uint8 .*, and is float"),
        (resume(model=Net, dataset=arrays(digits, test_x=test_x[:9], test_y=test_y[:9])), "test_x.*360"),
        (resume(dataset=data, model=perceptron), "run of the model Net, and this is Sequential"),
        (resume(dataset=data, model=lambda: Net(stride=2)), "another Net: its modules or their settings"),
        (resume(dataset=data), "holds a run of the model Net, given"),
        (lambda: fl.simulate(fl.Config.read(folder), folder, True, model=Net), "data that were given from Python"),
        (lambda: fl.load_model(folder), r"a model of your own, Net: give it from Python, as model="),
        (lambda: fl.load_model(folder, perceptron()), "the model Net, and this is Sequential"),
        (lambda: fl.load_model(folder, Net(stride=2)), "another Net"),
        (lambda: fl.load_model(folder, 3), "model= is an int"),
        (lambda: fl.load_model(tmp_path / "named", Net), "the model cnn, which is found by its name"),
    ):
        with pytest.raises(FLError, match=said) as error:
            call()
        assert "\n" not in str(error.value)
        assert {path: path.read_bytes() for path in folder.iterdir()} == before
    net = Net()
    assert not torch.equal(fl.load_model(folder, model=net).last.weight, net.last.weight)


class Exits(nn.Module):
    """Gives all exits in evaluation mode, too."""

    exits = True

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 30), nn.Unflatten(1, (3, 10)))

    def forward(self, x):
        return self.net(x)


class Tuple(Net):
    def forward(self, x):
        return (super().forward(x),)


class Otherwise(Net):
    """Does something else with its logits in evaluation mode."""

    def __init__(self, made):
        super().__init__()
        self.made = made

    def forward(self, x):
        return super().forward(x) if self.training else self.made(super().forward(x))


def broken():
    raise OSError("no such file")


WIDE = fl.Dataset.from_arrays(*[np.zeros((80, 1, 8, 12), np.uint8), np.arange(80) % 2] * 2)
TEXT = np.arange(240).reshape(40, 6) % 11
NEXT = fl.Dataset.from_arrays(*[TEXT[:, :-1], TEXT[:, 1:]] * 2)


@pytest.mark.parametrize(
    ("given", "settings", "said"),
    [
        ({"model": 3}, {}, "model= is an int: give an nn.Module, or a function"),
        ({"model": broken}, {}, "OSError"),
        ({"model": lambda size, classes: Net(size, classes)}, {}, "TypeError"),
        ({"model": dict}, {}, "model=dict returns a dict"),
        ({"model": nn.Flatten()}, {}, "a Flatten, has no parameters to train"),
        ({"model": nn.Sequential(nn.Flatten(), nn.LazyLinear(10))}, {}, "has lazy modules"),
        ({"model": nn.Linear(64, 10)}, {}, r"model=Linear does not take samples of 1x8x8 numbers"),
        ({"model": Net(classes=9)}, {}, r"\[2, 9\].*10"),
        ({"model": Tuple()}, {}, "gives a tuple for two samples"),
        ({"model": Otherwise(nn.Softmax(1))}, {}, "gives probabilities in evaluation mode .they sum to 1"),
        ({"model": Otherwise(nn.Sigmoid())}, {}, "ends in a Sigmoid in evaluation mode"),
        ({"model": Otherwise(lambda y: (y, 1))}, {}, "gives a tuple for two samples in evaluation mode"),
        ({"model": Otherwise(lambda y: y.argmax(1))}, {}, r"\[2\]"),
        (
            {"model": Otherwise(lambda y: y[:, 99])},
            {},
            "does not take samples of 1x8x8 numbers in evaluation mode: index",
        ),
        ({"model": Exits()}, {}, r"\[2, 3, 10\].*\[2, 10\]"),
        ({"model": Net}, {"norm": "group"}, "--norm"),
        ({"model": Net}, {"width": 2.0}, "can only be made narrower"),
        ({"model": Net}, {"depth": 2}, "has no sections of blocks"),
        ({}, {"model": "given"}, "whose model was given from Python: give it again"),
        ({"dataset": table()}, {}, r"--model.*\[7\]"),
        ({"dataset": table()}, {"model": "transformer"}, "made for text"),
        ({"dataset": NEXT}, {}, "made for images, and the data set is text"),
        ({"dataset": WIDE}, {}, "--model"),
        ({"dataset": torch.utils.data.TensorDataset(torch.zeros(4, 3))}, {}, "TensorDataset"),
    ],
)
def test_given__what_does_not_fit_is_refused_in_one_line(given, settings, said):
    with pytest.raises(FLError, match=said) as error:
        fl.build(fl.Config.of(**{**FEW, "samples": 0, **settings}), **given)
    assert "\n" not in str(error.value)


def test_given__images_that_are_not_square_and_tokens_with_a_label_each_and_with_one_for_all(tmp_path):
    config = fl.Config.of(algorithm="fedavg", **{**FEW, "samples": 0, "width": 0.1})
    for data, model, shape in ((WIDE, "resnet9", (80, 2)), (NEXT, "transformer", (40, 5, 11))):
        fed, algorithm = fl.build(config.replace(model=model), data)
        assert algorithm.predict(algorithm.init(), fed.data.test_x, None).shape == shape
    bag = nn.Sequential(nn.EmbeddingBag(11, 4), nn.Linear(4, 2))
    fed, algorithm = fl.build(config.replace(width=1.0), fl.Dataset.from_arrays(*[TEXT, TEXT[:, 0] % 2] * 2), bag)
    server, _ = algorithm.round(algorithm.init(), [0, 1], fl.Rng(0, 1))
    assert not torch.equal(server["global"]["1.weight"], bag[1].weight)
    with fl_refused("argument", "on_round="):
        fl.simulate(config, tmp_path / "run", on_round=3)
    assert not (tmp_path / "run").exists()


class Noisy(nn.Linear):
    """A model that drops numbers in evaluation mode, too."""

    def __init__(self):
        super().__init__(64, 10)

    def forward(self, x):
        return super().forward(nn.functional.dropout(x.flatten(1), training=True))


@pytest.mark.parametrize("algorithm", ["fedmr", "femam"])
def test_given__a_model_that_draws_numbers_in_evaluation_is_measured_the_same_each_time(tmp_path, digits, algorithm):
    """Its metrics were others in each run of the same settings, and models side by side failed."""
    config = fl.Config.of(**FEW | {"algorithm": algorithm, "local_test": 0.2, "eval_every": 1, "clients": 6})
    torch.manual_seed(0)
    fl.simulate(config, tmp_path / "one", dataset=digits, model=Noisy)
    torch.manual_seed(1)
    fl.simulate(config, tmp_path / "two", dataset=digits, model=Noisy)
    assert results(tmp_path / "one") == results(tmp_path / "two")


def test_given__complex_parameters_are_refused(tmp_path, digits):
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 10, dtype=torch.complex64))
    with fl_refused("unsupported", "view_as_real"):
        fl.simulate(fl.Config.of(**FEW), tmp_path / "run", dataset=digits, model=net)

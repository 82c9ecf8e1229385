"""Runs that begin from trained weights: what is taken of them, and what is refused."""

import json
from pathlib import Path

import pytest
import timm
import torch
import torchvision
from refusals import fl_refused
from safetensors.torch import load_file, save_file
from torch import nn

import fl
from fl import models
from fl import run as cli
from fl.base.errors import FLError
from fl.base.rng import Rng
from fl.data import load
from fl.models import custom_model
from fl.models.init import Start, find, maker
from fl.runs.checkpoint import read_model
from fl.runs.folder import INITIAL, load_initial_weights, save_initial_weights

DIGITS = {"num_classes": 10, "in_channels": 1, "image_size": 8}


def begun(init, name, **changes):
    """(model, start) of a model that begins from a file."""
    spec = models.make_spec(name, **{**DIGITS, **changes})
    start = find(str(init), spec)
    return maker(spec, start)(torch.Generator().manual_seed(1)), start


def drawn(name, **changes):
    return models.create(torch.Generator().manual_seed(1), models.make_spec(name, **{**DIGITS, **changes}))


@pytest.fixture
def cnn(tmp_path):
    """The path of a trained model of 10 classes for digits, and its state."""
    state = models.create(torch.Generator().manual_seed(7), models.make_spec("cnn", **DIGITS)).state_dict()
    save_file(state, tmp_path / "cnn.safetensors")
    return tmp_path / "cnn.safetensors", state


@pytest.fixture(scope="module")
def resnet(tmp_path_factory):
    """torchvision's ResNet-18 as a file of each kind."""
    torch.manual_seed(0)
    net = torchvision.models.resnet18()
    for module in net.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.running_mean.uniform_(-1, 1)
    folder = tmp_path_factory.mktemp("weights")
    torch.save({"state_dict": {f"module.{k}": v for k, v in net.state_dict().items()}}, folder / "resnet.pth")
    save_file(net.state_dict(), folder / "resnet.safetensors")
    return folder, net.eval()


LONG = pytest.mark.slow
FAST = ["resnet18", pytest.param("torchvision:resnet18", marks=LONG), pytest.param("timm:resnet18", marks=LONG)]


@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize("suffix", [pytest.param("pth", marks=LONG), "safetensors"])
def test_init__a_library_s_weights_give_its_logits(resnet, name, suffix):
    folder, theirs = resnet
    model, start = begun(folder / f"resnet.{suffix}", name, num_classes=1000, in_channels=3, image_size=32)
    x = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(model.eval()(x), theirs(x), rtol=1e-4, atol=1e-4)
    assert start.left == start.summed == ()


@pytest.mark.parametrize("name", FAST[:2])
def test_init__another_classifier_stays_as_drawn_and_colours_are_summed(resnet, name):
    folder, theirs = resnet
    model, start = begun(folder / "resnet.pth", name)
    head = next(n for n in start.left if n.endswith("weight"))
    assert torch.equal(model.state_dict()[head], drawn(name).state_dict()[head])
    assert torch.equal(next(iter(model.state_dict().values())), theirs.conv1.weight.sum(1, keepdim=True))
    assert "stays random; " in start.describe()
    assert "summed over its 3 input channels" in start.describe()


@pytest.mark.slow
@pytest.mark.parametrize("depth", [(2, 2, 2, 2), (2, 1, 0, 0)])
def test_init__exits_stay_as_drawn_where_there_is_one_classifier(resnet, tmp_path, depth):
    """The rest is as in the model with one classifier; weights of a model with exits fit as they are."""
    changes = {"in_channels": 3, "image_size": 32, "width": 0.5, "depth": depth, "exits": True}
    net, start = begun(resnet[0] / "resnet.safetensors", "resnet18", **changes)
    one = {**changes, "exits": False, "depth": tuple(max(1, count) for count in depth)}
    body = begun(resnet[0] / "resnet.safetensors", "resnet18", **one)[0].state_dict()
    body |= {name: tensor for name, tensor in drawn("resnet18", **changes).state_dict().items() if "exit" in name}
    state = net.state_dict()
    assert set(start.left) == {name for name in state if name.startswith("exit")}
    assert all(torch.equal(tensor, body[name]) for name, tensor in state.items())
    save_file(state, tmp_path / "exits.safetensors")
    again, start = begun(tmp_path / "exits.safetensors", "resnet18", **changes)
    assert start.left == ()
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in state.items())


def test_init__other_weights_do_not_fit_exits(resnet, tmp_path):
    with fl_refused("mismatch", "--model"):
        begun(resnet[0] / "resnet.safetensors", "resnet50", exits=True)
    save_file({**drawn("resnet18").state_dict(), "more": torch.ones(1)}, tmp_path / "more.safetensors")
    with fl_refused("mismatch", "--init"):
        begun(tmp_path / "more.safetensors", "resnet18", exits=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet18", "torchvision:resnet18"])
def test_init__a_narrow_and_shallow_model_gets_its_part(resnet, name):
    folder, theirs = resnet
    changes = {"in_channels": 3, "width": 0.5, "depth": (1, 2, 2, 1), "image_size": 32}
    model, _ = begun(folder / "resnet.safetensors", name, **changes)
    first, last = (t for n, t in model.state_dict().items() if n in ("stem.conv.weight", "section4.0.conv2.weight")
                   or n in ("conv1.weight", "layer4.0.conv2.weight"))  # fmt: skip
    assert torch.equal(first, theirs.conv1.weight[:32])
    assert torch.equal(last, theirs.layer4[0].conv2.weight[:256, :256])


def test_init__the_model_s_own_weights_fit_at_its_width_and_at_full_width(cnn, tmp_path):
    path, state = cnn
    assert all(torch.equal(t, state[n]) for n, t in begun(path, "cnn")[0].state_dict().items())
    narrow = begun(path, "cnn", width=0.5)[0].state_dict()
    assert torch.equal(narrow["conv2.weight"], state["conv2.weight"][:32, :16])
    assert torch.equal(narrow["fc2.weight"], state["fc2.weight"][:, :256])
    save_file(narrow, tmp_path / "narrow.safetensors")
    again = begun(tmp_path / "narrow.safetensors", "cnn", width=0.5)[0].state_dict()
    assert all(torch.equal(again[name], narrow[name]) for name in narrow)
    save_file({n: t for n, t in state.items() if not n.startswith("fc2")}, tmp_path / "body.safetensors")
    assert begun(tmp_path / "body.safetensors", "cnn")[1].left == ("fc2.weight", "fc2.bias")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("conv2.bias"), "it lacks conv2.bias"),
        (lambda s: s.pop("fc2.bias"), "it lacks fc2.bias"),
        (lambda s: s.update(more=torch.ones(1)), "the model has no more"),
        (lambda s: s.update({"fc1.bias": torch.ones(3)}), r"\[3\].*\[512\]"),
        (lambda s: s.update({"fc2.bias": torch.ones(3)}), r"\[3\].*\[10\]"),
        (lambda s: s["conv1.weight"].view(-1)[0].fill_(torch.nan), "not finite: conv1.weight"),
        (lambda s: s.update({"fc1.bias": torch.ones(512, dtype=torch.int8)}), "other kinds of numbers: fc1.bias"),
    ],
)
def test_init__what_does_not_fit_is_named(cnn, tmp_path, change, message):
    change(cnn[1])
    save_file(cnn[1], tmp_path / "other.safetensors")
    with pytest.raises(FLError, match=message):
        begun(tmp_path / "other.safetensors", "cnn")


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("resnet18", {"stem": "cifar"}, r"\[64, 3, 7, 7\].*ResNet"),
        pytest.param("torchvision:resnet34", {}, "it lacks layer1.2.conv1.weight, ", marks=LONG),
    ],
)
def test_init__other_models_weights_are_refused(resnet, name, changes, message):
    with pytest.raises(FLError, match=message):
        begun(resnet[0] / "resnet.pth", name, **changes)


def test_init__files_that_hold_no_weights_are_refused(tmp_path):
    torch.save(torch.nn.Linear(2, 2), tmp_path / "module.pt")
    torch.save([1, 2], tmp_path / "list.pt")
    (tmp_path / "text.safetensors").write_text("no weights")
    save_file({"global/w": torch.ones(1)}, tmp_path / "checkpoint.safetensors")
    for name, message in {
        "module.pt": "other objects than tensors", "list.pt": "no state dict", "text.safetensors": "cannot be read",
        "checkpoint.safetensors": "fl.export RUN FILE", "gone.pt": "no such file", "x.txt": "give timm, torchvision or",
    }.items():  # fmt: skip
        with pytest.raises(FLError, match=message):
            begun(tmp_path / name, "cnn")


def test_init__without_a_network_the_error_names_the_weights_and_the_way_out(monkeypatch):
    def unreachable(*_, **__):
        raise OSError("no network")

    monkeypatch.setattr(timm, "create_model", unreachable)
    monkeypatch.setattr("socket.create_connection", unreachable)
    monkeypatch.setattr(torch.hub, "load_state_dict_from_url", unreachable)
    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", unreachable)
    for library, where in (
        ("timm", "huggingface.co/timm/resnet18"),
        ("torchvision", "download.pytorch.org/models/resnet18"),
    ):
        with pytest.raises(FLError, match=rf"^--init {library}: .*{where}.*\(no network\).*--init FILE.safetensors"):
            begun(library, "resnet18")
    with fl_refused("name", "vit_tiny", "--init", "FILE"):
        begun("timm", "cnn")
    with fl_refused("name", "resnet18"):
        begun("torchvision", "timm:resnet18")
    with fl_refused("unsupported", "--init", "FILE"):
        fl.build(fl.Config.of(init="timm", model="torch.nn:Identity"))
    with fl_refused("unsupported", "model="):
        find("torchvision", custom_model.describe("given", Net, load("digits")))


@pytest.mark.slow
def test_init__what_a_library_publishes_is_taken(resnet, monkeypatch):
    theirs = resnet[1]
    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", lambda *_, **__: theirs.state_dict())
    model, start = begun("torchvision", "resnet18", num_classes=1000, in_channels=3, image_size=32)
    assert torch.equal(model.state_dict()["stem.conv.weight"], theirs.conv1.weight)
    assert start.source == "torchvision:resnet18"
    assert start.sha256 == begun("torchvision", "resnet18")[1].sha256


TINY = fl.Config.of(clients=4, participants=2, rounds=2, local_epochs=1, width=0.1, batch_size=50, local_valid=0.1)


@pytest.mark.parametrize(("name", "widths"), [("fedmr", ()), ("nefl", (0.5, 1.0)), ("flexifed", (1.0,))])
def test_init__methods_begin_there(cnn, name, widths, tmp_path):
    """With clients' parts cut out of it, where architectures differ; what they would draw otherwise is the file's."""
    path, state = cnn
    config = TINY.replace(algorithm=name, width=1.0, init=str(path))
    if widths:
        config = config.replace(architectures=fl.ArchitectureOptions(widths=widths, choose="cycle"))
    fed, algorithm = fl.build(config)
    server = algorithm.init()
    for part, tensors in server.items():
        for key in tensors.keys() & state.keys():
            rows = tensors[key] if tensors[key].ndim > state[key].ndim else tensors[key][None]
            if rows.shape[1:] == state[key].shape and part != "gradients" and "generator" not in part:
                assert all(torch.equal(row, state[key]) for row in rows), (part, key)
    for client in range(4):
        own = fed.fleet_or_uniform[client].plan.extract(server["global"])
        assert torch.equal(own["fc2.bias"], state["fc2.bias"])
    again = fed.initial(torch.Generator().manual_seed(3))  # what FeMAM's later levels begin from
    assert all(torch.equal(again[key], state[key]) for key in state)


@pytest.mark.slow
def test_init__a_run_keeps_what_it_began_with_and_resumes_without_the_file(cnn, tmp_path):
    path, state = cnn
    whole = TINY.replace(algorithm="fedavg", init=str(path))
    fl.simulate(whole, tmp_path / "whole")
    fl.simulate(whole.replace(rounds=1), tmp_path / "stopped")
    path.unlink()
    assert cli.main(["--resume", str(tmp_path / "stopped"), "--rounds", "2"]) == 0
    ends = [load_file(tmp_path / name / "checkpoint.safetensors") for name in ("whole", "stopped")]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
    start = load_initial_weights(tmp_path / "whole", whole)
    assert (start.source, len(start.sha256)) == (str(path), 64)
    assert json.loads((tmp_path / "whole/summary.json").read_text())["init"]["sha256"] == start.sha256
    again = maker(read_model(tmp_path / "whole")[0], start)(Rng(0).torch("weights"))
    assert torch.equal(again.fc2.bias, state["fc2.bias"])
    with fl_refused("file", "--init"):
        fl.simulate(whole, tmp_path / "new")
    assert not Path(tmp_path / "new").exists()
    with fl_refused("folder", "--init", "cnn.safetensors"):
        load_initial_weights(tmp_path / "whole", whole.replace(init="timm"))
    with fl_refused("folder", "--init", "cnn.safetensors"):
        load_initial_weights(tmp_path / "whole", whole.replace(init=None))
    (tmp_path / "whole" / INITIAL).unlink()
    with fl_refused("file", "--init"):
        load_initial_weights(tmp_path / "whole", whole)


def test_init__weights_of_a_library_are_known_by_its_name(cnn, tmp_path):
    state = cnn[1]
    save_initial_weights(tmp_path, Start(dict(state), "timm:cnn", "0" * 64))
    assert load_initial_weights(tmp_path, TINY.replace(init="timm")).source == "timm:cnn"
    with fl_refused("folder", "--init"):
        load_initial_weights(tmp_path, TINY.replace(init="torchvision"))


class Net(nn.Module):
    """For digits; `further` computes with the logits."""

    def __init__(self, classes=10, hidden=12, further=False):
        super().__init__()
        self.body, self.head, self.further = nn.Linear(64, hidden), nn.Linear(hidden, classes), further

    def forward(self, x):
        logits = self.head(self.body(x.flatten(1)).relu())
        return 2 * logits if self.further else logits


def begun_own(net, model, folder, **changes):
    """(state of a user's model that begins from a file of a network, the start, the state that it would draw)."""
    save_file(net.state_dict(), folder / "net.safetensors")
    spec = custom_model.describe("given", model, load("digits"), **changes)
    start = find(str(folder / "net.safetensors"), spec)
    drawn, state = (maker(spec, one)(torch.Generator().manual_seed(1)).state_dict() for one in (None, start))
    return state, start, drawn


@pytest.mark.parametrize("width", [1.0, 0.5])
@pytest.mark.parametrize("classes", [10, 1000])
def test_init__a_user_s_model_takes_its_own_names_and_a_classifier_for_other_classes_stays_as_drawn(
    tmp_path, width, classes
):
    net, few = Net(classes=classes), int(12 * width)
    state = net.state_dict()
    found, start, drawn = begun_own(net, Net, tmp_path, width=width)
    assert start.left == (("head.weight", "head.bias") if classes > 10 else ())
    assert torch.equal(found["body.weight"], state["body.weight"][:few])
    assert torch.equal(found["head.weight"], drawn["head.weight"] if classes > 10 else state["head.weight"][:, :few])


@pytest.mark.parametrize(
    ("there", "here", "said"),
    [
        (Net(hidden=8), Net, r"--init.*\[8, 64\]"),
        (nn.Linear(64, 10), Net, "it lacks body.weight, body.bias; the model has no "),
        (Net(classes=5), lambda: Net(further=True), r"\[5, 12\].*\[10, 12\]"),
    ],
)
def test_init__weights_that_do_not_fit_a_user_s_model_are_refused(tmp_path, there, here, said):
    with pytest.raises(FLError, match=said):
        begun_own(there, here, tmp_path)

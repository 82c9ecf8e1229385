"""`zoo.create(..., weights=...)`, with states and files made here."""

import logging
from pathlib import Path

import pytest
import timm
import torch
import torchvision
from refusals import zoo_refused
from safetensors.torch import save_file
from selection import some

import zoo
from zoo import Spec
from zoo.weights import build_with, read


def logits(net, size=32):
    x = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return net.eval()(x)


def timm_model(name="resnet18", **options):
    torch.manual_seed(0)
    return timm.create_model(name, **options)


@pytest.fixture
def theirs():
    torch.manual_seed(0)
    return torchvision.models.resnet18(num_classes=7)


@pytest.mark.slow
@pytest.mark.parametrize("suffix", some(["safetensors", "pth", "pt"], ["safetensors"]))
def test_weights__files_of_the_libraries(tmp_path, suffix, theirs):
    """A safetensors file does not keep the order of the tensors."""
    for library, model in (("torchvision", theirs), ("timm", timm_model(num_classes=7))):
        file = tmp_path / f"{library}.{suffix}"
        (save_file if suffix == "safetensors" else torch.save)(model.state_dict(), file)
        net = zoo.create("resnet18", num_classes=7, weights=file)
        torch.testing.assert_close(logits(net), logits(model), atol=1e-5, rtol=1e-5)


def test_weights__a_state_dict_is_taken_as_it_is(theirs):
    net = zoo.create("resnet18", num_classes=7, weights=theirs.state_dict())
    torch.testing.assert_close(logits(net), logits(theirs), atol=1e-5, rtol=1e-5)


def test_weights__files_without_counters_of_steps(tmp_path, theirs):
    """They are in the order of the alphabet, as no model's state is."""
    state = {name: tensor for name, tensor in theirs.state_dict().items() if "num_batches" not in name}
    save_file(state, tmp_path / "net.safetensors")
    net = zoo.create("resnet18", num_classes=7, weights=tmp_path / "net.safetensors")
    torch.testing.assert_close(logits(net), logits(theirs), atol=1e-5, rtol=1e-5)


def test_weights__files_of_the_zoo_and_of_training_scripts(tmp_path):
    spec = Spec("resnet20", width=0.25, num_classes=7)
    net = spec.build()
    state = net.state_dict()
    for key in (None, "state_dict", "model_state_dict", "model"):
        torch.save(state if key is None else {key: state, "epoch": 3}, tmp_path / "net.pth")
        again = build_with(spec, str(tmp_path / "net.pth"))
        assert all(torch.equal(a, b) for a, b in zip(again.state_dict().values(), state.values()))


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
def test_weights__what_wrappers_put_before_names_is_left_out(tmp_path, prefix):
    save_file({f"{prefix}module.a": torch.ones(1), f"{prefix}b": torch.ones(1)}, tmp_path / "net.safetensors")
    assert read(tmp_path / "net.safetensors").keys() == {"module.a", "b"}


def test_weights__another_number_of_classes_leaves_a_new_head_and_says_so(tmp_path, theirs, caplog):
    torch.save(theirs.state_dict(), tmp_path / "net.pth")
    with caplog.at_level(logging.WARNING):
        net = zoo.create("resnet18", torch.Generator().manual_seed(3), weights=tmp_path / "net.pth", num_classes=4)
    assert "head.weight and head.bias" in caplog.text
    fresh = zoo.create("resnet18", torch.Generator().manual_seed(3), num_classes=4)
    assert torch.equal(net.head.weight, fresh.head.weight)
    assert torch.equal(net.section4[1].conv2.weight, theirs.layer4[1].conv2.weight)
    net.head, theirs.fc = torch.nn.Identity(), torch.nn.Identity()
    torch.testing.assert_close(logits(net), logits(theirs), atol=1e-5, rtol=1e-5)


def test_weights__nothing_is_said_where_all_weights_are_taken(tmp_path, theirs, caplog):
    torch.save(theirs.state_dict(), tmp_path / "net.pth")
    zoo.create("resnet18", weights=tmp_path / "net.pth", num_classes=7)
    assert not caplog.records


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("vit_tiny", lambda n: timm_model("vit_tiny_patch16_224", num_classes=n)),
        ("mobilenetv2", lambda n: torchvision.models.mobilenet_v2(num_classes=n)),
        ("vgg11", lambda n: torchvision.models.vgg11_bn(num_classes=n)),
    ],
)
@pytest.mark.slow
def test_weights__new_heads_of_every_kind(tmp_path, name, make):
    theirs = make(6)
    save_file(theirs.state_dict(), tmp_path / "net.safetensors")
    zoo.create(name, num_classes=6, weights=tmp_path / "net.safetensors")
    net = zoo.create(name, num_classes=3, weights=tmp_path / "net.safetensors")
    a, b = (dict(model.named_parameters()) for model in (zoo.create(name, num_classes=6), net))
    assert logits(net, 224).shape == (2, 3)
    changed = [key for key in a if a[key].shape != b[key].shape]
    assert len(changed) == 2


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ("DEFAULT", "file: 'DEFAULT'"),
        ("torchvision:DEFAULT", "file: 'torchvision:DEFAULT'"),
        ("nowhere.pth", "file: 'nowhere.pth'"),
        (Path("nowhere.pth"), "file: nowhere.pth"),
        ({}, "mismatch"),
        (3, "argument: weights="),
    ],
)
def test_weights__what_there_is_not(weights, expected):
    with zoo_refused(expected):
        zoo.create("resnet18", weights=weights)


def test_weights__files_that_hold_no_weights(tmp_path):
    for name, content, expected in (
        ("a.pth", b"", "file"),
        ("a.pth", b"nonsense", "file"),
        ("a.safetensors", b"nonsense", "file"),
    ):
        (tmp_path / name).write_bytes(content)
        with zoo_refused(expected):
            zoo.create("resnet20", weights=tmp_path / name)
    for thing, expected in (
        (torch.nn.Linear(2, 2), "file"),
        (torch.zeros(3), "file"),
        ({"a": 1}, "file"),
        ({1: torch.zeros(3)}, "file"),
        ({}, "file"),
    ):
        torch.save(thing, tmp_path / "b.pth")
        with zoo_refused(expected):
            zoo.create("resnet20", weights=tmp_path / "b.pth")


@pytest.mark.slow
def test_weights__of_another_model_are_refused(tmp_path, theirs):
    torch.save(theirs.state_dict(), tmp_path / "net.pth")
    for options in (
        {"name": "resnet34"},
        {"name": "resnet18", "in_channels": 1},
        {"name": "resnet18", "width": 0.5},
        {"name": "resnet18", "depth": 1},
    ):
        with zoo_refused(f"mismatch: {options['name']}", str(tmp_path / "net.pth")):
            zoo.create(num_classes=7, weights=tmp_path / "net.pth", **options)

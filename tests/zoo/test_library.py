"""timm's and torchvision's models by name."""

import dataclasses

import pytest
import torch
import torchvision
from torch import nn

import surgery
import zoo
from zoo import Spec, ZooError
from zoo.library import defaults

pytestmark = pytest.mark.slow  # most of the time goes to the libraries' own initialisation
SMALL = {"num_classes": 7, "image_size": 32}


@pytest.mark.parametrize("name", ["timm:resnet18", "torchvision:resnet18", "torchvision:mobilenet_v3_small"])
@pytest.mark.parametrize("channels", [1, 3])
def test_models_take_classes_and_channels(name, channels):
    net = zoo.create(name, in_channels=channels, **SMALL)
    assert net.training
    assert net.eval()(torch.randn(2, channels, 32, 32)).shape == (2, 7)
    first = next(m for m in net.modules() if isinstance(m, nn.Conv2d))
    assert first.in_channels == first.weight.shape[1] == channels


@pytest.mark.parametrize("name", ["timm:deit_tiny_patch16_224", "torchvision:vit_b_32"])
def test_models_that_ask_for_the_image_s_size_are_told(name):
    net = Spec(name, **SMALL).build(device="meta")
    assert net.eval()(torch.zeros(1, 3, 32, 32, device="meta")).shape == (1, 7)


def test_an_error_of_the_library_is_not_taken_for_an_argument_that_it_lacks(monkeypatch):
    def get_model(name, **options):
        if "image_size" in options:
            raise TypeError("sizes of another type")
        return nn.Linear(1, 1)

    monkeypatch.setattr(torchvision.models, "get_model", get_model)
    with pytest.raises(ZooError, match="cannot be built for images of 32 x 32: sizes of another type"):
        zoo.create("torchvision:resnet18", **SMALL)


def test_defaults_are_the_library_s():
    assert (Spec("timm:resnet18").num_classes, Spec("timm:resnet18").image_size) == (1000, 224)
    assert Spec("torchvision:inception_v3").image_size == 299
    assert Spec("timm:mnasnet_small").in_channels == 3
    assert Spec("timm:resnet18.a1_in1k").image_size == 224  # a tag for weights


@pytest.mark.parametrize("name", ["timm:resnet18", "torchvision:resnet18"])
def test_a_spec_of_a_library_s_model_is_a_value(name):
    spec = Spec(name, num_classes=7, in_channels=1, image_size=32, dropout=0)
    assert Spec.from_yaml(spec.to_yaml()) == spec
    assert Spec.from_yaml(Spec(name).to_yaml()) == Spec(name)
    assert len({spec, Spec.from_yaml(spec.to_yaml()), Spec(name)}) == 2
    assert spec.example(2).shape == (2, 1, 32, 32)
    assert spec.depth is None
    assert Spec(name).count() == Spec("resnet18").count()
    assert Spec(name).count(64) == Spec("resnet18").count(64)
    assert Spec(name, num_classes=7).count(32).parameters == Spec("resnet18", num_classes=7).count().parameters


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("timm:resnet18", {"width": 0.5}, r"full size only.*narrow\(model, rate=\.\.\., example=spec\.example\(2\)\)"),
        ("torchvision:resnet18", {"depth": 2}, r"full size only.*surgery\.ungraft"),
        ("timm:resnet18", {"depth": (1, 1, 1, 1)}, "full size only"),
        ("timm:resnet18", {"dropout": 0.3}, "dropout=0 switches all dropout off"),
        ("timm:resnet18", {"norm": "group"}, "takes no norm; it takes width, depth, num_classes"),
        ("timm:resnet18", {"width": 0}, "width is a rate above 0"),
        ("timm:resnet18", {"depth": 0}, "1 or more"),
        ("timm:resnet1", {}, "timm has no image classifier 'resnet1': did you mean timm:resnet"),
        ("torchvision:resnet19", {}, "torchvision has no image classifier 'resnet19': did you mean torchvision:resnet"),
        ("torchvision:qqqq", {}, r"torchvision has no image classifier 'qqqq': see its list_models\(\)"),
        ("keras:resnet18", {}, "give timm:NAME or torchvision:NAME"),
        ("timm:", {}, "give timm:NAME or torchvision:NAME"),
        ("torchvision:resnet18", {"in_channels": 2}, "takes 3 channels, not 2: choose a timm model"),
        ("torchvision:vit_b_32", {"image_size": 33}, "cannot be built for images of 33 x 33"),
        ("torchvision:r3d_18", {}, "torchvision has no image classifier 'r3d_18'"),
        ("timm:resnet18.nonsense", {}, "Invalid pretrained tag"),
    ],
)
def test_bad_arguments(name, options, message):
    with pytest.raises(ZooError, match=message):
        zoo.create(name, **options)


def draws(net, x):
    """Whether a training pass reads the global generator."""
    before = torch.get_rng_state()
    with torch.no_grad():
        net.train()(x)
    return not torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    ("name", "drawing"),
    [
        ("torchvision:efficientnet_b0", True),
        ("torchvision:squeezenet1_1", True),
        ("torchvision:swin_t", True),
        ("timm:swin_tiny_patch4_window7_224", True),
        ("timm:efficientnet_b0", False),  # timm's are off unless asked for
    ],
)
def test_dropout_of_zero_switches_all_of_it_off(name, drawing):
    """Dropout and stochastic depth."""
    x = torch.randn(2, 3, 64, 64)
    spec = Spec(name, num_classes=7, image_size=64, dropout=0)
    assert not draws(spec.build(), x)
    assert draws(dataclasses.replace(spec, dropout=None).build(), x) == drawing


def test_narrow_and_shallow_models_come_from_surgery():
    spec = Spec("torchvision:resnet18", **SMALL)
    small, _ = surgery.narrow(spec.build(), rate=0.5, example=spec.example(2))
    assert small.conv1.out_channels == 32
    small, _ = surgery.ungraft(small, keep=(1, 1, 1, 1))
    assert small.eval()(spec.example(2)).shape == (2, 7)


def test_a_grey_image_is_seen_as_three_equal_channels():
    grey, colour = (
        Spec("torchvision:resnet18", in_channels=c, **SMALL).build(torch.Generator().manual_seed(0)).eval()
        for c in (1, 3)
    )
    x = torch.randn(2, 1, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(grey(x), colour(x.expand(-1, 3, -1, -1)), atol=1e-4, rtol=1e-4)


def test_to_describe_a_model_builds_none():
    defaults.cache_clear()
    before = torch.get_rng_state()
    assert Spec("torchvision:vit_h_14").name == "torchvision:vit_h_14"
    assert torch.equal(before, torch.get_rng_state())

"""timm's and torchvision's models by name, and their published weights."""

import dataclasses

import pytest
import timm
import torch
import torchvision
from refusals import fl_refused
from torch import nn

import fl
import surgery
from fl.base.errors import FLError
from fl.models import create, make_spec
from fl.models.library import LibrarySpec, _defaults, counterpart, fetch
from fl.models.search import size
from zoo import Spec

pytestmark = pytest.mark.slow  # most of the time goes to the libraries' own initialisation
SMALL = {"num_classes": 7, "image_size": 32}


@pytest.mark.parametrize("name", ["timm:resnet18", "torchvision:resnet18", "torchvision:mobilenet_v3_small"])
@pytest.mark.parametrize("channels", [1, 3])
def test_library__models_take_classes_and_channels(name, channels):
    net = LibrarySpec(name, in_channels=channels, **SMALL).build()
    assert net.training
    assert net.eval()(torch.randn(2, channels, 32, 32)).shape == (2, 7)
    first = next(m for m in net.modules() if isinstance(m, nn.Conv2d))
    assert first.in_channels == first.weight.shape[1] == channels


@pytest.mark.parametrize("name", ["timm:deit_tiny_patch16_224", "torchvision:vit_b_32"])
def test_library__models_that_ask_for_the_image_s_size_are_told(name):
    net = LibrarySpec(name, **SMALL).build(device="meta")
    assert net.eval()(torch.zeros(1, 3, 32, 32, device="meta")).shape == (1, 7)


def test_library__an_error_of_the_library_is_not_taken_for_an_argument_that_it_lacks(monkeypatch):
    def get_model(name, **options):
        if "image_size" in options:
            raise TypeError("sizes of another type")
        return nn.Linear(1, 1)

    monkeypatch.setattr(torchvision.models, "get_model", get_model)
    with fl_refused("unsupported", "32x32"):
        LibrarySpec("torchvision:resnet18", **SMALL).build()


def test_library__defaults_are_the_library_s():
    assert (LibrarySpec("timm:resnet18").num_classes, LibrarySpec("timm:resnet18").image_size) == (1000, 224)
    assert LibrarySpec("torchvision:inception_v3").image_size == 299
    assert LibrarySpec("timm:mnasnet_small").in_channels == 3
    assert LibrarySpec("timm:resnet18.a1_in1k").image_size == 224  # a tag for weights


@pytest.mark.parametrize("depth", [None, 2, (1, 2, 1, 1)])
@pytest.mark.parametrize("name", ["timm:resnet18", "torchvision:resnet18"])
def test_library__a_spec_of_a_library_s_model_is_a_value(name, depth):
    spec = LibrarySpec(name, num_classes=7, in_channels=1, image_size=32, dropout=0, width=0.5, depth=depth)
    assert LibrarySpec.from_yaml(spec.to_yaml()) == spec
    assert LibrarySpec.from_yaml(LibrarySpec(name).to_yaml()) == LibrarySpec(name)
    assert len({spec, LibrarySpec.from_yaml(spec.to_yaml()), LibrarySpec(name)}) == 2
    assert type(dataclasses.replace(spec, depth=None)) is LibrarySpec
    assert spec.example(2).shape == (2, 1, 32, 32)
    assert spec.scale(0.5).width == (0.25,)


@pytest.mark.parametrize("name", ["timm:resnet18", "torchvision:resnet18"])
def test_library__counts_are_those_of_the_zoo_s(name):
    assert LibrarySpec(name).count(64) == Spec("resnet18").count(64)
    assert size(LibrarySpec(name, 7, 3, 32), "parameters") == Spec("resnet18", 7).count().parameters


def test_library__models_whose_parameters_go_from_module_to_module_are_counted():
    assert size(LibrarySpec("timm:cait_xxs24_224"), "macs") > 2e9


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("timm:resnet18", {"width": 0.5}, "full size only: fl.models.create makes it narrow and shallow"),
        ("torchvision:resnet18", {"depth": 2}, "full size only"),
        ("timm:resnet18", {"depth": (1, 1, 1, 1)}, "full size only"),
        ("timm:resnet18", {"dropout": 0.3}, "dropout 0 switches all dropout off"),
        ("timm:resnet18", {"norm": "group"}, "takes no norm; it takes width, depth, num_classes"),
        ("timm:resnet18", {"width": 0}, "width is a rate above 0"),
        ("timm:resnet18", {"depth": 0}, "1 or more"),
        ("timm:resnet1", {}, "timm has no model 'resnet1': did you mean timm:resnet"),
        ("torchvision:resnet19", {}, "torchvision has no model 'resnet19': did you mean torchvision:resnet"),
        ("torchvision:qqqq", {}, r"torchvision has no model 'qqqq': see its list_models\(\)"),
        ("keras:resnet18", {}, "give timm:NAME or torchvision:NAME"),
        ("timm:", {}, "give timm:NAME or torchvision:NAME"),
        ("torchvision:resnet18", {"in_channels": 2}, "takes 3 channels, not 2: choose a timm model"),
        ("torchvision:vit_b_32", {"image_size": 33}, "cannot be built for images of 33x33: "),
        ("torchvision:r3d_18", {}, "torchvision:r3d_18 is no image classifier"),
        ("timm:resnet18.nonsense", {}, "Invalid pretrained tag"),
    ],
)
def test_library__bad_arguments(name, options, message):
    with pytest.raises(ValueError, match=message):
        LibrarySpec(name, **options).build()


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
def test_library__dropout_of_zero_switches_all_of_it_off(name, drawing):
    """Dropout and stochastic depth."""
    x = torch.randn(2, 3, 64, 64)
    spec = LibrarySpec(name, num_classes=7, image_size=64, dropout=0)
    assert not draws(spec.build(), x)
    assert draws(dataclasses.replace(spec, dropout=None).build(), x) == drawing


@pytest.mark.parametrize(("name", "rest"), [("torchvision:resnet18", {}), ("timm:resnet18", {"dropout": 0.0})])
def test_library__narrow_and_shallow_models_are_cut(name, rest):
    spec = make_spec(name, 7, 3, 32, width=0.5, depth=(1, 2, 1, 1), **rest)
    net = create(torch.Generator().manual_seed(0), spec).eval()
    assert [len(getattr(net, f"layer{i}")) for i in range(1, 5)] == [1, 2, 1, 1]
    full = LibrarySpec(name, 7, 3, 32).build(torch.Generator().manual_seed(0))
    assert torch.equal(net.conv1.weight, full.conv1.weight[:32])
    assert net(spec.example(2)).shape == (2, 7)


def test_library__a_grey_image_is_seen_as_three_equal_channels():
    grey, colour = (
        LibrarySpec("torchvision:resnet18", in_channels=c, **SMALL).build(torch.Generator().manual_seed(0)).eval()
        for c in (1, 3)
    )
    x = torch.randn(2, 1, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(grey(x), colour(x.expand(-1, 3, -1, -1)), atol=1e-4, rtol=1e-4)


def test_library__to_describe_a_model_builds_none():
    _defaults.cache_clear()
    before = torch.get_rng_state()
    assert LibrarySpec("torchvision:vit_h_14").name == "torchvision:vit_h_14"
    assert torch.equal(before, torch.get_rng_state())


def test_library__weights_come_from_the_generator_alone():
    before = torch.get_rng_state()
    spec = LibrarySpec("timm:resnet18", num_classes=5)
    a, b, other = (spec.build(torch.Generator().manual_seed(seed)).state_dict() for seed in (1, 1, 2))
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(a[key], b[key]) for key in a)
    assert not torch.equal(a["fc.weight"], other["fc.weight"])


def test_library__a_library_is_asked_for_the_counterpart():
    assert counterpart("torchvision", Spec("vgg11")) == "vgg11_bn"
    assert counterpart("torchvision", Spec("vgg11", norm="none")) == "vgg11"
    assert counterpart("timm", Spec("vit_tiny")) == "vit_tiny_patch16_224"
    assert counterpart("timm", LibrarySpec("timm:resnet18.a1_in1k")) == "resnet18.a1_in1k"
    for library, spec, message in (
        ("torchvision", Spec("resnet18", norm="none"), "for resnet18 without norms; it does for vgg11,"),
        ("torchvision", Spec("resnet20"), "for resnet20; it does for resnet18, "),
        ("torchvision", LibrarySpec("timm:resnet18"), "for timm:resnet18"),
        ("timm", Spec("efficientnetv2_s"), "for efficientnetv2_s; it does for resnet18, .*vit_tiny"),
    ):
        with pytest.raises(FLError, match=f"{library} publishes no weights {message}"):
            counterpart(library, spec)
    with fl_refused("name", "vit_giant_patch14_224"):
        fetch("timm", "vit_giant_patch14_224")


@pytest.mark.parametrize(
    ("library", "cut", "address"),
    [
        ("torchvision", "torch.hub.urlopen", "https://download.pytorch.org/models/resnet18-"),
        ("timm", "timm.create_model", "https://huggingface.co/timm/resnet18."),
    ],
)
def test_library__without_a_network(monkeypatch, tmp_path, library, cut, address):
    def refuse(*_, **__):
        raise OSError("Network is unreachable\nand more")

    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr(cut, refuse)
    monkeypatch.setattr("socket.create_connection", refuse)
    with pytest.raises(FLError) as caught:
        fetch(library, "resnet18")
    text = str(caught.value)
    assert text.startswith(f"the weights of {library}:resnet18 are not in the library's cache")
    assert f"cannot be fetched from {address}" in text
    assert "Network is unreachable" in text
    assert "give that file" in text
    assert "\n" not in text


def test_library__without_a_network_timm_looks_into_the_cache_only(monkeypatch):
    from huggingface_hub import constants

    def refuse(*_, **__):
        raise OSError

    offline = []
    monkeypatch.setattr(timm, "create_model", lambda *_, **__: offline.append(constants.HF_HUB_OFFLINE))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("fl.models.library.getproxies", dict)
    monkeypatch.setattr("socket.create_connection", refuse)
    fetch("timm", "resnet18")
    monkeypatch.setattr("fl.models.library.getproxies", lambda: {"https": "http://proxy"})  # which may well lead there
    fetch("timm", "resnet18")
    assert offline == [True, False]
    assert not constants.HF_HUB_OFFLINE


def test_narrow__a_narrow_model_by_name_trains_as_the_same_one_made_in_python():
    settings = {"algorithm": "fedavg", "clients": 2, "participants": 2, "partition": "iid", "samples": 40}
    fed, method = fl.build(fl.Config.of(model="timm:resnet10t", width=0.5, **settings))
    start = method.init()
    net = timm.create_model("resnet10t", num_classes=10, in_chans=1)
    small, _ = surgery.narrow(net, 0.5, torch.zeros(2, *fed.data.test_x.shape[1:]))
    own, its_method = fl.build(fl.Config.of(**settings), model=surgery.load(small, start["global"]))
    ends = []
    for federation, algorithm in ((fed, method), (own, its_method)):
        rng = fl.Rng(0, 1)
        ends.append(algorithm.round(algorithm.init(), federation.sample(rng), rng)[0]["global"])
    assert any(not torch.equal(ends[0][name], tensor) for name, tensor in start["global"].items())
    torch.testing.assert_close(ends[0], ends[1], rtol=0, atol=0)

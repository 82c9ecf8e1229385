"""Specs: what they accept, what they say, and the models that they build."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import zoo_refused
from torchvision.models._utils import _make_divisible
from zoo_models import FAMILIES, small

import zoo
from zoo import Spec
from zoo.layers import Builder


@st.composite
def specs(draw):
    """Any spec of the zoo's own architectures."""
    name = draw(st.sampled_from(zoo.names()))
    architecture = Spec(name).architecture
    values = {
        "num_classes": st.integers(1, 2000), "in_channels": st.integers(1, 4), "image_size": st.integers(32, 300),
        "tokens": st.integers(1, 100), "rounding": st.sampled_from(["ceil", "divisor8"]),
        "norm": st.sampled_from(["none", "batch", "static_batch", "group", "layer"]),
        "norm_eps": st.floats(1e-8, 0.5), "stem": st.sampled_from(["imagenet", "cifar"]),
        "dropout": st.floats(0, 0.99), "drop_path": st.floats(0, 0.99),
        "scaler": st.booleans(), "step_size": st.booleans(), "exits": st.booleans(), "heads": st.integers(1, 12),
    }  # fmt: skip
    chosen = draw(st.sets(st.sampled_from(sorted(architecture.defaults))))
    options = {field: draw(values[field]) for field in sorted(chosen)}
    rate, blocks = st.floats(1e-3, 4), st.integers(1, 20)
    options["width"] = draw(rate | st.tuples(*[rate] * len(architecture.rate_names)))
    if architecture.depth:
        options["depth"] = draw(st.none() | blocks | st.tuples(*[blocks] * len(architecture.depth)))
    return Spec(name, **options)


@pytest.mark.slow
@settings(max_examples=100)
@given(specs())
def test_spec__yaml_round_trip(spec):
    again = Spec.from_yaml(spec.to_yaml())
    assert again == spec
    assert hash(again) == hash(spec)
    assert again.to_yaml() == spec.to_yaml()


def test_spec__yaml_is_short_where_rates_are_equal():
    assert "width: 0.5\ndepth: 2\n" in Spec("resnet20", width=0.5, depth=2).to_yaml()
    text = Spec("resnet20", width=(0.5, 0.5, 1)).to_yaml()
    assert "width:\n- 0.5\n- 0.5\n- 1.0\n" in text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: b: c", "file"),
        ("", "file"),
        ("[resnet20]", "file"),
        ("resnet20", "file"),
        ("{width: 0.5}", "file"),
        ("{name: resnet20, widht: 0.5}", "argument: 'widht'"),
        ("{name: resnet20, width: half}", "argument: width"),
        ("{name: resnet2}", "name: 'resnet2'"),
        ("{name: 3}", "argument"),
        ("{name: resnet20, width: [0.5, 0.5]}", "argument"),
        ("{name: !!python/name:os.system x}", "file"),
    ],
)
def test_spec__yaml_that_is_no_spec(text, expected):
    with zoo_refused(expected):
        Spec.from_yaml(text)


def test_spec__numbers_are_plain_whatever_they_come_from():
    spec = Spec("vgg11", np.int64(7), dropout=np.float64(0), depth=(np.int64(1),) * 5, width=np.float32(0.5))
    assert spec == Spec("vgg11", 7, dropout=0, depth=1, width=0.5)
    assert spec.to_yaml() == Spec("vgg11", 7, dropout=0, depth=1, width=0.5).to_yaml()
    assert Spec.from_yaml("{name: resnet20, norm_eps: 1e-3}").norm_eps == 1e-3  # a text to YAML 1.1


@pytest.mark.parametrize(("name", "size"), [("cnn", 40), ("vgg11", 16), ("transformer", 100), ("resnet20", 0)])
def test_spec__what_a_model_cannot_take_cannot_be_counted(name, size):
    with zoo_refused("argument", name, str(size)):
        Spec(name).count(size)


def test_spec__specs_are_values():
    a, b = Spec("resnet20", width=0.5), Spec("resnet20", width=(0.5, 0.5, 0.5), depth=3, num_classes=10, norm="batch")
    assert a == b
    assert len({a, b, Spec("resnet20")}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        a.width = 1.0
    assert dataclasses.replace(a, depth=2).depth == (2, 2, 2)
    assert Spec("cnn", width=[0.5, 0.5, 1]) == Spec("cnn", width=(0.5, 0.5, 1.0))


def test_spec__create_takes_the_fields_of_a_spec():
    net = zoo.create("resnet20", num_classes=10, width=0.5, depth=(2, 2, 2), norm="static_batch")
    assert [len(getattr(net, f"section{i}")) for i in (1, 2, 3)] == [2, 2, 2]
    assert net.head.in_features == 32
    assert type(net.stem.norm).__name__ == "StaticBatchNorm2d"
    assert net.training


def test_spec__rates_belong_to_their_parts():
    net = zoo.create("cnn", width=(0.25, 0.5, 0.125))
    assert [net.conv1.out_channels, net.conv2.out_channels, net.fc1.out_features] == [8, 32, 64]
    net = zoo.create("resnet20", width=(1, 0.5, 0.25))
    assert [net.section1[0].conv1.out_channels, net.section2[0].conv1.out_channels, net.head.in_features] == [16] * 3
    net = zoo.create("vgg11", image_size=32, num_classes=5, width=(0.1,) * 5 + (0.01,))
    assert [net.section5[0].conv.out_channels, net.head.in_features] == [52, 41]
    assert Spec("mobilenetv2", width=(0.1,) * 6 + (0.2,)).rates["tail"] == 0.2  # the last one's goes on


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("resnet2", {}, "name: 'resnet2'"),
        ("zzz", {}, "name: 'zzz'"),
        ("resnet20", {"dropout": 0.1}, "argument: dropout"),
        ("resnet20", {"tokens": 3}, "argument: tokens"),
        ("transformer", {"image_size": 32}, "argument: image_size"),
        ("cnn", {"step_size": True}, "argument: step_size"),
        ("cnn", {"stem": "cifar"}, "argument: stem"),
        ("cnn", {"image_size": 3}, "argument"),
        ("vgg11", {"image_size": 31}, "argument"),
        ("cnn", {"depth": 3}, "argument"),
        *(("resnet20", {"width": width}, "argument: width")
          for width in (0, -1, math.inf, math.nan, True, "1", (1, 1, 0))),
        ("resnet20", {"width": (1, 1)}, "argument"),
        ("resnet20", {"width": ()}, "argument"),
        ("mobilenetv2", {"width": (1,) * 9}, "argument"),
        *(("resnet20", {"depth": depth}, "argument")
          for depth in (0, 1.5, True)),
        ("resnet20", {"depth": (1, -1, 1)}, "argument"),
        ("resnet20", {"depth": (1, 1)}, "argument"),
        *((name, {field: value}, f"argument: {field}")
          for name, field, value in (("resnet20", "num_classes", 0), ("resnet20", "num_classes", 2.0),
                                     ("resnet20", "in_channels", True), ("resnet20", "image_size", -1),
                                     ("transformer", "tokens", 0), ("vit_tiny", "heads", 0))),
        *((name, {field: 2**32}, f"argument: {field}")
          for name, field in (("resnet20", "num_classes"), ("resnet20", "in_channels"), ("resnet20", "image_size"),
                              ("transformer", "tokens"), ("vit_tiny", "heads"))),
        *(("vgg11", {"dropout": rate}, "argument") for rate in (1.5, 1, -0.1, math.nan)),
        ("efficientnetv2_s", {"drop_path": 1}, "argument: drop_path"),
        ("resnet20", {"norm_eps": 0}, "argument: norm_eps"),
        ("resnet20", {"norm": "instance"}, "argument: 'instance'"),
        ("transformer", {"norm": "batch"}, "argument: norm"),
        ("resnet20", {"stem": "big"}, "argument: 'big'"),
        ("resnet20", {"rounding": "floor"}, "argument: 'floor'"),
        ("resnet20", {"scaler": 1}, "argument: scaler"),
        ("resnet20", {"step_size": "yes"}, "argument: step_size"),
        ("resnet20", {"exits": 1}, "argument: exits"),
        ("cnn", {"exits": True}, "argument: exits"),
        ("resnet20", {"depth": (1, 1, 0)}, "argument"),
        *(("resnet20", {"depth": depth, "exits": True}, "argument")
          for depth in (0, (0, 1, 1), (1, 0, 1), (1, 1, False), (1, 1, -1))),
        ("resnet20", {"colour": 1}, "argument: 'colour'"),
        ("vit_tiny", {"image_size": 30}, "argument: 30"),
        ("vit_tiny", {"image_size": 100}, "argument"),
        ("vit_tiny", {"heads": 5}, "argument"),
        ("vit_tiny", {"norm": "batch"}, "argument: norm"),
        ("resnet20", {"heads": 2}, "argument: heads"),
    ],
)  # fmt: skip
def test_spec__bad_arguments(name, options, expected):
    with zoo_refused(expected):
        zoo.create(name, **options)


@settings(max_examples=50)
@given(specs().filter(lambda spec: ":" not in spec.name), st.floats(0.1, 2), st.floats(0.1, 2))
def test_spec__scaled_multiplies(spec, a, b):
    assert spec.scale() == spec
    twice, once = spec.scale(a).scale(b), spec.scale(a * b)
    assert twice.width == pytest.approx(once.width)
    assert dataclasses.replace(twice, width=once.width) == once
    rates = tuple(a + i / 10 for i in range(len(spec.width)))
    assert spec.scale(rates).width == tuple(w * r for w, r in zip(spec.width, rates))
    if spec.depth:
        assert spec.scale(depth=1).depth == (1,) * len(spec.depth)
        assert spec.scale(a).depth == spec.depth


def scaled(channels, rate, rounding="ceil"):
    return Builder(rate=rate, rounding=rounding).channels(channels)


@given(st.integers(1, 4096), st.integers(1, 4096), st.floats(1e-6, 4), st.floats(1e-6, 4))
def test_spec__rounding_rules(c, d, a, b):
    """They are those of the papers, and monotone."""
    exact = round(c * a, 6)
    assert scaled(c, a) == max(1, math.ceil(exact))
    assert scaled(c, a, "divisor8") == _make_divisible(exact, 8)
    assert scaled(c, 1.0) == c
    (c, d), (a, b) = sorted((c, d)), sorted((a, b))
    for rounding in ("ceil", "divisor8"):
        assert scaled(c, a, rounding) <= scaled(c, b, rounding) <= scaled(d, b, rounding)


def test_spec__rates_are_taken_as_written():
    assert scaled(100, 0.07) == 7
    assert [scaled(512, 1 / 3), scaled(512, 2 / 3), scaled(64, 1e-9)] == [171, 342, 1]


def test_spec__examples_are_inputs():
    spec = small("resnet20", in_channels=2, image_size=9)
    assert spec.example().shape == (1, 2, 9, 9)
    assert spec.example(3, size=4, device="meta").shape == (3, 2, 4, 4)
    assert spec.example(device="meta").is_meta
    text = small("transformer")
    assert text.example(2).shape == (2, 6)
    assert text.example(2, size=4).shape == (2, 4)
    assert text.example().dtype == torch.int64


@pytest.mark.parametrize("name", FAMILIES)
def test_spec__examples_run(name):
    spec = small(name)
    out = spec.build().eval()(spec.example(2))
    assert out.shape == ((2, 6, 11) if name.startswith("transformer") else (2, 5))


@settings(max_examples=15)
@given(st.sampled_from(["cnn", "resnet20", "preresnet20"]), st.integers(4, 40), st.integers(1, 4))
def test_spec__any_image_size_and_channels(name, size, channels):
    spec = Spec(name, num_classes=7, in_channels=channels, image_size=size, width=0.1)
    out = spec.build()(torch.randn(2, channels, size, size))
    assert out.shape == (2, 7)
    assert out.isfinite().all()


def test_spec__the_smallest_width_has_one_channel():
    net = zoo.create("resnet20", width=1e-9)
    assert net.stem.conv.out_channels == net.head.in_features == 1
    assert net(torch.randn(2, 3, 8, 8)).shape == (2, 10)

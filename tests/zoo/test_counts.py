"""Parameters and multiply-accumulates against the papers, torchvision, and counts made by hand."""

import pytest
import torch
import torchvision
from hypothesis import given, settings
from hypothesis import strategies as st
from selection import some
from zoo_models import FAMILIES, small

from zoo import Spec
from zoo.weights import counterparts

TORCHVISION = [(name, theirs, {}) for name, theirs in counterparts("torchvision").items()]
TORCHVISION += [(name, theirs, {"norm": "none"}) for name, theirs in counterparts("torchvision_plain").items()]


@pytest.mark.parametrize(("name", "theirs", "options"), some(TORCHVISION, TORCHVISION[::5]))
def test_counts__parameters_and_macs_are_torchvision_s(name, theirs, options):
    meta = torchvision.models.get_model_weights(theirs).DEFAULT.meta
    count = Spec(name, **options).count({"efficientnetv2_s": 384, "efficientnetv2_m": 480}.get(name))
    assert count.parameters == meta["num_params"]
    assert count.macs / 1e9 == pytest.approx(meta["_ops"], abs=6e-4)  # they give three digits


@pytest.mark.parametrize(
    ("name", "millions", "gmacs"), [("vit_tiny", 5.72, 1.26), ("vit_small", 22.05, 4.61), ("vit_base", 86.57, 17.58)]
)
def test_counts__are_those_that_timm_publishes(name, millions, gmacs):
    """results-imagenet.csv and its benchmarks; DeiT's table 1 has 5M, 22M and 86M parameters.

    timm's multiply-accumulates count biases, norms and activations, too.
    """
    count = Spec(name).count()
    assert count.parameters / 1e6 == pytest.approx(millions, abs=5e-3)
    assert count.macs / 1e9 == pytest.approx(gmacs, rel=0.01)


@pytest.mark.parametrize(
    ("name", "options", "parameters"),
    [
        ("cnn", {}, 1_663_370),  # McMahan et al. 2017, section 3
        ("cnn", {"num_classes": 62}, 1_690_046),  # + 52 * 513
        ("lenet", {}, 62_006),
        ("resnet20", {}, 269_722),
        ("resnet9", {}, 83_852),  # FeMAM: 83.9k
        ("resnet20_fedmr", {}, 219_482),  # FedMR: 0.22M, with the norm that it does not use
        ("preresnet18", {}, 11_172_170),
        ("vgg16", {"image_size": 32, "num_classes": 10}, 33_646_666),  # as torchvision's, but for one position, not 49
        ("vit_tiny", {"num_classes": 10, "image_size": 32, "width": 0.5, "depth": 3}, 347_722),  # patches of 4x4
    ],
)
def test_counts__parameters_are_the_paper_s(name, options, parameters):
    assert Spec(name, **options).count().parameters == parameters


@pytest.mark.parametrize(
    ("name", "millions"),
    some(
        [("resnet20", 0.27), ("resnet32", 0.46), ("resnet44", 0.66), ("resnet56", 0.85), ("resnet110", 1.7)],
        [("resnet20", 0.27), ("resnet56", 0.85)],
    ),
)
def test_counts__small_resnets_are_those_of_he_2016_table_6(name, millions):
    count = Spec(name).count().parameters / 1e6
    assert count == pytest.approx(millions, abs=0.005 if millions < 1 else 0.05)


def by_hand_resnet(depths, channels, classes=10, inputs=3):
    """CIFAR's ResNet with padded shortcuts: convolutions without bias, two numbers a normalised channel."""
    total, before = inputs * 9 * channels[0] + 2 * channels[0], channels[0]
    for depth, now in zip(depths, channels):
        for block in range(depth):
            total += 9 * now * (before if block == 0 else now) + 9 * now * now + 4 * now
        before = now
    return total + before * classes + classes


def by_hand_preresnet(depths, channels, classes, inputs=3):
    """norm-ReLU-conv-norm-ReLU-conv; a bare 1x1 convolution where the channels change; a norm before the pooling."""
    total, before = inputs * 9 * channels[0], channels[0]
    for depth, now in zip(depths, channels):
        for _ in range(depth):
            total += 2 * before + 9 * before * now + 2 * now + 9 * now * now
            total += before * now if before != now else 0
            before = now
    return total + 2 * before + before * classes + classes


def by_hand_transformer(vocabulary, words, channels, hidden, blocks, tokens):
    """Four square matrices and two norms a block, two matrices of the feed-forward network; all have biases."""
    square = channels * channels + channels
    block = 4 * square + (channels * hidden + hidden) + (hidden * channels + channels) + 2 * 2 * channels
    embedding = words * channels + tokens * channels + 2 * channels
    head = square + 2 * channels + channels * vocabulary + vocabulary
    return embedding + blocks * block + head


def test_counts__by_hand():
    assert Spec("preresnet18").count().parameters == by_hand_preresnet((2, 2, 2, 2), (64, 128, 256, 512), 10)
    words = 33_278
    assert Spec("transformer").count().parameters == by_hand_transformer(words, words, 256, 512, 4, 64)
    assert Spec("transformer_masked").count().parameters == by_hand_transformer(words, words + 1, 256, 512, 4, 64)


@pytest.mark.slow
@settings(max_examples=10)
@given(st.floats(0.05, 2), st.tuples(*[st.integers(1, 4)] * 3), st.integers(2, 20), st.integers(1, 4))
def test_counts__by_hand_at_any_width_and_depth(width, depth, classes, inputs):
    options = {"width": width, "depth": depth, "num_classes": classes, "in_channels": inputs}
    for name, by_hand in (("resnet20", by_hand_resnet), ("preresnet20", by_hand_preresnet)):
        channels = [-int(-round(width * c, 6) // 1) for c in (16, 32, 64)]  # rounded up
        assert Spec(name, **options).count(8).parameters == by_hand(depth, channels, classes, inputs)


def test_counts__macs_by_hand():
    """cnn: two convolutions of 5x5, at 28x28 and 14x14, and two matrices."""
    macs = 28 * 28 * 25 * 32 + 14 * 14 * 25 * 32 * 64 + 49 * 64 * 512 + 512 * 10
    assert Spec("cnn").count().macs == macs
    tokens, channels, hidden, words = 6, 256, 512, 11
    block = tokens * (4 * channels**2 + 2 * channels * hidden) + 2 * tokens**2 * channels
    macs = 4 * block + tokens * (channels**2 + channels * words)
    assert Spec("transformer", num_classes=words, tokens=tokens).count().macs == macs
    square = 65 * (12 * 96**2) + 2 * 65**2 * 96  # 65 tokens: matrices of 96 channels, and attention
    assert Spec("vit_tiny", 10, image_size=32, width=0.5, depth=3).count().macs == 64 * 48 * 96 + 3 * square + 96 * 10


@settings(max_examples=2)
@given(st.data())
@pytest.mark.parametrize("name", some(FAMILIES, [*FAMILIES][::3]))
def test_counts__the_count_is_the_built_model_s(name, data):
    sections = len(Spec(name).depth)
    depth = data.draw(st.tuples(*[st.integers(1, 2)] * sections)) if sections else None
    spec = small(name, width=data.draw(st.floats(0.05, 0.3)), depth=depth)
    assert spec.count().parameters == sum(p.numel() for p in spec.build().parameters())


def test_counts__what_counts_as_a_parameter():
    """Step sizes do, running statistics do not."""
    plain, stepping = (Spec("resnet20", step_size=s).count().parameters for s in (False, True))
    assert stepping - plain == 9
    assert Spec("resnet20", norm="static_batch").count().parameters == plain
    assert Spec("resnet20", norm="group").count().parameters == plain


@pytest.mark.slow
def test_counts__macs_follow_the_size_and_parameters_do_not():
    spec = Spec("resnet20")
    head = 64 * 10
    less, more = spec.count(16), spec.count(64)
    assert less.parameters == more.parameters == spec.count().parameters
    assert (more.macs - head) == 16 * (less.macs - head)
    assert spec.count() == spec.count(32)
    text = Spec("transformer", num_classes=11, tokens=12)
    assert text.count(6).macs < text.count().macs == text.count(12).macs


def test_counts__to_count_builds_nothing_and_draws_nothing():
    before = torch.get_rng_state()
    assert Spec("vgg19", width=3).count().parameters > 1e9
    assert torch.equal(before, torch.get_rng_state())

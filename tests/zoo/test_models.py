import pytest
import torch
import torchvision
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import zoo


@pytest.mark.parametrize(
    ("model", "parameters"),
    [
        (zoo.cnn(), 1_663_370),  # McMahan et al. 2017, section 3
        (zoo.cnn(num_classes=62), 1_690_046),  # + 52 * 513
        (zoo.resnet20(), 269_722),  # He et al. 2016, table 6: 0.27M
    ],
)
def test_golden_parameter_counts(model, parameters):
    assert sum(p.numel() for p in model.parameters()) == parameters


def layer_by_layer(channels, classes=10, inputs=3):
    """resnet20's parameters, counted from the paper: convolutions without bias, two numbers a normalised channel."""
    total, before = inputs * 9 * channels[0] + 2 * channels[0], channels[0]
    for now in channels:
        for block in range(3):
            total += 9 * now * (before if block == 0 else now) + 9 * now * now + 4 * now
        before = now
    return total + before * classes + classes


@settings(max_examples=25, deadline=None)
@given(st.floats(0.05, 2), st.integers(2, 20), st.sampled_from([1, 3]))
def test_width_scales_every_hidden_channel(width, classes, inputs):
    net = zoo.resnet20(classes, inputs, width=width)
    channels = [net.section1[0].conv1.out_channels, net.section2[0].conv1.out_channels, net.fc.in_features]
    assert channels == [zoo.cnn(width=width * c / 32).conv1.out_channels for c in (16, 32, 64)]
    assert sum(p.numel() for p in net.parameters()) == layer_by_layer(channels, classes, inputs)
    smaller, larger = zoo.resnet20(width=width).state_dict(), zoo.resnet20(width=2 * width).state_dict()
    assert smaller.keys() == larger.keys()
    assert all(a <= b for name in smaller for a, b in zip(smaller[name].shape, larger[name].shape, strict=True))


@settings(max_examples=15, deadline=None)
@given(
    st.sampled_from(["cnn", "resnet20"]),
    st.integers(4, 40),
    st.integers(1, 4),
    st.sampled_from([None, "batch", "group", "none"]),
)
def test_any_input_size_and_channels(name, size, channels, norm):
    net = zoo.create(name, num_classes=7, in_channels=channels, image_size=size, width=0.25, norm=norm)
    out = net(torch.randn(2, channels, size, size))
    assert out.shape == (2, 7)
    assert out.isfinite().all()


def test_the_smallest_width_has_one_channel():
    assert zoo.resnet20(width=1e-9)(torch.randn(1, 3, 8, 8)).shape == (1, 10)


def test_the_block_computes_what_the_paper_draws():
    """Option A's shortcut: every second pixel, zero channels appended."""
    block = zoo.resnet.BasicBlock(2, 4, stride=2, norm="none")
    x = torch.rand(1, 2, 6, 6)
    shortcut = torch.zeros(1, 4, 3, 3)
    shortcut[:, :2] = x[:, :, ::2, ::2]
    expected = torch.relu(block.conv2(torch.relu(block.conv1(x))) + shortcut)
    torch.testing.assert_close(block(x), expected)


def test_resnet20_equals_torchvision_s_up_to_the_shortcut():
    """With equal weights and identity shortcuts (a section without stride) the block is torchvision's BasicBlock."""
    ours = zoo.resnet.BasicBlock(8, 8, 1, "batch").eval()
    theirs = torchvision.models.resnet.BasicBlock(8, 8).eval()
    renamed = {name.replace("bn", "norm"): tensor for name, tensor in theirs.state_dict().items()}
    ours.load_state_dict(renamed)  # with torchvision's step counters in it
    x = torch.randn(2, 8, 5, 5)
    torch.testing.assert_close(ours(x), theirs(x))


def test_batch_norm_has_no_step_counter_and_computes_the_same():
    ours, theirs = zoo.norms.BatchNorm2d(3), nn.BatchNorm2d(3)
    assert sorted(ours.state_dict()) == ["bias", "running_mean", "running_var", "weight"]
    for _ in range(3):
        x = torch.randn(4, 3, 5, 5)
        torch.testing.assert_close(ours(x), theirs(x))
    torch.testing.assert_close(ours.running_var, theirs.running_var)
    torch.testing.assert_close(ours.eval()(x), theirs.eval()(x))


def test_initial_weights_come_from_the_generator_alone():
    def draw(seed):
        return zoo.create("resnet20", torch.Generator().manual_seed(seed)).state_dict()

    torch.rand(3)  # the global generator does not matter
    a, b, other = draw(1), draw(1), draw(2)
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not torch.equal(a["conv1.weight"], other["conv1.weight"])
    state = torch.get_rng_state()
    zoo.create("cnn", torch.Generator())
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: zoo.create("resnet2"), "did you mean 'resnet20'.*cnn, resnet20"),
        (lambda: zoo.create("cnn", image_size=3), "4x4 or larger"),
        (lambda: zoo.create("cnn", width=0), "above 0"),
        (lambda: zoo.create("cnn", width=float("inf")), "above 0"),
        (lambda: zoo.create("cnn", depth=3), "depth.*it takes num_classes, in_channels, image_size, width, norm"),
        (lambda: zoo.create("cnn", num_classes=0), "1 or more"),
        (lambda: zoo.create("cnn", norm="layer"), "batch, group or none"),
    ],
)
def test_bad_arguments(call, message):
    with pytest.raises(zoo.ZooError, match=message):
        call()

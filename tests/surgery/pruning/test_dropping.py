"""Given positions that go, and those that are zero."""

import copy
import logging

import torch
import torch_pruning as tp
import torchvision
from refusals import refused
from torch import nn
from torch.nn.utils import prune as masks

import surgery
from surgery.pruning import drop, drop_zeros

IMAGE = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def convolutions():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(96, 5)
    ).eval()


def test_drop__given_channels_go_as_in_torch_pruning():
    block = torchvision.models.resnet.BasicBlock
    torch.manual_seed(0)
    net = torchvision.models.ResNet(block, [1, 1, 1, 1], num_classes=4).eval()
    image = torch.randn(1, 3, 32, 32)
    gone = {"layer1.0.conv1": [2, 6, 9], "conv1": [0, 63], "layer2.0.conv2": [5]}
    small, _ = drop(net, gone, example=image)
    theirs = copy.deepcopy(net)
    graph = tp.DependencyGraph().build_dependency(theirs, example_inputs=image)
    for name, where in gone.items():
        graph.get_pruning_group(theirs.get_submodule(name), tp.prune_conv_out_channels, idxs=where).prune()
    expected = theirs.state_dict()
    assert small.state_dict().keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in small.state_dict().items())


def test_drop__positions_of_layers_that_share_a_width_go_together():
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.head = nn.Linear(3, 6), nn.Linear(3, 6), nn.Linear(6, 2)

        def forward(self, x):
            return self.head((self.a(x) + self.b(x)).relu())

    net, x = Sum(), torch.randn(2, 3)
    _, plan = drop(net, {"a": [0], "b": torch.tensor([4, 2])}, example=x)
    assert plan == surgery.narrow(net, positions={"a.weight:0": [1, 3, 5]}, example=x)[1]
    assert drop(net, {"a.weight:0": [0, 2, 4]}, example=x)[1] == plan
    with refused("width"):
        drop(net, {"a": [0, 1, 2], "b": [3, 4, 5]}, example=x)


def test_drop__heads_and_what_is_in_each():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.heads, self.qkv, self.out = 2, nn.Linear(8, 24), nn.Linear(8, 8)

        def forward(self, x):
            q, k, v = self.qkv(x).reshape(*x.shape[:2], 3, self.heads, 4).permute(2, 0, 3, 1, 4)
            mixed = nn.functional.scaled_dot_product_attention(q, k, v)
            return self.out(mixed.transpose(1, 2).reshape(*x.shape[:2], -1))

    net, x = Attention(), torch.randn(2, 5, 8)
    head = [part * 8 + 4 + i for part in range(3) for i in range(4)]
    small, _ = drop(net, {"qkv": head}, example=x)
    assert torch.equal(small.qkv.weight, net.qkv.weight[[i for i in range(24) if i not in head]])
    with refused("width"):
        drop(net, {"qkv": [0]}, example=x)


def test_drop__wrong_positions_are_refused():
    net = convolutions()
    for wrong, code in (
        ({"nothing": [0]}, "name"),
        ({"0": [8]}, "argument"),
        ({"0": [1, 1]}, "argument"),
        ({"0": torch.arange(8) < 3}, "argument: nonzero"),
        ({"0": []}, "argument"),
        ({"0": "ab"}, "argument"),
        ({"0": [*range(8)]}, "width"),
        ({"6": [0]}, "width"),  # classes
        ([0], "argument"),
        ({}, "argument"),
    ):
        with refused(code):
            drop(net, wrong, example=IMAGE)


def test_drop_zeros__channels_masked_by_torch_go_and_the_outputs_stay():
    net = convolutions()
    for name in ("0", "3"):
        layer = net.get_submodule(name)
        masks.ln_structured(layer, "weight", amount=0.5, n=2, dim=0)
        dead = layer.weight_mask.flatten(1).sum(1) == 0
        layer.bias.data[dead] = 0
    norm = net[1]
    norm.bias.data[net[0].weight_mask.flatten(1).sum(1) == 0] = 0
    small, _ = drop_zeros(net, example=IMAGE)
    assert (small[0].out_channels, small[3].out_channels, small[6].in_features) == (4, 3, 48)
    assert torch.allclose(small(IMAGE), net(IMAGE), atol=1e-5)
    for layer in (net[0], net[3]):  # and the same without the masks
        masks.remove(layer, "weight")
    other, _ = drop_zeros(net, example=IMAGE)
    assert torch.allclose(other(IMAGE), small(IMAGE), atol=1e-6)
    assert other[0].out_channels == 4


def test_drop_zeros__what_a_bias_or_a_norm_keeps_alive_stays_and_is_named(caplog):
    net = convolutions()
    net[0].weight.data[[1, 2]] = 0
    net[0].bias.data[[1, 2]] = 0
    net[1].bias.data[2] = 0.5
    with caplog.at_level(logging.WARNING):
        small, _ = drop_zeros(net, example=IMAGE)
    assert small[0].out_channels == 7
    assert "'0.weight:0'" in caplog.text
    assert "[2]" in caplog.text
    assert torch.allclose(small(IMAGE), net(IMAGE), atol=1e-5)


def test_drop_zeros__what_nobody_reads_goes():
    net = convolutions()
    net[3].weight.data[:, [0, 5]] = 0
    small, _ = drop_zeros(net, example=IMAGE)
    assert small[0].out_channels == 6
    assert torch.allclose(small(IMAGE), net(IMAGE), atol=1e-5)


def test_drop_zeros__a_dead_feature_of_the_example_is_not_zero():
    net = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 1))
    net[0].bias.data[:] = torch.tensor([1.0, -1e6, 1.0, 1.0])  # dead on every example
    with refused("width"):
        drop_zeros(net, example=torch.randn(3, 2))


def test_dropping__a_norm_that_counts_zeros_is_refused():
    net = nn.Sequential(nn.Linear(2, 4), nn.LayerNorm(4, bias=False), nn.Linear(4, 1))
    net[0].weight.data[1] = net[0].bias.data[1] = net[1].weight.data[1] = 0
    with refused("run"):
        drop_zeros(net, example=torch.randn(3, 2))
    small, _ = drop(net, {"0": [1]}, example=torch.randn(3, 2))
    assert small[1].normalized_shape == (3,)

import copy
import json

import pytest
import timm
import torch
from refusals import refused
from selection import some
from torch import nn
from torchvision.models import resnet
from torchvision.models.mobilenetv2 import MobileNetV2

import surgery
import zoo
from surgery.plan import Plan


def torchvision_resnet(width):
    return resnet.ResNet(resnet.Bottleneck, [1, 1, 1, 1], num_classes=7, width_per_group=width)


def timm_vit(width):
    sizes = {"embed_dim": 8 * width, "num_heads": width, "depth": 2, "img_size": 16, "patch_size": 4}
    return timm.create_model("vit_tiny_patch16_224", num_classes=7, **sizes)


def mlp(width):
    return nn.Sequential(nn.Linear(2, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 3))


FAMILIES = {
    "torchvision resnet": (torchvision_resnet, 64, 32, (2, 3, 32, 32)),
    "torchvision mobilenet": (lambda width: MobileNetV2(7, width), 0.5, 0.25, (2, 3, 32, 32)),
    "timm vit": (timm_vit, 4, 2, (2, 3, 16, 16)),
    "resnet20 of the zoo": (lambda width: zoo.create("resnet20", width=width), 1.0, 0.5, (2, 3, 32, 32)),
    "mlp": (mlp, 6, 4, (2, 2)),
}


def is_plain(value):
    return all(map(is_plain, value)) if isinstance(value, list | tuple) else isinstance(value, int | float | str)


def assert_same_plain_attributes(a, b):
    for (name, one), (_, other) in zip(a.named_modules(), b.named_modules(), strict=True):
        for key, value in vars(one).items():
            if is_plain(value):
                assert vars(other)[key] == value, (name, key)


@pytest.mark.parametrize("name", some(FAMILIES, ["torchvision resnet", "timm vit", "mlp"]))
def test_corner__the_smaller_of_a_family_is_the_leading_corner_of_the_larger(name):
    make, large, small, shape = FAMILIES[name]
    full, like = make(large), make(small)
    before = copy.deepcopy((full.state_dict(), like.state_dict()))
    got, plan = surgery.narrow(full, like=like)
    whole, values = surgery.state(full), surgery.state(got)
    assert list(values) == list(surgery.state(like))
    for key, tensor in values.items():
        assert tensor.shape == surgery.state(like)[key].shape
        assert torch.equal(tensor, whole[key][tuple(map(slice, tensor.shape))])
    assert_same_plain_attributes(got, like)
    for old, net in zip(before, (full, like)):
        assert all(torch.equal(old[key], tensor) for key, tensor in net.state_dict().items())
    memory = {t.data_ptr() for net in (full, like) for t in net.state_dict().values()}
    assert memory.isdisjoint(tensor.data_ptr() for tensor in values.values())

    built = Plan.from_json(plan.to_json()).build(full)
    assert type(built) is type(got)
    assert_same_plain_attributes(built, got)
    assert all(torch.equal(tensor, values[key]) for key, tensor in surgery.state(built).items())
    x = torch.randn(shape)
    assert torch.equal(built.eval()(x), got.eval()(x))


def test_corner__a_corner_lies_at_the_start_of_every_axis_that_is_larger():
    assert surgery.narrow(mlp(4), like=mlp(4))[1].edits == ()
    _, plan = surgery.narrow(mlp(6), like=mlp(4))
    assert plan.entries["0.weight"][0].index == (((0, 4),), None)
    assert plan.entries["3.weight"][0].index == (None, ((0, 4),))
    assert plan.entries["3.bias"][0].index == (None,)
    assert plan.entries["1.num_batches_tracked"][0].index == ()
    assert {(edit["module"], edit["attribute"]): edit["value"] for edit in plan.edits} == {
        ("0", "out_features"): 4,
        ("1", "num_features"): 4,
        ("3", "in_features"): 4,
    }


DEEP = nn.Sequential(*mlp(4), nn.Linear(3, 3))


@pytest.mark.parametrize(
    ("full", "like", "expected"),
    [
        (mlp(4), mlp(6), "mismatch: '0.weight'"),
        (DEEP, mlp(4), "mismatch: '4.weight'"),
        (mlp(4), DEEP, "mismatch: '4.weight'"),
        (nn.Linear(2, 2, bias=False), nn.Conv1d(2, 2, 1, bias=False), "mismatch: 'weight'"),
        (nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 1)), nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2)),
         "mismatch: '1.weight'"),
    ],
)  # fmt: skip
def test_corner__widths_and_depths_that_do_not_fit_are_refused(full, like, expected):
    with refused(expected):
        surgery.narrow(full, like=like)


class Holder(nn.Module):
    """Holds a width in every way that a module can."""

    def __init__(self, width, mode="a"):
        super().__init__()
        self.embed = nn.Embedding(5, width)
        self.head = nn.Linear(width, 5, bias=False)
        self.head.weight = self.embed.weight
        self.rnn = nn.LSTM(width, width)
        self.register_buffer("table", torch.arange(2.0 * width).view(width, 2).contiguous(), persistent=False)
        self.register_buffer("seen", torch.arange(float(width)))
        self.plain = torch.arange(width)
        self._width = width
        self.size = torch.Size([width, 2])
        self.sizes = [width, (width, 3)]
        self.more = list(range(9 - width))
        self.scale = width**0.5
        self.mode = mode
        self.limit = None if width > 4 else width
        self.lookup = {"width": 5}

    def forward(self, x):
        x = self.rnn(self.embed(x).view(-1, self._width))[0] + self.seen + self.plain
        return self.head(x * self.scale + self.table[:, 0])


def test_corner__a_plan_rebuilds_attributes_buffers_and_ties():
    full, like = Holder(6), Holder(3, "b")
    got, plan = surgery.narrow(full, like=like)
    built = Plan.from_json(plan.to_json()).build(full)
    assert_same_plain_attributes(got, like)
    for net in (got, built):
        assert (net._width, net.size, net.sizes, net.scale) == (3, torch.Size([3, 2]), [3, (3, 3)], 3**0.5)
        assert (net.more, net.mode, net.limit, net.rnn.hidden_size) == ([0, 1, 2, 3, 4, 5], "b", 3, 3)
        assert isinstance(net.size, torch.Size)
        assert net.head.weight is net.embed.weight
        assert torch.equal(net.table, full.table[:3])
        assert torch.equal(net.plain, full.plain[:3])
        assert torch.equal(net.seen, full.seen[:3])
    x = torch.arange(5)
    assert torch.equal(built(x), got(x))
    assert [edit["attribute"] for edit in plan.edits if edit["do"] == "slice"] == ["table", "plain"]
    json.dumps(plan.edits)


def test_corner__buffers_that_no_state_holds_must_lead_too():
    full, like = Holder(6), Holder(3)
    like.table = torch.zeros(3, 3)
    with refused("mismatch: 'table'"):
        surgery.narrow(full, like=like)


def test_corner__models_without_data_give_the_plan():
    with torch.device("meta"):
        full, like = mlp(6), mlp(4)
    got, plan = surgery.narrow(full, like=like)
    assert all(tensor.is_meta for tensor in surgery.state(got).values())
    assert got[0] is not like[0]
    real = mlp(6)
    assert plan.entries == surgery.narrow(real, like=mlp(4))[1].entries
    assert torch.equal(plan.build(real)[0].weight, real[0].weight[:4])
    with refused("values"):
        surgery.narrow(real, like=like)


def test_corner__the_copy_is_like_the_smaller_model_in_type_and_flags():
    full, like = mlp(6).double(), mlp(4).half().eval()
    like[0].weight.requires_grad_(False)
    got, _ = surgery.narrow(full, like=like)
    assert got[0].weight.dtype is torch.float16
    assert not got[0].weight.requires_grad
    assert got[0].bias.requires_grad
    assert not got.training
    assert torch.equal(got[0].weight, full[0].weight[:4].half())


def test_corner__like_is_the_one_way_to_say_the_widths_and_takes_no_options():
    net, small, x = mlp(6), mlp(4), torch.zeros(1, 3)
    for given, expected in (
        ({}, "argument: width="),
        ({"example": x}, "argument: width="),
        ({"width": 0.5, "like": small}, "argument: width"),
        ({"like": surgery.state(small)}, "argument: like"),
        ({"like": 0.5}, "argument: like"),
        ({"like": small, "scores": {}}, "argument: scores"),
        ({"like": small, "keep": ["0"], "heads": "drop"}, "argument: keep, heads"),
        ({"like": small, "rounding": 2, "output": list}, "argument: output, rounding"),
    ):
        with refused(expected):
            surgery.narrow(net, **given)
    with refused("argument: model"):
        surgery.narrow(surgery.state(net), like=small)
    assert surgery.narrow(net, like=small, example=x)[1] == surgery.narrow(net, like=small, strict=True)[1]

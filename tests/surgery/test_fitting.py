"""Checkpoints of other heads, sizes and prefixes."""

import copy

import pytest
import timm
import torch
import torchvision
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused
from torch import nn

import surgery
from surgery.lazy import LazyState, Pieces


def resnet(classes, seed):
    torch.manual_seed(seed)
    return torchvision.models.ResNet(torchvision.models.resnet.BasicBlock, [1, 1, 1, 1], num_classes=classes)


def test_fitting__another_head_is_left_or_cut():
    ours, theirs = resnet(4, 0), resnet(10, 1).state_dict()
    before = copy.deepcopy(ours.state_dict())
    net, fit = surgery.load(ours, theirs, fit="whole")
    assert net is ours
    assert set(fit.left) == set(fit.unused) == {"fc.weight", "fc.bias"}
    assert not fit.cut
    for name, tensor in net.state_dict().items():
        assert torch.equal(tensor, before[name] if name.startswith("fc.") else theirs[name])
    net, fit = surgery.load(net, theirs, fit="corner")
    assert fit.cut == {"fc.weight": ("fc.weight", (10, 512), (4, 512)), "fc.bias": ("fc.bias", (10,), (4,))}
    assert torch.equal(net.fc.weight, theirs["fc.weight"][:4])
    more, fit = surgery.load(resnet(12, 2), theirs, fit="corner")
    assert torch.equal(more.fc.weight[:10], theirs["fc.weight"])
    assert torch.equal(more.fc.weight[10:], resnet(12, 2).fc.weight[10:])
    assert "fc.weight" in str(fit)


@pytest.mark.parametrize(
    ("theirs", "ours", "prefixes"),
    [
        ("module.{}", "{}", ("module", "")),
        ("module.backbone.{}", "{}", ("module.backbone", "")),
        ("{}", "encoder.net.{}", ("", "encoder.net")),
        ("module.{}", "model.{}", ("module", "model")),
        ("_orig_mod.{}", "{}", ("_orig_mod", "")),
        ("{}", "{}", ("", "")),
    ],
)
@pytest.mark.parametrize("extra", ["none", "theirs", "ours", "both"])
def test_fitting__one_prefix_of_the_names_does_not_matter(theirs, ours, prefixes, extra):
    if extra == "both" and prefixes == ("module", "model"):  # neither prefix is one of all names
        prefixes = ("", "")

    class Wrapped(nn.Module):
        def __init__(self, net, path, head):
            super().__init__()
            name, _, rest = path.partition(".")
            if name == "{}":
                for child, module in net.named_children():
                    self.add_module(child, module)
            else:
                self.add_module(name, Wrapped(net, rest, False))
            if head:
                self.head = nn.Linear(3, 3)

    make = lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Sequential(nn.Linear(4, 2)))  # noqa: E731
    state = Wrapped(make(), theirs, extra in ("theirs", "both")).state_dict()
    model = Wrapped(make(), ours, extra in ("ours", "both"))
    heads = {n: t.clone() for n, t in model.state_dict().items() if n.startswith("head.")}
    _, fit = surgery.load(model, state, fit="whole")
    assert fit.prefixes == prefixes
    off, on = ((f"{prefix}." if prefix else "") for prefix in prefixes)
    names = [] if prefixes == ("", "") != (theirs[:-2], ours[:-2]) else list(make().state_dict())
    assert {on + name: off + name for name in names}.items() <= fit.taken.items()
    for name in names:
        assert torch.equal(model.state_dict()[on + name], state[off + name])
    if extra == "both":
        assert torch.equal(model.head.weight, state["head.weight"])
    elif extra == "ours":
        assert set(fit.left) == heads.keys()
        assert torch.equal(model.head.weight, heads["head.weight"])
    elif extra == "theirs":
        assert set(fit.unused) == {"head.weight", "head.bias"}


def test_fitting__strict_stays_the_default():
    net = nn.Linear(2, 2)
    for state in ({"module." + n: t for n, t in net.state_dict().items()}, nn.Linear(2, 3), {"weight": net.weight}):
        with refused("mismatch"):
            surgery.load(net, state)
    assert surgery.load(net, copy.deepcopy(net)) is net


def test_fitting__what_fits_in_several_ways_or_not_at_all_is_refused():
    net, other = nn.Linear(2, 2), nn.Linear(2, 2)
    two = {f"{name}.{n}": t for name in ("student", "teacher") for n, t in other.state_dict().items()}
    before = copy.deepcopy(net.state_dict())
    with refused("ambiguous"):
        surgery.load(net, two, fit="whole")
    with refused("mismatch"):
        surgery.load(net, {"conv.kernel": torch.zeros(2)}, fit="corner")
    with refused("mismatch"):
        surgery.load(net, {"weight": torch.zeros(2, 3)}, fit="whole")
    with refused("argument"):
        surgery.load(net, other, fit="all")
    with refused("mismatch"):  # complex numbers do not go into real ones; nothing is written
        surgery.load(net, {"bias": torch.ones(2), "weight": torch.zeros(2, 2, dtype=torch.complex64)}, fit="whole")
    with refused("values"):
        surgery.load(nn.Linear(2, 2, device="meta"), other, fit="whole")
    assert all(torch.equal(t, before[n]) for n, t in net.state_dict().items())


def test_fitting__a_layer_that_happens_to_agree_behind_a_prefix_is_not_taken():
    first, last = nn.ModuleList(nn.Linear(3, 4) for _ in range(6)), nn.ModuleList([nn.BatchNorm1d(3), nn.Linear(3, 2)])
    ours = nn.ModuleDict({"first": first, "last": last})
    theirs = {f"0.{name}": tensor for name, tensor in nn.BatchNorm1d(3).state_dict().items()}
    theirs |= {f"conv{k}.weight": torch.zeros(5, 4) for k in range(9)}
    with refused("mismatch"):
        surgery.load(ours, theirs, fit="whole")


def test_fitting__layers_of_one_shape_do_not_take_each_others_place():
    """A deeper or renamed model: only the layers with the state's names are taken."""
    ours = nn.Sequential(*(nn.Linear(2, 2) for _ in range(5)))
    theirs = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3))).state_dict()
    _, fit = surgery.load(ours, theirs, fit="corner")
    assert fit.prefixes == ("", "")
    assert set(fit.taken) == theirs.keys()
    assert set(fit.left) == ours.state_dict().keys() - theirs.keys()
    renamed = {name.replace("2.", "head."): tensor for name, tensor in theirs.items()}
    _, fit = surgery.load(ours, renamed, fit="corner")
    assert set(fit.unused) == {"head.weight", "head.bias"}


def test_fitting__tied_indices_and_lazy_states():
    class Tied(nn.Module):
        def __init__(self, words):
            super().__init__()
            self.table, self.head = nn.Embedding(words, 4), nn.Linear(4, words, bias=False)
            self.head.weight = self.table.weight
            self.register_buffer("index", torch.arange(words))

    ours, theirs = Tied(6), Tied(9)
    _, fit = surgery.load(ours, theirs.state_dict(), fit="corner")
    assert torch.equal(ours.table.weight, theirs.table.weight[:6])
    assert set(fit.cut) == {"table.weight"}
    assert set(fit.left) == {"index"}
    assert set(fit.unused) == {"head.weight", "index"}
    only_head = {"head.weight": torch.ones(6, 4)}
    _, fit = surgery.load(ours, only_head, fit="whole")
    assert fit.taken == {"table.weight": "head.weight"}
    assert torch.equal(ours.table.weight, only_head["head.weight"])
    lazy = LazyState({f"m.{name}": Pieces.of(tensor) for name, tensor in theirs.state_dict().items()})
    _, fit = surgery.load(ours, lazy, fit="corner")
    assert fit.prefixes == ("m", "")
    assert torch.equal(ours.table.weight, theirs.table.weight[:6])


def test_fitting__views_of_the_models_own_memory():
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    state = net.state_dict()
    swapped = {"0.weight": state["1.weight"], "1.weight": state["0.weight"]}
    expected = {name: tensor.clone() for name, tensor in swapped.items()}
    surgery.load(net, swapped, fit="whole")
    assert all(torch.equal(net.state_dict()[name], tensor) for name, tensor in expected.items())


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
@settings(max_examples=40, deadline=None)
def test_fitting__a_corner_is_what_both_have(shape, data):
    other = data.draw(st.tuples(*(st.integers(1, 4) for _ in shape)))
    net = nn.Module()
    net.w = nn.Parameter(torch.zeros(shape))
    _, fit = surgery.load(net, {"w": torch.ones(other)}, fit="corner")
    assert net.w.sum() == torch.tensor([*map(min, shape, other)]).prod()
    assert bool(fit.cut) == (list(other) != shape)


def test_fitting__models_of_timm_take_each_others_backbone():
    name, sizes = "vit_tiny_patch16_224", {"depth": 2, "img_size": 32}
    theirs = timm.create_model(name, num_classes=7, **sizes)
    state = {f"module.model.{n}": t for n, t in theirs.state_dict().items()}
    ours, fit = surgery.load(timm.create_model(name, num_classes=3, **sizes), state, fit="whole")
    head = {n for n in theirs.state_dict() if theirs.state_dict()[n].shape != ours.state_dict()[n].shape}
    assert set(fit.left) == head
    assert all(torch.equal(t, theirs.state_dict()[n]) for n, t in ours.state_dict().items() if n not in head)


@pytest.mark.parametrize(
    ("small", "full"),
    [
        (nn.Sequential(nn.LSTM(4, 3), nn.Linear(3, 2)), nn.Sequential(nn.LSTM(4, 6), nn.Linear(6, 2))),
        (nn.Sequential(nn.GRU(4, 3), nn.Linear(3, 2)), nn.Sequential(nn.GRU(4, 6), nn.Linear(6, 2))),
        (nn.MultiheadAttention(4, 2), nn.MultiheadAttention(8, 2)),
    ],
)
def test_fitting__a_corner_of_packed_parts_is_left_since_it_would_mix_them(small, full):
    _, fit = surgery.load(small, full.state_dict(), fit="corner")
    packed = {name for name in small.state_dict() if name.startswith(("0.weight", "0.bias", "in_proj"))}
    assert packed == {*fit.left}
    _, fit = surgery.load(nn.LSTM(3, 3), nn.LSTM(4, 3).state_dict(), fit="corner")
    assert "weight_ih_l0" in fit.cut  # fewer inputs are a corner of each gate


def test_fitting__another_model_that_shares_a_few_tensors_is_refused():
    one, other = nn.ModuleDict(), nn.ModuleDict()
    for k in range(11):
        one[f"a{k}"], other[f"b{k}"] = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    one["same"], other["same"] = nn.Linear(3, 2, bias=False), nn.Linear(3, 2, bias=False)
    before = surgery.state(surgery.copying.clone(one))
    with refused("mismatch: 'same.weight'"):
        surgery.load(one, other, fit="whole")
    assert all(torch.equal(before[name], tensor) for name, tensor in surgery.state(one).items())
    _, fit = surgery.load(one, {"same.weight": other["same"].weight}, fit="whole")
    assert [*fit.taken] == ["same.weight"]

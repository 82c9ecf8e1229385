"""Copies of modules, held to copy.deepcopy."""

import copy
import weakref
from collections import OrderedDict
from types import MethodType

import pytest
import timm
import torch
from refusals import refused
from torch import Tensor, nn
from torch.nn import functional as F

import surgery
from surgery.copying import clone


class Tangled(nn.Module):
    """Modules and containers that are reached on several ways."""

    def __init__(self):
        super().__init__()
        self.one = self.two = nn.Linear(3, 3)
        self.tied = nn.Linear(3, 3)
        self.tied.weight = self.one.weight
        self.listed = [self.one, {"two": self.two}]
        self.empty = self.one.shared = self.two.shared = {}
        self.names = self.tied.names = OrderedDict(a=[1])
        self.children_too = self._modules
        self.shape, self.mixed, self.kinds = (1, 2.0, "x", None), (1, [2]), {int, float}
        self.tied.register_forward_hook(lambda module, given, result: result + 1)
        self.register_buffer("gone", torch.ones(2), persistent=False)
        self.marks = OrderedDict()
        self.marks.note = "an attribute of an empty dictionary"

    def forward(self, x):
        return self.tied(self.two(self.one(x)))


class Careful(nn.Linear):
    """Says itself how it is copied."""

    def __deepcopy__(self, memo):
        made = Careful(self.in_features, self.out_features)
        made.of = "its own copy"
        return made


class Slotted(nn.Linear):
    """Has an attribute that is not in its dictionary."""

    __slots__ = ("aside",)


def slotted() -> nn.Module:
    net = nn.Sequential(Slotted(2, 2))
    object.__setattr__(net[0], "aside", [1])
    return net


def same(a, b, seen: dict) -> bool:
    """Whether two copies are alike, and equally tangled: one object here for one object there."""
    if id(a) in seen:
        return seen[id(a)] is b
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        seen[id(a)] = b
        return torch.equal(a, b) and a.requires_grad == b.requires_grad
    if isinstance(a, dict | list | nn.Module):
        seen[id(a)] = b
    if isinstance(a, nn.Module):
        return same(vars(a), vars(b), seen) and getattr(a, "aside", 0) == getattr(b, "aside", 0)
    if isinstance(a, dict):
        inside = same(list(a), list(b), {}) and all(same(a[key], b[key], seen) for key in a)
        return inside and vars(a) == vars(b) if type(a) is OrderedDict else inside
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y, seen) for x, y in zip(a, b))
    if isinstance(a, weakref.ref):
        return same(a(), b(), seen)
    return vars(a).keys() == vars(b).keys() if hasattr(a, "__dict__") else a == b


@pytest.mark.parametrize(
    "make",
    [
        Tangled,
        lambda: nn.Sequential(Careful(2, 2), nn.ReLU()),
        slotted,
        lambda: timm.create_model("test_resnet"),
        lambda: nn.TransformerEncoderLayer(8, 2, 16),
        lambda: nn.LSTM(3, 4, 2),
        lambda: nn.utils.parametrizations.weight_norm(nn.Conv2d(2, 3, 3)),
        lambda: nn.ParameterDict({"a": torch.ones(2)}),
        lambda: torch.fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2), nn.ReLU())),
    ],
)
def test_copying__a_clone_is_what_deepcopy_makes(make):
    model = make()
    ours = clone(model)
    if isinstance(model, torch.fx.GraphModule):
        assert ours.code == model.code
        assert ours.get_submodule("0").weight is not model.get_submodule("0").weight
        return
    if isinstance(model[0] if isinstance(model, nn.Sequential) else None, Careful):
        assert ours[0].of == "its own copy"
        return
    assert same(copy.deepcopy(model), ours, {})
    theirs = {id(tensor) for tensor in model.state_dict(keep_vars=True).values()}
    assert theirs.isdisjoint(id(tensor) for tensor in ours.state_dict(keep_vars=True).values())


def test_narrow__a_forward_that_holds_modules_of_the_model_is_refused():
    """A copy would run, and train, the original's."""
    x = torch.randn(4, 3)

    def made():
        return nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 2)).eval()

    def patched(net):
        old = net[0].forward
        net[0].forward = lambda x: 2 * old(x)

    def whole(net):
        net.forward = lambda x: net[2](net[0](x).tanh())

    def compiled(net):
        net.forward = torch.compile(net.forward, backend="eager")

    for patch in (patched, whole, compiled):
        patch(net := made())
        with refused("unsupported"):
            surgery.narrow(net, 0.5, x)
    net = made()
    net[0].forward = MethodType(lambda layer, x: 2 * F.linear(x, layer.weight, layer.bias), net[0])
    small, _ = surgery.narrow(net, 0.5, x, strict=True)
    small(x).sum().backward()
    assert small[0].weight.grad is not None
    assert net[0].weight.grad is None


def test_narrow__a_copy_of_a_module_that_was_compiled_in_place_is_not_compiled():
    """The compiled call is the original's: an unshrunk model, without a word, was the result."""
    net, x = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 2)).eval(), torch.randn(4, 3)
    net.compile(backend="eager")
    small, _ = surgery.narrow(net, 0.5, x, strict=True)
    assert small[0].out_features == 3
    assert small._compiled_call_impl is None
    assert net._compiled_call_impl is not None


def test_narrow__a_hook_that_holds_modules_of_the_model_is_refused():
    """A copy's hook would run the original's layers; one that holds something else is copied as it is."""
    net, seen = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 2)).eval(), []
    handle = net[0].register_forward_hook(lambda module, given, result: result + net[0].bias)
    with refused("unsupported"):
        surgery.narrow(net, 0.5, torch.randn(4, 3))
    handle.remove()
    net[0].register_forward_hook(lambda module, given, result: seen.append(result.shape))
    small, _ = surgery.narrow(net, 0.5, torch.randn(4, 3), strict=True)
    small(torch.randn(5, 3))
    assert seen[-1] == (5, 3)


def test_narrow__a_compiled_model_is_refused_with_the_way_out():
    compiled = torch.compile(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), backend="eager")
    with refused("unsupported: model._orig_mod"):
        surgery.narrow(compiled, 0.5, torch.zeros(1, 3))


@pytest.mark.parametrize("place", ["0", "1.0"])
def test_narrow__a_compiled_submodule_names_the_original(place):
    net = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 2))
    net.set_submodule(place, torch.compile(net.get_submodule(place), backend="eager"))
    for operation in (surgery.narrow, surgery.pruning.prune):
        given = {"width": 0.5} if operation is surgery.narrow else {"target": surgery.pruning.Target(macs=0.5)}
        with refused(f"unsupported: {place}._orig_mod"):
            operation(net, example=torch.zeros(2, 3), **given)
    with refused(f"unsupported: {place}._orig_mod"):
        surgery.narrow(net, like=net)
    net.set_submodule(place, net.get_submodule(f"{place}._orig_mod"))  # the way out that the message names
    assert surgery.narrow(net, 0.5, torch.zeros(2, 3))[0][0].out_features == 2

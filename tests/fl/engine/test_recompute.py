"""Activation checkpointing: a block is computed twice, and a client learns what it learns without."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import surgery
from fl import engine
from fl.base.errors import FLError
from fl.base.rng import Rng
from fl.engine import Precision
from fl.engine.objectives import cross_entropy
from fl.models.adapted import AdapterOptions

pytestmark = pytest.mark.slow

RECOMPUTED = Precision(recompute=True)
CALLS = []


class Block(nn.Module):
    """Draws, norms over the batch, and has buffers that change: in place, and by a new tensor in their place."""

    def __init__(self):
        super().__init__()
        self.one, self.norm, self.two = nn.Linear(16, 16), nn.BatchNorm1d(16, momentum=None), nn.Linear(16, 16)
        self.register_buffer("shift", torch.zeros(16))
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, x):
        CALLS.append(self.training)
        hidden = F.dropout(self.norm(self.one(x) + self.shift), 0.3, self.training)
        if self.training:
            self.shift.add_(0.1)
            self.mean = 0.5 * self.mean + hidden.detach().mean(0)
        return x + torch.tanh(self.two(hidden)) - 0.1 * self.mean


class Net(nn.Sequential):
    def __init__(self):
        torch.manual_seed(0)
        blocks = nn.Sequential(Block(), Block(), Block())
        super().__init__(nn.Flatten(), nn.Linear(64, 16), blocks, nn.Dropout(0.2), nn.Linear(16, 3))


def trained(fed, backend, k=3, **how):
    """The first k clients from one start."""
    return fed.with_local(backend=backend).train(surgery.broadcast(fed.initial(), k), list(range(k)), Rng(0, 1), **how)


def assert_close(one, other):
    torch.testing.assert_close((one.loss, one.states), (other.loss, other.states), rtol=1e-12, atol=1e-12)


def elsewhere(call, params, context, batch):
    """The loss at other parameters than the model's own, and at its own."""
    there = {name: 1.5 * p for name, p in params.items()}
    return cross_entropy(call, there, context, batch) + cross_entropy(call, params, context, batch)


@pytest.mark.parametrize("backend", ["loop", "workers"])
@pytest.mark.parametrize("case", ["plain", "elsewhere", "ahead", "lora"])
def test_clients_learn_the_same(make_federation, backend, case):
    adapters = AdapterOptions("lora", rank=2, modules=("*.one", "1"), dropout=0.5, train=("*.norm",))
    fed = make_federation(Net().double(), adapters=adapters if case == "lora" else None)
    how = {"elsewhere": {"objective": elsewhere}, "ahead": {"ascent": lambda p, g: {n: 0.1 * t for n, t in g.items()}}}
    plain = trained(fed, backend, **how.get(case, {}))
    CALLS.clear()
    again = trained(fed.with_local(precision=RECOMPUTED), backend, **how.get(case, {}))
    assert_close(again, plain)
    twice = len(CALLS)
    CALLS.clear()
    trained(fed, backend, **how.get(case, {}))
    assert twice == 2 * len(CALLS) > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet20", "mobilenetv2", "vit_tiny"])
def test_models_of_the_zoo_learn_the_same(make_federation, name):
    fed = make_federation(name, dtype=torch.float64)
    assert_close(trained(fed.with_local(precision=RECOMPUTED), "loop"), trained(fed, "loop"))


def test_fused_attention_is_recomputed(make_federation):
    """Torch tags its fused attention as random even where it drops nothing."""

    class Attends(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

        def forward(self, x):
            q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).unbind(2)
            heads = (t.transpose(1, 2) for t in (q, k, v))
            return x + self.out(F.scaled_dot_product_attention(*heads, dropout_p=0.0).transpose(1, 2).flatten(2))

    torch.manual_seed(0)
    blocks = nn.Sequential(Attends(), Attends())
    net = nn.Sequential(nn.Flatten(), nn.Unflatten(1, (4, 16)), blocks, nn.Flatten(), nn.Linear(64, 3))
    fed = make_federation(net)
    plain, again = (trained(one, "loop") for one in (fed, fed.with_local(precision=RECOMPUTED)))
    torch.testing.assert_close(again.states, plain.states)


def test_a_step_keeps_less(make_federation):
    """Of each block its input, and no activation."""

    def kept(fed):
        seen = {}
        with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.setdefault(t.data_ptr(), t), lambda t: t):
            trained(fed, "loop", 1)
        return len(seen)

    fed = make_federation(Net())
    assert kept(fed.with_local(precision=RECOMPUTED)) < kept(fed)


@pytest.mark.parametrize(
    ("model", "settings", "message"),
    [
        (Net, {"backend": "vmap"}, "one client at a time: use --backend loop or workers"),
        (lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 3)), {}, "Sequential has no residual blocks"),
    ],
)
def test_what_cannot_be_recomputed_is_refused(make_federation, model, settings, message):
    with pytest.raises(FLError, match=message):
        trained(make_federation(model(), precision=RECOMPUTED, **settings), settings.get("backend", "loop"))


def test_graphs_are_refused_and_auto_takes_neither(make_federation):
    with pytest.raises(FLError, match="activation-checkpointing"):
        engine.check("graphs", torch.device("cuda"), RECOMPUTED)
    fed = make_federation(Net(), precision=RECOMPUTED)
    trained(fed, "auto")
    assert {*fed.local.chosen.values()} <= {"loop", "workers"}

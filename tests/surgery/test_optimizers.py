"""Optimizers after surgery, beside optimizers that are built by hand."""

import copy

import pytest
import torch
import torchvision
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused
from torch import nn

import surgery
from surgery.optimizers import follow
from surgery.plan import Plan, Source, as_runs

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True, foreach=False),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01, initial_accumulator_value=0.1),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.01),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
}


def mlp(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        return x + self.b(self.a(x).relu())


X, Y = torch.randn(32, 3, generator=torch.Generator().manual_seed(1)), torch.arange(32) % 2


def loss_of(net):
    return nn.functional.cross_entropy(net(X), Y)


def train(net, optimizer, steps=3):
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        losses.append(loss_of(net))
        losses[-1].backward()
        optimizer.step()
    return [loss.item() for loss in losses]


def assert_equal(a, b):
    """Two state dicts of optimizers."""
    assert a["param_groups"] == b["param_groups"]
    assert a["state"].keys() == b["state"].keys()
    for number, entries in a["state"].items():
        assert entries.keys() == b["state"][number].keys()
        for key, value in entries.items():
            other = b["state"][number][key]
            same = torch.equal(value, other) if isinstance(value, torch.Tensor) else value == other
            assert same, key
            assert type(value) is type(other)


def by_hand(make, optimizer, before, after, index):
    """An optimizer over the new model, with the entries of the old one's state indexed as the weights are."""
    made = make(after.parameters())
    for (name, old), new in zip(before.named_parameters(), after.parameters(), strict=True):
        for key, value in optimizer.state.get(old, {}).items():
            moment = isinstance(value, torch.Tensor) and value.shape == old.shape
            made.state[new][key] = (
                value[torch.meshgrid(*index[name], indexing="ij")] if moment else copy.deepcopy(value)
            )
    return made


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_narrow__a_cut_network_goes_on_as_with_an_optimizer_by_hand(kind):
    net = mlp()
    optimizer = OPTIMIZERS[kind](net.parameters())
    train(net, optimizer)
    kept = copy.deepcopy(optimizer.state_dict())
    hidden, last = torch.tensor([1, 2, 6]), torch.tensor([0, 5])
    where = {"0.weight:0": hidden, "3.weight:0": last}
    small, plan = surgery.narrow(net, positions=where, example=X)
    moved = follow(optimizer, net, small, plan)
    index = {"0.weight": (hidden, torch.arange(3)), "3.weight": (last, hidden), "5.weight": (torch.arange(2), last)}
    index |= {"0.bias": (hidden,), "1.weight": (hidden,), "1.bias": (hidden,), "3.bias": (last,)}
    index |= {"5.bias": (torch.arange(2),)}
    hand = by_hand(OPTIMIZERS[kind], optimizer, net, small, index)
    assert type(moved) is type(optimizer)
    assert_equal(moved.state_dict(), hand.state_dict())
    twin = copy.deepcopy(small)
    beside = OPTIMIZERS[kind](twin.parameters())
    beside.load_state_dict(hand.state_dict())
    train(small, moved), train(twin, beside)
    assert all(map(torch.equal, small.parameters(), twin.parameters()))
    assert_equal(optimizer.state_dict(), kept)  # the input is as it was


@pytest.mark.parametrize("mode", ["copy", "zero"])
@pytest.mark.parametrize("kind", ["momentum", "adam", "adamw", "rmsprop"])
def test_widen__moments_of_a_wider_network_repeat_as_its_weights_do(kind, mode):
    net = mlp()
    optimizer = OPTIMIZERS[kind](net.parameters())
    train(net, optimizer)
    wide, plan = surgery.widening.widen(net, rate=1.5, example=X, mode=mode)
    moved = follow(optimizer, net, wide, plan)
    hidden, last = torch.arange(12) % 8, torch.arange(9) % 6
    index = {"0.weight": (hidden, torch.arange(3)), "3.weight": (last, hidden), "5.weight": (torch.arange(2), last)}
    index |= {"0.bias": (hidden,), "1.weight": (hidden,), "1.bias": (hidden,), "3.bias": (last,)}
    index |= {"5.bias": (torch.arange(2),)}
    assert_equal(moved.state_dict(), by_hand(OPTIMIZERS[kind], optimizer, net, wide, index).state_dict())


@pytest.mark.parametrize("operation", ["wider", "deeper"])
def test_optimizers__the_loss_does_not_jump_where_the_function_stays(operation):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 16), Block(), Block(), nn.Linear(16, 2))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.003)
    losses = train(net, optimizer, 20)
    if operation == "wider":
        other, plan = surgery.widening.widen(net, rate=1.5, example=X)
    else:
        other, plan = surgery.graft(net, depths=[4], mode="identity", example=X)
    straight = train(copy.deepcopy(net), copy.deepcopy(optimizer), 1)
    after = train(other, follow(optimizer, net, other, plan), 15)
    assert after[0] == pytest.approx(straight[0], rel=1e-4)
    assert max(after) < losses[-1]
    assert after[-1] < 0.9 * after[0]


@pytest.mark.parametrize("operation", ["narrow", "prune", "ungraft", "permute", "widen", "graft", "identity"])
def test_optimizers__every_operation_is_followed(operation):
    """Moments that equal the weights before are the weights where they lie after."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 16), Block(), Block(), Block(), nn.Linear(16, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    train(net, optimizer, 1)
    for parameter, entries in optimizer.state.items():
        entries["momentum_buffer"] = parameter.detach().clone()
    order = torch.randperm(16).tolist()
    other, plan = {
        "narrow": lambda: surgery.narrow(net, 0.5, X),
        "prune": lambda: surgery.pruning.prune(net, example=X, target=surgery.pruning.Target(macs=0.6), steps=2)[:2],
        "ungraft": lambda: surgery.ungraft(net, keep=[[0, 2]]),
        "permute": lambda: surgery.symmetry.permute(net, {"1.a.weight:0": order}, example=X),
        "widen": lambda: surgery.widening.widen(net, rate=2, example=X, mode="copy"),
        "graft": lambda: surgery.graft(net, depths=[5]),
        "identity": lambda: surgery.graft(net, depths=[4], mode="identity", example=X),
    }[operation]()
    moved = follow(optimizer, net, other, plan)
    assert [id(p) for p in moved.param_groups[0]["params"]] == [id(p) for p in other.parameters()]
    new = {id(p) for name, p in other.named_parameters() if name.startswith("4.")} if operation == "identity" else ()
    for name, parameter in other.named_parameters():
        if id(parameter) in new:
            assert parameter not in moved.state
            continue
        momentum = moved.state[parameter]["momentum_buffer"]
        if operation == "widen" and not name.endswith("bias"):  # weights that read a width are shared out
            assert momentum.shape == parameter.shape
            assert momentum.ne(0).all()
        else:
            assert torch.equal(momentum, parameter), name
    losses = train(other, moved, 2)
    assert all(map(torch.isfinite, map(torch.tensor, losses)))


def test_graft__groups_options_names_and_frozen_parameters_stay():
    net = nn.Sequential(nn.Linear(3, 16), Block(), Block(), nn.Linear(16, 2))
    net[0].bias.requires_grad_(False)
    named = [(name, p) for name, p in net.named_parameters() if p.requires_grad]
    groups = [
        {"params": [(n, p) for n, p in reversed(named) if p.ndim == 1], "weight_decay": 0.0, "lr": torch.tensor(0.5)},
        {"params": [(n, p) for n, p in named if p.ndim > 1], "amsgrad": True, "betas": (0.5, 0.9)},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # puts a method of its own there
    small, plan = surgery.narrow(net, 0.5, X)
    deeper, twice = surgery.graft(small, depths=[3], mode="identity", example=X)
    moved = follow(follow(optimizer, net, small, plan), small, deeper, twice)
    vectors, matrices = (group["param_names"] for group in moved.param_groups)
    assert vectors[0] == "4.bias"  # in the order that it had
    assert set(vectors) == {"4.bias", *(f"{i}.{ab}.bias" for i in (1, 2, 3) for ab in "ab")}
    assert matrices == [name for name, p in deeper.named_parameters() if p.ndim > 1]
    shapes = [[p.shape for p in group["params"]] for group in moved.param_groups]
    parameters = dict(deeper.named_parameters())
    assert shapes == [[parameters[name].shape for name in names] for names in (vectors, matrices)]
    for old, new in zip(optimizer.param_groups, moved.param_groups, strict=True):
        assert {k: v for k, v in old.items() if "param" not in k} == {k: v for k, v in new.items() if "param" not in k}
    assert moved.param_groups[0]["lr"] is not optimizer.param_groups[0]["lr"]
    train(deeper, moved)
    assert optimizer.state == {}


def test_optimizers__tied_weights_are_one_parameter():
    net = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3), nn.Linear(3, 2))
    net[2].weight = net[0].weight
    optimizer = torch.optim.Adam(net.parameters())
    train(net, optimizer)
    whole = {name: (Source(name, (None,) * t.ndim),) for name, t in surgery.state(net).items()}
    other = copy.deepcopy(net)
    moved = follow(optimizer, net, other, Plan(whole, {n: t.shape for n, t in surgery.state(net).items()}))
    assert len(moved.state) == len(optimizer.state) == 5
    assert_equal(moved.state_dict(), optimizer.state_dict())
    assert moved.state[other[2].weight]["exp_avg"].data_ptr() != optimizer.state[net[2].weight]["exp_avg"].data_ptr()


def test_narrow__states_without_the_shapes_of_their_tensors():
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    x = torch.randn(4, 8)
    small, plan = surgery.narrow(net, {"0": 0.5}, x)

    def trained(optimizer):
        net(x).sum().backward()
        optimizer.step(lambda: net(x).sum())
        return optimizer

    for optimizer in (torch.optim.Adafactor(net.parameters()), torch.optim.LBFGS(net.parameters())):
        follow(optimizer, net, small, plan)  # without a state there is nothing that could not follow
        with refused("unsupported"):
            follow(trained(optimizer), net, small, plan)
    only_head = torch.optim.Adafactor(net[4].parameters())  # which is not cut
    moved = follow(trained(only_head), net, small, plan)
    assert_equal(moved.state_dict(), only_head.state_dict())

    square = torch.optim.SGD(net.parameters(), lr=0.1)
    for p in net.parameters():  # a factor for each axis, which for a square matrix has the matrix' shape
        square.state[p] = {"factor": torch.eye(p.shape[0])}
    with refused("unsupported"):
        follow(square, net, small, plan)
    for p in net.parameters():
        square.state[p] = {"step": torch.ones(1), "count": torch.tensor(3), "k": 2, "none": None, "mu": torch.ones(1)}
    assert follow(square, net, small, plan).state[small[0].weight] == square.state[net[0].weight]
    for p in net.parameters():
        square.state[p] = {"history": [torch.zeros_like(p)]}
    with refused("unsupported"):
        follow(square, net, small, plan)


def test_narrow__what_is_around_an_optimizer_and_what_it_holds():
    net = mlp()
    small, plan = surgery.narrow(net, 0.5, X)

    class Own(torch.optim.SGD):
        def __init__(self, params, rank):
            super().__init__(params, lr=0.1, momentum=0.9)
            self.rank, self.first = rank, self.param_groups[0]["params"][0]

    moved = follow(Own(net.parameters(), 3), net, small, plan)
    assert moved.rank == 3
    assert moved.first is small[0].weight
    train(small, moved, 1)
    outer = Own(net.parameters(), 3)
    outer.inner = torch.optim.SGD(net.parameters())
    with refused("unsupported"):
        follow(outer, net, small, plan)


def test_narrow__what_does_not_belong_together_is_refused():
    net = mlp()
    small, plan = surgery.narrow(net, 0.5, X)
    optimizer = torch.optim.Adam(net.parameters())
    with refused("mismatch"):
        follow(optimizer, net, surgery.narrow(net, 0.25, X)[0], plan)
    with refused("mismatch"):
        follow(optimizer, copy.deepcopy(net), small, plan)
    for wrong in ((net, net, small, plan), (optimizer, net, small, net), (optimizer, None, small, plan)):
        with refused("argument"):
            follow(*wrong)
    with refused("argument"):
        follow(optimizer, net, small, plan, new="mean")


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_optimizers__there_and_back_is_the_identity(data):
    sizes = data.draw(st.lists(st.integers(1, 5), min_size=2, max_size=3))
    kept = [data.draw(st.permutations(range(n)).map(lambda p: p[: max(1, len(p) // 2)])) for n in sizes]
    full, small = (nn.Module() for _ in range(2))
    full.w, small.w = nn.Parameter(torch.randn(sizes)), nn.Parameter(torch.randn([len(k) for k in kept]))
    plan = Plan({"w": (Source("w", tuple(map(as_runs, kept))),)}, {"w": tuple(sizes)})
    kind = data.draw(st.sampled_from(["momentum", "adam", "nadam", "asgd"]))
    optimizer = OPTIMIZERS[kind](small.parameters())
    small.w.grad = torch.randn_like(small.w)
    optimizer.step()
    for new in ("repeat", "zero"):
        larger = follow(optimizer, small, full, plan, new=new)
        assert_equal(follow(larger, full, small, plan).state_dict(), optimizer.state_dict())
        for value in larger.state[full.w].values():
            if new == "zero" and isinstance(value, torch.Tensor) and value.shape == full.w.shape and value.ndim:
                inside = torch.zeros(sizes, dtype=torch.bool)
                inside[torch.meshgrid(*map(torch.tensor, kept), indexing="ij")] = True
                assert not value[~inside].any()
                assert kind == "asgd" or value[inside].ne(0).all()


def test_narrow__a_residual_network_of_torchvision_that_is_cut():
    blocks = torchvision.models.resnet.BasicBlock
    net = torchvision.models.ResNet(blocks, [1, 1, 1, 1], num_classes=4).eval()
    image = torch.randn(2, 3, 32, 32)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=0.1)
    for parameter in net.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    small, plan = surgery.narrow(net, 0.25, image)
    moved = follow(optimizer, net, small, plan)
    for name, parameter in small.named_parameters():
        old = optimizer.state[net.get_parameter(name)]
        corner = tuple(slice(n) for n in parameter.shape)
        assert torch.equal(moved.state[parameter]["exp_avg_sq"], old["exp_avg_sq"][corner])
        assert moved.state[parameter]["step"] == 1

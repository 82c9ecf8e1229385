"""Scores of widths against plain PyTorch by hand, zeros that were planted, and torch-pruning's own scores."""

import copy

import pytest
import torch
import torch.nn.functional as F
from refusals import refused
from selection import some
from symmetric import Made
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from surgery import adapters, load, narrow, state
from surgery.inspect.report import count_macs
from surgery.pruning import Target, importance
from surgery.pruning import prune as prune_to
from surgery.pruning.target import Cost
from surgery.width.axes import Axis, product, unify
from surgery.width.choose import Demand, TracedScores, choose
from surgery.width.solve import solve
from surgery.width.trace import Trace, trace_model

tp = pytest.importorskip("torch_pruning")

IMAGE = torch.zeros(2, 3, 6, 6)


def randomized(model, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for tensor in state(model).values():
        if tensor.is_floating_point():
            tensor.copy_(torch.rand(tensor.shape, generator=generator) * 0.9 + 0.1)
    return model.double().eval()


class Residual(nn.Module):
    def __init__(self, c, middle):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(c, middle, 3, padding=1, bias=False), nn.BatchNorm2d(middle)
        self.conv2, self.norm2 = nn.Conv2d(middle, c, 1), nn.BatchNorm2d(c)

    def forward(self, x):
        return F.relu(x + self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))


class Attention(nn.Module):
    """Scores are not scaled, so that zeros in a head change nothing."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads, self.head_dim = heads, dim // heads
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x):
        b, n, _ = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.heads, self.head_dim).permute(2, 0, 3, 1, 4)
        return x + self.proj(((q @ k.mT).softmax(-1) @ v).transpose(1, 2).reshape(b, n, -1))


def residual(c=8, first=6, second=4):
    blocks = Residual(c, first), Residual(c, second)
    return nn.Sequential(nn.Conv2d(3, c, 3), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(c, 5))


def grouped():
    return nn.Sequential(
        nn.Conv2d(3, 12, 3), nn.Conv2d(12, 12, 3, groups=3), nn.ReLU(), nn.Conv2d(12, 12, 1, groups=12),
        nn.Flatten(), nn.Linear(48, 5),
    )  # fmt: skip


def chunked():
    """Two halves, one of which gates the other; then both the result and the input go on."""

    def gated(net, x):
        a, b = net.conv(x).chunk(2, 1)
        return torch.cat([a * b, x], 1)

    parts = Made(gated, conv=nn.Conv2d(6, 12, 1)), nn.Conv2d(12, 4, 1), nn.Flatten(), nn.Linear(64, 5)
    return nn.Sequential(nn.Conv2d(3, 6, 3), *parts)


def attention():
    return nn.Sequential(nn.Flatten(2), nn.Linear(36, 24), Attention(24, 3), nn.Flatten(), nn.Linear(72, 5))


NETS = [residual, grouped, chunked, attention]


def arbitrary(net, seed=0):
    """Scores without any order."""
    generator = torch.Generator().manual_seed(seed)
    found = importance(net, example=IMAGE.double())
    return {name: torch.rand(len(values), generator=generator) for name, values in found.items()}


PLANTED = [(make, heads) for make in NETS for heads in ("inside", "drop")]


@pytest.mark.parametrize(
    ("make", "heads"), some(PLANTED, [case for case in PLANTED if case[1] == "inside" or case[0] is attention])
)
def test_importance__planted_zeros_are_cut(make, heads):
    """Zeros at arbitrary positions of every width: these positions go, and the outputs stay."""
    net, x = randomized(make()), torch.rand(2, 3, 6, 6).double()
    _, planted = narrow(net, 0.5, x, scores=arbitrary(net), heads=heads)
    assert any(len(runs or ()) > 1 for sources in planted.entries.values() for runs in sources[0].index)
    load(net, planted.embed(planted.extract(state(net)))[0])
    for by in ("l1", "l2", lambda name, rows, axis: rows.abs().amax(1)):
        small, plan = narrow(net, 0.5, x, scores=importance(net, example=x, by=by), heads=heads)
        assert plan.entries == planted.entries
        with torch.no_grad():
            torch.testing.assert_close(small(x), net(x))


@pytest.mark.parametrize("make", NETS)
def test_importance__falling_scores_keep_the_first(make):
    net = randomized(make())
    falling = {name: -torch.arange(len(values)) for name, values in arbitrary(net).items()}
    _, first = narrow(net, 0.5, IMAGE.double())
    _, best = narrow(net, 0.5, IMAGE.double(), scores=falling)
    _, equal = narrow(net, 0.5, IMAGE.double(), scores={n: torch.ones(len(v)) for n, v in falling.items()})
    assert best == first == equal


def two_layers():
    return randomized(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2)))


def squared(model, batch):
    return (model(batch[0]) - batch[1]).square().mean()


BATCHES = [(torch.rand(5, 3).double(), torch.rand(5, 2).double()) for _ in range(2)]


def by_hand(net, by):
    """The score of each of the four hidden units."""
    parts = [(net[0].weight, 1), (net[0].bias, None), (net[1].weight, None), (net[1].bias, None), (net[3].weight, 0)]
    gradients = [torch.autograd.grad(squared(net, batch), [w for w, _ in parts]) for batch in BATCHES]
    if by == "bn_scale":
        return net[1].weight.abs()
    if by == "activation":
        return torch.stack([F.relu(net[1](net[0](x))).abs().mean(0) for x, _ in BATCHES]).mean(0)
    total, biases = 0, (net[0].bias, net[1].bias)
    left_out = {"l1": biases, "l2": biases, "taylor": (*biases, net[1].weight)}.get(by, ())
    for (w, other), *grads in zip(parts, *gradients):
        if any(w is one for one in left_out):
            continue
        score = {
            "l1": w.abs(),
            "l2": w.square(),
            "taylor": (w * torch.stack(grads).mean(0)).abs(),
            "fisher": w.square() * torch.stack(grads).square().mean(0),
        }[by]
        total = total + (score if other is None else score.sum(other))
    return total


def scored(net, by):
    batches = [x for x, _ in BATCHES] if by == "activation" else BATCHES
    return importance(net, example=torch.zeros(2, 3).double(), by=by, batches=batches, loss=squared)


@pytest.mark.parametrize("by", ["l1", "l2", "bn_scale", "taylor", "fisher", "activation"])
def test_importance__criteria_are_what_they_say(by):
    net = two_layers()
    net.train()
    net[3].weight.requires_grad_(False)
    before = copy.deepcopy(net.state_dict())
    found = scored(net, by)
    assert all(torch.equal(before[name], tensor) for name, tensor in net.state_dict().items())
    assert all(p.grad is None for p in net.parameters())
    assert not net[3].weight.requires_grad
    assert all(m.training and not m._forward_hooks and not m._forward_pre_hooks for m in net.modules())
    net.eval().requires_grad_(True)
    assert found.keys() == {"0.weight:0"}
    torch.testing.assert_close(found["0.weight:0"], by_hand(net, by).detach(), rtol=1e-5, atol=0)  # float32 gradients
    order = torch.tensor([2, 0, 3, 1])
    permuted = copy.deepcopy(net)
    with torch.no_grad():
        for name, tensor in state(permuted).items():
            if tensor.ndim and not name.startswith("3."):
                tensor.copy_(tensor[order])
        permuted[3].weight.copy_(net[3].weight[:, order])
    torch.testing.assert_close(scored(permuted, by)["0.weight:0"], found["0.weight:0"][order], rtol=1e-5, atol=0)


def test_importance__structured_axes_are_summed_by_part():
    """Of 3 * heads * dimension rows a head gets the sum over all its dimensions, and a dimension that over heads."""
    net = randomized(attention())
    found = importance(net, example=IMAGE.double())
    layer = net[2]
    rows = layer.qkv.weight.abs().sum(1).view(3, 3, 8)
    columns = layer.proj.weight.abs().sum(0).view(3, 8)
    torch.testing.assert_close(found["2.proj.weight:1:0"], (rows.sum((0, 2)) + columns.sum(1)).detach())
    torch.testing.assert_close(found["2.proj.weight:1:1"], (rows.sum((0, 1)) + columns.sum(0)).detach())


def test_importance__scores_follow_widths_that_turn_out_to_be_one():
    """Also where one of them has digits: two heads of three positions."""
    net = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 2), nn.Linear(2, 3), nn.Linear(3, 1))
    trace = trace_model(net, torch.zeros(1, 4)).found
    scores = {"0.weight:0": torch.arange(6), "1.weight:0": 10 * torch.arange(6), "3.weight:0": torch.ones(3)}
    follow = TracedScores(trace, scores)
    first, second, third = (trace.tensors[name, "weight"][0] for name in ("0", "1", "3"))
    unify(first, second)
    solution = solve(trace)
    assert follow(solution)[solution.axis_of(second)].tolist() == [0, 11, 22, 33, 44, 55]
    heads = Axis(2)
    unify(first, product([heads, third]))
    solution = solve(trace)
    found = follow(solution)
    assert found[solution.axis_of(heads)].tolist() == [33, 132]
    assert found[solution.axis_of(third)].tolist() == [34, 56, 78]


def lambda_named(name, function):
    """A function by which errors can call it."""
    function.__name__ = name
    return function


def test_importance__a_criterion_that_works_in_place_leaves_the_model():
    net, x = two_layers(), torch.zeros(2, 3).double()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    importance(net, example=x, by=lambda name, rows, axis: rows.mul_(0).sum(1))
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())


def test_importance__what_cannot_be_scored_is_refused():
    net, x = two_layers(), torch.zeros(2, 3).double()

    def fails(expected, **options):
        with refused(expected):
            importance(net, **{"example": x, **options})

    fails("argument: 'l3'", by="l3")
    fails("argument: `loss`", by="taylor")
    fails("argument: `batches`", by="taylor", loss=squared)
    fails("argument: `batches`", by="activation")
    fails("argument: batches", by="activation", batches=x)
    fails("argument: batches", by="activation", batches={"x": x})
    fails("argument: batches", by="activation", batches=3)
    fails("run", by="activation", batches=BATCHES)
    fails("run: loss", by="fisher", loss=lambda model, batch: model(batch), batches=BATCHES)
    fails("argument: loss", by="taylor", loss=lambda model, batch: 1.0, batches=BATCHES)
    fails("values", by="taylor", loss=lambda m, b: squared(m, b) * float("nan"), batches=BATCHES)
    for wrong in (torch.abs, torch.Tensor.tolist, lambda rows: rows.sum(1) * 1j):

        def criterion(name, rows, axis, wrong=wrong):
            return wrong(rows)

        fails("argument: criterion gives", by=criterion)
    fails("values: criterion", by=lambda_named("criterion", lambda name, rows, axis: rows.sum(1) / 0))
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double()
    fails("unsupported", by="bn_scale")
    net = net.to("meta")
    fails("values")


def test_importance__scores_of_something_else_are_refused():
    net, x = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2)), torch.zeros(2, 3)
    found = importance(net, example=x)

    def fails(expected, scores):
        with refused(expected):
            narrow(net, 0.5, x, scores=scores)

    fails("name: '0.weigth:0'", {"0.weigth:0": torch.ones(4)})
    fails("mismatch: '0.weight:0'", found | {"0.weight:0": torch.ones(5)})
    fails("values", found | {"0.weight:0": torch.full((4,), float("nan"))})
    fails("argument: '2.weight:0'", {"0.weight:0": found["0.weight:0"]})
    fails("argument", 3)
    fails("argument: '0.weight:0'", {"0.weight:0": ["much", "little"]})
    narrow(net, 0.5, x, scores={"0.weight:0": torch.ones(4)}, keep=["2"])  # the other one stays


# How large


def transposed():
    """Down and up again, in groups, with attention that torch computes in between."""

    def forward(net, x):
        x = net.down(x)
        q, k, v = net.qkv(x.flatten(2).mT).unflatten(-1, (3, 2, 12)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return net.last(net.up(x + y.mT.unflatten(-1, x.shape[2:])))

    convolutions = {"down": nn.Conv2d(3, 24, 3, stride=2, groups=3, padding=1), "last": nn.Conv2d(12, 4, 1)}
    return Made(forward, **convolutions, up=nn.ConvTranspose2d(24, 12, 2, stride=2), qkv=nn.Linear(24, 72))


def sizes(model, x):
    """(parameters, MACs), counted by torch."""
    return sum(p.numel() for p in model.parameters()), count_macs(model, x)


@pytest.mark.parametrize("make", [*NETS, transposed])
def test_importance__costs_are_predicted(make):
    """What is predicted for a choice of positions is what torch counts of the narrow model."""
    net, x = randomized(make()), torch.rand(2, 3, 6, 6).double()
    solution = solve(trace_model(net, x).found)
    for rate in (1.0, 0.7, 0.4):
        choice = choose(solution, Demand(rate)).choice
        small = narrow(net, rate, x)[0]
        predicted = [Cost(net, solution, what, len(solution.steps))(choice) for what in ("parameters", "macs")]
        assert (*predicted,) == sizes(small, x)
    solution = solve(Trace(copy.deepcopy(net), x))  # on the CPU attention is one operation
    assert Cost(net, solution, "macs", len(solution.steps)).full == count_macs(net, x)


@pytest.mark.parametrize("scored", [False, True])
@pytest.mark.parametrize("target", [Target(macs=0.5), Target(parameters=0.3), Target(macs=0.8), Target(parameters=1)])
def test_importance__targets_are_reached(target, scored):
    net, x = randomized(residual(64, 48, 40)), IMAGE.double()
    small = prune_to(net, example=x, target=target, importance=arbitrary(net) if scored else None).model
    place = 1 if target.macs else 0
    share = sizes(small, x)[place] / sizes(net, x)[place]
    assert 0.98 * target.share <= share <= target.share
    if not scored:  # all widths keep one share
        left = [small[0].out_channels / 64, small[1].conv1.out_channels / 48, small[2].conv1.out_channels / 40]
        assert max(left) - min(left) <= 1 / 20


def test_importance__positions_of_all_widths_compete():
    """Scores are divided by the width's mean; the highest of both stay, and of each a floor."""
    net = nn.Sequential(nn.Linear(4, 10), nn.ReLU(), nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 4))
    scores = {"0.weight:0": torch.tensor([1.0] * 5 + [9] * 5), "2.weight:0": torch.full((10,), 1e6)}  # 0.2, 1.8; 1
    options = {"example": torch.zeros(1, 4), "importance": scores, "strict": True}
    small, plan, _ = prune_to(net, target=Target(macs=0.62), **options)  # 5 * (4 + 10) + 40 of 180
    assert (small[0].out_features, small[2].out_features) == (5, 10)
    assert plan.entries["0.bias"][0].index == (((5, 10),),)
    small = prune_to(net, target=Target(macs=0.27, floor=0.35), **options).model  # 3.5 is 4: 4 * (4 + 4) + 16
    assert (small[0].out_features, small[2].out_features) == (4, 4)
    small = prune_to(net, target=Target(macs=0.315), **options).model  # 5 * (4 + 4) + 16
    assert (small[0].out_features, small[2].out_features) == (5, 4)


@pytest.mark.parametrize(("share", "kept"), [(0.5, 100), (1, 200)])
def test_importance__of_positions_of_equal_worth_as_many_stay_as_fit(share, kept):
    net, scores = nn.Sequential(nn.Linear(4, 200), nn.ReLU(), nn.Linear(200, 4)), {"0.weight:0": torch.ones(200)}
    small = prune_to(net, example=torch.zeros(1, 4), target=Target(macs=share), importance=scores).model
    assert small[0].out_features == kept


def test_importance__widths_of_one_size_shrink_differently():
    """Which of them an attribute stores is seen from the operation that is called with it."""

    def padded(net, x):  # a shortcut that appends as many channels as there are
        x = net.first(x)
        return net.last(net.second(x) + F.pad(x, (0, 0, 0, 0, 0, net.more)))

    net = Made(padded, first=nn.Conv2d(3, 6, 1), second=nn.Conv2d(6, 12, 1), last=nn.Conv2d(12, 2, 1), more=6)
    net, x = randomized(net), torch.rand(2, 3, 6, 6).double()
    scores = {"first.weight:0": torch.tensor([1.0, 9, 9, 9, 9, 9]), "second.weight:0:1": torch.tensor([1.0] * 5 + [99])}
    small, plan, _ = prune_to(net, example=x, target=Target(parameters=0.53), importance=scores, strict=True)
    assert (small.first.out_channels, small.more) == (5, 1)
    load(net, plan.embed(state(small))[0])
    with torch.no_grad():
        torch.testing.assert_close(small(x), net(x))


def test_importance__what_attention_reads_counts():
    """Rows of queries and keys that nothing else reads have activations, too."""

    net = Made(
        lambda net, x: net.last(F.scaled_dot_product_attention(net.q(x), net.k(x), net.v(x))),
        **{name: nn.Linear(6, 8, bias=False) for name in "qkv"}, last=nn.Linear(8, 2),
    )  # fmt: skip
    net, x = randomized(net), torch.rand(2, 3, 6).double()
    found = importance(net, example=x, by="activation", batches=[x])
    q, k = (layer(x).abs().mean((0, 1)).detach() for layer in (net.q, net.k))
    torch.testing.assert_close(found["q.weight:0"], q + k, rtol=1e-5, atol=0)


def test_importance__what_weights_are_computed_of_is_no_activation():
    norm = nn.utils.parametrizations.weight_norm
    net, x = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), norm(nn.Linear(8, 6)), nn.Linear(6, 2)), torch.rand(5, 3)
    found = importance(net, example=x, by="activation", batches=[x])
    hidden = net[1](net[0](x)), net[2](net[1](net[0](x)))
    for name, values in zip(("0.weight:0", "2.bias:0"), hidden):
        torch.testing.assert_close(found[name], values.abs().mean(0).detach().double(), rtol=1e-5, atol=0)


def test_importance__all_heads_may_win(caplog):
    """That the scores keep a width whole is nothing to warn of."""
    net = randomized(attention())
    scores = importance(net, example=IMAGE.double())
    scores["1.weight:0"] *= 0
    small = prune_to(net, example=IMAGE.double(), target=Target(macs=0.5), importance=scores, heads="drop").model
    assert small[2].qkv.out_features == 72
    assert "cannot shrink" not in caplog.text


def test_importance__targets_that_cannot_be_reached():
    net, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)), torch.zeros(1, 4)

    def fails(expected, target, importance=None, **options):
        with refused(expected):
            prune_to(net, example=x, target=target, importance=importance, **options)

    fails("target: 50.0%", Target(macs=0.3, floor=0.5))
    fails("target: 12.5%", Target(macs=0.1, floor=0))
    fails("target: 50.0%", Target(macs=0.6), strict=True)
    fails("argument: '0.weight:0'", Target(macs=0.5), {"0.weight:0": -torch.ones(8)})
    negative = lambda_named("negative", lambda name, rows, axis: -rows.abs().sum(1))
    fails("argument: negative gives '0.weight:0'", Target(macs=0.5), negative)
    for target in (Target(macs=0.5, normalise=False), Target(macs=0.5, even=True)):
        kept = prune_to(net, example=x, target=target, importance=negative).model[0].weight
        order = importance(net, example=x, by=negative)["0.weight:0"].topk(len(kept)).indices.sort().values
        assert torch.equal(kept, net[0].weight[order])
    fails("argument: target", 0.5)
    layers = {"a": nn.Linear(6, 12), "b": nn.Linear(12, 6), "c": nn.Linear(6, 2)}
    net, x = Made(lambda net, x: net.c(net.b(net.a(x).cumsum(1))), **layers), torch.zeros(3, 6)
    fails("target: a.weight", Target(macs=0.4))
    for wrong in ({}, {"macs": 0}, {"macs": 1.5}, {"macs": "half"}, {"macs": 0.5, "floor": 2}):
        with refused("argument"):
            Target(**wrong)


def test_importance__a_target_missed_is_told(caplog):
    """Of widths that are multiples of 8 none may fit."""
    net, x = nn.Sequential(nn.Linear(4, 24), nn.ReLU(), nn.Linear(24, 4)), torch.zeros(1, 4)
    small = prune_to(
        net, example=x, target=Target(macs=0.6), importance=None, rounding=lambda n: max(8, 8 * int(n // 8))
    ).model
    assert small[0].out_features == 8
    assert "33.3%" in caplog.text


# torch-pruning


def own_scores(net, layer, cut, criterion, example):
    """What torch-pruning says of the width that begins there."""
    graph = tp.DependencyGraph().build_dependency(net, example_inputs=example)
    size = layer.weight.shape[1 if cut == tp.prune_linear_in_channels else 0]
    return criterion(graph.get_pruning_group(layer, cut, idxs=list(range(size))))


def criteria():
    made = tp.importance
    return [
        made.GroupMagnitudeImportance(p=1), made.GroupMagnitudeImportance(p=2, normalizer=None, bias=True),
        made.GroupMagnitudeImportance(group_reduction="max"), made.GroupMagnitudeImportance(group_reduction="first"),
        made.BNScaleImportance(), made.LAMPImportance(), made.FPGMImportance(), made.GroupTaylorImportance(),
    ]  # fmt: skip


SUMMING = (tp.importance.GroupMagnitudeImportance, tp.importance.GroupTaylorImportance)  # over heads


def compared(net, x, places):
    """places: the name of the width, torch-pruning's layer and function, and the number of heads there."""
    net.eval()
    net(x).square().mean().backward()
    for criterion in criteria():
        found = None
        for name, layer, cut, heads in places:
            theirs = own_scores(net, net.get_submodule(layer), cut, criterion, x)
            if theirs is None:
                continue
            found = found or importance(net, example=x, by=criterion)
            if heads == 1:
                torch.testing.assert_close(found[name].float(), theirs, rtol=1e-4, atol=0)
            elif criterion.group_reduction == "mean" and type(criterion) in SUMMING:
                means = theirs.view(heads, -1).mean(0)
                torch.testing.assert_close(found[name].float() / found[name].mean(), means / means.mean())


@pytest.mark.slow
def test_importance__torch_prunings_classes_say_the_same():
    net = randomized(residual()).float()
    out = tp.prune_conv_out_channels
    compared(net, torch.rand(2, 3, 6, 6), [(f"{n}.weight:0", n, out, 1) for n in ("0", "1.conv1", "2.conv1")])
    assert importance(net, example=IMAGE, by=tp.importance.BNScaleImportance()).keys() == {
        "0.weight:0", "1.conv1.weight:0", "2.conv1.weight:0",
    }  # fmt: skip
    with refused("run: GroupTaylorImportance"):
        importance(randomized(residual()), example=IMAGE.double(), by=tp.importance.GroupTaylorImportance())


def test_importance__torch_prunings_classes_score_all_groups_of_a_convolution():
    net, x = nn.Sequential(nn.Conv2d(3, 12, 3), nn.Conv2d(12, 6, 3, groups=3), nn.Flatten(), nn.Linear(24, 5)), IMAGE
    for criterion in (tp.importance.GroupMagnitudeImportance(p=power, normalizer=None) for power in (1, 2)):
        means = own_scores(net, net[0], tp.prune_conv_out_channels, criterion, x).view(3, 4).mean(0)
        found = importance(net, example=x, by=criterion)["1.weight:1"].float()
        torch.testing.assert_close(found / found.mean(), means / means.mean(), rtol=1e-4, atol=0)


def test_importance__activations_of_recurrent_layers_are_those_of_the_widths_that_narrow_knows():
    layers = {"e": nn.Linear(5, 8), "r": nn.LSTM(8, 12, batch_first=True), "c": nn.Linear(12, 3)}
    net, x = Made(lambda net, x: net.c(net.r(net.e(x))[0]), **layers), torch.randn(2, 6, 5)
    scores = importance(net, example=x, by="activation", batches=[x])
    assert scores.keys() == importance(net, example=x, by="l1").keys()
    small, _ = narrow(net, 0.5, x, scores=scores)
    assert (small.r.input_size, small.r.hidden_size) == (4, 6)
    assert torch.backends.mkldnn.enabled


def test_importance__what_experts_behind_a_grouped_product_read_counts():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(6, 16), nn.Linear(16, 2)
            self.up, self.down = (nn.Parameter(torch.randn(4, a, b)) for a, b in ((16, 32), (32, 16)))

        def forward(self, x):
            x, offsets = self.body(x), torch.tensor([1, 2, 4, 5], dtype=torch.int32)
            grouped = torch.nn.functional.grouped_mm
            return self.head(grouped(grouped(x, self.up, offs=offsets).relu(), self.down, offs=offsets))

    torch.manual_seed(0)
    net, x = Experts(), torch.randn(5, 6)
    scores = importance(net, example=x, by="activation", batches=[x])
    assert {name: len(score) for name, score in scores.items()} == {"up:1": 16, "up:2": 32, "down:2": 16}
    torch.testing.assert_close(scores["up:1"].float(), net.body(x).abs().mean(0).detach())


class Added(nn.Module):
    """A parametrization of low rank."""

    def __init__(self, out, into):
        super().__init__()
        self.left, self.right = nn.Parameter(torch.rand(out, 2)), nn.Parameter(torch.rand(2, into))

    def forward(self, weight):
        return weight + self.left @ self.right


class Turned(nn.Module):
    def forward(self, weight):
        return weight.T


def masked(layer):
    prune.custom_from_mask(layer, "weight", (torch.arange(layer.weight.numel()) % 3 > 0).view_as(layer.weight))
    prune.random_unstructured(layer, "bias", 2)


def turned(layer):
    parametrize.register_parametrization(layer, "weight", Turned(), unsafe=True)


COMPUTED = {
    "mask": masked,
    "old weight_norm": nn.utils.weight_norm,
    "weight_norm": parametrizations.weight_norm,
    "old spectral_norm": nn.utils.spectral_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "low rank": lambda layer: parametrize.register_parametrization(layer, "weight", Added(*layer.weight.shape)),
    "turned": turned,
}


def plain_of(net, layers):
    """The same function with parameters."""
    with torch.no_grad():
        for index in layers:
            old = net[index]
            new = nn.Linear(old.in_features, old.out_features)
            new.weight.copy_(old.weight)
            new.bias.copy_(old.bias)
            net[index] = new
    return net


def a_loss(model, batch):
    return model(batch).square().sum()


def same_scores(model, plain, x):
    """Compare scores of widths that both have, by the order of hidden widths."""
    batches = [torch.randn(3, x.shape[1], generator=torch.Generator().manual_seed(k)).to(x) for k in range(2)]
    for by in ("l1", "l2", "taylor", "fisher", lambda name, rows, axis: rows.abs().amax(1), "pruner"):
        given = {"batches": batches, "loss": a_loss} if by in ("taylor", "fisher") else {}
        by = tp.importance.GroupMagnitudeImportance(p=2, normalizer=None) if by == "pruner" else by
        found, expected = (importance(one, example=x, by=by, **given) for one in (model, plain))
        ours = [scores for name, scores in found.items() if ".lora_A." not in name and "weight.0." not in name]
        assert len(ours) == len(expected) == 2
        for one, other in zip(ours, expected.values()):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-7)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", COMPUTED)
def test_importance__scores_are_of_the_weights_that_the_forward_pass_uses(kind):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    for index in (0, 2):
        COMPUTED[kind](net[index])
    net.double().eval()
    x = torch.randn(3, 6, dtype=torch.float64)
    with torch.no_grad():
        before = net(x)
    plain = plain_of(copy.deepcopy(net), (0, 2)).double().eval()
    torch.testing.assert_close(plain(x), before)
    names = [*state(net)]
    same_scores(net, plain, x)
    assert [*state(net)] == names
    assert torch.equal(net(x), before)
    narrow(net, 0.5, x, scores=importance(net, example=x))


def test_importance__channels_that_are_masked_score_nothing_and_are_cut():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 2, 3)).eval()
    mask = torch.ones_like(net[0].weight)
    mask[:4] = 0
    prune.custom_from_mask(net[0], "weight", mask)
    x = torch.rand(2, 3, 7, 7)
    scores = importance(net, example=x, by=lambda name, rows, axis: rows.abs().sum(1) if name == "0.weight" else None)
    (found,) = scores.values()
    assert (found == 0).tolist() == [True] * 4 + [False] * 4
    assert narrow(net, 0.5, x, scores=scores)[1].entries["0.weight_orig"][0].index[0] == ((4, 8),)


@pytest.mark.parametrize("kind", ["lora", "dora", "peft", "peft dora"])
def test_importance__scores_of_adapted_layers_are_those_of_merged_ones(kind):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2)).eval()
    if "peft" in kind:
        peft = pytest.importorskip("peft")
        config = peft.LoraConfig(r=2, target_modules=["0", "2"], init_lora_weights=False, use_dora="dora" in kind)
        model = peft.inject_adapter_in_model(config, copy.deepcopy(net)).eval()
        merged = peft.PeftModel(copy.deepcopy(net), config)
        merged.load_state_dict({f"base_model.model.{name}": tensor for name, tensor in model.state_dict().items()})
        plain = merged.merge_and_unload().eval()
    else:
        model = adapters.add(net, 2, modules=["0", "2"], scale=0.7, kind=kind).eval()
        for name, parameter in model.named_parameters():
            if "lora" in name:
                parameter.data += torch.rand_like(parameter)
        plain = adapters.merge(model).eval()
    same_scores(model, plain, torch.randn(3, 4))
    if kind == "lora":
        scores = importance(model, example=torch.randn(3, 4), by="l1")
        a, b = model[0].factors
        expected = (a.abs().sum(1) + b.abs().sum(0)).double()
        torch.testing.assert_close(scores["0.lora_A.weight:0"], expected)

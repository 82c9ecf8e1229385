"""Permuted copies are found again exactly, and the statistics of averaged models are set right."""

import pytest
import torch
from library_models import LIBRARY_MODELS, library_model
from refusals import refused
from symmetric import IMAGE, SMALL, image, randomized, same_outputs
from torch import nn

import zoo
from surgery import average, load, stack, state, widths
from surgery.names import join
from surgery.symmetry import align, permute, repair
from surgery.symmetry.alignment import Aligner
from surgery.symmetry.assignment import assignment
from surgery.symmetry.likeness import WeightLikeness
from surgery.width.solve import named_widths, solve
from surgery.width.trace import trace_model


class Depthwise(nn.Module):
    """A depthwise convolution in an inverted residual."""

    def __init__(self, c=6, middle=12):
        super().__init__()
        self.stem, self.up = nn.Conv2d(3, c, 1), nn.Conv2d(c, middle, 1)
        self.depthwise, self.down = nn.Conv2d(middle, middle, 3, padding=1, groups=middle), nn.Conv2d(middle, c, 1)
        self.head = nn.Linear(c, 5)

    def forward(self, x):
        x = self.stem(x)
        return self.head((x + self.down(self.depthwise(self.up(x).relu()).relu())).mean((2, 3)))


CASES = {**SMALL, "depthwise": Depthwise}


def shuffled(net, example, seed=0):
    generator = torch.Generator().manual_seed(seed)
    found = {w.name: w.size for w in widths(net, example) if not w.order}
    orders = {name: torch.randperm(size, generator=generator) for name, size in found.items()}
    return permute(net, orders, example=example)[0], orders


def equal(one, other):
    return all(torch.equal(a, b) for a, b in zip(state(one).values(), state(other).values()))


@pytest.mark.parametrize("by", ["weights", "activations"])
@pytest.mark.parametrize("name", CASES)
def test_align__a_permuted_copy_is_found_again(name, by):
    net, x = randomized(CASES[name]()), image((8, 3, 6, 6))
    other, orders = shuffled(net, x)
    assert not equal(net, other)
    models, permutations, *_ = align([net, other], example=x, by=by, batches=[image((8, 3, 6, 6), seed=2)])
    assert equal(models[1], net)
    assert permutations[0] == {}
    assert all(torch.equal(permutations[1][name], order.argsort()) for name, order in orders.items())


class Attention(nn.Module):
    """Attention as operations of its own, whose queries and keys meet in no layer."""

    def __init__(self):
        super().__init__()
        self.up, self.head = nn.Linear(5, 8), nn.Linear(8, 3)
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        x = self.up(x)
        q, k, v = (part(x).unflatten(-1, (2, 4)).transpose(1, 2) for part in (self.q, self.k, self.v))
        return self.head(x + self.o(((q @ k.mT / 2).softmax(-1) @ v).transpose(1, 2).flatten(2)))


@pytest.mark.parametrize(
    ("by", "batch", "left"), [("weights", 4, []), ("activations", 4, []), ("activations", 8, ["q.weight:0:1"])]
)
def test_align__widths_that_nothing_compares_are_named_and_stay(by, batch, left, caplog):
    net, x = randomized(Attention()), image((4, 6, 5))
    other, orders = shuffled(net, x, seed=1)
    found = align([net, other], example=x, by=by, batches=[image((batch, 6, 5), seed=2)])
    assert found.unaligned == left
    assert found.permutations[1].keys() == orders.keys() - set(left)
    assert all(torch.equal(order, orders[name].argsort()) for name, order in found.permutations[1].items())
    assert all(name in caplog.text for name in left)
    assert bool(caplog.text) == bool(left)
    assert same_outputs(found.models[1], net, x)


class Clipped(nn.Module):
    """Holds the range that its inputs are clipped to, which is open."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 2)
        self.register_buffer("least", torch.tensor(-torch.inf))

    def forward(self, x):
        return self.down(self.up(x.clamp(self.least, None)).relu())


class Domain(nn.Module):
    """A batch norm for each domain."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleDict({"a": nn.BatchNorm1d(1), "b": nn.BatchNorm1d(1)})

    def forward(self, x, y=None):
        return self.norms["a"](x) if y is None else self.norms["a"](x) - self.norms["a"](y)


def test_align__repair_keeps_norms_that_do_not_run_and_counts_calls(caplog):
    net = Domain()
    net.norms["a"].running_mean.fill_(torch.nan)
    net.norms["a"].running_var.fill_(torch.nan)
    net.norms["b"].running_mean.fill_(5)
    x, y = torch.tensor([[0.0], [2.0]]), torch.tensor([[10.0], [14.0]])
    fixed = repair(net, batches=[x])
    assert fixed.norms["a"].running_mean == 1
    assert fixed.norms["b"].running_mean == 5
    assert "norms.b" in caplog.text
    for times in (1, 2):
        twice = repair(net, batches=[(x, y)] * times).norms["a"]
        assert twice.running_mean == 6.5
        assert twice.running_var == 5
    assert not any(norm._forward_pre_hooks for norm in fixed.norms.values())


def test_align__repair_scales_transposed_convolutions():
    def made(seed):
        torch.manual_seed(seed)
        first, last = nn.ConvTranspose1d(8, 6, 2, 2, groups=2), nn.ConvTranspose1d(6, 3, 2)
        return nn.Sequential(nn.Conv1d(4, 8, 1), nn.ReLU(), first, nn.ReLU(), last).double()

    ends, x = [made(1), made(2)], torch.randn(50, 4, 5, dtype=torch.float64)
    mean = load(made(0), average(stack(ends)))
    fixed = repair(mean, batches=[x], ends=ends)
    for depth in (1, 3):
        found, one, two = (net[:depth](x).movedim(1, 0).flatten(1) for net in (fixed, *ends))
        torch.testing.assert_close(found.mean(1), (one.mean(1) + two.mean(1)) / 2)
        torch.testing.assert_close(
            found.std(1, correction=0), (one.std(1, correction=0) + two.std(1, correction=0)) / 2
        )


def test_align__repair_refuses_weights_that_are_shared_or_computed():
    def shared():
        net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
        net[2].weight = net[0].weight
        return net

    def computed():
        return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.ReLU(), nn.Linear(4, 2))

    for made in (shared, computed):
        with refused("unsupported: '0'"):
            repair(made(), batches=[torch.randn(8, 4)], ends=[made(), made()])


def test_align__what_is_infinite_beside_the_widths_does_not_matter():
    net, x = Clipped(), torch.randn(3, 4)
    other, _ = shuffled(net, x)
    assert equal(align([net, other], example=x).models[1], net)
    with torch.no_grad():
        other.up.bias[0] = torch.inf
    with refused("values: 'up.bias'"):
        align([net, other], example=x)


def test_align__noise_does_not_hide_the_copy():
    net, x = randomized(SMALL["residual"](c=16, middle=12)), image()
    other, orders = shuffled(net, x)
    for tensor in state(other).values():
        if tensor.is_floating_point():
            tensor += 0.05 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(0), dtype=tensor.dtype)
    found = align([net, other], example=x).permutations
    assert all(torch.equal(found[1][name], order.argsort()) for name, order in orders.items())


def test_align__models_compute_what_they_did_and_come_closer():
    one, other, x = randomized(SMALL["attention"](), 0), randomized(SMALL["attention"](), 1), image()
    for to in (0, 1):
        models, permutations, *_ = align([one, other], example=x, to=to)
        assert permutations[to] == {}
        assert same_outputs(models[0], one, x)
        assert same_outputs(models[1], other, x)
        gap = [sum((state(a)[n] - state(b)[n]).square().sum() for n in state(a)) for a, b in ((one, other), models)]
        assert gap[1] < gap[0]


def test_align__states_are_aligned_by_plans():
    net, x = randomized(SMALL["grouped"]()), image()
    other, _ = shuffled(net, x)
    with torch.device("meta"):
        aligner = Aligner(SMALL["grouped"]().double(), example=IMAGE.double())
    plan = aligner.plan(aligner.by_weights(state(net), state(other)))
    assert all(torch.equal(tensor, state(net)[name]) for name, tensor in plan.extract(state(other)).items())


@pytest.mark.slow
@pytest.mark.parametrize("name", LIBRARY_MODELS)
def test_align__permuted_copies_of_library_models_are_found_again(name):
    net, example = library_model(name)
    other, _ = shuffled(net, example)
    assert not equal(net, other)
    assert equal(align([net, other], example=example).models[1], net)


def test_align__repaired_statistics_are_those_of_the_batches():
    torch.manual_seed(0)
    net, batches = SMALL["residual"](), [torch.randn(4, 3, 6, 6) + i for i in range(3)]
    fixed = repair(net, batches=batches)
    with torch.no_grad():
        seen = [net.conv1(net.stem(batch)) for batch in batches]
    mean = torch.stack([one.mean((0, 2, 3)) for one in seen]).mean(0)
    variance = torch.stack([one.var((0, 2, 3)) for one in seen]).mean(0)
    assert torch.allclose(fixed.norm1.running_mean, mean, atol=1e-5)
    assert torch.allclose(fixed.norm1.running_var, variance, rtol=1e-4)
    assert fixed.norm1.momentum == net.norm1.momentum
    assert fixed.training == net.training
    assert torch.equal(net.norm1.running_mean, torch.zeros(4))


def convolutional():
    layers = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 16, 3), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10))


@pytest.mark.slow
def test_align__without_norms_every_channel_gets_the_statistics_between_those_of_the_ends():
    """Against torch.var_mean, and the loss halfway between two networks trained on digits."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    x, y = torch.tensor(digits.images[:, None] / 8 - 1).float(), torch.tensor(digits.target)
    ends = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        net = convolutional()
        optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
        for batch in (b for _ in range(2) for b in torch.randperm(len(x)).split(64)):
            loss = nn.functional.cross_entropy(net(x[batch]), y[batch])
            optimizer.zero_grad(), loss.backward(), optimizer.step()
        ends.append(net)
    ends = align(ends, example=x[:2]).models
    between = convolutional()
    between.load_state_dict({n: 0.25 * a + 0.75 * state(ends[1])[n] for n, a in state(ends[0]).items()})
    fixed = repair(between, batches=x.split(600), ends=ends, weights=[1, 3])
    assert torch.equal(fixed[-1].weight, between[-1].weight)
    with torch.no_grad():
        for last in (1, 4, 7):
            moments = []
            for net in (*ends, fixed):
                given = net[:last](x)
                variance, mean = torch.var_mean(given, [d for d in range(given.ndim) if d != 1], correction=0)
                moments.append(torch.stack([mean, variance.sqrt()]))
            assert torch.allclose(moments[2], 0.25 * moments[0] + 0.75 * moments[1], atol=1e-4)
        first, second, before, after = (nn.functional.cross_entropy(net(x), y) for net in (*ends, between, fixed))
    assert 0.25 * first + 0.75 * second < before  # there is a barrier
    assert after < before


def test_align__what_cannot_be_rescaled_is_refused():
    x = torch.ones(2, 3)
    layer = nn.Linear(3, 3)
    norm = nn.Sequential(layer, nn.BatchNorm1d(3))
    free = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3))
    for model, kwargs, expected in [
        (norm, {"ends": [norm]}, "argument: ends"),
        (layer, {"weights": [1]}, "argument"),
        (free, {"ends": [free]}, "unsupported: '0'"),
        (nn.Sequential(layer, layer), {"ends": [nn.Sequential(layer, layer)]}, "unsupported"),
        (layer, {"ends": [nn.Linear(3, 2)]}, "mismatch"),
    ]:
        with refused(expected):
            repair(model, batches=[x], **kwargs)


def test_align__wrong_arguments_are_refused():
    net, other = SMALL["residual"](), SMALL["residual"](c=8)
    for models, kwargs, expected in [
        ([net, other], {}, "mismatch"),
        (net, {}, "argument"),
        ([net, net], {"starts": 0}, "argument"),
        ([net, net], {"to": 2}, "argument"),
        ([net, net], {"by": "names"}, "argument"),
        ([net, net], {"by": "activations"}, "argument: `batches`"),
        ([net, net], {"by": "activations", "batches": [torch.zeros(1, 7, 6, 6)]}, "run"),
        ([net, net], {"example": None}, "argument"),
    ]:
        with refused(expected):
            align(models, **{"example": IMAGE, **kwargs})
    for model, batches, expected in [
        (net, [], "argument"),
        (net, IMAGE, "argument"),
        (SMALL["attention"](), [IMAGE], "unsupported"),
        (net, [torch.zeros(1, 7, 6, 6)], "run"),
    ]:
        with refused(expected):
            repair(model, batches=batches)


def test_align__the_start_does_not_depend_on_the_order_of_other_widths():
    """Every width of a permuted copy is found by itself, while all others are still in another order."""
    net, x = randomized(SMALL["attention"]()), image()
    other, orders = shuffled(net, x)
    solution = solve(trace_model(net, x).found)
    places = {join(*key): axes for key, axes in solution.tensors.items()}
    likeness, names = WeightLikeness(places, state(net), state(other)), named_widths(solution)
    for name, order in orders.items():
        assert assignment(likeness.first(names[name])) == order.argsort().tolist()


def inner(one, other):
    values = state(other)
    return sum((p.detach().double() * values[name].double()).sum().item() for name, p in one.named_parameters())


def weight_matching(one, other, widths, seed=0):
    """Ainsworth et al. (2023), algorithm 1, from a list of widths, each by the axes along which it lies."""
    from scipy.optimize import linear_sum_assignment

    a, b = ({n: t.detach().double() for n, t in net.named_parameters()} for net in (one, other))
    generator, better = torch.Generator().manual_seed(seed), True
    size = [min(a[name].shape[dim] for name, dim in width) for width in widths]  # of a dense layer: channels x pixels
    while better:
        better = False
        for number in torch.randperm(len(widths), generator=generator).tolist():
            gain = 0
            for name, dim in widths[number]:
                one, two = (of[name].movedim(dim, 0).reshape(size[number], -1) for of in (a, b))
                gain = gain + one @ two.T
            rows, order = linear_sum_assignment(gain.numpy(), maximize=True)
            if gain[rows, order].sum() > gain.trace() + 1e-9:
                better = True
                for name, dim in widths[number]:
                    rows = b[name].movedim(dim, 0)
                    b[name] = rows.reshape(len(order), -1)[order].reshape(rows.shape).movedim(0, dim)
    return sum((a[name] * b[name]).sum().item() for name in a)


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 24), nn.ReLU(), nn.Linear(24, 4)),
        lambda: nn.Sequential(nn.Linear(8, 300), nn.ReLU(), nn.Linear(300, 24), nn.ReLU(), nn.Linear(24, 4)),
        pytest.param(lambda: zoo.create("vgg11", width=0.0625, num_classes=5), marks=pytest.mark.slow),
        lambda: zoo.create("resnet18", width=0.125, num_classes=5),
    ],
    ids=["mlp", "wide-mlp", "vgg11", "resnet18"],
)
def test_align__the_match_is_at_least_as_good_as_plain_weight_matching(make):
    nets = []
    for seed in range(2):
        torch.manual_seed(seed)
        nets.append(make())
    x = torch.zeros(1, 8) if isinstance(nets[0][0], nn.Linear) else torch.zeros(1, 3, 224, 224)
    parameters = dict(nets[0].named_parameters())
    hidden = [
        [(name, axis) for name, axis in width.members if name in parameters]
        for width in widths(nets[0], x)
        if not width.order
    ]
    once = inner(*align(nets, example=x).models)
    assert once >= weight_matching(*nets, hidden) - 1e-9
    several = [inner(*align(nets, example=x, starts=4).models) for _ in range(2)]
    assert several[0] == several[1] >= once


def test_align__a_gain_says_how_the_value_changes():
    """By brute force, while widths move one after the other: what is kept of earlier gains is brought up to date."""
    for name in ("residual", "attention", "grouped", "joined"):
        one, other, x = randomized(SMALL[name](), 0), randomized(SMALL[name](), 1), image()
        solution = solve(trace_model(one, x).found)
        held = dict(one.named_parameters())
        places = {join(*key): axes for key, axes in solution.tensors.items() if join(*key) in held}
        likeness = WeightLikeness(places, state(one), state(other))
        free = [atom for atom in named_widths(solution).values() if not atom.order and atom in likeness.along]
        choice, generator = {atom: list(range(atom.size)) for atom in free}, torch.Generator().manual_seed(0)
        for atom in free * 3:
            gain, order = likeness.gain(atom, choice), torch.randperm(atom.size, generator=generator).tolist()
            if torch.randint(2, (), generator=generator):
                order = [1, 0, *range(2, atom.size)]  # the others stay
            moved = {**choice, atom: [choice[atom][place] for place in order]}
            change = likeness.value(moved, atom) - likeness.value(choice, atom)
            if atom not in likeness.beside[atom]:
                assert change == pytest.approx((gain[range(atom.size), order].sum() - gain.trace()).item(), abs=1e-9)
            choice = moved

import copy
import itertools
import math
from itertools import product

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from refusals import fl_refused
from selection import some
from torch import nn

from fl import models
from fl.base.errors import FLError
from fl.engine.objectives import cross_entropy
from fl.models import search as search_module
from fl.models.library import LibrarySpec
from fl.models.search import Space, evolve, largest_within, maximum, search
from fl.models.zico import zico
from surgery import state
from zoo import Spec

RESNET = Spec("resnet20", num_classes=3, in_channels=1, image_size=8)
TINY = Spec("preresnet18", 3, 1, 8, width=0.05, norm="static_batch")
MIXED = Space(TINY, (0.5, 0.75, 1), (1, 2, 3), mixed=True)
SPACES = {
    "one rate": Space(RESNET, (0.5, 1, 0.75), (1, 2)),
    "own depth": Space(RESNET, (0.5, 1)),
    "depths": Space(Spec("resnet20", width=0.5), (1, 2), (3, (3, 3, 3), (1, 2, 3))),
    "mixed": Space(Spec("resnet20", width=(1, 0.5, 1), depth=(1, 2, 4)), (0.5, 1), (1, 3), mixed=True),
    "mixed widths": Space(Spec("resnet20", depth=(1, 2, 4)), (0.5, 1, 1.0), mixed=True),
    "no sections": Space(Spec("cnn"), (0.25, 1, 0.5), mixed=True),
    "tail": Space(Spec("vgg11", width=(1, 1, 1, 1, 1, 0.5)), (0.5, 1), (2,), mixed=True),
    "library": Space(LibrarySpec("torchvision:resnet18"), (0.5, 1), (1, 2)),
}


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def images(count=2, batch=6, dtype=torch.float64):
    generator = seeded(7)
    x = torch.randn(count, batch, 1, 8, 8, generator=generator, dtype=dtype)
    return list(zip(x, torch.randint(3, (count, batch), generator=generator)))


def naive(model, batches):
    """ZiCo with .backward on a copy, and numpy, layer by layer and weight by weight."""
    gradients = {}
    for x, y in batches:
        net = copy.deepcopy(model).train()
        F.cross_entropy(net(x).flatten(0, -2), y.flatten()).backward()
        for name, layer in net.named_modules():
            if isinstance(layer, nn.Linear | nn.Conv2d):
                gradients.setdefault(name, []).append(layer.weight.grad.flatten().numpy())
    score = 0.0
    for each in gradients.values():
        ratios = [np.mean(np.abs(g)) / np.std(g) for g in np.stack(each, 1) if np.std(g) > 0]
        score += math.log(sum(ratios)) if ratios else 0.0
    return score


@pytest.mark.slow
@pytest.mark.parametrize(("norm", "count"), [("static_batch", 2), ("batch", 4)])
def test_search__zico_is_the_naive_loop(norm, count):
    net = Spec("preresnet18", 3, 1, 8, width=0.1, depth=(1, 2, 1, 1), norm=norm).build(seeded()).double()
    expected = naive(net, images(count))
    assert zico(net, images(count)) == pytest.approx(expected, rel=1e-6)


class Careless(nn.Module):
    """Statistics, dropout of both kinds, a layer without gradient, a frozen one and a tied one."""

    def __init__(self, p=0.5, functional=0.0):
        super().__init__()
        self.conv, self.norm, self.drop = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Dropout(p)
        self.a, self.frozen, self.head, self.idle = nn.Linear(144, 8), nn.Linear(8, 8), nn.Linear(8, 3), nn.Linear(8, 3)
        self.b = nn.Linear(144, 8, bias=False)
        self.b.weight = self.a.weight
        self.functional = functional
        self.frozen.requires_grad_(False)

    def forward(self, x):
        x = self.drop(F.relu(self.norm(self.conv(x)))).flatten(1)
        x = F.dropout(self.a(x) + self.b(x), self.functional, self.training)
        return self.head(self.frozen(x))


def careless(**rates):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Careless(**rates).double()


def test_search__zico_changes_nothing_and_asks_no_global_generator():
    net = careless(functional=0.3).eval()
    net.head.weight.grad = torch.ones_like(net.head.weight)
    before, random = copy.deepcopy(net), torch.get_rng_state()
    with torch.no_grad():
        score = zico(net, images())
    assert torch.equal(random, torch.get_rng_state())
    torch.rand(3)
    assert zico(net, images()) == score
    assert all(torch.equal(t, before.state_dict()[name]) for name, t in net.state_dict().items())
    assert (net.drop.training, net.drop.p) == (False, 0.5)
    assert [name for name, p in net.named_parameters() if p.grad is not None] == ["head.weight"]


def test_search__what_zico_does_not_depend_on():
    net, batches = careless(), images(3)
    score = zico(net, batches)
    assert zico(careless(p=0.0), batches) == score  # dropout
    assert zico(net, batches[::-1]) == pytest.approx(score, rel=1e-9)
    scaled = zico(net, batches, lambda *args: args[2] * cross_entropy(*args), context=-7)
    assert scaled == pytest.approx(score, rel=1e-9)
    net.a.bias.data.zero_()
    tied, net.b = zico(net, batches), net.a  # one layer that is used twice
    assert zico(net, batches) == pytest.approx(tied, rel=1e-9)
    net.idle = nn.Linear(8, 30).double()
    assert zico(net, batches) == pytest.approx(tied, rel=1e-9)
    net.frozen.requires_grad_(True)
    assert zico(net, batches) > tied


def test_search__zico_leaves_out_weights_whose_gradient_is_constant():
    constant = torch.full((2,), 0.1)  # in float32 their mean is not quite 0.1 in every way of computing it
    steps = [(torch.cat([constant, torch.tensor([v])]), None) for v in (1.0, 3.0, -1.0)]
    score = zico(nn.Linear(3, 1), steps, lambda call, params, scales, batch: (params["weight"] * batch[0]).sum())
    assert score == pytest.approx(math.log(5 / 3 / np.std([1, 3, -1])), abs=1e-6)


def test_search__zico_refuses_what_it_cannot_score():
    (x, y), second = images()
    linear, norm = nn.Sequential(nn.Flatten(), nn.Linear(64, 3)), nn.Sequential(nn.Flatten(), nn.LayerNorm(64))
    for net, batches, message in (
        (careless(), [second], "at least 2 batches, got 1"),
        (norm, [(x, y), second], "Sequential has no linear or convolutional layer"),
        (linear, [(x, y)] * 3, "give other samples in each"),
    ):
        with pytest.raises(FLError, match=message):
            zico(net.double(), batches)
    assert math.isnan(zico(careless(), [(x * math.nan, y), second]))


@pytest.mark.gpu
@pytest.mark.parametrize("norm", ["static_batch", "batch"])
def test_search__zico_on_the_gpu(norm):
    net = Spec("preresnet18", 3, 1, 8, width=0.1, norm=norm).build(seeded()).double()
    expected = zico(net, images())
    batches = [(x.cuda(), y.cuda()) for x, y in images()]
    assert zico(net.cuda(), batches) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", SPACES)
def test_search__a_space_is_the_grid_of_its_candidates(name):
    space = SPACES[name]
    base, slots = space.base, len(space.base.depth or ()) or len(space.base.width)
    if space.mixed:
        each = [(d,) for d in base.depth] if not space.depths else [space.depths] * len(base.depth)
        expected = [
            base.scale(widths, depths)
            for widths in itertools.product(space.widths, repeat=slots)
            for depths in itertools.product(*each)
        ]
    else:
        expected = [base.scale(w, d) for w in space.widths for d in space.depths or (None,)]
    assert list(space) == expected
    assert len(space) == len(set(space)) == len(expected)
    assert all(spec in space for spec in expected)
    assert [space.genes(spec) for spec in space] == sorted(space.genes(spec) for spec in space)
    for spec, pick in ((space.smallest, min), (space.largest, max)):
        assert spec in space
        assert spec.width == tuple(pick(s.width[i] for s in expected) for i in range(len(base.width)))
        assert not spec.depth or spec.depth == tuple(map(pick, zip(*(s.depth for s in expected))))
    assert maximum(space) == space.largest


@pytest.mark.parametrize("name", some(SPACES, ["mixed", "tail"]))
def test_search__steps_of_evolution_stay_in_the_grid(name):
    space, generator = SPACES[name], seeded()
    seen = set()
    for _ in range(40):
        a, b = space.random(generator), space.random(generator)
        genes, others = space.genes(a), space.genes(b)
        assert sum(x != y for x, y in zip(space.genes(space.mutate(a, generator)), genes)) == 1
        assert all(c in pair for c, pair in zip(space.genes(space.crossover(a, b, generator)), zip(genes, others)))
        near = [s for s in space if sum(x != y for x, y in zip(space.genes(s), genes)) == 1]
        assert sorted(space.neighbours(a), key=space.genes) == near
        seen |= {a, b}
    assert len(seen) == len(space) if len(space) < 20 else len(seen) > 20


@pytest.mark.parametrize(
    ("space", "spec", "message"),
    [
        ("one rate", RESNET.scale(0.6, 5), r"width 0.6 \(announced: 0.5, 1, 0.75\); depth 5 \(announced: 1, 2\)$"),
        ("one rate", RESNET.scale((0.5, 1, 1), 1), r"width 0.5-1-1 \(announced: 0.5"),
        ("one rate", Spec("resnet20", 4, 1, 8, norm="group"), r"num_classes 4 .*; norm 'group' \(.*: 'batch'\)$"),
        ("mixed", Spec("resnet20", width=(0.5, 0.5, 1), depth=(1, 2, 3)), r"depth of section2 2 \(announced: 1, 3\)$"),
        ("mixed", Spec("resnet20", depth=(1, 1, 3)), r"section2 1 \(announced: 0.25, 0.5\)\. These are rates"),
        ("tail", Spec("vgg11", depth=2), "with these sections"),
    ],
)  # fmt: skip
def test_search__what_was_not_announced_is_refused(space, spec, message):
    with pytest.raises(FLError, match=message):
        SPACES[space].genes(spec)
    assert spec not in SPACES[space]


def test_search__candidates_that_a_model_cannot_have_are_refused():
    for base, arguments, message in (
        (Spec("cnn"), {"depths": (1,)}, "cnn has no sections of blocks"),
        (RESNET, {"widths": ()}, "no width of resnet20"),
        (RESNET, {"widths": (0.5, -1)}, "width is a rate above 0"),
        (RESNET, {"widths": ((0.5, 0.5, 1),)}, "--architectures.mixed"),
        (RESNET, {"depths": ((1, 2),)}, "one for each of 3 sections"),
        (RESNET, {"depths": ((1, 2, 3),), "mixed": True}, "each section chooses one"),
        (LibrarySpec("timm:resnet18"), {"mixed": True}, "has one width for all sections"),
    ):
        with pytest.raises(FLError, match=message):
            Space(base, **arguments)
    crossing = Space(RESNET, depths=((1, 2, 3), (3, 2, 1)))
    assert crossing.largest.depth == (3, 2, 3)
    with fl_refused("argument"):
        _ = crossing.smallest
    with fl_refused("mismatch", "'batch'"):
        maximum([RESNET, Spec("resnet20", 3, 1, 8, norm="group")])
    with fl_refused("argument"):
        maximum([])
    with fl_refused("argument", "resnet18"):
        maximum([LibrarySpec("timm:resnet18", depth=1), LibrarySpec("timm:resnet18", depth=(1, 2, 1, 2))])


def counted(score):
    """The score, and the list of the specs that it was asked for."""
    asked = []
    return (lambda spec: asked.append(spec) or score(spec)), asked


SCORES = {
    "additive": lambda spec: 3 * spec.width[0] - spec.width[1] + 2 * spec.depth[0] - spec.depth[2],
    "product": lambda spec: -abs(spec.width[0] * spec.depth[0] - spec.width[2] * spec.depth[1] - 1),
    "tied": lambda spec: spec.depth[0],
    "equal": lambda spec: 0,
    "NaN": lambda spec: math.nan if spec.depth[0] == 3 else spec.depth[0],
    "all NaN": lambda spec: math.nan,
}


@pytest.mark.parametrize(
    ("space", "name"),
    some(
        product(("one rate", "mixed"), SCORES),
        [*product(["one rate"], SCORES), *product(["mixed"], ("product", "tied", "all NaN"))],
    ),
)
def test_search__on_a_small_grid_evolution_finds_what_trying_all_finds(space, name):
    space = SPACES[space]
    worth = [-math.inf if math.isnan(SCORES[name](spec)) else SCORES[name](spec) for spec in space]
    for find in (search, evolve):
        score, asked = counted(SCORES[name])
        assert find(space, score, seeded()) == list(space)[worth.index(max(worth))]
        assert sorted(asked, key=space.genes) == list(space) if find is evolve else asked == list(space)  # 64 are few


def test_search__evolution_keeps_the_best_that_it_has_seen(monkeypatch):
    monkeypatch.setattr(search_module, "GENERATIONS", 2)
    score, asked = counted(lambda spec: -len(asked))
    assert evolve(MIXED, score, seeded()) == asked[0]  # the best of all that were seen, not of the last generation
    assert len(asked) == 48


def real_sizes(spec):
    """Of the model itself, on the CPU: all units."""
    model = models.create(seeded(), spec)
    macs = []
    for layer in model.eval().modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            layer.register_forward_hook(lambda m, i, o: macs.append(o[0, 0].numel() * m.weight.numel()))
    model(spec.example())
    parameters = sum(p.numel() for p in model.parameters())
    floats = sum(tensor.nbytes for tensor in state(model).values() if tensor.is_floating_point())
    return {"macs": sum(macs), "parameters": parameters, "bytes": floats}


LIBRARY = Space(LibrarySpec("torchvision:resnet18", 3, 1, 32), (0.25, 0.5), (1,))


@pytest.mark.parametrize(
    "space", [SPACES["one rate"], pytest.param(LIBRARY, marks=pytest.mark.slow)], ids=["zoo", "library"]
)
def test_search__the_largest_within_a_budget(space):
    real = {spec: real_sizes(spec) for spec in space}
    for unit in ("macs", "parameters", "bytes"):
        sizes = {spec: real[spec][unit] for spec in space}
        for limit in {*sizes.values(), *(n + 1 for n in sizes.values())}:
            best = largest_within(space, limit, unit)
            assert sizes[best] == max(n for n in sizes.values() if n <= limit)
        least = min(sizes.values())
        with pytest.raises(FLError, match=f"{space.base.name} has at most .* {unit}: the smallest.* has {least:,}"):
            largest_within(space, least - 1, unit)

"""What a step sees and makes: random numbers, crops, batches, clipped gradients, the learning rate of its round."""

import pytest
import torch
import torch.nn.functional as F
from oracles import epoch_batches
from refusals import fl_refused
from scipy import stats
from torch import nn
from torchvision.ops import StochasticDepth

import surgery
from fl.base.errors import FLError
from fl.base.rng import Rng
from fl.engine import SGD
from fl.engine.augment import Augment
from fl.engine.batches import make_batches
from fl.engine.draws import Drawing, Draws
from fl.engine.optimizers import SCHEDULES, clip_gradients, schedule


def keys(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


def drawing(key=3):
    return Drawing(Draws(keys(key)[0]))


def fits(values, law, parameters=()):
    """Kolmogorov and Smirnov."""
    return stats.kstest(values.double().numpy(), getattr(stats, law)(*parameters).cdf).pvalue > 1e-4


def are_equally_frequent(numbers, n):
    counts = torch.bincount(numbers, minlength=n)
    return len(counts) == n and stats.chisquare(counts.numpy()).pvalue > 1e-4


@pytest.mark.parametrize(("draw", "law"), [(Draws.uniform, "uniform"), (Draws.normal, "norm")])
def test_steps__numbers_have_their_law_and_are_independent(draw, law):
    """... of neighbours, keys, draws and streams, they and their squares, each of 100,000 numbers."""
    four, shape = keys(0, 1, -(2**31), 123456789), (100_000,)
    draws = Draws(four)
    one, two = (draw(draws, shape).double() for _ in range(2))
    assert all(fits(row, law) for row in (*one, *two))
    streams = [draw(Draws(four, stream=s), shape)[0].double() for s in (0, 1)]
    for a, b in [(one[0], one[1]), (one[0], one[3]), (one[0], two[0]), (one[2, 1:], one[2, :-1]), streams]:
        for power in (1, 2):
            assert abs(torch.corrcoef(torch.stack([a**power, b**power]))[0, 1]) < 0.015
    if law == "uniform":
        assert 0 <= one.min() < one.max() < 1
    else:
        assert 3.7 < one.abs().max() < 5.8


def test_steps__the_smallest_uniform_number_has_a_logarithm(monkeypatch):
    for value in (0.0, 1 - 2**-24):
        monkeypatch.setattr(Draws, "uniform", lambda self, shape, value=value: torch.full(shape, value))
        assert Draws(keys(1)[0]).normal((2,)).isfinite().all()


DISTRIBUTIONS = {
    "rand": (lambda n: torch.rand(n), "uniform", ()),
    "rand_like": (lambda n: torch.rand_like(torch.zeros(n)), "uniform", ()),
    "uniform_": (lambda n: torch.empty(n).uniform_(-2, 3), "uniform", (-2, 5)),
    "randn": (lambda n: torch.randn(n), "norm", ()),
    "randn_like": (lambda n: torch.randn_like(torch.zeros(n)), "norm", ()),
    "normal_": (lambda n: torch.empty(n).normal_(4, 0.5), "norm", (4, 0.5)),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_steps__functions_of_torch_draw_what_they_promise_from_the_key(name):
    function, law, parameters = DISTRIBUTIONS[name]
    before = torch.get_rng_state()
    with drawing(3):
        first, second = function(20_000), function(20_000)
    with drawing(3):
        again = function(20_000)
    with drawing(4):
        other = function(20_000)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first, again)
    assert all(fits(a, law, parameters) for a in (first, second, other))
    for a in (second, other):
        assert abs(torch.corrcoef(torch.stack([first, a]))[0, 1]) < 0.03


def test_steps__sizes_dtypes_and_devices_are_those_asked_for():
    with drawing():
        for function in (torch.rand, torch.randn):
            for out in (function(2, 3), function((2, 3)), function([2, 3]), function(size=(2, 3))):
                assert (out.shape, out.dtype) == ((2, 3), torch.float32)
            assert function(()).shape == function(size=()).shape == ()
            assert function(2, dtype=torch.float64).dtype == torch.float64
            assert function(2, device="meta").is_meta
        for function in (torch.rand_like, torch.randn_like):
            assert function(torch.zeros(2, 3).double()).dtype == torch.float64
            assert function(torch.zeros(2, 3, dtype=torch.int64), dtype=torch.float32).shape == (2, 3)
            assert function(torch.zeros(2), device="meta").is_meta
        for dtype in (torch.float16, torch.bfloat16):
            drawn = torch.rand(100_000, dtype=dtype)
            assert (drawn.dtype, drawn.max() < 1) == (dtype, True)
            assert abs(drawn.double().mean() - 0.5) < 0.01


def test_steps__integers_are_equally_frequent():
    with drawing():
        calls = [
            (torch.randint(-2, 5, (70_000,)), -2, 7),
            (torch.randint(7, (70_000,)), 0, 7),
            (torch.randint(high=7, size=(70_000,)), 0, 7),
            (torch.randint(3, high=8, size=(50_000,), dtype=torch.int32), 3, 5),
            (torch.randint(low=3, high=8, size=(50_000,)), 3, 5),
        ]
        assert torch.randint(2, (3, 4)).shape == (3, 4)
    assert [drawn.dtype for drawn, _, _ in calls[2:4]] == [torch.int64, torch.int32]
    assert all(are_equally_frequent(drawn - low, n) for drawn, low, n in calls)


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda: torch.randint(2**24, (3,)), "range of 1 to 1048576 numbers, got 0 to 16777216"),
        (lambda: torch.randint(5, 5, (3,)), "got 5 to 5"),
        (lambda: torch.zeros(3, dtype=torch.int64).normal_(), r"torch\.int64"),
        (lambda: torch.zeros(3, dtype=torch.int64).uniform_(), r"torch\.int64"),
        (lambda: torch.empty(3, dtype=torch.bool).bernoulli_(0.5), r"torch\.bool"),
        (lambda: torch.randn(2, requires_grad=True), "requires_grad"),
    ],
)
def test_steps__what_cannot_be_drawn_is_refused(draw, message):
    with drawing(), pytest.raises(FLError, match=message):
        draw()


def test_steps__a_generator_of_their_own_and_usual_arguments_are_left_alone():
    def drawn():
        for draw in (
            lambda g: torch.rand(3, generator=g), lambda g: torch.randn(3, generator=g),
            lambda g: torch.randint(9, (3,), generator=g), lambda g: torch.empty(3).normal_(generator=g),
            lambda g: torch.empty(3).uniform_(generator=g), lambda g: torch.empty(9).bernoulli_(0.5, generator=g),
        ):  # fmt: skip
            yield draw(torch.Generator().manual_seed(0))

    expected = list(drawn())
    with drawing():
        assert all(map(torch.equal, drawn(), expected))
        usual = {"requires_grad": False, "memory_format": torch.preserve_format}
        assert torch.randn_like(torch.ones(2), **usual).shape == (2,)


@pytest.mark.parametrize("fill", [torch.Tensor.normal_, torch.Tensor.uniform_, torch.Tensor.bernoulli_])
def test_steps__a_shared_tensor_is_returned_or_noticed(fill):
    def one(key, ignore):
        with Drawing(Draws(key)):
            noise = torch.empty(9)
            drawn = fill(noise)
            return noise if ignore else drawn

    ignored, used = (torch.func.vmap(one, (0, None))(keys(1, 2), ignore) for ignore in (True, False))
    assert ignored.isnan().all()
    assert torch.equal(used, torch.stack([one(key, False) for key in keys(1, 2)]))
    assert not torch.equal(used[0], used[1])


SHAPES = [
    (F.dropout, (50, 40), 2), (F.dropout, (50, 40, 3), 3), (F.dropout1d, (60, 7), 1), (F.dropout1d, (8, 60, 3), 2),
    (F.dropout2d, (40, 30), 2), (F.dropout2d, (9, 60, 3), 2), (F.dropout2d, (9, 60, 3, 2), 2),
    (F.dropout3d, (60, 3, 2, 2), 1), (F.dropout3d, (9, 60, 2, 2, 2), 2),
]  # fmt: skip


@pytest.mark.parametrize(("function", "shape", "whole"), SHAPES)
@pytest.mark.filterwarnings("ignore:dropout2d")
def test_steps__dropout_means_what_torch_means(function, shape, whole):
    """Which share is dropped, what is dropped as a whole (the axes from `whole` on), and how the rest grows."""

    def share(out):
        kept = (out != 0).flatten(whole) if out.ndim > whole else (out != 0)[..., None]
        assert (kept.all(-1) | ~kept.any(-1)).all()
        return kept.double().mean()

    torch.manual_seed(0)
    assert 0.2 < share(function(torch.ones(shape))) < 0.8
    for p in (0.0, 0.1, 0.5, 0.9, 1.0):
        with drawing(1):
            full = torch.full(shape, 2.0)
            out = function(full, p)
            assert torch.equal(function(full, p, training=False), full)
            inplace = full.clone()
            assert function(inplace, p, inplace=True) is inplace
        assert abs(share(out) - (1 - p)) < 0.2
        for kept in (out[out != 0], inplace[inplace != 0]):
            torch.testing.assert_close(kept, torch.full_like(kept, 2 / (1 - p) if p < 1 else 0))


class Net(nn.Module):
    """Every kind of dropout, in modules and as functions, and every way to draw noise; one layer is called twice."""

    def __init__(self):
        super().__init__()
        self.conv, self.fc = nn.Conv2d(1, 4, 3), nn.Linear(4 * 36, 3)
        self.channels, self.entries = nn.Dropout2d(0.3), nn.Dropout(0.4)
        self.depth = StochasticDepth(0.5, "row")

    def forward(self, x):
        x = self.channels(self.entries(self.conv(x)))
        x = F.dropout(self.depth(x).flatten(1), 0.2, self.training)
        x = x + 0.1 * torch.randn_like(x) + torch.randn(144, dtype=x.dtype) * torch.rand(len(x), 1)
        x = x * torch.empty_like(x).normal_(1, 0.1) * torch.empty_like(x).uniform_(0.5, 2)
        return self.fc(self.entries(x + F.embedding(torch.randint(3, (len(x),)), self.fc.weight)))


@pytest.mark.parametrize("augment", [Augment(), Augment(crop=2, flip=True)])
def test_steps__backends_draw_the_same_as_one_client_by_hand(make_federation, augment):
    fed = make_federation(Net().double(), optimizer=SGD(0.1, 0.9), augment=augment)
    rng, starts = Rng(0, 1), surgery.broadcast(fed.initial(), 3)
    batches = make_batches([fed.clients[3].train], [3], fed.local.epochs, fed.local.batch_size, rng, "cpu")
    model = Net().double().train()
    surgery.load(model, fed.initial())
    optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9)
    for index, key in zip(batches.index[0], batches.keys[0]):
        optimizer.zero_grad()
        with Drawing(Draws(key)):
            images = fed.data.normalise(augment(fed.data.x[index], key), torch.float64)
            F.cross_entropy(model(images), fed.data.y[index]).backward()
        optimizer.step()
    for backend in ("loop", "workers", "vmap"):
        trained = fed.with_local(backend=backend).train(starts, [2, 0, 3], rng)
        for name, tensor in surgery.state(model).items():
            torch.testing.assert_close(trained.states[name][2], tensor, rtol=1e-9, atol=1e-9)
    assert not torch.allclose(fed.train(starts, [2, 0, 3], Rng(0, 2)).loss, trained.loss)


def test_steps__crops_and_flips_are_those_of_an_image_at_a_time():
    images = torch.randint(1, 256, (2, 6, 3, 5, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    out = Augment(crop=2, flip=True)(images, keys(3, 4))
    seen = set()
    for image, result in zip(images.flatten(0, 1), out.flatten(0, 1)):
        padded, views = F.pad(image, (2, 2, 2, 2)), {}
        for dy in range(5):
            for dx in range(5):
                view = padded[:, dy : dy + 5, dx : dx + 4]
                views[dy, dx, False], views[dy, dx, True] = view, view.flip(-1)
        seen.add(next(place for place, view in views.items() if torch.equal(view, result)))
    assert len(seen) > 6
    assert out.dtype == torch.uint8
    assert torch.equal(Augment()(images, keys(3, 4)), images)
    for k in range(2):
        assert torch.equal(Augment(2, True)(images[k], keys(3, 4)[k]), out[k])
    flipped = Augment(flip=True)(images, keys(3, 4))
    same = (flipped == images).flatten(2).all(2)
    assert 0 < same.sum() < 12
    assert torch.equal(flipped[~same], images[~same].flip(-1))


def test_steps__all_crops_are_drawn_equally_often():
    place = torch.arange(1, 50, dtype=torch.uint8).view(1, 1, 7, 7).expand(20_000, 1, 7, 7)
    assert are_equally_frequent(Augment(crop=3)(place, keys(11)[0])[:, 0, 3, 3].long() - 1, 49)


@pytest.mark.parametrize("last", ["filled", "partial"])
def test_steps__batches_follow_their_definition(last):
    """3, 4 and 7 samples in batches of 4, two steps on each: the shape is one for all."""
    parts = [torch.arange(10 * k, 10 * k + n) for k, n in enumerate((3, 4, 7))]
    batches = make_batches(parts, [5, 6, 7], 2, 4, Rng(0, 1), "cpu", repeats=2, last=last)
    assert batches.steps == (4, 4, 8)
    assert batches.real == (None if last == "filled" else ((3,) * 4, (4,) * 4, (4, 4, 3, 3) * 2))
    assert len(batches.keys[2].unique()) == 8  # no two steps draw alike
    for k, (part, client) in enumerate(zip(parts, (5, 6, 7))):
        generator = Rng(0, 1).torch("batches", client)
        orders = [torch.randperm(len(part), generator=generator) for _ in range(2)]
        expected = [rows for order in orders for rows in epoch_batches(part, order, 4, last == "partial")]
        for s in range(batches.steps[k]):
            assert batches.client_step(k, s).index.tolist() == expected[s // 2].tolist()
    alone = make_batches(parts[1:2], [6], 2, 4, Rng(0, 1), "cpu", repeats=2, last=last)
    later = make_batches(parts[1:2], [6], 2, 4, Rng(0, 2), "cpu", repeats=2, last=last)
    assert torch.equal(batches.rows[1, :4], alone.rows[0])  # whoever else takes part
    assert not torch.equal(alone.index, later.index)


def test_steps__batches_that_memory_cannot_hold_are_refused_by_what_makes_them_many():
    how = {"size": 2, "rng": Rng(0), "device": "cpu"}
    with fl_refused("memory", "152"):
        make_batches([torch.arange(4)], [0], epochs=2**60, **how)
    with fl_refused("memory", "152"):
        make_batches([torch.arange(4)], [0], epochs=3, repeats=2**60, **how)


def test_steps__scalar_parameters_are_clipped_alike():
    scalar, vector = torch.tensor(3.0), torch.tensor([0.0, 4.0])
    one, two = clip_gradients([scalar, vector], 1.0, lead=0), clip_gradients([scalar[None], vector[None]], 1.0, lead=1)
    torch.testing.assert_close(one[0], torch.tensor(0.6))
    torch.testing.assert_close([g[0] for g in two], one)


def test_steps__gradients_keep_their_types_where_they_are_clipped():
    low, high = torch.tensor([[3.0]], dtype=torch.bfloat16), torch.tensor([[4.0]])
    found = clip_gradients([low, high], 1.0, lead=1)
    assert [g.dtype for g in found] == [torch.bfloat16, torch.float32]
    torch.testing.assert_close([g.item() for g in found], [0.6, 0.8], rtol=0, atol=0.004)


def test_steps__schedules_end_where_they_should():
    assert [schedule("step", 1)(1), schedule("step", 2)(1)] == [1, 1]  # the first round is never decayed
    assert [schedule("step", 7)(r) for r in range(1, 8)] == pytest.approx(
        [1, 1, 1, 0.1, 0.1, 0.01, 0.01]
    )  # rounded down
    assert [schedule("constant", 10)(r) for r in (1, 10)] == [1, 1]
    assert [schedule("step", 400, 0.1, (0.375, 0.625))(r) for r in (150, 151, 250, 251)] == pytest.approx(
        [1, 0.1, 0.1, 0.01]  # HeteroFL's CIFAR setting: x0.1 at 150 and 250
    )
    cosine = [schedule("cosine", 20)(r) for r in range(1, 21)]
    assert cosine[0] == 1
    assert cosine == sorted(cosine, reverse=True)
    assert 0 < cosine[-1] < 0.01
    exponential = [schedule("exponential", 3, decay=0.998)(r) for r in (1, 2, 1001)]
    assert exponential == pytest.approx([1, 0.998, 0.998**1000])
    for bad in (
        {"name": "linear"},
        {"name": "step", "at": (1.5,)},
        {"name": "step", "factor": 0.0},
        {"name": "exponential", "decay": 0.0},
        {"name": "constant", "warmup": 10},
    ):
        with pytest.raises(FLError):
            schedule(**{"rounds": 10, **bad})


@pytest.mark.parametrize("name", SCHEDULES)
def test_steps__a_warm_up_rises_to_what_the_schedule_says(name):
    plain, warm = schedule(name, 20), schedule(name, 20, warmup=4)
    assert [warm(r) / plain(r) for r in range(1, 7)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1, 1])
    assert [warm(r) for r in range(5, 21)] == [plain(r) for r in range(5, 21)]
    assert [schedule(name, 20, warmup=0)(r) for r in range(1, 21)] == [plain(r) for r in range(1, 21)]
    longer = [schedule(name, 40, warmup=4)(r) for r in range(1, 21)]
    assert (longer != [warm(r) for r in range(1, 21)]) is SCHEDULES[name]  # what a resumed run may not change

"""What else than dropout a model or an objective draws within a step: uniform and normal noise, integers."""

import pytest
import torch
import torch.nn.functional as F
from scipy import stats
from torch import nn

import surgery
from fl.base.errors import FLError
from fl.base.rng import Rng
from fl.engine.draws import Drawing, Draws


def keys(*numbers):
    return torch.tensor(numbers, dtype=torch.int32)


def drawing(key=3):
    return Drawing(Draws(keys(key)[0]))


def test_normal_numbers_are_normal_and_independent():
    """Kolmogorov-Smirnov, moments, and correlations of values and squares between neighbours, keys and draws."""
    draws = Draws(keys(0, 1, -(2**31), 123456789))
    one, two = (draws.normal((100_000,)).double() for _ in range(2))
    for row in (*one, *two):
        assert row.isfinite().all()
        assert stats.kstest(row.numpy(), "norm").pvalue > 1e-4
        assert abs(row.mean()) < 0.015
        assert abs(row.var() - 1) < 0.02
        assert 3.7 < row.abs().max() < 5.8
    pairs = [(one[0], one[1]), (one[0], one[3]), (one[0], two[0]), (one[2, 1:], one[2, :-1])]
    for a, b in pairs:
        for power in (1, 2):
            assert abs(torch.corrcoef(torch.stack([a**power, b**power]))[0, 1]) < 0.015


def test_the_smallest_uniform_number_has_a_logarithm(monkeypatch):
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
def test_functions_of_torch_draw_what_they_promise_from_the_key(name):
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
    for a in (first, second, other):
        assert stats.kstest(a.double().numpy(), law, parameters).pvalue > 1e-4
    for a in (second, other):
        assert abs(torch.corrcoef(torch.stack([first, a]))[0, 1]) < 0.03


def test_sizes_dtypes_and_devices_are_those_asked_for():
    with drawing():
        for function in (torch.rand, torch.randn):
            for out in (function(2, 3), function((2, 3)), function([2, 3]), function(size=(2, 3))):
                assert out.shape == (2, 3)
                assert out.dtype == torch.float32
            assert function(()).shape == function(size=()).shape == ()
            assert function(2, dtype=torch.float64).dtype == torch.float64
            assert function(2, device="meta").is_meta
        for function in (torch.rand_like, torch.randn_like):
            assert function(torch.zeros(2, 3).double()).dtype == torch.float64
            assert function(torch.zeros(2, 3, dtype=torch.int64), dtype=torch.float32).shape == (2, 3)
            assert function(torch.zeros(2), device="meta").is_meta
        for dtype in (torch.float16, torch.bfloat16):
            drawn = torch.rand(100_000, dtype=dtype)
            assert drawn.dtype == dtype
            assert drawn.max() < 1
            assert abs(drawn.double().mean() - 0.5) < 0.01


def test_integers_are_equally_frequent():
    with drawing():
        calls = [
            (torch.randint(-2, 5, (70_000,)), -2, 7),
            (torch.randint(7, (70_000,)), 0, 7),
            (torch.randint(high=7, size=(70_000,)), 0, 7),
            (torch.randint(3, high=8, size=(50_000,), dtype=torch.int32), 3, 5),
            (torch.randint(low=3, high=8, size=(50_000,)), 3, 5),
        ]
        assert torch.randint(2, (3, 4)).shape == (3, 4)
        with pytest.raises(FLError, match="range of 1 to 1048576 numbers, got 0 to 16777216"):
            torch.randint(2**24, (3,))
        with pytest.raises(FLError, match="got 5 to 5"):
            torch.randint(5, 5, (3,))
    assert [drawn.dtype for drawn, _, _ in calls[2:4]] == [torch.int64, torch.int32]
    for drawn, low, n in calls:
        assert drawn.min() >= low
        counts = torch.bincount(drawn - low, minlength=n)
        assert len(counts) == n
        assert stats.chisquare(counts.numpy()).pvalue > 1e-4


class Noisy(nn.Module):
    """Draws in every way that makes a tensor, and in place in tensors that belong to a client."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(64, 3)

    def forward(self, x):
        x = x.flatten(1)
        if self.training:
            x = x + 0.1 * torch.randn_like(x) + torch.randn(64, dtype=x.dtype) * torch.rand(len(x), 1)
            x = x * torch.empty_like(x).normal_(1, 0.1) * torch.empty_like(x).uniform_(0.5, 2)
            x = x + F.embedding(torch.randint(3, (len(x),)), self.fc.weight)
        return self.fc(x)


def test_backends_draw_the_same(make_federation):
    start = None
    for backend in ("loop", "workers", "vmap"):
        fed = make_federation(Noisy().double(), backend=backend)
        start = start or surgery.broadcast(fed.initial(), 3)
        trained = fed.train(start, [2, 0, 3], Rng(0, 1))
        if backend == "loop":
            expected = trained
            later = fed.train(start, [2, 0, 3], Rng(0, 2))
        torch.testing.assert_close(trained.loss, expected.loss, rtol=1e-9, atol=1e-9)
        for name in start:
            torch.testing.assert_close(trained.states[name], expected.states[name], rtol=1e-9, atol=1e-9)
    assert not torch.allclose(later.loss, expected.loss)


@pytest.mark.parametrize("fill", [torch.Tensor.normal_, torch.Tensor.uniform_])
def test_a_shared_tensor_is_returned_or_noticed(fill):
    def one(key, ignore):
        with Drawing(Draws(key)):
            noise = torch.empty(3)
            drawn = fill(noise)
            return noise if ignore else drawn

    ignored, used = (torch.func.vmap(one, (0, None))(keys(1, 2), ignore) for ignore in (True, False))
    assert ignored.isnan().all()
    assert torch.equal(used, torch.stack([one(key, False) for key in keys(1, 2)]))
    assert not torch.equal(used[0], used[1])


def test_a_generator_of_their_own_is_left_alone_and_integers_are_refused():
    def seeded():
        return torch.Generator().manual_seed(0)

    def drawn():
        yield torch.rand(3, generator=seeded())
        yield torch.randn(3, generator=seeded())
        yield torch.randint(9, (3,), generator=seeded())
        yield torch.empty(3).normal_(generator=seeded())
        yield torch.empty(3).uniform_(generator=seeded())

    expected = list(drawn())
    with drawing():
        assert all(map(torch.equal, drawn(), expected))
        with pytest.raises(FLError, match=r"normal_ of torch\.int64"):
            torch.zeros(3, dtype=torch.int64).normal_()
        with pytest.raises(FLError, match=r"uniform_ of torch\.int64"):
            torch.zeros(3, dtype=torch.int64).uniform_()


def test_usual_arguments_are_taken_and_others_named():
    with Drawing(Draws(torch.tensor(7, dtype=torch.int32))):
        plain = torch.randn_like(torch.ones(2), requires_grad=False, memory_format=torch.preserve_format)
        assert plain.shape == (2,)
        with pytest.raises(FLError, match=r"randn\(..., requires_grad=True\) cannot be drawn within a step"):
            torch.randn(2, requires_grad=True)

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fl.errors import FLError
from fl.partition import dirichlet, hold_out, iid


def assert_partition(parts, n):
    assert torch.cat(parts).sort().values.tolist() == list(range(n))


def balanced(n, classes=10):
    return torch.arange(n) % classes


@given(st.integers(1, 300), st.integers(1, 20), st.integers(0, 99))
def test_iid_deals_out_everything_evenly(n, clients, seed):
    if n < clients:
        return
    parts = iid(balanced(n), clients, 1, np.random.default_rng(seed))
    assert_partition(parts, n)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@settings(max_examples=40)
@given(st.integers(200, 1000), st.integers(1, 15), st.floats(0.05, 100), st.integers(0, 99))
def test_dirichlet_deals_out_everything_with_the_minimum(n, clients, alpha, seed):
    parts = dirichlet(balanced(n), clients, alpha, 1, np.random.default_rng(seed))
    assert_partition(parts, n)
    assert min(map(len, parts)) >= 1


def label_shares(alpha, clients=20, n=20000):
    y = balanced(n)
    parts = dirichlet(y, clients, alpha, 10, np.random.default_rng(0))
    return torch.stack([torch.bincount(y[part], minlength=10) / len(part) for part in parts]), parts


def test_small_alpha_is_more_heterogeneous():
    concentration = [label_shares(alpha)[0].square().sum(1).mean().item() for alpha in (0.1, 0.5, 100.0)]
    assert concentration[0] > concentration[1] > concentration[2]
    assert concentration[2] < 0.12  # near the 0.1 of uniform labels over ten classes
    assert concentration[0] > 0.3


def test_full_clients_get_no_more():
    """The balance rule: who holds N / clients samples gets nothing of the classes that follow."""
    n, clients = 20000, 20
    y = balanced(n)
    _, parts = label_shares(0.1)
    for part in parts:
        counts = torch.bincount(y[part], minlength=10)
        last = int(counts.nonzero().max())
        assert counts[:last].sum() < n / clients


def test_the_same_seed_gives_the_same_split():
    a, b, other = (dirichlet(balanced(500), 5, 0.5, 5, np.random.default_rng(seed)) for seed in (1, 1, 2))
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    assert any(len(x) != len(y) for x, y in zip(a, other, strict=True))


def test_an_alpha_that_leaves_clients_empty_is_refused():
    with pytest.raises(FLError, match=r"alpha=0\.001 leaves a client with \d+ of 10 samples"):
        dirichlet(balanced(1000), 50, 0.001, 10, np.random.default_rng(0))
    with pytest.raises(FLError, match="above 0"):
        dirichlet(balanced(1000), 5, 0.0, 1, np.random.default_rng(0))
    for split in (lambda *a: iid(*a), lambda labels, k, least, rng: dirichlet(labels, k, 1.0, least, rng)):
        with pytest.raises(FLError, match="fewer clients"):
            split(balanced(30), 5, 10, np.random.default_rng(0))


@given(st.lists(st.integers(4, 40), min_size=1, max_size=6), st.floats(0.05, 0.4), st.floats(0.05, 0.4))
def test_hold_out_splits_each_client_without_loss(sizes, valid, test):
    parts = list(torch.arange(sum(sizes)).split(sizes))
    try:
        splits = hold_out(parts, valid, test, np.random.default_rng(0))
    except FLError:
        assert any(max(1, round(valid * n)) + max(1, round(test * n)) >= n for n in sizes)
        return
    for part, split in zip(parts, splits, strict=True):
        assert torch.cat(split).sort().values.tolist() == part.tolist()
        assert len(split.valid) == max(1, round(valid * len(part)))
        assert len(split.test) == max(1, round(test * len(part)))


def test_without_shares_all_is_training_data():
    (split,) = hold_out([torch.arange(5)], 0, 0, np.random.default_rng(0))
    assert (len(split.train), len(split.valid), len(split.test)) == (5, 0, 0)


@pytest.mark.parametrize(("valid", "test"), [(-0.1, 0), (0.5, 0.5), (0, 1.0)])
def test_impossible_shares_are_refused(valid, test):
    with pytest.raises(FLError, match="below 1"):
        hold_out([torch.arange(5)], valid, test, np.random.default_rng(0))
    with pytest.raises(FLError, match="too few"):
        hold_out([torch.arange(2)], 0.4, 0.4, np.random.default_rng(0))

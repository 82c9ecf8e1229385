"""Clients are indices: what they cost, and that packing them changes nothing."""

import gc
import sys
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
import slow_partition as slow
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import fl
from fl.algorithms import fedavg
from fl.base.errors import FLError
from fl.base.rng import Rng, draw
from fl.data import Dataset
from fl.data.__main__ import main as look
from fl.federation import Federation, LocalTraining
from fl.partition import Parts, Split, Splits, deal, hold_out
from fl.partition.unlabelled import _unequal
from fl.run import main
from fl.runs.evaluate import score_clients, summarise_clients

MILLION = 1_000_000
seeds = st.integers(0, 99)


def rng(seed=0):
    return np.random.default_rng(seed)


def labels(n, classes, seed):
    return torch.from_numpy(rng(seed).integers(classes, size=n))


def assert_same(parts, expected):
    assert isinstance(parts, Parts)
    assert [part.tolist() for part in parts] == [part.tolist() for part in expected]
    assert parts.samples.dtype == parts.offsets.dtype == torch.int64


ragged = st.lists(st.lists(st.integers(0, 50), min_size=1, max_size=30), min_size=1, max_size=8)
shares = st.sampled_from([0, 0.1, 0.25, 0.3])


@given(ragged, shares, shares, seeds)
def test_hold_out_is_that_of_every_client_on_its_own(lists, valid, test, seed):
    """Also for samples that are not sorted, and that several clients have, or one twice."""
    parts = [torch.tensor(part) for part in lists]
    try:
        splits = hold_out(parts, valid, test, rng(seed))
    except FLError:
        assert any(sum(max(1, round(s * len(p))) for s in (valid, test) if s) >= len(p) for p in parts)
        return
    for part, expected in zip(
        (splits.train, splits.valid, splits.test), zip(*slow.hold_out(parts, valid, test, rng(seed))), strict=True
    ):
        assert_same(part, expected)


@given(st.integers(1, 400), st.integers(1, 40), st.booleans(), seeds)
def test_iid_deals_as_client_by_client(n, clients, unequal, seed):
    if n < clients:
        return
    y = torch.zeros(n)
    parts, _ = deal(y, "iid", clients, rng(seed), minimum=0, unequal=unequal)
    assert_same(parts, slow.iid(n, clients, rng(seed), unequal))


@given(st.integers(1, 300), st.floats(1, 6), seeds)
def test_unequal_sizes_are_mended_as_one_by_one(clients, mean, seed):
    n = int(mean * clients)
    assert _unequal(n, clients, rng(seed)).tolist() == slow.unequal(n, clients, rng(seed)).tolist()


@given(st.integers(40, 400), st.integers(1, 40), st.integers(1, 12), st.floats(0.001, 10), seeds)
def test_dirichlet_deals_as_client_by_client(n, clients, classes, alpha, seed):
    y = labels(n, classes, seed)
    parts, _ = deal(y, "dirichlet", clients, rng(seed), minimum=0, alpha=alpha)
    assert_same(parts, slow.dirichlet(y.numpy(), clients, alpha, rng(seed)))


@given(st.integers(400, 900), st.integers(1, 40), st.integers(1, 8), st.floats(0.01, 1), seeds)
def test_shards_deal_as_client_by_client(n, clients, classes, share, seed):
    y = labels(n, classes, seed)
    try:
        parts, _ = deal(y, "shards", clients, rng(seed), minimum=1, class_share=share)
    except FLError:
        return
    assert_same(parts, slow.shards(y.numpy(), clients, share, rng(seed)))


@given(st.sampled_from([((3,), (2,)), ((2,), (8,)), ((5,), (1,)), ((2, 3), (1, 2))]), st.integers(5, 30), seeds)
def test_clusters_deal_as_client_by_client(levels, clients, seed):
    y = labels(500, 8, seed)
    counts, classes = levels
    parts, _ = deal(y, "clusters", clients, rng(seed), minimum=0, clusters=counts, cluster_classes=classes)
    assert_same(parts, slow.clusters(y.numpy(), clients, *levels, rng(seed)))


@given(st.integers(1, 5), seeds)
def test_natural_deals_as_client_by_client(clients, seed):
    owners = labels(300, 6, seed)
    parts, _ = deal(owners, "natural", clients, rng(seed), minimum=1, owners=owners)
    assert_same(parts, slow.natural(owners.numpy(), clients, 1, rng(seed)))


@given(ragged)
def test_packed_clients_are_a_sequence(lists):
    splits = [Split(torch.tensor(part), torch.tensor(part[1:]).long(), torch.tensor(part[:1])) for part in lists]
    packed = Splits.of(splits)
    assert Splits.of(packed) is packed
    assert len(packed) == len(splits)
    assert packed.total == 2 * sum(map(len, lists))
    for way in (list(packed), packed[:], [packed[k] for k in range(len(splits))]):
        assert [[part.tolist() for part in s] for s in way] == [[part.tolist() for part in s] for s in splits]
    assert packed[-1].train.tolist() == lists[-1]
    with pytest.raises(IndexError):
        packed[len(splits)]


def test_parts_of_different_clients_are_refused():
    two, three = Parts.of([torch.arange(1)] * 2), Parts.of([torch.arange(1)] * 3)
    with pytest.raises(FLError, match="of 2, 3 and 2 clients"):
        Splits(two, three, two)


# Sampling


@given(st.one_of(st.integers(1, 300), st.integers(29_000, 31_000)), st.data())
def test_the_draw_is_the_start_of_a_permutation(n, data):
    k, seed = data.draw(st.integers(1, min(n, 300))), data.draw(st.integers(0, 2**32))
    expected = torch.randperm(n, generator=torch.Generator().manual_seed(seed))[:k].tolist()
    assert draw(n, k, torch.Generator().manual_seed(seed)) == expected


@pytest.mark.parametrize("n", [10**6, 10**7])
def test_so_it_is_among_many(n):
    expected = torch.randperm(n, generator=Rng(3, 5).torch("sample"))[:50].tolist()
    assert draw(n, 50, Rng(3, 5).torch("sample")) == expected


@given(st.integers(1, 2**40), st.data())
def test_what_is_drawn_is_distinct(n, data):
    k = data.draw(st.integers(1, min(n, 40)))
    drawn = draw(n, k, torch.Generator().manual_seed(data.draw(seeds)))
    assert len(set(drawn)) == k
    assert all(0 <= number < n for number in drawn)


def test_all_ordered_draws_are_equally_likely():
    generator = torch.Generator().manual_seed(0)
    drawn = [tuple(draw(4, 2, generator)) for _ in range(6000)]
    counts = np.array([drawn.count((a, b)) for a in range(4) for b in range(4) if a != b])
    assert ((counts - 500) ** 2 / 500).sum() < 31.3  # chi-square, 11 degrees of freedom, p = 0.001
    assert counts.sum() == 6000


# What a population costs


def population(clients, each=8, participants=10):
    """Clients that share the samples of one data set."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(256, (1000, 1, 8, 8), generator=generator).byte()
    data = Dataset("random", x, labels(1000, 3, 0), x[:9], labels(9, 3, 1), classes=3)
    samples = torch.randint(1000, (clients * each,), generator=generator)
    parts = Parts(samples, torch.arange(clients + 1) * each)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 3))
    return Federation(model, data, hold_out(parts, 0, 0, rng()), participants, LocalTraining(1, 4))


class Watch(TorchDispatchMode):
    """Counts operations, and the elements that they read or write, other than by a view."""

    def __init__(self):
        super().__init__()
        self.operations = self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.operations += 1
        if not func.is_view:
            leaves = torch.utils._pytree.tree_leaves((args, kwargs, result))
            self.largest = max([self.largest, *(t.numel() for t in leaves if isinstance(t, torch.Tensor))])
        return result


def calls_of(work):
    """The number of Python and C functions that are called."""
    calls = 0

    def count(frame, event, arg):
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(before)
    return calls


def peak_of(work):
    """The peak of Python's memory, in bytes."""
    gc.collect()
    tracemalloc.start()
    work()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def cost_of_a_round(clients):
    """Operations, the largest tensor, Python calls and the peak of Python's memory in round 2 of FedAvg."""
    fed = population(clients)
    algorithm = fedavg(fed)
    server = algorithm.init()

    def work(number):
        draws = Rng(0, number)
        after, _ = algorithm.round(server, fed.sample(draws), draws)
        return summarise_clients(score_clients(fed, lambda x, client: algorithm.predict(after, x, client)))

    work(1)
    with Watch() as watch:
        work(2)
    return watch.operations, watch.largest, calls_of(lambda: work(2)), min(peak_of(lambda: work(2)) for _ in range(2))


@pytest.mark.slow
def test_a_round_costs_the_same_among_a_million_clients():
    few, many = cost_of_a_round(100), cost_of_a_round(MILLION)
    assert many[0] == few[0]
    assert many[1] == few[1] < MILLION
    assert many[2] == pytest.approx(few[2], rel=0.05)
    assert many[3] < few[3] + 100_000


def test_clients_are_nothing_but_indices():
    y = labels(60_000, 10, 0)
    splits = hold_out(deal(y, "iid", 10_000, rng(), minimum=1).parts, 0.2, 0.2, rng())
    held = [t for parts in (splits.train, splits.valid, splits.test) for t in (parts.samples, parts.offsets)]
    assert sum(t.untyped_storage().nbytes() for t in held) == 8 * (60_000 + 3 * 10_001)
    view = splits[7].train
    assert view.untyped_storage().data_ptr() == splits.train.samples.untyped_storage().data_ptr()


def test_a_million_clients_are_dealt_out_in_seconds():
    """No work is done client by client, which would be a call each at least."""
    y, made = torch.zeros(3 * MILLION), []

    def million():
        made.append(hold_out(deal(y, "iid", MILLION, rng(), minimum=1, unequal=True).parts, 0, 0, rng()))

    assert calls_of(million) < 1000
    assert made[0].total == 3 * MILLION
    assert made[0].train.sizes.max() <= 2 * made[0].train.sizes.min()


def test_any_sequence_of_splits_makes_a_federation(make_federation):
    fed = make_federation()
    assert isinstance(fed.clients, Splits)
    assert replace(fed, clients=list(fed.clients)[:3]).clients[2].train.tolist() == fed.clients[2].train.tolist()
    empty = torch.empty(0, dtype=torch.int64)
    with pytest.raises(FLError, match=r"client 1 has no training samples \(2 such clients\)"):
        replace(fed, clients=[fed.clients[0], *[Split(empty, empty, empty)] * 2])
    with pytest.raises(FLError, match="there are 0 clients"):
        replace(fed, clients=[])


# What a run says about its partition

SHORT = ["--rounds", "1", "--local-epochs", "1", "--width", "0.1", "--batch-size", "50"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--partition", "shards"], "shards0.2 leaves 77 of 1,437 training samples unused"),
        (["--partition", "clusters", "--clusters", "2", "--cluster-classes", "1"], "clusters2 leaves"),
        (["--partition", "iid", "--local-test", "0.2"], None),
    ],
)
def test_a_run_says_how_many_samples_are_not_used(flags, said, tmp_path, caplog):
    assert main([*SHORT, *flags, "--out", str(tmp_path)]) == 0
    lines = [record.getMessage() for record in caplog.records]
    assert [line for line in lines if "unused" in line] == [line for line in lines if said and said in line]
    assert bool(said) == any("unused" in line for line in lines)


@pytest.mark.parametrize("command", [main, look])
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--partition", "iid", "--alpha", "0.1"], "--alpha is for --partition dirichlet, not for iid"),
        (["--unequal"], "--unequal is for --partition iid, not for dirichlet"),
        (["--partition", "iid", "--cluster-classes", "2"], "--cluster-classes is for --partition clusters"),
    ],
)
def test_an_option_of_another_partition_is_refused(command, flags, message, capsys):
    assert command(flags) == 2
    _, err = capsys.readouterr()
    assert message in err
    assert err.count("\n") == 1


def test_a_recipe_s_own_options_do_not_hinder_another_partition(monkeypatch):
    monkeypatch.setitem(fl.settings.recipes.RECIPES, "skewed", lambda: fl.Config(alpha=0.1))
    monkeypatch.setattr(fl.settings.recipes.RECIPES["skewed"], "__doc__", "A recipe.")
    config, _ = fl.run.parse(["skewed", "--partition", "iid"])
    assert (config.partition, config.alpha) == ("iid", fl.Config.alpha)  # nothing reads the recipe's
    config.check()

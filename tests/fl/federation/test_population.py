"""Clients are indices: how they are packed and drawn, who is there, and what they cost."""

import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import fl_refused
from torch.utils._python_dispatch import TorchDispatchMode
from wrapped import within

import fl
from fl.algorithms.fedavg import METHOD as fedavg
from fl.base.errors import FLError
from fl.base.rng import Rng, draw
from fl.data import Dataset
from fl.extensions.presence import Presence, PresenceOptions, make_presence
from fl.federation import Federation, LocalTraining
from fl.partition import Parts, Split, Splits, deal, hold_out
from fl.run import main
from fl.runs.evaluate import score_clients
from fl.settings import Config

MILLION = 1_000_000
ALWAYS = torch.iinfo(torch.int64).max
seeds = st.integers(0, 99)


def rng(seed=0):
    return np.random.default_rng(seed)


def labels(n, classes, seed):
    return torch.from_numpy(rng(seed).integers(classes, size=n))


ragged = st.lists(st.lists(st.integers(0, 50), min_size=1, max_size=30), min_size=1, max_size=8)
shares = st.sampled_from([0, 0.1, 0.25, 0.3])


@given(ragged, shares, shares, seeds)
def test_population__hold_out_is_that_of_every_client_on_its_own(lists, valid, test, seed):
    """Also for samples that are not sorted, and that several clients have, or one twice."""
    parts, sizes = [torch.tensor(part) for part in lists], []
    for part in parts:
        v, t = (max(1, round(share * len(part))) if share else 0 for share in (valid, test))
        sizes.append((len(part) - v - t, v, t))
    if min(n for n, _, _ in sizes) < 1:
        with pytest.raises(FLError):
            hold_out(parts, valid, test, rng(seed))
        return
    splits, draws = hold_out(parts, valid, test, rng(seed)), rng(seed)
    for part, (n, v, t), split in zip(parts, sizes, splits, strict=True):
        order = part[torch.from_numpy(draws.permutation(len(part)))] if v + t else part
        assert [one.tolist() for one in split] == [one.sort().values.tolist() for one in order.split([n, v, t])]


@given(ragged)
def test_population__packed_clients_are_a_sequence(lists):
    splits = [Split(torch.tensor(part), torch.tensor(part[1:]).long(), torch.tensor(part[:1])) for part in lists]
    packed = Splits.of(splits)
    assert Splits.of(packed) is packed
    assert len(packed) == len(splits)
    assert packed.total == len(set().union(*lists))  # samples of several clients count once
    for way in (list(packed), packed[:], [packed[k] for k in range(len(splits))]):
        assert [[part.tolist() for part in s] for s in way] == [[part.tolist() for part in s] for s in splits]
    assert packed[-1].train.tolist() == lists[-1]
    with pytest.raises(IndexError):
        packed[len(splits)]


def test_population__parts_of_different_clients_are_refused():
    two, three = Parts.of([torch.arange(1)] * 2), Parts.of([torch.arange(1)] * 3)
    with fl_refused("argument"):
        Splits(two, three, two)


# Drawing


@given(st.one_of(st.integers(1, 300), st.integers(29_000, 31_000), st.just(MILLION)), st.data())
@settings(max_examples=60)
def test_population__the_draw_is_the_start_of_a_permutation(n, data):
    k, seed = data.draw(st.integers(1, min(n, 300))), data.draw(st.integers(0, 2**32))
    expected = torch.randperm(n, generator=torch.Generator().manual_seed(seed))[:k].tolist()
    assert draw(n, k, torch.Generator().manual_seed(seed)) == expected


@given(st.integers(1, 2**40), st.data())
def test_population__what_is_drawn_is_distinct(n, data):
    k = data.draw(st.integers(1, min(n, 40)))
    drawn = draw(n, k, torch.Generator().manual_seed(data.draw(seeds)))
    assert len(set(drawn)) == k
    assert all(0 <= number < n for number in drawn)


# What a population costs


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


def cost_of_a_round(clients):
    """Operations, the largest tensor and Python calls in round 2 of FedAvg; clients share one data set's samples."""
    x, samples = torch.zeros(1000, 1, 8, 8, dtype=torch.uint8), labels(clients * 8, 1000, 0)
    data = Dataset("random", x, labels(1000, 3, 0), x[:9], labels(9, 3, 1), classes=3)
    splits = hold_out(Parts(samples, torch.arange(clients + 1) * 8), 0, 0, rng())
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 3))
    fed = Federation(model, data, splits, 10, LocalTraining(1, 4))
    algorithm = fedavg(fed)
    server = algorithm.init()

    def work(number):
        after, _ = algorithm.round(server, fed.sample(Rng(0, number)), Rng(0, number))
        score_clients(fed, lambda: algorithm.client_models(after))

    work(1)
    with Watch() as watch:
        work(2)
    return watch.operations, watch.largest, calls_of(lambda: work(2))


def test_population__a_round_costs_the_same_among_a_hundred_thousand_clients():
    few, many = cost_of_a_round(100), cost_of_a_round(100_000)
    assert many[0] == few[0]
    assert many[1] == few[1] < 100_000
    assert many[2] == pytest.approx(few[2], rel=0.05)


@pytest.mark.slow
def test_deal__a_million_clients_are_nothing_but_indices_and_dealt_out_at_once():
    """No work is done client by client, which would be a call each at least."""
    y, made = torch.zeros(3 * MILLION), []

    def million():
        parts, _ = deal(y, "iid", MILLION, rng(), minimum=1, unequal=True)
        made.append(hold_out(parts, 0, 0, rng()))

    assert calls_of(million) < 1000
    (splits,) = made
    assert splits.total == 3 * MILLION
    assert splits.train.sizes.max() <= 2 * splits.train.sizes.min()
    held = [t for parts in (splits.train, splits.valid, splits.test) for t in (parts.samples, parts.offsets)]
    assert sum(t.untyped_storage().nbytes() for t in held) == 8 * (3 * MILLION + 3 * (MILLION + 1))
    assert splits[7].train.untyped_storage().data_ptr() == splits.train.samples.untyped_storage().data_ptr()


# What commands say about a partition


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--partition", "shards"], "shards0.2 leaves 77 of 1,437 training samples unused"),
        (["--partition", "iid", "--local-test", "0.2"], None),
    ],
)
def test_population__a_run_says_how_many_samples_are_not_used(flags, said, tmp_path, caplog):
    short = ["--rounds", "1", "--local-epochs", "1", "--width", "0.1", "--batch-size", "50"]
    assert main([*short, *flags, "--out", str(tmp_path)]) == 0
    lines = [record.getMessage() for record in caplog.records]
    assert [line for line in lines if "unused" in line] == [line for line in lines if said and said in line]
    assert bool(said) == any("unused" in line for line in lines)


def test_population__a_recipe_s_own_options_do_not_hinder_another_partition(monkeypatch):
    monkeypatch.setitem(fl.settings.recipes.RECIPES, "skewed", lambda: fl.Experiment.of(alpha=0.1))
    monkeypatch.setattr(fl.settings.recipes.RECIPES["skewed"], "__doc__", "A recipe.")
    config = fl.run.parse(["skewed", "--partition", "iid"]).one_run()
    assert config == fl.Config.of(partition="iid")  # nothing reads the recipe's
    config.check()


# Clients that come and go


@pytest.mark.parametrize(("clients", "joining", "leaving"), [(10, 0.2, 0.3), (7, 0.5, 0.0), (20, 0.0, 0.25)])
def test_population__shares_of_the_clients_come_and_go(clients, joining, leaving):
    """Everyone is there in one unbroken time, which lacks the first round or the last of those run, never both."""
    rounds, coming, going = 5, round(joining * clients), round(leaving * clients)
    starts, ends = set(), set()
    for seed in range(40):
        there, again = (make_presence(clients, 2, joining, leaving, rounds, Rng(seed)) for _ in range(2))
        assert all(map(torch.equal, there, again))
        joins, leaves = there.first > 1, there.last < rounds
        assert (joins.sum(), leaves.sum(), (joins & leaves).sum()) == (coming, going, 0)
        assert (there.first <= there.last).all()
        for number in range(1, rounds + 1):
            times = zip(there.first.tolist(), there.last.tolist())
            assert there.at(number) == [k for k, (first, last) in enumerate(times) if first <= number <= last]
        starts |= set(there.first[joins].tolist())
        ends |= set(there.last[leaves].tolist())
    assert starts == (set(range(2, rounds + 1)) if coming else set())
    assert ends == (set(range(1, rounds)) if going else set())


@pytest.mark.parametrize(
    ("joining", "leaving", "rounds", "message"),
    [
        (0.4, 0.3, 9, "--presence.joining.*0.4.*--presence.leaving.*0.3.*10"),
        (-0.1, 0.2, 9, r"\[0, 1\]"),
        (0.1, 1.2, 9, r"\[0, 1\]"),
        (0.1, 0.0, 1, "--rounds"),
        (0.04, 0.3, 9, "--presence.joining.*0.04.*10.*0.1"),
        (0.3, 0.04, 9, "--presence.leaving.*0.04.*10"),
    ],
)
def test_population__who_cannot_come_and_go_is_refused(joining, leaving, rounds, message):
    assert make_presence(10, 4, 0.0, 0.0, 1, Rng(0)) is None
    assert make_presence(10, 4, 0.3, 0.3, 2, Rng(0)).at(1)
    with pytest.raises(FLError, match=message):
        make_presence(10, 4, joining, leaving, rounds, Rng(0))


def test_population__a_method_that_draws_its_clients_refuses_those_who_come_and_go():
    with fl_refused("unsupported", "--presence"):
        Config.of(algorithm="clusamp", presence=PresenceOptions(joining=0.1)).check()


def presence(first, last):
    return Presence(torch.tensor(first), torch.tensor(last))


def test_population__a_round_draws_from_those_who_are_there(make_federation):
    """K distinct ones, each equally often; with everyone there the very same as without presence."""
    fed = make_federation(sizes=(3, 4, 5, 6, 7, 8), participants=2)
    some = presence([1, 1, 3, 1, 2, 1], [ALWAYS, 2, ALWAYS, ALWAYS, ALWAYS, 4])
    moving, always = (within(fedavg(fed), presence=one) for one in (some, presence([1] * 6, [ALWAYS] * 6)))
    server = moving.init()
    for number in range(1, 7):
        there, counts = some.at(number), torch.zeros(6)
        for seed in range(150):
            drawn = moving.choose(server, Rng(seed, number))
            assert len(set(drawn)) == 2
            assert set(drawn) <= set(there)
            counts[drawn] += 1
        assert (counts[there] > 300 / len(there) * 0.6).all()
        assert always.choose(server, Rng(0, number)) == fed.sample(Rng(0, number))

"""Clients are indices: how they are dealt out and drawn, who is there, and what they cost."""

import sys
from dataclasses import replace

import numpy as np
import pytest
import slow_partition as slow
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import fl
from fl.algorithms import FedFAOptions, fedavg, fedfa
from fl.base.errors import FLError
from fl.base.rng import Rng, draw
from fl.data import Dataset
from fl.data.__main__ import main as look
from fl.federation import Federation, LocalTraining
from fl.federation.presence import Presence, make_presence
from fl.models.fleet import make_fleet
from fl.partition import Parts, Split, Splits, clusters, dirichlet, hold_out, iid, natural, shards
from fl.run import main
from fl.runs.evaluate import score_clients
from fl.settings import Config
from zoo import Spec

MILLION = 1_000_000
ALWAYS = torch.iinfo(torch.int64).max
seeds = st.integers(0, 99)


def rng(seed=0):
    return np.random.default_rng(seed)


def labels(n, classes, seed):
    return torch.from_numpy(rng(seed).integers(classes, size=n))


def assert_same_parts(parts, expected):
    assert isinstance(parts, Parts)
    assert [part.tolist() for part in parts] == [part.tolist() for part in expected]
    assert parts.samples.dtype == parts.offsets.dtype == torch.int64


# Dealing out: the same, random numbers included, as client by client

LEVELS = [((3,), (2,)), ((2,), (8,)), ((5,), (1,)), ((2, 3), (1, 2))]
DEALT = {  # labels, clients, a share, a choice, rng -> parts, fast and slowly
    "iid": (
        lambda y, clients, share, choice, r: iid(y, clients, 0, r, choice % 2 > 0),
        lambda y, clients, share, choice, r: slow.iid(len(y), clients, r, choice % 2 > 0),
    ),
    "dirichlet": (
        lambda y, clients, share, choice, r: dirichlet(y, clients, share, 0, r),
        lambda y, clients, share, choice, r: slow.dirichlet(y.numpy(), clients, share, r),
    ),
    "shards": (
        lambda y, clients, share, choice, r: shards(y, clients, min(share, 1), 1, r),
        lambda y, clients, share, choice, r: slow.shards(y.numpy(), clients, min(share, 1), r),
    ),
    "clusters": (
        lambda y, clients, share, choice, r: clusters(y, clients, *LEVELS[choice], 0, r)[0],
        lambda y, clients, share, choice, r: slow.clusters(y.numpy(), clients, *LEVELS[choice], r),
    ),
    "natural": (
        lambda y, clients, share, choice, r: natural(y, clients, 1, r),
        lambda y, clients, share, choice, r: slow.natural(y.numpy(), clients, 1, r),
    ),
}


@pytest.mark.parametrize("kind", DEALT)
@given(st.integers(1, 600), st.integers(1, 40), st.integers(1, 12), st.floats(0.001, 10), st.integers(0, 3), seeds)
def test_partitions_deal_as_client_by_client(kind, n, clients, classes, share, choice, seed):
    fast, slowly = DEALT[kind]
    if kind == "clusters":  # they need enough classes and samples
        n, classes, clients = n + 100, 8, clients + 4
    y = labels(n, classes, seed)
    assume(kind != "iid" or n >= clients)
    try:
        parts = fast(y, clients, share, choice, rng(seed))
    except FLError:
        assume(False)
    assert_same_parts(parts, slowly(y, clients, share, choice, rng(seed)))


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
    expected = zip(*slow.hold_out(parts, valid, test, rng(seed)))
    for part, other in zip((splits.train, splits.valid, splits.test), expected, strict=True):
        assert_same_parts(part, other)


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


# Drawing


@given(st.one_of(st.integers(1, 300), st.integers(29_000, 31_000), st.just(MILLION)), st.data())
def test_the_draw_is_the_start_of_a_permutation(n, data):
    k, seed = data.draw(st.integers(1, min(n, 300))), data.draw(st.integers(0, 2**32))
    expected = torch.randperm(n, generator=torch.Generator().manual_seed(seed))[:k].tolist()
    assert draw(n, k, torch.Generator().manual_seed(seed)) == expected


@given(st.integers(1, 2**40), st.data())
def test_what_is_drawn_is_distinct(n, data):
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


def test_a_round_costs_the_same_among_a_hundred_thousand_clients():
    few, many = cost_of_a_round(100), cost_of_a_round(100_000)
    assert many[0] == few[0]
    assert many[1] == few[1] < 100_000
    assert many[2] == pytest.approx(few[2], rel=0.05)


def test_a_million_clients_are_nothing_but_indices_and_dealt_out_at_once():
    """No work is done client by client, which would be a call each at least."""
    y, made = torch.zeros(3 * MILLION), []
    assert calls_of(lambda: made.append(hold_out(iid(y, MILLION, 1, rng(), unequal=True), 0, 0, rng()))) < 1000
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
def test_a_run_says_how_many_samples_are_not_used(flags, said, tmp_path, caplog):
    short = ["--rounds", "1", "--local-epochs", "1", "--width", "0.1", "--batch-size", "50"]
    assert main([*short, *flags, "--out", str(tmp_path)]) == 0
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


# Clients that come and go


@pytest.mark.parametrize(("clients", "joining", "leaving"), [(10, 0.2, 0.3), (7, 0.5, 0.0), (20, 0.0, 0.25)])
def test_shares_of_the_clients_come_and_go(clients, joining, leaving):
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


def test_who_cannot_come_and_go_is_refused():
    assert make_presence(10, 4, 0.0, 0.0, 1, Rng(0)) is None
    assert make_presence(10, 4, 0.3, 0.3, 2, Rng(0)).at(1)
    for joining, leaving, rounds, message in (
        (0.4, 0.3, 9, r"--joining 0.4 and --leaving 0.3 of 10 clients leave fewer than the 4 participants"),
        (-0.1, 0.2, 9, r"smaller shares in \[0, 1\]"),
        (0.1, 1.2, 9, r"smaller shares in \[0, 1\]"),
        (0.1, 0.0, 1, "need two --rounds or more"),
        (0.04, 0.3, 9, "--joining 0.04 of 10 clients is nobody: use 0.1 or more, or 0"),
        (0.3, 0.04, 9, "--leaving 0.04 of 10 clients is nobody"),
    ):
        with pytest.raises(FLError, match=message):
            make_presence(10, 4, joining, leaving, rounds, Rng(0))
    with pytest.raises(FLError, match="clusamp draws its clients itself"):
        Config(algorithm=("clusamp",), joining=0.1).check()


def presence(first, last):
    return Presence(torch.tensor(first), torch.tensor(last))


def test_a_round_draws_from_those_who_are_there(make_federation):
    """K distinct ones, each equally often; with everyone there the very same as without presence."""
    fed = make_federation(sizes=(3, 4, 5, 6, 7, 8), participants=2)
    moving = replace(fed, presence=presence([1, 1, 3, 1, 2, 1], [ALWAYS, 2, ALWAYS, ALWAYS, ALWAYS, 4]))
    always = replace(fed, presence=presence([1] * 6, [ALWAYS] * 6))
    for number in range(1, 7):
        there, counts = moving.presence.at(number), torch.zeros(6)
        for seed in range(150):
            drawn = moving.sample(Rng(seed, number))
            assert len(set(drawn)) == 2
            assert set(drawn) <= set(there)
            counts[drawn] += 1
        assert (counts[there] > 300 / len(there) * 0.6).all()
        assert always.sample(Rng(0, number)) == fed.sample(Rng(0, number))


LARGE = Spec("preresnet20", 3, 1, 8, width=0.25, depth=(3, 1, 2), norm="static_batch")
MEDIUM, SMALL = LARGE.scaled(0.5, (2, 1, 1)), LARGE.scaled(0.25, (1, 1, 1))


def test_a_model_that_has_the_size_of_a_later_client_from_the_start_is_one_that_grows(make_federation):
    """Run A has the global model of all clients from the start. Run B has that of the present ones, begins as its part
    of A's initial model, and grows when the large client joins: `plan.embed(B, into=A's initial model)`. Until then B
    is A's part, then both are equal, and so are all later rounds.
    """
    there, kinds = presence([1, 1, 1, 3], [ALWAYS] * 4), [SMALL, MEDIUM, SMALL]
    feds = []
    for spec in (LARGE, MEDIUM):
        model = spec.build(torch.Generator().manual_seed(0)).double()
        fleet = make_fleet(model, spec, [*kinds, spec])
        feds.append(make_federation(model, spec=spec, fleet=fleet, presence=there, epochs=1))
    large = feds[0]
    grown = large.fleet[1].plan  # of the medium model, which holds all that are present, in the large one
    a, b = (fedfa(fed, FedFAOptions(scale="norm")) for fed in feds)
    start = large.initial()
    one, two = {"global": start}, {"global": grown.extract(start)}

    def assert_close(found, expected):
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-6, atol=1e-9)

    for number in (1, 2):
        clients = large.sample(Rng(0, number))
        assert set(clients) == {0, 1, 2}
        (one, trained), (two, same) = (m.round(s, clients, Rng(0, number)) for m, s in ((a, one), (b, two)))
        torch.testing.assert_close(trained.loss, same.loss, rtol=1e-9, atol=1e-11)
        assert_close(two["global"], grown.extract(one["global"]))
    full, mask = grown.embed(two["global"], into=start)
    for name, tensor in full.items():
        kept = ~mask[name]  # what no present client has keeps its initial values
        assert torch.equal(one["global"][name][kept], start[name][kept])
        assert not torch.equal(tensor, start[name])
    assert_close(one["global"], full)
    two = {"global": full}
    for number in (3, 4):
        (one, trained), (two, same) = (a.round(server, [3, 0, 1], Rng(0, number)) for server in (one, two))
        torch.testing.assert_close(trained.loss, same.loss, rtol=1e-6, atol=1e-9)
        assert_close(two["global"], one["global"])

import re
import unittest.mock
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import fl_refused

from fl.base.errors import FLError
from fl.data import Dataset, load
from fl.figures.clients import partition_map
from fl.figures.style import save
from fl.partition import KINDS, Kind, counts, deal, hold_out
from fl.partition.classes import _share_out, nest_clusters
from fl.partition.split import Parts
from fl.runs.assembly import build
from fl.settings import Config


def assert_partition(parts, n):
    assert parts.samples.sort().values.tolist() == list(range(n))


def balanced(n, classes=10):
    return torch.arange(n) % classes


def dealt(y, kind, clients, minimum=1, seed=0, **options):
    return deal(y, kind, clients, np.random.default_rng(seed), minimum=minimum, **options).parts


def label_counts(alpha, clients=20, n=20_000):
    """Of ten balanced classes: [clients, 10]."""
    y = balanced(n)
    return torch.stack(
        [torch.bincount(y[part], minlength=10) for part in dealt(y, "dirichlet", clients, 10, alpha=alpha)]
    )


def test_partition__small_alpha_is_more_heterogeneous():
    tables = [label_counts(alpha) for alpha in (0.1, 0.5, 100.0)]
    shares = [table / table.sum(1, keepdim=True) for table in tables]
    low, middle, high = (share.square().sum(1).mean().item() for share in shares)
    assert low > middle > high
    assert high < 0.12  # near the 0.1 of uniform labels over ten classes
    assert low > 0.3


def test_partition__full_clients_get_no_more():
    """The balance rule: who holds N / clients samples gets nothing of the classes that follow."""
    for held in label_counts(0.1):
        assert held[: int(held.nonzero().max())].sum() < 1000


def mixtures_one_by_one(y, clients, alpha, rng):
    """Hsu et al.'s clients in plain loops, a sample at a time from the classes that are left: counts [clients, C]."""
    classes = range(int(y.max()) + 1)
    left = [int((y == c).sum()) for c in classes]
    concentrations = [alpha * n * len(classes) / len(y) for n in left]
    table = np.zeros((clients, len(left)))
    for client in range(clients):
        mixture = rng.dirichlet(concentrations)
        for _ in range(len(y) // clients):
            weights = [q if n else 0.0 for q, n in zip(mixture, left)]
            chosen = rng.choice(classes, p=np.array(weights) / sum(weights))
            left[chosen] -= 1
            table[client, chosen] += 1
    return table


def skew(tables):
    """Mean over clients of the sum of their squared class shares, of each table; and over the later half of them."""
    squares = [((table / table.sum(1, keepdims=True)) ** 2).sum(1) for table in tables]
    return np.array([[each.mean(), each[len(each) // 2 :].mean()] for each in squares])


@pytest.mark.parametrize(
    ("alpha", "y"),
    [(0.1, balanced(200, 4)), (1.0, torch.arange(20).repeat_interleave(torch.arange(1, 21)) % 4)],
)
def test_partition__mixtures_are_those_of_plain_loops(y, alpha):
    """All clients equally large; their skew is the loops' within four standard errors, also where classes run out."""
    ours, loops = [], []
    for seed in range(40):
        parts = dealt(y, "dirichlet_mixture", 10, seed=seed, alpha=alpha)
        assert_partition(parts, len(y))
        assert parts.sizes.tolist() == [len(y) // 10] * 10
        ours.append(np.stack([np.bincount(y[part], minlength=4) for part in parts]))
        loops.append(mixtures_one_by_one(y, 10, alpha, np.random.default_rng(1000 + seed)))
    ours, loops = skew(ours), skew(loops)
    error = np.sqrt((ours.var(0) + loops.var(0)) / 40)
    assert (abs(ours.mean(0) - loops.mean(0)) < 4 * error).all()


def test_partition__a_mixture_is_drawn_for_a_client_and_shares_of_a_class_for_all():
    """The first client's share of a class is Dirichlet-multinomial; by class, sizes differ."""
    shares = np.array(
        [
            np.bincount(balanced(1000)[dealt(balanced(1000), "dirichlet_mixture", 10, seed=seed)[0]], minlength=10)
            for seed in range(100)
        ]
    )
    shares = shares / 100
    assert shares.mean(0) == pytest.approx(0.1, abs=0.06)
    expected = 0.1 * 0.9 * (100 + 5) / (100 * (1 + 5))  # n = 100, alpha 0.5 of each of ten classes
    assert shares.var(0).mean() == pytest.approx(expected, rel=0.15)
    sizes = {kind: dealt(balanced(5000), kind, 50, alpha=0.1).sizes for kind in ("dirichlet", "dirichlet_mixture")}
    assert set(sizes["dirichlet_mixture"].tolist()) == {100}
    assert sizes["dirichlet"].float().std() > 50


def test_partition__a_mixture_is_around_the_shares_of_the_classes_in_the_data():
    """With a large alpha, every client has as much of a rare class as there is of it."""
    y = torch.arange(2000) % 10 == 0
    parts = dealt(y.long(), "dirichlet_mixture", 10, alpha=1000.0)
    assert [y[part].double().mean().item() for part in parts] == pytest.approx([0.1] * 10, abs=0.06)


@pytest.mark.parametrize("alpha", [1e-300, 1e-9, 1e9])
def test_partition__mixtures_of_extreme_concentrations(alpha):
    parts = dealt(balanced(1003), "dirichlet_mixture", 10, alpha=alpha)
    assert_partition(parts, 1003)
    assert sorted(parts.sizes.tolist()) == [100] * 7 + [101] * 3
    classes = [len(balanced(1003)[part].unique()) for part in parts]
    assert sum(classes) >= 95 if alpha > 1 else sum(classes) <= 30


def test_deal__sizes_from_a_dirichlet_distribution_are_of_random_samples():
    """Sizes have the distribution's variance; classes are alike; text can be dealt out so."""
    y, alpha = balanced(20_000), 0.5
    draws = [dealt(y, "dirichlet_sizes", 10, 1, seed, alpha=alpha) for seed in range(150)]
    shares = np.stack([parts.sizes.numpy() for parts in draws]) / len(y)
    assert shares.var(0).mean() == pytest.approx(0.1 * 0.9 / (10 * alpha + 1), rel=0.15)
    for parts in draws[:3]:
        assert_partition(parts, len(y))
        large = [part for part in parts if len(part) > 1000]
        assert max(abs(torch.bincount(y[part]) / len(part) - 0.1).max() for part in large) < 0.06
    text, structure = deal(torch.zeros(400, 3).long(), "dirichlet_sizes", 4, np.random.default_rng(0))
    assert_partition(text, 400)
    assert structure.tolist() == [[0] * 4]


def test_partition__small_clients_of_a_dirichlet_size_are_filled_up(caplog):
    parts = dealt(balanced(1000), "dirichlet_sizes", 50, 10, alpha=0.01)
    assert "dirichlet_sizes0.01 gives 50 clients 10 samples each in none of 200 draws" in caplog.text
    assert_partition(parts, 1000)
    assert parts.sizes.min() == 10
    assert parts.moved


@pytest.mark.nightly
@settings(max_examples=25)
@given(st.data(), st.integers(1, 40), st.integers(1, 12), st.floats(0.001, 0.2), st.integers(0, 99))
def test_partition__whatever_is_possible_is_dealt_out_or_else_refused_at_once(data, clients, minimum, alpha, seed):
    n = data.draw(st.integers(max(clients, clients * minimum - 3), clients * minimum + 60))
    if n < clients * minimum:
        with (
            unittest.mock.patch("fl.partition.dirichlet._draw", side_effect=AssertionError),
            pytest.raises(FLError, match=f"{n} samples cannot give {clients} clients {minimum} each"),
        ):
            dealt(balanced(n), "dirichlet", clients, minimum, seed, alpha=alpha)
        return
    parts = dealt(balanced(n), "dirichlet", clients, minimum, seed, alpha=alpha)
    assert_partition(parts, n)
    assert min(map(len, parts)) >= minimum


def test_deal__samples_move_to_small_clients_from_the_largest_and_this_is_told(caplog):
    y, many = balanced(6000), 200
    parts = dealt(y, "dirichlet", many, 10, 3, alpha=0.05)
    assert "200 clients 10 samples each in none of 200 draws: " in caplog.text
    moved = int(re.search(r"([\d,]+) of 6,000 samples were moved", caplog.text)[1].replace(",", ""))
    rng = np.random.default_rng(3)
    before = [deal(y, "dirichlet", many, rng, minimum=0, alpha=0.05) for _ in range(200)][-1].parts  # as it was drawn
    lost = [len(set(old.tolist()) - set(new.tolist())) for old, new in zip(before, parts)]
    assert sum(lost) == moved == parts.moved == (10 - before.sizes).clamp(min=0).sum()
    for old, new, gone in zip(before, parts, lost):
        assert len(new) == max(len(old) - gone, 10)
        assert not gone or len(new) >= parts.sizes.max() - 1  # only the largest give


def test_partition__shares_of_nothing_and_impossible_ones():
    """What is held out of each client is asked in tests/fl/federation/test_population.py."""
    (split,) = hold_out([torch.arange(5)], 0, 0, np.random.default_rng(0))
    assert [len(part) for part in split] == [5, 0, 0]
    for valid, test, message in ((-0.1, 0, "below 1"), (0.5, 0.5, "below 1"), (0, 1.0, "below 1"), (0.4, 0.4, "few")):
        with fl_refused("argument", message):
            hold_out([torch.arange(2)], valid, test, np.random.default_rng(0))


def assert_disjoint(parts, n):
    held = parts.samples
    assert len(held.unique()) == len(held)
    assert held.max() < n
    assert held.min() >= 0


@given(st.integers(50, 400), st.integers(1, 20), st.integers(0, 99))
def test_partition__unequal_sizes_lie_between_n_and_twice_n(n, clients, seed):
    parts = dealt(balanced(n), "iid", clients, 1, seed, unequal=True)
    assert_partition(parts, n)
    sizes = list(map(len, parts))
    assert max(sizes) <= 2 * min(sizes)


def test_partition__unequal_sizes_use_the_whole_range():
    sizes = list(map(len, dealt(balanced(60_000), "iid", 100, unequal=True)))
    assert max(sizes) > 1.9 * min(sizes)
    assert len(set(sizes)) > 80


@settings(max_examples=60)
@given(st.integers(2, 30), st.integers(1, 40), st.floats(0.01, 1), st.integers(0, 99))
def test_partition__shards_hold_equally_many_samples_of_a_share_of_the_classes(classes, clients, share, seed):
    y = balanced(clients * classes * 3, classes)
    parts = dealt(y, "shards", clients, 1, seed, class_share=share)
    assert_disjoint(parts, len(y))
    tables = torch.stack([torch.bincount(y[part], minlength=classes) for part in parts])
    assert set((tables > 0).sum(1).tolist()) == {max(1, round(share * classes))}
    assert len(tables[tables > 0].unique()) == 1
    holders = (tables > 0).sum(0)
    assert holders.max() - holders.min() <= 1


LEVELS = [(100, (2, 5, 9)), (100, (3, 6, 11)), (200, (4, 13, 21)), (200, (9, 15, 22))]


@pytest.mark.parametrize(("classes", "counts"), LEVELS)
def test_deal__the_paper_s_levels_use_every_class_and_sample_once(classes, counts):
    y = balanced(classes * 100, classes)
    parts, structure = deal(y, "clusters", 50, np.random.default_rng(0), minimum=1, clusters=counts)
    assert_partition(parts, len(y))
    tables = torch.stack([torch.bincount(y[part], minlength=classes) for part in parts]) > 0
    assert [len(level.unique()) for level in structure] == list(counts)
    owners = {tuple(torch.nonzero(column).flatten().tolist()) for column in tables.T}
    groups = {
        tuple(torch.nonzero(level == k).flatten().tolist()) for level in structure for k in level.unique().tolist()
    }
    assert owners == groups  # each class belongs to the clients of one cluster, and each cluster has classes


@settings(max_examples=60)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=4).map(sorted), st.integers(9, 60))
def test_partition__finer_clusters_lie_within_coarser_ones(counts, clients):
    structure = torch.from_numpy(nest_clusters(counts, clients))
    assert [len(level.unique()) for level in structure] == counts
    for coarse, fine in pairwise(structure):
        assert all(len(coarse[fine == k].unique()) == 1 for k in fine.unique())
    assert (structure.diff(dim=1) >= 0).all()
    sizes = structure[-1].bincount()
    assert sizes.max() - sizes.min() <= 1


@settings(max_examples=40)
@given(st.integers(1, 6), st.integers(1, 12), st.integers(6, 20), st.integers(0, 99))
def test_deal__clusters_of_one_level_share_their_classes(count, each, clients, seed):
    y = balanced(12 * 60, 12)
    rng = np.random.default_rng(seed)
    parts, structure = deal(y, "clusters", clients, rng, minimum=1, clusters=(count,), cluster_classes=(each,))
    assert_disjoint(parts, len(y))
    tables = torch.stack([torch.bincount(y[part], minlength=12) for part in parts])
    for k in range(count):
        mine = tables[structure[0] == k]
        assert ((mine > 0).sum(1) == each).all()
        assert (mine.max(0).values - mine.min(0).values <= 1).all()
    used = sum(((tables[structure[0] == k] > 0).any(0)).int() for k in range(count))
    assert used.max() - used.min() <= 1  # overlapping as little as they can
    assert tables.sum() == 60 * (used > 0).sum()


def test_partition__samples_that_cannot_be_divided_among_a_cluster_go_to_any_of_its_clients():
    sizes = dealt(torch.arange(400), "clusters", 2, clusters=(1,)).sizes  # a sample of each class
    assert sizes.sum() == 400
    assert (sizes - 200).abs().max() < 50  # five standard deviations of a binomial


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "contiguous"])
def test_deal__a_partition_is_a_function_of_its_seed(kind):
    y, owners = balanced(2000), torch.arange(2000) % 40
    options = {"clusters": (2, 4), "cluster_classes": (3, 1)} if kind == "clusters" else {}
    first, again, other = (
        deal(y, kind, 20, np.random.default_rng(seed), owners=owners, **options) for seed in (0, 0, 1)
    )
    assert all(torch.equal(a, b) for a, b in zip(first.parts, again.parts, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first.parts, other.parts, strict=True))
    assert first.structure.shape[1] == 20
    assert first.structure.dtype == torch.int64


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"kind": "random"}, "'random'"),
        ({"kind": "iid", "clients": 1001}, "1,000 samples cannot be divided among 1,001 clients"),
        ({"kind": "iid", "clients": 101}, "1000 samples give 101 clients fewer than 10 each"),
        ({"kind": "iid", "clients": 80, "unequal": True}, "fewer than 10 each"),
        ({"kind": "contiguous", "clients": 101}, "fewer than 10 each"),
        ({"kind": "dirichlet", "alpha": 0.0}, "--alpha"),
        ({"kind": "dirichlet_mixture", "alpha": float("inf")}, "--alpha"),
        ({"kind": "dirichlet_mixture", "clients": 101}, "fewer than 10 each"),
        ({"kind": "dirichlet_sizes", "alpha": -1.0}, "--alpha"),
        ({"kind": "dirichlet_sizes", "clients": 101}, "1000 samples cannot give 101 clients 10 each"),
        ({"kind": "natural"}, "whose samples have owners, such as femnist"),
        ({"kind": "natural", "owners": torch.zeros(1000).long()}, "1 of 1 owners have 10 samples or more"),
        ({"kind": "shards", "class_share": 0}, "--class-share"),
        ({"kind": "shards", "clients": 600}, "--class-share"),
        ({"kind": "clusters", "clusters": (21,)}, "no more clusters than clients"),
        ({"kind": "clusters", "clusters": (5, 2), "cluster_classes": (1, 1)}, "do not decrease from level to level"),
        ({"kind": "clusters", "clusters": (4, 7)}, "--cluster-classes"),
        ({"kind": "clusters", "clusters": (2, 5), "cluster_classes": (4, 1)}, "need 13 classes on disjoint levels"),
        ({"kind": "clusters", "clusters": (2,), "cluster_classes": (11,)}, "the data has 10 classes, use fewer"),
        ({"kind": "clusters", "clients": 200}, "--min-samples.*10"),
        ({"kind": "clusters", "clusters": ()}, "for 20 clients|need --cluster-classes"),
    ],
)
def test_deal__what_cannot_be_dealt_out_is_named(call, message):
    call = {"clients": 20, **call}
    with pytest.raises(FLError, match=message) as caught:
        deal(balanced(1000), rng=np.random.default_rng(0), **call)
    assert "\n" not in str(caught.value)


@pytest.mark.drawn
def test_partition__the_figure_is_drawn_and_its_counts_are_right(tmp_path):
    y = balanced(1000)
    partition = deal(y, "clusters", 10, np.random.default_rng(0), clusters=(2, 5), cluster_classes=(2, 1))
    expected = [torch.bincount(y[part], minlength=10).tolist() for part in partition.parts]
    assert counts(partition, y, 10).tolist() == expected
    save(partition_map(partition, y, 10, "clusters"), tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_partition__pooled_data_are_tested_on_what_clients_hold_out():
    """All digits are dealt out, none is in two parts of the data, and the test set is the clients' own test samples."""
    shares = {"local_valid": 0.1, "local_test": 0.2}
    config = Config.of(pool_test_set=True, samples=1500, partition="iid", algorithm="fedavg", **shares)
    fed, _ = build(config)
    every = torch.cat([part.samples for part in (fed.clients.train, fed.clients.valid, fed.clients.test)])
    assert len(every.unique()) == len(every) == fed.clients.total == 1500
    assert torch.equal(fed.data.test_x, fed.data.x[fed.clients.test.samples])
    assert torch.equal(fed.data.test_y, fed.data.y[fed.clients.test.samples])
    whole = load("digits")
    rows = {row.tobytes() for row in torch.cat([whole.x, whole.test_x]).flatten(1).numpy()}
    assert {row.tobytes() for row in fed.data.x.flatten(1).numpy()} <= rows
    assert torch.equal(fed.data.x, whole.pool().subsample(1500).x)
    with fl_refused("argument", "--pool-test-set"):
        config.replace(local_test=0.0).check()
    with fl_refused("argument", "--samples", "2,000", "1,437"):
        whole.subsample(2000)


def test_partition__pooled_writers_keep_their_samples():
    x = torch.arange(6, dtype=torch.uint8).view(6, 1, 1, 1)
    data = Dataset("a", x[:4], torch.arange(4), x[4:], torch.arange(2), 4, owners=torch.tensor([0, 0, 1, 1]))
    with fl_refused("unsupported", "--pool-test-set"):
        data.pool()
    pooled = replace(data, test_owners=torch.tensor([1, 0])).pool()
    assert pooled.owners.tolist() == [0, 0, 1, 1, 1, 0]
    assert pooled.x.flatten().tolist() == [0, 1, 2, 3, 4, 5]
    few = pooled.subsample(3)
    assert few.owners.tolist() == [pooled.owners[k] for k in few.x.flatten().tolist()]


@given(st.integers(2, 200), st.lists(st.integers(1, 12), min_size=2, max_size=4).map(sorted))
def test_partition__classes_of_nested_clusters_fit(total, counts):
    """Every level has classes, together at most as many as there are, and no further one would fit everywhere."""
    if sum(counts) > total:
        return
    classes = _share_out(total, tuple(counts))
    assert min(classes) >= 1
    assert sorted(classes, reverse=True) == list(classes)
    used = sum(c * k for c, k in zip(classes, counts, strict=True))
    assert total - counts[0] < used <= total


@pytest.mark.parametrize(
    ("sizes", "valid", "test", "said"),
    [
        ([5, 1], 0, 0.01, r"client 1 has 1 sample, .*: give clients 2 or more \(--min-samples 2\)"),
        ([2], 0.1, 0.1, r"2 samples, .* 3 or more \(--min-samples 3\)"),
        ([3], 0.5, 0.49, r"--min-samples 100\), or use smaller shares"),
        ([1], 0.5, 0.4999, "use smaller shares"),
    ],
)
def test_partition__too_few_samples_to_hold_out_are_told_how_many_are_enough(sizes, valid, test, said):
    with pytest.raises(FLError, match=said):
        hold_out(list(torch.arange(sum(sizes)).split(sizes)), valid, test, np.random.default_rng(0))
    if "--min-samples" in said:
        least = int(said.split("--min-samples ")[1].split("\\")[0])
        parts = list(torch.arange(sum(range(least, least + 9))).split(list(range(least, least + 9))))
        assert len(hold_out(parts, valid, test, np.random.default_rng(0))) == 9


def test_partition__an_owner_with_just_the_minimum_of_samples_is_a_client():
    owners = torch.tensor([7, 7, 4, 9, 9, 9])
    assert list(map(len, dealt(balanced(6), "natural", 2, minimum=2, owners=owners))) == [2, 3]


@pytest.mark.parametrize("owners", [[-5, 10**15, -5, 10**15, 2], [2**62, 7, 2**62, 7, 9]])
def test_deal__owners_may_have_any_number(owners):
    given, small = torch.tensor(owners), torch.tensor(np.unique(owners, return_inverse=True)[1])
    for seed in range(3):
        parts = [
            deal(torch.zeros(5), "natural", 2, np.random.default_rng(seed), minimum=1, owners=each).parts
            for each in (given, small)
        ]
        assert [part.tolist() for part in parts[0]] == [part.tolist() for part in parts[1]]


def dealt_to_five(labels, clients):
    """A function of the wrong arguments."""


def test_partition__a_partition_of_other_arguments_is_refused_when_it_is_named():
    with fl_refused("run", "--partition"):
        Config.of(partition=dealt_to_five)
    with fl_refused("run"):
        Kind(lambda task: None)


def test_parts__are_indices():
    """A mask would be the samples 0 and 1, and a negative index the last ones."""
    empty, mask = torch.tensor([]), torch.zeros(30, dtype=torch.bool)
    assert [part.tolist() for part in Parts.of([np.arange(3), torch.tensor([2], dtype=torch.int32), empty])] == [
        [0, 1, 2], [2], [],
    ]  # fmt: skip
    for part in (mask, torch.arange(3.0), torch.arange(3) - 1, torch.zeros(2, 2, dtype=torch.int64)):
        with fl_refused("data"):
            Parts.of([torch.arange(4), part])


def test_deal__a_partition_of_ones_own_gives_a_client_each_sample_once(tmp_path, monkeypatch):
    """Else a sample may be trained on and held out, too."""
    (tmp_path / "my_twice.py").write_text(
        "import torch\nfrom fl.partition.kind import Partition\nfrom fl.partition.split import Parts\n"
        "def twice(task, options=None):\n"
        "    parts = [torch.arange(5), torch.tensor([5, 7, 5])]\n"
        "    return Partition(Parts.of(parts), torch.arange(2)[None])\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with fl_refused("run: sample 5", "client 1"):
        deal(balanced(20), "my_twice:twice", 2, np.random.default_rng(0), minimum=1)

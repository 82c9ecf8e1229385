import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from refusals import fl_refused
from rounds import assert_same, play, pretend

from fl.algorithms.clusamp import clusamp, distributions, draw_each, groups, similarity_tree
from fl.algorithms.fedavg import METHOD as fedavg
from fl.base.rng import Rng


@st.composite
def populations(draw):
    """(sizes, a random tree over them, K)."""
    sizes = draw(st.lists(st.integers(1, 50) | st.integers(1, 10**9), min_size=1, max_size=12))
    nodes, merges = list(range(len(sizes))), []
    while len(nodes) > 1:
        pair = [nodes.pop(draw(st.integers(0, len(nodes) - 1))) for _ in range(2)]
        merges.append(pair)
        nodes.append(len(sizes) + len(merges) - 1)
    return np.array(sizes), np.array(merges, dtype=np.int64).reshape(-1, 2), draw(st.integers(1, len(sizes)))


def test_clusamp__the_tree_is_wards():
    """Clusters of three at 0 and 0.5, and one client at 1.05, which by mean angles would come last."""
    angles = torch.tensor([0.0, 0.01, 0.02, 0.5, 0.51, 0.52, 1.05])
    merges = similarity_tree({"w": torch.stack([angles.cos(), angles.sin()], 1)})
    assert {6} < {*merges[4].tolist()}
    assert 6 not in merges[5]


@given(populations())
def test_clusamp__every_client_has_its_share_and_every_row_is_full(population):
    sizes, merges, k = population
    before = sizes.copy()
    table = distributions(sizes, merges, k)
    assert table.shape == (k, len(sizes))
    assert table.min() >= 0
    assert table.sum(1).tolist() == [sizes.sum()] * k
    assert table.sum(0).tolist() == (k * sizes).tolist()
    assert np.array_equal(sizes, before)
    own = k * sizes // sizes.sum()  # rows that a large client has for itself
    assert ((table == sizes.sum()).sum(0) >= own).all()


@given(populations())
def test_clusamp__groups_are_the_largest_subtrees_below_the_limit(population):
    """Recursively, from the root: a node is a group, or its parts are cut."""
    mass, merges, k = population
    limit = max(mass.sum() // k, 1)

    def leaves(node):
        return {node} if node < len(mass) else set.union(*map(leaves, merges[node - len(mass)].tolist()))

    def cut(node):
        if node < len(mass) or sum(mass[leaf] for leaf in leaves(node)) <= limit:
            return [leaves(node)]
        return [group for part in merges[node - len(mass)].tolist() for group in cut(part)]

    found = groups(mass, merges, limit)
    assert sorted(map(sorted, found)) == sorted(map(sorted, cut(len(mass) + len(merges) - 1)))


def test_clusamp__the_largest_groups_found_the_distributions():
    """By hand: groups of 3, 2 and 1 samples of 6, two rows of 6 = 2 x 3. The smallest fills the second row."""
    sizes = np.array([1, 2, 1, 1, 1])
    merges = np.array([[0, 1], [2, 3], [5, 4], [7, 6]])
    assert distributions(sizes, merges, 2).tolist() == [[2, 4, 0, 0, 0], [0, 0, 2, 2, 2]]
    # A large client: 7 of 10 samples are 14 of 2 x 10, one row and 4 of the other.
    assert distributions(np.array([7, 1, 2]), np.array([[0, 1], [3, 2]]), 2).tolist() == [[10, 0, 0], [4, 2, 4]]


def test_clusamp__angles_not_lengths_make_clusters_and_the_unseen_are_alike():
    x, y = torch.tensor([1.0, 0.0, 0.1]), torch.tensor([0.0, 1.0, 0.1])
    rows = torch.stack([torch.zeros(3), x, y, 100 * x, torch.zeros(3), 0.01 * y])
    tree = similarity_tree({"w": rows[:, :2], "v": rows[:, 2:]})
    found = groups(np.ones(6, dtype=np.int64), tree, 2)
    assert sorted(map(sorted, found)) == [[0, 4], [1, 3], [2, 5]]
    near = {"w": torch.stack([x, torch.zeros(3), x + 0.1 * y, torch.zeros(3)])}
    assert similarity_tree(near)[0].tolist() == [1, 3]  # no angle at all
    assert similarity_tree({"w": torch.ones(1, 3)}).shape == (0, 2)


def test_clusamp__each_round_draws_one_client_of_each_cluster(make_federation, monkeypatch):
    """Clients 0, 3, 4 move one weight, 1, 2, 5 another: once all were seen, each pair drawn is mixed."""
    fed = make_federation("cnn", sizes=(4,) * 6, participants=2)
    algorithm, sides, drawn, mixed = clusamp(fed), [0, 1, 1, 0, 0, 1], [], []

    def move(states):
        for weights, client in zip(next(iter(states.values())).view(2, -1), drawn[-1]):
            weights[sides[client]] += 0.1 * (client + 1)

    pretend(monkeypatch, move)
    server = algorithm.init()
    for number in range(1, 45):
        ready = all(g.any() for g in next(iter(server["gradients"].values())))
        drawn.append(algorithm.sample(server, Rng(0, number)))
        mixed += [drawn[-1]] * ready
        server, _ = algorithm.round(server, drawn[-1], Rng(0, number))
    assert len(mixed) > 20
    assert all(sorted(sides[client] for client in pair) == [0, 1] for pair in mixed)
    assert {client for pair in mixed for client in pair} == set(range(6))


def test_clusamp__draws_follow_the_distributions():
    table = np.array([[1, 0, 3], [0, 4, 0]])
    counts = np.zeros((2, 3))
    for number in range(400):
        counts[[0, 1], draw_each(table, Rng(0, number))] += 1
    assert counts[1].tolist() == [0, 400, 0]
    assert counts[0, 1] == 0
    assert abs(counts[0, 0] - 100) < 45  # five standard deviations of a binomial


@pytest.mark.parametrize("model", ["cnn", "resnet20"])
def test_clusamp__all_clients_of_equal_size_are_fedavg(make_federation, model):
    fed = make_federation(model, sizes=(6, 6, 6), participants=3)
    algorithm, server = clusamp(fed), clusamp(fed).init()
    for number in (1, 2, 3):
        clients = algorithm.sample(server, Rng(0, number))
        assert sorted(clients) == [0, 1, 2]
        expected, _ = fedavg(fed).round(server, clients, Rng(0, number))
        server, _ = algorithm.round(server, clients, Rng(0, number))
        assert_same(server["global"], expected["global"])


def test_clusamp__models_count_alike_and_gradients_are_the_changes(make_federation):
    """Of a batch-norm model: also for a client that was drawn twice, and not for those that were not drawn."""
    fed = make_federation("resnet20", epochs=1)
    next(fed.model.parameters()).requires_grad_(False)
    algorithm = clusamp(fed)
    ((server, _),) = play(algorithm, fed, 1)
    after, trained = algorithm.round(server, [2, 1, 2], Rng(0, 2))
    for name, tensor in trained.states.items():
        torch.testing.assert_close(tensor[0], tensor[2])
        if tensor.is_floating_point():
            torch.testing.assert_close(after["global"][name], tensor.mean(0))
    assert after["gradients"].keys() == fed.trainable.keys()
    for name, gradients in after["gradients"].items():
        change = trained.states[name] - server["global"][name]
        torch.testing.assert_close(gradients[[2, 1]], change[:2])
        assert torch.equal(gradients[[0, 3]], server["gradients"][name][[0, 3]])


def test_clusamp__a_population_too_large_for_its_gradients_is_refused(make_federation, monkeypatch):
    fed = make_federation("cnn")
    numbers, module = 4 * sum(p.numel() for p in fed.model.parameters()), sys.modules[clusamp.__module__]
    assert 2**28 < module.memory(torch.device("cpu")) < 2**50
    monkeypatch.setattr(module, "memory", lambda device: 8 * numbers + 32 * 16)
    clusamp(fed).init()
    monkeypatch.setattr(module, "memory", lambda device: 8 * numbers + 32 * 16 - 1)
    with fl_refused("memory", "--width"):
        clusamp(fed).init()


def test_clusamp__a_client_with_exactly_one_share_of_the_samples_has_a_row_of_its_own():
    """... and is not in the way of those that the tree joins to it."""
    merges = np.array([[1, 0], [5, 3], [6, 2], [7, 4]])
    table = distributions(np.array([4, 3, 2, 1, 2]), merges, 3)
    assert table.tolist() == [[12, 0, 0, 0, 0], [0, 9, 0, 3, 0], [0, 0, 6, 0, 6]]


def test_clusamp__a_change_that_overflows_is_like_no_other():
    changes = torch.tensor([[3e38, 0.0], [torch.inf, 1.0], [1.0, 0.0], [1.0, 0.1]])
    assert sorted(similarity_tree({"w": changes})[0].tolist()) == [2, 3]

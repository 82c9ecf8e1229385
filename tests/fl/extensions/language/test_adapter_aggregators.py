"""The server of every method that joins adapters, against plain numpy in float64, on adapters that are drawn."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from fl.algorithms import ALGORITHMS
from fl.base.rng import Rng
from fl.engine import SGD
from fl.extensions.language.adapters import AdapterOptions, add_adapters, fleet_of_ranks
from fl.federation.cohort import per_client
from fl.federation.update import ClientUpdate
from tests.fl.extensions.language.test_adapted import base

SCALE, CLIENTS, RANKS, SIZES = 0.7, [2, 0, 1], (1, 3, 2), (3, 7, 12, 5)
LAYERS = {"0": (6, 9), "4": (8, 216)}  # a convolution of one channel and 3 x 3, and a linear layer


@pytest.fixture
def played(make_federation):
    """(method, options) -> (federation, algorithm, server before, what clients sent, server after, its metrics)."""

    def play(method, options, drop=None):
        net, seed = base(), torch.Generator().manual_seed
        options = replace(options, scale=SCALE, train=("6",))
        create = partial(add_adapters, net, options, base_changes=ALGORITHMS[method].base_changes)
        model = create(seed(1))
        fleet = fleet_of_ranks(lambda rank: create(seed(1), rank), options.ranks, 4, model) if options.ranks else None
        fed = make_federation(
            model, sizes=SIZES, fleet=fleet, optimizer=SGD(0.2), dtype=torch.float64, create=create, epochs=1
        )
        algorithm = ALGORITHMS[method](fed)
        before, rng = algorithm.init(), Rng(0, 1)
        message = algorithm.send(before, CLIENTS, rng) if algorithm.send else {
            "model": {name: torch.stack([tensor] * 3) for name, tensor in before["global"].items()}
        }  # fmt: skip
        drawn = []
        for k, start in enumerate(per_client(message["model"])):
            generator = torch.Generator().manual_seed(10 + k)
            drawn.append({
                name: torch.randn(t.shape, generator=generator, dtype=t.dtype) if t.is_floating_point() else t
                for name, t in start.items()
            })  # fmt: skip
        sent = (
            drawn if isinstance(message["model"], list) else {n: torch.stack([s[n] for s in drawn]) for n in drawn[0]}
        )
        sizes = tuple(0 if k == drop else SIZES[client] for k, client in enumerate(CLIENTS))
        traffic = {"bytes_down": 1.0, "models_down": 1.0}
        result = algorithm.aggregate(before, CLIENTS, ClientUpdate(sent, torch.zeros(3), sizes, sent, {}, traffic), rng)
        after, metrics = result if isinstance(result, tuple) else (result, {})
        states = [{name: t.numpy() for name, t in one.items()} for k, one in enumerate(drawn) if k != drop]
        shares = np.array([size for size in sizes if size], dtype=float)
        return fed, algorithm, before, states, shares / shares.sum(), after, metrics

    return play


def factors(state, layer):
    """A and B as matrices."""
    a, b = (np.asarray(state[f"{layer}.lora_{side}.weight"]) for side in "AB")
    return a.reshape(len(a), -1), b.reshape(len(b), -1)


def pairs(states, layer):
    return [factors(state, layer) for state in states]


def mean_product(states, shares, layer):
    return sum(share * b @ a for share, (a, b) in zip(shares, pairs(states, layer)))


def close(found, expected):
    np.testing.assert_allclose(np.asarray(found), expected, rtol=1e-10, atol=1e-10)


def check_head(states, shares, after):
    """What is trained whole is the mean by samples."""
    for name in ("6.weight", "6.bias"):
        close(after["global"][name], sum(share * state[name] for share, state in zip(shares, states)))


SAME = AdapterOptions("lora", rank=2)
UNEQUAL = AdapterOptions("lora", ranks=RANKS)


@pytest.mark.parametrize("drop", [None, 1])
def test_adapter_aggregators__fedit_is_the_means_of_factors(played, drop):
    *_, states, shares, after, _ = played("fedavg", SAME, drop)
    for layer in LAYERS:
        for side in (0, 1):
            expected = sum(share * pair[side] for share, pair in zip(shares, pairs(states, layer)))
            close(factors(after["global"], layer)[side], expected)
    check_head(states, shares, after)


def test_adapter_aggregators__ffa_lora_has_the_mean_product(played):
    fed, *_, states, shares, after, _ = played("fedavg", replace(SAME, learn="b"))
    for layer in LAYERS:
        a = dict(fed.model.named_buffers())[f"{layer}.lora_A.weight"].flatten(1).numpy()
        b = [state[f"{layer}.lora_B.weight"].reshape(-1, 2) for state in states]
        mean = after["global"][f"{layer}.lora_B.weight"].flatten(1).numpy()
        close(mean @ a, sum(share * one @ a for share, one in zip(shares, b)))
    check_head(states, shares, after)


def test_fedsa_lora__is_the_mean_of_a_alone(played):
    *_, states, shares, after, _ = played("fedsa_lora", SAME)
    for layer in LAYERS:
        expected = sum(share * state[f"{layer}.lora_A.weight"] for share, state in zip(shares, states))
        close(after["global"][f"{layer}.lora_A.weight"], expected)
        assert f"{layer}.lora_B.weight" not in states[0]
    check_head(states, shares, after)


@pytest.mark.parametrize("drop", [None, 1])
def test_flexlora__is_the_best_of_each_rank(played, drop):
    _, algorithm, _, states, shares, after, metrics = played("flexlora", UNEQUAL, drop)
    lost = []
    for layer in LAYERS:
        whole = mean_product(states, shares, layer)
        u, s, v = np.linalg.svd(whole, full_matrices=False)
        for client, rank in enumerate(RANKS):
            a, b = factors(algorithm.send(after, [client], Rng(0, 2))["model"][0], layer)
            close(b @ a, u[:, :rank] * s[:rank] @ v[:rank])
        lost.append(np.sqrt((s[3:] ** 2).sum() / (s**2).sum()))
    close(metrics["lost"], np.mean(lost))
    check_head(states, shares, after)


@pytest.mark.parametrize("drop", [None, 1, 2])  # the last has the largest rank
def test_hetlora__weighs_zero_padded_factors_by_norms(played, drop):
    _, algorithm, before, states, shares, after, _ = played("hetlora", UNEQUAL, drop)
    for layer in LAYERS:
        norms = np.array([np.sqrt(((b @ a) ** 2).sum()) for a, b in pairs(states, layer)])
        (a, b), held = factors(before["global"], layer), max(len(own) for own, _ in pairs(states, layer))
        a, b = a.copy(), b.copy()  # rows that nobody in the round has stay
        a[:held], b[:, :held] = 0, 0
        for weight, (own_a, own_b) in zip(norms / norms.sum(), pairs(states, layer)):
            a[: len(own_a)] += weight * own_a
            b[:, : len(own_a)] += weight * own_b
        for client, rank in enumerate(RANKS):
            sent = factors(algorithm.send(after, [client], Rng(0, 2))["model"][0], layer)
            close(sent[0], a[:rank])
            close(sent[1], b[:, :rank])
    check_head(states, shares, after)


@pytest.mark.parametrize("drop", [None, 1])
def test_flora__folds_the_mean_product_into_the_base(played, drop):
    _, _, before, states, shares, after, metrics = played("flora", UNEQUAL, drop)
    assert after["global"].keys() == before["global"].keys()
    for layer in LAYERS:
        name = f"{layer}.base_layer.weight"
        change = SCALE * mean_product(states, shares, layer)
        close(after["global"][name].flatten(1), before["global"][name].flatten(1).numpy() + change)
        a, b = factors(after["global"], layer)
        assert not b.any()
        bound = LAYERS[layer][1] ** -0.5
        assert 0 < abs(a).max() <= bound
        assert not np.allclose(a, factors(before["global"], layer)[0])
    check_head(states, shares, after)
    ranks = [len(state["4.lora_A.weight"]) for state in states]
    stacked = sum(ranks) * (6 + 9 + 8 + 216) + (8 * 3 + 3) + 2 * 6 + 1  # the classifier, and what the norm counts
    assert metrics == {"bytes_down": 8 * stacked, "models_down": 8 * stacked}


def surrogate(pairs, shares, sweeps):
    """Alternating least squares with matrices of the layer's size."""
    target = sum(share * b @ a for share, (a, b) in zip(shares, pairs)).ravel()
    p = q = np.array(shares)
    for _ in range(sweeps):
        a = sum(one * pair[0] for one, pair in zip(p, pairs))
        columns = np.stack([(b @ a).ravel() for _, b in pairs], 1)
        q = q + np.linalg.lstsq(columns, target - columns @ q, rcond=1e-6)[0]
        b = sum(one * pair[1] for one, pair in zip(q, pairs))
        columns = np.stack([(b @ a).ravel() for a, _ in pairs], 1)
        p = p + np.linalg.lstsq(columns, target - columns @ p, rcond=1e-6)[0]
    left = target - columns @ p
    return p, q, np.linalg.norm(left) / np.linalg.norm(target)


@pytest.mark.parametrize("drop", [None, 1])
def test_flora_na__is_alternating_least_squares(played, drop):
    *_, states, shares, after, metrics = played("flora_na", SAME, drop)
    lost = []
    for layer in LAYERS:
        own = pairs(states, layer)
        p, q, left = surrogate(own, shares, 50)
        close(factors(after["global"], layer)[0], sum(one * a for one, (a, _) in zip(p, own)))
        close(factors(after["global"], layer)[1], sum(one * b for one, (_, b) in zip(q, own)))
        lost.append(left)
    close(metrics["lost"], np.mean(lost))
    check_head(states, shares, after)


def test_flora_na__finds_the_least_error_that_is_near(played):
    """No small change of the numbers makes the error smaller, and it is smaller than FedIT's."""
    *_, states, shares, _, metrics = played("flora_na", SAME)
    errors = []

    def error(own, target, p, q):
        product = sum(n * b for n, (_, b) in zip(q, own)) @ sum(n * a for n, (a, _) in zip(p, own))
        return np.linalg.norm(product - target) / np.linalg.norm(target)

    for layer in LAYERS:
        own, target = pairs(states, layer), mean_product(states, shares, layer)
        p, q, least = surrogate(own, shares, 50)
        errors.append(error(own, target, shares, shares))
        generator = np.random.default_rng(0)
        for _ in range(200):
            moved = [each + 1e-3 * generator.standard_normal(3) for each in (p, q)]
            assert error(own, target, *moved) > least - 1e-9
    assert metrics["lost"] < np.mean(errors) - 1e-3


def test_flora_na__leaves_what_nobody_has_learnt(make_federation):
    """With B zero everywhere all numbers are as good, and A stays the mean instead of falling to zero."""
    fed = make_federation(adapters=AdapterOptions("lora", rank=2))
    algorithm = ALGORITHMS["flora_na"](fed)
    start = algorithm.init()
    models = {name: torch.stack([tensor] * 3) for name, tensor in start["global"].items()}
    after, metrics = algorithm.aggregate(
        start, CLIENTS, ClientUpdate(models, torch.zeros(3), (3, 7, 5), models), Rng(0, 1)
    )
    torch.testing.assert_close(after["global"], start["global"])
    assert metrics == {"lost": 0.0}


def test_flora__begins_each_round_with_the_model_that_it_made(played):
    """A client predicts with the folded base, and later rounds draw other adapters."""
    fed, algorithm, _, *_, after, _ = played("flora", UNEQUAL)
    server, update = algorithm.round(after, CLIENTS, Rng(0, 2))
    assert not any("base_layer" in name for name in update.received[0])
    rows = [state["global"]["4.lora_A.weight"] for state in (after, server)]
    assert not torch.equal(*rows)
    bases = [state["global"]["4.base_layer.weight"] for state in (after, server)]
    assert 0 < torch.linalg.matrix_rank(bases[1] - bases[0]) <= sum(RANKS)
    plain = add_adapters(base(), replace(UNEQUAL, scale=SCALE, train=("6",)), torch.Generator().manual_seed(1))
    assert not any("base_layer" in name for name in plain.state_dict())
    again = fed.initial()
    torch.testing.assert_close(again["4.base_layer.weight"], base()[4].weight.detach())

"""Rules that choose among whole models, and FLTrust, beside slow versions with plain loops."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from refusals import fl_refused
from rounds import assert_same, play, poison
from wrapped import wrapped

import fl
from fl.algorithms.fedavg import METHOD as fedavg
from fl.algorithms.fedmr import METHOD as fedmr
from fl.algorithms.fedrep import METHOD as fedrep
from fl.algorithms.fltrust import METHOD as fltrust
from fl.algorithms.fltrust import FLTrustOptions
from fl.base.errors import FLError
from fl.base.rng import Rng, draw
from fl.extensions.attack import Attack
from fl.extensions.defence import Defence, krum_order, squared_distances
from fl.partition import Split
from surgery import broadcast

NAMES = {"w", "b"}


def random_models(n, seed=0, far=0):
    """Of n clients, the last of whom are far from the others; "s" is a statistic, and "c" a counter."""
    draws = torch.Generator().manual_seed(seed)
    models = {
        name: torch.randn(n, *s, generator=draws).double() for name, s in (("w", (3, 4)), ("b", (5,)), ("s", (2,)))
    }
    models["s"] *= 1e3
    models["c"] = torch.arange(n)
    for name in NAMES:
        models[name][n - far :] += 100.0 if far else 0.0
    return models


def vectors(models, names=("w", "b")):
    return np.concatenate([models[name].flatten(1).numpy() for name in names], 1)


def krum_scores(points, f):
    """Line by line: the sum of squared distances to the n - f - 2 nearest others, or to the nearest."""
    scores = []
    for i, x in enumerate(points):
        others = sorted(sum((a - b) ** 2 for a, b in zip(x, y)) for j, y in enumerate(points) if j != i)
        scores.append(sum(others[: max(1, len(points) - f - 2)]))
    return scores


def bulyan_chosen(points, f):
    left, chosen = list(range(len(points))), []
    while len(chosen) < len(points) - 2 * f:
        scores = krum_scores([points[i] for i in left], f)
        chosen.append(left.pop(min(range(len(left)), key=scores.__getitem__)))
    return chosen


@pytest.mark.parametrize(("n", "f"), [(3, 0), (5, 1), (7, 2), (9, 1)])
@pytest.mark.parametrize("seed", [0, 1])
def test_choosing__krum_and_multikrum_line_by_line(n, f, seed):
    models = random_models(n, seed, far=f)
    scores = krum_scores(vectors(models), f)
    order = sorted(range(n), key=scores.__getitem__)
    assert krum_order(squared_distances({name: models[name] for name in NAMES}), f).tolist() == order
    best = Defence("krum", malicious=f).average(models, None, None, NAMES)
    assert_same(best, {name: tensor[order[0]] for name, tensor in models.items()})
    for keep in {0, 1, n - f - 2}:
        chosen = order[: keep or n - f - 2]
        found = Defence("multikrum", malicious=f, keep=keep).average(models, [5] * n, None, NAMES)
        for name, tensor in models.items():
            rows = tensor[chosen].numpy()
            np.testing.assert_allclose(found[name], rows.mean(0) if name != "c" else rows.max(0), rtol=1e-12)


@pytest.mark.parametrize(("n", "f"), [(3, 0), (7, 1), (9, 1), (12, 2), (15, 3)])
def test_choosing__bulyan_line_by_line(n, f):
    models = random_models(n, n, far=f)
    chosen = bulyan_chosen(vectors(models), f)
    assert len(chosen) == n - 2 * f
    found = Defence("bulyan", malicious=f).average(models, None, None, NAMES)
    for name in NAMES:  # a malicious model may be chosen late, but none of its numbers is averaged
        honest = models[name][: n - f]
        assert ((found[name] >= honest.amin(0)) & (found[name] <= honest.amax(0))).all()
    for name in ("w", "b", "s"):
        rows = models[name][chosen].numpy()
        for place in np.ndindex(rows.shape[1:]):
            column = rows[(slice(None), *place)]
            near = sorted(column, key=lambda x, middle=np.median(column): abs(x - middle))[: len(chosen) - 2 * f]
            assert found[name][place].item() == pytest.approx(np.mean(near), rel=1e-12)
    assert found["c"] == max(chosen)


@pytest.mark.parametrize("rule", ["krum", "multikrum", "bulyan"])
@pytest.mark.parametrize("spoilt", [torch.nan, torch.inf, 1e38, -3e4])
def test_choosing__what_is_sent_to_do_harm_is_not_taken(rule, spoilt):
    models = {name: t.float() if t.is_floating_point() else t for name, t in random_models(7).items()}
    models["w"][2, 0, 0] = spoilt
    after = Defence(rule).average(models, None, None, NAMES)
    honest = models["w"][[0, 1, 3, 4, 5, 6]]
    assert ((after["w"] >= honest.amin(0)) & (after["w"] <= honest.amax(0))).all()


def test_choosing__distances_are_those_of_parameters_and_of_all_where_there_are_none():
    models = random_models(5)
    one = Defence("krum").average(models, None, None, NAMES)
    models["s"] = models["s"].flip(0)
    assert torch.equal(one["w"], Defence("krum").average(models, None, None, NAMES)["w"])
    only = {"s": models["s"]}
    scores = krum_scores(vectors(only, ["s"]), 1)
    assert torch.equal(Defence("krum").average(only, None, None, NAMES)["s"], only["s"][int(np.argmin(scores))])


def test_choosing__too_few_models_are_refused_with_the_numbers(make_federation, monkeypatch):
    fed = make_federation(participants=4)
    for defence, message in (
        (Defence("krum"), "--defence.malicious"),
        (Defence("multikrum", malicious=2), r"needs 7 models \(2f \+ 3\), and there are 4"),
        (Defence("bulyan"), "--defence.malicious"),
        (Defence("multikrum", malicious=0, keep=3), "keep 3: of 4 .*, at most 2 can be kept"),
    ):
        with pytest.raises(FLError, match=message):
            wrapped(fed, defence=defence)
    poison(monkeypatch, {1}, [0, 1])
    fed = wrapped(fed, defence=Defence("krum", malicious=0))
    with fl_refused("argument", "2f"):
        play(fedavg(fed), fed, 1)
    with fl_refused("unsupported", "--defence.rule"):
        Defence("krum").average(random_models(5), [[1] * 5])
    with fl_refused("unsupported", "--defence.rule"):
        Defence("krum").average([], [], {}, plans=[])


def test_choosing__methods_take_the_rule(make_federation):
    """What fedrep's clients keep has no say in who is chosen."""
    fed = make_federation(participants=4, defence=Defence("krum", malicious=0))
    for method in (fedavg, fedmr, fedrep):
        ((server, update),) = play(method(fed), fed, 1)
        names = [name for name in update.received if name in fed.trainable]
        best = int(np.argmin(krum_scores(vectors(update.received, names), 0)))
        for name, tensor in update.received.items():
            torch.testing.assert_close(server["global"][name], tensor[best], rtol=0, atol=0)


# FLTrust


def by_hand(fed, server, update, options):
    """The paper's algorithm 2 in NumPy, from the server's own training: (new parameters, how many are trusted)."""
    samples = fed.clients.train.samples
    own = samples[draw(len(samples), options.root, Rng(0).torch("root"))]
    alone = replace(fed, clients=[Split(own, own[:0], own[:0])], participants=1, training=())
    old = server["global"]
    trained = alone.train(broadcast(old, 1), [0], Rng(0, 1).apart("root")).states
    names = list(fed.trainable)
    w = vectors({name: old[name][None] for name in names}, names)[0]
    g0 = vectors(trained, names)[0] - w
    updates = vectors(update.received, names) - w
    trust = [max(0.0, g @ g0 / np.linalg.norm(g) / np.linalg.norm(g0)) for g in updates]
    scaled = [score * np.linalg.norm(g0) / np.linalg.norm(g) * g for score, g in zip(trust, updates)]
    return w + options.lr * sum(scaled) / sum(trust), sum(score > 0 for score in trust)


@pytest.mark.parametrize("lr", [1.0, 0.5])
def test_fltrust__line_by_line(make_federation, lr):
    fed = make_federation(participants=4, dtype=torch.float64)
    y = fed.data.y.clone()
    y[fed.clients.train[1]] = (y[fed.clients.train[1]] + 1) % 3
    fed = wrapped(fed, attack=Attack(frozenset({1}), replace(fed.data, y=y), 30.0))
    options = FLTrustOptions(root=9, lr=lr)
    algorithm = fltrust(fed, options)
    start = algorithm.init()
    after, update = algorithm.round(start, [2, 0, 1, 3], Rng(0, 1))
    expected, trusted = by_hand(fed, start, update, options)
    found = vectors({name: after["global"][name][None] for name in fed.trainable}, list(fed.trainable))[0]
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)
    assert update.metrics["trusted"] == trusted


def test_fltrust__keeps_the_model_where_it_trusts_nobody(make_federation, monkeypatch):
    fed = make_federation(participants=2)
    algorithm = fltrust(fed, FLTrustOptions(root=9))
    monkeypatch.setattr(fl.algorithms.fltrust, "cosine", lambda steps, root: -torch.ones(2, 1))
    ((server, update),) = play(algorithm, fed, 1)
    assert_same(server["global"], algorithm.init()["global"])
    assert update.metrics["trusted"] == 0


def test_fltrust__needs_its_samples(make_federation):
    fed = make_federation()
    with fl_refused("argument", "1000"):
        fltrust(fed, FLTrustOptions(root=1000))
    with fl_refused("unsupported"):
        fltrust(replace(fed, transport=SimpleNamespace(has_data=False)))

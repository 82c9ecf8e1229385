"""Tokens of text that count for nothing (prompts, padding): neither in what clients minimise nor in scores."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from refusals import fl_refused
from rounds import scores
from torch import nn

import fl
from fl.data.arrays import UNSCORED
from fl.engine import losses
from fl.federation.cohort import classes_held

WORDS, LENGTH = 11, 6


def draws(n, seed):
    """Sequences, of which some labels count; each has at least one."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(WORDS, (n, LENGTH + 1), generator=generator)
    counts = torch.rand(n, LENGTH, generator=generator) < 0.4
    counts[:, -1] |= ~counts.any(1)
    return x[:, :-1], torch.where(counts, x[:, 1:], UNSCORED)


def text(n=100):
    (x, y), (test_x, test_y) = draws(n, 0), draws(9, 1)
    return fl.Dataset.from_arrays(x, y, test_x, test_y, owners=np.arange(n) % 5, classes=WORDS)


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(WORDS, 8), nn.Tanh(), nn.Linear(8, WORDS))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("cross_entropy", {}),
        ("cross_entropy", {"smoothing": 0.1}),
        ("cross_entropy", {"weights": tuple(range(1, 12))}),
        ("focal", {"weights": tuple(range(1, 12))}),
    ],
)
def test_unscored__losses_are_those_of_the_tokens_that_count(name, options):
    _, y = draws(7, 2)
    logits = torch.randn(7, LENGTH, WORDS, dtype=torch.float64)
    loss = losses.by_name(name, "classification", outputs=WORDS, **options)
    counts = y != UNSCORED
    expected = loss(logits[counts], y[counts])
    torch.testing.assert_close(losses.mean(loss, logits, y), expected.mean())
    each = losses.per_sample(loss, logits, y).view(y.shape)
    torch.testing.assert_close(each[counts], expected)
    assert not each[~counts].any()


def test_unscored__scores_are_those_of_the_tokens_that_count():
    x, y = draws(7, 3)
    net = network()
    found = scores(net, x, y, WORDS)
    counts = y != UNSCORED
    logits, labels = net(x)[counts].double(), y[counts]
    assert found["accuracy"] == pytest.approx((logits.argmax(1) == labels).double().mean().item())
    assert found["perplexity"] == pytest.approx(F.cross_entropy(logits, labels).exp().item())


@pytest.mark.parametrize("backend", ["vmap", "workers"])
def test_unscored__backends_agree(backend):
    after = {}
    for name in ("loop", backend):
        config = fl.Config.of(
            algorithm="fedavg", rounds=1, participants=5, clients=5, partition="natural", local_epochs=2, batch_size=4,
            backend=name,
        )  # fmt: skip
        _, algorithm = fl.build(config, dataset=text(), model=network())
        after[name] = algorithm.round(algorithm.init(), [0, 1, 2, 3, 4], fl.Rng(seed=0, round=1))[0]["global"]
    torch.testing.assert_close(after[backend], after["loop"], rtol=1e-4, atol=1e-5)


def test_unscored__one_client_is_sgd_by_hand():
    config = fl.Config.of(
        algorithm="fedavg", rounds=1, participants=1, clients=1, partition="iid", local_epochs=1, batch_size=100,
        lr=0.5, momentum=0.0,
    )  # fmt: skip
    data, net = text(), network()
    _, algorithm = fl.build(config, dataset=data, model=net)
    after, _ = algorithm.round(algorithm.init(), [0], fl.Rng(seed=0, round=1))
    counts = data.y != UNSCORED
    loss = F.cross_entropy(net(data.x.long())[counts], data.y[counts])
    for (name, parameter), g in zip(net.named_parameters(), torch.autograd.grad(loss, [*net.parameters()])):
        torch.testing.assert_close(after["global"][name], (parameter - 0.5 * g).detach(), rtol=1e-4, atol=1e-6)


def test_unscored__scores_of_each_client_are_of_its_tokens(tmp_path):
    config = fl.Config.of(
        algorithm="fedavg", rounds=1, participants=5, clients=5, partition="natural", batch_size=4, local_test=0.25
    )
    data, net = text(), network()
    summary = fl.simulate(config, tmp_path / "run", dataset=data, model=net)
    trained = fl.load_model(tmp_path / "run", model=net)
    fed, _ = fl.build(config, dataset=data, model=net)
    found = []
    for client in range(5):
        index = fed.clients.test[client]
        x, y = data.x[index].long(), data.y[index]
        counts = y != UNSCORED
        found.append((trained(x)[counts].argmax(1) == y[counts]).double().mean().item())
    assert summary["final"]["local_test_accuracy"] == pytest.approx(sum(found) / 5)


def test_unscored__a_client_has_the_tokens_of_its_prompts():
    data = fl.Dataset.from_arrays([[1, 2], [3, 4]], [[-100, 5], [-100, 0]], [[1, 2]], [[-100, 5]], classes=7)
    held = classes_held(data, [torch.tensor([0]), torch.tensor([1])], [0, 1])
    assert held.int().tolist() == [[0, 1, 1, 0, 0, 1, 0], [1, 0, 0, 1, 1, 0, 0]]


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        ([[1, 2]], [[-100, -100]], r"y\[0\].*100"),
        ([[1, 2]], [[-1, 2]], "they begin at 0"),
        ([[1, -100]], [[1, 2]], "tokens go from 0"),
    ],
)
def test_unscored__what_is_refused(x, y, message):
    with pytest.raises(fl.FLError, match=message):
        fl.Dataset.from_arrays(x, y, [[1, 2]], [[1, 2]], classes=3)


def test_unscored__prototypes_need_every_token():
    config = fl.Config.of(algorithm="fedproto", clients=5, participants=2, partition="natural")
    with fl_refused("unsupported"):
        fl.build(config, dataset=text(), model=network())

"""The models that clients predict with, asked for all clients at once."""

import dataclasses

import pytest
import torch
from fleets import SPECS, fleet_federation, mixed
from rounds import SMALL, play

from fl import evaluate, own
from fl.algorithms import ALGORITHMS, MIXED
from fl.own import Level, Own

STATIC = ("fedmr", "local", "fesem", "fedfa")  # statistics are collected of one model, of many, and of parts


@pytest.mark.parametrize(("name", "norm"), [*((n, None) for n in ALGORITHMS), *((n, "static_batch") for n in STATIC)])
def test_all_at_once_is_one_after_another(make_federation, name, norm):
    fed = make_federation("resnet20" if norm else "cnn", norm=norm, dtype=torch.float64)
    algorithm = ALGORITHMS[name](fed, SMALL)
    first, _, last = play(algorithm, fed)
    for server, _ in (first, last):  # after the first round one client has never taken part
        assert_the_same(fed, algorithm, server)


@pytest.mark.parametrize("name", MIXED)
def test_of_several_architectures(name):
    fed = mixed("cnn")
    if name == "flexifed":  # whose clients differ in depth alone
        fed = fleet_federation(SPECS["group"], [(1.0, depth) for depth in ((3, 1, 2, 1), 1, (2, 1, 2, 1), 1)])
    algorithm = ALGORITHMS[name](fed, SMALL)
    assert_the_same(fed, algorithm, play(algorithm, fed, rounds=2)[-1][0])


def assert_the_same(fed, algorithm, server):
    """Logits, and the scores of clients on what they hold out."""
    parts = fed.clients.test
    owners = torch.arange(len(parts)).repeat_interleave(parts.sizes)
    found = own.predict_all(fed, algorithm.own(server), parts.samples, owners)
    each = [algorithm.predict(server, fed.data.x[index], client) for client, index in enumerate(parts)]
    torch.testing.assert_close(found.double(), torch.cat(each), rtol=1e-6, atol=1e-6)
    scores = [
        evaluate.score_clients(fed, lambda x, client: algorithm.predict(server, x, client), models)
        for models in (None, algorithm.own(server))
    ]
    for part in scores[0]:
        for alone, together in zip(scores[0][part], scores[1][part], strict=True):
            assert together == pytest.approx(alone, rel=1e-5)


@pytest.mark.parametrize("limit", [1, 5, 2000])
@pytest.mark.parametrize("together", [False, True])
def test_personal_models_side_by_side(make_federation, monkeypatch, limit, together):
    """Clients of very different sizes, samples in any order, and some without a model."""
    fed = make_federation("cnn", dtype=torch.float64)
    monkeypatch.setattr(own, "_SIDE_BY_SIDE", limit)
    monkeypatch.setattr(own, "_stackable", lambda *_: together)
    generator = torch.Generator().manual_seed(0)
    models = {
        name: torch.randn(6, *tensor.shape, generator=generator).double() for name, tensor in fed.initial().items()
    }
    level = Level(models, torch.tensor([4, 1, -1, 2]))
    samples, owners = torch.arange(23).flip(0), torch.tensor([0, 3, 3, 1, 2, 3, 0, 3, 3, 3, 3, 2] + 11 * [3])
    found = own.logits(fed, level, samples, owners)
    for sample, client, logits in zip(samples.tolist(), owners.tolist(), found):
        if (k := int(level.used[client])) < 0:
            assert not logits.any()
        else:
            expected = fed.predict(level.state(k), fed.data.x[sample : sample + 1])[0]
            torch.testing.assert_close(logits.double(), expected, rtol=1e-5, atol=1e-4)


def test_a_model_that_cannot_be_stacked_predicts_alone(pretended, caplog, make_federation):
    class Wilful(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = torch.nn.Linear(64, 3)

        def forward(self, x):
            x = x.flatten(1)
            return self.fc(x) * (1 if x.mean() > 0 else 2)  # a branch that depends on the numbers

    fed = make_federation(Wilful())
    there = dataclasses.replace(fed, model=fed.model.to("cuda"), data=fed.data.to("cuda"))
    models = {name: torch.stack([tensor, 2 * tensor, 3 * tensor]) for name, tensor in there.initial().items()}
    samples, owners = torch.arange(6), torch.tensor([0, 0, 1, 1, 2, 2])
    found = own.logits(there, Level(models, torch.tensor([2, 1, 0, -1])), samples, owners)
    assert found.is_cuda
    for k in range(3):
        expected = there.predict(
            {name: tensor[2 - k] for name, tensor in models.items()}, there.data.x[2 * k : 2 * k + 2]
        )
        torch.testing.assert_close(found[2 * k : 2 * k + 2].cpu(), expected.cpu())
    own.logits(there, Level(models, torch.tensor([2, 1, 0, -1])), samples, owners)
    (record,) = caplog.records  # once
    assert "Wilful predicts for one client after another" in record.getMessage()


def test_the_mean_over_levels_and_a_client_with_none(make_federation):
    fed = make_federation("cnn")
    state = fed.initial()
    half = Level([state], torch.tensor([0, -1, 0, 0]))
    levels = [half, Level([state], torch.tensor([0, 0, -1, -1]))]
    samples, owners = torch.arange(4), torch.arange(4)
    total = own.predict_all(fed, Own(levels), samples, owners)
    mean = own.predict_all(fed, Own(levels, mean=True), samples, owners)
    alone = fed.predict(state, fed.data.x[:4])
    torch.testing.assert_close(total, alone * torch.tensor([2.0, 1, 1, 1])[:, None])
    torch.testing.assert_close(mean, alone)

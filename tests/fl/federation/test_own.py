"""The models that clients predict with, asked for all clients at once."""

import copy
import dataclasses

import pytest
import torch
from rounds import made, play
from selection import some

import fl
from fl.algorithms import ALGORITHMS
from fl.base.rng import Rng
from fl.data import TextOptions
from fl.federation import client_models as own
from fl.federation.client_models import ClientModels, Level
from fl.runs import evaluate

STATIC = ("fedmr", "local", "fesem", "fedfa")  # statistics are collected of one model, of many, and of parts


@pytest.mark.parametrize("name", some(STATIC, STATIC[1:3]))
def test_all_at_once_is_one_after_another_where_statistics_are_collected(make_federation, name):
    """tests/fl/test_contract.py asks it of every method, for a model without them."""
    fed = make_federation("resnet20", norm="static_batch", dtype=torch.float64)
    algorithm = made(name, fed)
    first, _, last = play(algorithm, fed)
    for server, _ in (first, last):  # after the first round one client has never taken part
        assert_the_same(fed, algorithm, server)


@pytest.mark.parametrize("model", ["transformer", "transformer_masked"])
@pytest.mark.parametrize("name", some(["fedavg", "local"], ["local"]))
def test_clients_of_text_are_scored_alike(name, model):
    """What is masked depends on a client alone, not on who else is evaluated."""
    settings = {"partition": "iid", "width": 0.1, "local_test": 0.2, "participants": 3, "clients": 4, "min_samples": 1}
    text = TextOptions("byte", length=16)
    config = fl.Config(
        algorithm=(name,), dataset="pydoc", samples=60, model=model, text=text, batch_size=10, **settings
    )
    fed, algorithm = fl.build(config)
    server = play(algorithm, fed, rounds=1)[-1][0]
    together = evaluate.score_clients(fed, lambda: algorithm.client_models(server))
    for client, found in enumerate(together["test"]):
        index = fed.clients.test[client]
        predict = lambda x, client=client: algorithm.predict(server, x, client)  # noqa: E731
        assert found == pytest.approx(
            evaluate.score(predict, fed.data.x[index], fed.data.y[index], fed.data.classes), rel=1e-5
        )


@pytest.mark.parametrize("name", ["fedavg_plus", "fesem_plus", "fedfa"])
def test_nobody_is_evaluated_who_holds_nothing_out(make_federation, monkeypatch, name):
    """... nor fine-tuned for it."""
    fed = make_federation("cnn")
    none = torch.empty(0, dtype=torch.int64)
    fed = dataclasses.replace(fed, clients=[split._replace(valid=none, test=none) for split in fed.clients])
    algorithm = made(name, fed)
    monkeypatch.setattr("fl.algorithms.parts.personal.trained_or_same", lambda *_: pytest.fail("nobody asked"))
    server = algorithm.init()
    assert evaluate.score_clients(fed, lambda: algorithm.client_models(server)) == {}


@pytest.mark.parametrize("name", some(ALGORITHMS, ["fedrep", "femam"]))
def test_launches_of_an_evaluation_do_not_grow_with_the_clients(pretended, make_federation, name):
    """Those of personal models do, by a gather for each: not by a forward pass, which takes some 20 launches here."""

    def launches(clients):
        fed = make_federation("cnn", sizes=[4 + k % 3 for k in range(clients)], norm="batch")
        fed = dataclasses.replace(fed, model=copy.deepcopy(fed.model).to("cuda"), data=fed.data.to("cuda"))
        algorithm = made(name, fed)
        server, _ = algorithm.round(algorithm.init(), [2, 0, 3], Rng(0, 1))
        models = algorithm.client_models(server)  # which fine-tunes, where the method does
        with pretended.watch() as seen:
            evaluate.score_clients(fed, lambda: models)
        return seen.launches

    assert launches(24) - launches(4) < 8 * 20


def test_a_model_of_many_samples_predicts_in_pieces(pretended, make_federation, monkeypatch):
    """So that one forward pass never takes more memory than some hundred samples."""
    fed = make_federation("cnn", sizes=(60, 7, 12, 5))
    fed = dataclasses.replace(fed, model=copy.deepcopy(fed.model).to("cuda"), data=fed.data.to("cuda"))
    monkeypatch.setattr(own, "_FEW", 10)
    monkeypatch.setattr(own, "_SIDE_BY_SIDE", 40)
    monkeypatch.setattr("fl.federation.inference._CHUNK", 16)
    shapes = []
    handle = fed.model.register_forward_pre_hook(lambda _, inputs: shapes.append(inputs[0].shape))
    models = {name: torch.stack([tensor] * 4) for name, tensor in fed.initial().items()}
    parts = fed.clients.train
    owners = torch.arange(4).repeat_interleave(parts.sizes)
    level = Level(models, torch.arange(4))
    found = own.logits(fed, level, parts.samples, owners)
    handle.remove()
    assert max(shape[0] for shape in shapes) <= 16
    torch.testing.assert_close(found.cpu(), fed.predict(fed.initial(), fed.data.x[parts.samples.to("cuda")]).cpu())


def test_memory_that_is_short_once_is_not_short_for_ever(pretended, make_federation, monkeypatch):
    fed = make_federation("cnn")
    fed = dataclasses.replace(fed, model=copy.deepcopy(fed.model).to("cuda"), data=fed.data.to("cuda"))
    models = {name: torch.stack([tensor] * 4) for name, tensor in fed.initial().items()}
    calls, honest = [], type(fed).predict_each

    def short(self, *given):
        calls.append(1)
        if len(calls) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return honest(self, *given)

    monkeypatch.setattr(type(fed), "predict_each", short)
    level, samples, owners = Level(models, torch.arange(4)), torch.arange(4), torch.arange(4)
    first, second = (own.logits(fed, level, samples, owners) for _ in range(2))
    assert len(calls) == 2
    torch.testing.assert_close(first.cpu(), second.cpu())


def assert_the_same(fed, algorithm, server):
    """Logits, and the scores of clients on what they hold out."""
    parts = fed.clients.test
    owners = torch.arange(len(parts)).repeat_interleave(parts.sizes)
    found = own.predict_all(fed, algorithm.client_models(server), parts.samples, owners)
    each = [algorithm.predict(server, fed.data.x[index], client) for client, index in enumerate(parts)]
    torch.testing.assert_close(found.double(), torch.cat(each), rtol=1e-6, atol=1e-6)
    scores = evaluate.score_clients(fed, lambda: algorithm.client_models(server))
    for part, rows in scores.items():
        for client, (index, found) in enumerate(zip(getattr(fed.clients, part), rows, strict=True)):
            predict = lambda x, client=client: algorithm.predict(server, x, client)  # noqa: E731
            alone = evaluate.score(predict, fed.data.x[index], fed.data.y[index], fed.data.classes)
            assert found == pytest.approx(alone, rel=1e-5)


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
    total = own.predict_all(fed, ClientModels(levels), samples, owners)
    mean = own.predict_all(fed, ClientModels(levels, mean=True), samples, owners)
    alone = fed.predict(state, fed.data.x[:4])
    torch.testing.assert_close(total, alone * torch.tensor([2.0, 1, 1, 1])[:, None])
    torch.testing.assert_close(mean, alone)

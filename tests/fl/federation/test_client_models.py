"""The models that clients predict with, asked for all clients at once, and what is remembered of them."""

import copy
import pickle
from dataclasses import replace
from itertools import product

import pytest
import torch
from fleets import mixed
from ranks import NEED_ADAPTERS, NEED_EXITS
from rounds import made, play, scores
from selection import some

import fl
from fl.algorithms import ALGORITHMS
from fl.base.rng import Rng
from fl.data import TextOptions
from fl.federation import client_models
from fl.federation.client_models import ClientModels, Level, predict_all
from fl.federation.last_value import LastValue
from fl.runs import evaluate
from surgery import broadcast

STATIC = ("fedmr", "local", "fesem", "fedfa")  # statistics are collected of one model, of many, and of parts


def assert_as_one_by_one(fed, algorithm, server):
    """Logits, and the scores of clients on what they hold out."""
    parts = fed.clients.test
    owners = torch.arange(len(parts)).repeat_interleave(parts.sizes)
    found = predict_all(fed, algorithm.client_models(server), parts.samples, owners)
    each = [algorithm.predict(server, fed.data.x[index], client) for client, index in enumerate(parts)]
    torch.testing.assert_close(found.double(), torch.cat(each).double(), rtol=1e-5, atol=1e-5)
    for part, rows in evaluate.score_clients(fed, lambda: algorithm.client_models(server)).items():
        for client, (index, found) in enumerate(zip(getattr(fed.clients, part), rows, strict=True)):
            predict = lambda x, client=client: algorithm.predict(server, x, client)  # noqa: E731
            alone = scores(predict, fed.data.x[index], fed.data.y[index], fed.data.classes)
            assert found == pytest.approx(alone, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", some(STATIC, STATIC[1:3]))
def test_client_models__all_at_once_is_one_after_another_where_statistics_are_collected(make_federation, name):
    """tests/fl/test_contract.py asks it of every method, for a model without them."""
    fed = make_federation("resnet20", norm="static_batch", dtype=torch.float64)
    algorithm = made(name, fed)
    first, _, last = play(algorithm, fed)
    for server, _ in (first, last):  # after the first round one client has never taken part
        assert_as_one_by_one(fed, algorithm, server)


@pytest.mark.slow
@pytest.mark.parametrize("model", some(["transformer", "transformer_masked"], ["transformer_masked"]))
def test_client_models__clients_of_text_are_scored_alike(model):
    """What is masked depends on a client alone, not on who else is evaluated."""
    settings = {"partition": "iid", "width": 0.1, "local_test": 0.2, "participants": 3, "clients": 4, "min_samples": 1}
    settings |= {"dataset": "pydoc", "samples": 60, "text": TextOptions("byte", length=16), "batch_size": 10}
    fed, algorithm = fl.build(fl.Config.of(algorithm="local", model=model, **settings))
    assert_as_one_by_one(fed, algorithm, play(algorithm, fed, rounds=1)[-1][0])


@pytest.mark.parametrize("name", ["fedavg_plus", "fesem_plus", "fedfa"])
def test_client_models__nobody_is_evaluated_who_holds_nothing_out(make_federation, monkeypatch, name):
    """... nor fine-tuned for it."""
    fed, none = make_federation("cnn"), torch.empty(0, dtype=torch.int64)
    fed = replace(fed, clients=[split._replace(valid=none, test=none) for split in fed.clients])
    algorithm = made(name, fed)
    monkeypatch.setattr("fl.algorithms.parts.personal.train_or_keep", lambda *_: pytest.fail("nobody asked"))
    assert evaluate.score_clients(fed, lambda: algorithm.client_models(algorithm.init())) == {}


# Side by side


def moved(fed):
    return replace(fed, model=copy.deepcopy(fed.model).to("cuda"), data=fed.data.to("cuda"))


@pytest.mark.slow
@pytest.mark.parametrize("name", some(ALGORITHMS, ["fedrep", "femam"]))
def test_client_models__launches_of_an_evaluation_do_not_grow_with_the_clients(pretended, make_federation, name):
    """Those of personal models do, by a gather for each: not by a forward pass, which takes some 20 launches here."""

    def launches(clients):
        kind = {"model": "resnet20", "exits": True} if name in NEED_EXITS else {"model": "cnn"}
        kind |= {"adapters": NEED_ADAPTERS.get(name), "base_changes": ALGORITHMS[name].base_changes}
        fed = moved(make_federation(**kind, sizes=[4 + k % 3 for k in range(clients)], norm="batch"))
        algorithm = made(name, fed)
        server, _ = algorithm.round(algorithm.init(), [2, 0, 3], Rng(0, 1))
        models = algorithm.client_models(server)  # which fine-tunes, where the method does
        with pretended.watch() as seen:
            evaluate.score_clients(fed, lambda: models)
        return seen.launches

    assert launches(24) - launches(4) < 8 * 20


def test_client_models__a_model_of_many_samples_predicts_in_pieces(pretended, make_federation, monkeypatch):
    """So that one forward pass never takes more memory than some hundred samples."""
    fed, shapes = moved(make_federation("cnn", sizes=(60, 7, 12, 5))), []
    monkeypatch.setattr(client_models, "_FEW", 10)
    monkeypatch.setattr(client_models, "_SIDE_BY_SIDE", 40)
    monkeypatch.setattr("fl.federation.inference._CHUNK", 16)
    handle = fed.model.register_forward_pre_hook(lambda _, inputs: shapes.append(inputs[0].shape))
    parts = fed.clients.train
    owners = torch.arange(4).repeat_interleave(parts.sizes)
    level = Level(broadcast(fed.initial(), 4), torch.arange(4))
    found = client_models.logits(fed, level, parts.samples, owners)
    handle.remove()
    assert max(shape[0] for shape in shapes) <= 16
    torch.testing.assert_close(found.cpu(), fed.predict(fed.initial(), fed.data.x[parts.samples.to("cuda")]).cpu())


def test_client_models__memory_that_is_short_once_is_not_short_for_ever(pretended, make_federation, monkeypatch):
    fed, calls = moved(make_federation("cnn")), []
    honest = type(fed).predict_each

    def short(self, *given):
        calls.append(1)
        if len(calls) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return honest(self, *given)

    monkeypatch.setattr(type(fed), "predict_each", short)
    level = Level(broadcast(fed.initial(), 4), torch.arange(4))
    first, second = (client_models.logits(fed, level, torch.arange(4), torch.arange(4)) for _ in range(2))
    assert len(calls) == 2
    torch.testing.assert_close(first.cpu(), second.cpu())


@pytest.mark.parametrize("limit", [1, 5, 2000])
@pytest.mark.parametrize("together", [False, True])
def test_client_models__personal_models_side_by_side(make_federation, monkeypatch, limit, together):
    """Clients of very different sizes, samples in any order, and some without a model."""
    fed, generator = make_federation("cnn", dtype=torch.float64), torch.Generator().manual_seed(0)
    monkeypatch.setattr(client_models, "_SIDE_BY_SIDE", limit)
    monkeypatch.setattr(client_models, "_stackable", lambda *_: together)
    models = {n: torch.randn(6, *t.shape, generator=generator).double() for n, t in fed.initial().items()}
    level = Level(models, torch.tensor([4, 1, -1, 2]))
    samples, owners = torch.arange(23).flip(0), torch.tensor([0, 3, 3, 1, 2, 3, 0, 3, 3, 3, 3, 2] + 11 * [3])
    found = client_models.logits(fed, level, samples, owners)
    for sample, client, logits in zip(samples.tolist(), owners.tolist(), found):
        if (k := int(level.used[client])) < 0:
            assert not logits.any()
        else:
            expected = fed.predict(level.state(k), fed.data.x[sample : sample + 1])[0]
            torch.testing.assert_close(logits.double(), expected, rtol=1e-5, atol=1e-4)


def test_client_models__a_model_that_cannot_be_stacked_predicts_alone(pretended, caplog, make_federation):
    class Wilful(torch.nn.Linear):
        def forward(self, x):
            x = x.flatten(1)
            return super().forward(x) * (1 if x.mean() > 0 else 2)  # a branch that depends on the numbers

    fed = moved(make_federation(Wilful(64, 3)))
    models = {name: torch.stack([tensor, 2 * tensor, 3 * tensor]) for name, tensor in fed.initial().items()}
    level, samples, owners = (
        Level(models, torch.tensor([2, 1, 0, -1])),
        torch.arange(6),
        torch.tensor([0, 0, 1, 1, 2, 2]),
    )
    for _ in range(2):
        found = client_models.logits(fed, level, samples, owners)
        assert found.is_cuda
        for k in range(3):
            two = slice(2 * k, 2 * k + 2)
            torch.testing.assert_close(found[two].cpu(), fed.predict(level.state(2 - k), fed.data.x[two]).cpu())
    (record,) = caplog.records  # once
    assert "Wilful predicts for one client after another" in record.getMessage()


def test_client_models__the_mean_over_levels_and_a_client_with_none(make_federation):
    fed = make_federation("cnn")
    state = fed.initial()
    levels = [Level([state], torch.tensor([0, -1, 0, 0])), Level([state], torch.tensor([0, 0, -1, -1]))]
    total, mean = (predict_all(fed, ClientModels(levels, m), torch.arange(4), torch.arange(4)) for m in (False, True))
    alone = fed.predict(state, fed.data.x[:4])
    torch.testing.assert_close(total, alone * torch.tensor([2.0, 1, 1, 1])[:, None])
    torch.testing.assert_close(mean, alone)


# What is remembered is given back for the same tensors only


def source_of(number=1):
    return {"models": {"a": torch.zeros(2), "b": torch.zeros(2)}, "used": [number, -1]}


CHANGES = {
    "nothing": None,
    "another tensor": lambda source: source["models"].update(a=torch.zeros(2)),
    "a write": lambda source: source["models"]["a"].add_(1),
    "a write to a view": lambda source: source["models"]["b"][:1].fill_(1),
    "swapped": lambda source: source["models"].update(a=source["models"]["b"], b=source["models"]["a"]),
    "renamed": lambda source: source["models"].update(c=source["models"].pop("b")),
    "one more": lambda source: source["models"].update(c=torch.zeros(2)),
    "one less": lambda source: source["models"].pop("b"),
    "another number": lambda source: source["used"].__setitem__(0, 5),
    "a tensor for a number": lambda source: source["used"].__setitem__(0, torch.tensor(1)),
    "a number for a tensor": lambda source: source["models"].update(a=0),
}


@pytest.mark.parametrize("change", CHANGES)
def test_client_models__a_source_that_changed_has_no_value(change):
    source, last = source_of(), LastValue()
    assert last.of(source) is None
    assert last.keep(source, {}) == {}
    same = {"models": dict(source["models"]), "used": [1, -1]}  # the same tensors
    assert last.of(source) == last.of(same) == {}
    if change == "nothing":  # only the last one is kept; a copy has copies of the tensors
        assert all(again.of(source) is None for again in (copy.deepcopy(last), pickle.loads(pickle.dumps(last))))
        last.keep(source_of(), "another")
    else:
        CHANGES[change](source)
    assert last.of(source) is None


def test_client_models__a_tensor_at_the_address_of_another_one_is_another_one():
    last = LastValue()
    for _ in range(50):  # the ids of objects that are gone are given to new ones
        source = {"a": torch.zeros(2)}
        assert last.of(source) is None
        last.keep(source, "value")
        del source


def test_client_models__nothing_is_remembered_of_tensors_whose_writes_are_not_counted():
    last = LastValue()
    with torch.inference_mode():
        source = source_of()
        last.keep(source_of(), "before")
        assert last.keep(source, "value") == "value"
        assert last.of(source) is None


CACHING = ["fedavg", "fedavg_plus", "fesem_plus", "femam", "fedfa", "nefl"]
QUICK = [("fedavg", "written to"), ("fedfa", "replaced")]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "how"), some(product(CACHING, ["written to", "replaced"]), QUICK))
def test_client_models__predictions_are_those_of_the_server_as_it_is_now(make_federation, name, how):
    """The same dict, asked about again after its tensors have changed; an algorithm that never saw it before knows
    what it predicts now.
    """
    if name in ("fedfa", "nefl"):
        fed = mixed("static_batch")
    else:
        fed = make_federation("resnet20", norm="static_batch" if name == "fedavg" else None)
    algorithm = made(name, fed)
    server = copy.deepcopy(play(algorithm, fed, 3)[-1][0])  # of other tensors than those of other tests
    x, parts = fed.data.test_x, fed.clients.valid
    owners = torch.arange(len(parts)).repeat_interleave(parts.sizes)

    def predicted(algorithm):
        each = [algorithm.predict(server, x, client) for client in (None, 0, 1)]
        return [*each, predict_all(fed, algorithm.client_models(server), parts.samples, owners)]

    before = predicted(algorithm)
    for part, state in server.items():
        for key, tensor in state.items():
            if tensor.is_floating_point() and part not in ("progress", "rng"):
                if how == "written to":
                    tensor.mul_(0.7).add_(0.01)
                else:
                    state[key] = 0.7 * tensor + 0.01
    expected = predicted(made(name, replace(fed)))
    for old, found, wanted in zip(before, predicted(algorithm), expected, strict=True):
        assert torch.equal(found, wanted)
        assert not torch.equal(old, found)


def test_client_models__statistics_are_those_of_the_model_that_is_asked_about(make_federation):
    fed = make_federation("resnet20", norm="static_batch")
    state, other = fed.initial(), copy.deepcopy(fed.model)
    for module in other.modules():
        if hasattr(module, "eps"):
            module.eps = 10.0
    one, two = fed.statistics(state), fed.statistics(state, other)
    assert any(not torch.equal(one[name], two[name]) for name in one)

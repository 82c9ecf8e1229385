import copy
import dataclasses

import pytest
import torch
import torch.nn.functional as F
from rounds import scores
from sklearn.metrics import accuracy_score, f1_score, log_loss

import surgery
import zoo
from fl.base.rng import Rng
from fl.federation.client_models import ClientModels, Level, share_model
from fl.partition import Split
from fl.runs import evaluate


def test_evaluate__scores_are_scikit_learn_s():
    generator = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(200, 5, generator=generator), torch.randint(5, (200,), generator=generator)
    result = scores(lambda x: x, logits, labels, 5)
    probabilities = logits.double().softmax(1).numpy()
    assert result["accuracy"] == pytest.approx(accuracy_score(labels, logits.argmax(1)))
    assert result["loss"] == pytest.approx(log_loss(labels, probabilities, labels=range(5)))
    assert result["f1"] == pytest.approx(f1_score(labels, logits.argmax(1), average="macro"))


@pytest.mark.parametrize(("limit", "value"), [("_CHUNK", 5), ("_PIXELS", 5 * 8 * 8), ("_PIXELS", 1)])
def test_evaluate__predictions_do_not_depend_on_the_chunks(make_federation, monkeypatch, limit, value):
    """They are the model's in evaluation mode."""
    fed, sizes = make_federation("resnet20"), []
    whole = fed.predict(fed.initial(), fed.data.test_x)
    torch.testing.assert_close(whole, copy.deepcopy(fed.model).eval()(fed.data.test_x.float() / 127.5 - 1))
    monkeypatch.setattr(f"fl.federation.inference.{limit}", value)
    handle = fed.model.register_forward_pre_hook(lambda _, inputs: sizes.append(len(inputs[0])))
    torch.testing.assert_close(fed.predict(fed.initial(), fed.data.test_x), whole)
    handle.remove()
    assert max(sizes) == (1 if value == 1 else 5)
    assert sum(sizes) == len(whole)


def test_evaluate__static_batch_norm_is_given_the_training_data_s_statistics(make_federation, monkeypatch):
    fed = make_federation("resnet20", norm="static_batch")
    state = fed.initial()
    logits = fed.predict(state, fed.data.test_x[:2])
    images = fed.data.x[torch.cat([split.train for split in fed.clients])].float() / 127.5 - 1
    model = zoo.load(fed.model, {**state, **zoo.collect_statistics(fed.model, [images], state)}).eval()
    torch.testing.assert_close(logits, model(fed.data.test_x[:2].float() / 127.5 - 1))

    calls = []
    collect = zoo.collect_statistics
    monkeypatch.setattr("fl.federation.inference.collect_statistics", lambda *args: calls.append(1) or collect(*args))
    fed.predict(state, fed.data.test_x)
    assert not calls  # of the same state, once
    state["head.bias"].add_(1)
    moved = fed.predict(state, fed.data.test_x[:2])
    assert calls
    torch.testing.assert_close(moved, logits + 1)


def test_evaluate__statistics_are_those_of_this_federation_and_state(make_federation):
    fed = make_federation("resnet20", norm="static_batch")
    state = fed.initial()
    name = "section1.0.norm1.running_mean"
    first = fed.statistics(state)
    darker = dataclasses.replace(fed, data=dataclasses.replace(fed.data, x=fed.data.x // 2))
    assert not torch.equal(darker.statistics(state)[name], first[name])
    exchanged = {**state, "stem.norm.weight": state["stem.norm.bias"], "stem.norm.bias": state["stem.norm.weight"]}
    assert not torch.equal(fed.statistics(exchanged)[name], first[name])  # the same tensors under other names
    fed.statistics(state).clear()
    assert fed.statistics(state).keys() == first.keys()
    with torch.inference_mode():
        assert fed.statistics(fed.initial()).keys() == first.keys()


def test_evaluate__similarity_is_that_of_the_parameters_of_two_or_more(make_federation):
    fed = make_federation("resnet20")
    models = fed.train(surgery.broadcast(fed.initial(), 3), [0, 1, 2], Rng(0, 1)).states
    models["stem.norm.running_var"][0] += 1e6
    names = [name for name, _ in fed.model.named_parameters()]
    flat = [torch.cat([state[name].flatten() for name in names]) for state in surgery.unstack(models)]
    pairs = [F.cosine_similarity(flat[i], flat[j], dim=0).item() for i in range(3) for j in range(i)]
    cohort = evaluate.honest_cohort(fed, models, [0, 1, 2], [True] * 3)
    assert evaluate.mean_cosine(fed, cohort)["models_cosine"] == pytest.approx(sum(pairs) / 3, rel=1e-5)
    assert evaluate.mean_cosine(fed, evaluate.honest_cohort(fed, models, [0, 1, 2], [True, False, False])) == {}


@pytest.mark.parametrize(("model", "left"), [("resnet20", 2), ("cnn", 3), ("ten entries", 0)])
def test_evaluate__the_released_similarity_is_the_mean_over_chunks_of_five_entries(make_federation, model, left):
    """Counters and statistics are in it; if no entry is left over, the last chunk counts twice."""
    fed = make_federation(model if left else "cnn")
    if not left:  # 8 and 2
        fed.model.register_buffer("more", torch.ones(3))
        fed.model.register_buffer("steps", torch.tensor(7))
    models = fed.train(surgery.broadcast(fed.initial(), 3), [0, 1, 2], Rng(0, 1)).states
    states = [{name: state[name].double() for name in fed.model.state_dict()} for state in surgery.unstack(models)]
    assert len(states[0]) % 5 == left
    total = 0.0
    for i in range(3):
        for j in range(i):
            chunks, chunk = [], []
            for at, name in enumerate(states[0]):
                chunk = [] if at % 5 == 0 else chunk
                chunk.append((states[i][name].flatten(), states[j][name].flatten()))
                if at % 5 == 4 or at == len(states[0]) - 1:
                    chunks.append(F.cosine_similarity(*map(torch.cat, zip(*chunk)), dim=0).item())
            chunks += [chunks[-1]] * (len(states[0]) % 5 == 0)
            total += sum(chunks) / (len(states[0]) // 5 + 1)
    cohort = evaluate.honest_cohort(fed, models, [0, 1, 2], [True] * 3)
    assert evaluate.released_cosine(fed, cohort)["models_cosine_released"] == pytest.approx(total / 3, rel=1e-6)


def test_evaluate__clients_own_data(make_federation):
    parts = [Split(torch.arange(2), torch.tensor([2]), torch.arange(3, 6)), Split(*torch.arange(6, 12).chunk(3))]
    fed = dataclasses.replace(make_federation("cnn", sizes=(6, 8), participants=1), clients=parts)

    def says(k):  # a model that always says class k
        nothing = {name: 0 * tensor for name, tensor in fed.initial().items()}
        return nothing | {list(nothing)[-1]: F.one_hot(torch.tensor(k), 3).float()}

    scores = evaluate.score_clients(fed, lambda: ClientModels([Level([says(0), says(1)], torch.arange(2))]))
    result, labels = evaluate.summarise_clients(scores), [fed.data.y[part.test] for part in parts]
    kinds = ("accuracy", "std", "worst_tenth", "loss", "f1", "f1_std")
    assert set(result) == {f"local_{part}_{kind}" for part in ("valid", "test") for kind in kinds}
    accuracy = [(y == k).double().mean().item() for k, y in enumerate(labels)]
    f1 = [f1_score(y, [k] * len(y), average="macro") for k, y in enumerate(labels)]
    assert [row["f1"] for row in scores["test"]] == pytest.approx(f1)
    assert f1[0] != f1[1]
    for mean, spread, (one, other) in (("accuracy", "std", accuracy), ("f1", "f1_std", f1)):
        assert result[f"local_test_{mean}"] == pytest.approx((one + other) / 2)
        assert result[f"local_test_{spread}"] == pytest.approx(abs(one - other) / 2)
    rows = {"test": scores["test"]}
    assert evaluate.summarise_clients(rows, left_out={0, 1}) == {}
    by_samples = evaluate.summarise_clients(rows, sizes={"test": [3, 2]})["local_test_accuracy_by_samples"]
    assert by_samples == pytest.approx((3 * accuracy[0] + 2 * accuracy[1]) / 5)
    alone = evaluate.summarise_clients(rows, left_out={0}, sizes={"test": [3, 2]})
    assert alone["local_test_accuracy_by_samples"] == pytest.approx(accuracy[1])
    assert evaluate.summarise_clients(rows, left_out={1})["local_test_loss"] == scores["test"][0]["loss"]


def test_evaluate__a_part_that_some_client_does_not_hold_out_is_not_scored(make_federation):
    fed = make_federation("cnn", sizes=(6, 8), participants=1)
    some, none = torch.arange(3), torch.arange(0)

    for parts, scored in (((none, none), set()), ((some, none), set()), ((some, some), {"test"})):
        clients = [Split(torch.arange(6), none, part) for part in parts]
        there = dataclasses.replace(fed, clients=clients)
        result = evaluate.summarise_clients(evaluate.score_clients(there, lambda: share_model(fed.initial(), 2)))
        assert {name.split("_")[1] for name in result} == scored

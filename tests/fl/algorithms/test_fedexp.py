import math

import pytest
import torch
from oracles import average
from rounds import assert_same, play

import surgery
from fl.algorithms import fedavg
from fl.algorithms.fedexp import FedExPOptions, fedexp, server_step
from fl.base.rng import Rng
from fl.engine import Results
from fl.federation import federation as training


@pytest.fixture
def pretend(monkeypatch):
    """Local training that adds what it is told to the first entry of a client's first parameter."""

    def pretend(moves):
        def train(groups, *how):
            ((_, starts, _),) = groups
            states = {name: tensor.clone() for name, tensor in starts.items()}
            first = next(iter(states.values()))
            first.view(len(first), -1)[:, 0] += torch.tensor(moves)
            return [Results(states, torch.ones(len(moves)))]

        monkeypatch.setattr(training, "train", train)

    return pretend


@pytest.mark.parametrize("model", ["cnn", "resnet20"])
def test_steps_of_one_without_the_last_mean_are_fedavg(make_federation, model):
    fed = make_federation(model)
    bounded = fedexp(fed, FedExPOptions(eps=0.0, max_step=1.0, last_two=False))
    for (a, _), (b, trained) in zip(play(fedavg(fed), fed), play(bounded, fed), strict=True):
        assert_same(a["global"], b["global"])
        assert_same(a["global"], b["iterate"])
        assert trained.metrics["server_step"] == 1


def test_two_rounds_by_hand(make_federation, pretend):
    """One weight moves, of two clients with 1 and 3 samples."""
    fed = make_federation("cnn", sizes=(1, 3), participants=2)
    algorithm = fedexp(fed, FedExPOptions(eps=0.0))
    name = next(iter(fed.initial()))
    at = {name: fed.initial()[name].view(-1)[0].item()}
    pretend([6.0, -1.0])  # mean 0.75, squares (36 + 3) / 4 = 9.75: a step of 9.75 / 2 / 0.5625 = 8 + 2/3
    server, trained = algorithm.round(algorithm.init(), [0, 1], Rng(0, 1))
    assert trained.metrics["server_step"] == pytest.approx(26 / 3)
    assert server["iterate"][name].view(-1)[0].item() == pytest.approx(at[name] + 6.5, abs=1e-4)
    assert_same(server["global"], server["iterate"])  # there is no iterate before
    pretend([1.0, 1.0])  # of one mind: FedAvg's step
    server, trained = algorithm.round(server, [0, 1], Rng(0, 2))
    assert trained.metrics["server_step"] == 1
    assert server["iterate"][name].view(-1)[0].item() == pytest.approx(at[name] + 7.5, abs=1e-4)
    assert server["global"][name].view(-1)[0].item() == pytest.approx(at[name] + 7.0, abs=1e-4)
    pretend([6.0, -1.0])
    for options, expected in ((FedExPOptions(eps=0.9375), 3.25), (FedExPOptions(eps=0.0, max_step=4.0), 4.0)):
        _, trained = fedexp(fed, options).round(server, [0, 1], Rng(0, 3))
        assert trained.metrics["server_step"] == pytest.approx(expected, rel=1e-4)


def test_a_round_equals_its_definition(make_federation):
    """In float64, with frozen and normalised layers: who is extrapolated, what is averaged, what is deployed."""
    fed = make_federation("resnet20", epochs=1)
    next(fed.model.parameters()).requires_grad_(False)
    learnt = {name for name, p in fed.model.named_parameters() if p.requires_grad}
    before, steps = fed.initial(), []
    for number, (server, trained) in enumerate(play(fedexp(fed, FedExPOptions(eps=1e-4)), fed), 1):
        mean = average(surgery.unstack(trained.states), trained.sizes)
        updates = [
            torch.cat([(state[n].double() - before[n]).flatten() for n in learnt])
            for state in [*surgery.unstack(trained.states), mean]
        ]
        squares = [float(u @ u) for u in updates]
        weighted = sum(size * square for size, square in zip(trained.sizes, squares)) / sum(trained.sizes)
        steps.append(max(1.0, 0.5 * weighted / (squares[-1] + 1e-4)))
        assert trained.metrics["server_step"] == pytest.approx(steps[-1], rel=1e-4)
        for name, tensor in server["iterate"].items():
            if not tensor.is_floating_point():
                assert torch.equal(tensor, trained.states[name].amax(0))
                continue
            step = steps[-1] if name in learnt else 1
            expected = before[name].double() + step * (mean[name] - before[name].double())
            torch.testing.assert_close(tensor.double(), expected, rtol=1e-4, atol=1e-5)
            deployed = tensor if number == 1 else (tensor + before[name]) / 2
            torch.testing.assert_close(server["global"][name], deployed)
        before = server["iterate"]
    assert max(steps) > 1.05


@pytest.mark.parametrize("model", ["cnn", "resnet20"])
def test_dropped_clients_have_no_say(make_federation, monkeypatch, model):
    """As if only the others had been drawn."""
    fed = make_federation(model, epochs=1)
    algorithm = fedexp(fed, FedExPOptions(eps=0.0))
    server = play(algorithm, fed, 1)[0][0]
    expected, without = algorithm.round(server, [0, 3], Rng(0, 2))
    honest = training.train

    def train(groups, *how):
        (trained,) = honest(groups, *how)
        next(iter(trained.states.values()))[1].fill_(math.inf)
        return [trained]

    monkeypatch.setattr(training, "train", train)
    actual, trained = algorithm.round(server, [0, 2, 3], Rng(0, 2))
    assert trained.sizes == (3, 0, 5)
    assert trained.metrics["server_step"] == pytest.approx(without.metrics["server_step"], rel=1e-4)
    for part in ("global", "iterate"):
        for name, tensor in expected[part].items():
            torch.testing.assert_close(actual[part][name], tensor, rtol=1e-4, atol=1e-5)


def test_steps_stay_finite():
    start = {"w": torch.zeros(2)}
    still = {"w": torch.zeros(2, 2)}
    assert server_step(start, still, (1, 1), start, 0.0) == 1  # 0 / 0
    huge = {"w": torch.tensor([[3e38, 3e38], [-3e38, -3e38]])}
    assert server_step(start, huge, (1, 1), start, 0.001) == 1

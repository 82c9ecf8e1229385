import pytest
import torch
from oracles import average
from rounds import assert_same, play, pretend

import surgery
from fl.algorithms.fedexp import FedExPOptions, fedexp, server_step
from fl.base.rng import Rng


def test_fedexp__two_rounds_by_hand(make_federation, monkeypatch):
    """One weight moves, of two clients with 1 and 3 samples."""
    fed = make_federation("cnn", sizes=(1, 3), participants=2)
    algorithm = fedexp(fed, FedExPOptions(eps=0.0))
    name = next(iter(fed.initial()))
    begun = fed.initial()[name].view(-1)[0].item()

    def after(moves, algorithm, server, number):
        """The server, the step, and where the weight of both of its models is."""

        def move(states):
            states[name].view(2, -1)[:, 0] += torch.tensor(moves)

        pretend(monkeypatch, move)
        server, trained = algorithm.round(server, [0, 1], Rng(0, number))
        at = [server[part][name].view(-1)[0].item() - begun for part in ("iterate", "global")]
        return server, trained.metrics["server_step"], at

    # mean 0.75, squares (36 + 3) / 4 = 9.75: a step of 9.75 / 2 / 0.5625 = 8 + 2/3
    server, step, at = after([6.0, -1.0], algorithm, algorithm.init(), 1)
    assert step == pytest.approx(26 / 3)
    assert at == pytest.approx([6.5, 6.5], abs=1e-4)  # there is no iterate before
    server, step, at = after([1.0, 1.0], algorithm, server, 2)
    assert step == 1  # of one mind: FedAvg's step
    assert at == pytest.approx([7.5, 7.0], abs=1e-4)
    for options, expected in ((FedExPOptions(eps=0.9375), 3.25), (FedExPOptions(eps=0.0, max_step=4.0), 4.0)):
        _, step, _ = after([6.0, -1.0], fedexp(fed, options), server, 3)
        assert step == pytest.approx(expected, rel=1e-4)


def test_fedexp__a_round_equals_its_definition(make_federation):
    """In float64, with frozen and normalised layers: who is extrapolated, what is averaged, what is deployed."""
    fed = make_federation("resnet20", epochs=1)
    next(fed.model.parameters()).requires_grad_(False)
    learnt = fed.trainable.keys()
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


def test_fedexp__without_the_last_two_the_iterate_is_deployed(make_federation):
    fed = make_federation("cnn")
    for server, _ in play(fedexp(fed, FedExPOptions(last_two=False)), fed):
        assert_same(server["global"], server["iterate"])


def test_fedexp__steps_stay_finite():
    start = {"w": torch.zeros(2)}
    still = {"w": torch.zeros(2, 2)}
    assert server_step(start, still, (1, 1), start, 0.0) == 1  # 0 / 0
    huge = {"w": torch.tensor([[3e38, 3e38], [-3e38, -3e38]])}
    assert server_step(start, huge, (1, 1), start, 0.001) == 1

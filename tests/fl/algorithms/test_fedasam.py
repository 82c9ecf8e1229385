import copy

import pytest
import torch
import torch.nn.functional as F
from selection import some

import surgery
from fl.algorithms.fedasam import FedASAMOptions, adaptive_ascent, fedasam
from fl.algorithms.fedavg import fedavg
from fl.base.rng import Rng
from fl.engine import SGD
from fl.engine.batches import make_batches

BACKENDS = ["loop", "workers", "vmap"]


def one_round(algorithm, fed, clients=(0, 1, 2)):
    server = algorithm.init()
    return algorithm.round(server, list(clients), Rng(0, 1))[1]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("model", some(["cnn", "resnet20"], ["resnet20"]))
def test_without_reach_it_is_fedavg(make_federation, backend, model):
    """Bit for bit, batch-norm statistics included: the second pass leaves them alone."""
    fed = make_federation(model, backend=backend)
    a, b = one_round(fedavg(fed), fed), one_round(fedasam(fed, FedASAMOptions(rho=0.0)), fed)
    for name, tensor in a.states.items():
        assert torch.equal(tensor, b.states[name]), name
    assert torch.equal(a.loss, b.loss)


def by_hand(model, data, batches, optimizer, rho, eta):
    """ASAM as its paper writes it down, parameter by parameter, with torch.optim.SGD."""
    model = copy.deepcopy(model).train()
    sgd = torch.optim.SGD(model.parameters(), lr=optimizer.lr, momentum=optimizer.momentum)
    for index in batches:
        x, y = data.normalise(data.x[index], torch.float64), data.y[index]
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()
        total, moves = 0.0, []
        for name, p in model.named_parameters():
            t = p.detach().abs() + eta if "weight" in name else torch.ones_like(p)
            total += ((t * p.grad) ** 2).sum().item()
            moves.append(t**2 * p.grad)
        statistics = {name: b.clone() for name, b in model.named_buffers()}
        origin = [p.detach().clone() for p in model.parameters()]
        with torch.no_grad():
            for p, move in zip(model.parameters(), moves):
                p += rho * move / total**0.5
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            for p, value in zip(model.parameters(), origin):
                p.copy_(value)
            for name, b in model.named_buffers():
                b.copy_(statistics[name])
        sgd.step()
    return model.state_dict()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("model", ["cnn", "resnet20"])
def test_a_client_is_trained_as_the_paper_says(make_federation, backend, model):
    fed = make_federation(model, dtype=torch.float64, backend=backend, optimizer=SGD(0.05, 0.9))
    trained = one_round(fedasam(fed, FedASAMOptions(rho=0.5, eta=0.01)), fed, (2,))
    batches = make_batches([fed.clients.train[2]], [2], fed.local.epochs, fed.local.batch_size, Rng(0, 1), "cpu")
    expected = by_hand(fed.model, fed.data, batches.index[0], fed.local.optimizer, 0.5, 0.01)
    for name, tensor in surgery.unstack(trained.states)[0].items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-9, atol=1e-9)
    plain = one_round(fedavg(fed), fed, (2,))
    assert surgery.distance(trained.states, plain.states).item() > 1e-4


def test_the_step_has_the_length_that_the_paper_gives_it():
    """||T^-1 step|| = rho, and scaling a weight up and its gradient down scales the step up."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)  # noqa: E731
    params = {"a.weight": draw(3, 4), "a.bias": draw(3)}
    gradients = {"a.weight": draw(3, 4), "a.bias": draw(3)}
    step = adaptive_ascent(0.2)(params, gradients)
    length = (step["a.weight"] / params["a.weight"].abs()).square().sum() + step["a.bias"].square().sum()
    assert length.sqrt().item() == pytest.approx(0.2)
    scaled = adaptive_ascent(0.2)(
        {**params, "a.weight": 10 * params["a.weight"]}, {**gradients, "a.weight": gradients["a.weight"] / 10}
    )
    torch.testing.assert_close(scaled["a.weight"], 10 * step["a.weight"])


def test_a_flat_place_has_no_step():
    still = adaptive_ascent(0.1)({"weight": torch.ones(2)}, {"weight": torch.zeros(2)})
    assert torch.equal(still["weight"], torch.zeros(2))
    for power in range(6, 45):  # squares of the small ones vanish in float32
        step = adaptive_ascent(0.1)({"bias": torch.ones(1)}, {"bias": torch.tensor([10.0**-power])})
        assert 0 <= step["bias"].item() <= 0.1001


@pytest.mark.parametrize("name", ["weight", "in_proj_weight", "parametrizations.weight.original0"])
def test_weights_go_by_many_names(name):
    step = adaptive_ascent(0.1)({name: torch.tensor([-2.0])}, {name: torch.tensor([3.0])})
    assert step[name].item() == pytest.approx(0.2)

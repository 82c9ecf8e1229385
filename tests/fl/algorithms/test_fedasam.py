import copy

import pytest
import torch
import torch.nn.functional as F
from fleets import assert_close
from rounds import row

from fl.algorithms.fedasam import FedASAMOptions, adaptive_ascent, fedasam
from fl.base.rng import Rng
from fl.engine import SGD
from fl.engine.batches import make_batches


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
        origin = copy.deepcopy(model.state_dict())
        with torch.no_grad():
            for p, move in zip(model.parameters(), moves):
                p += rho * move / total**0.5
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()
        model.load_state_dict(origin)  # batch-norm statistics, too
        sgd.step()
    return model.state_dict()


@pytest.mark.parametrize("backend", ["loop", "workers", "vmap"])
@pytest.mark.parametrize("model", ["cnn", "resnet20"])
def test_fedasam__a_client_is_trained_as_the_paper_says(make_federation, backend, model):
    fed = make_federation(model, dtype=torch.float64, backend=backend, optimizer=SGD(0.05, 0.9))
    algorithm = fedasam(fed, FedASAMOptions(rho=0.5, eta=0.01))
    _, trained = algorithm.round(algorithm.init(), [2], Rng(0, 1))
    batches = make_batches([fed.clients.train[2]], [2], fed.local.epochs, fed.local.batch_size, Rng(0, 1), "cpu")
    settings = fed.model, fed.data, batches.index[0], fed.local.optimizer
    expected = by_hand(*settings, 0.5, 0.01)
    assert_close(row(trained.states, 0), expected, atol=1e-9)
    plain = by_hand(*settings, 0.0, 0.01)
    assert max((tensor - plain[name]).abs().max() for name, tensor in expected.items()) > 1e-4


def test_fedasam__the_step_has_the_length_that_the_paper_gives_it():
    """||T^-1 step|| = rho, and scaling a weight up and its gradient down scales the step up."""
    generator, ascend = torch.Generator().manual_seed(0), adaptive_ascent(0.2)
    draw = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)  # noqa: E731
    params, gradients = ({"a.weight": draw(3, 4), "a.bias": draw(3)} for _ in range(2))
    step = ascend(params, gradients)
    length = (step["a.weight"] / params["a.weight"].abs()).square().sum() + step["a.bias"].square().sum()
    assert length.sqrt().item() == pytest.approx(0.2)
    larger, smaller = ({**each, "a.weight": by * each["a.weight"]} for each, by in ((params, 10), (gradients, 0.1)))
    torch.testing.assert_close(ascend(larger, smaller)["a.weight"], 10 * step["a.weight"])


def test_fedasam__a_flat_place_has_no_step():
    still = adaptive_ascent(0.1)({"weight": torch.ones(2)}, {"weight": torch.zeros(2)})
    assert torch.equal(still["weight"], torch.zeros(2))
    for power in range(6, 45):  # squares of the small ones vanish in float32
        step = adaptive_ascent(0.1)({"bias": torch.ones(1)}, {"bias": torch.tensor([10.0**-power])})
        assert 0 <= step["bias"].item() <= 0.1001


@pytest.mark.parametrize("name", ["weight", "in_proj_weight", "parametrizations.weight.original0"])
def test_fedasam__weights_go_by_many_names(name):
    step = adaptive_ascent(0.1)({name: torch.tensor([-2.0])}, {name: torch.tensor([3.0])})
    assert step[name].item() == pytest.approx(0.2)

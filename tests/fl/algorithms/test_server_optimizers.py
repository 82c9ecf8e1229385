"""FedAvgM, FedAdagrad, FedAdam and FedYogi against torch's optimizers and the paper's lines written out."""

import pytest
import torch
from rounds import assert_same, play

from fl.algorithms.fedadagrad import METHOD as fedadagrad
from fl.algorithms.fedadagrad import FedAdagradOptions
from fl.algorithms.fedadam import METHOD as fedadam
from fl.algorithms.fedadam import FedAdamOptions
from fl.algorithms.fedavg import METHOD as fedavg
from fl.algorithms.fedavgm import METHOD as fedavgm
from fl.algorithms.fedavgm import FedAvgMOptions
from fl.algorithms.fedyogi import METHOD as fedyogi


def means(algorithm, fed, rounds=3):
    """(the global model before, the clients' mean, the global model after) of each round; buffers are the mean's."""
    before, result = algorithm.init()["global"], []
    for server, update in play(algorithm, fed, rounds):
        mean = fed.average(update.received, update.sizes)
        assert_same(*({n: s[n] for n in mean if n not in fed.trainable} for s in (server["global"], mean)))
        result.append((before, mean, server["global"]))
        before = server["global"]
    return result


def test_server_optimizers__without_momentum_it_is_fedavg(make_federation):
    fed = make_federation("resnet20", dtype=torch.float64, epochs=1)
    pairs = zip(play(fedavg(fed), fed), play(fedavgm(fed, FedAvgMOptions(beta=0.0)), fed), strict=True)
    for (plain, _), (other, _) in pairs:
        for name, tensor in plain["global"].items():
            torch.testing.assert_close(other["global"][name], tensor, atol=1e-12, rtol=0)


def test_fedavgm__is_torchs_sgd_with_momentum_on_the_mean_update(make_federation):
    fed = make_federation("resnet20", dtype=torch.float64, epochs=1)
    weights = [torch.nn.Parameter(fed.initial()[name].clone()) for name in fed.trainable]
    optimizer = torch.optim.SGD(weights, lr=0.7, momentum=0.6)
    for before, mean, after in means(fedavgm(fed, FedAvgMOptions(beta=0.6, lr=0.7)), fed):
        for name, weight in zip(fed.trainable, weights):
            weight.grad = before[name] - mean[name]
        optimizer.step()
        for name, weight in zip(fed.trainable, weights):
            torch.testing.assert_close(after[name], weight.detach(), atol=1e-12, rtol=1e-9)


SQUARES = {
    "fedadagrad": lambda v, d: v + d * d,
    "fedadam": lambda v, d: 0.8 * v + 0.2 * d * d,
    "fedyogi": lambda v, d: v - 0.2 * d * d * (1 if v > d * d else -1 if v < d * d else 0),
}


@pytest.mark.parametrize("name", SQUARES)
def test_server_optimizers__adaptive_servers_are_the_papers_lines_number_by_number(make_federation, name):
    """Algorithm 2, lines 10 to 14, with Python's numbers: the squares are of the mean update, not of the momentum."""
    fed = make_federation("cnn", dtype=torch.float64, epochs=1)
    options = {"lr": 0.05, "beta1": 0.5, "tau": 0.001}  # so small that squares also grow
    algorithm = {
        "fedadagrad": lambda: fedadagrad(fed, FedAdagradOptions(**options)),
        "fedadam": lambda: fedadam(fed, FedAdamOptions(beta2=0.8, **options)),
        "fedyogi": lambda: fedyogi(fed, FedAdamOptions(beta2=0.8, **options)),
    }[name]()
    layer = list(fed.trainable)[-1]
    momentum, squares, grown = [0.0] * 3, [0.001**2] * 3, set()
    for before, mean, after in means(algorithm, fed, rounds=6):
        x, delta = before[layer].tolist(), (mean[layer] - before[layer]).tolist()
        momentum = [0.5 * m + 0.5 * d for m, d in zip(momentum, delta)]
        old, squares = squares, [SQUARES[name](v, d) for v, d in zip(squares, delta)]
        grown |= {new > v for v, new in zip(old, squares)}
        expected = [w + 0.05 * m / (v**0.5 + 0.001) for w, m, v in zip(x, momentum, squares)]
        assert after[layer].tolist() == pytest.approx(expected, rel=1e-9)
    assert grown == ({True} if name == "fedadagrad" else {True, False})

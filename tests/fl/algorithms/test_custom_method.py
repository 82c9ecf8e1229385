"""What a method of one's own may not do is refused, here as on nodes."""

from dataclasses import replace

import pytest
import torch
from refusals import fl_refused
from rounds import played
from torch import nn

import fl
from fl.algorithms import ALGORITHMS
from fl.algorithms.fedavg import METHOD as fedavg
from fl.algorithms.femam import METHOD as femam
from fl.algorithms.femam import FeMAMOptions
from fl.algorithms.local import METHOD as local
from fl.algorithms.method import Method
from fl.algorithms.parts.personal import fine_tuned
from fl.base.errors import FLError
from fl.base.rng import Rng
from fl.federation.clients import CLIENTS


def counting(fed):
    """FedAvg whose clients count how often they took part."""

    def init():
        return {"global": fed.initial(), CLIENTS: fed.client_states({"count": torch.zeros(())})}

    def client(message, client_states, clients, rng):
        return fed.train(message["model"], clients, rng)._replace(client_states={"count": client_states["count"] + 1})

    return replace(fedavg.make(fed), init=init, client=client)


def test_custom_method__client_states_stay_although_the_server_function_does_not_name_them(make_federation):
    _, (server, _) = played(counting(make_federation("cnn")), [[0, 2]] * 2)
    assert server[CLIENTS]["count"].tolist() == [2, 0, 2, 0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda update: update._replace(client_states={"cnt": torch.zeros(2)}), "a client's state has count"),
        (lambda update: update._replace(metrics={"drift": 1.0}), "return them from the server function"),
        (lambda update: update._replace(received={**update.received, "more": torch.zeros(2)}), "clients send more"),
    ],
)
def test_custom_method__updates_that_could_not_come_from_nodes_are_refused(make_federation, change, message):
    plain = counting(make_federation("cnn"))
    algorithm = replace(plain, client=lambda *given: change(plain.client(*given)))
    with fl_refused("run", message):
        algorithm.round(algorithm.init(), [0, 2], Rng(0, 1))


def changed(server, change):
    """The server, with another first tensor of its global model."""
    name, tensor = next(iter(server["global"].items()))
    return {"global": {**server["global"], name: change(tensor)}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda server: None, "NoneType"),
        (lambda server: server["global"], r'return \{"global": state\}'),
        (lambda server: (server, 3), "metrics that are an int"),
        (lambda server: {**server, "n": 3}, "part 'n' is an? int"),
        (lambda server: {"n": {}}, "part 'global'"),
        (lambda server: {"global": dict([*server["global"].items()][1:])}, "model without"),
        (lambda server: {"global": {**server["global"], "more": torch.zeros(1)}}, "model with 'more'"),
        (lambda server: changed(server, lambda tensor: tensor[None]), "shape"),
        (lambda server: changed(server, torch.Tensor.double), "float64, which was torch.float32"),
    ],
)
def test_custom_method__a_server_function_that_returns_no_server_is_refused(make_federation, change, message):
    plain = fedavg(make_federation("cnn"))
    algorithm = replace(plain, aggregate=lambda *given: change(plain.aggregate(*given)))
    with pytest.raises(FLError, match=message):
        algorithm.round(plain.init(), [0, 2], Rng(0, 1))


def test_custom_method__a_step_halfway_to_the_mean_of_all_tensors_is_refused_for_counters():
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))
    fed, plain = fl.build(fl.Config.of(algorithm="fedavg", clients=4, participants=2, samples=200), model=net)

    def aggregate(server, clients, update, rng):
        mean = fed.average(update.received, update.sizes)
        return {"global": {name: old + 0.5 * (mean[name] - old) for name, old in server["global"].items()}}

    algorithm = replace(plain, aggregate=aggregate)
    with fl_refused("run", "num_batches_tracked", "named_parameters"):
        algorithm.round(algorithm.init(), [0, 2], Rng(0, 1))


def test_custom_method__functions_with_other_arguments_are_refused_before_the_first_round(make_federation):
    def mine(fed):
        return replace(fedavg.make(fed), aggregate=lambda server, clients, update: server)

    with fl_refused("run"):
        Method(mine)(make_federation("cnn"))


@pytest.mark.parametrize("part", [0.1, [torch.zeros(1)], {"a": 1}])
def test_custom_method__messages_that_could_not_be_sent_are_refused(make_federation, part):
    plain = fedavg(make_federation("cnn"))
    algorithm = replace(plain, send=lambda state, clients, rng: {"model": state["global"], "lr": part})
    with fl_refused("run", "'s '"):
        algorithm.round(plain.init(), [0, 2], Rng(0, 1))


@pytest.mark.parametrize("more", [{"step": 0}, {"step": {"n": 0}}, {"global": 1}])
def test_simulate__a_server_that_no_checkpoint_could_hold_is_refused_before_the_first_round(
    tmp_path, monkeypatch, more
):
    def mine(fed):
        plain = fedavg.make(fed)
        return replace(plain, init=lambda: {**plain.init(), **more})

    monkeypatch.setitem(ALGORITHMS, "mine", Method(mine))
    with fl_refused("run", f"the server's part '{next(iter(more))}' is"):
        fl.simulate(fl.Config.of(algorithm="mine", rounds=1, width=(0.1,)), tmp_path / "a")


def test_custom_method__other_methods_can_be_fine_tuned_where_clients_have_one_model(make_federation):
    fed = make_federation("cnn")
    algorithm = fine_tuned(fed, local(fed), 1)
    ((server, _),) = played(algorithm, [[0, 2]])
    assert algorithm.predict(server, fed.data.test_x, 2).isfinite().all()
    levels = fine_tuned(fed, femam(fed, FeMAMOptions(("global", "2"), (1,), prune=False)), 1)
    ((server, update),) = played(levels, [[0, 2]])
    assert update.metrics["level"] == 1
    with fl_refused("unsupported"):
        levels.predict(server, fed.data.test_x, 0)
    with fl_refused("argument", "client 4"):
        levels.predict(server, fed.data.test_x, 4)

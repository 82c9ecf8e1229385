import copy
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from refusals import fl_refused
from rounds import assert_same, play

import fl
from fl.algorithms.depthfl import DepthFLOptions, depthfl
from fl.algorithms.fedavg import METHOD as fedavg
from fl.algorithms.heterofl import METHOD as heterofl
from fl.algorithms.heterofl import HeteroFLOptions
from surgery import state

DEPTHS = ("1-0-0-0", "1-1-0-0", "1-1-1-1")
CONFIG = fl.Config.of(
    algorithm="depthfl", samples=120, clients=6, participants=3, min_samples=5, model="resnet9", width=(0.25,),
    norm="group", exits=True, local_epochs=1, batch_size=200, momentum=0.0, lr=0.1, backend="loop",
    last_batch="partial",
    architectures=fl.ArchitectureOptions(depths=DEPTHS, choose="cycle"),
)  # fmt: skip


def loss_of(logits, y, weight):
    """As in the authors' loop over exits, and over the others of each."""
    exits = logits.unbind(1)
    total = 0
    for i, own in enumerate(exits):
        total = total + F.cross_entropy(own, y)
        for j, other in enumerate(exits):
            if j != i:
                target = other.detach().softmax(1)
                apart = (target * (target.log() - own.log_softmax(1))).sum(1).mean()
                total = total + weight * apart / (len(exits) - 1)
    return total


@pytest.mark.parametrize(("number", "options"), [(3, DepthFLOptions(ramp=4)), (9, DepthFLOptions(0.5, 4)),
                                                 (1, DepthFLOptions(2.0, 0))])  # fmt: skip
def test_depthfl__a_round_as_the_paper_writes_it(number, options):
    """Of three clients, who end after the first, the second and the last section, and make one step each."""
    fed, _ = fl.build(CONFIG)
    algorithm, clients, rng = depthfl(fed, options), [0, 1, 2], fl.Rng(0, number)
    before = algorithm.init()
    after, update = algorithm.round(before, clients, rng)
    left = max(0, 1 - (number - 1) / options.ramp) if options.ramp else 0
    weight = options.distil * math.exp(-5 * left**2)
    trained = []
    for k, client in enumerate(clients):
        net = copy.deepcopy(fed.fleet[client].model).train()
        net.load_state_dict({name: before["global"][name] for name in net.state_dict()})
        samples = fed.clients.train[client]
        loss = loss_of(net(fed.data.normalise(fed.data.samples_at(samples))), fed.data.labels_at(samples), weight)
        loss.backward()
        torch.testing.assert_close(update.loss[k].item(), loss.item(), atol=1e-5, rtol=1e-5)
        trained.append({name: p.detach() - 0.1 * p.grad for name, p in net.named_parameters()})
    assert [len(one) for one in trained] == sorted({len(one) for one in trained})
    for name, tensor in after["global"].items():
        held = [one[name] for one in trained if name in one]
        torch.testing.assert_close(tensor, sum(held) / len(held), atol=1e-5, rtol=1e-4, msg=name)


def test_depthfl__without_distillation_it_is_heterofl_and_of_one_architecture_fedavg():
    fed, _ = fl.build(CONFIG)
    others = heterofl(fed, HeteroFLOptions(scaler=False, own_rows=False))
    for (one, _), (other, _) in zip(play(depthfl(fed, DepthFLOptions(0.0)), fed, 2), play(others, fed, 2), strict=True):
        assert_same(one["global"], other["global"])
    equal = replace(fed, fleet=None, clients=fed.clients)
    ((one, _),) = play(depthfl(equal, DepthFLOptions(0.0)), equal, 1)
    ((_, update),) = play(fedavg(equal), equal, 1)
    mean = {name: tensor.mean(0) for name, tensor in update.states.items()}
    torch.testing.assert_close(one["global"], mean)


def test_depthfl__a_model_with_one_exit_has_nobody_to_learn_from():
    config = CONFIG.replace(architectures=fl.ArchitectureOptions(depths=("1-0-0-0",), choose="cycle"))
    fed, algorithm = fl.build(config)
    plain = depthfl(fed, DepthFLOptions(0.0))
    for (one, _), (other, _) in zip(play(algorithm, fed, 1), play(plain, fed, 1), strict=True):
        torch.testing.assert_close(one["global"], other["global"])


def test_depthfl__clients_predict_with_the_mean_of_their_own_exits():
    fed, algorithm = fl.build(CONFIG)
    server, x = algorithm.init(), fed.data.test_x[:5]
    for client in (0, 1):
        net = copy.deepcopy(fed.fleet[client].model)
        net.load_state_dict({name: server["global"][name] for name in state(net)})
        logits = net.train()(fed.data.normalise(x))
        assert logits.shape == (5, client + 1, 10)
        torch.testing.assert_close(algorithm.predict(server, x, client), logits.detach().mean(1))


def test_depthfl__what_it_is_not_for_is_refused():
    with fl_refused("unsupported", "--exits", "--model"):
        fl.build(CONFIG.replace(exits=False, architectures=fl.ArchitectureOptions()))
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(60, 1, 8, 8, generator=generator), torch.randn(60, 2, generator=generator)
    numbers = fl.Dataset.from_arrays(x, y, x, y, task="regression")
    given = CONFIG.replace(samples=0, partition="iid")
    with fl_refused("unsupported", "--depthfl.distil"):
        fl.build(given, numbers)
    fl.build(given.replace(depthfl=DepthFLOptions(0.0)), numbers)

import copy

import pytest
import torch
import torch.nn.functional as F
from refusals import fl_refused
from rounds import assert_same, play
from selection import some

import fl
from fl.algorithms.heterofl import METHOD as heterofl
from fl.algorithms.heterofl import HeteroFLOptions
from fl.algorithms.scalefl import ScaleFLOptions, scalefl
from zoo.layers import Scaler

CONFIG = fl.Config.of(
    algorithm="scalefl", samples=120, clients=6, participants=3, min_samples=5, model="resnet9", width=(0.25,),
    norm="group", exits=True, local_epochs=1, batch_size=200, momentum=0.0, lr=0.1, backend="loop",
    last_batch="partial",
    architectures=fl.ArchitectureOptions(
        widths=(0.5, 1.0), depths=("1-0-0-0", "1-1-0-0", "1-1-1-1"), choose="cycle"
    ),
)  # fmt: skip


def loss_of(logits, y, options, distils):
    """As in the authors' loop over exits; the divergence is that of the samples, and the last exit a constant."""
    exits = logits.unbind(1)
    total, weights = 0, 0
    for j, own in enumerate(exits, 1):
        weight = j if options.exits == "rising" else 1
        weights += weight if options.exits == "rising" else 0
        loss = F.cross_entropy(own, y)
        if j < len(exits) and distils:
            hot = options.temperature
            target = (exits[-1].detach() / hot).softmax(1)
            apart = F.kl_div((own / hot).log_softmax(1), target, reduction="batchmean")
            loss = loss + options.distil * hot * hot * apart
        total = total + weight * loss
    return total / (weights or 1)


BEFORE_IT_DISTILS = (2, ScaleFLOptions(distil=2.0, start=2))
WEIGHTED, EQUAL = ScaleFLOptions(distil=0.7), ScaleFLOptions(distil=2.0, temperature=1.5, start=2, exits="equal")


@pytest.mark.parametrize(("number", "options"), [(1, WEIGHTED), (3, EQUAL), BEFORE_IT_DISTILS])
def test_scalefl__a_round_as_the_authors_write_it(number, options):
    """Of clients of unequal width, who end after different sections and make one step each."""
    fed, _ = fl.build(CONFIG.replace(scalefl=options))
    algorithm, clients, rng = scalefl(fed, options), [0, 3, 5], fl.Rng(0, number)
    shapes = [{name: p.shape for name, p in fed.fleet[client].model.named_parameters()} for client in clients]
    assert len({tuple(one.values()) for one in shapes}) == 3
    before = algorithm.init()
    after, update = algorithm.round(before, clients, rng)
    total = {name: torch.zeros_like(tensor) for name, tensor in before["global"].items()}
    count = {name: torch.zeros_like(tensor) for name, tensor in before["global"].items()}
    for k, client in enumerate(clients):
        net = copy.deepcopy(fed.fleet[client].model).train()
        corner = {name: tuple(slice(n) for n in shape) for name, shape in shapes[k].items()}
        net.load_state_dict({name: before["global"][name][corner[name]] for name in corner})
        samples = fed.clients.train[client]
        logits = net(fed.data.normalise(fed.data.samples_at(samples)))
        loss = loss_of(logits, fed.data.labels_at(samples), options, options.distil and number > options.start)
        loss.backward()
        torch.testing.assert_close(update.loss[k].item(), loss.item(), atol=1e-5, rtol=1e-5)
        for name, p in net.named_parameters():
            total[name][corner[name]] += p.detach() - 0.1 * p.grad
            count[name][corner[name]] += 1
    for name, tensor in after["global"].items():
        mean = torch.where(count[name] > 0, total[name] / count[name].clamp(min=1), before["global"][name])
        torch.testing.assert_close(tensor, mean, atol=1e-5, rtol=1e-4, msg=name)


@pytest.mark.parametrize("scaler", some((True, False), [True]))
def test_scalefl__without_distillation_and_weights_it_is_heterofl(scaler):
    options = ScaleFLOptions(distil=0.0, exits="equal", scaler=scaler)
    fed, algorithm = fl.build(CONFIG.replace(scalefl=options))
    assert scaler == any(module.rate < 1 for module in fed.fleet[0].model.modules() if isinstance(module, Scaler))
    others = heterofl(fed, HeteroFLOptions(scaler=scaler, own_rows=False))
    for (one, _), (other, _) in zip(play(algorithm, fed, 2), play(others, fed, 2), strict=True):
        assert_same(one["global"], other["global"])


def test_scalefl__what_it_is_not_for_is_refused():
    with fl_refused("unsupported", "--exits"):
        fl.build(CONFIG.replace(exits=False, architectures=fl.ArchitectureOptions()))
    x, y = torch.randn(60, 1, 8, 8), torch.randn(60, 2)
    numbers = fl.Dataset.from_arrays(x, y, x, y, task="regression")
    given = CONFIG.replace(samples=0, partition="iid")
    with fl_refused("unsupported", "--scalefl.distil"):
        fl.build(given, numbers)
    _, algorithm = fl.build(given.replace(scalefl=ScaleFLOptions(0.0)), numbers)
    algorithm.round(algorithm.init(), [0, 1], fl.Rng(0, 1))

"""What the methods have in common whose clients train parts of one global model."""

import copy

import oracles
import pytest
import torch
import torch.nn.functional as F
from fleets import assert_close, fleet_for, mixed, shapes, train_each
from rounds import play
from selection import some

from fl.algorithms import ALGORITHMS, methods_of
from fl.base.rng import Rng
from fl.engine import SGD
from fl.engine.batches import make_batches
from fl.federation import federation as federation_module


@pytest.mark.parametrize("name", some(methods_of("heterogeneous"), ["heterofl", "fedrolex", "flexifed", "depthfl"]))
def test_submodels__methods_whose_clients_keep_their_part_of_the_global_model_say_where_it_lies(name):
    """FedRolex's parts move on, and FlexiFed's lie in a tree."""
    fed = fleet_for(name)
    plan = ALGORITHMS[name](fed).plan
    assert (plan is None) == (name in ("fedrolex", "flexifed"))
    if plan:
        for client in range(len(fed.clients)):
            assert plan(client).small_shapes == shapes(fed, client)
            assert plan(client).shapes == {key: tuple(tensor.shape) for key, tensor in fed.initial().items()}


@pytest.mark.parametrize("name", some(("fedfa", "heterofl", "fedrolex"), ["fedfa", "fedrolex"]))
def test_submodels__a_client_predicts_with_its_part_of_the_server_that_is_asked_about(name):
    fed = fleet_for(name)
    algorithm = ALGORITHMS[name](fed)
    (first, _), (second, _) = play(algorithm, fed, 2)
    x = fed.data.test_x
    for server, client in ((first, 1), (second, 1), (second, 2), (first, 3), (second, 0)):
        model = fed.fleet[client].model
        state = {n: oracles.corner(server["global"][n], shape) for n, shape in shapes(fed, client).items()}
        model = copy.deepcopy(model).eval()
        model.load_state_dict(state | fed.statistics(state, model))
        torch.testing.assert_close(algorithm.predict(server, x, client), model(fed.data.normalise(x, torch.float64)))
    assert torch.equal(algorithm.predict(second, x, None), algorithm.predict(second, x, 0))


def test_submodels__statistics_of_static_norms_take_one_pass_for_each_plan(monkeypatch):
    fed, passes = mixed("static_batch"), []
    algorithm = ALGORITHMS["fedfa"](fed)
    server = algorithm.init()
    honest = federation_module.collect
    monkeypatch.setattr(federation_module, "collect", lambda *given: passes.append(given) or honest(*given))
    for client in (0, 1, 2, 3, 1, 0):
        algorithm.predict(server, fed.data.test_x, client)
    assert len(passes) == len(fed.fleet.architectures) == 4


@pytest.mark.parametrize("backend", ["loop", "vmap"])
def test_submodels__masked_loss_sets_logits_of_absent_classes_to_zero_and_leaves_their_rows_alone(backend):
    fed = mixed("cnn").with_local(masked=True, optimizer=SGD(0.05, 0.9), backend=backend)
    cohort, rng = [2, 1, 3], Rng(0, 1)
    full = fed.initial()
    starts = [{n: oracles.corner(full[n], shape) for n, shape in shapes(fed, client).items()} for client in cohort]
    states, _ = train_each(fed, starts, cohort, rng)
    for client, start, state in zip(cohort, starts, states):
        own = fed.clients[client].train
        held = [bool((fed.data.y[own] == label).any()) for label in range(5)]
        model = copy.deepcopy(fed.fleet[client].model).train()
        model.load_state_dict(start)
        optimizer = torch.optim.SGD(model.parameters(), 0.05, 0.9)
        for index in make_batches([own], [client], 1, fed.local.batch_size, rng, torch.device("cpu")).index[0]:
            logits = model(fed.data.normalise(fed.data.x[index], torch.float64))
            zeroed = torch.stack([column if has else 0 * column for column, has in zip(logits.T, held)], 1)
            optimizer.zero_grad()
            F.cross_entropy(zeroed, fed.data.y[index]).backward()
            optimizer.step()
        assert_close(state, {name: tensor.detach() for name, tensor in model.state_dict().items()}, rtol=1e-7)
        for name in ("fc2.weight", "fc2.bias"):
            same = [bool((a == b).all()) for a, b in zip(state[name], start[name])]
            assert same == [not has for has in held]
    plain, _ = train_each(fed.with_local(masked=False), starts, cohort, rng)
    assert not torch.equal(plain[0]["fc2.bias"], states[0]["fc2.bias"])

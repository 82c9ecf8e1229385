"""Several architectures in one cohort, other optimizers, precisions and layouts."""

import copy
import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import surgery
import zoo
from fl.batches import make_batches
from fl.engine import SGD, Adam, Precision, graphs
from fl.errors import FLError
from fl.objectives import proximal
from fl.rng import Rng

BACKENDS = ["loop", "workers", "vmap"]
CLIENTS = [3, 1, 0, 2]


def architectures():
    """Two architectures over four clients, the second of them twice in a row."""
    make = zoo.create
    narrow, wide = (
        make("cnn", torch.Generator().manual_seed(1), num_classes=3, in_channels=1, image_size=8, width=w).double()
        for w in (0.125, 0.25)
    )
    return [wide, narrow, narrow, wide]


@pytest.mark.parametrize("chunk", [0, 3])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_mixed_cohort_is_its_clients_one_by_one(make_federation, backend, chunk):
    fed = make_federation("cnn", dtype=torch.float64, backend=backend, chunk=chunk)
    models, rng = architectures(), Rng(0, 3)
    starts = [{n: t + 0.01 * k for n, t in surgery.state(m).items()} for k, m in enumerate(models)]
    context = [{"anchor": start} for start in starts]
    trained = fed.train_mixed(models, starts, CLIENTS, rng, proximal(0.1), context)
    assert trained.sizes == (5, 7, 3, 12)
    for k, (model, client) in enumerate(zip(models, CLIENTS)):
        single = dataclasses.replace(fed, model=model, backend="loop")
        anchor = {"anchor": surgery.stack([starts[k]])}
        alone = single.train(surgery.stack([starts[k]]), [client], rng, proximal(0.1), anchor)
        torch.testing.assert_close(trained.loss[k], alone.loss[0], rtol=1e-9, atol=1e-9)
        for name, tensor in alone.states.items():
            torch.testing.assert_close(trained.states[k][name], tensor[0], rtol=1e-9, atol=1e-9)
    without = fed.train_mixed(models, starts, CLIENTS, rng)
    assert not torch.allclose(without.loss, trained.loss)


def test_one_of_each_and_failures_across_architectures(make_federation, caplog):
    fed = make_federation("cnn", dtype=torch.float64)
    models = architectures()
    starts = [dict(surgery.state(m)) for m in models]
    with pytest.raises(FLError, match="4 models, 3 starting states and 4 contexts for 4 clients"):
        fed.train_mixed(models, starts[:3], CLIENTS, Rng(0, 1))
    hot = dataclasses.replace(fed, optimizer=SGD(1e200))
    with pytest.raises(FLError, match="every client"):
        hot.train_mixed(models, starts, CLIENTS, Rng(0, 1))
    name = next(iter(starts[1]))
    starts[1] = {**starts[1], name: torch.full_like(starts[1][name], 1e200)}
    trained = fed.train_mixed(models, starts, CLIENTS, Rng(0, 1))
    assert trained.sizes == (5, 0, 3, 12)
    assert all(torch.equal(trained.states[1][n], t) for n, t in starts[1].items())
    assert "client 1 dropped" in caplog.text


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("adam", [Adam(0.01), Adam(0.003, 0.8, 0.9, 1e-6, weight_decay=0.1, clip=0.5)])
def test_adam_equals_torch_optim(make_federation, backend, adam):
    fed = make_federation("cnn", norm="group", dtype=torch.float64, optimizer=adam, backend=backend)
    rng, clients = Rng(2, 1), [2, 0, 3]
    trained = fed.train(surgery.broadcast(fed.initial(), 3), clients, rng)
    for k, client in enumerate(clients):
        batches = make_batches([fed.clients[client].train], [client], fed.epochs, fed.batch_size, rng, "cpu")
        model = copy.deepcopy(fed.model).train()
        optimizer = torch.optim.Adam(
            model.parameters(), adam.lr, (adam.beta1, adam.beta2), adam.eps, adam.weight_decay, foreach=False
        )
        for index in batches.index[0]:
            optimizer.zero_grad()
            F.cross_entropy(model(fed.data.normalise(fed.data.x[index], torch.float64)), fed.data.y[index]).backward()
            if adam.clip:
                nn.utils.clip_grad_norm_(model.parameters(), adam.clip)
            optimizer.step()
        for name, tensor in surgery.state(model).items():
            torch.testing.assert_close(trained.states[name][k], tensor, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("backend", ["loop", "workers"])
def test_channels_last_is_a_layout_only(make_federation, backend):
    fed = make_federation("resnet20", dtype=torch.float64, backend=backend)
    last = dataclasses.replace(fed, precision=Precision(channels_last=True))
    starts, clients, rng = surgery.broadcast(fed.initial(), 3), [0, 1, 2], Rng(0, 1)
    plain, laid = (f.train(starts, clients, rng) for f in (fed, last))
    for name, tensor in plain.states.items():
        torch.testing.assert_close(laid.states[name], tensor, rtol=1e-9, atol=1e-9)
        assert laid.states[name].stride() == tensor.stride()
    with pytest.raises(FLError, match=r"channels_last.*--backend loop"):
        dataclasses.replace(last, backend="vmap").train(starts, clients, rng)


@pytest.mark.parametrize("backend", BACKENDS)
def test_bf16_computes_in_bfloat16_and_keeps_weights(make_federation, backend):
    fed = make_federation("cnn", backend=backend, optimizer=SGD(0.05))
    half = dataclasses.replace(fed, precision=Precision("bf16"))
    starts, clients, rng = surgery.broadcast(fed.initial(), 3), [0, 1, 2], Rng(0, 1)
    exact, rough = (f.train(starts, clients, rng) for f in (fed, half))
    for name, tensor in exact.states.items():
        assert rough.states[name].dtype == torch.float32
        difference = (rough.states[name] - tensor).norm() / (tensor - starts[name]).norm()
        assert 0 < difference < 0.1, name
    with pytest.raises(FLError, match="tf32 needs a CUDA device"):
        dataclasses.replace(fed, precision=Precision("tf32")).train(starts, clients, rng)
    with pytest.raises(FLError, match="there are float32, tf32, bf16"):
        dataclasses.replace(fed, precision=Precision("fp8")).train(starts, clients, rng)


@pytest.mark.parametrize("places", [1, 2, 8])
def test_the_order_of_graphs_without_cuda(make_federation, places):
    """Everything of `graphs` but the capture: fixed inputs, turns, ragged clients, several architectures."""
    from contextlib import nullcontext

    fed = make_federation("cnn", dtype=torch.float64, optimizer=Adam(0.01))
    models, rng = architectures(), Rng(0, 3)
    starts = [{n: t + 0.01 * k for n, t in surgery.state(m).items()} for k, m in enumerate(models)]
    groups = []
    for model, members in ((models[0], [0, 3]), (models[1], [1, 2])):
        mine = surgery.stack([starts[k] for k in members])
        clients = [CLIENTS[k] for k in members]
        groups.append(fed._group(model, clients, mine, {"anchor": mine}, rng, proximal(0.1)))

    def capture(step):
        step()  # a warm-up changes weights and memory, which must not show
        return step

    results = graphs._side_by_side(groups, [nullcontext()] * places, capture)
    context = [{"anchor": start} for start in starts]
    expected = fed.train_mixed(models, starts, CLIENTS, rng, proximal(0.1), context)
    for result, members in zip(results, ([0, 3], [1, 2])):
        for place, k in enumerate(members):
            torch.testing.assert_close(result.loss[place], expected.loss[k], rtol=1e-12, atol=1e-12)
            for name, tensor in expected.states[k].items():
                torch.testing.assert_close(result.states[name][place], tensor, rtol=1e-12, atol=1e-12)


def test_workers_stop_at_the_first_error_and_leave_threads_as_they_were(make_federation):
    class Fragile(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(64, 3)

        def forward(self, x):
            raise RuntimeError("broken")

    before = torch.get_num_threads()
    fed = make_federation(Fragile(), backend="workers")
    with pytest.raises(RuntimeError, match="broken"):
        fed.train(surgery.broadcast(fed.initial(), 3), [0, 1, 2], Rng(0, 1))
    assert torch.get_num_threads() == before

"""Several architectures in one cohort, other optimizers, precisions and layouts."""

import copy
import dataclasses
import gc
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import surgery
import zoo
from fl import engine
from fl.algorithms.fedasam import adaptive_ascent
from fl.base.errors import FLError
from fl.base.rng import Rng
from fl.engine import SGD, Adam, Precision, graphs
from fl.engine.batches import make_batches
from fl.engine.eager import Replica, loop, workers
from fl.engine.job import Results
from fl.engine.objectives import cross_entropy, masked, proximal, with_logits
from fl.federation.local_training import LocalObjective

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
    fed = make_federation("cnn", dtype=torch.float64, backend=backend, max_parallel_clients=chunk)
    models, rng = architectures(), Rng(0, 3)
    starts = [{n: t + 0.01 * k for n, t in surgery.state(m).items()} for k, m in enumerate(models)]
    context = [{"anchor": start} for start in starts]
    trained = fed.train(starts, CLIENTS, rng, proximal(0.1), context, models=models)
    assert trained.sizes == (5, 7, 3, 12)
    for k, (model, client) in enumerate(zip(models, CLIENTS)):
        single = dataclasses.replace(fed.with_local(backend="loop"), model=model)
        anchor = {"anchor": surgery.stack([starts[k]])}
        alone = single.train(surgery.stack([starts[k]]), [client], rng, proximal(0.1), anchor)
        torch.testing.assert_close(trained.loss[k], alone.loss[0], rtol=1e-9, atol=1e-9)
        for name, tensor in alone.states.items():
            torch.testing.assert_close(trained.states[k][name], tensor[0], rtol=1e-9, atol=1e-9)
    without = fed.train(starts, CLIENTS, rng, models=models)
    assert not torch.allclose(without.loss, trained.loss)


def test_one_of_each_and_failures_across_architectures(make_federation, caplog):
    fed = make_federation("cnn", dtype=torch.float64)
    models = architectures()
    starts = [dict(surgery.state(m)) for m in models]
    with pytest.raises(FLError, match="3 starting states for 4 clients"):
        fed.train(starts[:3], CLIENTS, Rng(0, 1), models=models)
    hot = fed.with_local(optimizer=SGD(1e200))
    with pytest.raises(FLError, match="every client"):
        hot.train(starts, CLIENTS, Rng(0, 1), models=models)
    name = next(iter(starts[1]))
    starts[1] = {**starts[1], name: torch.full_like(starts[1][name], 1e200)}
    trained = fed.train(starts, CLIENTS, Rng(0, 1), models=models)
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
        batches = make_batches(
            [fed.clients[client].train], [client], fed.local.epochs, fed.local.batch_size, rng, "cpu"
        )
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
    last = fed.with_local(precision=Precision(channels_last=True))
    starts, clients, rng = surgery.broadcast(fed.initial(), 3), [0, 1, 2], Rng(0, 1)
    plain, laid = (f.train(starts, clients, rng) for f in (fed, last))
    for name, tensor in plain.states.items():
        torch.testing.assert_close(laid.states[name], tensor, rtol=1e-9, atol=1e-9)
        assert laid.states[name].stride() == tensor.stride()
    state, seen = fed.initial(), []
    convolution = next(m for m in fed.model.modules() if isinstance(m, nn.Conv2d))
    handle = convolution.register_forward_hook(lambda *given: seen.append(given[2].stride()[1]))
    logits = [f.predict(state, fed.data.test_x[:9]) for f in (fed, last)]
    handle.remove()
    assert seen == [64, 1]  # of 8x8 images: in prediction as well
    torch.testing.assert_close(*logits)
    with pytest.raises(FLError, match=r"--channels-last.*--backend loop"):
        last.with_local(backend="vmap")


@pytest.mark.parametrize("backend", BACKENDS)
def test_bf16_computes_in_bfloat16_and_keeps_weights(make_federation, backend):
    fed = make_federation("cnn", backend=backend, optimizer=SGD(0.01, 0.0))
    half = fed.with_local(precision=Precision("bf16"))
    starts, clients, rng = surgery.broadcast(fed.initial(), 3), [0, 1, 2], Rng(0, 1)
    exact, rough = (f.train(starts, clients, rng) for f in (fed, half))
    for name, tensor in exact.states.items():
        assert rough.states[name].dtype == torch.float32
        difference = (rough.states[name] - tensor).norm() / (tensor - starts[name]).norm()
        assert 0 < difference < 0.2, name
    with pytest.raises(FLError, match="tf32 needs a CUDA device"):
        fed.with_local(precision=Precision("tf32"))
    with pytest.raises(FLError, match="there are float32, tf32, bf16"):
        fed.with_local(precision=Precision("fp8"))


@pytest.mark.parametrize("places", [1, 2, 8])
@pytest.mark.parametrize(("optimizer", "ascent"), [(Adam(2**-6), None), (SGD(2**-5, 0.9), adaptive_ascent(0.1))])
def test_the_order_of_graphs_without_cuda(make_federation, places, optimizer, ascent):
    """Everything of `graphs` but the capture: fixed inputs, turns, ragged clients, several architectures and rounds."""
    fed = make_federation("cnn", dtype=torch.float64, optimizer=optimizer, schedule=lambda number: 2.0**-number)
    models, members, captures = architectures(), ([0, 3], [1, 2]), []
    objective = proximal(0.125)

    def capture(step, warm_up):
        captures.append(step)
        step()  # a warm-up changes weights and memory, which must not show
        return step

    for number in (1, 2):
        rng = Rng(0, number)
        starts = [{n: t + 0.01 * k * number for n, t in surgery.state(m).items()} for k, m in enumerate(models)]
        groups = []
        for some in members:
            mine = surgery.stack([starts[k] for k in some])
            clients = [CLIENTS[k] for k in some]
            each = LocalObjective(objective, {"anchor": mine}, ascent)
            groups.append(fed.group(models[some[0]], mine, clients, each, rng))
        results = graphs._side_by_side(groups, [nullcontext()] * places, capture)
        expected = fed.train(
            starts, CLIENTS, rng, objective, [{"anchor": start} for start in starts], ascent, models=models
        )
        for result, some in zip(results, members):
            for place, k in enumerate(some):
                torch.testing.assert_close(result.loss[place], expected.loss[k], rtol=1e-12, atol=1e-12)
                for name, tensor in expected.states[k].items():
                    torch.testing.assert_close(result.states[name][place], tensor, rtol=1e-12, atol=1e-12)
        if number == 1:
            first = len(captures)
    assert len(captures) <= 2 * first  # places take clients as they come free, and keep what they have captured
    other = [(dataclasses.replace(job, objective=proximal(0.5)), *rest) for job, *rest in groups]
    graphs._side_by_side(other, [nullcontext()] * places, capture)
    assert len(captures) > first


def test_captures_are_kept_while_the_job_is_the_same_and_go_with_the_model(make_federation):
    fed = make_federation("cnn", optimizer=SGD(0.1))
    starts, captures = surgery.broadcast(fed.initial(), 3), []

    def rounds(fed, numbers, objective=cross_entropy):
        for number in numbers:
            group = fed.group(fed.model, starts, [0, 1, 2], LocalObjective(objective), Rng(0, number))
            graphs._side_by_side([group], [nullcontext()], lambda step, _: captures.append(step) or step)

    rounds(fed, range(1, 4))
    assert len(captures) == 1
    rounds(fed.with_local(optimizer=SGD(0.2)), [4])  # a rate is no part of what is captured
    assert len(captures) == 1
    rounds(fed.with_local(optimizer=SGD(0.2, 0.5)), [5])
    assert len(captures) == 2
    captures.clear()
    spoilt = dataclasses.replace(fed, data=dataclasses.replace(fed.data, y=fed.data.y.flip(0)))
    for number in (6, 7, 8):  # of an attack: two sets of data take turns
        rounds(fed, [number])
        rounds(spoilt, [number])
    assert len(captures) == 1  # what was captured of the honest data in round 1 is there still
    for number in (9, 10):  # what masks the loss is the same in every round
        clients = range(3)
        aim = LocalObjective(masked(), {"held": fed.reported_classes(clients)})
        group = fed.group(fed.model, starts, clients, aim, Rng(0, number))
        graphs._side_by_side([group], [nullcontext()], lambda step, _: captures.append(step) or step)
    assert len(captures) == 2
    before = len(graphs._KEPT)
    captures.clear()
    del fed, spoilt, group
    gc.collect()
    assert len(graphs._KEPT) == before - 1


class Shifted(nn.Module):
    """A model whose settings its printed form does not show."""

    def __init__(self):
        super().__init__()
        self.fc, self.shift, self.by_name, self.table = nn.Linear(64, 3), 0.0, {"factors": [1.0]}, torch.ones(3)
        self.options = SimpleNamespace(sign=1.0)

    def forward(self, x):
        factor = self.by_name["factors"][0] * self.options.sign
        return self.fc(x.flatten(1)) * factor * self.table + self.shift


CHANGES = {
    "a number": lambda net: setattr(net, "shift", 0.5),
    "a list in a dict": lambda net: net.by_name["factors"].append(2.0),
    "a tensor": lambda net: setattr(net, "table", torch.ones(3)),
    "a tensor in place": lambda net: net.table.mul_(-1),
    "an object's attribute": lambda net: setattr(net.options, "sign", -1.0),
    "a hook": lambda net: net.fc.register_forward_hook(lambda module, given, out: -out),
    "a module": lambda net: setattr(net, "fc", nn.Linear(64, 3)),
    "a frozen parameter": lambda net: net.fc.bias.requires_grad_(False),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_was_changed_is_captured_anew(make_federation, change):
    fed, captures = make_federation(Shifted(), optimizer=SGD(0.1)), []

    def round(number):
        starts = surgery.broadcast(fed.initial(), 2)
        group = fed.group(fed.model, starts, [0, 1], LocalObjective(cross_entropy), Rng(0, number))
        graphs._side_by_side([group], [nullcontext()], lambda step, _: captures.append(step) or step)

    for number, mode in enumerate((True, True, False)):  # it trains in training mode whatever it was in
        fed.model.train(mode)
        round(number)
    assert len(captures) == 1
    CHANGES[change](fed.model)
    round(4)
    assert len(captures) == 2


def test_a_capture_reads_what_stands_beside_the_samples_in_its_round(make_federation):
    """The first table is gone when the second comes, and its place in memory may be taken."""
    fed, objective = make_federation("cnn", dtype=torch.float64, optimizer=SGD(2**-5)), with_logits(cross_entropy)
    captures = []
    starts = surgery.broadcast(fed.initial(), 3)
    for number, scale in enumerate((1.0, 1.0, -1.0), 1):
        generator = torch.Generator().manual_seed(0)
        if number != 2:
            table = scale * torch.rand(len(fed.data.y), 3, generator=generator, dtype=torch.float64)
        group = fed.group(
            fed.model,
            starts,
            [0, 1, 2],
            LocalObjective(objective, {}, per_sample=table),
            Rng(0, number),
        )
        (result,) = graphs._side_by_side([group], [nullcontext()], lambda step, _: captures.append(step) or step)
        (expected,) = loop([group])
        for name, tensor in expected.states.items():
            torch.testing.assert_close(result.states[name], tensor, rtol=1e-12, atol=1e-12)
        assert len(captures) == {1: 1, 2: 1, 3: 2}[number]


def test_workers_stop_at_the_first_error_and_leave_threads_as_they_were(make_federation, monkeypatch):
    monkeypatch.setitem(engine.BACKENDS, "workers", workers)  # without what the fixture of all tests does with threads
    torch.set_num_threads(2)
    calls = []

    class Fragile(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(64, 3)

        def forward(self, x):
            calls.append(1)
            if len(calls) == 3:
                raise RuntimeError("broken")
            return self.fc(x.flatten(1))

    fed = make_federation(Fragile(), sizes=(40,) * 12, participants=12, epochs=50, backend="workers")
    with pytest.raises(RuntimeError, match="broken"):
        fed.train(surgery.broadcast(fed.initial(), 12), list(range(12)), Rng(0, 1))
    assert len(calls) < 100  # of 6,000
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize("optimizer", [SGD(0.01, 0.9, 0.01, nesterov=True), Adam(0.01)])
def test_what_an_optimizer_remembers_is_what_torch_remembers(make_federation, optimizer):
    """After each of two clients, the second of which must not see what the first has left."""
    fed = make_federation("cnn", dtype=torch.float64, optimizer=optimizer)
    group = fed.group(fed.model, surgery.broadcast(fed.initial(), 2), [2, 0], LocalObjective(), Rng(0, 1))
    replica, results = Replica(group), Results.empty(group)
    for k in range(2):
        for step in replica.steps(k):
            replica.step(*step)
        replica.save(k, results)
        model = copy.deepcopy(fed.model).train()
        if isinstance(optimizer, SGD):
            peer = torch.optim.SGD(model.parameters(), 0.01, 0.9, weight_decay=0.01, nesterov=True)
        else:
            peer = torch.optim.Adam(model.parameters(), 0.01)
        for index in group[0].batches.index[k, : group[0].batches.steps[k]]:
            peer.zero_grad()
            F.cross_entropy(model(fed.data.normalise(fed.data.x[index], torch.float64)), fed.data.y[index]).backward()
            peer.step()
        names = {"momentum": "momentum_buffer", "first": "exp_avg", "second": "exp_avg_sq", "steps": "step"}
        for name, kept in replica.memory.items():
            for mine, p in zip(kept, model.parameters()):
                torch.testing.assert_close(mine, peer.state[p][names[name]], rtol=1e-7, atol=1e-12)

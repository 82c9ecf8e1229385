"""The same code on a CUDA device: in the default suite on one that is pretended, with `pytest -m gpu` on a real one."""

import copy
import dataclasses
import math
import subprocess
import sys
from dataclasses import replace
from functools import partial
from itertools import cycle, product

import pytest
import torch
from fl_flags import TINY
from fleets import SPECS, fleet_federation
from ranks import NEED_ADAPTERS, NEED_EXITS
from rounds import SMALL, made, on_gpu, play
from selection import some
from torch import nn

import surgery
import zoo
from fl import run as cli
from fl.algorithms import ALGORITHMS
from fl.base.rng import Rng
from fl.data import Dataset
from fl.engine import SGD, Adam, Precision, train
from fl.engine.augment import Augment
from fl.engine.objectives import cross_entropy
from fl.extensions.trimmed import trimmed_mean
from fl.federation import Federation, LocalTraining
from fl.federation.local_training import LocalObjective
from fl.partition import Split
from fl.runs.assembly import build
from fl.runs.evaluate import score_clients
from fl.runs.metrics import read
from fl.settings.command_line import parse

BACKENDS = ["loop", "vmap", "graphs"]
ON_HOST = {("progress", "accuracy")}  # FeMAM's, by which it is judged whether a level has converged


def on_a_real_one(test):
    """Of what only a real device can show."""
    return pytest.mark.gpu(pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")(test))


def assert_close(found, expected, rtol=1e-6, atol=1e-8):
    """Of states, on whichever device."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name].cpu(), tensor.cpu(), rtol=rtol, atol=atol)


QUICK = [
    *product(["cnn"], ["graphs"], ["fedmr", "femam", "fedfa"]),
    ("cnn", "loop", "fedavg"),
    ("cnn", "vmap", "fedavg"),
]
PRETENDED = [("cnn", backend, name) for name, backend in zip(ALGORITHMS, cycle(BACKENDS))]  # in place of every pair


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "backend", "name"),
    [
        *some(dict.fromkeys([*QUICK, *PRETENDED]), QUICK),
        *(pytest.param("resnet20", *pair, marks=pytest.mark.gpu) for pair in product(BACKENDS, ALGORITHMS)),
    ],
)
def test_gpu__rounds_on_the_gpu_are_rounds_on_the_cpu(cuda, make_federation, name, model, backend):
    """Two of them, so that graphs are replayed with other starts and what the server keeps has come to matter."""
    if cuda and model == "resnet20":
        pytest.skip("for a real GPU: the small network shows as much")
    # A rate that float32 holds exactly: of CUDA's fused optimizers it is the only form that a graph can read.
    given = {"dtype": torch.float64, "norm": "batch", "optimizer": SGD(2**-6, 0.9)}
    given |= {"adapters": NEED_ADAPTERS.get(name), "base_changes": ALGORITHMS[name].base_changes}
    exits = name in NEED_EXITS
    fed, config = make_federation("resnet20" if exits else model, exits=exits or None, **given), SMALL
    algorithm, there = made(name, fed, config), made(name, on_gpu(fed, backend=backend), config)
    expected, server = algorithm.init(), there.init()
    for number, clients in ((1, [2, 0, 3]), (2, [1, 3, 0])):
        expected, _ = algorithm.round(expected, clients, Rng(0, number))
        server, trained = there.round(server, clients, Rng(0, number))
    elsewhere = {
        (part, key) for part in server for key, t in server[part].items() if t.is_floating_point() and not t.is_cuda
    }
    assert elsewhere <= ON_HOST
    assert trained.loss.is_cuda
    for part in server:
        assert_close(server[part], expected[part], *((1e-7, 1e-9) if cuda else (1e-5, 1e-7)))
    x = fed.data.test_x[:5]
    for client in (None, 1):
        logits = algorithm.predict(expected, x, client)
        torch.testing.assert_close(there.predict(server, x.to("cuda"), client).cpu(), logits, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", some(BACKENDS, ["vmap", "graphs"]))
@pytest.mark.parametrize(
    "optimizer", [pytest.param(SGD(0.05, 0.9, 1e-2, nesterov=True, clip=1.0), marks=pytest.mark.slow), Adam(0.01)]
)
def test_gpu__dropout_augmentation_and_optimizers_are_those_of_the_cpu(cuda, make_federation, backend, optimizer):
    """Several rounds, so that what a graph keeps would show."""
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.Dropout2d(0.3), nn.ReLU(), nn.Dropout(0.4), nn.Flatten(), nn.LazyLinear(3)
    )
    net(torch.zeros(1, 1, 8, 8))
    fed = make_federation(net.double(), optimizer=optimizer, augment=Augment(2, True), schedule=lambda r: 1 / r)
    there = on_gpu(fed, backend=backend)
    for number in (1, 2):
        expected = fed.train(surgery.broadcast(fed.initial(), 3), [2, 0, 3], Rng(0, number))
        trained = there.train(surgery.broadcast(there.initial(), 3), [2, 0, 3], Rng(0, number))
        assert_close(trained.states, expected.states)


@pytest.mark.slow
@pytest.mark.parametrize("backend", some(BACKENDS, ["vmap", "graphs"]))
@pytest.mark.parametrize("dtype", some([torch.float32, torch.float64], [torch.float32]))
def test_gpu__a_transformer_trains_on_every_backend(cuda, backend, dtype):
    """Attention has fused kernels in float32, which need what vmap does not tell them."""
    fed = fleet_federation(SPECS["transformer"], [(1.0, 3)] * 4, dtype=dtype)
    there = on_gpu(dataclasses.replace(fed, fleet=None), backend=backend)
    expected = fed.train(surgery.broadcast(fed.initial(), 3), [2, 0, 1], Rng(0, 1))
    trained = there.train(surgery.broadcast(there.initial(), 3), [2, 0, 1], Rng(0, 1))
    tolerance = {"rtol": 1e-2, "atol": 1e-4} if dtype is torch.float32 else {"rtol": 1e-6, "atol": 1e-8}
    assert_close(trained.states, expected.states, **tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("backend", some(["loop", "graphs"], ["graphs"]))
def test_gpu__several_architectures_on_the_gpu(cuda, make_federation, backend):
    fed = make_federation("cnn", dtype=torch.float64)
    generator = torch.Generator().manual_seed(1)
    images = {"num_classes": 3, "in_channels": 1, "image_size": 8}
    kinds = [zoo.create("cnn", generator, width=width, **images).double() for width in (0.25, 0.125, 0.2)]
    kinds.append(zoo.create("resnet20", generator, width=0.25, **images).double())
    order, clients = [0, 1, 2, 3, 1, 0], [3, 1, 0, 2, 1, 2]
    models = [kinds[k] for k in order]
    expected = fed.train([surgery.state(m) for m in models], clients, Rng(0, 1), models=models)
    copies = [copy.deepcopy(model).to("cuda") for model in kinds]
    models = [copies[k] for k in order]
    trained = on_gpu(fed, backend=backend).train([surgery.state(m) for m in models], clients, Rng(0, 1), models=models)
    for state, other in zip(expected.states, trained.states):
        assert_close(other, state)


@pytest.mark.slow
def test_gpu__waves_of_graphs_are_the_loop_and_repeat_themselves(cuda, make_federation):
    """More clients than streams, ragged, several times: a race would show in one of them."""
    sizes = [4 + 3 * (k % 5) for k in range(18)]
    fed = make_federation("cnn", sizes=sizes, participants=len(sizes), epochs=1, optimizer=SGD(2**-6, 0.9))
    assert_waves_repeat(on_gpu(fed, backend="graphs"), times=2)


@on_a_real_one
@pytest.mark.parametrize("model", ["resnet20", "transformer"])
def test_gpu__waves_at_real_size(model):
    """40 clients, 5 times, each of up to 30 steps of 50 images of 32x32, or of 20 sequences; in float64."""
    generator = torch.Generator().manual_seed(0)
    if model == "transformer":
        fed = fleet_federation(replace(SPECS[model], width=0.25), [(1.0, 3)] * 40, [100 + 10 * k for k in range(40)])
        fed = dataclasses.replace(fed.with_local(batch_size=20), fleet=None)
    else:
        net = zoo.create(model, generator).double()
        x = torch.randint(256, (20_000, 3, 32, 32), generator=generator).byte()
        y = torch.randint(10, (20_000,), generator=generator)
        none = torch.empty(0, dtype=torch.int64)
        clients = [Split(torch.arange(450 * k, 450 * k + 50 * (1 + k % 9)), none, none) for k in range(40)]
        data = Dataset("random", x, y, x[:10], y[:10], 10)
        fed = Federation(net, data, clients, 40, LocalTraining(3, 50, SGD(2**-6, 0.9), augment=Augment(4, True)))
    assert_waves_repeat(on_gpu(fed, backend="graphs"), times=5)


def assert_waves_repeat(fed, times):
    clients = list(range(len(fed.clients)))
    starts = surgery.broadcast(fed.initial(), len(clients))
    first, *others = (fed.train(starts, clients, Rng(0, 1)) for _ in range(times))
    for other in others:
        assert torch.equal(other.loss, first.loss)
        assert all(torch.equal(other.states[name], tensor) for name, tensor in first.states.items())
    loop = fed.with_local(backend="loop").train(starts, clients, Rng(0, 1))
    assert_close(first.states, loop.states, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("backend", some(BACKENDS, ["graphs"]))
@pytest.mark.parametrize("precision", [Precision("tf32"), Precision("bf16"), Precision("bf16", channels_last=True)])
def test_gpu__precisions_are_close_to_float32(cuda, make_federation, backend, precision):
    if precision.channels_last and backend == "vmap":
        pytest.skip("vmap has no channels_last")
    fed = on_gpu(make_federation("cnn", optimizer=SGD(0.01, 0.0)), backend=backend)
    starts = surgery.broadcast(fed.initial(), 3)
    cudnn = torch.backends.cudnn
    before = torch.backends.cuda.matmul.fp32_precision, cudnn.conv.fp32_precision, cudnn.deterministic
    exact, rough = (f.train(starts, [0, 1, 2], Rng(0, 1)) for f in (fed, fed.with_local(precision=precision)))
    assert before == (torch.backends.cuda.matmul.fp32_precision, cudnn.conv.fp32_precision, cudnn.deterministic)
    for name, tensor in exact.states.items():
        assert rough.states[name].dtype == torch.float32
        assert (rough.states[name] - tensor).norm() < 0.2 * (tensor - starts[name]).norm()


def test_gpu__a_round_forces_its_arithmetic(cuda, make_federation):
    """Products in TF32 only where they are asked for, and cuDNN's algorithms in one order unless they need not be."""
    seen = []

    def objective(call, params, context, batch):
        cudnn = torch.backends.cudnn
        seen.append((torch.backends.cuda.matmul.fp32_precision, cudnn.conv.fp32_precision, cudnn.deterministic))
        return cross_entropy(call, params, context, batch)

    fed = on_gpu(make_federation("cnn"), backend="loop")
    for precision, expected in (
        (Precision(), ("ieee", "ieee", True)),
        (Precision("tf32", deterministic=False), ("tf32", "tf32", False)),
    ):
        one = fed.with_local(precision=precision)
        one.train(surgery.broadcast(fed.initial(), 1), [0], Rng(0, 1), objective)
        assert set(seen) == {expected}
        seen.clear()


@on_a_real_one
@pytest.mark.parametrize("backend", ["loop", "vmap"])
def test_gpu__no_step_waits_for_the_device(make_federation, backend):
    """Torch raises at what synchronises; the batches are on the device before the first step."""
    fed = on_gpu(make_federation("resnet20"), backend=backend)
    starts = surgery.broadcast(fed.initial(), 3)
    group = fed.group(fed.model, starts, [0, 1, 2], LocalObjective(), Rng(0, 1))
    (expected,) = train([group], backend)  # libraries set themselves up
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchroniz"):  # it does see what waits
            expected.loss.sum().item()
        (trained,) = train([group], backend)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert set(trained.states) == set(starts)
    torch.testing.assert_close(trained.loss, expected.loss, rtol=1e-3, atol=1e-3)


@on_a_real_one
@pytest.mark.parametrize("name", ["float32", "tf32", "bf16"])
def test_gpu__batch_norm_in_channels_last_does_not_starve_on_many_streams(tmp_path, name):
    """cuDNN's persistent kernels may wait for each other for ever: in a process that can be ended."""
    flags = ["--model", "resnet20", "--participants", "16", "--backend", "graphs", "--rounds", "3", "--channels-last"]
    flags += ["--precision", name, "--device", "cuda", "--out", str(tmp_path), "--name", "a"]
    subprocess.run([sys.executable, "-m", "fl.run", *flags], check=True, timeout=120)
    rows = read(tmp_path / "a" / "metrics.csv")
    assert [row["round"] for row in rows] == [1, 2, 3]
    assert all(math.isfinite(row["train_loss"]) for row in rows)


def surgical(device):
    """What operations of surgery make of tensors on a device."""
    generator = torch.Generator().manual_seed(0)
    host = {"w": torch.randn(4, 6, 5, generator=generator), "steps": torch.arange(4)}
    full, small = (zoo.create("cnn", generator, in_channels=1, image_size=8, width=w) for w in (0.25, 0.125))
    plans = [surgery.narrow(full, like=model)[1] for model in (small, full)]
    models = {name: tensor.to(device) for name, tensor in host.items()}
    floats, mask, keep = {"w": models["w"]}, {"w": models["w"] > 0}, {name: t[0] for name, t in models.items()}
    state = {name: tensor.to(device) for name, tensor in surgery.state(full).items()}
    states = [plans[0].extract(state), state]
    swaps = surgery.permutations(2, 4, generator=torch.Generator().manual_seed(1))
    factors = surgery.scale.norm_factors(states, plans)
    return [
        surgery.shuffle(models, segments=[("w",), ("steps",)], permutations=swaps),
        surgery.average(models, weights=[1, 2, 3, 0]),
        surgery.average(models, weights=[[1, 2, 0, 0], [0, 0, 0, 1]], mask=mask, fallback=keep),
        trimmed_mean(models, trim=0.3),
        trimmed_mean(models, trim=0.3, weights=[1, 1, 1, 0], mask=mask, fallback=keep),
        {"cosine": surgery.cosine(floats), "distance": surgery.distance(floats, floats)},
        {"norm": surgery.scale.percentile_norm(models["w"], stacked=True)},
        *surgery.match_norms(models, mask=mask),
        *plans[0].embed(states[0], into=state),
        surgery.average(states, plans, [1, 2], state),
        trimmed_mean(states, plans, fallback=state, trim=0.2, factors=factors),
    ]


def test_gpu__surgery_stays_on_the_device(cuda):
    for here, there in zip(surgical("cpu"), surgical("cuda"), strict=True):
        assert all(tensor.is_cuda for tensor in there.values())
        assert_close(there, here, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("method", some(["fedmr", "femam", "fedfa"], ["fedmr"]))
def test_gpu__the_command_line_on_the_gpu(cuda, tmp_path, method):
    flags = [*TINY, "--algorithm", method, "--device", "cuda", "--out", str(tmp_path), "--name", "a"]
    flags += ["--local-test", "0.1", "--samples", "400"]
    flags += {"femam": ["--femam.levels", "global,2,personal", "--femam.level-rounds", "2,1"]}.get(method, [])
    flags += {"fedfa": ["--architectures.widths", "0.5,1", "--architectures.choose", "cycle"]}.get(method, [])
    assert cli.main(flags) == 0
    assert cli.main(["--resume", str(tmp_path / "a"), "--rounds", "6"]) == 0
    rows = read(tmp_path / "a" / "metrics.csv")
    assert len(rows) == 6
    assert rows[-1]["accuracy"] > 0


SETTINGS = {
    "attack and clipped updates": ["--attack.share", "0.5", "--attack.amplify", "3", "--defence.clip", "1"],
    "attack and median": ["--attack.share", "0.5", "--defence.rule", "median"],
    "trimmed mean": ["--defence.rule", "trimmed", "--participants", "4"],
    "krum": ["--defence.rule", "krum", "--defence.malicious", "0", "--participants", "4"],
    "bulyan": ["--defence.rule", "bulyan", "--defence.malicious", "0", "--participants", "4"],
    "top-k": ["--compression.kind", "topk", "--compression.share", "0.1"],
    "quantised": ["--compression.kind", "quantise"],
    "masked loss": ["--masked-loss"],
    "in parts": ["--max-parallel-clients", "1"],
    "static batch norm": ["--model", "resnet9", "--width", "0.5", "--norm", "static_batch"],
    "crops and flips": ["--crop", "1", "--flip"],
    "comings and goings": ["--presence.joining", "0.25", "--presence.leaving", "0.25"],
    "adam": ["--optimizer", "adam", "--lr", "0.001"],
    "secure": ["--fedmr.secure", "1"],
}


@pytest.mark.slow
@pytest.mark.parametrize("method", some(["fedmr", "heterofl"], ["fedmr"]))
@pytest.mark.parametrize("case", some(SETTINGS, ["attack and median", "static batch norm", "secure"]))
def test_gpu__settings_on_the_gpu(cuda, case, method):
    """The global model after two rounds, and what evaluation says of it, are those of the CPU."""
    if case == "secure":
        pytest.importorskip("nacl")
        if method != "fedmr":
            pytest.skip("recombination is FedMR's")
    if case in ("krum", "bulyan") and method == "heterofl":
        pytest.skip("parts of models are not compared")
    flags = [*TINY, "--samples", "300", "--algorithm", method, "--lr", "0.015625", *SETTINGS[case]]
    config = parse([*flags, "--backend", "loop", "--device", "cpu"]).one_run()
    results = []
    for device, backend in (("cpu", "loop"), ("cuda", "graphs")):
        fed, algorithm = build(config.replace(device=device, backend=backend))
        for model in (fed.model, *(kind.model for kind in fed.fleet_or_uniform.architectures)):
            model.double()
        algorithm = made(method, fed, {config.method.name: config.method.options})
        results.append((fed, algorithm, play(algorithm, fed, rounds=2)[-1][0]))
    (_, _, expected), (fed, algorithm, server) = results
    assert_close(server["global"], expected["global"])
    each = [score_clients(f, partial(a.client_models, s)) for f, a, s in results]
    for part in each[0]:
        assert each[1][part] == [pytest.approx(row, rel=1e-5) for row in each[0][part]]

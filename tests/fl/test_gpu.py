"""The same code on a CUDA device: `pytest -m gpu`."""

import copy
import dataclasses

import pytest
import torch
from fl_flags import TINY
from rounds import SMALL
from torch import nn

import surgery
import zoo
from fl import run as cli
from fl.algorithms import ALGORITHMS
from fl.augment import Augment
from fl.engine import SGD, Adam, Precision, train
from fl.metrics import read
from fl.objectives import cross_entropy
from fl.rng import Rng
from fl.training import Aim, make_group

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def on_gpu(fed, **changes):
    return dataclasses.replace(fed, model=copy.deepcopy(fed.model).to("cuda"), data=fed.data.to("cuda"), **changes)


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("model", ["cnn", "resnet20"])
@pytest.mark.parametrize("backend", ["loop", "vmap", "graphs"])
def test_rounds_on_the_gpu_are_rounds_on_the_cpu(make_federation, name, model, backend):
    """Two of them, so that graphs are replayed with other starts and what the server keeps has come to matter."""
    fed, config = make_federation(model, dtype=torch.float64), SMALL
    algorithm, there = ALGORITHMS[name](fed, config), ALGORITHMS[name](on_gpu(fed, backend=backend), config)
    expected, server = algorithm.init(), there.init()
    for number, clients in ((1, [2, 0, 3]), (2, [1, 3, 0])):
        expected, _ = algorithm.round(expected, clients, Rng(0, number))
        server, trained = there.round(server, clients, Rng(0, number))
    assert all(t.is_cuda for part in server.values() for t in part.values() if t.is_floating_point())
    assert trained.loss.is_cuda
    for part in expected:
        for key, tensor in expected[part].items():
            torch.testing.assert_close(server[part][key].cpu(), tensor, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("backend", ["loop", "vmap", "graphs"])
@pytest.mark.parametrize("optimizer", [SGD(0.05, 0.9, 1e-2, nesterov=True, clip=1.0), Adam(0.01)])
def test_dropout_augmentation_and_optimizers_are_those_of_the_cpu(make_federation, backend, optimizer):
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
        for name, tensor in expected.states.items():
            torch.testing.assert_close(trained.states[name].cpu(), tensor, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("backend", ["loop", "graphs"])
def test_several_architectures_on_the_gpu(make_federation, backend):
    fed = make_federation("cnn", dtype=torch.float64)
    wide, narrow = (
        zoo.create(
            "cnn", torch.Generator().manual_seed(1), num_classes=3, in_channels=1, image_size=8, width=w
        ).double()
        for w in (0.25, 0.125)
    )
    models, clients = [wide, narrow, narrow, wide], [3, 1, 0, 2]
    expected = fed.train_mixed(models, [surgery.state(m) for m in models], clients, Rng(0, 1))
    copies = {id(m): copy.deepcopy(m).cuda() for m in (wide, narrow)}
    models = [copies[id(m)] for m in models]
    trained = on_gpu(fed, backend=backend).train_mixed(models, [surgery.state(m) for m in models], clients, Rng(0, 1))
    for state, other in zip(expected.states, trained.states):
        for name, tensor in state.items():
            torch.testing.assert_close(other[name].cpu(), tensor, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("backend", ["loop", "vmap", "graphs"])
@pytest.mark.parametrize("precision", [Precision("tf32"), Precision("bf16"), Precision("bf16", channels_last=True)])
def test_precisions_are_close_to_float32(make_federation, backend, precision):
    if precision.channels_last and backend == "vmap":
        pytest.skip("vmap has no channels_last")
    fed = on_gpu(make_federation("cnn"), backend=backend)
    starts = surgery.broadcast(fed.initial(), 3)
    switches = torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision
    exact, rough = (f.train(starts, [0, 1, 2], Rng(0, 1)) for f in (fed, dataclasses.replace(fed, precision=precision)))
    assert switches == (torch.backends.cuda.matmul.fp32_precision, torch.backends.cudnn.conv.fp32_precision)
    for name, tensor in exact.states.items():
        assert rough.states[name].dtype == torch.float32
        assert (rough.states[name] - tensor).norm() < 0.1 * (tensor - starts[name]).norm()


@pytest.mark.parametrize("backend", ["loop", "vmap"])
def test_no_step_waits_for_the_device(make_federation, backend):
    """Torch raises at what synchronises; the batches are on the device before the first step."""
    fed = on_gpu(make_federation("resnet20"), backend=backend)
    starts = surgery.broadcast(fed.initial(), 3)
    group = make_group(fed, fed.model, starts, [0, 1, 2], Aim(cross_entropy, {}), Rng(0, 1))
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


def test_surgery_stays_on_the_device():
    models = {"w": torch.randn(4, 3, device="cuda"), "steps": torch.arange(4, device="cuda")}
    mixed = surgery.shuffle(models, [("w",), ("steps",)], surgery.permutations(2, 4))
    results = [mixed["w"], surgery.average(models, [1, 2, 3, 4])["w"], surgery.cosine({"w": models["w"]})]
    assert all(t.is_cuda for t in results)


def test_the_command_line_on_the_gpu(tmp_path):
    assert cli.main([*TINY, "--device", "cuda", "--out", str(tmp_path), "--name", "a"]) == 0
    assert cli.main(["--resume", str(tmp_path / "a"), "--rounds", "6"]) == 0
    assert len(read(tmp_path / "a" / "metrics.csv")) == 6

"""The same code on a CUDA device: `pytest -m gpu`."""

import dataclasses

import pytest
import torch
from fl_flags import TINY

import surgery
from fl import run as cli
from fl.algorithms import fedavg, fedmr, fedprox, indep
from fl.metrics import read
from fl.rng import Rng

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def on_gpu(fed, **changes):
    return dataclasses.replace(fed, model=fed.model.to("cuda"), data=fed.data.to("cuda"), **changes)


@pytest.mark.parametrize("make", [fedavg, fedprox, fedmr, indep])
@pytest.mark.parametrize("model", ["cnn", "resnet20"])
@pytest.mark.parametrize("backend", ["loop", "vmap"])
def test_a_round_on_the_gpu_is_a_round_on_the_cpu(make_federation, make, model, backend):
    fed = make_federation(model, dtype=torch.float64)
    algorithm = make(fed)
    expected, _ = algorithm.round(algorithm.init(), [2, 0, 3], Rng(0, 1))
    algorithm = make(on_gpu(fed, backend=backend))
    server, trained = algorithm.round(algorithm.init(), [2, 0, 3], Rng(0, 1))
    assert all(t.is_cuda for part in server.values() for t in part.values())
    assert trained.loss.is_cuda
    for part in expected:
        for name, tensor in expected[part].items():
            torch.testing.assert_close(server[part][name].cpu(), tensor, rtol=1e-6, atol=1e-8)


def test_surgery_stays_on_the_device():
    models = {"w": torch.randn(4, 3, device="cuda"), "steps": torch.arange(4, device="cuda")}
    mixed = surgery.shuffle(models, [("w",), ("steps",)], surgery.permutations(2, 4))
    results = [mixed["w"], surgery.average(models, [1, 2, 3, 4])["w"], surgery.cosine({"w": models["w"]})]
    assert all(t.is_cuda for t in results)


def test_the_command_line_on_the_gpu(tmp_path):
    assert cli.main([*TINY, "--device", "cuda", "--out", str(tmp_path), "--name", "a"]) == 0
    assert cli.main(["--resume", str(tmp_path / "a"), "--rounds", "6"]) == 0
    assert len(read(tmp_path / "a" / "metrics.csv")) == 6

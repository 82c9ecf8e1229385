"""Adapters folded into states: the same as on the model, for all kinds of weights, and out again."""

import json

import pytest
import torch
from refusals import refused
from torch import nn

import surgery
from surgery import adapters
from surgery.files import open_state, write
from tests.surgery.adapters.test_model import drawn, network


class Conv1D(nn.Module):
    """As that of transformers."""

    def __init__(self, nf, nx):
        super().__init__()
        self.nf = nf
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf)), nn.Parameter(torch.zeros(nf))

    def forward(self, x):
        return x @ self.weight + self.bias


def tables():
    return nn.Sequential(nn.Embedding(7, 4), Conv1D(4, 4), Conv1D(6, 4), nn.LayerNorm(6))


def written(net, path, **settings):
    net = net.float()
    adapted = drawn(adapters.add(net, 2, scale=0.3, **settings))
    for name in settings.get("train", ()):
        nn.init.ones_(adapted.get_submodule(name).weight)
    adapters.write_peft(adapted, path / "adapter")
    write(path / "net.safetensors", surgery.state(net))
    return adapted


def equal(found, expected):
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_fold__sums_are_computed_in_float32(tmp_path):
    adapted = written(network(), tmp_path)
    low = {name: tensor.bfloat16() for name, tensor in surgery.state(adapters.remove(adapted)).items()}
    found = adapters.fold(low, tmp_path / "adapter")["0.weight"]
    assert torch.equal(found, (low["0.weight"].float() + adapted[0].change()).bfloat16())


def test_fold__what_does_not_fit_is_named(tmp_path):
    written(network(), tmp_path, modules=["0"], train=["4"])
    base, folder = dict(open_state(tmp_path / "net.safetensors")), tmp_path / "adapter"
    with refused("mismatch: '0.lora_A.weight'", "'0.weight'"):
        adapters.fold({name: base[name] for name in base if name != "0.weight"}, folder)
    with refused("mismatch: '4.weight'"):
        adapters.fold({name: base[name] for name in base if name != "4.weight"}, folder)
    with refused("mismatch: '0'"):
        adapters.fold({**base, "0.weight": torch.ones(1, 2)}, folder)
    with refused("unsupported"):
        adapters.fold(base, folder, subtract=True)


@pytest.mark.parametrize("settings", [{"train": ["0"]}, {}])
def test_fold__two_names_of_a_tensor_that_changes_are_refused(tmp_path, settings):
    untied, tied = (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2))
    tied[1].weight = tied[0].weight
    written(untied, tmp_path, modules=["2" if settings else "0"], **settings)
    with refused("unsupported: '0.weight'", "'1.weight'"):
        adapters.fold(tied.state_dict(), tmp_path / "adapter")
    own = {name: tensor.clone() for name, tensor in tied.state_dict().items()}
    found = adapters.fold(own, tmp_path / "adapter")
    assert torch.equal(found["1.weight"], own["1.weight"])
    assert not torch.equal(found["0.weight"], own["0.weight"])


def test_fold__square_weights_among_both_kinds_are_refused(tmp_path):
    written(tables(), tmp_path, modules=["1", "2"])
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps({**config, "fan_in_fan_out": False}))
    with refused("ambiguous: '1'"):
        adapters.fold(open_state(tmp_path / "net.safetensors"), tmp_path / "adapter")

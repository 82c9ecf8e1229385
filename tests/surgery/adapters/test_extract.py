"""Adapters taken out of fine-tuned models: planted ones come back, and no rank does better."""

import copy

import numpy as np
import pytest
import torch
from refusals import refused
from torch import nn

import surgery
from surgery import adapters
from tests.surgery.adapters.test_fold import tables
from tests.surgery.adapters.test_model import drawn, network


def fine_tuned(net, change=0.1):
    """A copy with all tensors changed."""
    generator = torch.Generator().manual_seed(1)
    values = {
        name: t + change * torch.randn(t.shape, generator=generator, dtype=t.dtype) if t.is_floating_point() else t
        for name, t in surgery.state(net).items()
    }
    return surgery.load(copy.deepcopy(net), values)


@pytest.mark.parametrize(("make", "modules"), [(network, None), (tables, ["0", "1", "2"])])
def test_extract__a_planted_adapter_is_found(make, modules):
    net = make().double()
    adapted = drawn(adapters.add(net, 2, modules=modules, scale=0.3))
    found, error, left = adapters.extract(net, adapters.merge(adapted), 2, modules=modules)
    assert max(error.values()) < 1e-10
    assert not left
    expected = {n: 0.3 * product for n, product in adapters.products(adapters.state(adapted)).items()}
    for name, product in adapters.products(adapters.state(found)).items():
        torch.testing.assert_close(product, expected[name], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("rank", [1, 3, 50])
def test_extract__no_product_of_the_rank_is_nearer(rank):
    net = network().double()
    tuned = fine_tuned(net)
    found, error, left = adapters.extract(net, tuned, rank)
    before, after = surgery.state(net), surgery.state(tuned)
    for name, lost in error.items():
        change = (after[f"{name}.weight"] - before[f"{name}.weight"]).flatten(1).numpy()
        values = np.linalg.svd(change, compute_uv=False)
        best = np.linalg.norm(values[rank:]) / np.linalg.norm(values)
        product = found.get_submodule(name).change().detach().flatten(1).numpy()
        assert abs(lost - best) < 1e-10
        assert abs(np.linalg.norm(change - product) / np.linalg.norm(change) - best) < 1e-10
    assert set(left) == {n for n in before if n.removesuffix(".weight") not in error and before[n].is_floating_point()}


def test_extract__modules_that_are_taken_whole_are_the_tuned_ones(caplog):
    net = network().double()
    names = [name for name, module in net.named_modules() if name and list(module.parameters(recurse=False))]
    tuned = fine_tuned(net)
    found, _error, left = adapters.extract(net, surgery.state(tuned), 1, modules=names[:1], train=names[1:])
    assert left == (f"{names[0]}.bias",)
    assert f"{names[0]}.bias" in caplog.text
    for name, tensor in surgery.state(adapters.remove(found)).items():
        assert torch.equal(tensor, surgery.state(net if name.startswith(names[0]) else tuned)[name]), name


def test_extract__layers_that_are_equal_get_no_adapter():
    net = plain()
    tuned = surgery.load(copy.deepcopy(net), surgery.state(net) | {"2.weight": torch.zeros(4, 5)})
    assert list(adapters.extract(net, tuned, 2).error) == ["2"]
    with refused("argument"):
        adapters.extract(net, net, 2)


def test_extract__models_of_other_tensors_are_refused():
    with refused("mismatch"):
        adapters.extract(nn.Sequential(nn.Linear(2, 3)), nn.Sequential(nn.Linear(2, 3, bias=False)), 1)


def plain():
    return nn.Sequential(nn.Linear(6, 5, bias=False), nn.ReLU(), nn.Linear(5, 4, bias=False))


def test_extract__values_that_are_none_are_refused():
    net, values = plain(), surgery.state(plain())
    values["2.weight"] = torch.full((4, 5), torch.nan)
    with refused("values: '2.weight'"):
        adapters.extract(net, values, 1)
    with refused("values"):
        adapters.extract(plain().to("meta"), values, 1)

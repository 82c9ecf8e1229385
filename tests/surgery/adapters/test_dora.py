"""DoRA (Liu et al., ICML 2024): adapters that also learn the norm of each output's weights."""

import pytest
import torch
from refusals import refused
from torch import nn

import surgery
from surgery import adapters
from tests.surgery.adapters.test_model import IMAGE, LAYERS, Squashed, drawn, network


def equation_5(layer):
    """W' with the norm as a constant, written out by rows; and the leaves it is a function of."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in (*layer.factors, layer.lora_magnitude_vector)]
    a, b, m = leaves
    weight = layer.base_layer.weight.detach()
    if type(layer.base_layer).__name__ == "Conv1D":
        weight = weight.T
    v = weight.flatten(1) + layer.multiplier * b.flatten(1) @ a.flatten(1)
    rows = [m.flatten()[k] * row / row.detach().square().sum().sqrt() for k, row in enumerate(v)]
    return torch.stack(rows).view(weight.shape), leaves


@pytest.mark.parametrize("kind", [kind for kind in LAYERS if kind != "embedding"])
def test_dora__a_layer_computes_and_learns_as_equation_5_says(kind):
    make, x = LAYERS[kind]
    torch.manual_seed(0)
    plain = make().double()
    adapted = adapters.add(plain, 3, scale=0.5, kind="dora")
    torch.testing.assert_close(adapted(x), plain(x))
    drawn(adapted).lora_magnitude_vector.data[..., :1].neg_()
    weight, leaves = equation_5(adapted)
    expected = make().double()
    expected.load_state_dict(plain.state_dict())
    del expected.weight
    expected.weight = weight.T if kind == "Conv1D" else weight
    torch.testing.assert_close(adapted(x), expected(x))
    torch.testing.assert_close(adapted.weight, expected.weight)  # which an attention reads
    found = torch.autograd.grad(adapted(x).square().sum(), [*adapted.factors, adapted.lora_magnitude_vector])
    read = torch.autograd.grad(adapted.weight.square().sum(), [*adapted.factors, adapted.lora_magnitude_vector])
    torch.testing.assert_close(found, torch.autograd.grad(expected(x).square().sum(), leaves, retain_graph=True))
    torch.testing.assert_close(read, torch.autograd.grad(weight.square().sum(), leaves))


def test_dora__under_autocast_outputs_have_the_dtype_of_the_plain_layer():
    for net, x in ((nn.Linear(4, 6), IMAGE[:, 0, 0, :4].float()), (nn.Conv2d(4, 6, 3), IMAGE.float())):
        adapted = drawn(adapters.add(net, 2, kind="dora"))
        with torch.autocast("cpu", torch.bfloat16):
            found = adapted(x)
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found.float(), adapted(x), rtol=0.05, atol=0.1)


def test_dora__merged_and_taken_out_again():
    net = network().eval()
    adapted = drawn(adapters.add(net, 2, scale=3.0, kind="dora"))
    adapted[4].lora_magnitude_vector.data[1].neg_()
    merged = adapters.merge(adapted)
    assert type(merged[4]) is nn.Linear
    torch.testing.assert_close(merged(IMAGE), adapted(IMAGE), rtol=0, atol=1e-10)
    back = adapters.unmerge(merged, adapted)
    for name, tensor in surgery.state(adapted).items():
        torch.testing.assert_close(surgery.state(back)[name], tensor, rtol=0, atol=1e-10)
    with torch.no_grad():
        for parameter in merged.parameters():  # trained further
            parameter += 0.1 * torch.rand_like(parameter)
    before = merged(IMAGE)
    torch.testing.assert_close(adapters.unmerge(merged, adapted)(IMAGE), before, rtol=0, atol=1e-10)
    assert torch.equal(merged(IMAGE), before)
    assert torch.equal(adapters.remove(adapted)(IMAGE), net(IMAGE))


def test_dora__the_rank_is_a_width():
    net = network().eval()
    adapted = drawn(adapters.add(net, 4, scale=2.0, kind="dora"))
    tensors = adapters.state(adapted)
    again = adapters.attach(net, tensors, scale=2.0)
    assert torch.equal(again(IMAGE), adapted(IMAGE))
    assert str(again) == str(adapted)
    keep = [name for name, _ in adapted.named_modules() if name.endswith("base_layer")]
    small, _ = surgery.narrow(adapted, 0.5, IMAGE, keep=keep)
    half, _ = adapters.resize(tensors, 2, how="truncate")
    assert torch.equal(small(IMAGE), adapters.attach(net, half, scale=2.0)(IMAGE))
    order = {"0.lora_A.weight:0": torch.tensor([2, 0, 3, 1])}
    torch.testing.assert_close(surgery.symmetry.permute(adapted, order, example=IMAGE)[0](IMAGE), adapted(IMAGE))
    more, _ = adapters.resize(tensors, 6)
    torch.testing.assert_close(adapters.attach(net, more, scale=2.0)(IMAGE), adapted(IMAGE))
    best, _ = adapters.resize(tensors, 2)
    assert torch.equal(best["4.lora_magnitude_vector"], tensors["4.lora_magnitude_vector"])
    with refused("width: 0.lora_A.weight"):
        surgery.widening.widen(adapted, rate=2, keep=keep, example=IMAGE)
    with refused("unsupported: '0'"):
        adapters.stack([tensors, tensors])


def zeros():
    net = nn.Linear(3, 2)
    nn.init.zeros_(net.weight[1])
    return net


@pytest.mark.parametrize(
    ("net", "settings", "expected"),
    [
        (nn.Embedding(5, 4), {"modules": [""]}, "unsupported"),
        (zeros(), {}, "values"),
        (Squashed(4, 4), {}, "unsupported"),
        (nn.Linear(4, 4), {"kind": "ia3"}, "argument: 'ia3'"),
    ],
)
def test_dora__what_is_refused(net, settings, expected):
    with refused(expected):
        adapters.add(net, 1, **{"kind": "dora"} | settings)


def test_dora__files_and_states_that_do_not_fit(tmp_path):
    net = network()
    tensors = adapters.state(adapters.add(net, 1, kind="dora"))
    with refused("mismatch"):
        adapters.attach(net, tensors | {"4.lora_magnitude_vector": torch.ones(2)})
    with refused("mismatch"):
        adapters.rank_of({"4.lora_magnitude_vector": torch.ones(2)})
    mixed = {name: tensor for name, tensor in tensors.items() if name != "4.lora_magnitude_vector"}
    with refused("unsupported"):
        adapters.write_peft(adapters.attach(net, mixed), tmp_path / "mixed")
    adapters.write_peft(adapters.attach(net, tensors), tmp_path / "whole")
    with refused("unsupported: '0'"):
        adapters.fold(surgery.state(net), tmp_path / "whole", subtract=True)

"""Models of complex numbers: nothing drops an imaginary part."""

import pytest
import torch
from refusals import refused
from torch import nn

import surgery
from surgery import average, narrow, state
from surgery.pruning import importance, prune
from surgery.symmetry import align, permute
from surgery.widening import widen

C = {"dtype": torch.complex64}
X = torch.randn(7, 4, generator=torch.Generator().manual_seed(0), **C)


class Net(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.made, self.read = nn.Linear(4, width, **C), nn.Linear(width, 3, **C)

    def forward(self, x):
        return self.read(torch.tanh(self.made(x))).abs()


def test_narrow__is_the_model_with_zeros():
    net = Net()
    small, plan = narrow(net, 0.5, X, strict=True)
    zeros = surgery.load(Net(), plan.embed(state(small))[0])
    torch.testing.assert_close(small(X), zeros(X))


@pytest.mark.parametrize("mode", ["copy", "zero"])
def test_widen__computes_the_same(mode, recwarn):
    net = Net()
    wide, plan = widen(net, rate=2, example=X, mode=mode, strict=True)
    torch.testing.assert_close(wide(X), net(X))
    if mode == "zero":
        assert all(torch.equal(value, state(net)[name]) for name, value in plan.extract(state(wide)).items())
    assert not recwarn


@pytest.mark.parametrize("by", ["weights", "activations"])
def test_align__undoes_a_permutation(by, recwarn):
    """With the real parts alone it found others: these are equal here."""
    net = Net()
    with torch.no_grad():
        net.made.weight.real[:] = 1
    other, _ = permute(net, {"made.weight:0": torch.randperm(8)}, example=X)
    found = align([net, other], example=X, by=by, batches=[torch.randn(200, 4, **C)])
    assert torch.equal(found.models[1].made.weight, net.made.weight)
    assert not recwarn


def test_complex__scores_are_those_of_complex_numbers():
    net = Net()
    found = importance(net, example=X, by="l1")["made.weight:0"]
    by_hand = net.made.weight.abs().sum(1) + net.read.weight.abs().sum(0)
    torch.testing.assert_close(found.float(), by_hand.detach())
    net(X).sum().backward()
    taylor = importance(net, example=X, by="taylor", batches=[X], loss=lambda model, batch: model(batch).sum())
    parts = [
        sum((getattr(w, part) * getattr(w.grad, part)).abs() for part in ("real", "imag"))
        for w in (net.made.weight, net.read.weight)
    ]
    torch.testing.assert_close(taylor["made.weight:0"].float(), (parts[0].sum(1) + parts[1].sum(0)).detach())
    activation = importance(net, example=X, by="activation", batches=[X])["made.weight:0"]
    torch.testing.assert_close(activation.float(), torch.tanh(net.made(X)).abs().mean(0).detach())
    small = prune(net, target=surgery.pruning.Target(parameters=0.6), example=X).model
    assert small.made.weight.shape == (4, 4)


def test_narrow__what_would_lose_the_imaginary_part_is_refused():
    _, plan = narrow(Net(), 0.5, X)
    small = plan.extract(state(Net()))
    real = {name: tensor.real.contiguous() for name, tensor in state(Net()).items()}
    with refused("mismatch: `into`"):
        plan.embed(small, into=real)


def test_distance__states_that_cannot_be_averaged_are_named():
    one = {"w": torch.ones(2)}
    with refused("mismatch: 'w'"):
        average([one, {"w": torch.ones(2, device="meta")}])
    packed = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    for operation in (
        surgery.stack,
        surgery.average,
        surgery.merging.linear,
        lambda models: surgery.distance(models, models),
    ):
        with refused("unsupported: 'w'"):
            operation([{"w": packed}, {"w": packed}])
    with refused("unsupported: 'w'"):
        average([{"w": torch.ones(2).to_sparse()}, one])

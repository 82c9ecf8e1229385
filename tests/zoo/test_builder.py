"""What stands beside the norms in a block: Scalers, step sizes, stochastic depth."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from selection import some
from torch import nn
from zoo_models import able, inputs, quiet, takes

import zoo
from zoo import Spec
from zoo.layers import Residual, Scaler
from zoo.norms import BatchNorm2d


def test_builder__a_scaler_divides_in_training_only():
    x = torch.randn(3)
    assert torch.equal(Scaler(0.25)(x), 4 * x)
    assert torch.equal(Scaler(0.25).eval()(x), x)


@pytest.mark.parametrize("name", takes("scaler"))
def test_builder__scalers_leave_names_and_evaluation_alone(name):
    plain, scaling = (quiet(name, scaler=s, **able(name, norm="batch")) for s in (False, True))
    models = [spec.build(torch.Generator().manual_seed(0)) for spec in (plain, scaling)]
    assert list(models[0].state_dict()) == list(models[1].state_dict())
    assert any(isinstance(m, Scaler) for m in models[1].modules())
    assert not any(isinstance(m, Scaler) for m in models[0].modules())
    x = inputs(plain)
    with torch.no_grad():
        assert torch.equal(*(copy.deepcopy(m).eval()(x) for m in models))
        assert not torch.equal(*(m(x) for m in models))  # batch norm's epsilon is seen at least


@pytest.mark.parametrize("name", some(takes("scaler"), ["cnn", "resnet20", "mobilenetv2", "transformer"]))
def test_builder__scalers_leave_full_models_alone(name):
    specs = [quiet(name, scaler=s, **able(name, norm="batch")).scale(4) for s in (False, True)]
    with torch.no_grad():
        assert torch.equal(*(s.build(torch.Generator().manual_seed(0))(inputs(s)) for s in specs))


@pytest.mark.parametrize("name", [name for name in takes("norm") if name not in ("cnn", "lenet")])
def test_builder__a_scaler_precedes_every_norm(name):
    """Seen by what reaches the norms: 1 / rate times what reaches them without, where the norms change nothing."""
    width = 0.25
    seen = {}
    for scaler in (False, True):
        model = quiet(name, norm="batch", scaler=scaler, width=width).build(torch.Generator().manual_seed(0))
        seen[scaler] = {}
        for key, module in model.named_modules():
            if isinstance(module, BatchNorm2d):
                module.eps = 1e-20  # then its output does not depend on the scale of its input

                def watch(_, inputs, key=key, seen=seen[scaler]):
                    seen[key] = inputs[0].detach()

                module.register_forward_pre_hook(watch)
        model.double()(inputs(Spec(name, image_size=32), 8).double())
    assert len(seen[True]) == len(seen[False]) >= 5
    for key, x in seen[False].items():
        torch.testing.assert_close(seen[True][key], x / width)


def test_builder__scalers_have_their_section_s_rate():
    net = zoo.create("resnet20", width=(0.5, 0.25, 1), scaler=True)
    rates = [net.stem.scaler.rate, *(getattr(net, f"section{i}")[2].scaler.rate for i in (1, 2, 3))]
    assert rates == [0.5, 0.5, 0.25, 1]


@pytest.mark.parametrize("name", [name for name in takes("step_size") if name != "resnet20_fedmr"])
def test_builder__step_sizes_are_one_a_branch_and_learnt(name):
    plain, stepping = (quiet(name, depth=2, step_size=s) for s in (False, True))
    plain, stepping = (spec.build(torch.Generator().manual_seed(0)) for spec in (plain, stepping))
    new = {k: t for k, t in stepping.named_parameters() if k.endswith(".step")}
    assert stepping.state_dict().keys() - plain.state_dict().keys() == new.keys()
    assert len(new) == sum(isinstance(m, Residual) for m in stepping.modules()) >= 4
    assert all(torch.equal(t, torch.ones(1)) for t in new.values())
    x = inputs(quiet(name))
    torch.testing.assert_close(stepping(x), plain(x))
    stepping(x).square().sum().backward()
    assert all(t.grad.abs() > 0 for t in new.values())


@pytest.mark.parametrize("name", ["resnet20", "preresnet20", "mobilenetv2", "efficientnetv2_cifar"])
def test_builder__a_step_of_zero_leaves_the_shortcut(name):
    activation = F.relu if name == "resnet20" else nn.Identity()
    net = quiet(name, step_size=True, depth=2).build()
    block = net.section2[1]
    x = torch.randn(2, net.section2(net.section1(net.stem(torch.randn(2, 3, 32, 32)))).shape[1], 8, 8)
    assert not torch.allclose(block(x), activation(x))
    nn.init.zeros_(block.add.step)
    assert torch.equal(block(x), activation(x))


def test_builder__stochastic_depth_drops_whole_rows_and_keeps_the_mean():
    torch.manual_seed(0)
    add = Residual(drop_path=0.25)
    out = add(torch.zeros(4000, 3), torch.ones(4000, 3))
    assert out.unique().tolist() == pytest.approx([0, 4 / 3])
    assert torch.equal(out[:, 0], out[:, 2])
    assert out.mean().item() == pytest.approx(1, abs=5 * math.sqrt(1 / 3 / 4000))
    assert torch.equal(add.eval()(torch.ones(2, 3), torch.ones(2, 3)), torch.full((2, 3), 2.0))

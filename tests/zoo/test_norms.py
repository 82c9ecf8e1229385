"""Norms, their statistics, and what stands beside them in a block: Scalers and step sizes."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import zoo_refused
from torch import nn
from torch.func import functional_call
from torch.optim.swa_utils import update_bn
from zoo_models import inputs, quiet, takes

import zoo
from zoo.layers import Builder
from zoo.norms import BatchNorm2d, StaticBatchNorm2d

NORMS = ["none", "batch", "static_batch", "group", "layer"]


def test_norms__batch_norm_is_torch_s_without_a_step_counter():
    ours, theirs = BatchNorm2d(3), nn.BatchNorm2d(3)
    assert list(ours.state_dict()) == ["weight", "bias", "running_mean", "running_var"]
    for _ in range(3):
        x = 2 + 3 * torch.randn(4, 3, 5, 5)
        torch.testing.assert_close(ours(x), theirs(x))
    torch.testing.assert_close(ours.running_mean, theirs.running_mean)
    torch.testing.assert_close(ours.running_var, theirs.running_var)
    torch.testing.assert_close(ours.eval()(x), theirs.eval()(x))


@pytest.mark.parametrize("kind", [BatchNorm2d, StaticBatchNorm2d])
def test_norms__states_with_a_counter_load(kind):
    theirs = nn.BatchNorm2d(3)
    theirs(1 + torch.randn(4, 3, 5, 5))
    state = theirs.state_dict()
    ours = nn.Sequential(kind(3))
    ours.load_state_dict({f"0.{name}": tensor for name, tensor in state.items()}, strict=True)
    assert state["num_batches_tracked"] == 1
    x = torch.randn(4, 3, 5, 5)
    torch.testing.assert_close(ours.eval()(x), theirs.eval()(x))


def test_norms__static_batch_norm_keeps_no_statistics():
    ours, theirs = StaticBatchNorm2d(3), nn.BatchNorm2d(3)
    for seed in range(2):
        x = torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(seed)) * 2 + 1
        torch.testing.assert_close(ours(x), theirs(x))
        torch.testing.assert_close(ours.eval()(x), theirs(x))  # as long as it has none
        ours.train()
    assert list(ours.state_dict()) == ["weight", "bias"]
    statistics = {"running_mean": torch.arange(3.0), "running_var": torch.ones(3)}
    ours.load_state_dict(ours.state_dict() | statistics)
    torch.testing.assert_close(ours(x), theirs(x))  # nor does training use those that it was given
    assert torch.equal(ours.running_mean, torch.arange(3.0))
    torch.testing.assert_close(ours.eval()(x), F.batch_norm(x, **statistics))
    ours.load_state_dict({"weight": torch.ones(3), "bias": torch.zeros(3)})
    assert list(ours.state_dict()) == ["weight", "bias"]


def with_torch_s_norms(model):
    """An equal model whose static batch norms are torch's, with statistics that are the mean over batches."""
    model = copy.deepcopy(model)
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if isinstance(child, StaticBatchNorm2d):
                norm = nn.BatchNorm2d(child.num_features, child.eps, momentum=None)
                norm.load_state_dict(child.state_dict(), strict=False)
                setattr(parent, name, norm)
    return model


def collected(name, norm="static_batch"):
    spec = quiet(name, norm=norm)
    model = spec.build(torch.Generator().manual_seed(0))
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, StaticBatchNorm2d):
                module.weight.uniform_(0.5, 1.5)
                module.bias.normal_()
    return spec, model, [1 + inputs(spec, 6, seed) for seed in range(3)]


@pytest.mark.parametrize("name", ["cnn", "resnet18", "preresnet20", "mobilenetv2", "efficientnetv2_cifar", "vgg11"])
def test_norms__collected_statistics_are_torch_s_cumulative_average(name):
    _, model, batches = collected(name)
    statistics = zoo.collect_statistics(model, batches)
    oracle = with_torch_s_norms(model)
    update_bn(batches, oracle)
    expected = {k: t for k, t in oracle.state_dict().items() if "running_" in k}
    assert list(statistics) == list(expected)
    for key, tensor in expected.items():
        torch.testing.assert_close(statistics[key], tensor, atol=1e-5, rtol=1e-5)
    model.load_state_dict(model.state_dict() | statistics)
    x = batches[0]
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(x), oracle.eval()(x), atol=1e-4, rtol=1e-4)


def test_norms__loaded_statistics_make_evaluation_independent_of_the_batch():
    _, model, batches = collected("resnet18")
    x = batches[0]
    with torch.no_grad():
        assert not torch.allclose(model.eval()(x)[:2], model(x[:2]), atol=1e-3)
        model.load_state_dict(model.state_dict() | zoo.collect_statistics(model, batches))
        torch.testing.assert_close(model(x)[:2], model(x[:2]))
    plain = {k: t for k, t in model.state_dict().items() if "running_" not in k}
    model.load_state_dict(plain)
    assert list(model.state_dict()) == list(plain)


@pytest.mark.parametrize("given", [False, True])
def test_norms__to_collect_statistics_changes_nothing(given):
    """Neither does it read the statistics that the model has."""
    _, model, batches = collected("efficientnetv2_cifar")
    expected = zoo.collect_statistics(model, batches)
    if given:
        model.load_state_dict(model.state_dict() | {k: torch.rand_like(t) for k, t in expected.items()})
    model.train()
    model.section2.eval()
    modes = [m.training for m in model.modules()]
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    with pytest.raises(RuntimeError):
        zoo.collect_statistics(model, [batches[0], torch.zeros(1, 2, 8, 8)])
    again = zoo.collect_statistics(model, iter(batches))
    assert all(torch.equal(again[k], t) for k, t in expected.items())
    assert [m.training for m in model.modules()] == modes
    assert before.keys() == model.state_dict().keys()
    assert all(torch.equal(before[k], t) for k, t in model.state_dict().items())
    assert torch.equal(random, torch.get_rng_state())
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())
    assert not any(t.requires_grad for t in again.values())


def test_norms__dropout_and_scalers_are_off_while_statistics_are_collected():
    _, model, batches = collected("vgg11")
    options = {"norm": "static_batch", "dropout": 0.5, "scaler": True}
    busy = quiet("vgg11", **options).build()
    busy.load_state_dict(model.state_dict())
    expected = zoo.collect_statistics(model, batches)
    for key, tensor in zoo.collect_statistics(busy, batches).items():
        torch.testing.assert_close(tensor, expected[key])


def test_norms__statistics_of_other_weights():
    """A state that is not the model's own, with statistics or without."""
    spec, model, batches = collected("preresnet20")
    other = spec.build(torch.Generator().manual_seed(9))
    expected = zoo.collect_statistics(other, batches)
    before = copy.deepcopy(model.state_dict())
    for state in (other.state_dict(), other.state_dict() | {k: 7 * t for k, t in expected.items()}):
        found = zoo.collect_statistics(model, batches, state=state)
        assert all(torch.equal(found[k], t) for k, t in expected.items())
    assert all(torch.equal(before[k], t) for k, t in model.state_dict().items())


def test_norms__statistics_feed_functional_evaluation():
    _, model, batches = collected("resnet18")
    state = model.state_dict() | zoo.collect_statistics(model, batches)
    with torch.no_grad():
        functional = functional_call(model.eval(), state, (batches[0],))
        assert model.stem.norm.running_mean is None
        again = zoo.collect_statistics(model, batches)  # after it too
        model.load_state_dict(state)
        torch.testing.assert_close(functional, model(batches[0]))
    assert all(torch.equal(again[k], state[k]) for k in again)


def test_norms__no_batches_are_an_error_and_no_static_norms_are_not():
    _, model, batches = collected("resnet18")
    with zoo_refused("argument"):
        zoo.collect_statistics(model, [])
    with zoo_refused("argument: section4.0.norm1"):
        zoo.collect_statistics(model, [batches[0][:1]])
    assert model.stem.norm.running_mean is None
    assert zoo.collect_statistics(quiet("resnet18").build(), batches) == {}


@pytest.mark.parametrize("with_statistics", [False, True])
def test_norms__static_norms_can_be_copied_and_pickled(with_statistics):
    _, model, batches = collected("resnet18")
    if with_statistics:
        model.load_state_dict(model.state_dict() | zoo.collect_statistics(model, batches))
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert list(twin.state_dict()) == list(model.state_dict())
        with torch.no_grad():
            assert torch.equal(twin.eval()(batches[0]), model.eval()(batches[0]))


@given(st.integers(1, 300))
def test_norms__group_norms_have_the_most_groups_up_to_eight(channels):
    norm = Builder("group").make_norm(channels)
    assert norm.num_groups == max(g for g in (1, 2, 4, 8) if channels % g == 0)
    assert Builder("layer").make_norm(channels).num_groups == 1


@settings(max_examples=10)
@given(st.integers(1, 13), st.floats(1e-6, 0.1))
def test_norms__layer_norm_is_over_channels_and_positions(channels, eps):
    x = 2 + torch.randn(3, channels, 4, 5)
    torch.testing.assert_close(Builder("layer", eps).make_norm(channels)(x), F.layer_norm(x, x.shape[1:], eps=eps))


def test_norms__epsilon_is_the_spec_s():
    for norm in NORMS[1:]:
        model = quiet("mobilenetv2", norm=norm, norm_eps=0.25).build(device="meta")
        assert {m.eps for m in model.modules() if hasattr(m, "eps")} == {0.25}
    assert quiet("transformer", norm_eps=0.25).build(device="meta").section1[1].norm2.eps == 0.25


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("name", takes("norm"))
def test_norms__every_norm_runs_forward_and_backward(name, norm):
    spec = quiet(name, norm=norm, width=0.11)  # odd numbers of channels, too
    model = spec.build()
    out = model(inputs(spec))
    assert out.isfinite().all()
    out.square().sum().backward()
    for key, parameter in model.named_parameters():
        unused = name == "resnet20_fedmr" and key.startswith("tail")
        assert (parameter.grad is None) == unused, key
        assert unused or parameter.grad.isfinite().all(), key
    kinds = {type(m) for m in model.modules()} & {BatchNorm2d, StaticBatchNorm2d, nn.GroupNorm}
    expected = {"batch": {BatchNorm2d}, "static_batch": {StaticBatchNorm2d}, "none": set()}
    assert kinds == expected.get(norm, {nn.GroupNorm})


def test_norms__that_a_model_does_not_use_have_no_statistics():
    net = zoo.create("resnet20_fedmr", norm="static_batch", width=0.25)
    statistics = zoo.collect_statistics(net, [torch.randn(4, 3, 32, 32)])
    assert len(statistics) == 2 * 18  # three norms a block
    net.load_state_dict(net.state_dict() | statistics)
    assert net.tail.norm.running_mean is None


def test_norms__a_state_of_other_layers_leaves_statistics_alone():
    net = quiet("cnn", norm="static_batch").build()
    statistics = zoo.collect_statistics(net, [inputs(quiet("cnn"))])
    net.load_state_dict(net.state_dict() | statistics)
    net.load_state_dict({"fc2.bias": torch.zeros(5)}, strict=False)
    assert torch.equal(net.norm1.running_mean, statistics["norm1.running_mean"])
    half = {name: t for name, t in net.state_dict().items() if name != "norm1.running_var"}
    with pytest.raises(RuntimeError, match=r"Missing key.*norm1\.running_var"):
        net.load_state_dict(half)


def test_norms__statistics_are_as_precise_under_autocast():
    net = quiet("cnn", norm="static_batch").build()
    net.conv1.weight.data.zero_()
    net.conv1.weight.data[0, 0, 0, 0] = 1.0
    x = 30 + 0.01 * torch.randn(64, 1, 32, 32)
    with torch.autocast("cpu", torch.bfloat16):
        mean = zoo.collect_statistics(net, [x, x + 0.25])["norm1.running_mean"]
    assert mean.dtype == torch.float32
    inner = x.bfloat16().float()[:, 0], (x + 0.25).bfloat16().float()[:, 0]
    shifted = torch.stack([torch.nn.functional.pad(i, (2, 0, 2, 0))[:, :32, :32].mean() for i in inner]).mean()
    torch.testing.assert_close(mean[0], shifted, atol=1e-3, rtol=0)

"""What torch can do with a module it can do with these."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from selection import some
from torch.func import functional_call, stack_module_state, vmap
from zoo_models import FAMILIES, IMAGES, able, inputs, quiet, sized

OLD = [
    "cnn",
    "resnet20",
    "preresnet20",
    "mobilenetv2",
    "efficientnetv2_cifar",
    "transformer",
]  # others have their parts
every_family = pytest.mark.parametrize("name", some(FAMILIES, OLD))
IN_PLANES = [name for name in IMAGES if name != "vit_tiny"]  # whose tokens have one axis
FEW = ("cnn", "resnet20", "transformer")  # whose evaluation shows what that of the others would


def in_modes(names):
    """Every family in training and, by default few of them, in evaluation mode."""
    cases = [(name, training) for name in names for training in (False, True)]
    quick = [(name, training) for name, training in cases if name in OLD and (training or name in FEW)]
    return pytest.mark.parametrize(("name", "training"), some(cases, quick))


def small(name, **options):
    """One block a section; two where that is all there is."""
    return quiet(name, **sized(name) | options)


def build(name, **options):
    """The same model every time, with statistics of its own."""
    spec = small(name, **options)
    model = spec.build(torch.Generator().manual_seed(0))
    with torch.no_grad():
        for seed in (1, 2):
            model(inputs(spec, seed=seed))
    return spec, model


def loss_of(out):
    """A cross entropy with all outputs in it."""
    out = out.flatten(0, -2)
    return F.cross_entropy(out, torch.arange(len(out)) % out.shape[-1])


def gradients(model, x):
    model.zero_grad()
    loss_of(model(x)).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_equal(a, b):
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], msg=lambda text, name=name: f"{name}: {text}")


@in_modes(FAMILIES)
def test_torch__bfloat16_autocast(name, training):
    spec, model = build(name)
    x = inputs(spec)
    exact = copy.deepcopy(model).train(training)(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = model.train(training)(x)
        loss = loss_of(out)
    assert (out.float() - exact).norm() < 0.1 * exact.norm()
    loss.backward()
    used = [p for key, p in model.named_parameters() if not (name == "resnet20_fedmr" and key.startswith("tail"))]
    assert all(p.grad.isfinite().all() and p.grad.dtype == torch.float32 for p in used)


@in_modes(IN_PLANES)
def test_torch__channels_last(name, training):
    spec, model = build(name)
    x = inputs(spec)
    plain = copy.deepcopy(model).train(training)(x)
    last = model.train(training).to(memory_format=torch.channels_last)
    seen = []
    first = last.conv1 if name in ("cnn", "lenet") else last[0]
    first.register_forward_hook(lambda _, __, out: seen.append(out))
    torch.testing.assert_close(last(x.contiguous(memory_format=torch.channels_last)), plain, atol=1e-4, rtol=1e-4)
    assert seen[0].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.slow
@pytest.mark.parametrize("name", some(FAMILIES, ["resnet20"]))
def test_torch__compiled_in_one_graph(name):
    """Training, with gradients and running statistics."""
    torch._dynamo.reset()
    spec, model = build(name)
    x = inputs(spec)
    compiled = torch.compile(copy.deepcopy(model), backend="aot_eager", fullgraph=True)
    assert_equal({k.removeprefix("_orig_mod."): g for k, g in gradients(compiled, x).items()}, gradients(model, x))
    assert_equal({k.removeprefix("_orig_mod."): t for k, t in compiled.state_dict().items()}, model.state_dict())


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["resnet20", "mobilenetv2", "transformer_masked"])
def test_torch__compiled_by_inductor(name):
    """Few, for each takes half a minute; the graphs of all kinds are compiled and compared above."""
    torch._dynamo.reset()
    spec, model = build(name)
    x = inputs(spec)
    compiled = torch.compile(copy.deepcopy(model), fullgraph=True)
    torch.testing.assert_close(compiled(x), model(x), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(compiled.eval()(x), model.eval()(x), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("name", "options"),
    some([(name, {}) for name in FAMILIES], [(name, {}) for name in FEW])
    + [("resnet20", {"norm": norm}) for norm in ("static_batch", "group", "layer", "none")]
    + [("resnet20", {"scaler": True, "step_size": True}), ("transformer", {"scaler": True, "step_size": True})],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value.values())),
)
def test_torch__many_models_train_at_once(name, options):
    """vmap over a stack of states: gradients and new running statistics are those of one model after the other."""
    spec = small(name, **options)
    models = [spec.build(torch.Generator().manual_seed(seed)).double() for seed in range(3)]
    x = torch.stack([inputs(spec, 4, seed) for seed in range(3)])
    x = x if spec.tokens else x.double()
    parameters, buffers = stack_module_state(models)
    skeleton = spec.build(device="meta")

    def loss(parameters, buffers, x):
        return loss_of(functional_call(skeleton, (parameters, buffers), (x,))), buffers

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        losses, buffers = vmap(loss)(parameters, buffers, x)
        losses.sum().backward()
    for k, model in enumerate(models):
        assert_equal({n: p.grad[k] for n, p in parameters.items() if p.grad is not None}, gradients(model, x[k]))
        assert_equal({n: t[k] for n, t in buffers.items()}, dict(model.named_buffers()))
        torch.testing.assert_close(losses[k], loss_of(copy.deepcopy(model)(x[k])))


@pytest.mark.parametrize("name", ["vgg11", "transformer", "efficientnetv2_cifar", "mobilenetv2"])
def test_torch__many_models_drop_different_units(name):
    spec = small(name, dropout=0.5)
    models = [spec.build(torch.Generator().manual_seed(0)) for _ in range(3)]
    parameters, buffers = stack_module_state(models)
    x = inputs(spec, 4)
    run = vmap(lambda p, b: functional_call(models[0], (p, b), (x,)), randomness="different")
    out = run(parameters, buffers)
    assert out.isfinite().all()
    assert not torch.allclose(out[0], out[1])


@in_modes(FAMILIES)
def test_torch__symbolic_trace(name, training):
    spec, model = build(name, **able(name, step_size=True))
    graph = torch.fx.symbolic_trace(copy.deepcopy(model).train(training))
    x = inputs(spec, 4)  # another batch than the one that it was built with
    torch.testing.assert_close(graph(x), model.train(training)(x))


@pytest.mark.slow
@pytest.mark.parametrize("name", some(FAMILIES, ["resnet20", "mobilenetv2"]))
def test_torch__export(name):
    spec, model = build(name)
    x = inputs(spec, 4)
    program = torch.export.export(model.eval(), (x,), strict=False)
    torch.testing.assert_close(program.module()(x), model(x))


@pytest.mark.parametrize("name", some(["cnn", "resnet18", "transformer"], ["cnn", "transformer"]))
def test_torch__export_with_any_batch_size(name):
    spec, model = build(name)
    dynamic = ({0: torch.export.Dim("batch", min=2)},)
    program = torch.export.export(model.eval(), (inputs(spec, 4),), dynamic_shapes=dynamic, strict=False)
    x = inputs(spec, 7)
    torch.testing.assert_close(program.module()(x), model(x))


@in_modes(FAMILIES)
def test_torch__the_meta_device(name, training):
    spec = small(name)
    model, real = spec.build(device="meta"), spec.build()
    assert model.training
    out = model.train(training)(spec.example(3, device="meta"))
    assert out.is_meta
    assert out.shape == real.train(training)(inputs(spec, 3)).shape
    shapes = [{k: (t.shape, t.dtype) for k, t in one.state_dict().items()} for one in (model, real)]
    assert shapes[0] == shapes[1]


@every_family
def test_torch__float64(name):
    spec, model = build(name)
    x = inputs(spec)
    double = copy.deepcopy(model).double()
    out = double(x if spec.tokens else x.double())
    assert out.dtype == torch.float64
    torch.testing.assert_close(out.float(), model(x), atol=1e-4, rtol=1e-4)


def test_torch__models_are_sequences_of_named_parts():
    _, model = build("preresnet20")
    names = [name for name, _ in model.named_children()]
    assert names == ["stem", "section1", "section2", "section3", "tail", "pool", "head"]
    x = torch.randn(2, 3, 16, 16)
    torch.testing.assert_close(model[3:](model[:3](x)), model(x))

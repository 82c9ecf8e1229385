"""Weights of torchvision and timm: loaded here they give the same outputs, and they go back."""

import copy
from functools import partial
from itertools import product

import pytest
import timm
import torch
import torchvision
from selection import some
from torch import nn

import zoo
from zoo import load, to_torchvision
from zoo.weights import counterparts

TORCHVISION, TIMM = counterparts("torchvision"), counterparts("timm")

NAMES = ("resnet18", "resnet34", "resnet50", "mobilenetv2", "efficientnetv2_s")
CLASSES = 7


def randomise(model):
    """Batch norms that do something, and nothing that starts at zero."""
    generator = torch.Generator().manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.running_mean, 0, 0.1, generator=generator)
            nn.init.uniform_(module.running_var, 0.5, 1.5, generator=generator)
            nn.init.uniform_(module.weight, 0.5, 1.5, generator=generator)
            nn.init.normal_(module.bias, 0, 0.1, generator=generator)
        elif isinstance(module, nn.Linear | nn.Conv2d):
            nn.init.normal_(module.weight, 0, (2 / module.weight[0].numel()) ** 0.5, generator=generator)
    return model


def images(count, size, dtype=torch.float32):
    return torch.randn(count, 3, size, size, generator=torch.Generator().manual_seed(1)).to(dtype)


def assert_same_logits(ours, theirs, x):
    with torch.no_grad():
        a, b = ours.eval()(x), theirs.eval()(x)
    scale = b.std()
    assert scale > 1e-3
    torch.testing.assert_close(a / scale, b / scale, atol=1e-5, rtol=1e-5)
    if len(x) > 1:
        assert ((b[0] - b[1]).abs() / scale).max() > 1e-3


def torchvision_model(name, **options):
    return randomise(torchvision.models.get_model(name, weights=None, num_classes=CLASSES, **options))


@pytest.mark.parametrize("name", some(NAMES, NAMES[::2]))
def test_torchvision_s_weights_give_torchvision_s_logits(name):
    theirs = torchvision_model(TORCHVISION[name])
    before = copy.deepcopy(theirs.state_dict())
    ours = load(zoo.create(name, num_classes=CLASSES), theirs.state_dict())
    assert_same_logits(ours, theirs, images(2, 64))
    assert all(torch.equal(before[name], tensor) for name, tensor in theirs.state_dict().items())


@pytest.mark.slow
def test_vgg16_too():
    """At 224x224: there the classifier sees the 7x7 positions that torchvision's has."""
    theirs = torchvision_model("vgg16_bn")
    assert_same_logits(load(zoo.create("vgg16", num_classes=CLASSES), theirs.state_dict()), theirs, images(1, 224))


@pytest.mark.parametrize("name", NAMES)
def test_timm_s_weights_give_timm_s_logits(name):
    theirs = randomise(timm.create_model(TIMM[name], num_classes=CLASSES))
    options = {"norm_eps": 1e-5} if name == "efficientnetv2_s" else {}
    ours = load(zoo.create(name, num_classes=CLASSES, **options), theirs.state_dict())
    assert_same_logits(ours, theirs, images(2, 64))
    if options:  # which matter
        ours = load(zoo.create(name, num_classes=CLASSES), theirs.state_dict()).eval()
        with torch.no_grad():
            a, b = ours(images(1, 64)), theirs(images(1, 64))
        assert (a - b).abs().max() > 1e-4 * b.std()


@pytest.mark.parametrize(
    "make",
    [partial(torchvision_model, "resnet18"),
     *(pytest.param(partial(torchvision_model, name), marks=pytest.mark.slow) for name in ("resnet34", "resnet50")),
     lambda: randomise(timm.create_model("resnet18", num_classes=CLASSES))],
    ids=["resnet18", "resnet34", "resnet50", "timm resnet18"],
)  # fmt: skip
def test_training_is_the_same(make):
    """Outputs, gradients by position and running statistics."""
    theirs = make().double().train()
    name = {62: "resnet18", 110: "resnet34", 161: "resnet50"}[len(list(theirs.parameters()))]
    ours = load(zoo.create(name, num_classes=CLASSES).double(), theirs.state_dict())
    x, y = images(4, 32, torch.float64), torch.arange(4)
    outputs = [model(x) for model in (ours, theirs)]
    torch.testing.assert_close(*outputs)
    for out in outputs:
        nn.functional.cross_entropy(out, y).backward()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert b.grad.norm() > 0
        torch.testing.assert_close(a.grad, b.grad)
    theirs = [b for key, b in theirs.named_buffers() if not key.endswith("num_batches_tracked")]
    for a, b in zip(ours.buffers(), theirs, strict=True):
        torch.testing.assert_close(a, b)


def test_mobilenetv2_at_the_paper_s_half_width_is_torchvision_s():
    spec = zoo.Spec("mobilenetv2", width=(0.5,) * 7 + (1,), num_classes=CLASSES)
    theirs = torchvision_model("mobilenet_v2", width_mult=0.5)
    assert spec.count(64).parameters == sum(p.numel() for p in theirs.parameters())
    assert_same_logits(load(spec.build(), theirs.state_dict()), theirs, images(2, 64))


@pytest.mark.parametrize("name", some(NAMES, ["resnet50", "mobilenetv2"]))
def test_a_state_goes_to_torchvision(name):
    ours = randomise(zoo.create(name, num_classes=CLASSES))
    state = to_torchvision(ours.state_dict())
    theirs = torchvision.models.get_model(TORCHVISION[name], weights=None, num_classes=CLASSES)
    theirs.load_state_dict(state, strict=True)
    counters = [t for name, t in theirs.state_dict().items() if name.endswith("num_batches_tracked")]
    assert {(t.ndim, t.dtype, t.item()) for t in counters} == {(0, torch.int64, 0)}
    assert_same_logits(ours, theirs, images(2, 64))
    again = load(copy.deepcopy(ours).apply(lambda m: getattr(m, "reset_parameters", int)()), state).state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in ours.state_dict().items())


@pytest.mark.parametrize(
    ("depth", "norm"), some(product(("11", "13", "16", "19"), ("batch", "none")), [("11", "batch"), ("16", "none")])
)
def test_vggs_and_the_middle_efficientnet_go_to_torchvision(depth, norm):
    """By names and shapes alone."""
    pairs = [(f"vgg{depth}", f"vgg{depth}_bn" if norm == "batch" else f"vgg{depth}", {"norm": norm})]
    pairs += [("efficientnetv2_m", "efficientnet_v2_m", {})] * (depth == "11" and norm == "batch")
    for name, theirs, options in pairs:
        state = to_torchvision(zoo.Spec(name, num_classes=CLASSES, **options).build(device="meta").state_dict())
        with torch.device("meta"):
            expected = torchvision.models.get_model(theirs, weights=None, num_classes=CLASSES).state_dict()
        assert list(state) == list(expected)
        assert all(state[key].shape == tensor.shape for key, tensor in expected.items())


def test_a_state_of_the_model_s_own_loads():
    a, b = (zoo.create("resnet20", width=0.25) for _ in range(2))
    assert load(b, a.state_dict()) is b
    assert all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values()))


def shapes_of(name, **options):
    with torch.device("meta"):
        return torchvision.models.get_model(name, weights=None, **options).state_dict()


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (lambda: shapes_of("resnet34"), r"layer1\.2\.conv1\.weight \[64, 64, 3, 3\].*section2\.0\.conv1\.weight"),
        (lambda: shapes_of("mobilenet_v2"), r"features.*stem\.conv\.weight \[64, 3, 7, 7\]"),
        (shapes_of, r"it has fc\.weight \[1000, 512\] where this ResNet has head\.weight \[5, 512\]"),
        (lambda: dict(list(shapes_of("resnet18", num_classes=5).items())[:-1]), "101 tensors.*102"),
        (lambda: shapes_of("resnet18", num_classes=5) | {"more": torch.zeros(1)}, "103 tensors.*102"),
        (lambda: {}, "0 tensors"),
        (lambda: zoo.Spec("resnet18", num_classes=6).build(device="meta").state_dict(), r"head\.weight.*\[6, 512\]"),
    ],
    ids=["deeper", "other architecture", "other classes", "one less", "one more", "empty", "own names, other shapes"],
)  # fmt: skip
def test_another_model_s_state_is_refused(state, message):
    state = state("resnet18") if state is shapes_of else state()
    with pytest.raises(zoo.ZooError, match=message):
        load(zoo.Spec("resnet18", num_classes=5).build(device="meta"), state)


@pytest.mark.parametrize(
    ("name", "options"),
    [("resnet18", option) for option in ({"width": 0.5}, {"depth": 1}, {"in_channels": 1}, {"stem": "cifar"})]
    + [("resnet18", {"norm": "group"}), ("mobilenetv2", {"width": (0.5,) * 7 + (1,)}), ("vgg16", {"image_size": 32})]
    + [(name, {}) for name in ("resnet20", "cnn", "transformer")],
)
def test_what_torchvision_has_not_does_not_go_there(name, options):
    with pytest.raises(zoo.ZooError, match="torchvision has no model with these"):
        to_torchvision(zoo.Spec(name, **options).build(device="meta").state_dict())
    with pytest.raises(zoo.ZooError, match="these 0 tensors"):
        to_torchvision({})


def reordered(state, a, b):
    """The same tensors under the same names; a and b have changed places."""
    names = list(state)
    i, j = names.index(a), names.index(b)
    names[i], names[j] = b, a
    return {name: state[name] for name in names}


def test_our_own_states_may_come_in_any_order():
    net = zoo.create("resnet18")
    state = net.state_dict()
    mixed = reordered(state, "section1.0.conv1.weight", "section1.0.conv2.weight")
    expected = to_torchvision(state)
    for given in (mixed, dict(sorted(state.items()))):
        back = to_torchvision(given)
        assert list(back) == list(expected)
        assert all(torch.equal(back[key], expected[key]) for key in back)
        assert torch.equal(load(zoo.create("resnet18"), given).stem.conv.weight, net.stem.conv.weight)


@pytest.mark.parametrize("make", [torchvision.models.resnet18, lambda: timm.create_model("resnet18")])
def test_foreign_states_may_come_in_any_order(make):
    """As from a safetensors file, if the model is one that the libraries have."""
    state = make().state_dict()
    expected = load(zoo.create("resnet18"), state).state_dict()
    for given in (dict(sorted(state.items())), reordered(state, "bn1.weight", "bn1.bias")):
        net = load(zoo.create("resnet18"), given)
        assert all(torch.equal(net.state_dict()[name], tensor) for name, tensor in expected.items())


def test_foreign_states_out_of_order_are_refused_if_the_libraries_do_not_have_the_model():
    block = torchvision.models.resnet.BasicBlock
    state = torchvision.models.ResNet(block, [1, 1, 1, 1]).state_dict()
    load(zoo.create("resnet18", depth=1), state)
    for given in (dict(sorted(state.items())), reordered(state, "bn1.weight", "bn1.bias")):
        with pytest.raises(
            zoo.ZooError, match=r"not in the order of its state_dict\(\): it has bn1\.bias \[64\] where"
        ):
            load(zoo.create("resnet18", depth=1), given)


def test_a_refused_state_leaves_the_model_as_it_was():
    net, other = zoo.create("resnet20", width=0.25), zoo.create("resnet20", width=0.25, num_classes=7)
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    with pytest.raises(zoo.ZooError, match=r"its head\.weight is \[7, 16\], this ResNet's \[10, 16\]"):
        load(net, other.state_dict())
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())


def test_static_batch_norm_takes_statistics_or_does_without():
    theirs = torchvision.models.resnet18()
    net = load(zoo.create("resnet18", norm="static_batch"), theirs.state_dict())
    assert torch.equal(net.section4[1].norm2.running_var, theirs.layer4[1].bn2.running_var)
    x = torch.randn(1, 3, 64, 64)
    torch.testing.assert_close(net.eval()(x), theirs.eval()(x), atol=1e-5, rtol=0)
    without = zoo.create("resnet18", norm="static_batch").state_dict()
    assert load(net, without).stem.norm.running_mean is None


def test_a_model_on_the_meta_device_takes_the_tensors_themselves():
    state = zoo.create("resnet20", width=0.25).state_dict()
    net = load(zoo.Spec("resnet20", width=0.25).build(device="meta"), state)
    assert torch.equal(net.head.weight, state["head.weight"])

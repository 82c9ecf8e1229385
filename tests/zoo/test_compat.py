"""Beside torchvision and timm: their weights give their outputs here, and go back."""

import copy

import pytest
import timm
import torch
import torchvision
from refusals import zoo_refused
from selection import some
from timm.models.vision_transformer import VisionTransformer as TimmViT
from torch import nn
from torchvision.models.vision_transformer import VisionTransformer

import zoo
from zoo import Spec, load, to_torchvision
from zoo.weights import counterparts

CLASSES = 7
VIT = Spec("vit_tiny", CLASSES, image_size=16, width=0.125, depth=2)  # three heads of 8 channels, 16 patches


def torchvision_vit():
    return VisionTransformer(16, 4, 2, 3, 24, 96, num_classes=CLASSES)


def unfilled(make):
    """A model on the CPU without the time that its initialisation takes: all that it holds is in its state."""
    with torch.device("meta"):
        model = make()
    assert model.state_dict().keys() >= {name for name, _ in model.named_buffers()}
    model = model.to_empty(device="cpu")
    for buffer in model.buffers():
        buffer.zero_()
    return model


def from_library(name, library="torchvision", classes=CLASSES):
    make = torchvision.models.get_model if library == "torchvision" else timm.create_model
    return make(name, num_classes=classes)


def cases():
    """(ours, theirs) by what to call them: small Vision Transformers, and all that the libraries have by name."""
    found = {
        "small torchvision vit": (VIT, torchvision_vit),
        "small timm vit": (VIT, lambda: TimmViT(16, 4, num_classes=CLASSES, embed_dim=24, depth=2, num_heads=3)),
    }
    for library in ("torchvision", "timm"):
        for ours, theirs in counterparts(library).items():
            size = {} if ours.startswith(("vit", "vgg")) else {"image_size": 64}
            eps = {"norm_eps": 1e-5} if library == "timm" and ours.startswith("efficientnet") else {}
            found[f"{library} {ours}"] = (
                Spec(ours, CLASSES, **size, **eps),
                lambda theirs=theirs, library=library: from_library(theirs, library),
            )
    return found


CASES = cases()
QUICK = [
    *(case for case in CASES if case.startswith("small")), "torchvision resnet18", "timm mobilenetv2",
]  # fmt: skip


def random(model):
    """No tensor is constant: norms, class tokens, positions and layer scales matter."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0, (2 / p[0].numel()) ** 0.5 if p.ndim in (2, 4) else 0.5, generator=generator)
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                for positive in (module.weight, module.running_var):
                    positive.uniform_(0.5, 1.5, generator=generator)
                for other in (module.bias, module.running_mean):
                    other.normal_(0, 0.1, generator=generator)
    return model.eval()


def images(count, size, dtype=torch.float32):
    """Large patches, lest the mean over positions be the same for all images."""
    x = torch.randn(count, 3, 4, 4, generator=torch.Generator().manual_seed(1), dtype=dtype)
    return nn.functional.interpolate(x, size)


def assert_equal(a, b):
    assert list(a) == list(b)
    assert all(torch.equal(a[name], tensor) for name, tensor in b.items())


@pytest.mark.parametrize("case", some(CASES, QUICK))
def test_to_torchvision__the_libraries_weights_give_their_logits_and_go_back(case):
    spec, make = CASES[case]
    theirs = random(unfilled(make))
    state = theirs.state_dict()
    before = copy.deepcopy(state)
    net = load(unfilled(spec.build), state).eval()
    x = images(2, spec.image_size)
    with torch.no_grad():
        a, b = net(x), theirs(x)
    scale = b.std()
    assert scale > 1e-3
    torch.testing.assert_close(a / scale, b / scale, atol=1e-5, rtol=1e-5)
    assert ((b[0] - b[1]).abs() / scale).max() > 1e-3
    assert_equal(state, before)
    if "torchvision" in case:
        tensors = [tensor for name, tensor in state.items() if not name.endswith("num_batches_tracked")]
        back = net.to_foreign(net.state_dict())
        assert all(torch.equal(a, b) for a, b in zip(back, tensors, strict=True))
    if not case.startswith("small"):
        # as from a safetensors file
        assert_equal(load(spec.build(device="meta"), dict(sorted(state.items()))).state_dict(), net.state_dict())
    if case.startswith("torchvision"):
        assert_equal(to_torchvision(net.state_dict()), state)


@pytest.mark.slow
def test_compat__timm_s_epsilon_matters():
    theirs = random(CASES["timm efficientnetv2_s"][1]())
    ours = load(Spec("efficientnetv2_s", CLASSES).build(), theirs.state_dict()).eval()
    with torch.no_grad():
        a, b = ours(images(1, 64)), theirs(images(1, 64))
    assert (a - b).abs().max() > 1e-4 * b.std()


@pytest.mark.parametrize(
    "case",
    some(
        [f"torchvision resnet{depth}" for depth in (18, 34, 50)] + ["timm resnet18", "small torchvision vit"],
        ["torchvision resnet18", "small torchvision vit"],
    ),
)
def test_compat__training_is_the_same(case):
    """Outputs, gradients and running statistics."""
    spec, make = CASES[case]
    theirs = random(make()).double()
    ours = load(spec.build().double(), theirs.state_dict())
    x = images(4, 32 if "resnet" in case else spec.image_size, torch.float64)
    train = "resnet" in case  # the others drop blocks at random
    outputs = [model.train(train)(x) for model in (ours, theirs)]
    torch.testing.assert_close(*outputs)
    for out in outputs:
        nn.functional.cross_entropy(out, torch.arange(4)).backward()
    gradients = ours.to_foreign({name: p.grad for name, p in ours.named_parameters()})
    for a, b in zip(gradients, theirs.parameters(), strict=True):
        assert b.grad.norm() > 0
        torch.testing.assert_close(a, b.grad)
    statistics = [b for key, b in theirs.named_buffers() if not key.endswith("num_batches_tracked")]
    for a, b in zip(ours.buffers(), statistics, strict=True):
        torch.testing.assert_close(a, b)


def test_compat__mobilenetv2_at_the_paper_s_half_width_is_torchvision_s():
    spec = Spec("mobilenetv2", CLASSES, width=(0.5,) * 7 + (1,))
    theirs = random(torchvision.models.mobilenet_v2(num_classes=CLASSES, width_mult=0.5))
    assert spec.count(64).parameters == sum(p.numel() for p in theirs.parameters())
    torch.testing.assert_close(load(spec.build(), theirs.state_dict()).eval()(images(2, 64)), theirs(images(2, 64)))


NAMES = [(name, theirs, {}) for name, theirs in counterparts("torchvision").items()]
NAMES += [(name, theirs, {"norm": "none"}) for name, theirs in counterparts("torchvision_plain").items()]
FEW = [case for case in NAMES if case[1] in ("vgg11_bn", "vit_b_16")]


@pytest.mark.parametrize(("name", "theirs", "options"), some(NAMES, FEW))
def test_to_torchvision__models_go_to_torchvision_by_names_and_shapes_alone(name, theirs, options):
    with torch.device("meta"):
        expected = from_library(theirs).state_dict()
    state = to_torchvision(Spec(name, CLASSES, **options).build(device="meta").state_dict())
    assert list(state) == list(expected)
    assert all(state[key].shape == tensor.shape for key, tensor in expected.items())


def test_to_torchvision__counters_of_steps_go_to_torchvision_as_zeros():
    state = to_torchvision(Spec("resnet18").build(device="meta").state_dict())
    counters = [t for name, t in state.items() if name.endswith("num_batches_tracked")]
    assert len(counters) == 20
    assert {(t.ndim, t.dtype, t.item()) for t in counters} == {(0, torch.int64, 0)}


def shapes_of(make, **options):
    with torch.device("meta"):
        return make(**options).state_dict()


RESNET = Spec("resnet18", num_classes=5)


@pytest.mark.parametrize(
    ("spec", "state", "expected"),
    [
        (RESNET, lambda: shapes_of(torchvision.models.resnet34),
         "mismatch: layer1.2.conv1.weight"),
        (RESNET, lambda: shapes_of(torchvision.models.mobilenet_v2), "mismatch: stem.conv.weight"),
        (RESNET, lambda: shapes_of(torchvision.models.resnet18),
         "mismatch: fc.weight"),
        (RESNET, lambda: dict(list(shapes_of(torchvision.models.resnet18, num_classes=5).items())[:-1]),
         "mismatch"),
        (RESNET, lambda: shapes_of(torchvision.models.resnet18, num_classes=5) | {"more": torch.zeros(1)},
         "mismatch"),
        (RESNET, lambda: {}, "mismatch"),
        (RESNET, lambda: Spec("resnet18", 6).build(device="meta").state_dict(), "mismatch: head.weight"),
        (VIT, lambda: shapes_of(lambda: VisionTransformer(16, 4, 2, 3, 24, 96, num_classes=5)),
         "mismatch: heads.head.weight"),
        (VIT, lambda: dict(list(shapes_of(torchvision_vit).items())[:-1]), "mismatch"),
        (VIT, lambda: shapes_of(torchvision.models.resnet18), "mismatch: stem.class_token"),
    ],
    ids=["deeper", "other architecture", "other classes", "one less", "one more", "empty", "own names, other shapes",
         "a vit of other classes", "a vit, one less", "a resnet for a vit"],
)  # fmt: skip
def test_compat__another_model_s_state_is_refused(spec, state, expected):
    with zoo_refused(expected):
        load(spec.build(device="meta"), state())


@pytest.mark.parametrize(
    ("name", "options"),
    [("resnet18", option) for option in ({"width": 0.5}, {"depth": 1}, {"in_channels": 1}, {"stem": "cifar"})]
    + [("resnet18", {"norm": "group"}), ("mobilenetv2", {"width": (0.5,) * 7 + (1,)}), ("vgg16", {"image_size": 32})]
    + [(name, {}) for name in ("resnet20", "cnn", "transformer")],
)
def test_to_torchvision__what_torchvision_has_not_does_not_go_there(name, options):
    with zoo_refused("mismatch"):
        to_torchvision(Spec(name, CLASSES, **options).build(device="meta").state_dict())


def test_to_torchvision__no_tensors_are_no_model():
    with zoo_refused("mismatch"):
        to_torchvision({})


def reordered(state, a, b):
    """The same tensors under the same names; a and b have changed places."""
    names = list(state)
    i, j = names.index(a), names.index(b)
    names[i], names[j] = b, a
    return {name: state[name] for name in names}


def test_to_torchvision__our_own_states_may_come_in_any_order():
    net = zoo.create("resnet18")
    state = net.state_dict()
    mixed = reordered(state, "section1.0.conv1.weight", "section1.0.conv2.weight")
    for given in (mixed, dict(sorted(state.items()))):
        assert_equal(to_torchvision(given), to_torchvision(state))
        other = zoo.create("resnet18")
        assert load(other, given) is other
        assert_equal(other.state_dict(), state)


@pytest.mark.parametrize("library", ["torchvision", "timm"])
def test_compat__foreign_states_may_come_in_any_order(library):
    state = from_library("resnet18", library).state_dict()
    net = Spec("resnet18", CLASSES).build()
    expected = copy.deepcopy(load(net, state).state_dict())
    assert_equal(load(net, reordered(state, "bn1.weight", "bn1.bias")).state_dict(), expected)


def test_compat__foreign_states_out_of_order_are_refused_if_the_libraries_do_not_have_the_model():
    block = torchvision.models.resnet.BasicBlock
    state = torchvision.models.ResNet(block, [1, 1, 1, 1]).state_dict()
    load(zoo.create("resnet18", depth=1), state)
    for given in (dict(sorted(state.items())), reordered(state, "bn1.weight", "bn1.bias")):
        with zoo_refused("mismatch: bn1.bias"):
            load(zoo.create("resnet18", depth=1), given)


def test_compat__a_refused_state_leaves_the_model_as_it_was():
    net, other = zoo.create("resnet20", width=0.25), zoo.create("resnet20", width=0.25, num_classes=7)
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    with zoo_refused("mismatch: head.weight"):
        load(net, other.state_dict())
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())


def test_compat__static_batch_norm_takes_statistics_or_does_without():
    theirs = torchvision.models.resnet18()
    net = load(zoo.create("resnet18", norm="static_batch"), theirs.state_dict())
    assert torch.equal(net.section4[1].norm2.running_var, theirs.layer4[1].bn2.running_var)
    x = torch.randn(1, 3, 64, 64)
    torch.testing.assert_close(net.eval()(x), theirs.eval()(x), atol=1e-5, rtol=0)
    without = zoo.create("resnet18", norm="static_batch").state_dict()
    assert load(net, without).stem.norm.running_mean is None


def test_compat__a_model_on_the_meta_device_takes_the_tensors_themselves():
    state = zoo.create("resnet20", width=0.25).state_dict()
    net = load(zoo.Spec("resnet20", width=0.25).build(device="meta"), state)
    assert torch.equal(net.head.weight, state["head.weight"])

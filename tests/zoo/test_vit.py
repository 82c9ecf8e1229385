"""The Vision Transformer and ConvNeXt: beside torchvision's and timm's, weights both ways, what they refuse."""

import pytest
import timm
import torch
import torchvision
from timm.models.convnext import ConvNeXt as TimmConvNeXt
from timm.models.vision_transformer import VisionTransformer as TimmViT
from torch import nn
from torchvision.models.convnext import CNBlockConfig, ConvNeXt
from torchvision.models.vision_transformer import VisionTransformer

import zoo
from zoo import Spec, ZooError

CLASSES = 7
NARROW = (8, 12, 16, 20)  # channels of a ConvNeXt's sections
RATES = tuple(a / b for a, b in zip(NARROW, (96, 192, 384, 768)))
CONVNEXT = Spec("convnext_tiny", CLASSES, stem="imagenet", image_size=64, width=RATES, depth=(1, 2, 1, 1))
VIT = Spec("vit_tiny", CLASSES, image_size=16, width=0.125, depth=2)  # three heads of 8 channels, 16 patches


def random(model):
    """No tensor is constant: class tokens, positions and layer scales matter."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(0, p[0].numel() ** -0.5 if p.ndim in (2, 4) else 0.5, generator=generator)
    return model.eval()


def torchvision_vit():
    return random(VisionTransformer(16, 4, 2, 3, 24, 96, num_classes=CLASSES))


def torchvision_convnext():
    after = (*NARROW[1:], None)
    sections = [CNBlockConfig(a, b, depth) for a, b, depth in zip(NARROW, after, CONVNEXT.depth)]
    return random(ConvNeXt(sections, num_classes=CLASSES))


SMALL = {
    "torchvision vit": (VIT, torchvision_vit),
    "timm vit": (VIT, lambda: random(TimmViT(16, 4, num_classes=CLASSES, embed_dim=24, depth=2, num_heads=3))),
    "torchvision convnext": (CONVNEXT, torchvision_convnext),
    "timm convnext": (
        CONVNEXT,
        lambda: random(TimmConvNeXt(num_classes=CLASSES, depths=CONVNEXT.depth, dims=NARROW)),
    ),
}


def assert_same_logits(ours, theirs, size):
    x = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(1))
    x = nn.functional.interpolate(x, size)  # large patches, lest the mean over positions be the same for all images
    with torch.no_grad():
        a, b = ours.eval()(x), theirs(x)
    torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
    assert (b[0] - b[1]).abs().max() > 1e-2


@pytest.mark.parametrize("case", SMALL)
def test_the_libraries_weights_give_their_logits(case):
    spec, make = SMALL[case]
    theirs = make()
    assert_same_logits(zoo.load(spec.build(), theirs.state_dict()), theirs, spec.image_size)


@pytest.mark.parametrize("case", ["torchvision vit", "torchvision convnext"])
def test_gradients_are_the_library_s(case):
    """By the sum of squares over all weights: q, k and v are apart in one and together in the other."""
    spec, make = SMALL[case]
    theirs = make().double()
    ours = zoo.load(spec.build().double(), theirs.state_dict()).eval()
    x = torch.randn(2, 3, spec.image_size, spec.image_size, dtype=torch.float64)
    norms = []
    for model in (ours, theirs):
        model(x).square().sum().backward()
        norms.append(sum(p.grad.square().sum() for p in model.parameters()))
    torch.testing.assert_close(*norms)


@pytest.mark.parametrize("case", ["torchvision vit", "torchvision convnext"])
def test_to_foreign_undoes_from_foreign(case):
    spec, make = SMALL[case]
    state = make().state_dict()
    ours = zoo.load(spec.build(), state)
    back = ours.to_foreign(ours.state_dict())
    assert len(back) == len(state)
    assert all(torch.equal(a, b) for a, b in zip(back, state.values()))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ours", "make"),
    [
        ("vit_base", lambda: torchvision.models.vit_b_16(num_classes=CLASSES)),
        *((f"convnext_{size}", lambda size=size: torchvision.models.get_model(f"convnext_{size}", num_classes=CLASSES))
          for size in ("tiny", "small", "base")),
        *((f"vit_{size}", lambda size=size: timm.create_model(f"vit_{size}_patch16_224", num_classes=CLASSES))
          for size in ("tiny", "small", "base")),
        *((f"convnext_{size}", lambda size=size: timm.create_model(f"convnext_{size}", num_classes=CLASSES))
          for size in ("tiny", "small", "base")),
    ],
)  # fmt: skip
def test_at_full_size_too_and_back(ours, make):
    """And from a state in another order, as safetensors files have it."""
    theirs = random(make())
    state = theirs.state_dict()
    net = zoo.load(zoo.create(ours, num_classes=CLASSES), state)
    assert_same_logits(net, theirs, 224)
    again = zoo.load(zoo.create(ours, num_classes=CLASSES), dict(sorted(state.items())))
    assert all(torch.equal(a, b) for a, b in zip(net.state_dict().values(), again.state_dict().values()))
    if type(theirs).__module__.startswith("torchvision"):
        back = zoo.to_torchvision(net.state_dict())
        assert list(back) == list(state)
        assert all(torch.equal(back[name], tensor) for name, tensor in state.items())


@pytest.mark.parametrize("name", ["vit_tiny", "vit_small", "vit_base", "convnext_small", "convnext_base"])
def test_parameters_are_timm_s(name):
    options = {"depth": 1, "stem": "imagenet", "image_size": 64}
    with torch.device("meta"):
        if name.startswith("vit"):
            theirs = timm.create_model(f"{name}_patch16_224", img_size=64, depth=1)
        else:
            theirs = timm.create_model(name, depths=(1, 1, 1, 1))
    assert Spec(name, **options).count().parameters == sum(p.numel() for p in theirs.parameters())


@pytest.mark.parametrize(
    ("name", "millions", "gmacs"), [("vit_tiny", 5.72, 1.26), ("vit_small", 22.05, 4.61), ("vit_base", 86.57, 17.58)]
)
def test_counts_are_those_that_timm_publishes(name, millions, gmacs):
    """results-imagenet.csv and its benchmarks; DeiT's table 1 has 5M, 22M and 86M parameters.

    timm's multiply-accumulates count biases, norms and activations, too.
    """
    count = Spec(name).count()
    assert count.parameters / 1e6 == pytest.approx(millions, abs=5e-3)
    assert count.macs / 1e9 == pytest.approx(gmacs, rel=0.01)


def test_macs_by_hand():
    """Three blocks of 65 tokens: matrices of 96 channels, and attention."""
    square = 65 * (12 * 96**2) + 2 * 65**2 * 96
    assert Spec("vit_tiny", 10, image_size=32, width=0.5, depth=3).count().macs == 64 * 48 * 96 + 3 * square + 96 * 10


def test_images_choose_the_stem():
    assert [Spec("vit_tiny", image_size=s).stem for s in (32, 64, 96)] == ["cifar", "cifar", "imagenet"]
    assert Spec("convnext_tiny").stem == "imagenet"
    assert Spec("vit_tiny", image_size=32, stem="imagenet").build(device="meta").stem.conv.kernel_size == (16, 16)
    assert Spec("vit_tiny", image_size=32).build(device="meta").stem.position.shape == (1, 65, 192)
    stem = Spec("convnext_tiny", image_size=32).build(device="meta").stem
    assert stem(torch.zeros(1, 3, 32, 32, device="meta")).shape[-2:] == (32, 32)


def test_heads_are_free_and_narrow_models_keep_them():
    net = Spec("vit_tiny", image_size=32, heads=6, depth=1, width=0.5).build(device="meta")
    attention = net.section1[0].attention
    assert (attention.heads, attention.q.out_features) == (6, 96)
    wide, narrow = (Spec("vit_tiny", image_size=32, heads=h, depth=1).build() for h in (3, 6))
    narrow.load_state_dict(wide.state_dict())
    x = torch.randn(2, 3, 32, 32)
    assert not torch.allclose(wide(x), narrow(x), atol=1e-4)  # the same shapes, another model


def test_layer_scale_begins_where_it_is_told_or_is_left_out():
    for start in (1e-6, 0.5, 1):
        net = Spec("convnext_tiny", image_size=32, width=0.1, layer_scale=start, depth=1).build()
        assert net.section2[0].scale.weight.unique().item() == pytest.approx(start)
    net = Spec("convnext_tiny", image_size=32, width=0.1, layer_scale=0, depth=1).build()
    assert not [name for name in net.state_dict() if "scale" in name]


@pytest.mark.parametrize("name", ["vit_tiny", "convnext_tiny"])
def test_stochastic_depth_grows_to_the_last_block(name):
    net = Spec(name, image_size=32, width=0.1, depth=2, drop_path=0.5).build(device="meta")
    rates = [getattr(m.drop, "p", 0.0) for m in net.modules() if type(m).__name__ == "Residual"]
    blocks = 8 if name == "convnext_tiny" else 2
    expected = [0.5 * i / (blocks - 1) for i in range(blocks)]
    assert rates == pytest.approx(expected if blocks == 8 else [rate for rate in expected for _ in (1, 2)])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "vit_tiny", "image_size": 30}, "side must be a multiple of 4, got 30"),
        ({"name": "vit_tiny", "image_size": 100}, "multiple of 16, got 100: .* stem='cifar', whose patches have 4x4"),
        ({"name": "vit_tiny", "heads": 5}, "192 channels at full width, which 5 heads cannot share"),
        ({"name": "vit_tiny", "norm": "batch"}, "vit_tiny takes no norm"),
        ({"name": "vit_tiny", "layer_scale": 0.1}, "vit_tiny takes no layer_scale"),
        ({"name": "resnet20", "heads": 2}, "resnet20 takes no heads"),
        ({"name": "convnext_tiny", "image_size": 7}, "stem='cifar' needs images of 8x8 or larger, got 7x7"),
        ({"name": "convnext_tiny", "image_size": 31, "stem": "imagenet"}, "needs images of 32x32 or larger"),
        ({"name": "convnext_tiny", "layer_scale": 1.1}, "layer_scale must be"),
    ],
)
def test_what_cannot_be_built_is_said(options, message):
    with pytest.raises(ZooError, match=message):
        Spec(**options).build(device="meta")


def test_images_of_another_size_are_refused():
    with pytest.raises(AssertionError, match="the model's 16 patches"):
        VIT.build()(torch.zeros(1, 3, 20, 20))


def test_another_model_s_state_is_refused():
    state = torchvision_vit().state_dict()
    other = VisionTransformer(16, 4, 2, 3, 24, 96, num_classes=5).state_dict()
    for given, message in (
        (other, r"heads\.head\.weight \[5, 24\] where this VisionTransformer has head\.weight \[7, 24\]"),
        (dict(list(state.items())[:-1]), "tensors"),
        (torchvision_convnext().state_dict(), "has stem.class_token"),
    ):
        with pytest.raises(ZooError, match=message):
            zoo.load(VIT.build(), given)

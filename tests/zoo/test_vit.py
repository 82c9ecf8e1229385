"""What the Vision Transformer and ConvNeXt have that other families have not."""

import pytest
import torch

from zoo import Spec


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


def test_images_of_another_size_are_refused():
    with pytest.raises(AssertionError, match="the model's 16 patches"):
        Spec("vit_tiny", image_size=16, width=0.125, depth=2).build()(torch.zeros(1, 3, 20, 20))

"""What the Vision Transformer has that other families have not."""

import pytest
import torch

from zoo import Spec


def test_vit__images_choose_the_stem():
    assert [Spec("vit_tiny", image_size=s).stem for s in (32, 64, 96)] == ["cifar", "cifar", "imagenet"]
    assert Spec("vit_tiny", image_size=32, stem="imagenet").build(device="meta").stem.conv.kernel_size == (16, 16)
    assert Spec("vit_tiny", image_size=32).build(device="meta").stem.position.shape == (1, 65, 192)


def test_vit__heads_are_free_and_narrow_models_keep_them():
    net = Spec("vit_tiny", image_size=32, heads=6, depth=1, width=0.5).build(device="meta")
    attention = net.section1[0].attention
    assert (attention.heads, attention.q.out_features) == (6, 96)
    wide, narrow = (Spec("vit_tiny", image_size=32, heads=h, depth=1).build() for h in (3, 6))
    narrow.load_state_dict(wide.state_dict())
    x = torch.randn(2, 3, 32, 32)
    assert not torch.allclose(wide(x), narrow(x), atol=1e-4)  # the same shapes, another model


def test_vit__stochastic_depth_grows_to_the_last_block():
    net = Spec("vit_tiny", image_size=32, width=0.1, depth=3, drop_path=0.5).build(device="meta")
    rates = [getattr(m.drop, "p", 0.0) for m in net.modules() if type(m).__name__ == "Residual"]
    assert rates == [0, 0, 0.25, 0.25, 0.5, 0.5]  # of attention and perceptron


def test_vit__images_of_another_size_are_refused():
    with pytest.raises(AssertionError, match="the model's 16 patches"):
        Spec("vit_tiny", image_size=16, width=0.125, depth=2).build()(torch.zeros(1, 3, 20, 20))

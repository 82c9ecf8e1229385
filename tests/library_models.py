"""A dozen small models each of timm, torchvision and transformers, for the tests of symmetries."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from symmetric import image
from torch import nn

import surgery

Make = Callable[[], tuple[nn.Module, Any]]


def library_model(name: str) -> tuple[nn.Module, Any]:
    """The model of a name of `LIBRARY_MODELS` in float64 and evaluation mode, and an input for it.

    Its weights are random, those of norms as well, which all begin alike.
    """
    torch.manual_seed(0)
    net, example = LIBRARY_MODELS[name]()
    net = net.double().eval()
    for tensor in surgery.state(net).values():
        if tensor.is_floating_point():
            tensor += 0.05 * torch.rand_like(tensor)
    return net, example


def _of(make: Callable[..., nn.Module], *args: Any, size: int = 64, **kwargs: Any) -> Make:
    """A model that takes square images."""
    return lambda: (make(*args, num_classes=7, **kwargs), image((2, 3, size, size)))


def _timm() -> dict[str, Make]:
    def named(name: str, size: int = 64, **options: Any) -> Make:
        def build(**more: Any) -> nn.Module:
            import timm

            return timm.create_model(name, **options, **more)

        return _of(build, size=size)

    def mixer(**options: Any) -> nn.Module:
        from timm.models.mlp_mixer import MlpMixer

        return MlpMixer(img_size=64, num_blocks=2, embed_dim=24, **options)

    def xcit(**options: Any) -> nn.Module:
        from timm.models.xcit import Xcit

        return Xcit(img_size=32, patch_size=8, embed_dim=24, depth=2, num_heads=3, **options)

    windows = {"img_size": 32, "patch_size": 2, "window_size": 4, "embed_dim": 16, "depths": (2, 2)}
    return {
        "byobnet": named("test_byobnet"),
        "convnext": named("convnext_atto", depths=(1, 1, 1, 1), dims=(8, 12, 16, 20)),
        "convnext, batch norm": named("test_convnext"),
        "efficientnet": named("test_efficientnet"),
        "efficientnet, group norm": named("test_efficientnet_gn"),
        "mambaout": named("test_mambaout"),
        "mixer": _of(mixer),
        "nfnet": named("test_nfnet"),
        "resnet": named("resnet18", channels=(8, 12, 16, 20)),
        "swin": named("swin_tiny_patch4_window7_224", 32, **windows, num_heads=(2, 4)),
        "vit": named("vit_tiny_patch16_224", embed_dim=24, depth=2, num_heads=3, img_size=64),
        "xcit": _of(xcit, size=32),
    }


def _torchvision() -> dict[str, Make]:
    def classes(name: str, *args: Any, size: int = 64, **options: Any) -> Make:
        def build(**more: Any) -> nn.Module:
            import torchvision

            return getattr(torchvision.models, name)(*args, **options, **more)

        return _of(build, size=size)

    def of_blocks(name: str, room: str, blocks: Callable[[Any], list], **options: Any) -> Make:
        def build(**more: Any) -> nn.Module:
            import torchvision

            models = torchvision.models
            return getattr(models, name)(blocks(getattr(models, room)), **options, **more)

        return _of(build)

    def regnet(**options: Any) -> nn.Module:
        from torchvision.models.regnet import BlockParams, RegNet

        return RegNet(BlockParams([1, 2], [16, 24], [8, 8], [1, 1], [2, 2], 0.25), stem_width=8, **options)

    def swin2(**options: Any) -> nn.Module:
        from torchvision.models import swin_transformer as room

        blocks = {"block": room.SwinTransformerBlockV2, "downsample_layer": room.PatchMergingV2}
        return room.SwinTransformer([2, 2], 16, [2, 2], [2, 4], [2, 2], **blocks, **options)

    return {
        "convnext": of_blocks(
            "ConvNeXt", "convnext", lambda room: [room.CNBlockConfig(8, 12, 1), room.CNBlockConfig(12, None, 1)]
        ),
        "densenet": classes("DenseNet", 6, (2, 2), 8),
        "efficientnet": of_blocks(
            "EfficientNet",
            "efficientnet",
            lambda room: [room.MBConvConfig(2, 3, 1, 8, 8, 2, 1, 1), room.FusedMBConvConfig(2, 3, 2, 8, 12, 2)],
            dropout=0.1,
        ),
        "mobilenet_v2": classes("mobilenet_v2", width_mult=0.1),
        "mnasnet": classes("MNASNet", 0.1),
        "mobilenet_v3": of_blocks(
            "MobileNetV3",
            "mobilenetv3",
            lambda room: [
                room.InvertedResidualConfig(8, 3, 16, 8, True, "RE", 2, 1, 1),
                room.InvertedResidualConfig(8, 3, 24, 8, True, "HS", 1, 1, 1),
            ],
            last_channel=16,
        ),
        "regnet": _of(regnet),
        "shufflenet": classes("shufflenet_v2_x0_5"),
        "squeezenet": classes("squeezenet1_1"),
        "swin": classes("SwinTransformer", [2, 2], 16, [2, 2], [2, 4], [2, 2], size=32),
        "swin2": _of(swin2, size=32),
        "vit": classes("VisionTransformer", 32, 8, 2, 2, 16, 24, size=32),
    }


def _transformers() -> dict[str, Make]:
    def build(name: str) -> tuple[nn.Module, Any]:
        from benchmarks.models import case

        found = case(f"huggingface:{name}")
        net = found.build()
        example = found.example(net)
        return net, {n: t.double() if t.is_floating_point() else t for n, t in example.items()}

    names = """bert_masked albert_classifier deberta_v2_classifier gpt2_causal neox_rotary_25 llama_grouped gemma_causal
        t5_generation swin_classifier whisper_generation clip_base wav2vec2_ctc mamba_causal"""
    return {name: partial(build, name) for name in names.split()}


LIBRARY_MODELS: dict[str, Make] = {
    f"{library}:{name}": make
    for library, made in (("timm", _timm()), ("torchvision", _torchvision()), ("transformers", _transformers()))
    for name, make in made.items()
}

"""Small models of every family, and inputs for them."""

import torch

from zoo import Spec

FAMILIES = [
    "cnn", "lenet", "resnet18", "resnet50", "resnet20", "preresnet20", "resnet20_fedmr", "mobilenetv2",
    "efficientnetv2_cifar", "vgg11", "convnext_tiny", "vit_tiny", "transformer", "transformer_masked",
]  # fmt: skip


def small(name, **options):
    """A tenth of the width, all blocks."""
    if name.startswith("transformer"):
        return Spec(name, **{"num_classes": 11, "tokens": 6, "width": 0.1, **options})
    size = {"image_size": 32} if name.startswith(("vgg", "vit", "convnext")) else {}
    return Spec(name, **{"num_classes": 5, "width": 0.1, **size, **options})


def quiet(name, **options):
    """One block a section and no dropout; two blocks where there is one section."""
    member = Spec(name).member
    off = {field: 0.0 for field in ("dropout", "drop_path") if field in member.defaults}
    if name.startswith("transformer"):
        return Spec(name, **{"num_classes": 11, "tokens": 6, "width": 0.25, "depth": 2, **off, **options})
    depth = (2,) if name.startswith("vit") else (1,) * len(member.depth) or None
    return Spec(name, **{"num_classes": 5, "image_size": 32, "width": 0.25, "depth": depth, **off, **options})


def inputs(spec, batch=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = spec.example(batch).shape
    return torch.randint(11, shape, generator=generator) if spec.tokens else torch.randn(shape, generator=generator)

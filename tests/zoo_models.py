"""One table of families: small models of each, what they take, and inputs for them."""

import torch

from zoo import Spec

FAMILIES = [
    "cnn", "lenet", "resnet18", "resnet50", "resnet20", "preresnet20", "resnet20_fedmr", "mobilenetv2",
    "efficientnetv2_cifar", "vgg11", "convnext_tiny", "vit_tiny", "transformer", "transformer_masked",
]  # fmt: skip


def takes(field):
    """The families that take a field of a spec."""
    return [name for name in FAMILIES if field in Spec(name).member.defaults]


def able(name, **options):
    """Those of the options that a family takes."""
    return {field: value for field, value in options.items() if field in Spec(name).member.defaults}


def shapes(name):
    """Few classes, and small inputs."""
    return {"num_classes": 11, "tokens": 6} if name.startswith("transformer") else {"num_classes": 5, "image_size": 32}


def small(name, **options):
    """A tenth of the width, all blocks."""
    given = shapes(name)
    if not name.startswith(("vgg", "vit", "convnext")):
        given.pop("image_size", None)
    return Spec(name, **{"width": 0.1, **given, **options})


def quiet(name, **options):
    """One block a section and no dropout; two blocks where there is one section."""
    depths = Spec(name).depth
    off = able(name, dropout=0.0, drop_path=0.0)
    depth = (2,) if len(depths) == 1 else (1,) * len(depths) or None
    return Spec(name, **{"width": 0.25, "depth": depth, **shapes(name), **off, **options})


def inputs(spec, batch=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = spec.example(batch).shape
    return torch.randint(11, shape, generator=generator) if spec.tokens else torch.randn(shape, generator=generator)

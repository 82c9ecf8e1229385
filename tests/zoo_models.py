"""One table of families: small models of each, what they take, and inputs for them."""

import torch

from zoo import Spec

FAMILIES = {
    "cnn": (28, 0.3), "lenet": (32, 0.5), "resnet18": (64, 0.2), "resnet50": (64, 0.1), "resnet20": (16, 0.5),
    "preresnet20": (16, 0.5), "resnet20_fedmr": (16, 0.5), "mobilenetv2": (64, 0.3), "efficientnetv2_cifar": (16, 0.3),
    "vgg11": (32, 0.1), "vit_tiny": (8, 0.2), "transformer": (6, 0.3),
    "transformer_masked": (6, 0.3),
}  # fmt: skip
"""The side of images or the number of tokens, and the width, of a small model of each."""
IMAGES = [name for name in FAMILIES if not name.startswith("transformer")]


def takes(field):
    """The families that take a field of a spec."""
    return [name for name in FAMILIES if field in Spec(name).architecture.defaults]


def able(name, **options):
    """Those of the options that a family takes."""
    return {field: value for field, value in options.items() if field in Spec(name).architecture.defaults}


def shapes(name):
    """Few classes, and small inputs."""
    return {"num_classes": 11, "tokens": 6} if name.startswith("transformer") else {"num_classes": 5, "image_size": 32}


def small(name, **options):
    """A tenth of the width, all blocks."""
    given = shapes(name)
    if not name.startswith(("vgg", "vit")):
        given.pop("image_size", None)
    return Spec(name, **{"width": 0.1, **given, **options})


def quiet(name, **options):
    """One block a section and no dropout; two blocks where there is one section."""
    depths = Spec(name).depth
    off = able(name, dropout=0.0, drop_path=0.0)
    depth = (2,) if len(depths) == 1 else (1,) * len(depths) or None
    return Spec(name, **{"width": 0.25, "depth": depth, **shapes(name), **off, **options})


def sized(name):
    """The size and the width of FAMILIES as fields of a spec."""
    size, width = FAMILIES[name]
    return {"image_size" if name in IMAGES else "tokens": size, "width": width}


def inputs(spec, batch=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = spec.example(batch).shape
    return torch.randint(11, shape, generator=generator) if spec.tokens else torch.randn(shape, generator=generator)

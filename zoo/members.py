"""All architectures of the zoo by name."""

import difflib

from zoo import cnn, convnext, efficientnetv2, library, mobilenetv2, resnet, transformer, vgg, vit
from zoo.errors import ZooError
from zoo.member import Member

_COMMON = {"norm_eps": 1e-5, "rounding": "ceil", "scaler": False}

MEMBERS: dict[str, Member] = {
    name: member._replace(defaults=_COMMON | dict(member.defaults))
    for family in (cnn, resnet, mobilenetv2, efficientnetv2, vgg, convnext, vit, transformer)
    for name, member in family.MEMBERS.items()
}


def names() -> list[str]:
    """The names of the architectures of the zoo, family by family.

    >>> names()[:4]
    ['cnn', 'lenet', 'resnet18', 'resnet34']
    """
    return list(MEMBERS)


def find(name: str) -> Member:
    """The architecture of that name; the ZooError for an unknown name lists similar ones."""
    if not isinstance(name, str):
        raise ZooError(f"the name of a model must be a string, got {name!r}")
    if name in MEMBERS:
        return MEMBERS[name]
    if ":" in name:
        return library.member(name)
    if near := difflib.get_close_matches(name, MEMBERS, n=3):
        raise ZooError(f"unknown model {name!r}: did you mean {' or '.join(near)}? `python -m zoo` lists all")
    raise ZooError(f"unknown model {name!r}: there are {', '.join(names())}, timm:NAME and torchvision:NAME")

"""Weights to and from torchvision and timm: the same tensors in the same order, under other names."""

from collections.abc import Mapping
from functools import lru_cache

import torch
from torch import Tensor, nn

from zoo.errors import ZooError
from zoo.norms import State

_TORCHVISION = (
    "resnet18", "resnet34", "resnet50", "mobilenet_v2", "efficientnet_v2_s", "efficientnet_v2_m",
    "vgg11_bn", "vgg13_bn", "vgg16_bn", "vgg19_bn", "vgg11", "vgg13", "vgg16", "vgg19",
)  # fmt: skip


def load(model: nn.Module, state: Mapping[str, Tensor]) -> nn.Module:
    """Load a state dict of this model, or one of the same architecture in torchvision or timm, and return the model.

    Foreign names are matched by position, if every shape agrees; step counters are left out. Resnet18/34/50,
    mobilenetv2, efficientnetv2_s/m and vgg11/13/16/19 are laid out as torchvision's, the first five also as
    timm's resnet18/34/50, mobilenetv2_100 and efficientnetv2_s (which has norm_eps=1e-5).

    Raises:
        ZooError: naming the first tensors that differ.

    >>> import torchvision
    >>> from zoo import create
    >>> theirs = torchvision.models.mobilenet_v2()
    >>> ours = load(create("mobilenetv2"), theirs.state_dict())
    >>> x = torch.randn(1, 3, 64, 64)
    >>> torch.allclose(ours.eval()(x), theirs.eval()(x), atol=1e-5)
    True
    """
    own = model.state_dict()
    if not own.keys() <= state.keys():
        state = _renamed(state, own, "the given state", type(model).__name__)
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise ZooError(" ".join(str(error).split())) from None
    return model


def to_torchvision(state: Mapping[str, Tensor]) -> State:
    """The state of a zoo model under the names of torchvision's model of the same architecture, to load there.

    Which one it is, the shapes say: resnet18/34/50, mobilenet_v2, efficientnet_v2_s/m, vgg11/13/16/19 with or without
    `_bn`, at full width and depth, with any number of classes. Step counters, which the zoo has not, are 0; the other
    tensors are those of the given state, not copies.

    Raises:
        ZooError: if torchvision has no model of these shapes.

    >>> import torchvision
    >>> from zoo import create
    >>> state = to_torchvision(create("resnet18", num_classes=7).state_dict())
    >>> torchvision.models.resnet18(num_classes=7).load_state_dict(state)
    <All keys matched successfully>
    """
    shapes = [tuple(tensor.shape) for tensor in _weights(state).values()]
    classes = shapes[-1][0] if shapes and shapes[-1] else 0
    channels = shapes[0][1] if shapes and len(shapes[0]) == 4 else 0
    for name in _TORCHVISION:
        theirs = _torchvision_shapes(name)
        expected = [shape for key, shape in theirs.items() if not _is_counter(key)]
        if len(expected) != len(shapes) or channels != 3:
            continue
        expected[-2:] = [(classes, *expected[-2][1:]), (classes,)]
        if expected == shapes:
            values = iter(_weights(state).values())
            return {key: torch.tensor(0) if _is_counter(key) else next(values) for key in theirs}
    raise ZooError(
        f"torchvision has no model with these {len(shapes)} tensors: it has {', '.join(_TORCHVISION)}, at full width "
        "and depth and with 3 input channels"
    )


def _renamed(state: Mapping[str, Tensor], like: Mapping[str, Tensor], what: str, target: str) -> State:
    given, wanted = _weights(state), _weights(like)
    for (a, x), (b, y) in zip(given.items(), wanted.items()):
        if x.shape != y.shape:
            raise ZooError(
                f"{what} is not one of this {target}: {a} {list(x.shape)} stands where {b} {list(y.shape)} is"
            )
    if len(given) != len(wanted):
        raise ZooError(f"{what} has {len(given)} tensors (without step counters), this {target} {len(wanted)}")
    return dict(zip(wanted, given.values()))


def _weights(state: Mapping[str, Tensor]) -> State:
    return {name: tensor for name, tensor in state.items() if not _is_counter(name)}


def _is_counter(name: str) -> bool:
    return name.endswith("num_batches_tracked")


@lru_cache
def _torchvision_shapes(name: str) -> dict[str, tuple[int, ...]]:
    from torchvision import models

    with torch.device("meta"):
        return {key: tuple(tensor.shape) for key, tensor in models.get_model(name).state_dict().items()}

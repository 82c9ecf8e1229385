"""Weights from and to torchvision and timm: the same tensors in the same order under other names."""

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from zoo.errors import ZooError
from zoo.members import find
from zoo.network import Network
from zoo.norms import State, StaticBatchNorm2d, is_statistic
from zoo.spec import Spec

TORCHVISION = {
    "resnet18": "resnet18", "resnet34": "resnet34", "resnet50": "resnet50", "mobilenetv2": "mobilenet_v2",
    "efficientnetv2_s": "efficientnet_v2_s", "efficientnetv2_m": "efficientnet_v2_m",
    "vgg11": "vgg11_bn", "vgg13": "vgg13_bn", "vgg16": "vgg16_bn", "vgg19": "vgg19_bn",
    "convnext_tiny": "convnext_tiny", "convnext_small": "convnext_small", "convnext_base": "convnext_base",
    "vit_base": "vit_b_16",
}  # fmt: skip
"""From a name of the zoo to torchvision's name of the same architecture."""
TORCHVISION_PLAIN = {f"vgg{n}": f"vgg{n}" for n in (11, 13, 16, 19)}
"""The same for `norm="none"`."""
TIMM = {
    "resnet18": "resnet18", "resnet34": "resnet34", "resnet50": "resnet50", "mobilenetv2": "mobilenetv2_100",
    "efficientnetv2_s": "efficientnetv2_s", "efficientnetv2_m": "efficientnetv2_m",
    "convnext_tiny": "convnext_tiny", "convnext_small": "convnext_small", "convnext_base": "convnext_base",
    "vit_tiny": "vit_tiny_patch16_224", "vit_small": "vit_small_patch16_224", "vit_base": "vit_base_patch16_224",
}  # fmt: skip
"""From a name of the zoo to timm's name of the same architecture."""


def load(model: nn.Module, state: Mapping[str, Tensor]) -> nn.Module:
    """Load a state dict of this model, or of the same architecture in torchvision or timm, and return the model.

    Tensors of the libraries are matched by position; each must have the shape and the last part of the name (weight,
    bias, ...) of the model's own. Step counters are left out. resnet18/34/50, mobilenetv2, efficientnetv2_s/m,
    vgg11/13/16/19, convnext_tiny/small/base and vit_base have torchvision's layout (vgg that of its vgg_bn, with
    norm="none" that of its vgg; vit_base that of vit_b_16). All but vgg also have the layout of timm's models of those
    names (mobilenetv2_100, vit_base_patch16_224), and so have vit_tiny and vit_small; efficientnetv2_s/m then need
    norm_eps=1e-5. States of these models may come in any order, as from a safetensors file.

    A state does not show strides, padding, pooling, epsilons and the number of heads: the weights of variants that
    differ in nothing else (timm's tf_..., resnetaa..., resnetblur...) can be loaded, too, but the logits are then
    different.

    Raises:
        ZooError: which names the first tensors that differ; the model is then unchanged.

    >>> import torchvision
    >>> from zoo import create
    >>> theirs = torchvision.models.mobilenet_v2()
    >>> ours = load(create("mobilenetv2"), theirs.state_dict())
    >>> x = torch.randn(1, 3, 64, 64)
    >>> torch.allclose(ours.eval()(x), theirs.eval()(x), atol=1e-5)
    True
    """
    own = {name: tensor for name, tensor in model.state_dict().items() if not is_statistic(name, model)}
    if not own.keys() <= state.keys():
        state = _renamed(state, own, model)
    for name, tensor in own.items():
        if state[name].shape != tensor.shape:
            what = f"{list(state[name].shape)}, this {type(model).__name__}'s {list(tensor.shape)}"
            raise ZooError(f"the given state is of another model: its {name} is {what}")
    try:
        model.load_state_dict(state, assign=any(tensor.is_meta for tensor in own.values()))
    except RuntimeError as error:
        raise ZooError(" ".join(str(error).split())) from None
    return model


def to_torchvision(state: Mapping[str, Tensor]) -> State:
    """The state of a zoo model under the names of torchvision's model of the same architecture, to load there.

    The architecture is recognised by names and shapes: resnet18/34/50, mobilenetv2, efficientnetv2_s/m, vgg11/13/16/19
    with batch norm or none, convnext_tiny/small/base, and vit_base (whose heads are taken to be 12), at full width and
    depth, with any number of classes. Step counters, which the zoo does not have, are 0; the other tensors are those of
    the given state or views of them, and copies only where torchvision has three matrices of the zoo's as one.

    Raises:
        ZooError: if torchvision has no model of these names and shapes.

    >>> import torchvision
    >>> from zoo import create
    >>> state = to_torchvision(create("resnet18", num_classes=7).state_dict())
    >>> torchvision.models.resnet18(num_classes=7).load_state_dict(state)
    <All keys matched successfully>
    """
    classes = len(state["head.bias"]) if "head.bias" in state else 1
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    for counterparts, norm in ((TORCHVISION, "batch"), (TORCHVISION_PLAIN, "none")):
        for ours, theirs in counterparts.items():
            model = _skeleton(ours, norm, classes)
            own = {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}
            if own == shapes:
                values = iter(model.to_foreign({name: state[name] for name in own}))
                return {key: torch.tensor(0) if _is_counter(key) else next(values) for key in _names(theirs)}
    raise ZooError(
        f"torchvision has no model with these {len(state)} tensors: it has those of {', '.join(TORCHVISION)}, at "
        "full width and depth and with 3 input channels"
    )


def _renamed(state: Mapping[str, Tensor], own: Mapping[str, Tensor], model: nn.Module) -> State:
    """The tensors of a library's state, as the model has them, under the names of the model's tensors."""
    try:
        return _by_position(state, own, model)
    except ZooError:
        ordered = _in_order(state, model)
        if ordered is None:
            raise
    return _by_position(ordered, own, model)


def _by_position(state: Mapping[str, Tensor], own: Mapping[str, Tensor], model: nn.Module) -> State:
    given = {name: tensor for name, tensor in state.items() if not _is_counter(name)}
    if isinstance(model, Network):
        given = model.from_foreign(given)
    statistics = any(name.endswith("running_mean") for name in given)
    wanted, target = dict(_expected(model, own, statistics)), type(model).__name__
    for (a, x), (b, shape) in zip(given.items(), wanted.items()):
        if x.shape != shape or a.rpartition(".")[2] != b.rpartition(".")[2]:
            raise ZooError(
                f"the given state is of another model, or not in the order of its state_dict(): it has {a} "
                f"{list(x.shape)} where this {target} has {b} {list(shape)}"
            )
    if len(given) != len(wanted):
        raise ZooError(f"the given state has {len(given)} tensors (without step counters), this {target} {len(wanted)}")
    return dict(zip(wanted, given.values()))


def _in_order(state: Mapping[str, Tensor], model: nn.Module) -> State | None:
    """A library's state in the order of its model's state_dict(), as no safetensors file keeps it.

    None if it is in that order, or if no model of this family has these names in torchvision or timm.
    """
    given = [name for name in state if not _is_counter(name)]
    tables = ((TORCHVISION, ""), (TORCHVISION_PLAIN, ""), (TIMM, "timm:"))
    pairs = [(ours, library + theirs) for table, library in tables for ours, theirs in table.items()]
    for theirs in [theirs for ours, theirs in pairs if find(ours).family == type(model).__module__]:
        names = [name for name in _names(theirs) if not _is_counter(name)]
        if names != given and sorted(names) == sorted(given):
            return {name: state[name] for name in names}
    return None


def _expected(model: nn.Module, own: Mapping[str, Tensor], statistics: bool) -> Iterator[tuple[str, torch.Size]]:
    """Names and shapes of the model's tensors, with the statistics that its static batch norms may be given."""
    for name, tensor in own.items():
        yield name, tensor.shape
        module, _, last = name.rpartition(".")
        if statistics and last == "bias" and isinstance(model.get_submodule(module), StaticBatchNorm2d):
            yield f"{module}.running_mean", tensor.shape
            yield f"{module}.running_var", tensor.shape


def _is_counter(name: str) -> bool:
    return name.endswith("num_batches_tracked")


@lru_cache
def _skeleton(name: str, norm: str, classes: int) -> Any:
    """The model on the meta device."""
    options: dict[str, Any] = {"norm": norm} if "norm" in Spec(name).member.defaults else {}
    return Spec(name, classes, **options).build(device="meta")


@lru_cache
def _names(theirs: str) -> list[str]:
    """The names of the tensors of torchvision's model of that name, or of timm's for "timm:NAME"."""
    library, _, name = theirs.rpartition(":")
    with torch.device("meta"):
        if library:
            import timm

            return list(timm.create_model(name).state_dict())
        from torchvision import models

        return list(models.get_model(theirs).state_dict())

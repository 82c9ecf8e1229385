"""Models by name, with random or given weights: a state dict or a file with one.

A state dict may come from the zoo, torchvision or timm.

torchvision and timm have the same tensors in the same order under other names.
"""

import logging
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor, nn

from zoo.errors import ZooError, first_line
from zoo.layers import Network
from zoo.norms import State, StaticBatchNorm2d, is_statistic
from zoo.spec import PRESETS, Spec

_LOG = logging.getLogger(__name__)
_FORMS = "a state dict, such as torchvision.models.resnet18(...).state_dict(), or a .safetensors, .pt or .pth file"
_LAYOUTS = ("torchvision", "torchvision_plain", "timm")
_HEADS = re.compile(r"(?:.*\.)?(?:head|fc|classifier)(?:\.(\d+))?\.bias")  # of zoo, torchvision and timm


def create(
    name: str,
    generator: torch.Generator | None = None,
    weights: Mapping[str, Tensor] | str | Path | None = None,
    **fields,
) -> nn.Module:
    """Build a model by name.

    Args:
        name: one of `zoo.names()`.
        generator: gives the initial weights, on the CPU; None: torch's global generator.
        weights: to begin with instead: a state dict, or a file with one; see `zoo.weights.build_with`, also for what
            becomes of the head if the number of classes differs.
        fields: the fields of `Spec`: num_classes, width, depth, norm, ...

    Raises:
        ZooError: for an unknown name, a field that the architecture does not have, values out of range, and weights
            that cannot be read or belong to another model.

    >>> net = create("resnet20", num_classes=10, width=0.5)
    >>> net(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """
    spec = Spec.from_dict({"name": name, **fields})
    return spec.build(generator) if weights is None else build_with(spec, weights, generator)


def build_with(
    spec: Spec, weights: Mapping[str, Tensor] | str | Path, generator: torch.Generator | None = None
) -> nn.Module:
    """Build a model with the weights of a state dict, mapped by `zoo.load`.

    If they are for another number of classes than the spec's, the head stays as initialised, and a warning is logged.
    Everything else has to fit.

    Args:
        weights: the state dict, or the path of a .safetensors, .pth or .pt file with one.
        generator: gives the initial weights; only a new head's remain.

    Raises:
        ZooError: if the weights cannot be read, or belong to another model.
    """
    if not isinstance(weights, Mapping | str | Path):
        raise ZooError(f"weights={weights!r}: give {_FORMS}", code="argument")
    if isinstance(weights, str) and not Path(weights).is_file():
        raise ZooError(f"there are no weights {weights!r}: give {_FORMS}", code="file")
    state, source = (weights, "the given state") if isinstance(weights, Mapping) else (read(weights), weights)
    theirs = classes(state)
    try:
        if theirs in (None, spec.num_classes):
            return load(spec.build(generator), state)
        full = load(replace(spec, num_classes=theirs).build(device="meta"), state).state_dict()
    except ZooError as error:
        whole = spec.depth == spec.architecture.depth and set(spec.rates.values()) == {1.0}
        hint = "" if whole else "; weights of a full model go into a full one: cut that by surgery.ungraft and narrow"
        raise ZooError(f"{spec.name} cannot begin with {source}: {error}{hint}", code=error.code) from None
    model = spec.build(generator)
    head = [name for name, tensor in model.state_dict().items() if tensor.shape != full[name].shape]
    model.load_state_dict(full | {name: model.state_dict()[name] for name in head})
    text = "%s: %s stay as initialised, because the weights of %s are for %d classes and the model has %d"
    _LOG.warning(text, spec.name, " and ".join(head), source, theirs, spec.num_classes)
    return model


def read(file: str | Path) -> dict[str, Tensor]:
    """Return the state dict in a file without running code that the file may hold.

    A training script's checkpoint may have it under "state_dict", "model_state_dict" or "model". What
    DistributedDataParallel and torch.compile put before every name is left out.

    Raises:
        ZooError: that begins with the file, if it is missing, damaged, or holds no state dict.

    >>> import tempfile
    >>> file = tempfile.mkdtemp() + "/net.pth"
    >>> torch.save({"model": {"module.weight": torch.ones(2)}, "epoch": 3}, file)
    >>> read(file)
    {'weight': tensor([1., 1.])}
    """
    if not Path(file).is_file():
        raise ZooError(f"{file}: there is no such file", code="file")
    try:
        if Path(file).suffix == ".safetensors":
            from safetensors.torch import load_file

            state: Any = load_file(file)
        else:
            state = torch.load(file, map_location="cpu", weights_only=True)
    except UnpicklingError:
        reason = "is damaged, or holds other objects than tensors, which could run code"
        raise ZooError(f"{file} {reason}: save model.state_dict() instead", code="file") from None
    except Exception as error:  # of a damaged file: zipfile's, struct's, safetensors', ...
        damaged = "it is damaged, cut short or another kind of file; fetch or save it again"
        why = first_line(error).rstrip(".") if isinstance(error, OSError) else damaged
        raise ZooError(f"{file} cannot be read as weights: {why}", code="file") from None
    for key in ("state_dict", "model_state_dict", "model"):
        if isinstance(state, Mapping) and isinstance(state.get(key), Mapping):
            state = state[key]
    good = isinstance(state, Mapping) and all(isinstance(k, str) and isinstance(v, Tensor) for k, v in state.items())
    if not good or not state:
        raise ZooError(f"{file} holds no state dict: save model.state_dict()", code="file")
    for prefix in ("module.", "_orig_mod.", "module."):
        if all(name.startswith(prefix) for name in state):
            state = {name.removeprefix(prefix): tensor for name, tensor in state.items()}
    return dict(state)


def counterparts(layout: str) -> dict[str, str]:
    """From names of the zoo to a library's names of the same architectures.

    Args:
        layout: torchvision, timm, or torchvision_plain for models without norms.

    >>> counterparts("torchvision_plain")["vgg11"]
    'vgg11'
    """
    return {name: theirs for name, row in PRESETS.items() if (theirs := getattr(row, layout))}


def classes(state: Mapping[str, Tensor]) -> int | None:
    """Return a state's number of classes; None if no tensor looks like a head's bias.

    >>> classes({"classifier.0.bias": torch.zeros(8), "classifier.3.bias": torch.zeros(5)})
    5
    """
    heads = [(int(match[1] or 0), name) for name in state if (match := _HEADS.fullmatch(name))]
    return len(state[max(heads)[1]]) if heads else None


def load(model: nn.Module, state: Mapping[str, Tensor]) -> nn.Module:
    """Load a state dict of this model, also torchvision's or timm's; return the model.

    Tensors of the libraries are matched by position; each must have the shape and the last part of the name (weight,
    bias, ...) of the model's own. Step counters are left out. `counterparts` has the models with torchvision's or
    timm's layout; timm's efficientnetv2_s/m need norm_eps=1e-5. States of these models may come in any order, as from a
    safetensors file.

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
    tensors = {name: tensor for name, tensor in model.state_dict().items() if not is_statistic(name, model)}
    if not tensors.keys() <= state.keys():
        try:
            state = _by_position(state, tensors, model)
        except ZooError:
            state = _by_position(_in_order(state, model), tensors, model)
    for name, tensor in tensors.items():
        if state[name].shape != tensor.shape:
            shapes = f"{list(state[name].shape)}, this {type(model).__name__}'s {list(tensor.shape)}"
            raise ZooError(f"the given state is of another model: its {name} is {shapes}", code="mismatch")
    try:
        model.load_state_dict(state, assign=any(tensor.is_meta for tensor in tensors.values()))
    except RuntimeError as error:
        raise ZooError(" ".join(str(error).split()), code="mismatch") from None
    return model


def _by_position(state: Mapping[str, Tensor], tensors: Mapping[str, Tensor], model: nn.Module) -> State:
    """Return a library state's tensors, in the model's form, by the model's names."""
    source = {name: tensor for name, tensor in state.items() if not _is_counter(name)}
    if isinstance(model, Network):
        source = model.from_foreign(source)
    statistics = any(name.endswith("running_mean") for name in source)
    wanted, target = {}, type(model).__name__
    for name, tensor in tensors.items():
        wanted[name] = tensor.shape
        module, _, last = name.rpartition(".")
        if statistics and last == "bias" and isinstance(model.get_submodule(module), StaticBatchNorm2d):
            wanted |= {f"{module}.running_mean": tensor.shape, f"{module}.running_var": tensor.shape}
    for (a, x), (b, shape) in zip(source.items(), wanted.items()):
        if x.shape != shape or a.rpartition(".")[2] != b.rpartition(".")[2]:
            raise ZooError(
                f"the given state is of another model, or not in the order of its state_dict(): it has {a} "
                f"{list(x.shape)} where this {target} has {b} {list(shape)}",
                code="mismatch",
            )
    if len(source) != len(wanted):
        raise ZooError(f"the given state has {len(source)} tensors, this {target} {len(wanted)}", code="mismatch")
    return dict(zip(wanted, source.values()))


def _in_order(state: Mapping[str, Tensor], model: nn.Module) -> Mapping[str, Tensor]:
    """Return a library's state in the order of its model's state_dict()."""
    source_names = sorted(name for name in state if not _is_counter(name))
    for layout in _LAYOUTS:
        for ours, theirs in counterparts(layout).items():
            if type(model) is type(_skeleton(ours)):
                names = [name for name in _tensor_names(layout.removesuffix("_plain"), theirs) if not _is_counter(name)]
                if sorted(names) == source_names:
                    return {name: state[name] for name in names}
    return state


def to_torchvision(state: Mapping[str, Tensor]) -> State:
    """Return a zoo model's state by the names of torchvision's same architecture.

    The architecture is recognised by names and shapes, as one of `counterparts` at full width and depth, with any
    number of classes (the heads of vit_base are taken to be 12). Step counters, which the zoo does not have, are 0; the
    other tensors are the given state's or views of them, and copies only where torchvision has three matrices of
    the zoo's as one.

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
    for layout, norm in (("torchvision", "batch"), ("torchvision_plain", "none")):
        for ours, theirs in counterparts(layout).items():
            model = _skeleton(ours, norm, classes)
            own_shapes = {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}
            if own_shapes == shapes:
                values = iter(model.to_foreign({name: state[name] for name in own_shapes}))
                return {
                    key: torch.tensor(0) if _is_counter(key) else next(values)
                    for key in _tensor_names("torchvision", theirs)
                }
    raise ZooError(
        f"torchvision has no model with these {len(state)} tensors: it has those of "
        f"{', '.join(counterparts('torchvision'))}, at full width and depth and with 3 input channels",
        code="mismatch",
    )


@lru_cache
def _tensor_names(library: str, name: str) -> list[str]:
    """Return the names in the state dict of a library's model, in its order."""
    with torch.device("meta"):
        if library == "timm":
            import timm

            return list(timm.create_model(name).state_dict())
        from torchvision import models

        return list(models.get_model(name).state_dict())


@lru_cache
def _skeleton(name: str, norm: str = "batch", classes: int = 1) -> Any:
    """Return the model on the meta device."""
    options: dict[str, Any] = {"norm": norm} if "norm" in PRESETS[name].defaults else {}
    return Spec(name, classes, **options).build(device="meta")


def _is_counter(name: str) -> bool:
    return name.endswith("num_batches_tracked")

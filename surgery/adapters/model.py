"""Adapters put on a model, taken off, and folded into its weights."""

import logging
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from numbers import Integral
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from surgery.adapters.layer import (
    LowRank,
    initial,
    initial_magnitude,
    is_packed,
    is_transposed,
    norms,
    scale_weight,
    shapes,
    why_not,
)
from surgery.adapters.rank import check_unscaled, factors, name_factors
from surgery.copying import copy_sharing, replace_tensors
from surgery.errors import SurgeryError
from surgery.names import hint, join, matches
from surgery.states import State, names_by_id
from surgery.states import tensors as all_tensors

_log = logging.getLogger(__name__)
_OWNERS = (nn.Linear, nn.Embedding, nn.EmbeddingBag, nn.Bilinear, _ConvNd, nn.RNNBase, nn.RNNCellBase)
"""Layers that a user would expect to have adapters."""


def add(
    model: nn.Module,
    rank: int,
    *,
    modules: Sequence[str] | None = None,
    train: Sequence[str] = (),
    scale: float = 1.0,
    dropout: float = 0.0,
    generator: torch.Generator | None = None,
    kind: Literal["lora", "dora"] = "lora",
) -> nn.Module:
    """Put adapters beside a model's layers and freeze the rest; outputs stay the same.

    A is initialised as torch initialises a linear layer, and B is 0, as in peft.

    Args:
        model: any module; it is not changed. The result shares the memory of the weights that are frozen.
        rank: of all adapters.
        modules: names of modules, or patterns of names (`*.attn.qkv`): all linear layers, convolutions and embeddings
            in them are adapted. None: all linear layers and convolutions of the model. Layers that share their weight,
            that are used in several places, have groups of channels, or are of another kind (transposed, recurrent)
            are left as they are, with a warning.
        train: modules that are trained whole beside the adapters, such as a new classifier; names or patterns.
        scale: what the products are multiplied by: peft's lora_alpha / r. It does not depend on the rank.
        dropout: the share of an adapter's inputs that are dropped in training.
        generator: initialises A; None: torch's own.
        kind: lora; or dora, which also learns the norm of each output's weights (Liu et al., ICML 2024), for linear
            layers and convolutions.

    Raises:
        SurgeryError: for a pattern in which there is no such layer, for a layer whose weight is packed into fewer bits
            (but bitsandbytes', which unpack it), and for a model that has adapters already.

    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> adapted, x = add(net, rank=2, modules=["0"], train=["2"]), torch.rand(1, 4)
    >>> {name: tuple(tensor.shape) for name, tensor in state(adapted).items()}
    {'0.lora_A.weight': (2, 4), '0.lora_B.weight': (8, 2), '2.weight': (2, 8), '2.bias': (2,)}
    >>> torch.equal(adapted(x), net(x))
    True
    """
    if not isinstance(rank, Integral) or isinstance(rank, bool) or rank < 1:
        raise SurgeryError(f"rank={rank!r}: give a whole number of at least 1", code="argument")
    if kind not in ("lora", "dora"):
        raise SurgeryError(f"kind={kind!r}: give lora or dora", code="argument")
    tensors: State = {}
    for name, layer in _choose_layers(model, modules, train).items():
        pair = name_factors(name, layer, *initial(layer, rank, generator))
        tensors |= pair._replace(magnitude=initial_magnitude(name, layer) if kind == "dora" else None).state
    return attach(model, tensors, train=train, scale=scale, dropout=dropout)


def attach(
    model: nn.Module,
    tensors: Mapping[str, Tensor],
    *,
    train: Sequence[str] = (),
    scale: float | Mapping[str, float] = 1.0,
    dropout: float = 0.0,
) -> nn.Module:
    """Put given adapters beside a model's layers and freeze the rest; inverts `state`.

    Args:
        model: without adapters; it is not changed. The result shares the memory of the weights that are frozen, and of
            the tensors.
        tensors: the adapters, and tensors of modules that are trained whole, as `state`, `resize`, `stack` and
            `read_peft` give them.
        train: modules that are trained whole beside those that `tensors` has tensors of.
        scale: what the products are multiplied by, one number or one for each adapted module, as `scales` gives them.
        dropout: as for `add`.

    Raises:
        SurgeryError: for tensors that do not fit the model.

    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> adapted = add(net, rank=4, scale=0.5)
    >>> from surgery.adapters import resize
    >>> smaller = attach(net, resize(state(adapted), 2).state, scale=scales(adapted))
    >>> smaller[0].rank, smaller[0].multiplier
    (2, 0.5)
    """
    if isinstance(model, nn.Module) and (has := next(adapted_layers(model), None)):
        raise SurgeryError(
            f"{has[0] or 'the model'} has an adapter already: take them off first, with remove or merge",
            code="argument",
        )
    model_tensors = all_tensors(model)
    pairs, rest = factors(tensors)
    check_unscaled(pairs)
    if odd := [name for name in rest if name not in model_tensors or model_tensors[name].shape != rest[name].shape]:
        raise SurgeryError(f"{odd[0]!r} is no tensor of the model or has another shape", code="mismatch")
    trained = _list_trained(model, train) | rest.keys()
    result = _share(model, rest)
    for module in result.modules():  # what training changes is a copy
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.clone()
    for name, parameter in result.named_parameters():
        parameter.requires_grad_(name in trained and parameter.is_floating_point())
        if parameter.requires_grad and name not in rest:
            parameter.data = parameter.data.clone()
    for name, pair in pairs.items():
        layer = _layer(result, name)
        wanted = shapes(layer, len(pair.a))
        if wanted != (pair.a.shape, pair.b.shape):
            raise SurgeryError(
                f"the adapter of {name} is {pair.a.shape}, {pair.b.shape}; the layer takes {wanted[0]}, {wanted[1]}",
                code="mismatch",
            )
        if isinstance(scale, Mapping) and name not in scale:
            raise SurgeryError(f"scale has no number for {name!r}, which has an adapter", code="argument")
        factor = float(scale[name] if isinstance(scale, Mapping) else scale)
        if not math.isfinite(factor):
            raise SurgeryError(f"scale={factor} of {name!r}: give a finite number", code="argument")
        if (m := pair.magnitude) is not None and m.shape != (takes := initial_magnitude(name, layer).shape):
            raise SurgeryError(f"the magnitude of {name} is {list(m.shape)}, not {list(takes)}", code="mismatch")
        low_rank = LowRank(layer, pair.a.detach(), pair.b.detach(), factor, dropout, m).train(layer.training)
        if not name:
            return low_rank
        result.set_submodule(name, low_rank)
    return result


def state(model: nn.Module) -> State:
    """Return the tensors that are trained, which clients exchange and files hold.

    They belong to adapters and to modules that are trained whole.

    Statistics of batch norms move in training mode though their weights are frozen. They are in here of modules that
    are trained whole: name the norms in `train`, or keep them in evaluation mode.

    >>> list(state(add(nn.Linear(2, 2), rank=1)))
    ['lora_A.weight', 'lora_B.weight']
    """
    parameters = {name: p.requires_grad for name, p in model.named_parameters()}
    trained = {name.rpartition(".")[0] for name, free in parameters.items() if free}
    return {
        name: tensor.detach()
        for name, tensor in all_tensors(model).items()
        if parameters.get(name, name.rpartition(".")[0] in trained)  # of a norm also the statistics
    }


def adapted_layers(model: nn.Module) -> Iterator[tuple[str, LowRank]]:
    """Return the adapted layers of a model, with their names."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, LowRank))


def scales(model: nn.Module) -> dict[str, float]:
    """Return the factor of each adapter's product, by the name of its layer.

    >>> scales(add(nn.Sequential(nn.Linear(2, 2)), rank=1, scale=2))
    {'0': 2.0}
    """
    return {name: layer.multiplier for name, layer in adapted_layers(model)}


def remove(model: nn.Module) -> nn.Module:
    """Return the model without its adapters, which shares the memory of its weights.

    What was trained whole stays trained.

    >>> remove(add(nn.Sequential(nn.Linear(2, 3)), rank=1))
    Sequential(
      (0): Linear(in_features=2, out_features=3, bias=True)
    )
    """
    return _replace(model, merged=False)


def merge(model: nn.Module) -> nn.Module:
    """Return a plain model with its adapters folded into its weights, W + scale B A.

    It is exact but for the rounding of the weights' dtype. All parameters can be trained again. Weights of layers that
    had no adapter share their memory with the model.

    Raises:
        SurgeryError: for a layer that transforms its weight before it uses it, and for one whose weight another layer
            shares, which would change as well.

    >>> net = nn.Sequential(nn.Linear(2, 3))
    >>> adapted, x = add(net, rank=1), torch.rand(1, 2)
    >>> _ = nn.init.ones_(adapted[0].lora_B.weight)
    >>> torch.allclose(merge(adapted)(x), adapted(x), atol=1e-6), torch.equal(merge(adapted)(x), net(x))
    (True, False)
    """
    return _replace(model, merged=True)


def unmerge(merged: nn.Module, model: nn.Module) -> nn.Module:
    """Take adapters out of a merged model again: its weights become W - scale B A.

    It is the inverse of `merge` but for the rounding of the weights' dtype. DoRA's magnitudes are the merged weights'
    norms; they replace the norms of `model`.

    Args:
        merged: a plain model, as `merge` makes it, perhaps trained further.
        model: one of the same architecture with adapters, which are taken.

    >>> adapted = add(nn.Sequential(nn.Linear(2, 3)), rank=1)
    >>> torch.equal(unmerge(merge(adapted), adapted)[0].base_layer.weight, adapted[0].base_layer.weight)
    True
    """
    adapters, rest = factors(state(model))
    tensors = {name: tensor for adapter in adapters.values() for name, tensor in adapter.state.items()}
    whole = sorted({name.rpartition(".")[0] for name in rest})
    result = attach(merged, tensors, train=whole, scale=scales(model))
    with_adapters = dict(adapted_layers(model))
    for name, layer in adapted_layers(result):
        before = layer.base_layer.weight
        layer.lora_dropout = with_adapters[name].lora_dropout
        if (magnitude := layer.lora_magnitude_vector) is not None:  # W' = m V / |V|, with |V| as it was there
            had, turned = with_adapters[name], is_transposed(layer.base_layer)
            length = norms(had.base_layer.weight + had.change(), turned).detach().copysign(magnitude.data)
            magnitude.data = norms(before.detach(), turned).copysign(magnitude.data)
            before.data = scale_weight(before.detach(), length, turned)
        opposite = LowRank(layer.base_layer, *layer.factors, -layer.multiplier).weight
        layer.base_layer.weight = nn.Parameter(opposite.detach(), requires_grad=before.requires_grad)
    return result


def _choose_layers(model: nn.Module, patterns: Sequence[str] | None, train: Sequence[str]) -> dict[str, nn.Module]:
    """Return the layers that get adapters, by name."""
    if isinstance(patterns, str) or isinstance(train, str):
        raise SurgeryError("modules and train are lists of names or patterns: modules=['*.qkv']", code="argument")
    every = dict(model.named_modules())
    able = {name: module for name, module in every.items() if why_not(module) is None}
    if patterns is None:
        able = {n: m for n, m in able.items() if not isinstance(m, nn.Embedding)}
        chosen = dict(able)
    else:
        for pattern in patterns:
            if not any(matches(name, pattern) for name in able):
                hit = [name for name in every if name and matches(name, pattern)]
                why = f"{hit[0]} is none: {why_not(every[hit[0]])}" if hit else _unknown_error(pattern, model)
                raise SurgeryError(f"modules={pattern!r}: no layer there can have an adapter; {why}", code="name")
        chosen = {n: m for n, m in able.items() if any(matches(n, pattern) for pattern in patterns)}
    chosen = {n: m for n, m in chosen.items() if not any(matches(n, pattern) for pattern in train)}
    shared, places = _several_owners(model), _places(model)
    if tied := [name for name, m in chosen.items() if id(m.weight) in shared or places.get(id(m), 1) > 1]:
        if patterns is not None and not set(patterns).isdisjoint(tied):
            raise SurgeryError(f"{tied[0]}, or its weight, has several places: leave it out", code="unsupported")
        _log.warning("no adapter for %s: the layer, or its weight, is used in several places", ", ".join(tied))
    chosen = {n: m for n, m in chosen.items() if n not in tied}
    wanted = patterns or ["*"]
    left = {
        name: reason
        for name, m in every.items()
        if isinstance(m, _OWNERS) and any(matches(name, pattern) for pattern in wanted) and (reason := why_not(m))
    }
    if packed := [name for name in left if is_packed(every[name])]:
        raise SurgeryError(f"{packed[0]} can have no adapter: {left[packed[0]]}, or leave it out", code="unsupported")
    for name, m in every.items():
        if isinstance(m, nn.MultiheadAttention) and any(matches(name, pattern) for pattern in wanted):
            held = [key for key, p in m._parameters.items() if p is not None and key.endswith("proj_weight")]
            left |= {join(name, key): "a parameter, and no layer" for key in held}
    for reason in dict.fromkeys(left.values()):
        _log.warning("no adapter for %s: %s", ", ".join(name for name in left if left[name] == reason), reason)
    if not chosen:
        raise SurgeryError("no linear layer, convolution or embedding can have an adapter", code="unsupported")
    return chosen


def _unknown_error(pattern: str, model: nn.Module) -> str:
    _, *names = (name for name, _ in model.named_modules(remove_duplicate=False))
    return f"no module is called like that: {hint(pattern, names)}"


def _several_owners(model: nn.Module) -> set[int]:
    """Return the ids of tensors that more than one module has."""
    held: dict[int, set[int]] = {}
    for module in model.modules():
        for tensor in module._parameters.values():
            held.setdefault(id(tensor), set()).add(id(module))
    return {tensor for tensor, modules in held.items() if len(modules) > 1}


def _places(model: nn.Module) -> Counter[int]:
    """Return how many modules hold each module, by its id."""
    return Counter(id(child) for module in model.modules() for child in module._modules.values())


def _list_trained(model: nn.Module, train: Sequence[str]) -> set[str]:
    """Return the names of the parameters in modules that are trained whole."""
    for pattern in train:
        if not any(matches(name, pattern) for name, _ in model.named_modules()):
            raise SurgeryError(f"train={pattern!r}: {_unknown_error(pattern, model)}", code="name")
    chosen = {  # a tied one under any of its names
        id(parameter)
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if any(matches(name.rpartition(".")[0], pattern) for pattern in train)
    }
    return {name for name, parameter in model.named_parameters() if id(parameter) in chosen}


def _share(model: nn.Module, values: Mapping[str, Tensor] = {}) -> nn.Module:
    """Return a copy with new parameters in the same memory, but for the given values."""
    result, tensors = copy_sharing(model)
    names = names_by_id(model)
    changing = {key: t for key, t in tensors.items() if t.is_floating_point() or names.get(key) in values}
    replace_tensors(result, {key: values.get(names.get(key, ""), t) for key, t in changing.items()}, tensors)
    return result


def _layer(model: nn.Module, name: str) -> nn.Module:
    """Return the layer of an adapter."""
    try:
        layer = model.get_submodule(name)
    except AttributeError:
        raise SurgeryError(f"there is an adapter for {name!r}, and the model has no such module", code="name") from None
    if reason := why_not(layer):
        raise SurgeryError(f"{name!r} cannot have an adapter: {reason}", code="unsupported")
    return layer


def _replace(model: nn.Module, merged: bool) -> nn.Module:
    """Return a plain model: the base layers, with the adapters folded in if asked."""
    result = _share(model)
    layers = dict(adapted_layers(result))
    if not layers:
        raise SurgeryError("the model has no adapters", code="argument")
    shared = _several_owners(result)
    for name, layer in layers.items():
        plain = layer.base_layer
        if merged:
            if id(plain.weight) in shared:
                raise SurgeryError(f"{name} shares its weight with a layer, which would change", code="unsupported")
            plain.weight = nn.Parameter(layer.weight.detach())
        if not name:
            result = plain
        else:
            result.set_submodule(name, plain)
    for parameter in result.parameters() if merged else ():
        parameter.requires_grad_(parameter.is_floating_point() or parameter.is_complex())  # others cannot be trained
    return result

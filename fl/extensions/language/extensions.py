"""Low-rank adapters as an extension: settings, needs, and the model's change."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from fl.algorithms import ALGORITHMS
from fl.algorithms.extension import Extension, ModelChange
from fl.base.console import quiet
from fl.base.errors import FLError
from fl.base.rng import Rng
from fl.extensions.language.adapters import AdapterOptions, add_adapters, fleet_of_ranks, fold_adapters
from fl.models.architectures import ArchitectureOptions
from fl.models.fleet import Fleet
from surgery import State


def _check(config: Any) -> None:
    options = config.extensions["adapters"]
    if options.on and config.model.architectures != ArchitectureOptions():
        raise FLError("--adapters.kind: clients have one base, and --architectures gives them several: leave one out")
    if options.on and options.largest < 1:
        raise FLError("--adapters.rank 0: give 1 or more")
    if options.on and options.ranks and options.rank != AdapterOptions.rank:
        raise FLError("--adapters.rank is for all clients, and --adapters.ranks for each: leave one of them out")


def _needs(options: AdapterOptions) -> dict[str, str]:
    several = {"architectures": "--adapters.ranks"} if len(set(options.ranks)) > 1 else {}
    return {"low_rank": "--adapters.kind", **several}


def _make(
    create: Callable[..., nn.Module], config: Any, clients: int, device: torch.device
) -> tuple[nn.Module, Callable[..., nn.Module], Fleet | None]:
    options, rng = config.extensions["adapters"], Rng(config.seed)
    base = create(rng.torch("weights"))
    add = partial(add_adapters, base, options, base_changes=ALGORITHMS[config.method.name].base_changes)
    net, again = add(rng.torch("adapters")).to(device), partial(_again, add)
    if not options.ranks:
        return net, again, None
    return net, again, fleet_of_ranks(lambda r: again(rng.torch("adapters"), r), options.ranks, clients, net)


def _again(add: Callable[..., nn.Module], *args: Any) -> nn.Module:
    with quiet("surgery"):  # which layers have no adapter was said of the first
        return add(*args)


def _load(base: nn.Module, config: Any, state: State) -> nn.Module:
    changes = any(name.endswith("base_layer.weight") for name in state)  # whether or not the method is still here
    return add_adapters(base, config.extensions["adapters"], Rng(config.seed).torch("adapters"), base_changes=changes)


EXTENSION = {
    "adapters": Extension(
        AdapterOptions(), check=_check, needs=_needs, model=ModelChange(_make, _load, fold_adapters), simulated=False
    )
}

"""Low-rank adapters (LoRA, Hu et al., ICLR 2022) on a base that all clients have.

The base is a constant of the model: no state has it, no message holds it, and all clients that train share one copy.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import nn

from fl.base.errors import FLError, code_of
from fl.base.settings import Natural, OnlyWith, number, one_of, several
from fl.engine.constants import as_constants, as_parameters
from fl.models.fleet import ClientArchitecture, Fleet, leading_plan
from surgery import SurgeryError, adapters

_ON = OnlyWith("kind", "lora", "dora")


@dataclass(frozen=True)
class AdapterOptions:
    """Adapters of low rank that clients train in the place of the model's weights."""

    kind: Annotated[str, one_of("none", "lora", "dora")] = "none"
    """lora: clients train adapters of low rank, and the model that --init or your own model begins with is frozen;
    dora: also the norms of its weights (Liu et al., ICML 2024); none: clients train the model"""
    rank: Annotated[Natural, _ON] = 8
    """lora, dora: rank of the adapters"""
    ranks: Annotated[tuple[int, ...], several(int, "INT,...", above=0), _ON] = ()
    """lora, dora: ranks of the clients, given to them in turn, for methods with clients of different architectures; the
    global model has the largest"""
    scale: Annotated[float, number(float, above=0), _ON] = 2.0
    """lora, dora: what the adapters' products are multiplied by, for all ranks: peft's lora_alpha / r"""
    modules: Annotated[tuple[str, ...], several(str, "PATTERN,..."), _ON] = ()
    """lora, dora: names of modules, or patterns such as *.qkv, with adapters in their layers; none: all linear layers
    and convolutions"""
    train: Annotated[tuple[str, ...], several(str, "PATTERN,..."), _ON] = ()
    """lora, dora: modules that are trained whole, such as a classifier for other classes (head)"""
    learn: Annotated[str, one_of("both", "b"), _ON] = "both"
    """lora, dora: the matrices that are trained: both; or b, with A as initialised, so that means of adapters are
    means of their products (FFA-LoRA, Sun et al., ICLR 2024)"""
    dropout: Annotated[float, number(float, least=0, below=1), _ON] = 0.0
    """lora, dora: share of an adapter's inputs that are dropped in training"""

    @property
    def on(self) -> bool:
        """True if clients train adapters."""
        return self.kind != "none"

    @property
    def largest(self) -> int:
        """The rank of the global model's adapters."""
        return max(self.ranks, default=self.rank)


def add_adapters(
    base: nn.Module,
    options: AdapterOptions,
    generator: torch.Generator,
    rank: int | None = None,
    *,
    base_changes: bool = False,
) -> nn.Module:
    """Put adapters on a model, in a copy that shares the model's weights as constants.

    Args:
        generator: initialises the matrices A of the largest rank, on the device of the model.
        rank: None: the largest. A smaller one has the first rows of the same A.
        base_changes: the weights beside adapters are no constants, but frozen and in states, for a method whose server
            changes them (`Method.base_changes`).

    Raises:
        FLError: for patterns that no layer matches.

    >>> net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    >>> small = add_adapters(net, AdapterOptions("lora", rank=2, train=("2",)), torch.Generator())
    >>> list(small.state_dict())
    ['0.lora_A.weight', '0.lora_B.weight', '2.weight', '2.bias']
    """
    try:
        model = adapters.add(
            base, options.largest, modules=options.modules or None, train=options.train, scale=options.scale,
            dropout=options.dropout, generator=generator, kind=options.kind,
        )  # fmt: skip
    except SurgeryError as error:
        raise FLError(f"--adapters: {error}", code=code_of(error)) from None
    if rank and rank < options.largest:
        first = adapters.resize(adapters.state(model), rank, how="truncate").state
        model = adapters.attach(base, first, scale=adapters.scales(model), dropout=options.dropout)
    if options.learn == "b":
        for name, layer in adapters.adapted_layers(model):
            if isinstance(layer.base_layer, nn.Embedding):
                raise FLError(
                    f"--adapters.learn b: {name} is an embedding, whose A is 0 at first: leave it out",
                    code="unsupported",
                )
            layer.factors[0].requires_grad_(False)
    if not base_changes:
        return as_constants(model)
    for _, layer in adapters.adapted_layers(model):  # a model that is read from a file changes its own alone
        layer.base_layer.weight = nn.Parameter(layer.base_layer.weight.detach().clone(), requires_grad=False)
    return as_constants(model, {id(layer.base_layer.weight) for _, layer in adapters.adapted_layers(model)})


def fold_adapters(model: nn.Module) -> nn.Module:
    """Fold a model's adapters into its weights: a copy with the base's parameters.

    A model without adapters is returned as it is.
    """
    if not any(adapters.adapted_layers(model)):
        return model
    return adapters.merge(as_parameters(copy.deepcopy(model))).train(model.training)


def fleet_of_ranks(create: Callable[[int], nn.Module], ranks: Sequence[int], clients: int, model: nn.Module) -> Fleet:
    """Make the fleet of clients of these ranks in turn.

    A client has the first rows of A and the first columns of B.

    Args:
        create: rank -> the model with adapters of this rank.
        model: the global one, of the largest rank, on the device that trains.
    """
    kinds, device = list(dict.fromkeys(ranks)), next(model.parameters()).device
    models = [model if rank == max(kinds) else create(rank).to(device) for rank in kinds]
    owned = tuple(kinds.index(ranks[client % len(ranks)]) for client in range(clients))
    return Fleet(tuple(ClientArchitecture(net, leading_plan(model, net)) for net in models), owned)

"""Extensions: settings of their own, and the wrappers that they switch on.

`fl.extensions` has examples.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, is_dataclass, replace
from enum import IntEnum
from typing import Any

import torch
from torch import nn

from fl.algorithms.algorithm import Algorithm, Server
from fl.base.columns import Column
from fl.base.errors import FLError
from fl.base.rng import Rng
from fl.base.settings import check_types
from fl.federation import Federation
from fl.models.fleet import Fleet
from surgery import State


class Order(IntEnum):
    """The order in which extensions wrap a method: smallest innermost, then by name."""

    SENDING = 1
    """It changes what clients send."""
    RECEIVING = 2
    """It changes what the server makes of it."""
    SAMPLING = 3
    """It changes which clients take part."""
    PROMISING = 4
    """It promises something of all that the others do."""
    PROTECTING = 5
    """It changes what single clients send before anything else at the server sees it. One extension can be it."""


def nothing(options: Any) -> dict[str, str]:
    """Return that nothing is needed."""
    return {}


@dataclass(frozen=True)
class ModelChange:
    """A change of what clients train: tensors of the extension's own.

    They lie beside the model's tensors, which become constants.

    Attributes:
        make: (what makes the model from a generator of random numbers, settings of the run, number of clients, device)
            -> the model that clients train, what makes another from a generator, and the clients' own models if these
            differ, else None.
        load: (the model, settings, the state of a run folder) -> the model that this state is one of.
        plain: such a model -> one with the model's own parameters, in which the extension's are folded.
    """

    make: Callable[
        [Callable[..., nn.Module], Any, int, torch.device],
        tuple[nn.Module, Callable[..., nn.Module], Fleet | None],
    ]
    load: Callable[[nn.Module, Any, State], nn.Module]
    plain: Callable[[nn.Module], nn.Module]


@dataclass(frozen=True)
class Extension:
    """Settings, and what they wrap.

    To add one, add a file to `fl.extensions`, or an entry point of a package. The settings are a group that is called
    as the file, or as the entry point: `--compression.bits 8`. With the defaults everything is as without the
    extension, and none of its functions is called.

    Attributes:
        options: the defaults, a frozen dataclass. Its fields become flags and settings.
        check: settings of the run -> raises FLError if it excludes them.
        needs: options -> from what a method must be able to do (`fl.federation.capabilities`) to the flags that ask.
        model: how it changes the model; at most one extension of a run does.
        federation: (federation, settings of the run, random streams of the run) -> the federation that is to take its
            place: with a middleware around local training, say, or another aggregator.
        algorithm: (algorithm, settings, random streams) -> the algorithm that is to take its place.
        order: where it stands among those that wrap the algorithm; given if it wraps that.
        simulated: whether it is for simulated clients only. Clients on other machines know nothing of extensions: only
            one that changes nothing but what the server does is for them, too.
        largest: (settings, random streams) -> the clients that take the largest architecture instead of choosing one.
        fixes_rounds: options -> whether they decide before the first round what happens in which, so that the number
            of rounds cannot change later.
        columns: the metrics that it reports, columns of metrics.csv.
    """

    options: Any
    check: Callable[[Any], None] = lambda config: None
    needs: Callable[[Any], Mapping[str, str]] = nothing
    model: ModelChange | None = None
    federation: Callable[[Federation, Any, Rng], Federation] | None = None
    algorithm: Callable[[Algorithm, Any, Rng], Algorithm] | None = None
    order: Order | None = None
    simulated: bool = True
    largest: Callable[[Any, Rng], frozenset[int]] | None = None
    fixes_rounds: Callable[[Any], bool] = lambda options: False
    columns: Mapping[str, Column] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not is_dataclass(self.options) or isinstance(self.options, type) or type(self.options).__hash__ is None:
            raise FLError(f"not an extension: options are a frozen dataclass with its defaults, got {self.options!r}")
        check_types(self.options)
        if (self.algorithm is None) != (self.order is None) or not isinstance(self.order, Order | None):
            raise FLError(
                f"not an extension: order says where it wraps the algorithm, one of {', '.join(Order.__members__)} of "
                f"fl.algorithms.extension.Order, and is given with algorithm= alone; got {self.order!r}"
            )


def hiding(
    algorithm: Algorithm, hide: Callable[[Server], Server], show: Callable[[Server, Server], Server]
) -> Algorithm:
    """Hide a part of the server from an algorithm's functions.

    Args:
        hide: the server -> the server without it.
        show: (server before, server after, without it) -> the server after, with it.
    """

    def aggregate(server, clients, update, rng):
        after, metrics = algorithm.aggregate_clients(hide(server), clients, update, rng)
        return show(server, after), metrics

    def seen(function: Callable[..., Any] | None) -> Callable[..., Any] | None:
        return function and (lambda server, *others: function(hide(server), *others))

    return replace(
        algorithm,
        aggregate=aggregate,
        send=seen(algorithm.send),
        models=seen(algorithm.models),
        keeps=seen(algorithm.keeps),
        sample=seen(algorithm.sample),
        levels=seen(algorithm.levels),
    )

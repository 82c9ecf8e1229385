"""Shared code of methods that join adapters of low rank on the server."""

from collections.abc import Callable

from fl.algorithms.algorithm import Algorithm
from fl.algorithms.parts.submodels import submodel_algorithm
from fl.base.errors import FLError
from fl.federation import Federation
from fl.federation.update import ClientUpdate
from surgery import State
from surgery.adapters import rank_of
from surgery.adapters.rank import MAGNITUDE


def global_ranks(fed: Federation, does: str) -> dict[str, int]:
    """Return the rank of each adapter of the global model.

    Both of its matrices must be trained.

    Args:
        does: what the method does with both, for the message.

    Raises:
        FLError: for a model without such adapters, and for DoRA's.
    """
    start = fed.initial()
    if any(name.endswith(MAGNITUDE) for name in start):
        raise FLError(
            f"{does}, and DoRA's have magnitudes beside: give --adapters.kind lora, or another --algorithm",
            code="unsupported",
        )
    if not any(name.endswith(("lora_A.weight", "lora_embedding_A")) for name in start):
        raise FLError(
            f"{does}, and there are none, or A is frozen: give --adapters.kind lora and --adapters.learn both",
            code="unsupported",
        )
    return rank_of(start)


def rank_algorithm(fed: Federation, aggregate: Callable) -> Algorithm:
    """FedAvg with another server; rank r gets the first r rows of A, columns of B."""
    fleet = fed.fleet_or_uniform
    return submodel_algorithm(fed, lambda client: fleet[client].plan, aggregate)


def select_arrived(update: ClientUpdate) -> tuple[list[State], list[int]]:
    """Return the states of clients that were not dropped, and their sample numbers.

    There is at least one.
    """
    rows = [row for row, size in enumerate(update.sizes) if size]
    return [update.received[row] for row in rows], [update.sizes[row] for row in rows]

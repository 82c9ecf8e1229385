"""What methods share whose clients train parts of one global model."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from fl.algorithms.algorithm import Server
from fl.federation import Federation
from fl.federation.client_models import ClientModels, Level
from fl.federation.last_value import LastValue
from surgery import State, Submodel


def extract_all(full: Mapping[str, Tensor], plans: Sequence[Submodel]) -> list[State]:
    """The submodel of each plan; plans that are the same object share one, so nobody may change it.

    >>> import torch
    >>> from surgery.plan import Source
    >>> plan = Submodel({"w": (Source("w", (((0, 1),),)),)}, {"w": (3,)})
    >>> extract_all({"w": torch.tensor([1.0, 2.0, 3.0])}, [plan, plan])
    [{'w': tensor([1.])}, {'w': tensor([1.])}]
    """
    known = {id(plan): plan.extract(full) for plan in {id(plan): plan for plan in plans}.values()}
    return [known[id(plan)] for plan in plans]


def models_of(
    fed: Federation,
    plan: Callable[[int], Submodel],
    source: Callable[[Server], Mapping[str, Tensor]] = lambda server: server["global"],
) -> Callable[[Server], ClientModels]:
    """A method's `Algorithm.models`, whose clients predict with parts of the global model.

    The parts of the last server that was asked about are remembered, with the statistics of their static batch norms:
    these take one pass over the training data for each plan, and clients of one architecture share a plan.

    Args:
        plan: client -> where its model lies among the tensors that `source` returns.
        source: server -> the tensors from which plans read; by default the global model's.
    """
    fleet, last = fed.fleet_or_uniform, LastValue()

    def models(server: Server) -> ClientModels:
        if (known := last.of(server)) is not None:
            return known
        plans = [plan(client) for client in range(len(fleet))]
        first: dict[int, int] = {}  # by the plan's id: the first client that has it
        for client, one in enumerate(plans):
            first.setdefault(id(one), client)
        numbers = {one: k for k, one in enumerate(first)}
        used = torch.tensor([numbers[id(one)] for one in plans])
        modules = [fleet[client].model for client in first.values()]
        states = [plans[client].extract(source(server)) for client in first.values()]
        states = [state | fed.statistics(state, module) for state, module in zip(states, modules)]
        return last.keep(server, ClientModels([Level(states, used, modules)]))

    return models

"""Shared code of methods where clients train parts of one global model."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fl.algorithms.algorithm import Algorithm, Server
from fl.algorithms.fedavg import fedavg
from fl.federation import Federation
from fl.federation.client_models import ClientModels, Level
from fl.federation.last_value import LastValue
from surgery import Plan, State
from surgery.plan import Source


def extract_all(full: Mapping[str, Tensor], plans: Sequence[Plan]) -> list[State]:
    """Return the submodel of each plan, one for all uses of a plan: do not change it.

    >>> import torch
    >>> from surgery.plan import Source
    >>> plan = Plan({"w": (Source("w", (((0, 1),),)),)}, {"w": (3,)})
    >>> extract_all({"w": torch.tensor([1.0, 2.0, 3.0])}, [plan, plan])
    [{'w': tensor([1.])}, {'w': tensor([1.])}]
    """
    known = {id(plan): plan.extract(full) for plan in {id(plan): plan for plan in plans}.values()}
    return [known[id(plan)] for plan in plans]


def models_of(
    fed: Federation,
    plan: Callable[[int], Plan],
    source: Callable[[Server], Mapping[str, Tensor]] = lambda server: server["global"],
) -> Callable[[Server], ClientModels]:
    """Return the `Algorithm.models` of clients with parts of the global model.

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
        for client, entry in enumerate(plans):
            first.setdefault(id(entry), client)
        numbers = {entry: k for k, entry in enumerate(first)}
        used = torch.tensor([numbers[id(entry)] for entry in plans])
        modules = [fleet[client].model for client in first.values()]
        states = [plans[client].extract(source(server)) for client in first.values()]
        states = [state | fed.statistics(state, module) for state, module in zip(states, modules)]
        return last.keep(server, ClientModels([Level(states, used, modules)]))

    return models


def submodel_algorithm(
    fed: Federation,
    plan: Callable[[int], Plan],
    aggregate: Callable,
    source: Callable[[Server], Mapping[str, Tensor]] = lambda server: server["global"],
) -> Algorithm:
    """FedAvg with another server; clients receive and use parts of the global model.

    Args:
        plan, source: see `models_of`.
    """

    def send(server, clients, rng):
        return {"model": extract_all(source(server), [plan(client) for client in clients])}

    return replace(fedavg(fed), send=send, aggregate=aggregate, models=models_of(fed, plan, source), plan=plan)


def with_own_tensors(fed: Federation, plans: Sequence[Plan], own_names: Sequence[Collection[str]]) -> Algorithm:
    """FedAvg of parts of the global model, with some tensors for each architecture.

    The server keeps these in its part "own", as "1:head.weight" for architecture 1, and averages them over the clients
    of the architecture. Other tensors are averaged, element by element, over the clients that hold the element. The own
    tensors of the architecture that is the global model are the global model's. If no client has it, the global model
    gets what all clients together would make of its tensors, so that there is a model to deploy.

    Args:
        plans: where each architecture of the fleet lies in the global model.
        own_names: the names of each architecture's own tensors.
    """
    fleet = fed.fleet_or_uniform
    whole = next((k for k, plan in enumerate(plans) if plan.small_shapes == plan.shapes), None)
    apart = [
        {} if k == whole else {name: f"{k}:{name}" for name in plan.entries if name in own_names[k]}
        for k, plan in enumerate(plans)
    ]
    shapes = dict(plans[0].shapes)
    shapes |= {key: plan.small_shapes[name] for plan, names in zip(plans, apart) for name, key in names.items()}
    joint = [_joint(plan, names, shapes, shared=whole is None) for plan, names in zip(plans, apart)]

    def plan(client):
        return joint[fleet.owned[client]]

    def within(client):
        return plans[fleet.owned[client]]

    def everything(server):
        return {**server["global"], **server["own"]}

    def init():
        start, own_tensors = fed.initial(), {}
        for part, names in zip(plans, apart):
            small = part.extract(start)
            own_tensors |= {key: small[name] for name, key in names.items()}
        return {"global": start, "own": own_tensors}

    def aggregate(server, clients, update, rng):
        places = [plan(client) for client in clients]
        after = fed.average(update.received, update.sizes, everything(server), plans=places)
        return {part: {name: after[name] for name in server[part]} for part in ("global", "own")}

    return replace(submodel_algorithm(fed, plan, aggregate, everything), init=init, plan=within)


def _joint(plan: Plan, own_names: Mapping[str, str], shapes: Mapping[str, tuple[int, ...]], shared: bool) -> Plan:
    """Return where an architecture's model lies in the global and the own tensors.

    The own tensors of all architectures are taken together.

    Args:
        shared: whether own tensors also count in the average of the global model's.
    """
    entries = {}
    for name, sources in plan.entries.items():
        entries[name] = sources
        if name in own_names:
            source = Source(own_names[name], (None,) * len(shapes[own_names[name]]))
            entries[name] = (source, *sources) if shared else (source,)
    return Plan(entries, shapes)

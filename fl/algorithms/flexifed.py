"""FlexiFed: Wang et al., "FlexiFed: Personalized Federated Learning for Edge Clients with Heterogeneous Model
Architectures" (WWW 2023), section 4.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, TypeAlias

from torch import nn

from fl.algorithms.algorithm import Algorithm
from fl.algorithms.method import Method
from fl.algorithms.parts.submodels import submodel_algorithm
from fl.base.errors import FLError
from fl.base.settings import one_of
from fl.federation import Federation
from fl.models.fleet import Fleet
from surgery import Plan, layers, state
from surgery.plan import Source

STRATEGIES = ("basic", "clustered", "max")
Signature: TypeAlias = tuple[str, str, tuple[tuple[int, ...], ...]]  # name, kind and shapes of a layer: all must agree


@dataclass(frozen=True)
class FlexiFedOptions:
    """FlexiFed."""

    strategy: Annotated[str, one_of(*STRATEGIES)] = "max"
    """what is averaged: basic (the leading layers that all architectures have in common), clustered (these, and the
    others among clients of the same architecture) or max (each layer among all whose layers up to it are equal)"""


def flexifed(fed: Federation, options: FlexiFedOptions = FlexiFedOptions()) -> Algorithm:
    """Clients of different depths share the layers that they have in common from the input on.

    The layers of all architectures make a tree: architectures that agree up to some layer share its branch up to there,
    and part after it. The server keeps the tensors of the tree, and each architecture's plan says where its path lies.
    Layers that are not shared belong to the client (basic) or to its architecture. Clients are weighted by their
    samples. With one architecture every strategy is FedAvg.

    The global model has the largest architecture, which some client must have. With `basic`, its layers after the
    common ones come from the first honest client with this architecture.

    Raises:
        FLError: if architectures have no first layer in common, or no client has the largest.
    """
    fleet = fed.fleet_or_uniform
    largest = _largest(fed, fleet)
    plans = _plans(fleet, options.strategy)
    deployed = plans[largest]

    def init():
        start, tree = fed.initial(), {}
        for client, plan in enumerate(plans):  # each path begins as its part of one model does
            if missing := [name for name, sources in plan.entries.items() if sources[0].name not in tree]:
                small = fleet[client].plan.extract(start)
                tree |= {plan.entries[name][0].name: small[name] for name in missing}
        return {"global": deployed.extract(tree), "tree": tree}

    def aggregate(server, clients, update, rng):
        paths = [plans[client] for client in clients]
        after = fed.average(update.received, update.sizes, server["tree"], plans=paths)
        return {"global": deployed.extract(after), "tree": after}

    parts = submodel_algorithm(fed, lambda client: plans[client], aggregate, lambda server: server["tree"])
    return replace(parts, init=init, plan=None)  # clients' places are in the tree, not in the global model


def _largest(fed: Federation, fleet: Fleet) -> int:
    """Return the first client with the global architecture, honest ones before others."""
    shapes = {name: tuple(tensor.shape) for name, tensor in state(fed.model).items()}
    for client in sorted(range(len(fleet)), key=lambda client: client in fed.malicious):
        if fleet[client].plan.small_shapes == shapes:
            return client
    raise FLError(
        "FlexiFed deploys the model of the largest architecture, and no client has that of every width and depth: "
        "use --architectures.choose cycle, say, or other --architectures.depths"
    )


def _plans(fleet: Fleet, strategy: str) -> list[Plan]:
    """Return where each client's model lies in the tree."""
    paths = [_signatures(kind.model) for kind in fleet.architectures]
    common = sum(1 for _ in _shared_layers(paths))
    if not common:
        raise FLError(
            "FlexiFed shares the leading layers of clients' models, and these have not even the first in common: give "
            "one --architectures.widths, and several --architectures.depths"
        )
    entries = []
    for client, kind in enumerate(fleet.owned):
        nodes: dict[str, str] = {}
        for i, layer in enumerate(layers(fleet.architectures[kind].model)):
            if i < common:
                node = f"common{i}"
            elif strategy == "basic":
                node = f"client{client}.{i}"
            elif strategy == "clustered":
                node = f"architecture{kind}.{i}"
            else:  # the first architecture that goes this way so far gives the branch its name
                same = next(k for k, path in enumerate(paths) if path[: i + 1] == paths[kind][: i + 1])
                node = f"architecture{same}.{i}"
            nodes |= {name: f"{node}.{j}" for j, name in enumerate(layer.tensors)}
        entries.append(nodes)
    shapes = {
        node: fleet[client].plan.small_shapes[name]
        for client, nodes in enumerate(entries)
        for name, node in nodes.items()
    }
    plans: dict[tuple, Plan] = {}  # equal plans are one object
    for nodes in entries:
        if (key := tuple(nodes.items())) not in plans:
            sources = {name: (Source(node, (None,) * len(shapes[node])),) for name, node in nodes.items()}
            plans[key] = Plan(sources, shapes)
    return [plans[tuple(nodes.items())] for nodes in entries]


def _signatures(model: nn.Module) -> list[Signature]:
    tensors = state(model)
    return [
        (layer.name, layer.kind, tuple(tuple(tensors[name].shape) for name in layer.tensors)) for layer in layers(model)
    ]


def _shared_layers(paths: Sequence[list[Signature]]):
    """Yield the leading layers that all paths share; all layers of a single path."""
    for position in zip(*paths):
        if len(set(position)) > 1:
            return
        yield position[0]


METHOD = Method(flexifed, FlexiFedOptions(), clients="heterogeneous", lacks={"low_rank"})

"""HeteroFL: Diao et al., "HeteroFL: Computation and Communication Efficient Federated Learning for Heterogeneous
Clients" (ICLR 2021), algorithm 1.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from fl.algorithms.algorithm import Algorithm
from fl.algorithms.fedavg import fedavg
from fl.algorithms.method import Method
from fl.algorithms.parts.personal import classifier
from fl.algorithms.parts.submodels import extract_all, models_of
from fl.federation import Federation
from fl.models.fleet import remove_grafting
from surgery import Plan, state
from surgery.plan import Source, as_runs
from zoo import Spec


@dataclass(frozen=True)
class HeteroFLOptions:
    """HeteroFL, and FedRolex."""

    scaler: bool = True
    """divide activations by the width rate while training, the paper's Scaler (zoo models only)"""
    own_rows: bool = True
    """average a class's row of the classifier (of text: of the embedding, too) only over clients that have the class"""
    weighted: bool = False
    """weight clients by their numbers of samples in the average, instead of equally"""

    def adapt(self, spec: Spec) -> Spec:
        """Return the spec of the models that the method trains."""
        return replace(spec, scaler=True) if self.scaler and "scaler" in spec.architecture.defaults else spec


def heterofl(
    fed: Federation,
    options: HeteroFLOptions = HeteroFLOptions(),
    window: Callable[[int, int], Plan] | None = None,
) -> Algorithm:
    """Send each client the leading channels of every layer; average each element over the clients that hold it.

    Elements that no client holds keep their value. Depths may differ too: a client then has the first blocks of each
    section. The paper's masked loss and static batch norm are settings of every method (--masked-loss, --norm
    static_batch). With one architecture, weighted and without own_rows, this is FedAvg.

    Args:
        window: (client, round) -> where its model lies in the global one, for methods that choose other channels.
    """
    fleet = fed.fleet_or_uniform
    plans_by_architecture = [remove_grafting(kind.plan) for kind in fleet.architectures]
    row_plans: dict[int, Plan | None] = {}

    def leading(client, number=0):
        return plans_by_architecture[fleet.owned[client]]

    fixed_window = None
    if window is None:
        fixed_window = window = leading

    def rows(clients):  # for each client a plan within its model: the rows that count; None: all
        if fresh := [client for client in dict.fromkeys(clients) if client not in row_plans]:
            for client, held in zip(fresh, fed.reported_classes(fresh).cpu()):
                row_plans[client] = None if held.all() else plan_held_rows(fleet[client].model, held)
        return [row_plans[client] for client in clients]

    def send(server, clients, rng):
        return {"model": extract_all(server["global"], [window(client, rng.round) for client in clients])}

    def aggregate(server, clients, update, rng):
        plans = [window(client, rng.round) for client in clients]
        states, weights = update.received, update.sizes
        if options.own_rows:
            inner_plans = rows(clients)
            states = [inner.extract(state) if inner else state for inner, state in zip(inner_plans, states)]
            plans = [plan.compose(inner) if inner else plan for plan, inner in zip(plans, inner_plans)]
        if not options.weighted:
            weights = update.arrived
        return {"global": fed.average(states, weights, server["global"], plans=plans)}

    models = models_of(fed, lambda client: window(client, 0))
    return replace(fedavg(fed), send=send, aggregate=aggregate, models=models, plan=fixed_window)


def plan_held_rows(model: nn.Module, held: torch.Tensor) -> Plan:
    """Return the plan of a model without the rows of classes that are not held.

    The rows lie in the classifier and, for text, in the token embedding, since the classes of text are tokens.

    Args:
        held: bool [classes].

    >>> print(plan_held_rows(nn.Linear(1, 3, bias=False), torch.tensor([True, False, True])).describe())
    Plan of 72232fc6ec608ef8: 2 of 3 elements, 0 edits
      weight  [2, 1]             = [0:1|2:3, :]
    """
    sizes = (len(held), len(held) + 1)  # one more is the mask of a masked language model, which everyone holds
    embeddings = [n for n, m in model.named_modules() if isinstance(m, nn.Embedding) and m.num_embeddings in sizes]
    names = {*classifier(model), *(f"{name}.weight" for name in embeddings[:1])}  # positions might be as many
    shapes = {name: tuple(tensor.shape) for name, tensor in state(model).items()}
    entries = {}
    for name, shape in shapes.items():
        index: list[Any] = [None] * len(shape)
        if name in names and shape:
            index[0] = as_runs([*held.nonzero().flatten().tolist(), *range(len(held), shape[0])])
        entries[name] = (Source(name, tuple(index)),)
    return Plan(entries, shapes)


METHOD = Method(heterofl, HeteroFLOptions(), clients="heterogeneous", labels=lambda options: options.own_rows)

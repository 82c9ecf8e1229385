"""What methods share whose clients train parts of one global model."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from fl.base.rng import Rng
from fl.federation import Federation
from fl.federation.last_value import LastValue
from fl.federation.own import Level, Own
from fl.federation.trained import Trained
from surgery import State, Submodel


def extract_all(full: Mapping[str, Tensor], plans: Sequence[Submodel]) -> list[State]:
    """The submodel of each plan; plans that are the same object share one, so nobody may change it.

    >>> import torch
    >>> from surgery.submodel import Source
    >>> plan = Submodel({"w": (Source("w", (((0, 1),),)),)}, {"w": (3,)})
    >>> extract_all({"w": torch.tensor([1.0, 2.0, 3.0])}, [plan, plan])
    [{'w': tensor([1.])}, {'w': tensor([1.])}]
    """
    known = {id(plan): plan.extract(full) for plan in {id(plan): plan for plan in plans}.values()}
    return [known[id(plan)] for plan in plans]


def train_submodels(
    fed: Federation, full: Mapping[str, Tensor], plans: Sequence[Submodel], clients: Sequence[int], rng: Rng
) -> Trained:
    """Give each client its part of the global model, and let it train this part (FedFA, algorithm 1, lines 6 to 10)."""
    fleet = fed.fleet_or_uniform
    models = [fleet[client].model for client in clients]
    return fed.train_mixed(models, extract_all(full, plans), clients, rng)


class SubmodelPredictor:
    """Predictions of the global model, and of each client with its part of it.

    The parts of the last server state that was asked about are remembered, with the statistics of their static batch
    norms: these take one pass over the training data for each plan, and clients of one architecture share a plan.

    Args:
        plan: client -> where its model lies among the tensors that `source` returns.
        source: server -> the tensors from which plans read; by default the global model's.
    """

    def __init__(
        self,
        fed: Federation,
        plan: Callable[[int], Submodel],
        source: Callable[[dict], Mapping[str, Tensor]] = lambda server: server["global"],
    ) -> None:
        self.fed, self.plan, self.source = fed, plan, source
        self.fleet = fed.fleet_or_uniform
        self._last = LastValue()  # of a server, its parts: dict[int, tuple[Submodel, State]]

    def predict(self, server: dict, images: Tensor, client: int | None = None) -> Tensor:
        """Logits; see `Algorithm.predict`."""
        if client is None:
            return self.fed.predict(server["global"], images)
        return self.fed.predict(self._part(server, client), images, self.fleet[client].model)

    def own(self, server: dict) -> Own:
        """The parts of all clients; see `Algorithm.own`."""
        plans = [self.plan(client) for client in range(len(self.fleet))]
        first: dict[int, int] = {}  # by the plan's id: the first client that has it
        for client, plan in enumerate(plans):
            first.setdefault(id(plan), client)
        numbers = {plan: k for k, plan in enumerate(first)}
        used = torch.tensor([numbers[id(plan)] for plan in plans])
        states = [self._part(server, client) for client in first.values()]
        return Own([Level(states, used, [self.fleet[client].model for client in first.values()])])

    def _part(self, server: dict, client: int) -> State:
        """A client's part of the global model, with statistics."""
        model, plan = self.fleet[client].model, self.plan(client)
        if (parts := self._last.of(server)) is None:
            parts = self._last.keep(server, {})
        if id(plan) not in parts:
            state = plan.extract(self.source(server))
            parts[id(plan)] = plan, state | self.fed.statistics(state, model)  # the plan keeps its id while it is here
        return parts[id(plan)][1]


Deployed = SubmodelPredictor  # its name in version 0.1

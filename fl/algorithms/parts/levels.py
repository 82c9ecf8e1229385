"""The three kinds of level that FeMAM adds up.

One model for all clients, cluster models, a model for each client. Equations: Chen et al., "Multi-Level Additive
Modeling for Structured Non-IID Federated Learning" (2024), appendix B.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fl.algorithms.parts.clustering import Clustering, centre, cluster_means, starts_of
from fl.base.rng import Rng
from fl.engine.objectives import Batch, Call, Objective, proximal
from fl.federation import Federation, traffic
from fl.federation.client_models import Level
from fl.federation.clients import Message
from fl.federation.update import ClientUpdate
from surgery import Stack, State, broadcast
from surgery.transfer import upload


class LevelType:
    """The base of the kinds of level.

    Attributes:
        width: the number of models.
        lam: how strongly a participant's model is pulled towards the one that it received, while it trains.
    """

    def __init__(self, fed: Federation, lam: float, width: int) -> None:
        self.fed, self.lam, self.width = fed, lam, width

    def objective(self) -> Objective:
        """Return a participant's objective (B.2, B.5): the loss, and any pull."""
        return proximal(self.lam, self.fed.local.objective) if self.lam else self.fed.local.objective

    def begin(self, model: State) -> Stack:
        """Return the level's models, which all start as this one."""
        return broadcast(model, self.width)

    def anchor(self, starts: Stack) -> dict[str, Any]:
        """Return what participants' models are pulled to, for the objective."""
        return {"anchor": starts} if self.lam else {}

    def offers(self, level: Level) -> Tensor:
        """Return the models that a client may choose after a level without it: int64."""
        return level.used[level.used >= 0].unique()

    def upload(self, update: ClientUpdate) -> ClientUpdate:
        """Return what the participants send of what they trained."""
        return update

    def mean(self, level: Level, otherwise: State) -> State:
        """Return the mean of the level's models, weighted by their clients' samples."""
        return centre(self.fed, level.models, level.used)


class GlobalLevel(LevelType):
    """One model for all clients."""

    def __init__(self, fed: Federation, lam: float) -> None:
        super().__init__(fed, lam, 1)

    def start(self) -> Tensor:
        """Return each client's model before a first level is trained, int64 [clients].

        -1 stands for no model.
        """
        return torch.zeros(len(self.fed.clients), dtype=torch.int64)

    def message(self, level: Level, clients: Sequence[int]) -> Message:
        """Return what each participant begins with (B.1a)."""
        return {"model": broadcast(level.state(0), len(clients))}

    def collect(self, level: Level, clients: Sequence[int], update: ClientUpdate, rng: Rng) -> Level:
        """Return the level with the participants' mean, weighted by samples (B.1b)."""
        return level._replace(models=cluster_means(self.fed, level.models, level.used, clients, update))


class ClusterLevel(LevelType):
    """A model for each cluster of clients; participants are assigned every round.

    Attributes:
        clustering: how they are assigned.
        share_gradients: whether a participant's loss is multiplied by its share of all samples.
    """

    def __init__(
        self, fed: Federation, lam: float, clusters: int, clustering: Clustering, share_gradients: bool
    ) -> None:
        super().__init__(fed, lam, clusters)
        self.clustering, self.share_gradients = clustering, share_gradients
        self.sizes = fed.clients.train.sizes

    def start(self) -> Tensor:
        """Return the assignment of no client to any cluster."""
        return torch.full((len(self.fed.clients),), -1)

    def message(self, level: Level, clients: Sequence[int]) -> Message:
        """Return the model of a participant's cluster, or the clusters' mean (B.1a).

        The mean is for a participant in no cluster. With it goes the participant's share of all samples, if the
        gradient is to be multiplied by it.
        """
        begin = starts_of(level.models, level.used, clients, centre(self.fed, level.models, level.used))
        if not self.share_gradients:
            return {"model": begin}
        return {"model": begin, "weight": upload(self.sizes[clients] / self.sizes.sum(), self.fed.data.device)}

    def objective(self) -> Objective:
        """Return the loss and the pull (B.4).

        On request the loss is multiplied by the client's share of all samples.
        """
        loss = _weigh(self.fed.local.objective) if self.share_gradients else self.fed.local.objective
        return proximal(self.lam, loss) if self.lam else loss

    def collect(self, level: Level, clients: Sequence[int], update: ClientUpdate, rng: Rng) -> Level:
        """Return the participants' new clusters (B.3), and the clusters' means (B.1b)."""
        return Level(*self.clustering.update(level.models, level.used, clients, update, rng))


class PersonalLevel(LevelType):
    """A model for each client, which never leaves it."""

    def __init__(self, fed: Federation, lam: float) -> None:
        super().__init__(fed, lam, len(fed.clients))

    def start(self) -> Tensor:
        """Return the assignment of each client to its own model."""
        return torch.arange(self.width)

    def begin(self, model: State) -> Stack:
        """Return a model for each client, which keeps it."""
        return self.fed.client_states(model)

    def message(self, level: Level, clients: Sequence[int]) -> Message:
        """Return nothing: a participant continues with its own model."""
        return {}

    def upload(self, update: ClientUpdate) -> ClientUpdate:
        """Nothing: a participant keeps its model."""
        return update._replace(received={}, client_states=update.states)

    def mean(self, level: Level, otherwise: State) -> State:
        """Return the mean of all clients' models, where the server has them."""
        return self.fed.mean_of_clients(level.models, otherwise)

    def collect(self, level: Level, clients: Sequence[int], update: ClientUpdate, rng: Rng) -> Level:
        """Assign each participant the model that it trained, unless it was dropped."""
        took = torch.tensor([client for client, size in zip(clients, update.sizes) if size])
        return level._replace(used=level.used.index_copy(0, took, took))

    def offers(self, level: Level) -> Tensor:
        """Return no model: no client receives another client's model."""
        return torch.empty(0, dtype=torch.int64)


def add_level_traffic(
    metrics: Mapping[str, float], participants: int, level: Level, after: Level, offers: int
) -> dict[str, float]:
    """Return the metrics of a round with the traffic of the end of a level.

    Every client that took part receives its model, one that did not all models on offer; then, if somebody left a
    cluster, those who stay in it receive its new mean.

    Args:
        level: with the model that each client trained. after: with the model that it keeps.
        offers: the number of models on offer.
    """
    took, missed = (level.used >= 0).sum().item(), (level.used < 0).sum().item()
    left = level.used[(level.used >= 0) & (after.used < 0)].unique()
    copies = took + missed * offers + torch.isin(after.used, left).sum().item()
    model = sum(tensor.nbytes for tensor in level.state(0).values())
    return traffic.more(metrics, model, down=metrics["bytes_down"] * copies / participants)


def _weigh(objective: Objective) -> Objective:
    def weighted(call: Call, params: State, context: Any, batch: Batch) -> Tensor:
        return context["weight"] * objective(call, params, context, batch)

    return weighted

"""FeSEM: Xie et al., "Multi-Center Federated Learning" (2021); FeMAM's paper compares with it."""

from dataclasses import dataclass, replace
from typing import Annotated

import torch

from fl.algorithms.algorithm import Algorithm, Levels
from fl.algorithms.fedavg import fedavg
from fl.algorithms.method import Method
from fl.algorithms.parts.clustering import ASSIGNMENTS, COMPARED, Clustering, centre, starts_of
from fl.base.errors import FLError
from fl.base.settings import AtLeast1, Default, one_of
from fl.federation import Federation
from fl.federation.client_models import ClientModels, Level
from surgery import broadcast, unstack


@dataclass(frozen=True)
class FeSEMOptions:
    """FeSEM."""

    clusters: AtLeast1 = Default(5)
    """number of cluster models; without this flag no more than clients"""
    clustering: Annotated[str, one_of(*ASSIGNMENTS)] = "nearest"
    """how clients are assigned: nearest (to the cluster models, after K-means in the first round) or kmeans (afresh in
    every round)"""
    compare: Annotated[str, one_of(*COMPARED)] = "all"
    """the weights that are compared: all, or the classifier's, divided by their sum's absolute value"""


def fesem(fed: Federation, options: FeSEMOptions = FeSEMOptions(), flags: str = "fesem") -> Algorithm:
    """Train on each client the model of its cluster; the client is then assigned to the nearest cluster model.

    Every cluster model is the mean of its clients' by their number of samples. With one cluster this is FedAvg.

    All cluster models begin as the same model, and K-means over the models of the first round makes the first clusters.
    (If they began from different random models, no client would ever come nearer to another cluster's.) A client that
    takes part for the first time in a later round begins from the mean of the cluster models ("global", which strangers
    use as well).

    Args:
        flags: the name of the method in the options' flags.
    """
    if options.clusters > len(fed.clients):
        raise FLError(f"--{flags}.clusters {options.clusters}: give 1 to {len(fed.clients)}, the number of clients")
    clustering = Clustering.make(fed, options.clustering, options.compare, flags)

    def init():
        start = fed.initial()
        no_clusters = torch.full((1, len(fed.clients)), -1)
        return {"global": start, "clusters": broadcast(start, options.clusters), "structure": {"pathways": no_clusters}}

    def send(server, clients, rng):
        (mapping,) = server["structure"]["pathways"]
        return {"model": starts_of(server["clusters"], mapping, clients, server["global"])}

    def aggregate(server, clients, update, rng):
        (mapping,), clusters = server["structure"]["pathways"], server["clusters"]
        clusters, mapping = clustering.update(clusters, mapping, clients, update, rng)
        mean = centre(fed, clusters, mapping)
        return {"global": mean, "clusters": clusters, "structure": {"pathways": mapping[None]}}

    def models(server):
        mapping = server["structure"]["pathways"][0]
        used = torch.where(mapping < 0, options.clusters, mapping)
        return ClientModels([Level([*unstack(server["clusters"]), server["global"]], used)])

    def levels(server):
        return Levels([str(options.clusters)], server["structure"]["pathways"].tolist(), 1)

    return replace(fedavg(fed), init=init, send=send, aggregate=aggregate, models=models, levels=levels)


METHOD = Method(fesem, FeSEMOptions(), clients="personalized", lacks={"whole_average", "same_model"})

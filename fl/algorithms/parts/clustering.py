"""Clusters of clients by their models: K-means, then the nearest centre.

It is K-means as long as there are no centres (FeSEM, and FeMAM's cluster levels: Eq. 4 and 7).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fl.algorithms.parts.personal import classifier
from fl.base.errors import FLError
from fl.base.rng import Rng
from fl.federation import Federation
from fl.federation.cohort import select
from fl.federation.update import ClientUpdate
from surgery import Stack, State, average, distance
from surgery.states import stack_size
from surgery.transfer import double, download, upload

_RESTARTS = 10  # of K-means, as in the released code
ASSIGNMENTS = ("nearest", "kmeans")
COMPARED = ("all", "classifier")


@dataclass(frozen=True)
class Clustering:
    """The rule by which clients are assigned to clusters.

    Attributes:
        how: nearest (to the nearest centre, after K-means in the first round) or kmeans (again in every round).
        features: from models to the tensors by which they are compared.
        fed: the federation. Its `average` averages the models of a cluster.
    """

    how: str
    features: Callable[[Stack], Stack]
    fed: Federation

    @classmethod
    def make(cls, fed: Federation, how: str, compare: str, flags: str) -> "Clustering":
        """From the values of the options --FLAGS.clustering and --FLAGS.compare."""
        model = fed.model
        names = [name for name, _ in model.named_parameters()]  # running variances would outweigh the weights
        if compare == "all":
            return cls(how, lambda models: {name: models[name] for name in names}, fed)
        head = [name for name in classifier(model) if name in names and name.endswith("weight")]
        if not head:
            raise FLError(
                f"--{flags}.compare classifier: {type(model).__name__} has no weight there; compare all",
                code="unsupported",
            )
        return cls(how, lambda models: {name: _unit_sum(models[name]) for name in head}, fed)

    def update(
        self, models: Stack, mapping: Tensor, clients: Sequence[int], update: ClientUpdate, rng: Rng
    ) -> tuple[Stack, Tensor]:
        """Assign every participant of a round again, and return the clusters.

        Each cluster is the mean of its participants by their number of samples. A cluster without any keeps its model;
        a client that did not take part, or was dropped, keeps its cluster.

        Args:
            models: the K centres at the beginning of the round.
            mapping: the cluster of each client of the population, -1 for none yet; int64, on the CPU.
            clients: the participants, in the order of the update's models.
        """
        rows = [row for row, size in enumerate(update.sizes) if size]
        rows = sorted(rows, key=lambda row: clients[row])
        states, centres = (self.features(stack) for stack in (select(update.received, rows), models))
        begun = bool((mapping >= 0).any())
        if begun and self.how == "nearest":
            clusters = distance(states, centres).argmin(1)
        else:
            clusters = torch.from_numpy(_kmeans(states, centres, begun, rng))
        mapping = mapping.clone()
        mapping[[clients[row] for row in rows]] = clusters.cpu()
        return cluster_means(self.fed, models, mapping, clients, update), mapping


def cluster_means(
    fed: Federation, models: Stack, mapping: Tensor, clients: Sequence[int], update: ClientUpdate
) -> Stack:
    """Return each cluster's mean, weighted by its participants' samples (Eq. 7).

    Its model if there are none.
    """
    k = stack_size(models)
    members = torch.nn.functional.one_hot(mapping[clients] + 1, k + 1)[:, 1:]  # -1, no cluster, falls away
    return fed.average(update.received, (members * torch.tensor(update.sizes)[:, None]).T, fallback=models)


def starts_of(models: Stack, mapping: Tensor, clients: Sequence[int], newcomers: State) -> Stack:
    """Return the models that clients begin from: their cluster's or the newcomers'.

    Clients in no cluster (-1) are newcomers.

    >>> starts_of({"w": torch.tensor([[1.0], [2.0]])}, torch.tensor([1, -1]), [0, 1], {"w": torch.zeros(1)})["w"]
    tensor([[2.],
            [0.]])
    """
    rows = upload(mapping[clients], next(iter(models.values())).device)  # -1 is the last row
    return {name: torch.cat([tensor, newcomers[name][None]])[rows] for name, tensor in models.items()}


def centre(fed: Federation, models: Stack, mapping: Tensor) -> State:
    """Return the cluster models' mean, weighted by their clients' samples.

    It is the plain mean if no client is in a cluster.
    """
    k, sizes = stack_size(models), fed.clients.train.sizes
    inside = mapping >= 0
    weights = torch.zeros(k, dtype=torch.int64).index_add_(0, mapping[inside], sizes[inside])
    return fed.keep_frozen(models, average(models, weights=weights if weights.any() else None))


def _kmeans(states: Stack, centres: Stack, begun: bool, rng: Rng) -> np.ndarray:
    """Return the cluster of each state by K-means, int64 [n].

    Args:
        begun: whether clusters get the numbers of the centres that they are near; if not, they are numbered in the
            order of the states.
    """
    from scipy.optimize import linear_sum_assignment
    from sklearn.cluster import KMeans

    k = stack_size(centres)
    every = _coordinates({name: torch.cat([centres[name], states[name]]) for name in centres})
    old, points = every[:k], every[k:]
    seed = int(rng.numpy("clusters").integers(2**31))
    kmeans = KMeans(min(k, len(points)), n_init=_RESTARTS, random_state=seed).fit(points)
    # Fewer labels than clusters may occur, where models are equal.
    labels, first, labelled = np.unique(kmeans.labels_, return_index=True, return_inverse=True)
    if begun:
        _, numbers = linear_sum_assignment(((kmeans.cluster_centers_[labels, None] - old[None]) ** 2).sum(-1))
    else:
        numbers = first.argsort().argsort()
    return numbers[labelled].astype(np.int64)


def _coordinates(models: Stack) -> np.ndarray:
    """Return points [n, n] as far apart as the n models, for a faster K-means.

    Equal models are equal points: what lies below rounding is cut off, or K-means would find clusters in it.
    """
    gram: Any = 0
    for tensor in models.values():
        x = double(tensor.flatten(1))
        x = x - x.mean(0)
        gram = gram + x @ x.T
    (gram,) = download([gram])
    values, vectors = torch.linalg.eigh(gram)
    largest = values[-1].clamp(min=0).sqrt()
    noise = len(values) * torch.finfo(values.dtype).eps * values[-1].abs()
    points = vectors * torch.where(values > noise, values, 0).sqrt()
    return (torch.round(points / largest.clamp(min=1e-300), decimals=10) * largest).numpy()


def _unit_sum(weights: Tensor) -> Tensor:
    """Divide each of K tensors by the absolute value of its sum, as in released code."""
    return weights / weights.flatten(1).sum(1).abs().clamp(min=1e-12).view(-1, *[1] * (weights.ndim - 1))

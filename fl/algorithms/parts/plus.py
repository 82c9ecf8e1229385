"""Methods whose clients fine-tune the model that they receive, such as FedAvg+: Chen et al., "Multi-Level Additive
Modeling for Structured Non-IID Federated Learning" (2024), section C.1.
"""

from dataclasses import replace

import torch

from fl.algorithms.algorithm import Algorithm, Server
from fl.algorithms.parts.personal import trained_or_same
from fl.base.rng import Rng
from fl.federation import Federation
from fl.federation.client_models import shared


def fine_tuned(fed: Federation, algorithm: Algorithm, epochs: int) -> Algorithm:
    """The same rounds; but a client predicts with the model that it would receive, fine-tuned on its own training data.

    Predictions are a function of the server alone, so the server also keeps the seed and the round ("rng", int64 on the
    CPU). Batches are drawn apart from those of the rounds. The learning rate is that of the last round: that of the
    next one may lie past the end of the schedule, where a cosine's is 0. A client that diverges keeps its start.
    Nothing more is sent than by the method itself, and a stranger gets the same model as there. The time of the
    fine-tuning counts as evaluation, not as part of a round.

    Args:
        epochs: how long clients fine-tune; with 0 this is the method itself.
    """
    if not epochs:
        return algorithm
    chunk = fed.local.max_parallel_clients or fed.participants  # no more side by side than in a round
    tuning = fed.with_local(epochs=epochs, max_parallel_clients=chunk)

    def init():
        return {**algorithm.init(), "rng": _marked(Rng(0))}

    def server(state, clients, update, rng):
        result = algorithm.server(state, clients, update, rng)
        after, metrics = result if isinstance(result, tuple) else (result, {})
        return {**after, "rng": _marked(rng)}, metrics

    def models(state):
        found = algorithm.models(state) if algorithm.models else shared(state["global"], len(fed.clients))
        return found._replace(rng=last_round(state))

    def personalize(models, own, clients, rng):
        return trained_or_same(tuning, models, clients, rng.apart("fine-tune"))

    return replace(algorithm, init=init, server=server, models=models, personalize=personalize)


def last_round(server: Server) -> Rng:
    """The random streams of a server's last round; before the first round, those of round 1."""
    seed, number = (int(server["rng"][name]) for name in ("seed", "round"))
    return Rng(seed, max(number, 1))


def _marked(rng: Rng) -> dict[str, torch.Tensor]:
    return {"seed": torch.tensor(rng.seed), "round": torch.tensor(rng.round)}

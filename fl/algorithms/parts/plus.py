"""Methods whose clients fine-tune the model that they receive, such as FedAvg+: Chen et al., "Multi-Level Additive
Modeling for Structured Non-IID Federated Learning" (2024), section C.1.
"""

from collections.abc import Callable

import torch

from fl.algorithms.algorithm import Algorithm, Server
from fl.algorithms.parts.personal import row, trained_or_same
from fl.base.rng import Rng
from fl.federation import Federation
from fl.federation.last_value import LastValue
from fl.federation.own import personal
from fl.federation.visit import predicting
from surgery import Stack


def fine_tuned(fed: Federation, algorithm: Algorithm, epochs: int, starts: Callable[[Server], Stack]) -> Algorithm:
    """The same rounds; but a client predicts with the model that it would receive, fine-tuned on its own training data.

    All clients are fine-tuned together, when the first of them is asked about, and remembered until another server is
    asked about. Predictions are a function of the server alone, so the server also keeps the seed and the round ("rng",
    int64 on the CPU). Batches are drawn apart from those of the rounds. The learning rate is that of the last round:
    that of the next one may lie past the end of the schedule, where a cosine's is 0. A client that diverges keeps its
    start. Nothing more is sent than by the method itself, and a stranger gets the same model as there. The time of the
    fine-tuning counts as evaluation, not as part of a round.

    Args:
        epochs: how long clients fine-tune; with 0 this is the method itself.
        starts: server -> the model that each client of the population fine-tunes, a row for each client.
    """
    if not epochs:
        return algorithm
    chunk = fed.local.chunk or fed.participants  # no more side by side than in a round
    tuning = fed.with_local(epochs=epochs, chunk=chunk)
    everybody = list(range(len(fed.clients)))
    last = LastValue()

    def init():
        return {**algorithm.init(), "rng": _marked(Rng(0))}

    def round(server, clients, rng):
        server, trained = algorithm.round(server, clients, rng)
        return {**server, "rng": _marked(rng)}, trained

    def predict(server, images, client=None):
        if client is None:
            return algorithm.predict(server, images, None)
        return fed.predict(row(tuned(server), client), images)

    def tuned(server):
        if (models := last.of(server)) is None:
            models = last.keep(server, mine(starts(server), {}, everybody, _last_round(server)))
        return models

    def mine(received, kept, clients, rng):
        return trained_or_same(tuning, received, clients, rng.apart("fine-tune"))

    def own(server):
        if not fed.elsewhere:
            return personal(tuned(server))
        return predicting(fed, mine, starts(server), {}, {}, _last_round(server))

    return algorithm._replace(init=init, round=round, predict=predict, own=own, mine=mine)


def tuning_rng(server: Server) -> Rng:
    """The random streams of the fine-tuning after a server's last round; before the first round, those of round 1."""
    return _last_round(server).apart("fine-tune")


def _last_round(server: Server) -> Rng:
    seed, number = (int(server["rng"][name]) for name in ("seed", "round"))
    return Rng(seed, max(number, 1))


def _marked(rng: Rng) -> dict[str, torch.Tensor]:
    return {"seed": torch.tensor(rng.seed), "round": torch.tensor(rng.round)}

"""One round of a run: train, aggregate, measure."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fl.algorithms.algorithm import Server
from fl.base.rng import Rng
from fl.federation.cohort import Cohort
from fl.federation.divergence import check_finite
from fl.runs import evaluate
from fl.runs.metrics import Row
from fl.runs.state import RunState


def one_round(run: RunState, number: int) -> tuple[Server, Row, evaluate.ScoreTable]:
    """Do a round: sample clients, train and aggregate, evaluate what is due.

    Nothing is written, and the run stays as it is.

    Returns:
        The server after the round, its row of metrics.csv, and the scores of each client.
    """
    fed, algorithm, rng = run.fed, run.algorithm, Rng(run.config.seed, number)
    with _seed_random_numbers(run, rng):
        fed.meter.read()  # forget what evaluation trained (fine-tuned models), which is not part of a round
        started = time.perf_counter()
        clients = algorithm.choose(run.server, rng)
        server, update = algorithm.round(run.server, clients, rng)

        arrived = update.arrived or [True] * len(clients)
        counted = arrived if any(arrived) else [True] * len(clients)  # their starts, if no update arrived
        # waits for the device, so that the time below is the round's
        losses = check_finite(server, run.server, update.loss, number)[torch.tensor(counted)]
        took = time.perf_counter() - started

        row = {"round": number, "seconds": took, "train_loss": losses.mean().item(), **update.metrics}
        row |= fed.meter.metrics | {"macs": fed.meter.read() / 2 / len(clients)}
        if not all(arrived):
            row["dropped"] = arrived.count(False)
        cohort = evaluate.honest_cohort(fed, update.states, clients, counted)
        measured, scores = evaluate_round(run, server, cohort, number)
    return server, row | measured, scores


def evaluate_round(run: RunState, server: Server, cohort: Cohort, number: int) -> tuple[Row, evaluate.ScoreTable]:
    """Measure what is due after a round: its metrics, and the scores of each client."""
    fed, algorithm, wanted = run.fed, run.algorithm, run.due(number)
    scores: evaluate.ScoreTable = {}
    row = evaluate.mean_cosine(fed, cohort)
    if "models" in wanted:
        row |= evaluate.released_cosine(fed, cohort)
    participants = evaluate.evaluate_models(fed, cohort) if "models" in wanted else {}
    if "global" in wanted:
        scores = evaluate.score_clients(fed, lambda: algorithm.client_models(server))
        sizes = {part: getattr(fed.clients, part).sizes.tolist() for part in scores}
        left_out = fed.malicious or evaluate.silent(scores)
        row |= evaluate.summarise_clients(scores, left_out, sizes)
        # last, so that a checkpoint finds the global model's statistics as they were just collected
        row |= evaluate.evaluate_global(fed, lambda x: algorithm.predict(server, x, None))
    return row | participants, scores


@contextmanager
def _seed_random_numbers(run: RunState, rng: Rng) -> Iterator[None]:
    """Seed models that draw random numbers even in evaluation mode by the round.

    Nothing here draws from torch's own generators.
    """
    device = run.fed.data.device
    with torch.random.fork_rng([device] if device.type == "cuda" and torch.cuda.default_generators else []):
        torch.manual_seed(int(rng.numpy("evaluation").integers(2**63)))
        yield

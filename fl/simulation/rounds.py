"""The rounds of a run, and what is measured after each."""

import sys
import time
from collections.abc import Iterator
from functools import partial

import torch
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from fl.algorithms.algorithm import Algorithm, Server
from fl.base.rng import Rng
from fl.config import Config
from fl.federation import Federation
from fl.federation.attack import triggered
from fl.runs import evaluate
from fl.runs.client_scores import ClientTable
from fl.runs.metrics import Metrics


def rounds(
    config: Config,
    fed: Federation,
    algorithm: Algorithm,
    server: Server,
    done: int,
    metrics: Metrics,
    table: ClientTable,
) -> Iterator[tuple[int, Server]]:
    """Run the rounds after `done`, adding a row of metrics for each; yields (round, server)."""
    bar = tqdm(
        total=config.rounds,
        initial=done,
        desc=f"{config.algorithm[0]} seed {config.seeds[0]}",
        unit="round",
        mininterval=0.1 if sys.stderr.isatty() else 30,
        dynamic_ncols=True,
    )
    with bar, logging_redirect_tqdm():
        for number in range(done + 1, config.rounds + 1):
            fed.meter.read()  # what evaluation trained (fine-tuned models) is no part of a round
            started = time.perf_counter()
            rng = Rng(config.seeds[0], number)
            clients = algorithm.choose(fed, server, rng)
            server, trained = algorithm.round(server, clients, rng)
            kept = torch.tensor([size > 0 for size in trained.sizes or [1] * len(clients)])
            if (dropped := int((~kept).sum())) == len(kept):
                kept = ~kept  # nobody's model arrived: what is measured is what they started from
            loss = trained.loss.cpu()[kept].mean().item()  # waits for the device, so that the time below is the round's
            took = time.perf_counter() - started
            row = {"round": number, "seconds": took, "train_loss": loss, **trained.metrics}
            row["macs"] = fed.meter.read() / 2 / len(clients)
            if dropped:
                row["dropped"] = dropped
            alive = evaluate.honest_cohort(fed, trained.states, clients, kept.tolist())
            measured, scores = evaluate_round(config, fed, algorithm, server, alive, number)
            row |= measured
            metrics.add(row)
            table.add(metrics.rows, scores)
            if "accuracy" in row:
                bar.set_postfix_str(f"accuracy {row['accuracy']:.2%}", refresh=False)
            bar.update()
            yield number, server


def evaluate_round(
    config: Config, fed: Federation, algorithm: Algorithm, server: Server, cohort: evaluate.Cohort, number: int
) -> tuple[dict[str, float], evaluate.Scores]:
    """The metrics that are due in this round, all of them in the last, and the scores of each client, if they are."""
    scores: evaluate.Scores = {}
    row = evaluate.mean_cosine(fed, cohort)
    wanted = due(config, number)
    participants = evaluate.evaluate_models(fed, cohort) if "models" in wanted else {}
    if "global" in wanted and fed.attack and config.attack.kind == "trigger":
        predict = partial(algorithm.predict, server, client=None)
        row |= evaluate.attack_success(fed, predict, triggered(config.attack, fed.data), config.attack.target)
    if "global" in wanted:
        own = partial(algorithm.own, server) if algorithm.own else None
        scores = evaluate.score_clients(fed, lambda images, client: algorithm.predict(server, images, client), own)
        row |= evaluate.summarise_clients(scores, fed.attack.malicious if fed.attack else ())
        # last, so that a checkpoint finds the global model's statistics as they were just collected
        row |= evaluate.evaluate_global(fed, lambda images: algorithm.predict(server, images, None))
    return row | participants, scores


def due(config: Config, number: int) -> set[str]:
    """What is evaluated after a round: the global model, the participants' models; both in the last."""
    last, wanted = number == config.rounds, set()
    if last or number % config.eval_every == 0:
        wanted.add("global")
    if config.models_every and (last or number % config.models_every == 0):
        wanted.add("models")
    return wanted

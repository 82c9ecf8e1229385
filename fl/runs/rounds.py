"""The rounds of a run, and what is measured after each."""

import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext

import torch
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from fl.algorithms.algorithm import Server
from fl.base.rng import Rng
from fl.engine import progress
from fl.federation.cohort import Cohort
from fl.runs import evaluate
from fl.runs.columns import Moment, measure_columns
from fl.runs.metrics import Row
from fl.runs.simulation import Simulation
from fl.runs.together import agreed

_LONG = 10  # seconds of a round after which the bar also counts clients
_OFTEN = 0.5  # seconds between two such counts


def rounds(run: Simulation) -> Iterator[int]:
    """Do the rounds that are left, adding a row of metrics for each; yields their numbers, with a progress bar."""
    config = run.config
    bar = tqdm(
        total=config.rounds,
        initial=run.done,
        desc=f"{config.algorithm[0]} seed {config.seeds[0]}",
        unit="round",
        mininterval=0.1 if sys.stderr.isatty() else 30,
        dynamic_ncols=True,
    )
    within = Within(bar)
    with bar, logging_redirect_tqdm(), progress.shown(within) if sys.stderr.isatty() else nullcontext():
        for number in range(run.done + 1, config.rounds + 1):
            if run.over:
                return
            within.round()
            row = one_round(run, number)
            if "accuracy" in row:
                within.said = f"accuracy {row['accuracy']:.2%}"
            bar.set_postfix_str(within.said, refresh=False)
            bar.update()
            yield number


class Within:
    """What the bar also says in a round that takes long: "accuracy 81.00%, client 12/100"."""

    def __init__(self, bar: tqdm) -> None:
        self.bar, self.said = bar, ""
        self.began = self.last = time.monotonic()

    def round(self) -> None:
        """A round begins."""
        self.began = time.monotonic()

    def __call__(self, done: float, clients: int) -> None:
        """Some clients of the cohort are done."""
        now = time.monotonic()
        if now - self.began >= _LONG and now - self.last >= _OFTEN:
            self.last = now
            self.bar.set_postfix_str(
                ", ".join(filter(None, (self.said, f"client {min(int(done), clients)}/{clients}")))
            )


def one_round(run: Simulation, number: int) -> Row:
    """Train a cohort, apply the server's rule, evaluate what is due and keep it; returns the round's row of metrics."""
    agreed(run)
    server, row, scores = measured_round(run, number)
    run.metrics.add(row)
    run.table.add(number, scores)
    run.advance(server, number)
    return row


def measured_round(run: Simulation, number: int) -> tuple[Server, Row, evaluate.Scores]:
    """The server after a round, the round's row of metrics, and the clients' scores. It writes nothing."""
    fed, algorithm = run.fed, run.algorithm
    fed.meter.read()  # forget what evaluation trained (fine-tuned models), which is not part of a round
    started = time.perf_counter()
    rng = Rng(run.config.seeds[0], number)
    clients = algorithm.choose(run.server, rng)
    server, update = algorithm.round(run.server, clients, rng)
    kept = torch.tensor([size > 0 for size in update.sizes or [1] * len(clients)])
    if (dropped := int((~kept).sum())) == len(kept):
        kept = ~kept  # nobody's model arrived: what is measured is what they started from
    loss = update.loss.cpu()[kept].mean().item()  # waits for the device, so that the time below is the round's
    took = time.perf_counter() - started
    row = {"round": number, "seconds": took, "train_loss": loss, **update.metrics}
    row["macs"] = fed.meter.read() / 2 / len(clients)
    if dropped:
        row["dropped"] = dropped
    measured, scores = evaluate_round(
        run, server, evaluate.honest_cohort(fed, update.states, clients, kept.tolist()), number
    )
    return server, row | measured, scores


def evaluate_round(run: Simulation, server: Server, cohort: Cohort, number: int) -> tuple[Row, evaluate.Scores]:
    """The metrics that are due after this round, and the scores of each client, if they are."""
    fed, algorithm, wanted = run.fed, run.algorithm, run.due(number)
    scores: evaluate.Scores = {}
    row = evaluate.mean_cosine(fed, cohort)
    participants = evaluate.evaluate_models(fed, cohort) if "models" in wanted else {}
    row |= measure_columns(Moment(run.config, fed, algorithm, server, cohort), wanted)
    if "global" in wanted:
        scores = evaluate.score_clients(fed, lambda: algorithm.client_models(server))
        row |= evaluate.summarise_clients(scores, fed.attack.malicious if fed.attack else evaluate.silent(scores))
        # last, so that a checkpoint finds the global model's statistics as they were just collected
        row |= evaluate.evaluate_global(fed, lambda images: algorithm.predict(server, images, None))
    return row | participants, scores

"""The rounds of a run: what each does and measures, and what the ranks of torchrun agree on before it."""

import hashlib
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from importlib import metadata

import torch
import yaml
from torch import Tensor
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from fl import data
from fl.algorithms.algorithm import Server
from fl.base.errors import FLError
from fl.base.rng import Rng
from fl.base.settings import written
from fl.base.torch_private import tree_map
from fl.distributed import current
from fl.engine import progress
from fl.federation.cohort import Cohort
from fl.runs import evaluate
from fl.runs.checkpoint import flatten
from fl.runs.columns import RoundContext, measure_columns
from fl.runs.metrics import Row
from fl.runs.run import Run
from fl.settings.config import flat

_LONG = 10  # seconds of a round after which the bar also counts clients
_OFTEN = 0.5  # seconds between two such counts
_FREE = {"out", "name", "device", "data-root", "log", "checkpoint-every", "keep-best"}
"""Flags that ranks may have different values of."""


def rounds(run: Run) -> Iterator[int]:
    """Do the rounds that are left with a progress bar, add a row of metrics for each, and yield their numbers."""
    config = run.config
    bar = tqdm(
        total=config.rounds,
        initial=run.done,
        desc=f"{config.algorithm[0]} seed {config.seeds[0]}",
        unit="round",
        mininterval=0.1 if sys.stderr.isatty() else 30,
        dynamic_ncols=True,
    )
    postfix = ProgressPostfix(bar)
    with bar, logging_redirect_tqdm(), progress.shown(postfix) if sys.stderr.isatty() else nullcontext():
        for number in range(run.done + 1, config.rounds + 1):
            if run.over:
                return
            postfix.round()
            row = one_round(run, number)
            if "accuracy" in row:
                postfix.said = f"accuracy {row['accuracy']:.2%}"
            bar.set_postfix_str(postfix.said, refresh=False)
            bar.update()
            yield number


class ProgressPostfix:
    """The text behind the progress bar in a round that takes long: "accuracy 81.00%, client 12/100"."""

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


def one_round(run: Run, number: int) -> Row:
    """Train a cohort, apply the server's rule, evaluate and store what is due; return the round's row of metrics."""
    sync_server(run)
    server, row, scores = measured_round(run, number)
    run.metrics.add(row)
    run.table.add(number, scores)
    run.advance(server, number)
    return row


def measured_round(run: Run, number: int) -> tuple[Server, Row, evaluate.Scores]:
    """Do a round without writing: return the server after it, its row of metrics and the clients' scores."""
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


def evaluate_round(run: Run, server: Server, cohort: Cohort, number: int) -> tuple[Row, evaluate.Scores]:
    """Measure what is due after a round: its metrics, and the scores of each client."""
    fed, algorithm, wanted = run.fed, run.algorithm, run.due(number)
    scores: evaluate.Scores = {}
    row = evaluate.mean_cosine(fed, cohort)
    participants = evaluate.evaluate_models(fed, cohort) if "models" in wanted else {}
    row |= measure_columns(RoundContext(run.config, fed, algorithm, server, cohort), wanted)
    if "global" in wanted:
        scores = evaluate.score_clients(fed, lambda: algorithm.client_models(server))
        row |= evaluate.summarise_clients(scores, fed.attack.malicious if fed.attack else evaluate.silent(scores))
        # last, so that a checkpoint finds the global model's statistics as they were just collected
        row |= evaluate.evaluate_global(fed, lambda images: algorithm.predict(server, images, None))
    return row | participants, scores


def check_ranks_agree(run: Run) -> None:
    """Check that all ranks do the same run, and let them begin at the round of rank 0, whose run may be resumed.

    Raises:
        FLError: if a rank has other settings, another version or other data than rank 0; it says which and in what.
    """
    ranks = current()
    if ranks.size == 1:
        return
    ranks.device = run.fed.data.x.device
    settings = flat(yaml.safe_load(run.config.to_yaml()))
    words = {package: _version(package) for package in ("layer-surgery", "torch")}
    words |= {f"--{flag}": value for flag, value in settings.items() if flag not in _FREE}
    words |= {f"data {part}": value for part, value in data.fingerprint(run.fed.data).items()}
    model = str({name: list(tensor.shape) for name, tensor in flatten(run.server).items()})
    words |= {"device": ranks.device.type, "model": hashlib.sha256(model.encode()).hexdigest()[:12]}
    said = ranks.tell((run.done, words))
    run.done, first = said[0]
    for rank, (_, other) in enumerate(said):
        for name in first | other:
            its, mine = (written(word.get(name)) for word in (other, first))
            if its != mine:
                reason = f"rank {rank} has {name} {its}, and rank 0 has {mine}"
                raise FLError(f"{reason}: start all ranks with the same command on the same data")


def sync_server(run: Run, summary: dict | None = None) -> dict | None:
    """Go on with the server of rank 0, and return the summary with which rank 0 has ended the run, if it has.

    Other ranks have the same server, bit for bit, where their processors compute alike; where they do not, or rank 0
    has resumed the run, it is sent.

    Args:
        summary: rank 0 gives it instead of going on.
    """
    ranks = current()
    if ranks.size == 1:
        return summary
    words = ranks.tell((summary, _sums([tensor for state in run.server.values() for tensor in state.values()])))
    summary, sums = words[0]
    if summary is None and any(word != sums for _, word in words):
        found = ranks.gather(run.server if ranks.rank == 0 else {})[0]
        run.server = tree_map(lambda mine, its: its.to(mine.device), run.server, found)
    return summary


def _sums(tensors: Sequence[Tensor]) -> list[int]:
    """Return a checksum of each tensor; a stack of one model is read once."""
    sums = []
    for tensor in tensors:
        if tensor.ndim and tensor.stride(0) == 0 and len(tensor) > 1:
            tensor = tensor[:1]
        whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.dtype.itemsize]
        sums.append(tensor.contiguous().view(-1).view(whole).sum(dtype=torch.int64))
    return torch.stack([each.cpu() for each in sums]).tolist()


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"

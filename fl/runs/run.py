"""A run while it goes on: what it is made of, its files that resuming needs, and its rounds."""

import hashlib
import logging
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from importlib import metadata
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from fl import data
from fl.algorithms import ALGORITHMS
from fl.algorithms.algorithm import Algorithm, Server, check_server
from fl.base.errors import FLError
from fl.base.files import write_json, write_text
from fl.base.rng import Rng
from fl.base.settings import written
from fl.base.torch_private import tree_map
from fl.distributed import current
from fl.engine import progress
from fl.federation import Federation
from fl.federation.clients import RemoteClients
from fl.federation.cohort import Cohort
from fl.federation.divergence import check_finite
from fl.models.custom_model import Model
from fl.partition import KINDS
from fl.runs import checkpoint, evaluate, metrics
from fl.runs.assembly import build, pick_device, resolve_inputs
from fl.runs.columns import RoundContext, asked_for, columns, first_score, measure_columns
from fl.runs.folder import fixed, load_initial_weights, restore_server, save_architectures, save_initial_weights
from fl.runs.lock import SETTINGS
from fl.runs.metrics import FILE, ClientTable, Metrics, Row
from fl.runs.summary import failure
from fl.settings import Config
from fl.settings.config import plain
from surgery.transfer import host_copies

_log = logging.getLogger("fl")
_LONG = 10  # seconds of a round after which the bar also counts clients
_OFTEN = 0.5  # seconds between two such counts
_FREE = {"out", "name", "device", "data-on", "data-root", "log", "checkpoint-every", "keep-best"}
"""Flags that ranks may have different values of."""


@dataclass
class Run:
    """One method with one seed, in a folder.

    Attributes:
        config: with one algorithm and one seed.
        server: what the server keeps after the last round that was done.
        done: the number of that round.
        given: which data and model of a user's own it needs, see `fl.runs.checkpoint.custom_inputs`.
        metrics, table: the rows of all rounds so far, and the clients' scores.
        saved: the round of the last checkpoint; None before the first.
        best: the best model so far, with --keep-best.
    """

    config: Config
    fed: Federation
    algorithm: Algorithm
    folder: Path
    server: Server
    done: int
    given: dict = field(default_factory=dict)
    metrics: Metrics = field(init=False)
    table: ClientTable = field(init=False)
    saved: int | None = None
    best: checkpoint.Best | None = None

    @classmethod
    def prepare(
        cls,
        config: Config,
        folder: Path,
        restore: bool,
        dataset: data.Dataset | None = None,
        model: Model | None = None,
        remote: RemoteClients | None = None,
    ) -> "Run":
        """Build a run from its settings, without writing anything.

        Args:
            restore: whether to go on from what its folder keeps, if there is anything in it.
            remote: clients on other machines; None: they are simulated here.

        Raises FLError, where it is restored, for a folder that holds no run of these data, model and method.
        """
        config = resolve_inputs(config, dataset, model)
        if not restore:
            fed, algorithm = build(config, dataset, model, remote=remote)
            check_best_by(config, fed)
            server = check_server(algorithm.init())
            return cls(config, fed, algorithm, folder, server, 0, checkpoint.custom_inputs(config, fed))
        config.check_registered(folder)
        fed, algorithm = build(config, dataset, model, load_initial_weights(folder, config), remote)
        given = checkpoint.custom_inputs(config, fed)
        if (folder / checkpoint.FILE).exists():
            checkpoint.check_inputs(folder, fed, given)
        server, done = restore_server(config, folder, algorithm, fed.spec)
        return cls(config, fed, algorithm, folder, server, done, given)

    @classmethod
    def begin(
        cls,
        config: Config,
        folder: Path,
        resume: bool,
        dataset: data.Dataset | None = None,
        model: Model | None = None,
        remote: RemoteClients | None = None,
    ) -> "Run":
        """Prepare a run and write what its folder holds before the first round.

        Args:
            folder: there already, and `fl.runs.lock.open_run_folder`.
        """
        run = cls.prepare(config, folder, resume, dataset, model, remote)
        config, fed, done = run.config, run.fed, run.done
        if done:
            run.best = checkpoint.read_best(folder)
            fed.local.chosen.update(checkpoint.read_header(folder)["backends"])
        if not resume:
            write_text(folder / SETTINGS, config.to_yaml())  # first: a folder with settings can be resumed
        if fed.start:
            save_initial_weights(folder, fed.start)
        if fed.fleet:
            save_architectures(fed, folder)
        used, there = fed.clients.total, len(fed.data.y)
        if used < there and not remote and not KINDS[config.partition].partial:
            _log.warning(f"warning: {config.spread()} leaves {there - used:,} of {there:,} training samples unused")
        rows = metrics.kept(folder / FILE, done, lambda row: run.due(row["round"]))
        run.table = ClientTable(folder, fed, rows)  # it may be refused, and metrics.csv is then as it was
        run.metrics = Metrics(folder / FILE, rows, asked_for(fed))
        return run

    @property
    def rows(self) -> Sequence[Row]:
        """The rows of metrics.csv so far."""
        return self.metrics.rows

    def due(self, number: int) -> set[str]:
        """Say what is evaluated after a round: the "global" model, the participants' "models"; both after the last."""
        last, wanted = number == self.last, set()
        if last or number % self.config.eval_every == 0:
            wanted.add("global")
        if self.config.eval_client_models_every and (last or number % self.config.eval_client_models_every == 0):
            wanted.add("models")
        return wanted

    @cached_property
    def last(self) -> int:
        """The last round, which comes before --rounds where the method can do no more."""
        rounds = self.config.rounds
        return self.algorithm.max_rounds(rounds)[0] if self.algorithm.max_rounds else rounds

    @property
    def over(self) -> bool:
        """Whether --patience says that training has brought nothing better for too long."""
        return 0 < self.config.patience <= metrics.evaluations_since_best(self.rows, self.config.best_by)

    def advance(self, server: Server, number: int) -> None:
        """Go on to the server after a round whose row is in the table."""
        self.server, self.done = server, number
        regular = number % self.config.eval_every == 0  # not only since the run ends here, perhaps to be trained on
        if self.config.keep_best and regular and metrics.best(self.rows, self.config.best_by).get("round") == number:
            personal = ALGORITHMS[self.config.algorithm[0]].clients == "personalized"
            parts = server if personal else {"global": server["global"]}
            named = checkpoint.flatten({**parts, "statistics": self.fed.statistics(server["global"])})
            copies = host_copies(list(named.values()))  # that no device has to hold
            self.best = checkpoint.Best(number, checkpoint.unflatten(dict(zip(named, copies))))

    def save(self, statistics: bool = True) -> None:
        """Write a checkpoint.

        Args:
            statistics: whether with those of the global model's static batch norms, which may have to be collected.
        """
        collected = self.fed.statistics(self.server["global"]) if statistics else {}
        checkpoint.save(
            self.folder,
            self.server,
            self.done,
            self.fed.spec,
            collected,
            fixed(self.config),
            rows=metrics.checksums(self.rows),
            backends=self.fed.local.chosen,
            best=self.best,
            given=self.given,
        )
        self.saved = self.done

    def close(self, diverged: str = "") -> dict:
        """Write the checkpoint of the last round and the summary, which is returned.

        Args:
            diverged: why training could not go on, if it could not.
        """
        if self.saved != self.done:
            self.save(statistics=False)  # first what cannot be made again
            if self.fed.statistics(self.server["global"]):
                self.save()
        summary = self.summarise(diverged)
        write_json(self.folder / "summary.json", summary)
        return summary

    def summarise(self, diverged: str) -> dict:
        """Make the content of summary.json: settings in brief, results, what the run began from and where it ran."""
        config, start, rows = self.config, self.fed.start, metrics.evaluated(self.rows)
        score = first_score(rows[-1]) if rows else "accuracy"
        best, by = metrics.best(rows, config.best_by), metrics.judged_by(rows, config.best_by)
        chosen = metrics.selected(rows, config.best_by, config.keep_best)
        local = [key for key in chosen if key.startswith("local_")]
        if rows and not best:
            asked, kept = "--best-by " * (config.best_by != "auto"), ", and no model is kept as such" * config.keep_best
            _log.warning(f"warning: {asked}{by} was nan in every evaluation: no round is best{kept}")
        early = self.done < config.rounds and self.over
        return {
            "algorithm": config.algorithm[0],
            "seed": config.seeds[0],
            "rounds": self.done,
            "complete": self.done == (self.last or config.rounds) or early,
            **({"stopped": {"patience": config.patience, "best": best.get("round")}} if early else {}),
            "final": rows[-1] if rows else {},
            "best": {key: best[key] for key in dict.fromkeys(("round", score, by)) if key in best},
            "selected": {key: chosen[key] for key in ("round", *local)} if local else {},
            **({"init": {"source": start.source, "sha256": start.sha256, "drawn": start.left}} if start else {}),
            "seconds": sum(row["seconds"] for row in self.rows),
            "device": str(pick_device(config.device)),
            "torch": torch.__version__,
            "python": platform.python_version(),
        } | ({"failed": lost} if (lost := diverged or failure(self.rows)) else {})


def check_best_by(config: Config, fed: Federation) -> None:
    """Raise FLError for a --best-by that no evaluation of this run measures."""
    known = {name: column for name, column in columns(asked_for(fed)).items() if column.due == "global"}
    asked, scores = asked_for(fed), evaluate.SCORES[evaluate.task_of(fed.data)]
    others = tuple({name for task in evaluate.SCORES.values() for name in task} - set(scores))  # of other tasks
    measured = set(scores)
    for part in evaluate.held_out(fed):
        clients = [name for name in known if name.startswith(f"local_{part}_") and name not in asked]
        measured |= {name for name in clients if not name.removeprefix(f"local_{part}_").startswith(others)}
    able = [*asked, *(name for name in known if name in measured)]
    if config.best_by not in ("auto", *able):
        raise FLError(f"--best-by {config.best_by} is not measured by this run: there are {', '.join(able)}")


def rounds(run: Run) -> Iterator[int]:
    """Do the rounds that are left with a progress bar, add a row of metrics for each, and yield their numbers."""
    config, terminal = run.config, sys.stderr.isatty()
    bar = tqdm(
        total=config.rounds,
        initial=run.done,
        desc=f"{config.algorithm[0]} seed {config.seeds[0]}",
        unit="round",
        mininterval=0.1 if terminal else 30,
        dynamic_ncols=True,
    )
    began, last, reached = 0.0, 0.0, ""

    def count(done: float, clients: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - began >= _LONG and now - last >= _OFTEN:
            last = now
            bar.set_postfix_str(", ".join(filter(None, (reached, f"client {min(int(done), clients)}/{clients}"))))

    with bar:
        for number in range(run.done + 1, run.last + 1):
            if run.over:
                return
            began = time.monotonic()
            # Not for the whole loop: others may go on between its rounds.
            with logging_redirect_tqdm(), progress.shown(count) if terminal else nullcontext():
                row = one_round(run, number)
            if (score := first_score(row)) in row:
                reached = f"{score} {columns()[score].text(row[score])}"
            bar.set_postfix_str(reached, refresh=False)
            bar.update()
            yield number
    if run.last < config.rounds:
        _, why = run.algorithm.max_rounds(config.rounds)
        _log.warning("warning: training ends after %d of %d rounds: %s", run.last, config.rounds, why)


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
    rng, device = Rng(run.config.seeds[0], number), run.fed.data.device
    with torch.random.fork_rng([device] if device.type == "cuda" and torch.cuda.default_generators else []):
        # Of models that draw numbers in evaluation mode, too. Nothing here draws from torch's own generators.
        torch.manual_seed(int(rng.numpy("evaluation").integers(2**63)))
        return _measured(run, number, rng)


def _measured(run: Run, number: int, rng: Rng) -> tuple[Server, Row, evaluate.Scores]:
    fed, algorithm = run.fed, run.algorithm
    fed.meter.read()  # forget what evaluation trained (fine-tuned models), which is not part of a round
    started = time.perf_counter()
    clients = algorithm.choose(run.server, rng)
    server, update = algorithm.round(run.server, clients, rng)
    kept = torch.tensor([size > 0 for size in update.sizes or [1] * len(clients)])
    if (dropped := int((~kept).sum())) == len(kept):
        kept = ~kept  # nobody's model arrived: what is measured is what they started from
    # waits for the device, so that the time below is the round's
    loss = check_finite(server, run.server, update.loss, number)[kept].mean().item()
    took = time.perf_counter() - started
    row = {"round": number, "seconds": took, "train_loss": loss, **update.metrics}
    row |= fed.meter.metrics
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
    if "models" in wanted:
        row |= evaluate.released_cosine(fed, cohort)
    participants = evaluate.evaluate_models(fed, cohort) if "models" in wanted else {}
    row |= measure_columns(RoundContext(run.config, fed, algorithm, server, cohort), wanted)
    if "global" in wanted:
        scores = evaluate.score_clients(fed, lambda: algorithm.client_models(server))
        sizes = {part: getattr(fed.clients, part).sizes.tolist() for part in scores}
        left_out = fed.malicious or evaluate.silent(scores)
        row |= evaluate.summarise_clients(scores, left_out, sizes)
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
    ranks.device = run.fed.data.device
    words = {package: _version(package) for package in ("layer-surgery", "torch")}
    words |= {f"--{one.flag}": plain(one.value) for one in run.config.settings() if one.flag not in _FREE}
    words |= {f"data {part}": value for part, value in data.fingerprint(run.fed.data).items()}
    model = str({name: list(tensor.shape) for name, tensor in checkpoint.flatten(run.server).items()})
    words |= {"device": ranks.device.type, "model": hashlib.sha256(model.encode()).hexdigest()[:12]}
    said = ranks.tell((run.done, words))
    run.done, first = said[0]
    for rank, (_, other) in enumerate(said):
        for name in first | other:
            its, mine = (written(word.get(name)) for word in (other, first))
            if its != mine:
                reason = f"rank {rank} has {name} {its}, and rank 0 has {mine}"
                raise FLError(f"{reason}: start all ranks with the same command on the same data")


def sync_server(run: Run) -> dict | None:
    """Go on with the server of rank 0, and return the summary with which rank 0 has ended the run, if it has.

    Other ranks have the same server, bit for bit, where their processors compute alike; where they do not, or rank 0
    has resumed the run, it is sent.
    """
    ranks = current()
    if ranks.size == 1:
        return None
    words = ranks.tell((None, _sums([tensor for state in run.server.values() for tensor in state.values()])))
    summary, sums = words[0]
    if summary is None and any(word != sums for _, word in words):
        found = ranks.gather(run.server if ranks.rank == 0 else {})[0]
        run.server = tree_map(lambda mine, its: its.to(mine.device), run.server, found)
    return summary


def tell_end(summary: dict) -> None:
    """End the run of all ranks with the summary of rank 0: the others are in `sync_server`."""
    current().tell((summary, []))


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

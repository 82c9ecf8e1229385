"""A run in progress: what it is made of, and its files that resuming needs."""

import logging
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch

from fl import data
from fl.algorithms import ALGORITHMS
from fl.algorithms.algorithm import Algorithm
from fl.algorithms.server import Server, check_server
from fl.base.errors import FLError
from fl.base.files import write_json, write_text
from fl.federation import Federation
from fl.federation.transport import IN_PROCESS, Transport
from fl.models.custom_model import Model
from fl.partition import KINDS
from fl.runs import checkpoint, evaluate, metrics
from fl.runs.assembly import build, pick_device, resolve_inputs
from fl.runs.columns import columns, first_score, list_columns
from fl.runs.folder import list_fixed, load_initial_weights, restore_server, save_architectures, save_initial_weights
from fl.runs.lock import SETTINGS
from fl.runs.metrics import FILE, ClientTable, Metrics, Row
from fl.runs.signals import Ending
from fl.runs.summary import Summary, failure
from fl.settings import Config
from surgery.transfer import host_copies

_log = logging.getLogger("fl")


@dataclass
class RunState:
    """One method with one seed, in a folder.

    Attributes:
        config: with one algorithm and one seed.
        server: what the server keeps after the last round that was done.
        done: the number of that round.
        given: which data and model of a user's own it needs, see `fl.runs.checkpoint.identify_inputs`.
        metrics, table: the rows of all rounds so far, and the clients' scores.
        saved: the round of the last checkpoint; None before the first.
        best: the best model so far, with --keep-best.
        summary: the content of summary.json, once the run is closed.
        ending: whether SIGTERM has come.
        log: is told of each row, see --log.
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
    summary: Summary | None = None
    ending: Ending = field(default_factory=Ending)
    log: Callable[[Row], None] = lambda row: None

    @classmethod
    def prepare(
        cls,
        config: Config,
        folder: Path,
        restore: bool,
        dataset: data.Dataset | None = None,
        model: Model | None = None,
        transport: Transport = IN_PROCESS,
    ) -> "RunState":
        """Build a run from its settings, without writing anything.

        Args:
            restore: whether to resume from what its folder keeps, if there is anything in it.
            transport: where clients are.

        Raises FLError, where it is restored, for a folder that holds no run of these data, model and method.
        """
        config = resolve_inputs(config, dataset, model)
        if not restore:
            fed, algorithm = build(config, dataset, model, transport=transport)
            check_best_by(config, fed)
            server = check_server(algorithm.init())
            return cls(config, fed, algorithm, folder, server, 0, checkpoint.identify_inputs(config, fed))
        config.check_registered(folder)
        fed, algorithm = build(config, dataset, model, load_initial_weights(folder, config), transport)
        inputs = checkpoint.identify_inputs(config, fed)
        if (folder / checkpoint.FILE).exists():
            checkpoint.check_inputs(folder, fed, inputs)
        server, done = restore_server(config, folder, algorithm, fed.spec)
        return cls(config, fed, algorithm, folder, server, done, inputs)

    def begin(self, resume: bool) -> "RunState":
        """Write what the run's locked folder holds before the first round."""
        config, folder, fed, done = self.config, self.folder, self.fed, self.done
        if done:
            self.best = checkpoint.read_best(folder)
            fed.local.chosen.update(checkpoint.read_header(folder)["backends"])
        if not resume:
            write_text(folder / SETTINGS, config.to_yaml())  # first: a folder with settings can be resumed
        if fed.start:
            save_initial_weights(folder, fed.start)
        if fed.fleet:
            save_architectures(fed, folder)
        used, there = fed.clients.total, len(fed.data.y)
        if used < there and fed.transport.splits is None and not KINDS[config.data.partition.name].partial:
            _log.warning(
                f"warning: {config.data.spread()} leaves {there - used:,} of {there:,} training samples unused"
            )
        rows = metrics.read_kept(folder / FILE, done, lambda row: self.due(row["round"]))
        self.table = ClientTable(folder, fed, rows)  # it may be refused, and metrics.csv is then as it was
        self.metrics = Metrics(folder / FILE, rows, list_columns(fed), config.method.name)
        return self

    @property
    def rows(self) -> Sequence[Row]:
        """The rows of metrics.csv so far."""
        return self.metrics.rows

    def due(self, number: int) -> set[str]:
        """Say what is evaluated after a round: the "global" model, "models", or both.

        "models" are the participants'. After the last round both are evaluated.
        """
        last, wanted, evaluation = number == self.last, set(), self.config.evaluation
        if last or number % evaluation.every == 0:
            wanted.add("global")
        if evaluation.client_models_every and (last or number % evaluation.client_models_every == 0):
            wanted.add("models")
        return wanted

    @cached_property
    def last(self) -> int:
        """The last round, which comes before --rounds where the method can do no more."""
        rounds = self.config.rounds
        return self.algorithm.max_rounds(rounds)[0] if self.algorithm.max_rounds else rounds

    @property
    def over(self) -> bool:
        """True if --patience says that training has brought nothing better for too long."""
        return 0 < self.config.patience <= metrics.evaluations_since_best(self.rows, self.config.evaluation.best_by)

    def numbers_left(self) -> Iterator[int]:
        """Yield the numbers of the rounds that are left, as long as --patience lasts."""
        for number in range(self.done + 1, self.last + 1):
            if self.over:
                return
            yield number
        if self.last < self.config.rounds:
            _, why = self.algorithm.max_rounds(self.config.rounds)
            _log.warning("warning: training ends after %d of %d rounds: %s", self.last, self.config.rounds, why)

    def record(self, number: int, server: Server, row: Row, scores: evaluate.ScoreTable) -> None:
        """Write a round into the tables, take its server, save a checkpoint if one is due."""
        self.metrics.add(row)
        self.table.add(number, scores)
        self.advance(server, number)
        if number % self.config.evaluation.checkpoint_every == 0:
            self.save()
        self.log(self.rows[-1])

    def advance(self, server: Server, number: int) -> None:
        """Move on to the server of a round that is in the table."""
        self.server, self.done = server, number
        evaluation = self.config.evaluation
        regular = number % evaluation.every == 0  # not only since the run ends here, perhaps to be trained on
        if evaluation.keep_best and regular and metrics.best(self.rows, evaluation.best_by).get("round") == number:
            personal = ALGORITHMS[self.config.method.name].clients == "personalized"
            parts = server if personal else {"global": server["global"]}
            named = checkpoint.flatten({**parts, "statistics": self.fed.statistics(server["global"])})
            copies = host_copies(list(named.values()))  # that no device has to hold
            self.best = checkpoint.Best(number, checkpoint.unflatten(dict(zip(named, copies))))

    def save(self, statistics: bool = True) -> None:
        """Write a checkpoint.

        Args:
            statistics: whether to add the statistics of the global model's static batch norms, collected if needed.
        """
        collected = self.fed.statistics(self.server["global"]) if statistics else {}
        checkpoint.save(
            self.folder,
            self.server,
            self.done,
            self.fed.spec,
            collected,
            list_fixed(self.config),
            rows=metrics.checksums(self.rows),
            backends=self.fed.local.chosen,
            best=self.best,
            given=self.given,
        )
        self.saved = self.done

    def close(self, diverged: str = "") -> None:
        """Write the checkpoint of the last round and the summary.

        Args:
            diverged: why training could not continue, if it could not.
        """
        if self.saved != self.done:
            self.save(statistics=False)  # first what cannot be made again
            if self.fed.statistics(self.server["global"]):
                self.save()
        self.summary = Summary(self.summarise(diverged), self.folder)
        write_json(self.folder / "summary.json", self.summary)

    def summarise(self, diverged: str) -> dict:
        """Make the content of summary.json: settings, results, start, and the machine."""
        config, start, rows = self.config, self.fed.start, metrics.select_evaluated(self.rows)
        best_by, keep_best = config.evaluation.best_by, config.evaluation.keep_best
        score = first_score(rows[-1]) if rows else "accuracy"
        best, by = metrics.best(rows, best_by), metrics.choose_judging_column(rows, best_by)
        chosen = metrics.find_judged(rows, best_by, keep_best)
        local = [key for key in chosen if key.startswith("local_")]
        if rows and not best:
            flag, note = "--best-by " * (best_by != "auto"), ", and no model is kept as such" * keep_best
            _log.warning(f"warning: {flag}{by} was nan in every evaluation: no round is best{note}")
        early = self.done < config.rounds and self.over
        return {
            "algorithm": config.method.name,
            "seed": config.seed,
            "rounds": self.done,
            "complete": self.done == (self.last or config.rounds) or early,
            **({"stopped": {"patience": config.patience, "best": best.get("round")}} if early else {}),
            "final": rows[-1] if rows else {},
            "best": {key: best[key] for key in dict.fromkeys(("round", score, by)) if key in best},
            "selected": {key: chosen[key] for key in ("round", *local)} if local else {},
            **({"init": {"source": start.source, "sha256": start.sha256, "drawn": start.left}} if start else {}),
            "seconds": sum(row["seconds"] for row in self.rows),
            "device": str(pick_device(config.execution.device)),
            "torch": torch.__version__,
            "python": platform.python_version(),
        } | ({"failed": lost} if (lost := diverged or failure(self.rows)) else {})


def check_best_by(config: Config, fed: Federation) -> None:
    """Raise FLError for a --best-by that no evaluation of this run measures."""
    known = {name: column for name, column in columns(list_columns(fed)).items() if column.due == "global"}
    metric_columns, scores = list_columns(fed), evaluate.SCORES[evaluate.task_of(fed.data)]
    others = tuple({name for task in evaluate.SCORES.values() for name in task} - set(scores))  # of other tasks
    measured = set(scores)
    for part in evaluate.list_held_out(fed):
        clients = [name for name in known if name.startswith(f"local_{part}_") and name not in metric_columns]
        measured |= {name for name in clients if not name.removeprefix(f"local_{part}_").startswith(others)}
    able = [*metric_columns, *(name for name in known if name in measured)]
    if config.evaluation.best_by not in ("auto", *able):
        raise FLError(
            f"--best-by {config.evaluation.best_by} is not measured by this run: there are {', '.join(able)}",
            code="name",
        )

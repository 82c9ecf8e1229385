"""A run while it goes on: what it is made of, and its files that resuming needs."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fl import data
from fl.algorithms import kind_of
from fl.algorithms.algorithm import Algorithm, Server
from fl.base.files import write_json, write_text
from fl.config import Config
from fl.federation import Federation
from fl.federation.elsewhere import Elsewhere
from fl.models.own import Model
from fl.partition import KINDS
from fl.runs import best as best_model
from fl.runs import checkpoint, given
from fl.runs.assembly import build
from fl.runs.best import BestModel
from fl.runs.client_scores import ClientTable
from fl.runs.fixed_settings import fixed
from fl.runs.folder import SETTINGS, begin
from fl.runs.kept_start import kept
from fl.runs.metrics import FILE, Metrics, Row, best, checksums, evaluations_since_best
from fl.runs.summary import summarise

_log = logging.getLogger("fl")


@dataclass
class Simulation:
    """One method with one seed, in a folder.

    Attributes:
        config: with one algorithm and one seed.
        server: what the server keeps after the last round that was done.
        done: the number of that round.
        metrics, table: the rows of all rounds so far, and the clients' scores.
        saved: the round of the last checkpoint; None before the first.
    """

    config: Config
    fed: Federation
    algorithm: Algorithm
    folder: Path
    server: Server
    done: int
    metrics: Metrics = field(init=False)
    table: ClientTable = field(init=False)
    saved: int | None = None
    best: BestModel = field(init=False)

    @classmethod
    def begin(
        cls,
        config: Config,
        folder: Path,
        resume: bool,
        dataset: data.Dataset | None = None,
        model: Model | None = None,
        elsewhere: Elsewhere | None = None,
    ) -> "Simulation":
        """From the settings, and where it is resumed from the checkpoint in its folder.

        Args:
            folder: there already, and `fl.runs.folder.held`.
            elsewhere: the way to clients on other machines; None: they are simulated here.

        Raises FLError, where it is resumed, for a folder that holds no run of these data, model and method.
        """
        config = given.said(config, dataset, model)
        if resume:
            config.check_registered(folder)
        fed, algorithm = build(config, dataset, model, kept(folder, config) if resume else None, elsewhere)
        if resume:
            given.keep(folder, config, fed, begun=(folder / checkpoint.FILE).exists())
        server, done = begin(config, folder, algorithm, fed.spec) if resume else (algorithm.init(), 0)
        if done:
            fed.local.chosen.update(checkpoint.read_header(folder)["backends"])
        if not resume:
            write_text(folder / SETTINGS, config.to_yaml())  # first: a folder with settings can be resumed
            given.keep(folder, config, fed, begun=False)
        used, known = fed.clients.total, len(fed.data.y)
        if used < known and not elsewhere and not KINDS[config.partition].partial:
            _log.warning(f"warning: {config.spread()} leaves {known - used:,} of {known:,} training samples unused")
        run = cls(config, fed, algorithm, folder, server, done)
        run.metrics = Metrics(folder / FILE, keep=done, wanted=lambda row: run.due(row["round"]))
        run.table = ClientTable(folder, fed, run.metrics.rows)
        run.best = BestModel(folder, done)
        return run

    @property
    def rows(self) -> Sequence[Row]:
        """Those of metrics.csv."""
        return self.metrics.rows

    def due(self, number: int) -> set[str]:
        """What is evaluated after a round: the "global" model, the participants' "models"; both after the last."""
        last, wanted = number == self.config.rounds, set()
        if last or number % self.config.eval_every == 0:
            wanted.add("global")
        if self.config.models_every and (last or number % self.config.models_every == 0):
            wanted.add("models")
        return wanted

    @property
    def over(self) -> bool:
        """Whether --patience says that training has brought nothing better for too long."""
        return 0 < self.config.patience <= evaluations_since_best(self.rows)

    def advance(self, server: Server, number: int) -> None:
        """Go on to the server after a round whose row is in the table."""
        self.server, self.done = server, number
        regular = number % self.config.eval_every == 0  # not only since the run ends here, perhaps to be trained on
        if self.config.keep_best and regular and best(self.rows)["round"] == number:
            parts = server if kind_of(self.config.algorithm[0]) == "own" else {"global": server["global"]}
            self.best.take(parts, number, self.fed.statistics(server["global"]))

    def save(self, statistics: bool = True) -> None:
        """Write a checkpoint.

        Args:
            statistics: whether with those of the global model's static batch norms, which may have to be collected.
        """
        collected = self.fed.statistics(self.server["global"]) if statistics else {}
        self.best.prepare(self.fed.spec)
        beside = {FILE: checksums(self.rows), best_model.FILE: self.best.checksum}
        checkpoint.save(
            self.folder,
            self.server,
            self.done,
            self.fed.spec,
            collected,
            fixed(self.config),
            beside=beside,
            backends=self.fed.local.chosen,
        )
        self.best.commit()
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
        summary = summarise(self.config, self.metrics, self.done, self.fed.start, diverged)
        write_json(self.folder / "summary.json", summary)
        return summary

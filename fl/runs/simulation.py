"""A run while it goes on: what it is made of, and its files that resuming needs."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fl import data
from fl.algorithms.algorithm import Algorithm, Server
from fl.base.files import write_json
from fl.config import Config
from fl.federation import Federation
from fl.models.own import Model
from fl.partition import KINDS
from fl.runs import checkpoint, given
from fl.runs.assembly import build
from fl.runs.client_scores import ClientTable
from fl.runs.folder import begin, create_folder
from fl.runs.metrics import Metrics, Row
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

    @classmethod
    def begin(
        cls,
        config: Config,
        folder: Path,
        resume: bool,
        dataset: data.Dataset | None = None,
        model: Model | None = None,
    ) -> "Simulation":
        """From the settings, and where it is resumed from the checkpoint in its folder.

        Raises FLError for a folder that exists already, or, resuming, holds no run of these data, model and method.
        """
        config = given.said(config, dataset, model)
        fed, algorithm = build(config, dataset, model)
        if resume:
            given.keep(folder, config, fed, begun=(folder / checkpoint.FILE).exists())
        server, done = begin(config, folder, algorithm, fed.spec) if resume else (algorithm.init(), 0)
        if not resume:
            create_folder(folder)
            given.keep(folder, config, fed, begun=False)
        used, known = fed.clients.total, len(fed.data.y)
        if used < known and not KINDS[config.partition].partial:
            _log.warning(f"warning: {config.spread()} leaves {known - used:,} of {known:,} training samples unused")
        run = cls(config, fed, algorithm, folder, server, done)
        run.metrics = Metrics(folder / "metrics.csv", keep=done, wanted=lambda row: run.due(row["round"]))
        run.table = ClientTable(folder, fed, run.metrics.rows)
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

    def save(self, statistics: bool = True) -> None:
        """Write a checkpoint.

        Args:
            statistics: whether with those of the global model's static batch norms, which may have to be collected.
        """
        collected = self.fed.statistics(self.server["global"]) if statistics else {}
        checkpoint.save(self.folder, self.server, self.done, self.fed.spec, collected)
        self.saved = self.done

    def close(self) -> dict:
        """Write the checkpoint of the last round and the summary, which is returned."""
        if self.saved != self.done:
            self.save(statistics=False)  # first what cannot be made again
            if self.fed.statistics(self.server["global"]):
                self.save()
        summary = summarise(self.config, self.metrics, self.done)
        write_json(self.folder / "summary.json", summary)
        return summary

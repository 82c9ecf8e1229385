"""A run while it goes on: what it is made of, and its files that resuming needs."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fl import data
from fl.algorithms import ALGORITHMS
from fl.algorithms.algorithm import Algorithm, Server, check_server
from fl.base.files import write_json, write_text
from fl.federation import Federation
from fl.federation.clients import RemoteClients
from fl.models.custom_model import Model
from fl.partition import KINDS
from fl.runs import checkpoint, metrics
from fl.runs.assembly import build, resolve_inputs
from fl.runs.checkpoint import Best
from fl.runs.folder import fixed, load_initial_weights, restore_server, save_architectures, save_initial_weights
from fl.runs.lock import SETTINGS
from fl.runs.metrics import FILE, ClientTable, Metrics, Row, best, checksums, evaluations_since_best
from fl.runs.summary import summarise
from fl.settings import Config
from surgery.transfer import host_copies

_log = logging.getLogger("fl")


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
    best: Best | None = None

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
            server = check_server(algorithm.init())
            return cls(config, fed, algorithm, folder, server, 0, checkpoint.custom_inputs(config, fed))
        config.check_registered(folder)
        fed, algorithm = build(config, dataset, model, load_initial_weights(folder, config), remote)
        given = checkpoint.custom_inputs(config, fed)
        if (folder / checkpoint.FILE).exists():
            checkpoint.check_inputs(folder, checkpoint.read_header(folder)["given"], fed, given)
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
        run.metrics = Metrics(folder / FILE, rows)
        return run

    @property
    def rows(self) -> Sequence[Row]:
        """The rows of metrics.csv so far."""
        return self.metrics.rows

    def due(self, number: int) -> set[str]:
        """Say what is evaluated after a round: the "global" model, the participants' "models"; both after the last."""
        last, wanted = number == self.config.rounds, set()
        if last or number % self.config.eval_every == 0:
            wanted.add("global")
        if self.config.eval_client_models_every and (last or number % self.config.eval_client_models_every == 0):
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
            parts = (
                server
                if ALGORITHMS[self.config.algorithm[0]].clients == "personalized"
                else {"global": server["global"]}
            )
            parts = parts | {"statistics": self.fed.statistics(server["global"])}
            names = checkpoint.flatten(parts)
            copies = host_copies(list(names.values()))  # that no device has to hold
            self.best = Best(number, checkpoint.unflatten(dict(zip(names, copies))))

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
            rows=checksums(self.rows),
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
        summary = summarise(self.config, self.metrics, self.done, self.fed.start, diverged)
        write_json(self.folder / "summary.json", summary)
        return summary

"""clients.csv: what each client's own held-out samples say of a run."""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fl.base.files import replacing
from fl.base.tables import write_csv
from fl.federation import Federation
from fl.runs.evaluate import Scores, held_out
from fl.runs.metrics import Row, selected

FILE, HISTORY = "clients.csv", "clients.f64"
_COUNTS = ("client", "round", "train", "valid", "test")


class ClientTable:
    """The scores of every client in the round that `fl.runs.metrics.selected` names, as clients.csv, a row a client.

    Beside it lies clients.f64 with the tables of all evaluated rounds: float64 [rounds, clients, columns], C order,
    columns as in clients.csv. From it a run in pieces finds the table of a run in one, whichever rounds metrics.csv
    keeps. Neither file is written where clients hold nothing out. A run that was begun without the second has no
    clients.csv until it comes to a better round.

    Args:
        folder: the run folder.
        fed: whose clients hold samples out.
        rows: those that metrics.csv keeps of an earlier, interrupted run.
    """

    def __init__(self, folder: Path, fed: Federation, rows: Sequence[Row]) -> None:
        self.path, self.history = folder / FILE, folder / HISTORY
        self.parts = held_out(fed)
        if not self.parts:
            return
        whats = ("accuracy", "loss", "f1" if fed.data.y.ndim == 1 else "perplexity")
        self.columns = [*_COUNTS, *(f"{part}_{what}" for part in self.parts for what in whats)]
        sizes = [parts.sizes.numpy() for parts in (fed.clients.train, fed.clients.valid, fed.clients.test)]
        self.sizes = np.stack(sizes, 1)
        tables = self._read()
        tables = tables[np.isin(tables[:, 0, 1], [row["round"] for row in rows if "accuracy" in row])]
        with replacing(self.history) as temporary:
            tables.tofile(temporary)
        chosen = tables[tables[:, 0, 1] == selected(rows).get("round")]
        if len(chosen):
            self._write(chosen[0])
        else:
            self.path.unlink(missing_ok=True)

    def add(self, rows: Sequence[Row], scores: Scores) -> None:
        """Take in the scores of the round in the last of the rows; none if it was not evaluated."""
        if not scores:
            return
        number, count = rows[-1]["round"], len(self.sizes)
        values = [[row[key] for row in scores[part]] for part in self.parts for key in scores[part][0]]
        table = np.column_stack([np.arange(count), np.full(count, number), self.sizes, *values]).astype(np.float64)
        with open(self.history, "ab") as file:
            file.write(table.tobytes())
            file.flush()
            os.fsync(file.fileno())  # as metrics.csv, it must not fall behind a checkpoint
        if selected(rows)["round"] == number:
            self._write(table)

    def _read(self) -> np.ndarray:
        """The tables on disk [rounds, clients, columns]; a last one that was cut off is dropped."""
        shape = len(self.sizes), len(self.columns)
        values = np.fromfile(self.history) if self.history.exists() else np.empty(0)
        whole = len(values) - len(values) % (shape[0] * shape[1])
        return values[:whole].reshape(-1, *shape)

    def _write(self, table: np.ndarray) -> None:
        counts = table[:, : len(_COUNTS)].astype(np.int64).tolist()
        scores = table[:, len(_COUNTS) :].tolist()
        write_csv(self.path, self.columns, ([*whole, *parts] for whole, parts in zip(counts, scores)))

"""clients.csv: the scores of a run on each client's own held-out samples."""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fl.base.files import regular, replacing, writing
from fl.base.tables import write_csv
from fl.federation import Federation
from fl.runs.evaluate import Scores, held_out
from fl.runs.metrics import Row, selected

FILE, HISTORY = "clients.csv", "clients.f64"
_COUNTS = ("client", "round", "train", "valid", "test")


class ClientTable:
    """clients.csv: a row for each client, with its scores in the round that `fl.runs.metrics.selected` chooses.

    Beside it is clients.f64 with the tables of all evaluated rounds: float64 [rounds, clients, columns], C order, with
    the columns of clients.csv. A resumed run reads it, so that clients.csv becomes the same as without the
    interruption, whichever rounds metrics.csv keeps. Neither file is written if clients hold nothing out. If
    clients.f64 is missing when a run is resumed, there is no clients.csv until a better round comes.

    Args:
        folder: the run folder.
        fed: its clients hold samples out.
        rows: the rows of an earlier, interrupted run that metrics.csv keeps.
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
        """Add the scores of the last row's round; they are empty if it was not evaluated."""
        if not scores:
            return
        number, count = rows[-1]["round"], len(self.sizes)
        values = [[row[key] for row in scores[part]] for part in self.parts for key in scores[part][0]]
        table = np.column_stack([np.arange(count), np.full(count, number), self.sizes, *values]).astype(np.float64)
        with writing(self.history), open(self.history, "ab") as file:
            file.write(table.tobytes())
            file.flush()
            os.fsync(file.fileno())  # like metrics.csv, it must not lag behind a checkpoint
        if selected(rows)["round"] == number:
            self._write(table)

    def _read(self) -> np.ndarray:
        """The tables on disk [rounds, clients, columns]; if the last one was cut off, it is dropped."""
        shape = len(self.sizes), len(self.columns)
        values = np.fromfile(regular(self.history, most=None)) if self.history.exists() else np.empty(0)
        whole = len(values) - len(values) % (shape[0] * shape[1])
        return values[:whole].reshape(-1, *shape)

    def _write(self, table: np.ndarray) -> None:
        counts = table[:, : len(_COUNTS)].astype(np.int64).tolist()
        scores = table[:, len(_COUNTS) :].tolist()
        write_csv(self.path, self.columns, ([*whole, *parts] for whole, parts in zip(counts, scores)))

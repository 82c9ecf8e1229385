"""metrics.csv, one row a round; clients.csv, one row a client and evaluation."""

import csv
import itertools
import json
import math
import os
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import get_args

from fl.base.columns import Due
from fl.base.errors import FLError
from fl.base.files import LARGEST, reading, regular, writing
from fl.base.tables import write_csv
from fl.federation import Federation
from fl.federation.scores import SCORES, task_of
from fl.runs.columns import columns, first_score
from fl.runs.evaluate import ScoreTable, list_held_out

FILE, CLIENTS = "metrics.csv", "clients.csv"
Row = dict[str, float]


class Metrics:
    """The rows of metrics.csv, on disk as soon as they are added.

    The table has the columns that some round has filled; what was not measured in a round is blank.

    Args:
        path: the CSV file, which is overwritten.
        rows: an earlier, interrupted run's, see `read_kept`.
        metrics: the columns of metrics that were asked for, see `fl.runs.columns.list_columns`.
        method: the run's.
    """

    def __init__(self, path: Path, rows: Sequence[Row] = (), metrics: Sequence[str] = (), method: str = "") -> None:
        self.path, self.rows, self._of_run = path, list(rows), (metrics, method)
        self._find_kinds(_names(self.rows))
        self._write()

    def _find_kinds(self, names: Iterable[str]) -> None:
        metrics, method = self._of_run
        self.kinds = {
            name: column.kind
            for name, column in columns([*metrics, *(name for name in names if name not in metrics)], method).items()
        }

    def add(self, row: Row) -> None:
        """Append the row of a round. Raises FLError for a metric without a column."""
        if not row.keys() <= self.kinds.keys():  # of another method, which the run's is made of
            self._find_kinds({*row, *_names(self.rows)})
        if strange := [name for name in row if name not in self.kinds]:
            raise FLError(
                f"metrics.csv has no column {strange[0]!r}: name it in the METHOD of the method that reports it, as in "
                f"Method(..., columns={{{strange[0]!r}: float}})",
                code="run",
            )
        row = {name: kind(row[name]) for name, kind in self.kinds.items() if name in row}  # as it will be read back
        self.rows.append(row)
        if row.keys() <= set(self.columns):
            _append(self.path, [self._line(row)])
        else:
            self._write()

    def _write(self) -> None:
        """Overwrite the table, with the columns that its rows have."""
        filled = {"round", *_names(self.rows)}
        self.columns = [name for name in self.kinds if name in filled]
        write_csv(self.path, self.columns, map(self._line, self.rows))

    def _line(self, row: Row) -> list[object]:
        return [row.get(name, "") for name in self.columns]


def read_kept(path: Path, done: int, wanted: Callable[[Row], set[str]]) -> list[Row]:
    """Read the rows of a metrics.csv that a resumed run keeps. Nothing is written.

    Args:
        done: rounds of its checkpoint; later ones are dropped, since they run again.
        wanted: row -> which of "global" and "models" are due in its round. An earlier end measured more than that,
            which is dropped, so that an interrupted run leaves the same table as an uninterrupted one.

    Raises:
        FLError: for a table that lacks rounds, or has a column that is no metric.
    """
    rows = check_rows(path, done, known=None)
    due = {name: column.due for name, column in columns(_names(rows)).items()}
    rows = [{k: v for k, v in row.items() if due.get(k, "round") in {"round", *wanted(row)}} for row in rows]
    if strange := [name for row in rows for name in row if name not in due]:
        raise FLError(
            f"{path} has a column {strange[0]!r}, which is no metric of this run: put back the table that the run left",
            code="file",
        )
    return rows


class ClientTable:
    """The table clients.csv: every client's scores on its own held-out samples.

    There are rows for every evaluated round. The table is not written if clients hold nothing out. Where clients are
    owners (hospitals, writers), it has their names.

    Args:
        rows: of metrics.csv of an earlier, interrupted run. Other rounds are dropped.

    Raises:
        FLError: unless the table has all rounds that were evaluated.
    """

    def __init__(self, folder: Path, fed: Federation, rows: Sequence[Row]) -> None:
        self.path, self.parts = folder / CLIENTS, list_held_out(fed)
        if not self.parts:
            return
        self.sizes = list(zip(*(getattr(fed.clients, part).sizes.tolist() for part in ("train", "valid", "test"))))
        whats = (*SCORES[task_of(fed.data)], *(name for metric in fed.metrics for name in metric.names))
        scores = [f"{part}_{name}" for part in self.parts for name in whats]
        self.names = [[name] for name in fed.client_names]
        columns = ["client", *["owner"] * bool(self.names), "round", "train", "valid", "test", *scores]
        try:
            before = _table(self.path, most=None) if self.path.exists() else []
        except FLError:
            raise
        except (ValueError, csv.Error):
            before = []
        rounds = [str(row["round"]) for row in select_evaluated(rows)]
        earlier = [row for row in before if row["round"] in rounds]
        names = self.names or [[None]] * len(self.sizes)
        wanted = [(number, str(client), *name) for number in rounds for client, name in enumerate(names)]
        if [(row["round"], row.get("client"), row.get("owner")) for row in earlier] != wanted or any(
            [*row] != columns for row in earlier[:1]
        ):
            raise FLError(
                f"{self.path} does not hold the clients of all evaluated rounds: put the table back", code="file"
            )
        write_csv(self.path, columns, ([*row.values()] for row in earlier))

    def add(self, number: int, scores: ScoreTable) -> None:
        """Append the scores of a round; they are empty if it was not evaluated."""
        if scores:
            values = zip(*(map(dict.values, scores[part]) for part in self.parts))
            names = self.names or [[]] * len(self.sizes)
            lines = zip(names, self.sizes, values, strict=True)
            _append(
                self.path,
                [[k, *name, number, *sizes, *itertools.chain(*parts)] for k, (name, sizes, parts) in enumerate(lines)],
            )


def _append(path: Path, lines: Sequence[Sequence[object]]) -> None:
    with writing(path), open(path, "a", newline="") as file:
        csv.writer(file).writerows(lines)
        file.flush()
        os.fsync(file.fileno())  # the table must not lag behind a checkpoint that is safely on disk


def checksums(rows: Sequence[Row]) -> list[str]:
    """Compute a text for each row that changes with its numbers.

    Seconds differ from run to run and are left out. The text has a part for each kind of evaluation: a resumed run may
    drop one that only an earlier end made; see `read_kept`.
    """
    due = {name: column.due for name, column in columns(_names(rows)).items()}
    due |= {"seconds": None, "attack_success": "global"}  # attack_success: in tables of earlier versions
    parts = [[{k: v for k, v in row.items() if due.get(k, "round") == part} for part in get_args(Due)] for row in rows]
    texts = [[json.dumps(part, sort_keys=True).encode() if part else b"" for part in row] for row in parts]
    return [" ".join(f"{zlib.crc32(text):08x}" if text else "" for text in row) for row in texts]


def check_rows(path: Path, done: int, known: Sequence[str] | None) -> list[Row]:
    """Return the first rows of a metrics.csv, up to the round of the checkpoint.

    FLError unless they are beside the checkpoint of round `done`.

    Args:
        known: their `checksums`; None: they are not compared.
    """
    rows = [row for row in _rows(path) if row["round"] <= done] if path.exists() else []
    if [row["round"] for row in rows] != list(range(1, done + 1)):
        raise FLError(
            f"{path} does not hold rounds 1 to {done}, which the checkpoint has done: put the table back", code="file"
        )
    for row, actual, expected in zip(rows, checksums(rows), [*known, *[""] * done] if known is not None else ()):
        pairs = [*zip(actual.split(" "), expected.split(" "))]
        if len(pairs) != len(get_args(Due)) or any(now not in (was, "") for now, was in pairs):
            raise FLError(
                f"{path} is not the table that the run left: round {row['round']} has other numbers than when the "
                "checkpoint was written; put back the table, or start a new run under another --name",
                code="file",
            )
    return rows


def find_judged(rows: Sequence[Row], by: str = "auto", keep_best: bool = False) -> Row:
    """Find the round that a run is judged by on clients' own data.

    It is the `best` one where something says which is: a column, `keep_best`, or clients that validate; else, or if
    no round is best, the last evaluated round. Empty if no round was evaluated.

    >>> rows = [{"round": r, "accuracy": 0.5, "local_valid_loss": loss} for r, loss in ((1, 2.0), (2, 1.0), (3, 3.0))]
    >>> find_judged(rows)["round"]
    2
    """
    measured = select_evaluated(rows)
    chosen = by != "auto" or keep_best or any("local_valid_loss" in row for row in measured)
    return (best(measured, by) if chosen else {}) or (measured[-1] if measured else {})


def select_evaluated(rows: Sequence[Row]) -> list[Row]:
    """Return the rows of rounds after which the global model was evaluated."""
    return [row for row in rows if first_score(row) in row]


def choose_judging_column(rows: Sequence[Row], by: str = "auto") -> str:
    """Return the column that --best-by judges rounds by.

    auto is the validation loss, or else the first score.
    """
    if by != "auto":
        return by
    return "local_valid_loss" if any("local_valid_loss" in row for row in rows) else first_score(_names(rows))


def best(rows: Sequence[Row], by: str = "auto") -> Row:
    """Find the best evaluated round, the first of equal ones, which --keep-best keeps.

    It has the smallest mean validation loss if clients validate, else the highest test accuracy (of
    numbers: the least error). Empty if no round was evaluated, or none had a number there.

    Args:
        by: the column that is judged by instead.

    >>> rows = [{"round": r, "accuracy": a, "loss": 1 - a / r} for r, a in ((1, 0.5), (2, 0.75), (3, 0.75))]
    >>> best(rows)["round"], best(rows, by="loss")["round"]
    (2, 1)
    >>> best([{"round": 1, "accuracy": math.nan}])
    {}
    """
    measured = select_evaluated(rows)
    by = choose_judging_column(measured, by)
    sign = -1 if columns([by])[by].falls else 1
    measured = [row for row in measured if not math.isnan(row.get(by, math.nan))]
    return max(measured, key=lambda row: sign * row[by], default={})


def evaluations_since_best(rows: Sequence[Row], by: str = "auto") -> int:
    """Count the evaluations after the best one; all of them if none is best.

    >>> scores = (0.5, 0.75, 0.5, 0.75)
    >>> evaluations_since_best([{"round": r, "accuracy": a} for r, a in enumerate(scores, start=1)])
    2
    """
    least = best(rows, by).get("round", 0)
    return sum(row["round"] > least for row in select_evaluated(rows))


def read(path: Path) -> list[Row]:
    """Read the rows of a metrics.csv, as numbers.

    Blanks are left out, and so is a last line that was cut off.

    Raises FLError for any other file, and for rounds that are there twice or in another order.
    """
    rows = _rows(path)
    rounds = [row["round"] for row in rows]
    for before, number in itertools.pairwise(rounds):
        if number <= before:
            raise FLError(
                f"{path} has round {number} {'twice' if rounds.count(number) > 1 else 'out of order'}, as if two "
                "processes had written it, so its numbers are not those of one run: train again",
                code="file",
            )
    return rows


def _names(rows: Sequence[Row]) -> set[str]:
    return set().union(*rows)


def _table(path: Path, most: int | None = LARGEST) -> list[dict[str, str]]:
    """Read a table that grows round by round, without a last line that was cut off.

    Raises ValueError or csv.Error for a file that is no such table.
    """
    with reading(path):
        lines = regular(path, most).read_bytes().decode().splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        del lines[-1]
    table = csv.DictReader(lines)
    if table.fieldnames and "round" not in table.fieldnames:
        raise ValueError("there is no column round")
    return [row for row in table if None not in row.values()]


def _rows(path: Path) -> list[Row]:
    try:
        rows = [{key: float(value) for key, value in row.items() if value} for row in _table(path)]
        kinds = {name: column.kind for name, column in columns(_names(rows)).items()}
        if any(row["round"] < 1 or row["round"] % 1 for row in rows):
            raise ValueError
        # Columns of methods that are not here any more are floats.
        return [{key: kinds.get(key, float)(value) for key, value in row.items()} for row in rows]
    except FLError:
        raise
    except (KeyError, ValueError, TypeError, OverflowError, csv.Error):
        raise FLError(f"{path} cannot be read: it is not a table of rounds", code="file") from None

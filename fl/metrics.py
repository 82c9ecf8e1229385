"""metrics.csv: one row a round."""

import csv
from pathlib import Path

from fl.checkpoint import replacing

Row = dict[str, float]

COLUMNS = [
    "round", "seconds", "train_loss", "accuracy", "loss", "f1", "models_accuracy", "models_std", "models_cosine",
    *[f"local_{part}_{what}" for part in ("valid", "test") for what in ("accuracy", "std", "loss", "f1")],
]  # fmt: skip


class Metrics:
    """The rows of a run, on disk as soon as they are added; what was not measured in a round is blank.

    Args:
        path: the CSV file.
        keep: rounds of an earlier, interrupted run to keep; later rows are dropped, to be run again.
    """

    def __init__(self, path: Path, keep: int = 0) -> None:
        self.path = path
        self.rows = [row for row in read(path) if row["round"] <= keep] if path.exists() else []
        with replacing(path) as temporary, open(temporary, "w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS)
            writer.writeheader()
            writer.writerows(self.rows)

    def add(self, row: Row) -> None:
        """Append the row of a round."""
        self.rows.append(row)
        with open(self.path, "a", newline="") as file:
            csv.DictWriter(file, COLUMNS).writerow(row)


def read(path: Path) -> list[Row]:
    """The rows of a metrics.csv, numbers as numbers, blanks left out. A last line that was cut off is dropped."""
    with open(path, newline="") as file:
        lines = [row for row in csv.DictReader(file) if None not in row.values()]
    rows = [{key: float(value) for key, value in row.items() if value} for row in lines]
    return [row | {"round": int(row["round"])} for row in rows]

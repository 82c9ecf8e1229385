"""What the runs of a sweep came to, as a file."""

import csv
from pathlib import Path

import numpy as np

from fl.analysis.outcome import Run, outcome
from fl.base.files import replacing


def write_csv(option: str, found: dict[tuple[str, str], list[Run]], path: Path) -> None:
    """A row a value and method: the number of seeds, mean and sample standard deviation over them of each result."""
    results = {key: [outcome(run) for run in runs] for key, runs in found.items()}
    names = list(dict.fromkeys(name for runs in results.values() for run in runs for name in run if name != "round"))
    with replacing(path) as temporary, open(temporary, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow([option, "method", "seeds", *(f"{name}{end}" for name in names for end in ("", "_std"))])
        for (text, method), runs in results.items():
            cells = []
            for name in names:
                values = [run[name] for run in runs if name in run]
                cells += [np.mean(values) if values else "", np.std(values, ddof=1) if len(values) > 1 else ""]
            writer.writerow([text, method, len(runs), *cells])

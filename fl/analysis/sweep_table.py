"""The results of a sweep, as a file."""

from pathlib import Path

import numpy as np

from fl.analysis.outcome import Run, outcome
from fl.base.tables import write_csv


def write_results(option: str, found: dict[tuple[str, str], list[Run]], path: Path) -> None:
    """Write a row for each value and method: the number of seeds, and over them the mean and the sample standard
    deviation of each result.
    """
    results = {key: [outcome(run) for run in runs] for key, runs in found.items()}
    names = list(dict.fromkeys(name for runs in results.values() for run in runs for name in run if name != "round"))
    rows = []
    for (text, method), runs in results.items():
        cells = []
        for name in names:
            values = [run[name] for run in runs if name in run]
            cells += [np.mean(values) if values else "", np.std(values, ddof=1) if len(values) > 1 else ""]
        rows.append([text, method, len(runs), *cells])
    write_csv(path, [option, "method", "seeds", *(f"{name}{end}" for name in names for end in ("", "_std"))], rows)

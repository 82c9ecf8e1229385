"""Lay out the stored rows of long runs as run folders: `python docs/stored.py OUT ROWS RECIPE [--flags]`.

ROWS is a folder below benchmarks/results with a METHOD-seedN.csv for each run, RECIPE and flags are what made them.
`python -m fl.compare OUT` and `python -m fl.structure OUT` then draw them without training anything.
"""

import shutil
import sys
from pathlib import Path

from benchmarks.papers.recipes import RECIPES
from fl.settings.command_line import parse

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks/results"


def main(out: Path, rows: Path, settings: list[str]) -> None:
    """Write a run folder for each stored table."""
    experiment = parse(settings, RECIPES).experiment
    configs = {config.method.name: config for config in experiment.runs()}
    first = experiment.runs()[0]
    tables = {tuple(path.stem.rsplit("-seed", 1)): path for path in sorted((RESULTS / rows).glob("*-seed*.csv"))}
    if not tables:
        sys.exit(f"{RESULTS / rows} holds no METHOD-seedN.csv")
    out.mkdir(parents=True)
    (out / "config.yaml").write_text(experiment.to_yaml())
    for (method, seed), path in tables.items():
        folder = out / path.stem
        folder.mkdir()
        config = configs.get(method) or first.replace(algorithm=method)
        (folder / "config.yaml").write_text(config.replace(seed=int(seed)).to_yaml())
        shutil.copy(path, folder / "metrics.csv")
        if (structure := path.with_name(f"{path.stem}-structure.json")).exists():
            shutil.copy(structure, folder / "structure.json")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])

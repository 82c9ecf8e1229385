"""Clusters of clients that share models, beside the truth (FeMAM's Fig. 4)."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fl.analysis.groups import folders_with
from fl.base.errors import FLError
from fl.base.files import write_json
from fl.base.tables import align_columns
from fl.runs.state import RunState

FILE = "structure.json"


@dataclass(frozen=True)
class Structure:
    """The model of each client on each level of a run, and the clusters of its data.

    Raises FLError for values that do not fit together.
    """

    algorithm: str
    levels: list[str]
    """what each has: "global" (one model), a number (of cluster models) or "personal" (one a client)"""
    truth: list[list[int]]
    """the cluster of each client on each level of the truth"""
    found: list[list[int]]
    """the model of each client on each level; -1 if it has none"""
    trained: int
    """how many levels have been trained, from the first on"""
    seed: int
    title: str
    names: list[str] = field(default_factory=list)
    """the owner of each client's samples; none where clients are no owners"""

    def __post_init__(self) -> None:
        sizes = {len(level) for level in (*self.truth, *self.found)}
        fit = len(self.found) == len(self.levels) and 0 <= self.trained <= len(self.levels)
        if not self.truth or len(sizes) > 1 or not fit or len(self.names) not in (0, *sizes):
            raise FLError("levels, clients and their names do not fit together")

    @property
    def clients(self) -> int:
        """The number of clients."""
        return len(self.truth[0])

    @classmethod
    def of(cls, run: RunState) -> "Structure | None":
        """Make the structure of a run.

        None if its method does not give clients models on levels, or the truth is unknown, as for real clients.
        """
        if not run.algorithm.levels or run.fed.truth is None:
            return None
        name, seed = run.config.method.name, run.config.seed
        levels = run.algorithm.levels(run.server)
        truth, title, names = run.fed.truth.tolist(), run.config.title(), run.fed.client_names
        return cls(name, levels.names, truth, levels.models, levels.trained, seed, title, names)

    def save(self, folder: Path) -> None:
        """Write structure.json into a run folder, atomically."""
        write_json(folder / FILE, asdict(self))

    @classmethod
    def read(cls, folder: Path) -> "Structure":
        """Read the structure of a run folder. Raises FLError if it is missing or damaged."""
        path = folder / FILE
        try:
            return cls(**json.loads(path.read_text()))
        except OSError:
            raise FLError(_missing(folder), code="file") from None
        except TypeError:
            raise FLError(
                f"{path} is damaged (it has other fields, or values of other types): run it again", code="file"
            ) from None
        except ValueError as error:  # not text, not JSON, or values that do not fit together
            raise FLError(f"{path} is damaged ({error}): run it again", code="file") from None


def _missing(folder: Path) -> str:
    return (
        f"{folder} has no {FILE}: only methods that give clients models on levels leave one, such as femam and fesem; "
        "run such a method (again, if the folder is older than that file)"
    )


class Agreement(NamedTuple):
    """Agreement of a level with the truth."""

    level: str
    models: int  # how many are in use
    kept: float  # share of the clients that have one
    rand: list[float | None]  # adjusted Rand index against each level of the truth, None if that is not defined

    @property
    def best(self) -> float | None:
        """The largest index, None if there is none."""
        return max((value for value in self.rand if value is not None), default=None)


def rand_index(clusters: Sequence[int], truth: Sequence[int]) -> float | None:
    """Compute the adjusted Rand index of two partitions (Hubert and Arabie 1985).

    It is computed over those with a model (not -1).

    It is None if there is no truth to find: these clients are all in one group, or each is in a group of its own, or
    there are fewer than two. If there is one, a single model for all of them, or a model for each, scores 0.

    >>> rand_index([2, 2, 0, 0, -1], [0, 0, 1, 1, 1]), rand_index([0, 0, 0, 0], [0, 0, 1, 1])
    (1.0, 0.0)
    """
    from sklearn.metrics import adjusted_rand_score

    members = np.flatnonzero(np.asarray(clusters) >= 0)
    clusters, truth = np.asarray(clusters)[members], np.asarray(truth)[members]
    if not 1 < len(np.unique(truth)) < len(members):
        return None
    return float(adjusted_rand_score(truth, clusters))


def agreement(structure: Structure) -> list[Agreement]:
    """Compare each trained level, and pathways of cluster models, with the truth.

    Levels that are global or personal do not look for clusters and have no index.

    Clients have the same pathway if on each cluster level they have the same model, or both none; who has no cluster
    model at all has no pathway. Pathways are compared with the finest level of the truth, which has most clusters.

    >>> truth, found = [[0, 0, 1, 1, 2, 2]], [[1, 1, 0, 0, 0, 0], [0, 0, 0, 0, 1, 1]]
    >>> for row in agreement(Structure("femam", ["2", "2"], truth, found, trained=2, seed=0, title="")):
    ...     print(row.level, row.models, row.kept, row.rand)
    2 2 1.0 [0.4444444444444444]
    2 2 1.0 [0.4444444444444444]
    pathway 3 1.0 [1.0]
    """
    trained = list(zip(structure.levels, structure.found))[: structure.trained]
    result = []
    for name, models in trained:
        assigned = [model for model in models if model >= 0]
        indices = [rand_index(models, truth) if name.isdecimal() else None for truth in structure.truth]
        result.append(Agreement(name, len(set(assigned)), len(assigned) / len(models), indices))
    if pathways := list(zip(*(models for name, models in trained if name.isdecimal()))):
        assigned = [pathway for pathway in pathways if max(pathway) >= 0]
        numbers = {pathway: number for number, pathway in enumerate(dict.fromkeys(assigned))}
        finest = max(range(len(structure.truth)), key=lambda level: len(set(structure.truth[level])))
        indices: list[float | None] = [None] * len(structure.truth)
        indices[finest] = rand_index([numbers.get(pathway, -1) for pathway in pathways], structure.truth[finest])
        result.append(Agreement("pathway", len(numbers), len(assigned) / len(pathways), indices))
    return result


def describe(structure: Structure) -> str:
    """Make a table of levels: models in use, clients with one, adjusted Rand indices."""
    levels = f"{structure.trained} of {len(structure.levels)} levels trained, {structure.clients} clients"
    columns = [f"ARI, {len(set(level))} true groups" for level in structure.truth]
    lines = [["level", "models in use", "clients with one", *columns, "best ARI"]]
    for number, row in enumerate(agreement(structure), 1):
        level = f"{row.level} models" if row.level.isdecimal() else row.level
        level = level if row.level == "pathway" else f"{number}: {level}"
        indices = ["-" if value is None else f"{value:.2f}" for value in [*row.rand, row.best]]
        lines.append([level, str(row.models), f"{row.kept:.0%}", *indices])
    table = align_columns(lines)
    return f"{structure.algorithm}, seed {structure.seed}: {levels}\n{table}"


def find(folders: Sequence[Path]) -> dict[Path, Structure]:
    """Read the structures in folders, which are run folders or contain some.

    Runs of other methods are skipped. Raises FLError for a folder without any.
    """
    paths: dict[Path, Path] = {}
    for folder, inside in folders_with(FILE, folders).items():
        if not inside:
            raise FLError(_missing(folder), code="file")
        for path in inside:
            paths.setdefault(path.resolve(), path)
    return {path: Structure.read(path) for path in paths.values()}

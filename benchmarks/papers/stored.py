"""What is kept of a run: a small CSV file of its evaluated rounds, under a line of JSON that says where it is from."""

import csv
import hashlib
import io
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.papers.cell import Arm
from fl import Config, FLError
from fl.analysis.structure import Structure, agreement
from fl.base.files import write_text
from fl.base.settings import settings_of
from fl.runs.folder import list_fixed
from fl.settings.config import plain
from fl.settings.extensions import EXTENSIONS

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks/results"
STORE = RESULTS / "papers"
"""Where a checkout keeps the runs of all cells."""

SUMS = ("seconds", "tmac", "megabytes", "bytes_up", "bytes_down")
COLUMNS = ("round", *SUMS, "accuracy", "loss", "models_cosine", "models_cosine_released", "models_own_accuracy",
           "models_perplexity", "local_valid_loss", "local_test_accuracy", "local_test_f1", "attackers", "rise",
           "trace", "rand")  # fmt: skip
"""SUMS are from the first round on (of bytes a mean over a round's participants, of megabytes over all clients),
attackers how many of the round's participants are malicious; the last three are of the last round alone, see
`benchmarks.papers.run.PROBES`. A column that a run does not have is left out."""
Row = dict[str, float]


@dataclass(frozen=True)
class Stored:
    """A run as it is stored.

    Attributes:
        run: its arm's name. seed: its seed.
        rounds, done: how many rounds were asked for, and done.
        command: what makes it. device, torch, version, date: on what, with what and when it was made.
        settings: the flags that it read, see `settings`.
        failed: why training could not go on, or ended with a loss that is not finite; "" if neither.
        rows: evaluated rounds.
        base: the digest of the weights beside adapters, which stayed as they were; "" without adapters.
    """

    run: str
    seed: int
    rounds: int
    done: int
    command: str
    device: str
    torch: str
    version: str
    date: str
    settings: dict[str, Any]
    failed: str
    rows: Sequence[Row]
    base: str = ""

    @property
    def over(self) -> bool:
        """Whether there is nothing left to do."""
        return self.done == self.rounds or bool(self.failed)


def extendable(config: Config) -> bool:
    """Whether a run with fewer rounds is the beginning of one with more."""
    return "rounds" not in list_fixed(config) and not _level_rounds(config)


def _level_rounds(config: Config) -> tuple[int, ...]:
    """How long FeMAM stays on its levels."""
    return config.method.options.level_rounds if config.method.name == "femam" else ()


def shortened(config: Config, rounds: int) -> Config:
    """The same with so many rounds. If they are fewer, ten evaluations are left, and FeMAM's levels become shorter in
    proportion.

    >>> from fl.algorithms.femam import FeMAMOptions
    >>> config = Config.of(algorithm="femam", rounds=700, eval_every=10, femam=FeMAMOptions(level_rounds=(400, 50)))
    >>> short = shortened(config, 70)
    >>> short.method.options.level_rounds, short.evaluation.every
    ((40, 5), 7)
    """
    short = config.replace(rounds=rounds)
    if rounds < config.rounds:
        short = short.replace(eval_every=min(config.evaluation.every, max(1, rounds // 10)))
        if lengths := _level_rounds(config):
            levels = tuple(max(1, round(length * rounds / config.rounds)) for length in lengths)
            short = short.replace(femam=replace(config.method.options, level_rounds=levels))
    return short


def settings(config: Config) -> dict[str, Any]:
    """The flags that a run reads and that decide what it computes, without its method, its seed and its rounds.

    >>> said = settings(Config.of(alpha=0.1))
    >>> said["alpha"], "rounds" in said, "attack.amplify" in said, "architectures.widths" in said
    (0.1, False, False, False)
    """
    kept = json.loads(json.dumps(list_fixed(config)))
    return {flag: value for flag, value in kept.items() if flag not in ("algorithm", "seed", "rounds")}


@cache
def _neutral() -> dict[str, Any]:
    """The flags of extensions that are not asked for: attack.share is 0."""
    asked = [one for name, extension in EXTENSIONS.items() for one in settings_of(extension.options, name)]
    return json.loads(json.dumps({one.flag: plain(one.value) for one in asked if not one.unread}))


def path(arm: Arm, seed: int, rounds: int) -> Path:
    """The file of a run, below a store. Runs of fewer rounds have their own if they cannot become longer ones."""
    apart = rounds != arm.config.rounds and not extendable(arm.config)
    return Path(f"{arm.run}-seed{seed}{f'-rounds{rounds}' if apart else ''}.csv")


def write(file: Path, stored: Stored) -> None:
    """Write a run, atomically."""
    table = io.StringIO()
    columns = [name for name in COLUMNS if any(name in row for row in stored.rows)]
    writer = csv.writer(table, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([f"{row[name]:.6g}" if name in row else "" for name in columns] for row in stored.rows)
    said = {key: value for key, value in asdict(stored).items() if key != "rows"}
    said["sha256"] = _digest(said, table.getvalue())
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, f"# {json.dumps(said)}\n{table.getvalue()}")


def read(file: Path) -> Stored:
    """A run. Raises FLError, which names the file, for one that was not written by `write`, or was changed since."""
    try:
        first, _, table = file.read_text().partition("\n")
        said = json.loads(first.removeprefix("# "))
        digest = said.pop("sha256")
        stored = Stored(**said, rows=[_numbers(row) for row in csv.DictReader(io.StringIO(table))])
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise FLError(
            f"{file} is not a stored run ({' '.join(str(error).split())}): run its cell again", code="file"
        ) from None
    if digest != _digest(said, table):
        raise FLError(f"{file} was changed by hand: put it back, or delete it and run its cell again", code="file")
    return stored


def runs(arm: Arm, store: Path = STORE) -> list[Stored]:
    """All stored runs of an arm, by seed; of seeds that have none, those from before there were cells.

    Raises FLError for a file that is damaged, or is of other settings than the arm's.
    """
    folder, found = store / Path(arm.run).parent, []
    pattern = re.compile(rf"{re.escape(arm.name)}-seed\d+(-rounds\d+)?\.csv")
    for file in sorted(folder.glob("*.csv")):
        if pattern.fullmatch(file.name):
            found.append(read(file))
            _check(found[-1], arm, file, store)
    found += [one for one in _earlier(arm) if one.seed not in {other.seed for other in found}]
    return sorted(found, key=lambda one: (one.seed, one.rounds))


def _check(stored: Stored, arm: Arm, file: Path, store: Path) -> None:
    if stored.run != arm.run or file != store / path(arm, stored.seed, stored.rounds):
        raise FLError(
            f"{file} is not a run of {arm.run}: it holds {stored.run}, seed {stored.seed}; move it back", code="file"
        )
    was, now = (_neutral() | one for one in (stored.settings, settings(shortened(arm.config, stored.rounds))))
    for flag, value in now.items():  # flags that only one version of this package has are not compared
        if flag in was and was[flag] != value:
            raise FLError(
                f"{file} was made with another --{flag} than {arm.run} has now: delete it and run the cell again",
                code="file",
            )


def _earlier(arm: Arm) -> Iterator[Stored]:
    """Runs of which only the table is left."""
    seeds: dict[int, list[Row]] = {}
    for file in sorted(RESULTS.glob(arm.tables)) if arm.tables else ():
        with file.open(newline="") as table:
            for row in csv.DictReader(table):
                if arm.where.items() <= row.items() and row["accuracy"]:
                    seed = int(row.get("seed") or file.stem.rpartition("seed")[2])
                    seeds.setdefault(seed, []).append(_numbers({key: row.get(key) for key in COLUMNS}))
        if (known := file.with_name(f"{file.stem}-structure.json")).exists():
            seeds[seed][-1]["rand"] = found_clusters(Structure(**json.loads(known.read_text())))
    rounds = arm.config.rounds
    for seed, rows in sorted(seeds.items()):
        yield Stored(arm.run, seed, rounds, int(rows[-1]["round"]), "", "CPU", "", "", "earlier", {}, "", rows)


def found_clusters(structure: Structure) -> float:
    """How well clusters of clients are the true ones: the adjusted Rand index of the best level; 0 if no level has one.

    >>> found_clusters(Structure("femam", ["global", "2"], [[0, 0, 1, 1]], [[0] * 4, [1, 1, 0, 0]], 2, 0, ""))
    1.0
    """
    levels = [one.best for one in agreement(structure) if one.level.isdecimal()]
    return max((best for best in levels if best is not None), default=0.0)


def _numbers(row: dict[str, str]) -> Row:
    return {name: float(value) for name, value in row.items() if value}


def _digest(said: dict, table: str) -> str:
    return hashlib.sha256(f"{json.dumps(said, sort_keys=True)}\n{table}".encode()).hexdigest()[:16]

"""Stored runs: each is a small CSV file of evaluated rounds, after a line of JSON that says how it was made."""

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
"""SUMS add up from the first round on; bytes are means over a round's participants, megabytes over all clients.
`attackers` counts a round's malicious participants. The last three columns are measured in the last round only, see
`benchmarks.papers.run.PROBES`. A file leaves out the columns that its run lacks."""
Row = dict[str, float]


@dataclass(frozen=True)
class Stored:
    """A run as it is stored.

    Attributes:
        run: its arm's `run`. seed: its seed.
        rounds, done: the numbers of rounds that were asked for, and done.
        command: the command that makes it. device, torch, version, date: how and when it was made.
        settings: the flags that it read, see `settings`.
        failed: why training stopped, or that it ended with a loss that is not finite; "" if neither.
        rows: the evaluated rounds.
        base: with adapters, the digest of the frozen weights; else "".
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
    def is_over(self) -> bool:
        """Return whether nothing is left to do."""
        return self.done == self.rounds or bool(self.failed)


def is_extendable(config: Config) -> bool:
    """Return whether a run with fewer rounds is the beginning of one with more."""
    return "rounds" not in list_fixed(config) and not _level_rounds(config)


def _level_rounds(config: Config) -> tuple[int, ...]:
    """Return the rounds of FeMAM's levels."""
    return config.method.options.level_rounds if config.method.name == "femam" else ()


def shorten(config: Config, rounds: int) -> Config:
    """Return the same settings with this number of rounds.

    A shorter run has at least ten evaluations, and FeMAM's levels shrink in proportion.

    >>> from fl.algorithms.femam import FeMAMOptions
    >>> config = Config.of(algorithm="femam", rounds=700, eval_every=10, femam=FeMAMOptions(level_rounds=(400, 50)))
    >>> short = shorten(config, 70)
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
    """Return the flags that decide what a run computes, without its method, seed and rounds.

    >>> flags = settings(Config.of(alpha=0.1))
    >>> flags["alpha"], "rounds" in flags, "attack.amplify" in flags, "architectures.widths" in flags
    (0.1, False, False, False)
    """
    flags = json.loads(json.dumps(list_fixed(config)))
    return {flag: value for flag, value in flags.items() if flag not in ("algorithm", "seed", "rounds")}


@cache
def _neutral() -> dict[str, Any]:
    """Return the flags of extensions at their defaults, which change nothing: attack.share is 0."""
    every = [setting for name, extension in EXTENSIONS.items() for setting in settings_of(extension.options, name)]
    return json.loads(json.dumps({setting.flag: plain(setting.value) for setting in every if not setting.unread}))


def path(arm: Arm, seed: int, rounds: int) -> Path:
    """Return the file of a run in a store. A shorter run that cannot be extended has its own file."""
    separate = rounds != arm.config.rounds and not is_extendable(arm.config)
    return Path(f"{arm.run}-seed{seed}{f'-rounds{rounds}' if separate else ''}.csv")


def write(file: Path, stored: Stored) -> None:
    """Write a run, atomically."""
    table = io.StringIO()
    columns = [name for name in COLUMNS if any(name in row for row in stored.rows)]
    writer = csv.writer(table, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([f"{row[name]:.6g}" if name in row else "" for name in columns] for row in stored.rows)
    header = {key: value for key, value in asdict(stored).items() if key != "rows"}
    header["sha256"] = _digest(header, table.getvalue())
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, f"# {json.dumps(header)}\n{table.getvalue()}")


def read(file: Path) -> Stored:
    """Read a run. Raises FLError for a file that `write` did not write, or that was changed since."""
    try:
        first, _, table = file.read_text().partition("\n")
        header = json.loads(first.removeprefix("# "))
        digest = header.pop("sha256")
        stored = Stored(**header, rows=[_numbers(row) for row in csv.DictReader(io.StringIO(table))])
    except (OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        raise FLError(
            f"{file} is not a stored run ({' '.join(str(error).split())}): run its cell again", code="file"
        ) from None
    if digest != _digest(header, table):
        raise FLError(f"{file} was changed by hand: put it back, or delete it and run its cell again", code="file")
    return stored


def runs(arm: Arm, store: Path = STORE) -> list[Stored]:
    """Return all stored runs of an arm by seed. For seeds without one the older tables count.

    Raises FLError for a file that is damaged, or whose settings are not the arm's.
    """
    folder, stored = store / Path(arm.run).parent, []
    pattern = re.compile(rf"{re.escape(arm.name)}-seed\d+(-rounds\d+)?\.csv")
    for file in sorted(folder.glob("*.csv")):
        if pattern.fullmatch(file.name):
            stored.append(read(file))
            _check(stored[-1], arm, file, store)
    seeds = {run.seed for run in stored}
    stored += [run for run in _read_older(arm) if run.seed not in seeds]
    return sorted(stored, key=lambda run: (run.seed, run.rounds))


def _check(stored: Stored, arm: Arm, file: Path, store: Path) -> None:
    if stored.run != arm.run or file != store / path(arm, stored.seed, stored.rounds):
        raise FLError(
            f"{file} is not a run of {arm.run}: it holds {stored.run}, seed {stored.seed}; move it back", code="file"
        )
    was, now = (_neutral() | flags for flags in (stored.settings, settings(shorten(arm.config, stored.rounds))))
    for flag, value in now.items():  # flags that only one version of this package has are not compared
        if flag in was and was[flag] != value:
            raise FLError(
                f"{file} was made with another --{flag} than {arm.run} has now: delete it and run the cell again",
                code="file",
            )


def _read_older(arm: Arm) -> Iterator[Stored]:
    """Yield the runs of older tables, which have no line of JSON."""
    seeds: dict[int, list[Row]] = {}
    for file in sorted(RESULTS.glob(arm.tables)) if arm.tables else ():
        with file.open(newline="") as table:
            for row in csv.DictReader(table):
                if arm.where.items() <= row.items() and row["accuracy"]:
                    seed = int(row.get("seed") or file.stem.rpartition("seed")[2])
                    seeds.setdefault(seed, []).append(_numbers({key: row.get(key) for key in COLUMNS}))
        if (structure := file.with_name(f"{file.stem}-structure.json")).exists():
            seeds[seed][-1]["rand"] = score_clusters(Structure(**json.loads(structure.read_text())))
    rounds = arm.config.rounds
    for seed, rows in sorted(seeds.items()):
        yield Stored(arm.run, seed, rounds, int(rows[-1]["round"]), "", "CPU", "", "", "earlier", {}, "", rows)


def score_clusters(structure: Structure) -> float:
    """Return the best level's adjusted Rand index against the true clusters of clients; 0 if no level has one.

    >>> score_clusters(Structure("femam", ["global", "2"], [[0, 0, 1, 1]], [[0] * 4, [1, 1, 0, 0]], 2, 0, ""))
    1.0
    """
    scores = [level.best for level in agreement(structure) if level.level.isdecimal()]
    return max((score for score in scores if score is not None), default=0.0)


def _numbers(row: dict[str, str]) -> Row:
    return {name: float(value) for name, value in row.items() if value}


def _digest(header: dict, table: str) -> str:
    return hashlib.sha256(f"{json.dumps(header, sort_keys=True)}\n{table}".encode()).hexdigest()[:16]

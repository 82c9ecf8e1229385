"""List run folders with what they have reached: `python -m fl.runs [FOLDER]`."""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import tyro
import yaml

from fl.base.console import guarded
from fl.base.errors import FLError
from fl.base.files import regular
from fl.base.tables import aligned, shortened, terminal, whole
from fl.runs.lock import is_locked
from fl.runs.metrics import FILE, read
from fl.settings.help import command

_FILES = ("config.yaml", FILE, "checkpoint.safetensors")
"""Any of them makes a folder one of a run, or of several."""
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # which is ten times as fast
_DROPPED = ("model", "data", "method")  # by a table that would be too wide, in this order


class Listed(NamedTuple):
    """A run, as the table shows it.

    Rounds are those done and wanted, as in 33/40, accuracy is that of the last evaluated round, and state is running (a
    process works in its folder), failed (its training diverged, or ended with a loss that is not finite), finished or
    interrupted.
    """

    folder: str
    method: str
    data: str
    model: str
    rounds: str
    accuracy: str
    state: str


def listing(folder: Path) -> tuple[list[Listed], dict[Path, str]]:
    """The runs in a folder and below it, and what is wrong with those that cannot be read.

    Raises FLError if there is no folder, or no run in it.
    """
    if not folder.is_dir():
        raise FLError(f"{folder} is not a folder: give the one that holds the runs (`--out` of `python -m fl.run`)")
    runs, damaged = [], {}
    places = sorted({path.parent for name in _FILES for path in folder.rglob(name)})
    for place in places:
        try:
            runs += _read(place, any(place in other.parents for other in places))
        except FLError as error:
            damaged[place] = str(error)
    if not places:
        raise FLError(f"{folder} holds no run: `python -m fl.run` leaves one, `--out` says where")
    return runs, damaged


def table(runs: list[Listed], width: int | None = None) -> str:
    """Runs as aligned text.

    Args:
        width: characters that a line may have. Model, data and method are left out, one after another, until the table
            fits, since the name of a folder usually says them; then folders are shortened. A line below says so.

    >>> print(table([Listed("runs/a", "fedmr", "digits", "cnn", "3/40", "61.39%", "interrupted")]))
    folder  method  data    model    rounds  accuracy  state
    runs/a  fedmr   digits  cnn        3/40    61.39%  interrupted
    """
    dropped: list[str] = []

    def text(runs: list[Listed]) -> str:
        """Lay the columns out that are left, the last one to the left."""
        last = max(len(run.state) for run in runs)
        rows = [Listed(*Listed._fields), *runs]
        cells = [row._replace(state=row.state.ljust(last))._asdict() for row in rows]
        kept = [[cell for name, cell in row.items() if name not in dropped] for row in cells]
        return "\n".join(line.rstrip() for line in aligned(kept, left=4 - len(dropped)).splitlines())

    def excess(runs: list[Listed]) -> int:
        return 0 if width is None else max(map(len, text(runs).splitlines())) - width

    for name in _DROPPED:
        if excess(runs) > 0:
            dropped.append(name)
    said = [f"without {', '.join(dropped)}"] * bool(dropped)
    if (more := excess(runs)) > 0:
        folders = [run.folder for run in runs]
        names = shortened(folders, max(map(len, folders)) - more)
        runs = [run._replace(folder=name) for run, name in zip(runs, names)]
        said += ["with shortened folders"] * (names != folders)
    return f"{text(runs)}\n{whole('; '.join(said))}" if said else text(runs)


def _read(folder: Path, holds_others: bool) -> Iterator[Listed]:
    """Read the run of a folder; none for the folder of several, whose runs have folders of their own."""
    settings = _values(folder / "config.yaml", "YAML", lambda text: yaml.load(text, _LOADER))
    methods, seeds, rounds = (settings.get(name) for name in ("algorithm", "seeds", "rounds"))
    if not (isinstance(methods, list) and isinstance(seeds, list) and isinstance(rounds, int) and methods and seeds):
        raise FLError("config.yaml does not hold the settings of a run: algorithm, seeds and rounds")
    if len(methods) * len(seeds) > 1 and holds_others:
        return
    rows = read(folder / FILE) if (folder / FILE).exists() else []
    if [row["round"] for row in rows] != [*range(1, len(rows) + 1)]:
        raise FLError(f"{FILE} does not hold rounds 1, 2, 3, ... once each")
    accuracies = [row["accuracy"] for row in rows if "accuracy" in row]
    errors = [row["mae"] for row in rows if "mae" in row]
    place = folder / "summary.json"
    summary = _values(place, "JSON", json.loads) if place.exists() else {}  # none where the process was killed
    if len(rows) < summary.get("rounds", 0):
        raise FLError(f"{FILE} has {len(rows)} rounds, and summary.json has {summary['rounds']}")
    ended = len(rows) >= rounds or summary.get("complete") is True
    state = "failed" if summary.get("failed") else "finished" if ended else "interrupted"
    yield Listed(
        folder=str(folder),
        method=",".join(map(str, methods)),
        data=str(settings.get("dataset")),
        model=str(settings.get("model")),
        rounds=f"{len(rows)}/{rounds}",
        accuracy=f"{accuracies[-1]:.2%}" if accuracies else f"error {errors[-1]:.3g}" if errors else "-",
        state="running" if is_locked(folder) else state,
    )


def _values(path: Path, kind: str, parse: Callable[[str], Any]) -> dict[str, Any]:
    """Parse a file; nothing if it holds no mapping. Raises FLError, which names it."""
    try:
        values = parse(regular(path).read_bytes().decode())
    except FLError:
        raise
    except OSError as error:
        raise FLError(f"{path.name} cannot be read: {error.strerror}") from None
    except (ValueError, yaml.YAMLError, RecursionError):
        raise FLError(f"{path.name} is not {kind}") from None
    return values if isinstance(values, dict) else {}


@dataclass(frozen=True)
class Arguments:
    """List the runs in a folder and below it, with what they have reached.

    The columns are method, data, model, rounds done, test accuracy in the last evaluated round, and whether they have
    finished, failed, are running or were interrupted. `python -m fl.run --resume` continues an interrupted one.
    """

    folder: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="FOLDER")] = Path("runs")
    """where to look"""


def run(arguments: Arguments) -> int:
    """Look and print."""
    runs, damaged = listing(arguments.folder)
    if runs:
        print(table(runs, terminal()))
    for folder, reason in damaged.items():
        print(f"warning: {folder} is left out: {reason}", file=sys.stderr)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit code: 0, 2 for a folder without runs."""
    return guarded(lambda: run(command(Arguments, "runs", argv)))


if __name__ == "__main__":
    sys.exit(main())

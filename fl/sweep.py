"""The same runs for several values of one option: `python -m fl.sweep OPTION VALUE,VALUE,... [RECIPE] [--flags]`.

python -m fl.sweep participants 5,10,20 --algorithm fedavg,fedmr --seeds 0,1      FedMR's Fig. 10
python -m fl.sweep fedmr.fraction 0,0.2,0.5,1                                      Fig. 11
python -m fl.sweep fedmr.stage1-rounds 0,10,20                                     Fig. 12
python -m fl.sweep attack.share 0,0.05,0.2 --algorithm fedfa,heterofl              FedFA's Fig. 3
"""

import csv
import difflib
import io
import shlex
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from urllib.parse import quote

import numpy as np
import tyro
import yaml

from fl.algorithms import ALGORITHMS, MIXED
from fl.assembly import pick_device
from fl.compare import NOT_COMPARED, common, find_runs, read_settings
from fl.config import Config
from fl.console import guarded
from fl.data import Dataset
from fl.errors import FLError
from fl.files import replacing, write_text
from fl.outcome import Run, outcome, table
from fl.run import new_folder, parse, resumable, run_name, train_all
from fl.settings import choice
from fl.sweep_figures import curves_figure, values_figure
from fl.written import flat

_FILE = "sweep.yaml"
_USAGE = "python -m fl.sweep OPTION VALUE,VALUE,... [RECIPE]"
_ABOUT = """Train with several values of one option, each with every method and seed, and compare them.

OPTION is the name of a flag below without its dashes, such as participants, fedmr.fraction or lr. VALUEs are written as
that flag takes them (true and false for one that takes none). Where a flag takes several numbers at a time, values are
separated by slashes: clusters 2,5,9/3,6,11. A method that does not read the option (fedavg has no fedmr.fraction) runs
once and is drawn as a dashed reference. All runs lie in one folder, beside sweep.txt (a table), sweep.csv, curves.png
and values.png; `python -m fl.sweep --resume FOLDER` continues where one stopped."""


@dataclass(frozen=True)
class Sweep:
    """What is swept: an option (a flag without dashes), its values as they were written, and all other settings."""

    option: str
    values: tuple[str, ...]
    config: Config

    @classmethod
    def make(cls, option: str, values: str, config: Config) -> "Sweep":
        """Split and check what was written on the command line.

        >>> Sweep.make("participants", "5,10", Config()).values
        ('5', '10')
        """
        option = option.replace("_", "-")
        several = isinstance(flat(asdict(Config())).get(option), tuple) and "/" in values
        sweep = cls(option, tuple(text.strip() for text in values.split("/" if several else ",")), config)
        sweep.check()
        return sweep

    def check(self) -> None:
        """Raise FLError for an option that is none or is not swept, and for values that it cannot have."""
        option, known = self.option, flat(asdict(Config()))
        fixed = {name.replace("_", "-") for name in NOT_COMPARED}
        if option in fixed:
            several = option in ("algorithm", "seeds")
            raise FLError(
                f"{option} is not swept: "
                + (
                    f"give several as --{option} A,B,..."
                    if several
                    else f"results do not depend on it; give --{option}"
                )
            )
        if option not in known:
            near = difflib.get_close_matches(option, known, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise FLError(
                f"unknown option to sweep {option!r}: {hint}They are the flags that python -m fl.sweep --help lists"
            )
        if len(self.values) < 2:
            raise FLError(f"{option} {self.values[0]}: give at least two values, or run this one with fl.run")
        self.methods()
        group, _, name = option.replace("-", "_").rpartition(".")
        if hasattr(options := getattr(self.config, group, None), "unread") and (reason := options.unread(name)):
            raise FLError(f"{option} is not read, since {reason}")
        configs = [self.at(text) for text in self.values]
        for k, one in enumerate(configs):
            if one in configs[:k]:
                raise FLError(f"{option} {','.join(self.values)}: {self.values[k]} is there twice, give it once")

    def at(self, text: str) -> Config:
        """The settings with one value; FLError where the flag does not take it."""
        group, _, name = self.option.rpartition(".")
        if isinstance(flat(asdict(self.config))[self.option], bool):
            choice(f"value of {self.option}", [text], ("true", "false"))
            prefix = f"{group}." if group else ""
            flags = [f"--{prefix}{'' if text == 'true' else 'no-'}{name}"]
        else:
            flags = [f"--{self.option}={text}"]
        said = io.StringIO()
        try:
            with redirect_stdout(said), redirect_stderr(said):
                config = tyro.cli(Config, args=flags, default=self.config)
        except SystemExit:
            kind = type(flat(asdict(self.config))[self.option]).__name__
            what = {"int": "a whole number", "float": "a number", "tuple": "numbers"}.get(kind, "such a value")
            raise FLError(f"{self.option} cannot be {text!r}: --{self.option} takes {what}") from None
        config.check_options(self.config)
        return config

    def methods(self) -> tuple[list[str], list[str]]:
        """(methods that read the option, methods that do not); FLError if none does."""
        key = self.option.replace("-", "_")
        reads = [m for m in self.config.algorithm if key in read_settings(replace(self.config, algorithm=(m,)))]
        if not reads:
            owner = self.option.partition(".")[0]
            owner = MIXED[0] if owner == "architectures" else owner
            such = f", such as {owner}" if owner in ALGORITHMS else ""
            raise FLError(
                f"{','.join(self.config.algorithm)} does not read {self.option}: name an --algorithm that does{such}"
            )
        return reads, [m for m in self.config.algorithm if m not in reads]

    def runs(self, folder: Path) -> dict[tuple[str, str], dict[Path, Config]]:
        """(value, method) -> run folder -> settings; the value of a method that does not read the option is ""."""
        reads, others = self.methods()
        result = {}
        for text in self.values:
            for method in reads:
                within = folder / f"{self.option}={quote(text, safe=',')}"
                runs = replace(self.at(text), algorithm=(method,)).runs()
                result[text, method] = {within / run_name(one): one for one in runs}
        for method in others:
            runs = replace(self.config, algorithm=(method,)).runs()
            result["", method] = {folder / run_name(one): one for one in runs}
        return result

    def write(self) -> str:
        """As YAML; `read` is the inverse."""
        settings = yaml.safe_load(self.config.to_yaml())
        return yaml.safe_dump(
            {"option": self.option, "values": list(self.values), "settings": settings}, sort_keys=False
        )

    @classmethod
    def read(cls, folder: Path) -> "Sweep":
        """The sweep of a folder; FLError if it holds none."""
        path = folder / _FILE
        try:
            saved = yaml.safe_load(path.read_text())
            option, values, settings = saved["option"], tuple(map(str, saved["values"])), saved["settings"]
        except (OSError, UnicodeDecodeError):
            raise FLError(f"{folder} is no folder of a sweep: it has no {_FILE} that can be read") from None
        except (yaml.YAMLError, KeyError, TypeError):
            raise FLError(f"{path} is no sweep: put back the file that fl.sweep wrote") from None
        try:
            sweep = cls(option, values, Config.from_yaml(yaml.safe_dump(settings)))
            sweep.check()
        except FLError as error:
            raise FLError(f"{path}: {error}") from None
        return sweep


def main(argv: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit code: 0, 2 for what cannot be run, 130 on Ctrl-C."""
    return guarded(lambda: run(list(sys.argv[1:] if argv is None else argv)))


def run(argv: list[str]) -> int:
    """Run all values, methods and seeds, and compare them."""
    sweep, folder, resume = command(argv)
    groups = sweep.runs(folder)
    runs = {path: one for members in groups.values() for path, one in members.items()}
    for one in runs.values():
        one.check()
    counts = f"{len(sweep.values)} values of {sweep.option}, methods {','.join(sweep.config.algorithm)}"
    print(f"{len(runs)} runs: {counts}, seeds {','.join(map(str, sweep.config.seeds))}", flush=True)
    loaded: dict[tuple, Dataset] = {}

    def load(config: Config) -> Dataset:
        key = (  # all that Config.load reads
            config.dataset, config.data_root, config.download, config.text, config.pad, config.pool, config.samples,
        )  # fmt: skip
        if key not in loaded:
            loaded[key] = config.load().to(pick_device(config.device))
        return loaded[key]

    with resumable(folder, "fl.sweep"):
        done = set(train_all(runs, folder / _FILE, sweep.write(), resume, load))
    ended = {key: [path for path in members if path in done] for key, members in groups.items()}
    found = {key: find_runs(paths) for key, paths in ended.items() if paths}
    where = shlex.quote(str(folder))
    print(f"\n{report(sweep, found, folder)}\n\nresults   {where}/\ntable     {where}/sweep.txt, {where}/sweep.csv")
    print(f"figures   {where}/curves.png, {where}/values.png")
    return 0


def command(argv: list[str]) -> tuple[Sweep, Path, bool]:
    """(sweep, its folder, whether it is resumed) from the command line."""
    names = list(map(_flag, argv))

    def settings(folder: Path) -> Config:
        saved = Sweep.read(folder)
        _not_given(saved.option, names)
        return saved.config

    ask = partial(parse, read=settings, prog=_USAGE, about=_ABOUT)
    if {"-h", "--help"} & set(argv):
        ask(["--help"])
    if "resume" in names:
        if not argv[0].startswith("-"):
            raise FLError(f"--resume takes the option and its values from the folder: leave {argv[0]!r} out")
        config, folder = ask(argv)
        return replace(Sweep.read(folder), config=config), folder, True
    if len(argv) < 2 or argv[0].startswith("-") or argv[1].startswith("--"):
        raise FLError(f"name the option to sweep and its values first: {_USAGE}, or --help")
    option, values, *rest = argv
    _not_given(option.replace("_", "-"), names[2:])
    config, _ = ask(rest, swept=option)
    sweep = Sweep.make(option, values, config)
    return sweep, new_folder(config, f"sweep-{sweep.option}-{config.title()}"), False


def _flag(word: str) -> str:
    """The name of a flag, or nothing.

    >>> _flag("--fedmr.stage1_rounds=3"), _flag("--no-flip"), _flag("3")
    ('fedmr.stage1-rounds', 'flip', '')
    """
    name = word.partition("=")[0].replace("_", "-")
    return name[2:].removeprefix("no-").replace(".no-", ".") if name.startswith("--") else ""


def _not_given(option: str, names: Sequence[str]) -> None:
    if option in names:
        raise FLError(f"--{option} is what is swept: leave the flag out")


def report(sweep: Sweep, found: dict[tuple[str, str], list[Run]], folder: Path) -> str:
    """Leave the table, as text and as CSV, and the figures; return the table."""
    labels = {(text, m): f"{sweep.option}={text} {m}" if text else f"{m} (no {sweep.option})" for text, m in found}
    text = table({labels[key]: runs for key, runs in found.items()})
    write_text(folder / "sweep.txt", text + "\n")
    write_csv(sweep.option, found, folder / "sweep.csv")
    title = common([run.config for runs in found.values() for run in runs])
    curves_figure(sweep.option, found, title, folder / "curves.png")
    values_figure(sweep.option, found, title, folder / "values.png")
    return text


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


if __name__ == "__main__":
    sys.exit(main())

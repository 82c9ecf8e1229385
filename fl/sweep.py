"""Train with several values of one option: `python -m fl.sweep OPTION VALUE,VALUE,... [RECIPE] [--flags]`.

python -m fl.sweep participants 5,10,20 --algorithm fedavg,fedmr --seeds 0,1      FedMR's Fig. 10
python -m fl.sweep fedmr.segment-fraction 0,0.2,0.5,1                              Fig. 11
python -m fl.sweep fedmr.stage1-rounds 0,10,20                                     Fig. 12
python -m fl.sweep attack.share 0,0.05,0.2 --algorithm fedfa,heterofl              FedFA's Fig. 3
"""

import difflib
import io
import shlex
import sys
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any
from urllib.parse import quote

import tyro
import yaml

from fl.analysis.groups import Found, common, find_runs, table, write_results
from fl.base.console import guarded, program
from fl.base.errors import FLError
from fl.base.files import write_text
from fl.base.settings import check_read, check_values, choice, flag_in, role, settings_of
from fl.base.tables import fitted
from fl.data import Dataset
from fl.distributed import current, joined
from fl.figures.sweep import curves_figure, values_figure
from fl.runs.assembly import pick_device
from fl.runs.folder import new_folder, run_name
from fl.runs.many_runs import resumable, train_all
from fl.settings import Config
from fl.settings.command_line import parse
from fl.settings.config import check_renamed, flat
from fl.settings.help import asked

_FILE = "sweep.yaml"
_USAGE = "OPTION VALUE,VALUE,... [RECIPE]"
_ABOUT = """Train with several values of one option, each with every method and seed, and compare them.

OPTION is the name of a flag below without its dashes, such as participants, fedmr.unit or lr. VALUEs are written as
that flag takes them (true and false for one that takes none). Where a flag takes several numbers at a time, values are
separated by slashes: clusters 2,5,9/3,6,11. A method that does not read the option (fedavg has no fedmr.unit) runs
once and is drawn as a dashed reference. All runs lie in one folder, beside sweep.txt (a table), sweep.csv, curves.png
and values.png; `python -m fl.sweep --resume FOLDER` continues where one stopped."""


@dataclass(frozen=True)
class Sweep:
    """An option (a flag without its dashes), its values as they were written, and all other settings."""

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
        if option == "participants":  # numbers replace the share that the settings may have
            config = replace(config, participation=0.0)
        several = isinstance(_default(option), tuple) and "/" in values
        sweep = cls(option, tuple(text.strip() for text in values.split("/" if several else ",")), config)
        sweep.check()
        return sweep

    def check(self) -> None:
        """Raise FLError for an unknown option, one that cannot be swept, and values that it cannot have."""
        option = self.option
        settings = {setting.flag: setting for setting in settings_of(self.config)}
        if option not in settings:
            check_renamed([option])
            near = difflib.get_close_matches(option, settings, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise FLError(f"unknown option {option!r}: {hint}python -m fl.sweep --help lists all that can be swept")
        if not settings[option].role.compared:
            several = option in ("algorithm", "seeds")
            way = f"give several as --{option} A,B,..." if several else f"results do not depend on it; give --{option}"
            raise FLError(f"{option} is not swept: {way}")
        if len(self.values) < 2:
            raise FLError(f"{option} {self.values[0]}: give at least two values, or run this one with fl.run")
        check_read(self.config, [option])
        configs = [self.at(text) for text in self.values]
        for k, one in enumerate(configs):
            if option == "local-valid":
                one.holding_out(chosen=True)
            if one in configs[:k]:
                raise FLError(f"{option} {','.join(self.values)}: {self.values[k]} is there twice: give it once")

    def at(self, text: str) -> Config:
        """Set the option to one value; FLError where the flag does not take it."""
        default, flag = _default(self.option), f"--{self.option}={text}"
        if isinstance(default, bool):
            choice(f"value of {self.option}", [text], ("true", "false"))
            group, dot, name = self.option.rpartition(".")
            flag = f"--{group}{dot}{'' if text == 'true' else 'no-'}{name}"
        said = io.StringIO()
        try:
            with redirect_stdout(said), redirect_stderr(said):
                config = tyro.cli(Config, args=[flag], default=self.config)
        except SystemExit:
            kinds = {"int": "a whole number", "float": "a number", "tuple": "numbers"}
            what = kinds.get(type(flat(asdict(self.config))[self.option]).__name__, "such a value")
            raise FLError(f"{self.option} cannot be {text!r}: --{self.option} takes {what}") from None
        check_values(config)
        return config

    def runs(self, folder: Path) -> dict[tuple[str, str], dict[Path, Config]]:
        """Map (value, method) to run folders and their settings.

        Methods that do not read the option come last, with the value "".
        """
        single = {name: replace(self.config, algorithm=(name,)) for name in self.config.algorithm}
        reads = [name for name, one in single.items() if self.option in {s.flag for s in one.settings()}]
        members = {
            (text, name): (folder / f"{self.option}={quote(text, safe=',')}", replace(self.at(text), algorithm=(name,)))
            for text in self.values
            for name in reads
        }
        members |= {("", name): (folder, one) for name, one in single.items() if name not in reads}
        return {key: {at / run_name(one): one for one in config.runs()} for key, (at, config) in members.items()}

    def write(self) -> str:
        """Write the sweep as YAML; `read` is the inverse."""
        settings = yaml.safe_load(self.config.to_yaml(swept=self.option))
        return yaml.safe_dump(
            {"option": self.option, "values": list(self.values), "settings": settings}, sort_keys=False
        )

    @classmethod
    def read(cls, folder: Path) -> "Sweep":
        """Read the sweep of a folder; FLError if it holds none."""
        path = folder / _FILE
        try:
            saved = yaml.safe_load(path.read_text())
            option, values, settings = saved["option"], tuple(map(str, saved["values"])), saved["settings"]
        except (OSError, UnicodeDecodeError):
            way = f"; it holds a run: `python -m fl.run --resume {folder}`" * (folder / "config.yaml").is_file()
            raise FLError(f"{folder} is not the folder of a sweep: it has no {_FILE} that can be read{way}") from None
        except (yaml.YAMLError, KeyError, TypeError):
            raise FLError(f"{path} is not a sweep: put back the file that fl.sweep wrote") from None
        try:
            sweep = cls(option, values, Config.from_yaml(yaml.safe_dump(settings)))
            sweep.check()
        except FLError as error:
            raise FLError(f"{path}: {error}") from None
        return sweep


def _default(option: str) -> Any:
    """The default of a flag; None for an unknown one."""
    return flat(asdict(Config())).get(option)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit code: 0, 1 if training failed, 2 for what cannot be run, 130 on Ctrl-C."""
    return guarded(lambda: run(list(sys.argv[1:] if argv is None else argv)))


def run(argv: list[str]) -> int:
    """Run all values, methods and seeds, and compare them."""
    with joined():
        sweep, folder, resume = command(argv)
        groups = sweep.runs(folder)
        runs = {path: one for members in groups.values() for path, one in members.items()}
        for one in runs.values():
            one.check()
        counts = f"{len(sweep.values)} values of {sweep.option}, methods {','.join(sweep.config.algorithm)}"
        print(f"{len(runs)} runs: {counts}, seeds {','.join(map(str, sweep.config.seeds))}", flush=True)
        loaded: dict[tuple, Dataset] = {}

        def load(config: Config) -> Dataset:
            key = tuple(getattr(config, field.name) for field in fields(config) if role(field).data)
            if key not in loaded:
                loaded[key] = config.load().to(pick_device(config.device))
            return loaded[key]

        with resumable(folder, "sweep"):
            ended = train_all(runs, folder / _FILE, sweep.write(), resume, load, jobs=sweep.config.jobs)
        if current().rank:
            return 0
        done = {key: [path for path in members if path in ended.done] for key, members in groups.items()}
        _report(sweep.option, {key: find_runs(paths) for key, paths in done.items() if paths}, folder)
        if ended.failed:
            print(ended.describe())
        return int(bool(ended.failed))


def _report(option: str, found: Found, folder: Path) -> None:
    """Write the table, as text and as CSV, and the figures; print the table, and where they are."""
    labels = {(text, m): f"{option}={text} {m}" if text else f"{m} (no {option})" for text, m in found}
    groups = {labels[key]: runs for key, runs in found.items()}
    write_text(folder / "sweep.txt", table(groups) + "\n")
    write_results(option, found, folder / "sweep.csv")
    title = common([run.config for runs in found.values() for run in runs])
    curves_figure(option, found, title, folder / "curves.png")
    values_figure(option, found, title, folder / "values.png")
    where = shlex.quote(str(folder))
    print(f"\n{table(groups, fitted)}\n\nresults   {where}/")
    print(f"table     {where}/sweep.txt, {where}/sweep.csv\nfigures   {where}/curves.png, {where}/values.png")


def command(argv: list[str]) -> tuple[Sweep, Path, bool]:
    """Read the command line: (sweep, its folder, whether it is resumed)."""
    names = list(map(flag_in, argv))

    def not_given(option: str, flags: Sequence[str]) -> None:
        if option in flags:
            raise FLError(f"--{option} is what is swept: leave the flag out")

    def settings(folder: Path) -> Config:
        saved = Sweep.read(folder)
        not_given(saved.option, names)
        return saved.config

    ask = partial(parse, read=settings, command="sweep", usage=_USAGE, about=_ABOUT)
    if asked(argv):
        places = len(list(takewhile(lambda word: not word.startswith("-"), argv[:2])))
        ask(argv[places:])  # without the option and its values
    if "resume" in names:
        if not argv[0].startswith("-"):
            raise FLError(f"--resume takes the option and its values from the folder: leave {argv[0]!r} out")
        config, folder = ask(argv)
        return replace(Sweep.read(folder), config=config), folder, True
    if len(argv) < 2 or argv[0].startswith("-") or argv[1].startswith("--"):
        raise FLError(f"name the option to sweep and its values first: {program('sweep')} {_USAGE}, or --help")
    option, values, *rest = argv
    not_given(option.replace("_", "-"), names)
    config, _ = ask(rest, swept=option)
    sweep = Sweep.make(option, values, config)
    return sweep, new_folder(config, f"sweep-{sweep.option}-{config.title()}"), False


if __name__ == "__main__":
    sys.exit(main())

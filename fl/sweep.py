"""Train with several values of one option, or of two: `python -m fl.sweep OPTION VALUE,VALUE,... [RECIPE] [--flags]`.

python -m fl.sweep participants 5,10,20 --algorithm fedavg,fedmr --seeds 0,1      FedMR's Fig. 10
python -m fl.sweep fedmr.segment-fraction 0,0.2,0.5,1                              Fig. 11
python -m fl.sweep fedmr.stage1-rounds 0,10,20                                     Fig. 12
python -m fl.sweep attack.share 0,0.05,0.2 --algorithm fedfa,heterofl              FedFA's Fig. 3
python -m fl.sweep lr 0.01,0.1 batch-size 10,50                                    a grid of two options
"""

import difflib
import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from itertools import product, takewhile
from operator import attrgetter
from pathlib import Path
from typing import Any
from urllib.parse import quote

import yaml

from fl.analysis.groups import Found, common, find_runs, table, write_results
from fl.base.console import guarded, program
from fl.base.errors import FLError
from fl.base.files import write_text
from fl.base.settings import check_values, choice, flag_in, role, settings_of
from fl.base.tables import fitted
from fl.data import Dataset
from fl.distributed import current, joined
from fl.figures.sweep import curves_figure, grid_figure, values_figure
from fl.runs.assembly import pick_device
from fl.runs.folder import new_folder, run_name
from fl.runs.many_runs import resumable, train_all
from fl.settings import Config
from fl.settings.command_line import parse
from fl.settings.config import check_renamed
from fl.settings.help import asked, parsed
from fl.settings.recipes import RECIPES
from zoo import ZooError
from zoo.plain_yaml import read_yaml

_FILE = "sweep.yaml"
_USAGE = "OPTION VALUE,VALUE,... [OPTION VALUE,VALUE,...] [RECIPE]"
_ABOUT = """Train with several values of one option, each with every method and seed, and compare them. Of two options,
train with each pair of their values.

OPTION is the name of a flag below without its dashes, such as participants, fedmr.unit or lr. VALUEs are written as
that flag takes them (true and false for one that takes none). Where a flag takes several numbers at a time, values are
separated by slashes: clusters 2,5,9/3,6,11. A method that does not read the option (fedavg has no fedmr.unit) runs
once and is drawn as a dashed reference. All runs lie in one folder, beside sweep.txt (a table), sweep.csv, curves.png
and values.png. Of two options values.png has a heat map for each method, and there is no curves.png; a method that
reads one of them runs once for each of its values. `python -m fl.sweep --resume FOLDER` continues where one stopped."""


@dataclass(frozen=True)
class Sweep:
    """One option or two (flags without their dashes) with their values as they were written, and all other settings."""

    options: Mapping[str, tuple[str, ...]]
    config: Config

    @classmethod
    def make(cls, pairs: Iterable[Sequence[str]], config: Config) -> "Sweep":
        """Split and check what was written on the command line: pairs of an option and its values.

        >>> Sweep.make([("participants", "5,10"), ("lr", "0.1,0.01")], Config()).options
        {'participants': ('5', '10'), 'lr': ('0.1', '0.01')}
        """
        options: dict[str, tuple[str, ...]] = {}
        for option, values in pairs:
            option = option.replace("_", "-")
            if option in options:
                raise FLError(f"{option} is swept twice: give all its values at once")
            if option == "participants":  # numbers replace the share that the settings may have
                config = replace(config, participation=0.0)
            several = isinstance(_defaults().get(option), tuple) and "/" in values
            options[option] = tuple(text.strip() for text in values.split("/" if several else ","))
        sweep = cls(options, config)
        sweep.check()
        return sweep

    def check(self) -> None:
        """Raise FLError for unknown options, those that cannot be swept, and values that they cannot have."""
        if not 1 <= len(self.options) <= 2:
            raise FLError(f"a sweep is over one option or two, not {len(self.options)}: {', '.join(self.options)}")
        settings = {setting.flag: setting for setting in settings_of(self.config)}
        for option, texts in self.options.items():
            if option not in settings:
                check_renamed([option])
                near = difflib.get_close_matches(option, settings, n=1)
                hint = f"did you mean {near[0]!r}? " if near else ""
                raise FLError(f"unknown option {option!r}: {hint}python -m fl.sweep --help lists all that can be swept")
            if not settings[option].role.compared:
                several = f"give several as --{option} A,B,..." if option in ("algorithm", "seeds") else ""
                way = several or f"results do not depend on it; give --{option}"
                raise FLError(f"{option} is not swept: {way}")
            if len(texts) < 2:
                way = "run this one with fl.run" if len(self.options) == 1 else f"give this one as --{option}"
                raise FLError(f"{option} {texts[0]}: give at least two values, or {way}")
        cells = [self.at(*texts) for texts in product(*self.options.values())]
        for option, texts in self.options.items():
            unread = [one.unread for cell in cells for one in settings_of(cell) if one.flag == option]
            if all(unread):
                raise FLError(unread[0])
            values = [_value(option, text) for text in texts]
            for k, value in enumerate(values):
                if value in values[:k]:
                    raise FLError(f"{option} {','.join(texts)}: {texts[k]} is there twice: give it once")
        if "local-valid" in self.options:
            for cell in cells:
                cell.holding_out(chosen=True)

    def at(self, *texts: str) -> Config:
        """Set each option to one value; FLError where its flag does not take it."""
        config = self.config
        for option, text in zip(self.options, texts):
            group, _, name = option.replace("-", "_").rpartition(".")
            value = {name: _value(option, text)}
            config = replace(config, **({group: replace(getattr(config, group), **value)} if group else value))
        check_values(config)
        return config

    def runs(self, folder: Path) -> dict[tuple[str, ...], dict[Path, Config]]:
        """Map (value of each option, ..., method) to run folders and their settings.

        An option that the method does not read, there or at all, has the value "", and such keys come last.
        """
        members: dict[tuple[str, ...], dict[Path, Config]] = {}
        for texts in product(*self.options.values()):
            for name in self.config.algorithm:
                config = replace(self.at(*texts), algorithm=(name,))
                read = {setting.flag for setting in config.settings()}
                here = {option: text for option, text in zip(self.options, texts) if option in read}
                at = folder.joinpath(*(f"{option}={quote(text, safe=',')}" for option, text in here.items()))
                key = (*(here.get(option, "") for option in self.options), name)
                members[key] = {at / run_name(one): one for one in config.runs()}
        return dict(sorted(members.items(), key=lambda item: item[0].count("")))

    def write(self) -> str:
        """Write the sweep as YAML; `read` is the inverse."""
        options = {option: list(texts) for option, texts in self.options.items()}
        first = next(iter(options))
        swept = {"options": options} if len(options) > 1 else {"option": first, "values": options[first]}
        settings = yaml.safe_load(self.config.to_yaml(swept=options))
        return yaml.safe_dump({**swept, "settings": settings}, sort_keys=False)

    @classmethod
    def read(cls, folder: Path) -> "Sweep":
        """Read the sweep of a folder; FLError if it holds none."""
        path = folder / _FILE
        try:
            saved = read_yaml(path.read_text())
            options = saved["options"] if "options" in saved else {saved["option"]: saved["values"]}
            options = {option: tuple(map(str, texts)) for option, texts in options.items()}
            settings = saved["settings"]
        except (OSError, UnicodeDecodeError):
            way = f"; it holds a run: `python -m fl.run --resume {folder}`" * (folder / "config.yaml").is_file()
            raise FLError(f"{folder} is not the folder of a sweep: it has no {_FILE} that can be read{way}") from None
        except (ZooError, KeyError, TypeError, AttributeError):
            raise FLError(f"{path} is not a sweep: put back the file that fl.sweep wrote") from None
        try:
            sweep = cls(options, Config.from_yaml(yaml.safe_dump(settings)))
            sweep.check()
        except FLError as error:
            raise FLError(f"{path}: {error}") from None
        return sweep


@cache
def _defaults() -> dict[str, Any]:
    """The default of each flag."""
    return {setting.flag: setting.value for setting in settings_of(Config())}


@cache
def _value(option: str, text: str) -> Any:
    """Read a value as the option's flag does; FLError where it does not take it."""
    default, flag = _defaults()[option], f"--{option}={text}"
    if isinstance(default, bool):
        choice(f"value of {option}", [text], ("true", "false"))
        group, dot, name = option.rpartition(".")
        flag = f"--{group}{dot}{'' if text == 'true' else 'no-'}{name}"
    try:
        config = parsed(Config, [flag], quiet=True)
    except SystemExit:
        kinds = {"int": "a whole number", "float": "a number", "tuple": "numbers"}
        what = kinds.get(type(default).__name__, "such a value")
        raise FLError(f"{option} cannot be {text!r}: --{option} takes {what}") from None
    return attrgetter(option.replace("-", "_"))(config)


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
        counts = " by ".join(f"{len(texts)} values of {option}" for option, texts in sweep.options.items())
        counts += f", methods {','.join(sweep.config.algorithm)}"
        print(f"{len(runs)} runs: {counts}, seeds {','.join(map(str, sweep.config.seeds))}", flush=True)
        loaded: dict[tuple, Dataset] = {}

        def load(config: Config) -> Dataset:
            key = tuple(getattr(config, field.name) for field in fields(config) if role(field).data)
            if key not in loaded:
                loaded[key] = config.load().to(pick_device(config.device))
            return loaded[key]

        with resumable(folder, "sweep"):
            ended = train_all(runs, folder / _FILE, sweep.write(), resume, load)
        if current().rank:
            return 0
        done = {key: [path for path in members if path in ended.done] for key, members in groups.items()}
        _report(sweep.options, {key: find_runs(paths) for key, paths in done.items() if paths}, folder)
        if ended.failed:
            print(ended.describe())
        return int(bool(ended.failed))


def _report(options: Mapping[str, tuple[str, ...]], found: Found, folder: Path) -> None:
    """Write the table, as text and as CSV, and the figures; print the table, and where they are."""
    groups = {_label(options, *at): runs for at, runs in found.items()}
    write_text(folder / "sweep.txt", table(groups) + "\n")
    write_results(list(options), found, folder / "sweep.csv")
    title = common([run.config for runs in found.values() for run in runs])
    where = shlex.quote(str(folder))
    if len(options) == 1:
        (option,) = options
        curves_figure(option, found, title, folder / "curves.png")
        values_figure(option, found, title, folder / "values.png")
        figures = f"figures   {where}/curves.png, {where}/values.png"
    else:
        grid_figure(options, found, title, folder / "values.png")
        figures = f"figure    {where}/values.png; curves of all runs: {program('compare')} {where}"
    print(f"\n{table(groups, fitted)}\n\nresults   {where}/")
    print(f"table     {where}/sweep.txt, {where}/sweep.csv\n{figures}")


def _label(options: Iterable[str], *at: str) -> str:
    """Name a line of the table by its values and its method."""
    *texts, method = at
    read = [f"{option}={text}" for option, text in zip(options, texts) if text]
    unread = [option for option, text in zip(options, texts) if not text]
    return " ".join([*read, method, *([f"(no {', '.join(unread)})"] if unread else [])])


def command(argv: list[str]) -> tuple[Sweep, Path, bool]:
    """Read the command line: (sweep, its folder, whether it is resumed)."""
    names = list(map(flag_in, argv))

    def not_given(options: Iterable[str], flags: Sequence[str]) -> None:
        if given := [option for option in options if option in flags]:
            raise FLError(f"--{given[0]} is what is swept: leave the flag out")

    def settings(folder: Path) -> Config:
        saved = Sweep.read(folder)
        not_given(saved.options, names)
        return saved.config

    ask = partial(parse, read=settings, command="sweep", usage=_USAGE, about=_ABOUT)
    if asked(argv):
        places = len(list(takewhile(lambda word: not word.startswith("-") and word not in RECIPES, argv)))
        ask(argv[places:])  # without the options and their values
    if "resume" in names:
        if not argv[0].startswith("-"):
            raise FLError(f"--resume takes the option and its values from the folder: leave {argv[0]!r} out")
        config, folder = ask(argv)
        return replace(Sweep.read(folder), config=config), folder, True
    pairs, rest = _pairs(argv)
    if not pairs:
        raise FLError(f"name the option to sweep and its values first: {program('sweep')} {_USAGE}, or --help")
    options = [option.replace("_", "-") for option, _ in pairs]
    not_given(options, names)
    config, _ = ask(rest, swept=options)
    sweep = Sweep.make(pairs, config)
    return sweep, new_folder(config, f"sweep-{'-'.join(sweep.options)}-{config.title()}"), False


def _pairs(argv: list[str]) -> tuple[list[list[str]], list[str]]:
    """Split off the options and their values, which come first, from a recipe and flags."""
    at = 0
    while argv[at:] and not argv[at].startswith("-") and argv[at] not in RECIPES:
        if len(argv) == at + 1 or argv[at + 1].startswith("--"):
            if at and argv[at].replace("_", "-") in _defaults():
                raise FLError(f"{argv[at]} has no values: name them behind it, as in {_USAGE}")
            break  # a recipe that does not exist, or nothing
        at += 2
    return [argv[k : k + 2] for k in range(0, at, 2)], argv[at:]


if __name__ == "__main__":
    sys.exit(main())

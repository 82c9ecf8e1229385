"""Train with several values of one option: `python -m fl.sweep OPTION VALUE,VALUE,... [RECIPE] [--flags]`.

python -m fl.sweep participants 5,10,20 --algorithm fedavg,fedmr --seeds 0,1      FedMR's Fig. 10
python -m fl.sweep fedmr.segment-fraction 0,0.2,0.5,1                              Fig. 11
python -m fl.sweep fedmr.stage1-rounds 0,10,20                                     Fig. 12
python -m fl.sweep attack.share 0,0.05,0.2 --algorithm fedfa,heterofl              FedFA's Fig. 3
"""

import shlex
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import partial
from itertools import takewhile
from pathlib import Path

from fl.analysis.groups import Found, common, find_runs, table, write_results
from fl.base.console import guarded, program
from fl.base.errors import FLError
from fl.base.files import write_text
from fl.base.settings import flag_in, role
from fl.base.tables import fitted
from fl.data import Dataset
from fl.distributed import current, joined
from fl.figures.sweep import curves_figure, values_figure
from fl.runs.assembly import pick_device
from fl.runs.folder import new_folder
from fl.runs.many_runs import SWEEP, Sweep, resumable, train_all
from fl.settings import Config
from fl.settings.command_line import parse
from fl.settings.help import asked

_USAGE = "OPTION VALUE,VALUE,... [RECIPE]"
_ABOUT = """Train with several values of one option, each with every method and seed, and compare them.

OPTION is the name of a flag below without its dashes, such as participants, fedmr.unit or lr. VALUEs are written as
that flag takes them (true and false for one that takes none). Where a flag takes several numbers at a time, values are
separated by slashes: clusters 2,5,9/3,6,11. A method that does not read the option (fedavg has no fedmr.unit) runs
once and is drawn as a dashed reference. All runs lie in one folder, beside sweep.txt (a table), sweep.csv, curves.png
and values.png; `python -m fl.sweep --resume FOLDER` continues where one stopped."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit code: 0, 1 if training failed, 2 for what cannot be run, 130 on Ctrl-C."""
    return guarded(lambda: run(list(sys.argv[1:] if argv is None else argv)))


def run(argv: list[str]) -> int:
    """Run all values, methods and seeds, and compare them."""
    with joined():
        return _run(argv)


def report(option: str, found: Found, folder: Path) -> str:
    """Write the table, as text and as CSV, and the figures; return the table, fitted to the terminal."""
    labels = {(text, m): f"{option}={text} {m}" if text else f"{m} (no {option})" for text, m in found}
    groups = {labels[key]: runs for key, runs in found.items()}
    write_text(folder / "sweep.txt", table(groups) + "\n")
    write_results(option, found, folder / "sweep.csv")
    title = common([run.config for runs in found.values() for run in runs])
    curves_figure(option, found, title, folder / "curves.png")
    values_figure(option, found, title, folder / "values.png")
    return table(groups, fitted)


def _run(argv: list[str]) -> int:
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
        ended = train_all(runs, folder / SWEEP, sweep.write(), resume, load)
    if current().rank:
        return 0
    done = {key: [path for path in members if path in ended.done] for key, members in groups.items()}
    found = {key: find_runs(paths) for key, paths in done.items() if paths}
    where = shlex.quote(str(folder))
    print(f"\n{report(sweep.option, found, folder)}\n\nresults   {where}/")
    print(f"table     {where}/sweep.txt, {where}/sweep.csv\nfigures   {where}/curves.png, {where}/values.png")
    if ended.failed:
        print(ended.describe())
    return int(bool(ended.failed))


def command(argv: list[str]) -> tuple[Sweep, Path, bool]:
    """Read the command line: (sweep, its folder, whether it is resumed)."""
    names = list(map(flag_in, argv))

    def settings(folder: Path) -> Config:
        saved = Sweep.read(folder)
        _not_given(saved.option, names)
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
    _not_given(option.replace("_", "-"), names[2:])
    config, _ = ask(rest, swept=option)
    sweep = Sweep.make(option, values, config)
    return sweep, new_folder(config, f"sweep-{sweep.option}-{config.title()}"), False


def _not_given(option: str, names: Sequence[str]) -> None:
    if option in names:
        raise FLError(f"--{option} is what is swept: leave the flag out")


if __name__ == "__main__":
    sys.exit(main())

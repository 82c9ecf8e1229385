"""Train: `python -m fl.run [RECIPE] [--flags]`."""

import difflib
import itertools
import logging
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from pathlib import Path

import tyro

from fl import data
from fl.algorithms import MIXED
from fl.assembly import build, pick_device
from fl.compare import compare
from fl.config import Config
from fl.console import guarded
from fl.errors import Diverged, FLError
from fl.files import write_text
from fl.recipes import RECIPES, overview
from fl.recipes import describe as describe_recipe
from fl.simulation import begin, create_folder, simulate
from fl.written import flat

_log = logging.getLogger("fl")

_MAY_CHANGE = {
    "rounds",
    "eval_every",
    "models_every",
    "checkpoint_every",
    "chunk",
    "device",
    "data_root",
    "download",
    "resume",
}


def main(argv: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit code: 0, 2 for what cannot be run, 130 on Ctrl-C."""
    return guarded(lambda: run(list(sys.argv[1:] if argv is None else argv)))


def run(argv: list[str]) -> int:
    """Run every method and seed of the command, and compare them if there are several."""
    config, folder = parse(argv)
    config.check()
    dataset = config.load().to(pick_device(config.device))
    folder = folder or new_folder(config, config.title())
    runs = config.runs()
    with resumable(folder, "fl.run"):
        if len(runs) == 1:
            print(describe(simulate(config, folder, bool(config.resume), dataset)))
        else:
            many(config, runs, folder, dataset)
    print(advice(config, folder))
    return 0


@contextmanager
def resumable(folder: Path, module: str) -> Iterator[None]:
    """Ctrl-C within says how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        if folder.exists():
            where = shlex.quote(str(folder))
            print(f"\nstopped; what is done is in {where}\ngo on with:  python -m {module} --resume {where}")
        raise


def many(config: Config, runs: list[Config], folder: Path, dataset: data.Dataset) -> None:
    """One run folder a method and seed within `folder`, then one table and one figure of all."""
    inside = {folder / run_name(one): one for one in runs}
    done = train_all(inside, folder / "config.yaml", config.to_yaml(), bool(config.resume), lambda _: dataset)
    table = compare(done, folder / "comparison.png")
    write_text(folder / "comparison.txt", table + "\n")
    print(f"\n{table}")


def train_all(
    runs: Mapping[Path, Config], settings: Path, text: str, resume: bool, load: Callable[[Config], data.Dataset]
) -> list[Path]:
    """Run all of several runs, each in its folder; those that are done, or begun, are taken up where they are.

    One that diverges is told and left out, and the others go on.

    Args:
        runs: folder -> settings with one method and one seed.
        settings: the file that says what all of them are, in the folder above them, which is new unless `resume`.
        text: its content.
        load: the data set of a run.

    Returns:
        The folders of those that came to their end.

    Raises:
        FLError: as `simulate`, and if all diverged.
    """
    if not resume and settings.parent.exists():
        create_folder(settings.parent)  # which says so
    for path, one in runs.items():  # what the last of them refuses is told before the first trains
        dataset = load(one)
        fed, algorithm = build(one, dataset)
        begin(one, path, algorithm, fed.spec)
    if not resume:
        create_folder(settings.parent)
    write_text(settings, text)
    done = []
    for path, one in runs.items():
        try:
            simulate(replace(one, out=str(path.parent), name=path.name), path, resume=path.exists(), dataset=load(one))
            done.append(path)
        except Diverged as error:
            if path == [*runs][-1] and not done:
                raise
            _log.warning("warning: %s is left out: %s", path, error)
    return done


def run_name(config: Config) -> str:
    """The folder of one method and seed among several."""
    return f"{config.algorithm[0]}-seed{config.seeds[0]}"


def parse(
    argv: list[str],
    read: Callable[[Path], Config] = Config.read,
    prog: str = "python -m fl.run [RECIPE]",
    about: str = Config.__doc__,
    swept: str = "",
) -> tuple[Config, Path | None]:
    """(settings, folder to resume or None) from the command line.

    Args:
        swept: the option that will have several values.
        read: the settings of a folder to resume.
        prog, about: of the help.
    """
    start, recipe = Config(), argv and not argv[0].startswith("-")
    if recipe:
        name = argv.pop(0)
        if name not in RECIPES:
            near = difflib.get_close_matches(name, RECIPES, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise FLError(f"unknown recipe {name!r}: {hint}python -m fl.run --help lists all {len(RECIPES)}")
        start, about = RECIPES[name](), f"{about}\n\n{describe_recipe(name)}"
    config = _cli(argv, start, prog, about)
    if config.resume is None:
        config.check_options(start, swept)
        return config, None
    if recipe:
        raise FLError("--resume takes the settings of the folder: leave the recipe out")
    folder = Path(config.resume)
    saved = read(folder)
    resumed = _cli(argv, replace(saved, resume=None), prog, about)
    changed = [f.name for f in fields(Config) if getattr(resumed, f.name) != getattr(saved, f.name)]
    if fixed := [name for name in changed if name not in _MAY_CHANGE]:
        was, now = (flat(asdict(config)) for config in (saved, resumed))
        flag = next(f for f in was if was[f] != now[f] and f.split(".")[0] == fixed[0].replace("_", "-"))
        raise FLError(f"--{flag} cannot change when a run is resumed (it had {was[flag]})")
    if "rounds" in changed and resumed.lr_schedule != "constant":
        raise FLError(f"--rounds cannot change with --lr-schedule {resumed.lr_schedule}, which depends on their number")
    if "rounds" in changed and (resumed.joining or resumed.leaving):
        raise FLError("--rounds cannot change with --joining or --leaving, whose rounds are drawn among them")
    return resumed, folder


def _cli(argv: list[str], default: Config, prog: str, about: str) -> Config:
    return tyro.cli(
        Config,
        prog=prog,
        args=argv,
        default=default,
        description=f"{about}\n\nrecipes, overridden by flags (`NAME --help` tells all about one):\n{overview()}",
    )


def new_folder(config: Config, title: str) -> Path:
    """The folder for a new run: the given --name, or the title with a number where it is taken."""
    if config.name:
        if Path(config.name).name != config.name:
            raise FLError(f"--name {config.name} is no plain name: give the folder it lies in with --out")
        return Path(config.out, config.name)
    path, number = Path(config.out, title), itertools.count(2)
    while path.exists():
        path = Path(config.out, f"{title}-{next(number)}")
    return path


def describe(summary: dict) -> str:
    """The outcome of one run in two lines; in three where clients have test data of their own."""
    head = f"\n{summary['algorithm']}, seed {summary['seed']}:"
    final, best = summary["final"], summary["best"]
    if not final:
        return f"{head} no round was evaluated"
    other = f"perplexity {final['perplexity']:.2f}" if "perplexity" in final else f"macro-F1 {final['f1']:.2%}"
    chosen, own = summary["selected"], ""
    if chosen:
        which = ", of the smallest validation loss" if "local_valid_loss" in chosen else ""
        means = [f"accuracy {chosen['local_test_accuracy']:.2%} ± {chosen['local_test_std']:.2%}"]
        if "local_test_f1" in chosen:
            means.append(f"macro-F1 {chosen['local_test_f1']:.2%} ± {chosen['local_test_f1_std']:.2%}")
        else:
            means.append(f"perplexity {chosen['local_test_perplexity']:.2f}")
        own = f"\nclients' own test data in round {chosen['round']}{which}: {', '.join(means)} (± over clients)"
    if "attack_success" in final:
        other += f"; the trigger turns {final['attack_success']:.2%} of the images"
    return (
        f"{head} test accuracy {final['accuracy']:.2%} in round {final['round']}, best {best['accuracy']:.2%} in round "
        f"{best['round']}; loss {final['loss']:.3f}, {other}{own}\n{summary['seconds']:.0f} s of training"
    )


def advice(config: Config, folder: Path) -> str:
    """Where the results lie and what to try next."""
    where, several = shlex.quote(str(folder)), len(config.runs()) > 1
    lines = {
        "results": f"{where}/",
        "figure": f"{where}/{'comparison.png' if several else 'curves.png'}",
        "train on": f"python -m fl.run --resume {where} --rounds {2 * config.rounds}",
        "compare": "python -m fl.run --algorithm fedavg,fedprox,fedmr --seeds 0,1,2",
        "settings": "python -m fl.run --help",
    }
    if several or config.dataset != "digits" or config.algorithm[0] in MIXED:
        del lines["compare"]
    if config.lr_schedule != "constant" or config.joining or config.leaving:  # which depend on the number of rounds
        del lines["train on"]
    return "\n" + "\n".join(f"{what:10}{text}" for what, text in lines.items())


if __name__ == "__main__":
    sys.exit(main())

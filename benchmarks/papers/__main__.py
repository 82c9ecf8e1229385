"""Run cells of the papers' tables and figures, store what they measure, and bring docs/results/papers.md up to date.

    python -m benchmarks.papers                                        # all cells, with the verdict on each
    python -m benchmarks.papers fedmr.table1.cifar10.lenet.dir0.5 --minutes 60
    python -m benchmarks.papers --page                                 # only make the page again
    python -m benchmarks.papers femam-fashion-mnist --rounds 50        # a recipe, with the flags of python -m fl.run

Run it at the root of a checkout. Finished runs are kept, and the same command resumes interrupted ones, so that you can
run a long cell in parts. The beginning of an id, such as femam.table1, lists the cells whose ids begin like this; the
beginning of a recipe's name, such as femam-, lists recipes.
"""

import argparse
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from benchmarks.papers import cells, find, page, stored
from benchmarks.papers.recipes import RECIPES
from benchmarks.papers.run import Part, play
from benchmarks.papers.verdict import result
from fl import FLError
from fl.base.console import call_as
from fl.run import main as train
from fl.settings.help import is_asked
from fl.settings.recipes import overview


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.papers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "ids", nargs="*", metavar="ID", help="cells to run, a recipe, or the beginning of names to list"
    )
    parser.add_argument("--algorithm", default="", metavar="NAME,...", help="methods (or other arms) to run")
    parser.add_argument("--seeds", default="", metavar="INT,...", help="seeds to run (default: the paper's)")
    parser.add_argument(
        "--rounds", type=int, default=0,
        help="another number of rounds. With fewer rounds a cell counts as not run, and the page shows what they say",
    )  # fmt: skip
    parser.add_argument("--minutes", type=float, default=0, help="stop after this time; 0 for never")
    parser.add_argument("--device", default="auto", help="cpu, cuda, ...; auto for a GPU if there is one")
    parser.add_argument("--out", type=Path, default=Path("runs/papers"), help="folder of run folders (%(default)s)")
    parser.add_argument(
        "--store", type=Path, default=stored.STORE,
        help="folder of stored runs; the page is made again only for the checkout's",
    )  # fmt: skip
    parser.add_argument("--page", action="store_true", help="only make the page again")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command, and return the exit code: 0, 2 for what cannot be run, 130 on Ctrl-C."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv and argv[0] in RECIPES:
        with call_as(f"python -m benchmarks.papers {argv[0]}") if is_asked(argv) else nullcontext():
            return train(argv, RECIPES)
    options = parse(argv)
    try:
        run(options)
    except KeyboardInterrupt:
        return 130
    except (FLError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def run(options: argparse.Namespace) -> None:
    """Run parts of cells, or list cells or recipes."""
    begin = tuple(options.ids)
    names = [name for name in cells() if name.startswith(begin or "")]
    recipes = {name: line for name, line in overview(RECIPES).items() if name.startswith(begin)}
    if options.page:
        page.write_page()
    elif names and not any(name in names for name in options.ids):
        width = max(map(len, names))
        for name in names:
            print(f"{name:{width}}  {page.describe(result(cells()[name], options.store))}")
    elif recipes and not names:
        width = max(map(len, recipes))
        for name, line in recipes.items():
            print(f"{name:{width}}  {line}")
    else:
        seeds = tuple(int(seed) for seed in options.seeds.split(",") if seed)
        methods = tuple(name for name in options.algorithm.split(",") if name)
        part = Part(methods, seeds, options.rounds, options.minutes, options.device, options.out, options.store)
        try:
            done = play([find(name) for name in options.ids], part)
        finally:
            if options.store.resolve() == stored.STORE:
                page.write_page(options.store)
        for name in options.ids:
            print(f"{name}: {page.describe(result(find(name), options.store))}")
        print("" if done else "not everything is done: the same command resumes it")


if __name__ == "__main__":
    sys.exit(main())

"""Run cells of the papers' tables and figures, store what they measure, and bring docs/results/papers.md up to date.

    python -m benchmarks.papers                                        # all cells, with the verdict on each
    python -m benchmarks.papers fedmr.table1.cifar10.lenet.dir0.5 --minutes 60
    python -m benchmarks.papers --page                                 # only make the page again
    python -m benchmarks.papers femam-fashion-mnist --rounds 50        # a recipe, with the flags of python -m fl.run

Called at the root of a checkout. Finished runs are kept, interrupted ones resumed, so that long cells can be run in
parts: the same command goes on. The beginning of ids, such as femam.table1, lists the cells that begin so; that of
recipes' names, such as femam-, the recipes.
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


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.papers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "ids", nargs="*", metavar="ID", help="cells to run, a recipe, or the beginning of those to list"
    )
    parser.add_argument("--algorithm", default="", metavar="NAME,...", help="which of the methods (or other lines)")
    parser.add_argument("--seeds", default="", metavar="INT,...", help="which seeds; the paper's unless given")
    parser.add_argument(
        "--rounds", type=int, default=0,
        help="another number of rounds. With fewer a cell counts as not run, and the page says what they show",
    )  # fmt: skip
    parser.add_argument("--minutes", type=float, default=0, help="stop after so many; 0 is never")
    parser.add_argument("--device", default="auto", help="cpu, cuda, ...; auto is a GPU if there is one")
    parser.add_argument("--out", type=Path, default=Path("runs/papers"), help="where run folders lie (%(default)s)")
    parser.add_argument(
        "--store", type=Path, default=stored.STORE,
        help="where stored runs lie; the page is made again where these are the checkout's",
    )  # fmt: skip
    parser.add_argument("--page", action="store_true", help="only make the page again")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit code: 0, 2 for what cannot be run, 130 on Ctrl-C."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv and argv[0] in RECIPES:
        with call_as(f"python -m benchmarks.papers {argv[0]}") if is_asked(argv) else nullcontext():
            return train(argv, RECIPES)
    given = arguments(argv)
    try:
        run(given)
    except KeyboardInterrupt:
        return 130
    except (FLError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def run(given: argparse.Namespace) -> None:
    """Run parts of cells, or list cells or recipes."""
    begin = tuple(given.ids)
    names = [one for one in cells() if one.startswith(begin or "")]
    recipes = {name: line for name, line in overview(RECIPES).items() if name.startswith(begin)}
    if given.page:
        page.write_page()
    elif names and not any(one in names for one in given.ids):
        width = max(map(len, names))
        for name in names:
            print(f"{name:{width}}  {page.said(result(cells()[name], given.store))}")
    elif recipes and not names:
        width = max(map(len, recipes))
        for name, line in recipes.items():
            print(f"{name:{width}}  {line}")
    else:
        seeds = tuple(int(seed) for seed in given.seeds.split(",") if seed)
        methods = tuple(name for name in given.algorithm.split(",") if name)
        part = Part(methods, seeds, given.rounds, given.minutes, given.device, given.out, given.store)
        try:
            done = play([find(name) for name in given.ids], part)
        finally:
            if given.store.resolve() == stored.STORE:
                page.write_page(given.store)
        for name in given.ids:
            print(f"{name}: {page.said(result(find(name), given.store))}")
        print("" if done else "not all is done: the same command goes on")


if __name__ == "__main__":
    sys.exit(main())

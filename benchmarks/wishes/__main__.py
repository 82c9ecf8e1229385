"""Run all wishes, print their table, and write docs/results/wishes.md: `python -m benchmarks.wishes`."""

from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path

from benchmarks.wishes import Outcome, attempt, count_lines, wishes

PAGE = Path(__file__).parents[2] / "docs/results/wishes.md"
TITLES = {
    "data": "Federated: data and sites",
    "training": "Federated: training and runs",
    "width": "Surgery: width and pruning",
    "depth": "Surgery: depth, experts and vocabularies",
    "merging": "Surgery: merging",
    "adapters": "Surgery: adapters",
}
HEAD = """# Wishes of other tools' users

Bug reports and wishes of the users of federated frameworks and of libraries for pruning, merging and adapters were
rebuilt as small functions on this library. `{command}` runs each, compares its result with something independent,
and writes this page.

**{works} of {all} work**; {purpose} are left out on purpose, and {later} are not there yet. Lines are those of the
function without its checks, and without networks and data that a user has anyway. The last column says what was
reported or asked for there; the other tools were not run for it, but for [these](surgery.md#what-others-can).
"""


def row(one: Outcome) -> str:
    """Return the table's row of an outcome."""
    message = (one.message.splitlines() or [""])[-1].strip().replace("|", "\\|").replace("*", "\\*").replace("_", "\\_")
    ours = count_lines(one.wish.run) if one.works else f"refused, {one.wish.why}: {message}"
    return f"| {one.wish.job} | {ours} | {one.wish.source}: {one.wish.seen} |"


def page(outcomes: Iterable[Outcome]) -> Iterator[str]:
    """Yield the lines of the page."""
    outcomes = list(outcomes)
    refused = [one.wish.why for one in outcomes if not one.works]
    counts = {"works": len(outcomes) - len(refused), "all": len(outcomes), "purpose": refused.count("on purpose")}
    yield HEAD.format(command="python -m benchmarks.wishes", **counts, later=refused.count("not yet"))
    for theme, group in groupby(outcomes, key=lambda one: one.wish.theme):
        yield f"## {TITLES[theme]}\n\n| job | lines | others |\n|---|---|---|"
        yield from map(row, group)
        yield ""


if __name__ == "__main__":
    outcomes = []
    for one in wishes():
        outcomes.append(attempt(one))
        print(f"{outcomes[-1].seconds:5.1f} s {row(outcomes[-1])}", flush=True)
    PAGE.write_text("\n".join(page(outcomes)).rstrip() + "\n")
    print(f"{sum(one.works for one in outcomes)} of {len(outcomes)} work: {PAGE}")

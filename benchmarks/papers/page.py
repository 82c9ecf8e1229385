"""Write docs/results/papers.md and papers.csv: which of the papers' tables and figures hold, from stored runs alone."""

import csv
import io
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean

from benchmarks.papers import CLAIMS, Claim, cells
from benchmarks.papers.cell import OWN, PAPERS, SMALLER, Comparison
from benchmarks.papers.stored import ROOT, STORE, Stored
from benchmarks.papers.verdict import DECIDED, NOT_RUN, UNDECIDED, VERDICTS, Result, ratio_of, result, spread
from fl.base.files import write_text

PAGE = ROOT / "docs/results/papers.md"
TABLE = "papers.csv"
"""Beside the page: each method of each cell."""
_COLUMNS = (
    "cell", "place", "settings", "compared", "method", "paper", "mean", "deviation", "seeds", "diverged",
    "rounds", "of", "verdict", "made",
)  # fmt: skip
_INTRO = """# Which results of the papers hold

The abstracts' claims come first, then each paper's numbers beside ours. A *cell* is one comparison, and our runs for
it. [How to read the tables](#how-to-read-the-tables). Details: [FedMR](fedmr.md), [FeMAM](femam.md),
[FedFA](fedfa.md).

<div id="filter-rows"></div>
"""
_RULES = """## How to read the tables

| verdict | rule |
|---|---|
| ✓ reproduced | means differ by at most one point, or the sum of both deviations; a ratio is in the paper's range |
| ≈ ordering reproduced | the paper's method is ahead of, or behind, the others as in the paper |
| ✗ not reproduced | neither |
| undecided | an attack leaves neither method a tenth of its accuracy above chance, or costs neither a tenth |
| not run | not yet, or with fewer rounds than the paper's |
| cannot be known | the paper shows an image and no number |

A row is a cell, or the cells of several data sets (`*`). Numbers in brackets count seeds; orders are those of means. An
index counts from 0.9. Runs of rivals that diverged count neither in means nor in verdicts. A claim has the worst
verdict of its cells. Where the paper's text fits several settings, those count that have the most methods, then two
seeds of each, then the best verdict; how many are worse elsewhere stands beside it. `other settings` (`smaller`) have
smaller data, models or rounds than the paper, and count only while none of the paper's own cells was run.

[papers.csv](papers.csv) adds all methods, settings, rounds, deviations, dates and machines.

```sh
# all cells, and what is stored of each
python -m benchmarks.papers
# run a part of a cell, or resume it
python -m benchmarks.papers fedmr.table1.cifar10.lenet.dir0.5 --minutes 60
# only make this page and its table again
python -m benchmarks.papers --page
```
"""
_IN_WORDS = "in words"
_COLOURS = {"reproduced": "✓", "ordering reproduced": "≈", "not reproduced": "✗"}
_LEGEND = {
    "fedmr": "The rise is the mean rise of the test loss within one filter norm of the model.",
    "femam": "The rival is the best with a run that did not diverge. Local: on clients' own test data. Index: the "
    "adjusted Rand index of the best level against the planted clusters.",
    "fedfa": "Settings are images in the paper: ours are guesses, its ranges are from the text. Attackers enlarge "
    "their updates 20 times there, 20 or 5 times here.",
    "heterofl": "The numbers of Flower's baseline, one run each.",
    "depthfl": "The numbers of Flower's baseline, one run each, for the mean of all exits.",
    "adapters": "[Aggregators of adapters](../guides/finetune.md#how-adapters-are-aggregated): `fedit` is `fedavg`, "
    "`ffa_lora` trains B alone, `heterofl_weighted` counts clients by their samples.",
}  # fmt: skip
_SHORT = {
    "accuracy on the clients' own test data": "local accuracy",
    "macro-F1 on the clients' own test data": "local macro-F1",
    "adjusted Rand index of the best level against the planted clusters": "index",
    "mean rise of the test loss within one filter norm": "rise of the test loss",
    "trace of the test loss's Hessian": "trace of the Hessian",
    "test loss in its middle": "test loss",
}
"""From what is compared to its name in a table; the legends say what it is."""
_PICTURES = {
    "fedmr": "FedMR's Table 1 on CIFAR-10: the paper's means and deviations, and each seed of ours",
    "femam": "Accuracy of FeMAM and its rivals in each setting, each seed of ours",
    "fedfa": "FedFA's accuracy divided by its rival's: the paper's ranges, and ours",
}


def page(store: Path = STORE) -> str:
    """The page. Raises FLError for a stored run that is damaged or of other settings."""
    results = {name: result(cell, store) for name, cell in cells().items()}
    parts = [_INTRO, _claims(results)]
    for paper, title in PAPERS.items():
        parts.append(_paper(title, paper, [one for one in results.values() if one.cell.paper == paper]))
    return "\n".join([*parts, _RULES]).rstrip() + "\n"


def table(store: Path = STORE) -> str:
    """CSV with a row for each method of each comparison of the cells that were run. Raises FLError as `page` does."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(_COLUMNS)
    for cell in cells().values():
        one = result(cell, store)
        for comparison, values, verdict in zip(cell.comparisons, one.values, one.verdicts):
            published = dict(zip(comparison.arms, comparison.published)) or dict.fromkeys(
                comparison.arms, "" if comparison.band is None else "{} to {}".format(*comparison.band)
            )
            for name, numbers in values.items():
                runs = [run for run in one.stored if run.run == cell.arm(name).run]
                writer.writerow((
                    cell.id, cell.place, cell.settings, comparison.what, name, published[name],
                    f"{fmean(numbers):.4f}", f"{spread(numbers):.4f}" if len(numbers) > 1 else "", len(numbers),
                    sum(bool(run.failed) for run in runs), one.rounds, one.asked,
                    verdict, _made(runs),
                ))  # fmt: skip
    return file.getvalue()


def write_page(store: Path = STORE) -> None:
    """Write the page and its table, atomically."""
    write_text(PAGE, page(store))
    write_text(PAGE.with_name(TABLE), table(store))


def said(one: Result) -> str:
    """The verdict on a cell, and what fewer rounds than the paper's show.

    >>> said(result(cells()["fedfa.table10"]))
    'cannot be known'
    """
    if not one.short or not one.begun:
        return one.verdict
    if not one.rounds:
        return f"{NOT_RUN} (begun)"
    seen = "; ".join(dict.fromkeys(word for word in one.verdicts if word != NOT_RUN))
    return f"{NOT_RUN} ({seen} at {one.rounds} of {one.asked} rounds)"


def _claims(results: dict[str, Result]) -> str:
    rows = []
    for claim in CLAIMS:
        word, reason = judge_claim(claim, results)
        rows.append((PAPERS[claim.paper], claim.text, _coloured(word), reason))
    return "## The abstracts' claims\n\n" + _table(("paper", "claim", "verdict", "measured"), rows)


def judge_claim(claim: Claim, results: dict[str, Result]) -> tuple[str, str]:
    """Return the verdict on a claim and its reason.

    It is that of the paper's own cells if any has been run whole, else of those in other settings. Where the
    paper's text fits several settings, a cell is judged in those with the most methods, then with two seeds of each
    rather than one, then with the best verdict; the reason counts the cells that are worse in others.
    """
    for smaller in (False, True):
        rows: dict[str, list[tuple[list[int], str]]] = {}  # the number of seeds of each method, and the verdict
        for name, one in results.items():
            if claim.bears(name, smaller):
                words = rows.setdefault(one.cell.row or name, [])
                if not one.short and one.verdicts[claim.at] != NOT_RUN:
                    numbers = [len(values) for values in one.values[claim.at].values()]
                    words.append((numbers, one.verdicts[claim.at]))
        if judged := [min(words, key=_rank) for words in rows.values() if words]:
            known = [word for _, word in judged]
            seeds = {number for numbers, _ in judged for number in numbers}
            counts = ", ".join(f"{known.count(word)} {word}" for word in VERDICTS if word in known)
            each = " to ".join(map(str, sorted({min(seeds), max(seeds)}))) + " seed" + "s" * (max(seeds) > 1)
            decided = [word for word in known if word in DECIDED] or [UNDECIDED]
            word = max(decided, key=VERDICTS.index) + f" ({SMALLER})" * smaller
            worse = sum(
                any(VERDICTS.index(best) < VERDICTS.index(other) for _, other in words if other in DECIDED)
                for best, words in zip(known, filter(None, rows.values()))
            )
            elsewhere = f"; {worse} worse in another setting" * bool(worse)
            return word, f"{len(known)} of {len(rows)} cell{'s' * (len(rows) > 1)}, {each} each: {counts}{elsewhere}"
    return claim.word, claim.elsewhere


def _rank(judged: tuple[list[int], str]) -> tuple[int, int, int]:
    """How early a setting comes among those of a cell: numbers of seeds of its methods, and its verdict."""
    seeds, word = judged
    return -len(seeds), -min(2, *seeds), VERDICTS.index(word)


def _paper(title: str, paper: str, results: Sequence[Result]) -> str:
    """A paper's picture, its table of the cells that were run, our own questions, and how many cells wait."""
    begun = [one for one in results if one.begun and one.rounds]
    parts = [f"## {title}\n\n{_LEGEND[paper]}\n"]
    if paper in _PICTURES:
        parts.append(f"![{_PICTURES[paper]}](../images/papers-{paper}.png)\n")
    shown = [one for one in begun if one.cell.place != OWN]
    if shown:
        heads = ("cell", "compared", "paper", "ours", "verdict")
        lone = [one for one in shown if one.short or {c.kind for c in one.cell.comparisons} - {"ratio", "drop"}]
        rows = [row for one in lone for row in _rows(one)]
        rows += _ratios([one for one in shown if one not in lone])
        rows = [(*row[:-1], _coloured(row[-1])) for row in rows]
        if numbers := [row for row in rows if row[2] != _IN_WORDS]:
            parts.append(_table(heads, numbers))
        if words := [row[:2] + row[3:] for row in rows if row[2] == _IN_WORDS]:
            parts.append(f"{_IN_WORDS.capitalize()}, without numbers:\n\n{_table(heads[:2] + heads[3:], words)}")
    own = [one for one in begun if one.cell.place == OWN and not shown]  # of others papers.csv has the numbers
    for pattern in dict.fromkeys(one.cell.pattern for one in own):
        parts.append(_own([one for one in own if one.cell.pattern == pattern]))
    waiting = [one.cell for one in results if one not in begun and one.cell.arms and one.cell.place != OWN]
    images = [one.cell.place for one in results if not one.cell.arms]
    if waiting:
        counts = {
            place: sum(cell.place == place for cell in waiting) for place in dict.fromkeys(c.place for c in waiting)
        }
        told = ", ".join(f"{place} ({count})" for place, count in counts.items())
        parts.append(f"Not run (with numbers of cells): {told}.\n")
    if images:
        parts.append(f"Images in the paper, so they cannot be known: {'; '.join(dict.fromkeys(images))}.\n")
    return "\n".join(parts)


def _rows(one: Result) -> list[tuple[str, ...]]:
    """A line for each comparison of a cell."""
    cell, rows = one.cell, []
    rounds = f"{one.rounds} of {one.asked}" if one.short else str(one.rounds)
    for comparison, values, word in zip(cell.comparisons, one.values, one.verdicts):
        if values:
            shown = f"{NOT_RUN} ({word} at {rounds} rounds)" if one.short else word
            what = comparison.what.replace(" in %", "").split(", ")
            what = [what[0], *what[-1:]] if len(what) > 1 and comparison.kind in ("ratio", "drop") else what[:1]
            numbers = _published(comparison, values), _ours(one, comparison, values)
            named = ", ".join(_SHORT.get(word, word) for word in what)
            rows.append(("" if rows else f"`{cell.id}`", named, *numbers, shown))
    return rows


def _made(runs: Sequence[Stored]) -> str:
    """When, and on what.

    >>> from dataclasses import replace
    >>> run = Stored("", 0, 0, 0, "", "CPU", "", "", "earlier", {}, "", ())
    >>> _made([replace(run, date="2026-11-28", device="CPU (x86_64, 1 thread)"), run])
    'up to 2026-11-28, some before there were cells, CPU (x86_64, 1 thread)'
    """
    dates = sorted({run.date for run in runs}, key=lambda date: (date[:1].isdigit(), date))
    devices = sorted({run.device for run in runs})
    told = [one for one in devices if not any(other.startswith(f"{one} ") for other in devices)]
    when = f"{dates[0]} to {dates[-1]}" if len(dates) > 1 else dates[0]
    if dates[0] == "earlier":
        when = f"up to {dates[-1]}, some before there were cells" if len(dates) > 1 else "before there were cells"
    return f"{when}, {', '.join(told)}"


def _published(comparison: Comparison, values: dict[str, list[float]]) -> str:
    if comparison.kind == "numbers":
        numbers = dict(zip(comparison.arms, comparison.published))
        return "<br>".join(f"{name} {numbers[name]}" for name in comparison.arms if name in values)
    if comparison.band and comparison.kind != "above":
        return f"{comparison.band[0]:.2f} to {comparison.band[1]:.2f}"
    return _IN_WORDS


def _ratios(results: Sequence[Result]) -> list[tuple[str, ...]]:
    """A line for the ratios that have one range in the paper, over data sets and networks; of ours the decided ones."""
    groups: dict[tuple[str, ...], list[tuple[float, str]]] = {}
    for one in results:
        start, *_, spread_of_data, mode = one.cell.id.split(".")[1:]
        for comparison, values, word in zip(one.cell.comparisons, one.values, one.verdicts):
            if len(values) == len(comparison.arms):
                what = comparison.what.replace(" in %", "").split(", ")
                cells_of_it = f"`{one.cell.paper}.{start}.*.{spread_of_data}.{mode}`"
                key = (cells_of_it, f"{what[0]}, {what[-1]}", _published(comparison, values))
                ratio = ratio_of(comparison, {name: fmean(numbers) for name, numbers in values.items()})
                groups.setdefault(key, []).append((ratio, word))
    rows = []
    for key, members in groups.items():
        words = [word for _, word in members]
        ratios = [ratio for ratio, word in members if word in DECIDED] or [ratio for ratio, _ in members]
        judged = "<br>".join(f"{words.count(word)} {word}" for word in VERDICTS if word in words)
        ours = " to ".join(dict.fromkeys((f"{min(ratios):.2f}", f"{max(ratios):.2f}")))
        rows.append((*key, ours, judged))
    return rows


def _ours(one: Result, comparison: Comparison, values: dict[str, list[float]]) -> str:
    """Our numbers: the ratio; else the paper's method, and the others, or of many the best one with a sound run."""
    counts = sorted({len(values[name]) for name in values})
    if comparison.kind in ("ratio", "drop") and len(values) == len(comparison.arms):
        means = {name: fmean(those) for name, those in values.items()}
        return f"{ratio_of(comparison, means):.2f} ({' to '.join(map(str, dict.fromkeys((counts[0], counts[-1]))))})"
    names = [name for name in comparison.arms if name in values]
    if comparison.kind == "first" and len(names) > 2:
        own, *others = names
        sound = [name for name in others if not all(_lost(one, name))] or others
        best = (max if comparison.larger else min)(sound, key=lambda name: fmean(values[name]))
        names = [own, best]
    return "<br>".join(f"{name} {_mean(values[name])}{_diverged(one, name)}" for name in names)


def _mean(values: Sequence[float]) -> str:
    """Mean, spread and how many seeds.

    >>> _mean([50.0, 52.0]), _mean([50.0])
    ('51.00±1.41 (2)', '50.00 (1)')
    """
    wide = f"±{spread(values):.2f}" if len(values) > 1 else ""
    return f"{fmean(values):.2f}{wide} ({len(values)})"


def _own_mean(one: Result, name: str) -> str:
    values = one.values[0].get(name)
    return _mean(values) + _diverged(one, name) if values else ""


def _diverged(one: Result, name: str) -> str:
    """How many runs of an arm diverged, where any did."""
    lost = _lost(one, name)
    return f", {sum(lost)} of {len(lost)} diverged" if any(lost) else ""


def _lost(one: Result, name: str) -> list[bool]:
    """Whether each run of an arm diverged."""
    return [bool(run.failed) for run in one.stored if run.run == one.cell.arm(name).run]


def _own(results: Sequence[Result]) -> str:
    """What cells of our own with one pattern measured first: lines are arms, columns cells."""
    first = results[0].cell
    comparison = first.comparisons[0]
    shown = [one for one in results if one.values[0]]
    heads = ("", *(f"{one.cell.settings}, {one.rounds} rounds" for one in shown))
    names = [name for name in comparison.arms if any(name in one.values[0] for one in shown)]
    counts = {len(numbers) for one in shown for numbers in one.values[0].values()}
    told = f" ({counts.pop()})" if len(counts) == 1 else ""  # how many seeds: once where all have as many
    rows = [(name, *(_own_mean(one, name).replace(told, "") for one in shown)) for name in names]
    what = f"{first.claim.partition(':')[0]}. {comparison.what.capitalize()}"
    seeds = f"; {told.strip(' ()')} seed{'s' * (told != ' (1)')}" if told else ""
    return f"{what[0].upper()}{what[1:]}{seeds}:\n\n{_table(heads, rows)}"


def _coloured(text: str) -> str:
    """Put its colour before each verdict that has one.

    >>> _coloured("9 reproduced, 3 not reproduced")
    '9 ✓ reproduced, 3 ✗ not reproduced'
    """
    return re.sub("(?:ordering |not )?reproduced", lambda found: f"{_COLOURS[found[0]]} {found[0]}", text)


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines) + "\n"

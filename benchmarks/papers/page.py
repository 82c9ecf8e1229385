"""Write docs/results/papers.md and papers.csv, the verdicts on the papers' tables and figures, from stored runs."""

import csv
import io
import re
from collections import Counter
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
"""Beside the page, with each method of each cell."""
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
_SIGNS = {"reproduced": "✓", "ordering reproduced": "≈", "not reproduced": "✗"}
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
"""From a comparison to its short name in tables; the legends define it."""
_PICTURES = {
    "fedmr": "FedMR's Table 1: the paper's means and deviations, and each seed of ours",
    "femam": "Accuracy of FeMAM and its rivals in each setting, each seed of ours",
    "fedfa": "FedFA's accuracy divided by its rival's: the paper's ranges, and ours",
}


def page(store: Path = STORE) -> str:
    """Return the page. Raises FLError for a stored run that is damaged or has other settings."""
    results = {name: result(cell, store) for name, cell in cells().items()}
    parts = [_INTRO, _claims(results)]
    for paper, title in PAPERS.items():
        parts.append(_paper(title, paper, [judged for judged in results.values() if judged.cell.paper == paper]))
    return "\n".join([*parts, _RULES]).rstrip() + "\n"


def table(store: Path = STORE) -> str:
    """Return CSV with a row per method of each comparison of the cells that were run. Raises FLError as `page` does."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(_COLUMNS)
    for cell in cells().values():
        judged = result(cell, store)
        for comparison, values, verdict in zip(cell.comparisons, judged.values, judged.verdicts):
            published = dict(zip(comparison.arms, comparison.published)) or dict.fromkeys(
                comparison.arms, "" if comparison.band is None else "{} to {}".format(*comparison.band)
            )
            for name, numbers in values.items():
                runs = [run for run in judged.stored if run.run == cell.arm(name).run]
                writer.writerow((
                    cell.id, cell.place, cell.settings, comparison.what, name, published[name],
                    f"{fmean(numbers):.4f}", f"{spread(numbers):.4f}" if len(numbers) > 1 else "", len(numbers),
                    sum(bool(run.failed) for run in runs), judged.rounds, judged.asked,
                    verdict, _describe_origin(runs),
                ))  # fmt: skip
    return file.getvalue()


def write_page(store: Path = STORE) -> None:
    """Write the page and its table, atomically."""
    write_text(PAGE, page(store))
    write_text(PAGE.with_name(TABLE), table(store))


def describe(judged: Result) -> str:
    """Describe the verdict on a cell, and what fewer rounds than the paper's show.

    >>> describe(result(cells()["fedfa.table10"]))
    'cannot be known'
    """
    if not judged.is_short or not judged.begun:
        return judged.verdict
    if not judged.rounds:
        return f"{NOT_RUN} (begun)"
    words = "; ".join(dict.fromkeys(word for word in judged.verdicts if word != NOT_RUN))
    return f"{NOT_RUN} ({words} at {judged.rounds} of {judged.asked} rounds)"


def _claims(results: dict[str, Result]) -> str:
    rows = []
    for claim in CLAIMS:
        word, reason = judge_claim(claim, results)
        rows.append((PAPERS[claim.paper], claim.text, _mark(word), reason))
    return "## The abstracts' claims\n\n" + _table(("paper", "claim", "verdict", "measured"), rows)


def judge_claim(claim: Claim, results: dict[str, Result]) -> tuple[str, str]:
    """Return the verdict on a claim and its reason.

    The paper's own cells decide if any has been run completely, else cells in other settings. Where the paper's text
    fits several settings, the one with the most methods counts, then one with two seeds of each, then the one with the
    best verdict. The reason counts the cells that are worse in another setting.
    """
    for smaller in (False, True):
        rows: dict[str, list[tuple[list[int], str]]] = {}  # the number of seeds of each method, and the verdict
        for name, judged in results.items():
            if claim.is_judged_by(name, smaller):
                words = rows.setdefault(judged.cell.row or name, [])
                if not judged.is_short and judged.verdicts[claim.at] != NOT_RUN:
                    numbers = [len(values) for values in judged.values[claim.at].values()]
                    words.append((numbers, judged.verdicts[claim.at]))
        if best := [min(words, key=_rank) for words in rows.values() if words]:
            known = [word for _, word in best]
            seeds = {number for numbers, _ in best for number in numbers}
            counts = ", ".join(f"{known.count(word)} {word}" for word in VERDICTS if word in known)
            each = " to ".join(map(str, sorted({min(seeds), max(seeds)}))) + " seed" + "s" * (max(seeds) > 1)
            decided = [word for word in known if word in DECIDED] or [UNDECIDED]
            verdict = max(decided, key=VERDICTS.index) + f" ({SMALLER})" * smaller
            worse = sum(
                any(VERDICTS.index(word) < VERDICTS.index(other) for _, other in words if other in DECIDED)
                for word, words in zip(known, filter(None, rows.values()))
            )
            elsewhere = f"; {worse} worse in another setting" * bool(worse)
            return verdict, f"{len(known)} of {len(rows)} cell{'s' * (len(rows) > 1)}, {each} each: {counts}{elsewhere}"
    return claim.word, claim.elsewhere


def _rank(judged: tuple[list[int], str]) -> tuple[int, int, int]:
    """Return a setting's place among those of its cell, from its methods' numbers of seeds and its verdict."""
    seeds, word = judged
    return -len(seeds), -min(2, *seeds), VERDICTS.index(word)


def _paper(title: str, paper: str, results: Sequence[Result]) -> str:
    """Return a paper's section: its picture, tables of cells that were run, and the numbers of cells that were not."""
    begun = [judged for judged in results if judged.begun and judged.rounds]
    parts = [f"## {title}\n\n{_LEGEND[paper]}\n"]
    if paper in _PICTURES:
        parts.append(f"![{_PICTURES[paper]}](../images/papers-{paper}.png)\n")
    shown = [judged for judged in begun if judged.cell.place != OWN]
    if shown:
        heads = ("cell", "compared", "paper", "ours", "verdict")
        lone = [judged for judged in shown if judged.is_short or _kinds(judged) - {"ratio", "drop"}]
        rows = [row for judged in lone for row in _rows(judged)]
        rows += _ratios([judged for judged in shown if judged not in lone])
        rows = [(*row[:-1], _mark(row[-1])) for row in rows]
        if numbers := [row for row in rows if row[2] != _IN_WORDS]:
            parts.append(_table(heads, numbers))
        if words := [row[:2] + row[3:] for row in rows if row[2] == _IN_WORDS]:
            parts.append(f"{_IN_WORDS.capitalize()}, without numbers:\n\n{_table(heads[:2] + heads[3:], words)}")
    questions = [judged for judged in begun if judged.cell.place == OWN and not shown]  # else only in papers.csv
    for pattern in dict.fromkeys(judged.cell.pattern for judged in questions):
        parts.append(_question([judged for judged in questions if judged.cell.pattern == pattern]))
    waiting = [judged.cell for judged in results if judged not in begun and judged.cell.arms]
    waiting = [cell for cell in waiting if cell.place != OWN]
    images = [judged.cell.place for judged in results if not judged.cell.arms]
    if waiting:
        counts = ", ".join(f"{place} ({count})" for place, count in Counter(cell.place for cell in waiting).items())
        parts.append(f"Not run (with numbers of cells): {counts}.\n")
    if images:
        parts.append(f"Images in the paper, so they cannot be known: {'; '.join(dict.fromkeys(images))}.\n")
    return "\n".join(parts)


def _kinds(judged: Result) -> set[str]:
    """Return the kinds of a cell's comparisons."""
    return {comparison.kind for comparison in judged.cell.comparisons}


def _rows(judged: Result) -> list[tuple[str, ...]]:
    """Return a row for each comparison of a cell."""
    cell, rows = judged.cell, []
    rounds = f"{judged.rounds} of {judged.asked}" if judged.is_short else str(judged.rounds)
    for comparison, values, word in zip(cell.comparisons, judged.values, judged.verdicts):
        if values:
            verdict = f"{NOT_RUN} ({word} at {rounds} rounds)" if judged.is_short else word
            phrases = comparison.what.replace(" in %", "").split(", ")
            has_two = len(phrases) > 1 and comparison.kind in ("ratio", "drop")
            phrases = [phrases[0], phrases[-1]] if has_two else phrases[:1]
            numbers = _published(comparison, values), _ours(judged, comparison, values)
            title = ", ".join(_SHORT.get(phrase, phrase) for phrase in phrases)
            rows.append(("" if rows else f"`{cell.id}`", title, *numbers, verdict))
    return rows


def _describe_origin(runs: Sequence[Stored]) -> str:
    """Say when and on which machines runs were made.

    >>> from dataclasses import replace
    >>> run = Stored("", 0, 0, 0, "", "CPU", "", "", "earlier", {}, "", ())
    >>> _describe_origin([replace(run, date="2026-11-28", device="CPU (x86_64, 1 thread)"), run])
    'up to 2026-11-28, some before there were cells, CPU (x86_64, 1 thread)'
    """
    dates = sorted({run.date for run in runs}, key=lambda date: (date[:1].isdigit(), date))
    devices = sorted({run.device for run in runs})
    devices = [device for device in devices if not any(other.startswith(f"{device} ") for other in devices)]
    when = f"{dates[0]} to {dates[-1]}" if len(dates) > 1 else dates[0]
    if dates[0] == "earlier":
        when = f"up to {dates[-1]}, some before there were cells" if len(dates) > 1 else "before there were cells"
    return f"{when}, {', '.join(devices)}"


def _published(comparison: Comparison, values: dict[str, list[float]]) -> str:
    if comparison.kind == "numbers":
        numbers = dict(zip(comparison.arms, comparison.published))
        return "<br>".join(f"{name} {numbers[name]}" for name in comparison.arms if name in values)
    if comparison.band and comparison.kind != "above":
        return f"{comparison.band[0]:.2f} to {comparison.band[1]:.2f}"
    return _IN_WORDS


def _ratios(results: Sequence[Result]) -> list[tuple[str, ...]]:
    """Return a row for all ratios with the same range in the paper, over data sets and networks.

    Our range is of the decided ones.
    """
    groups: dict[tuple[str, ...], list[tuple[float, str]]] = {}
    for judged in results:
        start, *_, partition, mode = judged.cell.id.split(".")[1:]
        for comparison, values, word in zip(judged.cell.comparisons, judged.values, judged.verdicts):
            if len(values) == len(comparison.arms):
                phrases = comparison.what.replace(" in %", "").split(", ")
                pattern = f"`{judged.cell.paper}.{start}.*.{partition}.{mode}`"
                key = (pattern, f"{phrases[0]}, {phrases[-1]}", _published(comparison, values))
                ratio = ratio_of(comparison, {name: fmean(numbers) for name, numbers in values.items()})
                groups.setdefault(key, []).append((ratio, word))
    rows = []
    for key, members in groups.items():
        words = [word for _, word in members]
        ratios = [ratio for ratio, word in members if word in DECIDED] or [ratio for ratio, _ in members]
        verdicts = "<br>".join(f"{words.count(word)} {word}" for word in VERDICTS if word in words)
        ours = " to ".join(dict.fromkeys((f"{min(ratios):.2f}", f"{max(ratios):.2f}")))
        rows.append((*key, ours, verdicts))
    return rows


def _ours(judged: Result, comparison: Comparison, values: dict[str, list[float]]) -> str:
    """Return our numbers: the ratio; else the paper's method, and its rivals, or only the best of many."""
    counts = sorted({len(values[name]) for name in values})
    if comparison.kind in ("ratio", "drop") and len(values) == len(comparison.arms):
        means = {name: fmean(numbers) for name, numbers in values.items()}
        return f"{ratio_of(comparison, means):.2f} ({' to '.join(map(str, dict.fromkeys((counts[0], counts[-1]))))})"
    names = [name for name in comparison.arms if name in values]
    if comparison.kind == "first" and len(names) > 2:
        first, *rivals = names
        sound = [name for name in rivals if not all(_list_diverged(judged, name))] or rivals
        best = (max if comparison.larger else min)(sound, key=lambda name: fmean(values[name]))
        names = [first, best]
    return "<br>".join(f"{name} {_mean(values[name])}{_count_diverged(judged, name)}" for name in names)


def _mean(values: Sequence[float]) -> str:
    """Format mean, standard deviation and number of seeds.

    >>> _mean([50.0, 52.0]), _mean([50.0])
    ('51.00±1.41 (2)', '50.00 (1)')
    """
    deviation = f"±{spread(values):.2f}" if len(values) > 1 else ""
    return f"{fmean(values):.2f}{deviation} ({len(values)})"


def _count_diverged(judged: Result, name: str) -> str:
    """Say how many runs of an arm diverged; "" if none did."""
    diverged = _list_diverged(judged, name)
    return f", {sum(diverged)} of {len(diverged)} diverged" if any(diverged) else ""


def _list_diverged(judged: Result, name: str) -> list[bool]:
    """Return for each run of an arm whether it diverged."""
    return [bool(run.failed) for run in judged.stored if run.run == judged.cell.arm(name).run]


def _question(results: Sequence[Result]) -> str:
    """Return the table of our own cells with one pattern: their first comparison, a row per arm, a column per cell."""
    first = results[0].cell
    comparison = first.comparisons[0]
    shown = [judged for judged in results if judged.values[0]]
    heads = ("", *(f"{judged.cell.settings}, {judged.rounds} rounds" for judged in shown))
    names = [name for name in comparison.arms if any(name in judged.values[0] for judged in shown)]
    counts = {len(numbers) for judged in shown for numbers in judged.values[0].values()}
    common = f" ({counts.pop()})" if len(counts) == 1 else ""  # a number of seeds that all have stands in the title
    rows = [(name, *(_question_mean(judged, name).replace(common, "") for judged in shown)) for name in names]
    title = f"{first.claim.partition(':')[0]}. {comparison.what.capitalize()}"
    seeds = f"; {common.strip(' ()')} seed{'s' * (common != ' (1)')}" if common else ""
    return f"{title[0].upper()}{title[1:]}{seeds}:\n\n{_table(heads, rows)}"


def _question_mean(judged: Result, name: str) -> str:
    values = judged.values[0].get(name)
    return _mean(values) + _count_diverged(judged, name) if values else ""


def _mark(text: str) -> str:
    """Put its sign before each verdict that has one.

    >>> _mark("9 reproduced, 3 not reproduced")
    '9 ✓ reproduced, 3 ✗ not reproduced'
    """
    return re.sub("(?:ordering |not )?reproduced", lambda match: f"{_SIGNS[match[0]]} {match[0]}", text)


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines) + "\n"

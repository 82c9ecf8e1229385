"""Write docs/results/papers.md: which of each paper's tables and figures hold, from the stored runs alone."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean

from benchmarks.papers import CLAIMS, Claim, cells
from benchmarks.papers.cell import OWN, PAPERS, SMALLER, Cell, Comparison
from benchmarks.papers.stored import ROOT, STORE, Stored
from benchmarks.papers.verdict import NOT_RUN, VERDICTS, Result, ratio_of, result, spread
from fl.base.files import write_text

PAGE = ROOT / "docs/results/papers.md"
_INTRO = """# Which results of the papers hold

```sh
# all cells, and what is stored of each
python -m benchmarks.papers
# run a part of a cell, or resume it
python -m benchmarks.papers fedmr.table1.cifar10.lenet.dir0.5 --minutes 60
python -m benchmarks.papers femam.figure5a --seeds 0
# only make this page again
python -m benchmarks.papers --page
```

`python -m benchmarks.papers` makes this page from the runs in
[benchmarks/results/papers](../../benchmarks/results/papers); nothing in it is typed by hand. The first column of each
table has the `ID` that `python -m benchmarks.papers ID` runs. Numbers alone decide a verdict:

- **reproduced**: the paper's method and at least one other were run. Each is within one point of the paper's number,
  or within the sum of both standard deviations if that is more. A ratio is within the range of the paper's text, give
  or take 0.01.
- **ordering reproduced**: the paper's method is ahead of the others that were run, or behind them, as in the paper.
- **not reproduced**: neither.
- **not run**: not yet, or with fewer rounds than the paper's; the result of fewer rounds stands beside it.
- **cannot be known**: the paper has an image there, and no number in its text.

How verdicts combine:

- A claim of an abstract has the worst verdict of its cells. If the paper leaves settings open and a cell was run in
  several, the best verdict counts; the line names these settings and the rivals that were run.
- `(other settings)` are runs on smaller data, with fewer rounds or with another model than the paper's. They count for
  a claim only while none of the paper's own cells has been run. Of those about FedMR's directions and flatness only the
  ones with CIFAR-10 and 500 rounds count.
- Runs made "before there were cells" are older than this page. Numbers in brackets count seeds.

Details: [FedMR](fedmr.md), [FeMAM](femam.md), [FedFA](fedfa.md).
"""
_LEGEND = {
    "fedmr": "Rows without settings use those of the paper's text: momentum 0.9, McMahan's CNN, layers as units, and "
    "500 rounds, which the text does not state. The released code has momentum 0.5, LeNet and tensors as units.",
    "femam": "`-released` are the released code's options. With fewer rounds than 700 its levels become shorter in "
    "proportion, and all methods have equally many rounds.",
    "fedfa": "Numbers, networks and training settings of the paper are images: all settings here are a "
    "reconstruction, and ranges are from the text, over all models and data sets. Lambda 20 is the paper's, 5 is "
    "ours. A ratio of drops says little where an attack leaves both methods at chance, or costs both next to nothing.",
    "heterofl": "The numbers are from Flower's baseline, one run each. Some settings in its README contradict "
    "one another (see the recipe `heterofl-cifar10-a-e`); there clients sample a new width in every round.",
    "depthfl": "The numbers are from Flower's baseline, one run each, for the mean of all exits (table 2): DepthFL, "
    "without distillation (FedAvg), HeteroFL by width, and a to d. In a to d all clients that can afford it have one "
    "depth (table 3 has their last exit alone). The baseline's DepthFL has FedDyn's regulariser as well, which is left "
    "out here; its exits are deeper. In table 3 the baseline's InclusiveFL reaches 47.61, 53.88, 59.48 and 60.46 from "
    "the first classifier to the fourth. It trains only the last exit of each model, which no method here does.",
    "adapters": "Aggregators of [adapters](../guides/finetune.md#how-adapters-are-aggregated) side by side; "
    "`python -m benchmarks.papers.adapters` trains their base first. 1,000 other images of CIFAR-10 test. Layers qkv, "
    "fc1 and fc2 have adapters (LoRA). A new classifier is trained whole with them and counts as traffic. "
    "`fedit` is `fedavg`, `ffa_lora` the same with `--adapters.learn b`. In `heterofl` clients count alike, and a "
    "class's row of the classifier is averaged over the clients that have the class. In `heterofl_weighted` it is "
    "averaged over all, and clients count by their samples. Learning rate, momentum and batch size are equal for all.",
}  # fmt: skip


def page(store: Path = STORE) -> str:
    """The page. Raises FLError for a stored run that is damaged or of other settings."""
    results = {name: result(cell, store) for name, cell in cells().items()}
    parts = [_INTRO, _claims(results)]
    for paper, title in PAPERS.items():
        parts.append(_paper(title, paper, [one for one in results.values() if one.cell.paper == paper]))
    return "\n".join(parts).rstrip() + "\n"


def write_page(store: Path = STORE) -> None:
    """Write it, atomically."""
    write_text(PAGE, page(store))


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
    rows = [(PAPERS[claim.paper], claim.text, *_judged(claim, results)) for claim in CLAIMS]
    return "## The abstracts' claims\n\n" + _table(("paper", "claim", "verdict", "measured"), rows)


def _judged(claim: Claim, results: dict[str, Result]) -> tuple[str, str]:
    """The verdict on a claim and its reason: of the paper's own cells if any has been run whole, each of them judged in
    the settings that come nearest; else of those in other settings.
    """
    for smaller in (False, True):
        rows: dict[str, list[str]] = {}
        seeds: set[int] = set()
        best: dict[str, Result] = {}
        for name, one in results.items():
            if claim.bears(name, smaller):
                words = rows.setdefault(row := one.cell.row or name, [])
                if not one.short and one.verdicts[claim.at] != NOT_RUN:
                    if not words or VERDICTS.index(one.verdicts[claim.at]) < min(map(VERDICTS.index, words)):
                        best[row] = one
                    words.append(one.verdicts[claim.at])
                    seeds.update(map(len, one.values[claim.at].values()))
        if known := [min(words, key=VERDICTS.index) for words in rows.values() if words]:
            counts = ", ".join(f"{known.count(word)} {word}" for word in VERDICTS if word in known)
            cells = f"{len(rows)} cells in other settings" if smaller else f"the paper's {len(rows)} cells"
            each = " to ".join(map(str, sorted({min(seeds), max(seeds)}))) + " seed" + "s" * (max(seeds) > 1)
            word = max(known, key=VERDICTS.index)
            conditions = "" if smaller else f" ({_conditions(claim, list(best.values()))})"
            return (
                word + f" ({SMALLER})" * smaller,
                f"{len(known)} of {cells} were run, {each} each{conditions}: {counts}",
            )
    return claim.word, claim.elsewhere


def _conditions(claim: Claim, deciding: Sequence[Result]) -> str:
    """In which settings a claim's cells were run, and beside which others, each with its number of cells."""
    settings = dict.fromkeys(one.cell.settings for one in deciding if one.cell.settings)
    others = [
        name for one in deciding for name in one.cell.comparisons[claim.at].arms[1:] if one.values[claim.at].get(name)
    ]
    beside = ", ".join(f"{name} in {others.count(name)}" for name in dict.fromkeys(others))
    return "; ".join([*settings, f"beside {beside}"])


def _paper(title: str, paper: str, results: Sequence[Result]) -> str:
    begun = [one for one in results if one.begun and one.rounds]
    own = [one for one in begun if one.cell.place == OWN]
    parts = [f"## {title}\n\n{_LEGEND[paper]}\n"]
    smaller = [one for one in begun if one.cell.place == SMALLER]
    theirs = [one for one in begun if one.cell.place not in (SMALLER, OWN)]
    heads = ("where", "claim, settings", "paper", "ours", "rounds", "verdict")
    for name, shown in (("the paper's cells", theirs), ("other settings", smaller)):
        if shown:
            rows = [row for one in shown for row in _rows(one)]
            made = _made([run for one in shown for run in one.stored])
            parts.append(f"### {title}: {name}\n\nMade {made}.\n\n{_table(heads, rows)}")
    if own:
        parts.append(f"### {title}: our own questions\n")
    for pattern in dict.fromkeys(one.cell.pattern for one in own):
        parts.append(_own([one for one in own if one.cell.pattern == pattern]))
    groups: dict[tuple[str, ...], list[Cell]] = {}
    for one in results:
        if one not in begun:
            cell = one.cell
            groups.setdefault((cell.pattern or cell.command or cell.id, said(one)), []).append(cell)
    rows = [_group(members, pattern, word) for (pattern, word), members in groups.items()]
    if rows:
        parts.append(
            f"### {title}: not run, or an image\n\n{_table(('where', 'claim', 'cells', 'command', 'verdict'), rows)}"
        )
    return "\n".join(parts)


def _group(members: Sequence[Cell], pattern: str, word: str) -> tuple[str, ...]:
    """The line that cells of one pattern share: what they have in common."""
    places, claims, settings = (
        list(dict.fromkeys(getattr(cell, name) for cell in members if getattr(cell, name)))
        for name in ("place", "claim", "settings")
    )
    claim = claims[0] + ", ..." * (len(claims) > 1)
    if settings:
        claim += f" ({settings[0]}{', ...' if len(settings) > 1 else ''})"
    command = members[0].command or f"python -m benchmarks.papers {pattern.partition(' ')[0]}"
    return ", ".join(places), claim, str(len(members)), f"`{command}`", word


def _rows(one: Result) -> list[tuple[str, ...]]:
    """A line for each comparison of a cell, of which the first says what the cell is."""
    cell, rows = one.cell, []
    where = f"`{cell.id}`" if cell.place == SMALLER else f"{cell.place}<br>`{cell.id}`"
    claim = f"{cell.claim} ({cell.settings})" if cell.settings else cell.claim
    rounds = f"{one.rounds} of {one.asked}" if one.short else str(one.rounds)
    failed = [run for run in one.stored if run.failed]
    note = f"; {len(failed)} of the runs diverged" if failed else ""
    for comparison, values, word in zip(cell.comparisons, one.values, one.verdicts):
        if values:
            shown = f"{NOT_RUN} ({word} at {rounds} rounds)" if one.short else word
            first = ("", comparison.what) if rows else (where, f"{claim}: {comparison.what}")
            rows.append((*first, _published(comparison, values), _ours(comparison, values), rounds, shown + note))
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
    return "in words"


def _ours(comparison: Comparison, values: dict[str, list[float]]) -> str:
    lines = [f"{name} {_mean(values[name])}" for name in comparison.arms if name in values]
    if comparison.kind in ("ratio", "drop") and len(values) == len(comparison.arms):
        means = {name: fmean(those) for name, those in values.items()}
        lines.insert(0, f"{ratio_of(comparison, means):.2f}")
    return "<br>".join(lines)


def _mean(values: Sequence[float]) -> str:
    """Mean, spread and how many seeds.

    >>> _mean([50.0, 52.0]), _mean([50.0])
    ('51.00±1.41 (2)', '50.00 (1)')
    """
    wide = f"±{spread(values):.2f}" if len(values) > 1 else ""
    return f"{fmean(values):.2f}{wide} ({len(values)})"


def _own(cells: Sequence[Result]) -> str:
    """What cells of our own with one pattern measured, a table for each comparison: lines are arms, columns cells."""
    first = cells[0].cell
    parts = [
        f"Our own, {first.claim}: mean over seeds, standard deviation and, in brackets, number of seeds. Made by "
        f"`python -m benchmarks.papers ID` with {', '.join(one.cell.id for one in cells)}; "
        f"{_made([run for one in cells for run in one.stored])}.\n"
    ]
    for at, comparison in enumerate(first.comparisons):
        shown = [one for one in cells if one.values[at]]
        heads = ("", *(f"{one.cell.settings}, {one.rounds} rounds" for one in shown))
        names = [name for name in comparison.arms if any(name in one.values[at] for one in shown)]
        rows = [
            (name, *(_mean(those) if (those := one.values[at].get(name)) else "" for one in shown)) for name in names
        ]
        parts.append(f"{comparison.what[0].upper()}{comparison.what[1:]}:\n\n{_table(heads, rows)}")
    return "\n".join(parts)


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines) + "\n"

"""A page about runs in one HTML file: curves with values, results, settings, data."""

import io
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from html import escape
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from fl.analysis.background import are_left, colour_share, holdings, not_begun, progress, settings_table, write_command
from fl.analysis.groups import (
    AGAINST,
    RecordedRun,
    add_cost_column,
    describe_common,
    find_selected_round,
    group,
    make_table,
    target_table,
)
from fl.base.columns import Column
from fl.base.errors import FLError
from fl.figures.curves import LineStyle, Panel, mean_and_std, single_panels
from fl.figures.style import COLORS
from fl.runs.columns import columns

_MOST = 200  # clients in the table of a partition
_DIGITS = 3  # after the point of values of curves that are no percentages, at least
_DARK = ("#5db3ee", "#ff8a4c", "#2fcf9f", "#f2f2f2", "#ec9fca", "#f4bd4f", "#a4d8f8", "#ea6f8c")
"""The lines' colours on a dark ground, in the order of `COLORS`."""
_DASHES = {"-": "", "--": "7 4", ":": "2 4", "-.": "8 3 2 3"}
_STYLE = """
:root { color-scheme: light dark; --ground: #fff; --ink: #1b1b1b; --soft: #666; --rule: #d5d5d5; --faint: #ccc;
  --heat: #0072b2; LIGHT }
@media (prefers-color-scheme: dark) { :root { --ground: #16181c; --ink: #e6e6e6; --soft: #a3a3a3; --rule: #3a3d44;
  --faint: #4c4f57; --heat: #3f9be0; DARK } }
* { box-sizing: border-box }
body { margin: 0 auto; padding: 1rem; max-width: 90rem; background: var(--ground); color: var(--ink);
  font: 1rem/1.45 system-ui, sans-serif }
h1 { font-size: 1.4rem } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem }
h1, p, summary, li { overflow-wrap: anywhere }
p, figcaption { color: var(--soft) }
.wide { overflow: auto; max-height: 46rem }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums }
th, td { padding: .25rem .6rem; text-align: right; border-bottom: 1px solid var(--rule) }
td { white-space: nowrap }
th:first-child, td:first-child { text-align: left; white-space: normal; overflow-wrap: break-word; max-width: 20rem;
  position: sticky; left: 0; background: var(--ground) }
.words td, .words th { text-align: left; white-space: normal }
.words td:first-child { max-width: none; overflow-wrap: anywhere }
th { position: sticky; top: 0; background: var(--ground); vertical-align: bottom }
th:first-child { z-index: 1 }
.heat td:not(:first-child) { padding: .15rem .3rem; min-width: 1.9rem; border: 1px solid var(--ground);
  background: color-mix(in srgb, var(--heat) calc(var(--share, 0) * 60%), transparent) }
.heat th { padding: .15rem .3rem }
@media (max-width: 64rem) {
  table { font-size: .78rem }
  th, td { padding: .2rem .3rem; white-space: normal }
  div:not(.words) > table :is(th, td):first-child { max-width: 10rem }
}
@media (max-width: 40rem) {
  .heat td:not(:first-child) { padding: .15rem; min-width: 1.5rem }
  .rows :is(table, tbody) { display: block }
  .rows thead { display: none }
  .rows tr { display: grid; grid-template-columns: repeat(3, 1fr); gap: .2rem .6rem; padding: .5rem 0;
    border-bottom: 1px solid var(--rule) }
  .rows td { padding: 0; border: 0; text-align: left }
  div.rows > table td:first-child { grid-column: 1 / -1; max-width: none; position: static; font-weight: 600 }
  .rows td:not(:first-child)::before { content: attr(data-head); display: block; color: var(--soft) }
}
details { margin: .4rem 0 }
.panels { display: grid; gap: 1.5rem; grid-template-columns: repeat(auto-fill, minmax(min(100%, 21rem), 1fr)) }
figure { margin: 0; min-width: 0 }
svg { display: block; width: 100%; height: auto; touch-action: pan-y; cursor: crosshair }
svg text { fill: var(--ink); font-family: inherit !important }
.key { list-style: none; margin: .3rem 0; padding: 0; font-size: .9rem }
.key li { display: flex; gap: .5rem; align-items: baseline }
.key svg { flex: none; width: 2.2rem; height: .7rem; cursor: auto }
.key output { margin-left: auto; white-space: nowrap; font-variant-numeric: tabular-nums }
pre { overflow-x: auto; padding: .6rem; border: 1px solid var(--rule); white-space: pre-wrap; overflow-wrap: anywhere }
pre span { display: inline-block; max-width: 100% }
summary { cursor: pointer }
"""
_SCRIPT = """
for (const figure of document.querySelectorAll("figure")) {
  const svg = figure.querySelector("svg"), box = svg.viewBox.baseVal
  const [left, right, from, to, top, bottom] = svg.dataset.axis.split(" ").map(Number)
  const outputs = [...figure.querySelectorAll("output")], rows = [...figure.querySelectorAll("tbody tr")]
  const series = outputs.map((_, k) => rows.map(row => row.cells[k + 1]).filter(cell => cell.dataset.at))
  const line = document.createElementNS(svg.namespaceURI, "line")
  line.setAttribute("stroke", "var(--soft)")
  svg.append(line)
  let at = to
  const show = place => {
    at = Math.min(Math.max(place, from), to)
    let nearest = null
    series.forEach((cells, k) => {
      let best = null
      for (const cell of cells)
        if (!best || Math.abs(cell.dataset.at - at) <= Math.abs(best.dataset.at - at)) best = cell
      if (!best) return
      outputs[k].textContent = `${best.textContent} · round ${best.parentNode.cells[0].textContent}`
      if (!nearest || Math.abs(best.dataset.at - at) < Math.abs(nearest - at)) nearest = Number(best.dataset.at)
    })
    const x = box.width * (left + (right - left) * ((nearest ?? at) - from) / (to - from))
    for (const [name, value] of [["x1", x], ["x2", x], ["y1", top * box.height], ["y2", bottom * box.height]])
      line.setAttribute(name, value)
    return nearest
  }
  const follow = event => {
    const area = svg.getBoundingClientRect(), share = (event.clientX - area.left) / area.width
    show(from + (to - from) * (share - left) / (right - left))
  }
  svg.addEventListener("pointermove", follow)
  svg.addEventListener("pointerdown", follow)
  svg.addEventListener("keydown", event => {
    const places = [...new Set(series.flat().map(cell => Number(cell.dataset.at)))].sort((a, b) => a - b)
    const now = show(at)
    if (event.key == "ArrowRight") show(places.find(place => place > now) ?? now)
    if (event.key == "ArrowLeft") show(places.findLast(place => place < now) ?? now)
  })
}
"""


def check_page(path: Path) -> None:
    """Raise FLError if a page cannot be written to a file, or there is one already."""
    if path.suffix.lower() not in (".html", ".htm"):
        raise FLError(f"--html {path} is no name of a page: take one such as report.html")
    if os.path.lexists(path):
        raise FLError(f"{path} exists already: choose another --html", code="file")
    if not path.parent.is_dir():
        raise FLError(f"{path} cannot be written: there is no folder {path.parent}", code="file")


def report(
    folders: Sequence[Path],
    runs: Sequence[RecordedRun],
    against: str = "rounds",
    target: float | None = None,
    every: float | None = None,
) -> str:
    """Make the page of the runs in folders, in HTML that refers to nothing outside.

    Args:
        against: what curves are drawn against, one of `AGAINST`.
        target: a score; what runs took to reach it is a second table.
        every: after how many seconds a browser reloads the page, while runs continue.
    """
    groups = group(runs)
    title = describe_common([run.config for run in runs]) or "Runs"
    unfinished = are_left(folders, runs)
    refresh = f'<meta http-equiv="refresh" content="{every:g}">' if every and unfinished else ""
    tables = [make_table(groups, _html_table)]
    if target is not None:
        costs: list[str] = []
        note = target_table(groups, target, lambda lines: costs.append(_html_table(lines)) or "")
        lines = "<br>".join(escape(note.strip()).splitlines())
        tables.append(f"<p>{lines}</p>{costs[0]}")
    spread = " (mean ± standard deviation over seeds)" if any(len(members) > 1 for members in groups.values()) else ""
    head = (
        f"{len(groups)} {'method' if len(groups) == 1 else 'methods'}, {len(runs)} runs" if len(runs) > 1 else "1 run"
    )
    parts = [
        f"<h1>{escape(title)}</h1>\n<p>{head}{spread}{'; unfinished' * unfinished}</p>",
        "<h2>Results</h2>\n" + "\n".join(tables),
        "<h2>Curves</h2>\n<p>Point at a curve, or use the arrow keys, to read its values below it.</p>\n"
        f'<div class="panels">{"".join(_panels(groups, against))}</div>',
        f"<h2>Runs</h2>\n{_runs(runs, not_begun(folders, runs))}",
        f"<h2>Commands</h2>\n{''.join(map(_command, groups.values()))}",
        f"<h2>Settings</h2>\n{_settings(groups)}",
        f"<h2>Who holds what</h2>\n{''.join(_partitions(runs))}",
    ]
    colors = [" ".join(f"--line{k}: {color};" for k, color in enumerate(palette)) for palette in (COLORS, _DARK)]
    style = _STYLE.replace("LIGHT", colors[0]).replace("DARK", colors[1])
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">{refresh}\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{style}</style>\n</head>\n<body>\n"
        + "\n".join(parts)
        + f"\n<script>{_SCRIPT}</script>\n</body>\n</html>\n"
    )


def _html_table(lines: Sequence[Sequence[str]], kind: str = "rows") -> str:
    """Lay out cells below a first line of headings.

    On a phone, a line of "rows" is a block of named cells.
    """
    heads = [escape(name) for name in lines[0]]
    rows = ""
    for line in lines[1:]:
        cells = (f'<td data-head="{name}">{escape(cell)}</td>' for name, cell in zip(heads, line))
        rows += f"<tr>{''.join(cells)}</tr>\n".replace("± ", "±&nbsp;")  # a deviation is on one line
    head = "".join(f"<th>{name}</th>" for name in heads)
    return f'<div class="wide {kind}"><table><thead><tr>{head}</tr></thead>\n<tbody>{rows}</tbody></table></div>'


def _panels(groups: Mapping[str, Sequence[RecordedRun]], against: str) -> Iterable[str]:
    """Draw a panel for each column that has curves, with its legend and its values."""
    rows = {label: [add_cost_column(run, against) for run in runs] for label, runs in groups.items()}
    chosen = {label: [find_selected_round(run) for run in runs] for label, runs in groups.items()}
    for panel, looks, figure in single_panels(rows, AGAINST[against], chosen):
        column = columns([panel.key])[panel.key]
        name = " ".join(column.label.split())
        key, values = _values(panel, column, looks, AGAINST[against])
        yield (
            f'<figure>{_svg(figure, name)}\n<ul class="key">{key}</ul>\n'
            f"<details><summary>{escape(name)}: all values</summary>{values}</details></figure>\n"
        )


def _svg(figure: Figure, name: str) -> str:
    """Write a figure as SVG within a page, with the axes for the page's script."""
    file = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(file, format="svg", transparent=True)
    axis = figure.axes[0]
    box, ends = axis.get_position(), axis.get_xlim()
    places = " ".join(f"{value:.6g}" for value in (box.x0, box.x1, *ends, 1 - box.y1, 1 - box.y0))
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r' (xmlns(:xlink)?|width|height)="[^"]*"', "", text[: (end := text.index(">"))]) + text[end:]
    text = re.sub(r'<g id="[^"]*">', "<g>", text)
    for k, color in enumerate(COLORS):
        if color != "#000000":
            text = text.replace(color, f"var(--line{k})")
    text = text.replace("#000000", "var(--ink)").replace("#cccccc", "var(--faint)")
    label = f'role="img" tabindex="0" aria-label="{escape(name)}" data-axis="{places}"'
    return text.replace("<svg", f"<svg {label}", 1)


def _values(panel: Panel, column: Column, looks: Mapping[str, LineStyle], place: str) -> tuple[str, str]:
    """Make a panel's legend, with each line's last value, and the table of values."""
    percent = " %" if column.factor == 100 else ""
    column = column if percent else replace(column, digits=max(column.digits, _DIGITS))
    curves: list[dict[int, tuple[float, str]]] = []
    key = ""
    for line in panel.lines:
        rounds = map(int, mean_and_std(line.runs, panel.key)[0])
        places, means, stds = mean_and_std(line.runs, panel.key, place)
        spread = [f" ± {column.number(std)}" if len(line.runs) > 1 else "" for std in stds]
        texts = [column.number(mean) + rest for mean, rest in zip(means, spread)]
        curves.append(dict(zip(rounds, zip(places, texts))))
        look = looks[line.label]
        color = f"var(--line{COLORS.index(look['color'])})"
        stroke = f'stroke="{color}" stroke-width="2.5" stroke-dasharray="{_DASHES[look["ls"]]}"'
        last = f"{texts[-1]} · round {max(curves[-1])}" if texts else ""
        key += (
            f'<li><svg viewBox="0 0 44 10" aria-hidden="true"><path d="M0 5H44" {stroke}/></svg>'
            f"{escape(line.label)} <output>{last}</output></li>"
        )
    rows = ""
    for number in sorted(set().union(*curves)):
        cells = (f'<td data-at="{at:.9g}">{text}</td>' if text else "<td></td>" for at, text in
                 (curve.get(number, (0, "")) for curve in curves))  # fmt: skip
        rows += f"<tr><td>{number}</td>{''.join(cells)}</tr>\n"
    heads = "".join(f"<th>{escape(line.label)}{percent}</th>" for line in panel.lines)
    body = f"<thead><tr><th>round</th>{heads}</tr></thead>\n<tbody>{rows}</tbody>"
    return key, f'<div class="wide"><table>{body}</table></div>'


def _command(runs: Sequence[RecordedRun]) -> str:
    """Write how to run; lines break between words, and not at the hyphens of a flag."""
    words = re.sub(r"\S+", lambda word: f"<span>{escape(word[0])}</span>", write_command(runs))
    return f"<pre>{words}</pre>"


def _runs(runs: Sequence[RecordedRun], waiting: Sequence[Path]) -> str:
    lines = [[str(run.folder), run.config.method.name, str(run.config.seed), progress(run)] for run in runs]
    lines += [[str(folder), "", "", "not evaluated yet"] for folder in waiting]
    return _html_table([["folder", "method", "seed", "state"], *lines], "words")


def _settings(groups: Mapping[str, Sequence[RecordedRun]]) -> str:
    differ, alike = settings_table(groups)
    parts = [f"<p>Those that differ:</p>{_html_table(differ, 'words rows')}" if len(differ) > 1 else ""]
    parts += [f"<p>Those of all runs that are not the defaults:</p>{_html_table(alike, 'words')}" * (len(alike) > 1)]
    for label, runs in groups.items():
        text = escape(runs[0].config.to_yaml())
        parts.append(f"<details><summary>All settings of {escape(label)}</summary><pre>{text}</pre></details>")
    return "\n".join(parts)


def _partitions(runs: Sequence[RecordedRun]) -> Iterable[str]:
    """Tabulate the samples of clients by class; all but the first table are folded."""
    for at, held in enumerate(holdings(runs)):
        text = f"<p>{escape(held.missing)}</p>" if held.missing else _heat(held.table, held.clients, held.classes)
        opened = " open" if at == 0 else ""
        yield f"<details{opened}><summary>{escape(held.title)}</summary>{text}</details>\n"


def _heat(counts: np.ndarray, clients: Sequence[str], classes: Sequence[str]) -> str:
    """Tabulate samples, clients x classes, the more the stronger coloured."""
    most = counts.max(initial=0)
    total = [] if len(classes) == 1 else ["all"]
    heads = "".join(f"<th>{escape(name)}</th>" for name in ("client", *classes, *total))
    rows = ""
    for name, line in zip(clients[:_MOST], counts):
        cells = "".join(f'<td style="--share:{colour_share(n, most):g}">{n or ""}</td>' for n in line)
        rows += f"<tr><td>{escape(name)}</td>{cells}{f'<td>{line.sum()}</td>' if total else ''}</tr>\n"
    more = f"<p>The first {_MOST} of {len(clients):,} clients.</p>" if len(clients) > _MOST else ""
    table = f'<table class="heat"><thead><tr>{heads}</tr></thead>\n<tbody>{rows}</tbody></table>'
    return f'{more}<div class="wide">{table}</div>'

"""The tables of docs/results/surgery.md and models.md, from what benchmarks/coverage.py has stored.

python benchmarks/coverage_table.py > table.md
python benchmarks/coverage_table.py --support --results FOLDER   # between the marks of models.md, and the JSON beside
"""

import argparse
import json
import re
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.models.registry import family

RESULTS = Path(__file__).parent / "results"
SUITES = {
    "smallest": "timm, the smallest of each model file",
    "torchvision": "torchvision",
    "huggingface": "transformers",
    "handwritten": "written by hand",
    "all": "timm, every name, on the meta device",
}
OPERATIONS = {
    "decompose": "`layers`", "shuffle": "`shuffle`", "graft": "`graft`", "narrow": "`narrow` at 0.5",
    "torch_pruning": "torch-pruning alone",
}  # fmt: skip
LONGEST = 150  # characters of a reason
PAGE = Path(__file__).parents[1] / "docs/results/models.md"
SUPPORT = "coverage-support.json"
MARKS = ("<!-- made by benchmarks/coverage_table.py --support -->", "<!-- end -->")
FAMILIES = {
    "timm": "timm, the smallest of each model file",
    "torchvision": "torchvision",
    "quantized": "torchvision, to be quantized",
    "causal": "transformers, causal language models",
    "masked": "transformers, masked language models",
    "translation": "transformers, encoder and decoder",
    "texts": "transformers, classes of texts",
    "images": "transformers, classes of images",
}
JUDGED = ("narrow", "prune", "graft", "permute", "align", "widen", "save")
VERDICTS = {
    "ok": "ok", "nothing to do": "-", "SurgeryError": "refused", "PlanOnly": "plan only", "took too long": "too long",
    "NotBuilt": "not built", "MemoryError": "too large", "Ended": "too large",
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of coverage-SUITE.json")
    parser.add_argument("--support", action="store_true", help=f"write the tables into {PAGE.name}")
    options = parser.parse_args()
    if not options.support:
        print(tables(options.results))
        return
    text = (options.results / SUPPORT).read_text()
    (RESULTS / SUPPORT).write_text(text)
    before, _, after = PAGE.read_text().partition(MARKS[0])
    made = support_tables(json.loads(text))
    PAGE.write_text(f"{before}{MARKS[0]}\n{made}\n{MARKS[1]}{after.partition(MARKS[1])[2]}")


def tables(folder: Path) -> str:
    """Two tables in Markdown: how many models of each suite are handled, and each miss with its reason."""
    found = {}
    for suite in SUITES:
        file = folder / f"coverage-{suite}.json"
        if file.is_file():
            found[suite] = json.loads(file.read_text())["rows"]
    head = ["models", *OPERATIONS.values()]
    counts = [
        [f"{SUITES[suite]} ({len(rows)})", *(count(rows, o) for o in OPERATIONS)] for suite, rows in found.items()
    ]
    listed = [suite for suite in found if suite != "all"]
    return table(head, counts) + "\n\n" + table(["model", "operation", "why not"], misses(listed, found))


def support_tables(found: dict) -> str:
    """How many models of each family an operation handles, what it refuses and why, and one row a model, folded."""
    rows = [row for row in found["rows"] if set(verdicts(row)) != {"not built"}]
    absent = {row["name"]: reason(next(iter(row["result"].values()))) for row in found["rows"] if row not in rows}
    by_family: dict[str, list[dict]] = {name: [] for name in FAMILIES}
    for row in rows:
        by_family[family_of(row["name"])].append(row)
    heads = [f"{FAMILIES[name]} ({len(group)})" for name, group in by_family.items() if group]
    numbers = [[cell(group, operation) for operation in JUDGED] for group in by_family.values() if group]
    summary = table(["models", *(f"`{o}`" for o in JUDGED)], [[a, *b] for a, b in zip(heads, numbers)])
    whole = [[f"`{row['name']}`", *verdicts(row)] for row in rows]
    stored = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    parts = [f"{stored}. {len(found['rows'])} models judged.", summary]
    parts += ["## What is refused, and why", table(["operation", "models", "for example", "why"], reasons(rows))]
    if wrong := [[f"`{row['name']}`", f"`{o}`", shortened(row["result"][o])] for row, o in of(rows, "wrong", "error")]:
        parts += ["## What goes wrong", table(["model", "operation", "what"], wrong)]
    if absent:
        parts += [
            "## Not built",
            table(["model", "why"], [[f"`{name}`", shortened(why)] for name, why in absent.items()]),
        ]
    each = table(["model", *(f"`{o}`" for o in JUDGED)], whole)
    parts += ["## Each model", f'<details markdown="1"><summary>{len(rows)} models</summary>\n\n{each}\n\n</details>']
    return "\n\n".join(parts)


def family_of(name: str) -> str:
    """The family of a model's name."""
    library, _, model = name.partition(":")
    return family(model) if library == "transformers" else "quantized" if model.startswith("quantized") else library


def verdicts(row: dict) -> list[str]:
    """What came of each operation, in a word or two."""
    return [verdict(row, operation) for operation in JUDGED]


def verdict(row: dict, operation: str) -> str:
    """ok, refused, plan only, too long, ...; `error` is an exception that is no refusal."""
    result = row["result"].get(operation, "-")
    kind = result.partition(":")[0]
    if result.startswith("RuntimeError") and "memory" in result:
        return "too large"
    if kind in ("ok", "-") and str(row.get("compared", {}).get(operation)).startswith("found in part"):
        return "in part"
    return "wrong" if kind == "Wrong" else result if result == "-" else VERDICTS.get(kind, "error")


def cell(rows: list[dict], operation: str) -> str:
    """`35 ok, 2 refused`."""
    found = Counter(verdict(row, operation) for row in rows)
    return ", ".join(f"{n} {what}" for what, n in sorted(found.items(), key=lambda one: -one[1]) if what != "-") or "-"


def of(rows: list[dict], *kinds: str) -> list[tuple[dict, str]]:
    """The rows and operations with one of these verdicts."""
    return [(row, operation) for row in rows for operation in JUDGED if verdict(row, operation) in kinds]


def reason(why: str) -> str:
    """A message without the class of the error."""
    return re.sub(r"^\w+: ", "", why)


def reasons(rows: list[dict]) -> list[list[str]]:
    """The reasons of refusals, alike ones (but for names and numbers) as one, the most frequent first."""
    groups: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for row, operation in of(rows, "refused", "plan only"):
        why = reason(row["result"][operation])
        groups.setdefault((operation, re.sub(r"[\w.]*[.\d]+[\w.]*|'[^']*'|\b[A-Z]\w+", "#", why)[:60]), []).append(
            (row["name"], why)
        )
    ordered = sorted(groups.items(), key=lambda one: (JUDGED.index(one[0][0]), -len(one[1])))
    return [[f"`{o}`", str(len(found)), f"`{found[0][0]}`", shortened(found[0][1])] for (o, _), found in ordered]


def count(rows: list[dict], operation: str) -> str:
    """`35 of 36`; for narrow also how many were compared in numbers. Models with nothing to do are left out."""
    results = [row["result"].get(operation, "not tried") for row in rows]
    results = [result for result in results if result not in ("nothing to do", "not tried")]
    if not results:
        return "-"
    compared = sum(bool(row.get("compared", {}).get(operation)) for row in rows)
    return f"{results.count('ok')} of {len(results)}" + (f", {compared} compared in numbers" if compared else "")


def misses(suites: list[str], found: dict[str, list[dict]]) -> list[list[str]]:
    """Rows of those that `surgery` does not handle."""
    rows = []
    for row in (row for suite in suites for row in found[suite]):
        for operation in OPERATIONS:
            why = row["result"].get(operation, "ok")
            if operation != "torch_pruning" and why not in ("ok", "nothing to do"):
                rows.append([f"`{row['name']}`", OPERATIONS[operation].split(" at ")[0], shortened(why)])
    return rows


def shortened(why: str) -> str:
    """A reason of one line, without the class of the error, that a table can hold."""
    why = re.sub(r"^(Miss|SurgeryError|Wrong): ", "", why).replace("|", "\\|")
    return why if len(why) <= LONGEST else why[: LONGEST - 3].rstrip() + "..."


def table(head: list[str], rows: list[list[str]]) -> str:
    """A table in Markdown."""
    lines = ["| " + " | ".join(cells) + " |" for cells in [head, *rows]]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]])


if __name__ == "__main__":
    main()

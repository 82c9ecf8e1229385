"""The tables of docs/results/surgery.md and models.md, from what benchmarks/coverage.py has stored.

python benchmarks/coverage_table.py > table.md
python benchmarks/coverage_table.py --support --results FOLDER   # between the marks of models.md, and models.csv
"""

import argparse
import csv
import io
import json
import re
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks import models
from benchmarks.models.libraries import torchvision_tasks
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
SHOWN = 2  # models that a row names
COMMON = 10  # models that share a reason why widths stay whole, for a row of its own
PAGE = Path(__file__).parents[1] / "docs/results/models.md"
EACH = PAGE.with_suffix(".csv")
SUPPORT = "coverage-support.json"
MARKS = ("<!-- made by benchmarks/coverage_table.py --support -->", "<!-- end -->")
FAMILIES = {
    "timm": "timm, the smallest of each model file",
    "classification": "torchvision, classification",
    **dict.fromkeys(("segmentation", "detection", "video", "optical_flow"), "torchvision, other tasks"),
    "quantization": "torchvision, quantized (int8)",
    "causal": "transformers, causal language models",
    **dict.fromkeys(("masked", "translation", "texts", "images"), "transformers, other classes"),
}
"""From families of models to the row that counts them."""
JUDGED = ("narrow", "prune", "graft", "permute", "align", "widen", "save")
VERDICTS = {
    "ok": "ok", "nothing to do": "-", "SurgeryError": "refused", "PlanOnly": "plan only", "took too long": "too long",
    "NotBuilt": "not built", "MemoryError": "too large", "Ended": "too large", "not run": "not run",
    "NotJudged": "not judged",
}  # fmt: skip
"""By how a result begins. What "ok" means is in what was compared and logged: see `verdict`."""
WHOLE = re.compile(r"stays whole: (.*)")
REFUSALS = {
    "quantised weights": "quantised weights: convert the model to float first",
    "its constructor takes no widths": "the constructor takes no widths: `plan.build` and the state restore the model",
    "in a model made from its configuration": "the configuration cannot say these sizes: the plan and the state can",
    "from_pretrained": "`from_pretrained` does not give the saved model",
    "no width may be put in another order": "no width may be put in another order",
    r"no section has a block|no section with a block": "no section has a block that may be repeated",
    "another number of blocks|run where|use_cache": "the forward pass depends on the number of blocks",
    "cannot be reached": "the target cannot be reached: its widths are at their floor",
    "would compute something else of repeated positions": "an operation changes what repeated positions compute",
    "does not run (with fewer|wider|with narrow)": "the code there does not run with another size",
    "does not run on the example": "the model does not run on the example with a block more",
    "are one tensor, which both makes": "tied weights make the width and read it: untie them",
}  # fmt: skip
"""From a pattern of reasons to the wording that a row shows for all of them."""


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
    names = models.suite("support")
    made = support_tables(json.loads(text), names)
    EACH.write_text(each_model(json.loads(text), names))
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
    return table(head, counts) + "\n\n" + table(["models", "operation", "why not"], misses(listed, found))


def support_tables(found: dict, names: list[str]) -> str:
    """Return how many models of each family an operation handles, and what is refused, kept or not built, and why.

    Args:
        found: what is stored.
        names: all models of the suite, those included that have not been run yet.
    """
    every = stored_rows(found, names)
    absent = {row["name"]: reason(why) for row in every for why in row["result"].values() if why.startswith("NotBuilt")}
    rows = [row for row in every if row["name"] not in absent]
    groups: dict[str, list[dict]] = {title: [] for title in FAMILIES.values()}
    for row in rows:
        groups[FAMILIES[family_of(row["name"])]].append(row)
    summary = [
        [f"{title} ({len(group)})", *(cell(group, operation) for operation in JUDGED)]
        for title, group in groups.items()
        if group
    ]
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    run = sum(bool(row["result"]) for row in rows)
    parts = [
        f"{versions}. {run} of {len(rows)} models judged by one operation or more, {len(absent)} not built.",
        table(["models", *(f"`{o}`" for o in JUDGED)], summary),
        "## What is refused",
        table(["operation", "why", "models"], reasons(rows)),
        "## Widths that cannot shrink",
        "For each operation, the number of models with such a width:",
        table(["why", "`narrow`", "`prune`", "`widen`"], whole_widths(rows)),
    ]
    if wrong := [[f"`{row['name']}`", f"`{o}`", shortened(row["result"][o])] for row, o in of(rows, "wrong", "error")]:
        parts += ["## What goes wrong", table(["model", "operation", "what"], wrong)]
    if absent:
        kinds: dict[str, list[str]] = {}
        for name, why in absent.items():
            kinds.setdefault(kind_of_absence(why), []).append(name)
        lines = [[why, counted(group)] for why, group in sorted(kinds.items(), key=lambda one: -len(one[1]))]
        parts += ["## Not built", table(["why", "models"], lines)]
    return "\n\n".join(parts)


def stored_rows(found: dict, names: list[str]) -> list[dict]:
    """Return the stored row of each model, an empty one where it was not run."""
    rows = {row["name"]: row for row in found["rows"]}
    return [rows.get(name, {"name": name, "result": {}}) for name in names]


def each_model(found: dict, names: list[str]) -> str:
    """Return CSV with a row a model: its verdicts, and why an operation refuses it or leaves widths whole."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["model", *JUDGED, "why"])
    for row in sorted(stored_rows(found, names), key=lambda row: row["name"]):
        reasons_given: dict[str, list[str]] = {}
        for operation in JUDGED:
            for why in why_not(row, operation):
                reasons_given.setdefault(shortened(why), []).append(operation)
        why = "; ".join(f"{', '.join(operations)}: {text}" for text, operations in reasons_given.items())
        writer.writerow([row["name"], *verdicts(row), why])
    return file.getvalue()


def why_not(row: dict, operation: str) -> list[str]:
    """Return why an operation does not handle a model, or not all of its widths."""
    if verdict(row, operation) in ("refused", "plan only", "not built", "wrong", "error"):
        return [reason(row["result"][operation])]
    return why_whole(row, operation) if operation in ("narrow", "prune", "widen") else []


def kind_of_absence(why: str) -> str:
    """Return the reason why a model was not built, alike for models that differ in names and numbers."""
    if found := re.search(r"requires the (\w+) library", why):
        return f"needs the library {found[1]}"
    return (
        "too many parameters" if why.endswith("parameters") else "its code fails on our small configuration or inputs"
    )


def counted(names: list[str]) -> str:
    """`7: a, b, ...`: how many models, and the first of them, each once."""
    each = list(dict.fromkeys(names))
    more = ", ..." if len(each) > SHOWN else ""
    return f"{len(each)}: " + ", ".join(f"`{name}`" for name in each[:SHOWN]) + more


def family_of(name: str) -> str:
    """Return the family of a model's name."""
    library, _, model = name.partition(":")
    if library in ("torchvision", "int8"):
        return torchvision_tasks()[model]
    return family(model) if library == "transformers" else library


def verdicts(row: dict) -> list[str]:
    """Return the outcome of each operation in a word or two."""
    return [verdict(row, operation) for operation in JUDGED]


def verdict(row: dict, operation: str) -> str:
    """ok, some whole, not compared, refused, plan only, too long, ...; `error` is an exception that is no refusal."""
    result = row["result"].get(operation, "not run")
    kind = result.partition(":")[0]
    if "llocate memory" in result:
        return "too large"
    if kind == "ok":
        compared = str(row.get("compared", {}).get(operation))
        for start, word in (("found in part", "in part"), ("not compared", "not compared")):
            if compared.startswith(start):
                return word
        if operation in ("narrow", "prune", "widen") and why_whole(row, operation):
            return "some whole"
    return "wrong" if kind == "Wrong" else VERDICTS.get(kind, "error")


def cell(rows: list[dict], operation: str) -> str:
    """`35 ok, 2 refused`."""
    found = Counter(verdict(row, operation) for row in rows)
    if set(found) == {"not run"}:
        return "not run"
    return ", ".join(f"{n} {what}" for what, n in sorted(found.items(), key=lambda one: -one[1]) if what != "-") or "-"


def of(rows: list[dict], *kinds: str) -> list[tuple[dict, str]]:
    """Return the rows and operations with one of these verdicts."""
    return [(row, operation) for row in rows for operation in JUDGED if verdict(row, operation) in kinds]


def reason(why: str) -> str:
    """Return a message without the class of the error."""
    return re.sub(r"^\w+: ", "", why)


def reasons(rows: list[dict]) -> list[list[str]]:
    """Return the reasons of refusals that models share, alike but for names and numbers; the most frequent first."""
    groups: dict[tuple[str, str], list[tuple[str, str, str]]] = {}
    for row, operation in of(rows, "refused", "plan only"):
        kind, text = kind_of_refusal(reason(row["result"][operation]))
        key = (verdict(row, operation), kind)
        groups.setdefault(key, []).append((operation, row["name"], text))
    lines = []
    shared = [found for found in groups.values() if len({name for _, name, _ in found}) > 1]
    for found in sorted(shared, key=lambda one: -len({name for _, name, _ in one})):
        operations = [o for o in JUDGED if o in {operation for operation, _, _ in found}]
        lines.append([", ".join(f"`{o}`" for o in operations), found[0][2], counted([name for _, name, _ in found])])
    return lines


def kind_of_refusal(why: str) -> tuple[str, str]:
    """Return a key that alike refusals share, and the wording that a row shows."""
    for text in REFUSALS:
        if re.search(text, why):
            return text, REFUSALS[text]
    return alike(why), shortened(why)


def why_whole(row: dict, operation: str) -> list[str]:
    """Return the reasons why widths of a model stay as they are, each once."""
    notes = row.get("notes", {}).get(operation, [])
    return list(dict.fromkeys(why for note in notes if " cannot " in note for why in WHOLE.findall(note)))


def whole_widths(rows: list[dict]) -> list[list[str]]:
    """Return the common reasons why widths stay as they are though the operation succeeds, the most frequent first."""
    groups: dict[str, list[tuple[str, str, str]]] = {}
    for row, operation in of(rows, "some whole", "not compared"):
        for why in why_whole(row, operation):
            kind, text = kind_of_refusal(why)
            groups.setdefault(kind, []).append((operation, row["name"], text))
    lines = []
    for found in groups.values():
        models_of = {o: {name for operation, name, _ in found if operation == o} for o in ("narrow", "prune", "widen")}
        if len({name for _, name, _ in found}) >= COMMON:
            counts = [len(names) for names in models_of.values()]
            lines.append([found[0][2], *map(str, counts)])
    return sorted(lines, key=lambda line: -max(map(int, line[1:])))


def alike(why: str) -> str:
    """Return the same for reasons that differ in names and numbers only."""
    return re.sub(r"[\w.]*[.\d]+[\w.]*|'[^']*'|\b[A-Z]\w+", "#", why)[:60]


def count(rows: list[dict], operation: str) -> str:
    """`35 of 36`; for narrow also how many were compared in numbers. Models with nothing to do are left out."""
    results = [row["result"].get(operation, "not tried") for row in rows]
    results = [result for result in results if result not in ("nothing to do", "not tried")]
    if not results:
        return "-"
    compared = sum(bool(row.get("compared", {}).get(operation)) for row in rows)
    return f"{results.count('ok')} of {len(results)}" + (f", {compared} compared in numbers" if compared else "")


def misses(suites: list[str], found: dict[str, list[dict]]) -> list[list[str]]:
    """Return a row for each reason why `surgery` does not handle models, with these models and the operations."""
    operations_of: dict[tuple[str, str], list[str]] = {}
    texts: dict[str, str] = {}
    for row in (row for suite in suites for row in found[suite]):
        for operation in OPERATIONS:
            why = row["result"].get(operation, "ok")
            if operation != "torch_pruning" and why not in ("ok", "nothing to do"):
                kind, text = kind_of_refusal(reason(why))
                operations_of.setdefault((row["name"], kind), []).append(OPERATIONS[operation].split(" at ")[0])
                texts.setdefault(kind, text)
    groups: dict[tuple[str, str], list[str]] = {}
    for (name, kind), operations in operations_of.items():
        groups.setdefault((", ".join(operations), kind), []).append(f"`{name}`")
    return [[", ".join(names), operations, texts[kind]] for (operations, kind), names in groups.items()]


def shortened(why: str) -> str:
    """Return a reason of one line, without the class of the error, that a table can hold."""
    why = re.sub(r"^(Miss|SurgeryError|Wrong): ", "", why).replace("|", "\\|")
    return why if len(why) <= LONGEST else why[: LONGEST - 3].rstrip() + "..."


def table(head: list[str], rows: list[list[str]]) -> str:
    """Return a table in Markdown."""
    lines = ["| " + " | ".join(cells) + " |" for cells in [head, *rows]]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]])


if __name__ == "__main__":
    main()

"""The tables of docs/results/surgery.md, from what benchmarks/coverage.py has stored.

python benchmarks/coverage_table.py > table.md
"""

import argparse
import json
import re
from pathlib import Path

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of coverage-SUITE.json")
    print(tables(parser.parse_args().results))


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
    why = re.sub(r"^(Miss|SurgeryError): ", "", why).replace("|", "\\|")
    return why if len(why) <= LONGEST else why[: LONGEST - 3].rstrip() + "..."


def table(head: list[str], rows: list[list[str]]) -> str:
    """A table in Markdown."""
    lines = ["| " + " | ".join(cells) + " |" for cells in [head, *rows]]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]])


if __name__ == "__main__":
    main()

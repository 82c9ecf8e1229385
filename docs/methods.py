"""Write the tables of docs/explanation/methods.md: `python docs/methods.py`. All of them are in the methods' files."""

import inspect
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from fl.algorithms import ALGORITHMS
from fl.algorithms.method import Method

PAGE = Path(__file__).parent / "explanation/methods.md"
MARKS = ("<!-- made by docs/methods.py -->", "<!-- end -->")
KINDS = {
    "global": "One model for all",
    "personalized": "A model for each client",
    "heterogeneous": "Clients of different architectures",
}
HEAD = "| method | paper | what differs from FedAvg |\n|---|---|---|"


def tables() -> str:
    """Return a table in Markdown for each kind of clients' models."""
    parts = []
    for kind, title in KINDS.items():
        rows = sorted((row(method) for method in ALGORITHMS.values() if method.clients == kind), key=str.lower)
        parts.append("\n".join([f"## {title}\n", HEAD, *rows]))
    return "\n\n".join(parts)


def row(method: Method) -> str:
    """Return a method's line: its title and paper, and the first sentence of its docstring."""
    module = inspect.getmodule(method.make)
    assert module is not None
    title, _, source = " ".join(inspect.cleandoc(module.__doc__ or "").split()).partition(": ")
    cells = (
        f"[{title}](../../{'/'.join(module.__name__.split('.'))}.py)",
        paper(source),
        sentence(inspect.getdoc(method.make) or ""),
    )
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def paper(source: str) -> str:
    """Return authors, place and year.

    >>> paper('Li et al., "Federated Optimization in Heterogeneous Networks" (MLSys 2020), algorithm 2.')
    'Li et al., MLSys 2020'
    """
    found = re.search(
        r"([A-Z][\w -]+?(?: and [\w -]+)?(?: et al\.)?), \".*?\",? \(?(?:arXiv [\d.]+, )?([^),]*)", source
    )
    return f"{found[1]}, {found[2]}" if found else "a rival in FeMAM's paper, C.1"


def sentence(text: str) -> str:
    """Return the first sentence, without where to read on.

    >>> sentence("FedAvg that makes Adam's step; see `adaptive`. More.")
    "FedAvg that makes Adam's step."
    """
    first = re.split(r"(?<=\.)\s", " ".join(text.split("\n\n")[0].split()), maxsplit=1)[0]
    return re.sub(r"[,;] see .*", ".", first)


def main() -> None:
    """Put the tables between the marks of the page."""
    before, _, after = PAGE.read_text().partition(MARKS[0])
    PAGE.write_text(f"{before}{MARKS[0]}\n\n{tables()}\n\n{MARKS[1]}{after.partition(MARKS[1])[2]}")


if __name__ == "__main__":
    main()

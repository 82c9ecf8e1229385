"""The command line: `layer-surgery COMMAND`, or `python -m fl COMMAND`.

Without a command it lists them.
"""

import difflib
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from fl import __version__
from fl.base.console import guard
from fl.base.plugins import collect

COMMANDS = {
    "run": ("fl.run", "Train federated models"),
    "data": ("fl.data.__main__", "Split a data set among clients, and show who holds what"),
    "compare": ("fl.compare", "Compare runs in one figure and one table"),
    "structure": ("fl.structure", "Show which clients share models, beside the true groups"),
    "landscape": ("fl.landscape", "Draw the loss around trained models"),
    "export": ("fl.export", "Write the trained model of a run into a file or folder"),
    "surgery": ("surgery.__main__", "Operate on models and checkpoints"),
    "zoo": ("zoo.__main__", "List the models of the zoo with their sizes"),
}
"""Name -> the module whose `main` carries it out, and what it does; in the order in which people need them."""


def commands() -> dict[str, tuple[str, str]]:
    """Return `COMMANDS` and the commands of extensions."""
    return COMMANDS | collect("fl.commands", "COMMANDS", tuple)


def main(argv: Sequence[str] | None = None) -> int:
    """Carry out a command. Returns its exit code, and 2 for an unknown one."""
    with guard() as ended:
        ended.code = _main([*(sys.argv[1:] if argv is None else argv)])
    return ended.code


def _main(argv: list[str]) -> int:
    name, *rest = argv or ["--help"]
    if name in ("-h", "--help"):
        print(overview())
        return 0
    if name == "--version":
        print(f"layer-surgery {__version__}")
        return 0
    if name not in (known := commands()):
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        print(f"error: unknown command {name!r}: {hint}there are {', '.join(known)}", file=sys.stderr)
        return 2
    return import_module(known[name][0]).main(rest)


def overview() -> str:
    """Return what `layer-surgery` prints: the commands, as they are called."""
    script = Path(sys.argv[0]).stem == "layer-surgery"
    lines = []
    for name, (module, purpose) in commands().items():
        of_extension = module.startswith("fl.extensions.")
        way = f"fl {name}" if of_extension else module.removesuffix(".__main__")
        lines.append(f"{f'layer-surgery {name}' if script else f'python -m {way}':25}{purpose}")
    return "\n".join([*lines, "", "`--help` after any of them says more"])


if __name__ == "__main__":
    sys.exit(main())

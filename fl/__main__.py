"""What there is to run: `python -m fl` lists the commands."""

import ast
import sys
from pathlib import Path

HERE = Path(__file__).parent


def commands() -> dict[str, str]:
    """From each command to what it does, by the first line of its file.

    >>> list(commands())
    ['fl.analysis', 'fl.compare', 'fl.data', 'fl.export', 'fl.landscape', 'fl.run', 'fl.structure', 'fl.sweep']
    """
    files = {file.stem: file for file in HERE.glob("*.py") if not file.stem.startswith("_")}
    files |= {file.parent.name: file for file in HERE.glob("*/__main__.py")}
    lines = {f"fl.{name}": ast.get_docstring(ast.parse(files[name].read_text())).splitlines()[0] for name in files}
    return {name: lines[name].split(":")[0].rstrip(".") for name in sorted(lines)}


def main() -> int:
    """Print them."""
    for name, line in commands().items():
        print(f"python -m {name:15}{line}")
    print("\n`--help` after any of them says more; `python -m surgery` and `python -m zoo` are about models alone")
    return 0


if __name__ == "__main__":
    sys.exit(main())

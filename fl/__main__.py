"""The command line: `layer-surgery COMMAND`, or `python -m fl COMMAND`; without a command it lists them."""

import ast
import difflib
import sys
from collections.abc import Callable, Sequence
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path

from fl.base.console import guarded

HERE = Path(__file__).parent
MODELS = ("surgery", "zoo")
"""Packages with a command of their own name."""
HELP = ("-h", "--help")


def commands() -> dict[str, str]:
    """From each command to what it does, by the first line of its file.

    >>> list(commands())[:6]
    ['analysis', 'compare', 'data', 'deploy', 'export', 'landscape']
    >>> list(commands())[6:]
    ['run', 'runs', 'structure', 'sweep', 'surgery', 'zoo']
    """
    files = {file.stem: file for file in HERE.glob("*.py") if not file.stem.startswith("_")}
    files |= {file.parent.name: file for file in HERE.glob("*/__main__.py")}
    files |= {name: Path(find_spec(name).origin).with_name("__main__.py") for name in MODELS}
    lines = {name: ast.get_docstring(ast.parse(file.read_text())).splitlines()[0] for name, file in files.items()}
    return {
        name: lines[name].split(":")[0].rstrip(".") for name in sorted(lines, key=lambda name: (name in MODELS, name))
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Carry out a command. Returns its exit code, and 2 for an unknown one."""
    return guarded(lambda: _main([*(sys.argv[1:] if argv is None else argv)]))


def _main(argv: list[str]) -> int:
    name, *rest = argv or ["--help"]
    if name in HELP:
        print(overview())
        return 0
    if name == "--version":
        print(f"layer-surgery {import_module('fl').__version__}")
        return 0
    if name not in commands():
        near = difflib.get_close_matches(name, commands(), n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        print(f"error: unknown command {name!r}: {hint}there are {', '.join(commands())}", file=sys.stderr)
        return 2
    if (
        any(word in HELP for word in rest)
        and not _plugins()
        and (code := _without_slow_packages(name, rest)) is not None
    ):
        return code
    return _main_of(name)(rest)


def start(name: str) -> None:
    """`python -m fl.NAME`: carry out the command with the arguments of this process, and end it."""
    sys.exit(main([name, *sys.argv[1:]]))


def overview() -> str:
    """What `layer-surgery` prints: the commands, as they are called."""
    script = Path(sys.argv[0]).stem == "layer-surgery"
    module = {name: f"python -m {name if name in MODELS else f'fl.{name}'}" for name in commands()}
    called = {name: f"layer-surgery {name}" if script else module[name] for name in commands()}
    lines = [f"{called[name]:25}{line}" for name, line in commands().items()]
    return "\n".join([*lines, "", "`--help` after any of them says more"])


def _main_of(name: str) -> Callable[[Sequence[str]], int]:
    """The function that carries out a command."""
    package = name if name in MODELS else f"fl.{name}"
    inside = name in MODELS or (HERE / name).is_dir()
    return import_module(f"{package}.__main__" if inside else package).main


def _plugins() -> bool:
    """Whether other packages add methods and the like: they may do more than declare them while they are imported."""
    return any(group.startswith("layer_surgery.") for group in metadata.entry_points().groups)


def _without_slow_packages(name: str, argv: list[str]) -> int | None:
    """Print help without importing PyTorch. None if that fails, so that it has to be printed with PyTorch."""
    from fl.base.put_aside import put_aside

    with put_aside():
        try:
            return _main_of(name)(argv)
        except Exception:  # a package that does more than declare things while it is imported
            return None


if __name__ == "__main__":
    sys.exit(main())

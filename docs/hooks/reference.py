"""Reference pages of the rooms, folders within `surgery` and `fl`, and the tables of error codes: made of the sources.

The rooms are apart from the public names, in the navigation and in the search, which would find each name twice.
"""

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SECTION = "Reference"
"""The part of the navigation that these pages are put into."""
PACKAGES = ("surgery", "fl")
_UNSEARCHED = "---\nsearch:\n  exclude: true\n---\n\n"


def navigation(section: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The part, with the rooms of each package at its end."""
    rooms = {package: [{f"{package}.{room.name}": _page(room)} for room in _rooms(package)] for package in PACKAGES}
    return [*section, {"Internals": [{package: its} for package, its in rooms.items()]}]


def pages() -> dict[str, str]:
    """What each room's `__init__` says, then its files in alphabetical order."""
    return {
        _page(room): f"{_UNSEARCHED}# {package}.{room.name}\n\n" + "\n".join(map(_entry, _modules(room)))
        for package in PACKAGES
        for room in _rooms(package)
    }


def with_codes(text: str) -> str:
    """A page with a table in place of `<!-- codes of FILE -->`: each code of the file, and the comment behind it."""

    def table(found: re.Match[str]) -> str:
        codes = re.findall(r'^    "(\w+)",  # (.+)$', (ROOT / found[1]).read_text(), re.MULTILINE)
        return "\n".join(["| code | meaning |", "|---|---|", *(f"| `{code}` | {text} |" for code, text in codes)])

    return re.sub("<!-- codes of (.+) -->", table, text)


def _rooms(package: str) -> list[Path]:
    return sorted(init.parent for init in (ROOT / package).glob("*/__init__.py"))


def _modules(room: Path) -> list[Path]:
    files = sorted(path for path in room.rglob("*.py") if not path.name.startswith("_"))
    return [room, *files]


def _page(room: Path) -> str:
    return f"reference/{room.relative_to(ROOT).as_posix()}.md"


def _entry(path: Path) -> str:
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    return f"::: {name}\n    options: {{show_submodules: false, show_root_full_path: true}}\n"

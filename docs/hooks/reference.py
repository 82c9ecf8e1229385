"""Reference pages of the folders within `surgery` and `fl`, and the tables of error codes: made of the sources.

These folders are apart from the public names, in the navigation and in the search, which would find each name twice.
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
    """Return the part, with the folders of each package at its end."""
    pages = {
        package: [{f"{package}.{folder.name}": _page(folder)} for folder in _folders(package)] for package in PACKAGES
    }
    return [*section, {"Internals": [{package: its} for package, its in pages.items()]}]


def pages() -> dict[str, str]:
    """Return each folder's docstring, then its files in alphabetical order."""
    return {
        _page(folder): f"{_UNSEARCHED}# {package}.{folder.name}\n\n" + "\n".join(map(_entry, _modules(folder)))
        for package in PACKAGES
        for folder in _folders(package)
    }


def with_codes(text: str) -> str:
    """A page with a table in place of `<!-- codes of FILE -->`: each code of the file, and the comment behind it."""

    def table(found: re.Match[str]) -> str:
        codes = re.findall(r'^    "(\w+)",  # (.+)$', (ROOT / found[1]).read_text(), re.MULTILINE)
        return "\n".join(["| code | meaning |", "|---|---|", *(f"| `{code}` | {text} |" for code, text in codes)])

    return re.sub("<!-- codes of (.+) -->", table, text)


def _folders(package: str) -> list[Path]:
    return sorted(init.parent for init in (ROOT / package).glob("*/__init__.py"))


def _modules(folder: Path) -> list[Path]:
    files = sorted(path for path in folder.rglob("*.py") if not path.name.startswith("_"))
    return [folder, *files]


def _page(folder: Path) -> str:
    return f"reference/{folder.relative_to(ROOT).as_posix()}.md"


def _entry(path: Path) -> str:
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    return f"::: {name}\n    options: {{show_submodules: false, show_root_full_path: true}}\n"

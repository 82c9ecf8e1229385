"""Reference pages of the rooms, folders within `surgery` and `fl`: each is made of the docstrings of its files."""

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
SECTION = "Reference"
"""The part of the navigation that these pages are put into, each after the page of its package."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the pages into the navigation."""
    section = next(part[SECTION] for part in config.nav if SECTION in part)
    for package in ("fl", "surgery"):
        after = next(i for i, page in enumerate(section) if package in page) + 1
        section[after:after] = [{f"{package}.{room.name}": _page(room)} for room in _rooms(package)]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Write the pages: what the room's `__init__` says, then its files in alphabetical order."""
    for package in ("fl", "surgery"):
        for room in _rooms(package):
            text = f"# {package}.{room.name}\n\n" + "\n".join(map(_entry, _modules(room)))
            files.append(File.generated(config, _page(room), content=text))
    return files


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

"""The site's links, and its pages from the root: README.md is the front page; CONTRIBUTING.md and CHANGELOG.md.

Pages link to each other and to files of the repository as GitHub wants it, relative to where they lie. For the site,
links are written anew, and the files that pages link to (measurements, sources) are copied into it; folders, which it
does not have, are named only. A picture links to itself, as on GitHub, so that a phone shows it large.
"""

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
"""From a page in the root to its name in the site."""

_NAMED = re.compile(r"(?<!!)\[([^\[\]]*)\](\((?!\w+:|#)([^)#\s]+)\))")
_PICTURE = re.compile(r"^!\[[^\]]*\]\(([^)\s]+)\)$", flags=re.MULTILINE)
_LINK = re.compile(r"(\]\()(?!\w+:|#)([^)#\s]+)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the root's pages, and every file outside of docs/ that a page links to."""
    for source, name in PAGES.items():
        files.append(File.generated(config, name, abs_src_path=str(ROOT / source)))
    linked = set()
    for page in files.documentation_pages():
        source = _source(page)
        if (ROOT / source).is_file():  # and not made by another hook
            linked |= {_target(source, found[2]) for found in _LINK.finditer((ROOT / source).read_text())}
    for path in sorted(linked - PAGES.keys()):
        if (ROOT / path).is_file() and not path.startswith("docs/"):
            files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Links as the site has them."""
    if "/" not in page.file.src_uri:  # a tab with nothing beside it: let it have the room
        page.meta["hide"] = ["navigation"]
    source = _source(page.file)
    here = os.path.dirname(page.file.src_uri)

    def rewritten(found: re.Match) -> str:
        path = _target(source, found[2])
        return found[1] + os.path.relpath(PAGES.get(path, path.removeprefix("docs/")), here)

    def unlinked(found: re.Match) -> str:
        return found[1] if (ROOT / _target(source, found[3])).is_dir() else found[0]

    return _PICTURE.sub(r"[\g<0>](\1)", _LINK.sub(rewritten, _NAMED.sub(unlinked, markdown)))


def _source(file: File) -> str:
    """Where a page of the site lies in the repository."""
    return {name: source for source, name in PAGES.items()}.get(file.src_uri, f"docs/{file.src_uri}")


def _target(source: str, link: str) -> str:
    """What a link in a file of the repository leads to, from the root."""
    return os.path.normpath(os.path.join(os.path.dirname(source), link))

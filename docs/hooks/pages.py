"""Every page of the site as plain Markdown: what lies in docs/ and in the root, and what is made of sources.

As a hook of mkdocs it hands the pages over. `python docs/hooks/pages.py FOLDER` writes them, with all that they show
and a mkdocs.yml beside them, for any builder that reads Markdown: then `zensical build -f FOLDER/mkdocs.yml`.

Pages link to each other and to files of the repository as GitHub wants it, relative to where they lie. For the site,
links are written anew, and the files that pages link to (measurements, sources) are copied into it. Folders are named
only, as it has none but the gallery. A picture links to itself, as on GitHub, so that a phone shows it large. Long
tables get a script that filters them.
"""

import os
import re
import shutil
import sys
import tomllib
from pathlib import Path
from typing import Any

import yaml

import gallery
import notebooks
import reference
import settings

ROOT = Path(__file__).parents[2]
FROM_ROOT = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
"""From a page in the root to its name in the site."""

_NAMED = re.compile(r"(?<!!)\[([^\[\]]*)\](\((?!\w+:|#)([^)#\s]+)\))")
_PICTURE = re.compile(r"^!\[[^\]]*\]\(([^)\s]+)\)$", flags=re.MULTILINE)
_VERDICT = re.compile("([✓≈✗]) (?:ordering |not )?reproduced")
_VERDICTS = {"✓": "yes", "≈": "order", "✗": "no"}  # classes of docs/stylesheets/extra.css
_FILTERS = {"filter-models": "models.js", "filter-rows": "rows.js"}
"""From an element of a page to the script in docs/hooks that puts a box there."""
_SOUGHT = ("install.md", "tutorial.md", "guides/", "notebooks/")
"""What newcomers look for: the search shows these pages before results, project and reference."""
_FIRST = "---\nsearch:\n  boost: 4\n---\n\n"
_LINK = re.compile(r"(\]\()(?!\w+:|#)([^)#\s]+)")


def pages() -> tuple[dict[str, str], dict[str, Path]]:
    """Return the text of each page, and the files that pages show or link to, each by its name in the site.

    Raises an error where a script of the gallery or a cell of a notebook fails.
    """
    sources = {source: ROOT / source for source in FROM_ROOT}
    sources |= {path.relative_to(ROOT).as_posix(): path for path in sorted((ROOT / "docs").rglob("*.md"))}
    made, files = gallery.pages()
    run, pictures = notebooks.pages()
    files |= pictures
    texts = made | run | reference.pages()
    for source, path in sources.items():
        text = path.read_text()
        texts[_name(source)] = _for_the_site(reference.with_codes(text), source)
        linked = {_target(source, found[2]) for found in _LINK.finditer(text)}
        files |= {_name(one): ROOT / one for one in linked if (ROOT / one).is_file() and _name(one)[-3:] != ".md"}
    texts[settings.NAME] += settings.sections()
    return {name: _FIRST * name.startswith(_SOUGHT) + text for name, text in texts.items()}, files


def site_name(name: str) -> str:
    """With the version, which the header of every page shows."""
    return f"{name} {tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']['version']}"


def navigation(nav: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """That of mkdocs.yml, with the pages that are made of sources put into their parts."""
    for part in nav:
        for make in (reference, gallery):
            if make.SECTION in part:
                part[make.SECTION] = make.navigation(part[make.SECTION])
    return nav


def write(folder: Path) -> None:
    """Write the pages, their files, and the settings of the site with `folder`/docs as the place of its pages."""
    shutil.rmtree(folder, ignore_errors=True)
    texts, files = pages()
    files |= {
        path.relative_to(ROOT / "docs").as_posix(): path for path in (ROOT / "docs").rglob("*.*") if path.is_file()
    }
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    site = {key: value for key, value in site.items() if key not in ("hooks", "docs_dir", "watch")}
    site["nav"], site["site_name"] = navigation(site["nav"]), site_name(site["site_name"])
    python = next(one for one in site["plugins"] if "mkdocstrings" in one)["mkdocstrings"]["handlers"]["python"]
    python |= {"paths": [str(ROOT)]}
    python["options"]["extensions"] = [str(ROOT / path) for path in python["options"]["extensions"]]
    for name, path in files.items():
        if not name.endswith((".md", ".py", ".pyc")) or not (ROOT / "docs" / name).exists():
            (folder / "docs" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, folder / "docs" / name)
    for name, text in texts.items():
        (folder / "docs" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "docs" / name).write_text(text)
    (folder / "mkdocs.yml").write_text(yaml.safe_dump(site, sort_keys=False))


def on_config(config: Any) -> Any:
    """mkdocs asks for the navigation and the name."""
    config.nav, config.site_name = navigation(config.nav), site_name(config.site_name)
    return config


def on_files(files: Any, config: Any) -> Any:
    """mkdocs asks for the files: each page in the place of the one that it is made of."""
    from mkdocs.structure.files import File

    texts, others = pages()
    for file in list(files):
        if file.src_uri in texts:
            files.remove(file)
    for name, text in texts.items():
        files.append(File.generated(config, name, content=text))
    for name, path in sorted(others.items()):
        if files.get_file_from_path(name) is None:
            files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def _for_the_site(text: str, source: str) -> str:
    """Return a page with its links as the site has them."""
    here = os.path.dirname(_name(source))

    def rewritten(found: re.Match) -> str:
        return found[1] + os.path.relpath(_name(_target(source, found[2])), here)

    def unlinked(found: re.Match) -> str:
        target = _target(source, found[3])
        return found[1] if (ROOT / target).is_dir() and target != "gallery" else found[0]

    text = _PICTURE.sub(r"[\g<0>](\1)", _LINK.sub(rewritten, _NAMED.sub(unlinked, text)))
    text = _VERDICT.sub(lambda found: f'<span class="verdict {_VERDICTS[found[1]]}">{found[0]}</span>', text)
    for name, script in _FILTERS.items():
        place = f'<div id="{name}"></div>'
        text = text.replace(place, f"{place}\n<script>\n{(ROOT / 'docs/hooks' / script).read_text()}</script>")
    return text


def _name(path: str) -> str:
    """Of a file of the repository, in the site."""
    if re.fullmatch(r"gallery/\w+\.py", path):
        return path.replace(".py", ".md")
    if path == "gallery":
        return "gallery/index.md"
    return FROM_ROOT.get(path, path.removeprefix("docs/"))


def _target(source: str, link: str) -> str:
    """Return what a link in a file of the repository leads to, from the root."""
    return os.path.normpath(os.path.join(os.path.dirname(source), link))


if __name__ == "__main__":
    write(Path(sys.argv[1]))

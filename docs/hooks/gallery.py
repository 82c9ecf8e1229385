"""The gallery: a page for each script of gallery/ with what it draws and prints, and one that shows them all.

Each script runs in a process of its own, in an empty folder: a fork of one that has imported what most scripts need.
What it left is kept in build/gallery until the script or the packages change. As a program, `python
docs/hooks/gallery.py` runs what has to run and says how long that took.
"""

import ast
import hashlib
import itertools
import multiprocessing
import os
import re
import shutil
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import forkserver
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

ROOT = Path(__file__).parents[2]
SCRIPTS, CACHE = ROOT / "gallery", ROOT / "build/gallery"
SECTION = "Gallery"  # the part of the navigation that these pages are put into
GROUPS = {"surgery": "Surgery", "zoo": "Models", "fl": "Federated"}
"""From a package, with which a script's name begins, to its heading."""
_RUN = """\
import os, runpy, sys, matplotlib, matplotlib.pyplot as plt, torch
from fl.figures.style import COLORS
looks = {"color": COLORS, "linestyle": ["-", "--", ":", "-."] * 2}  # lines differ without colours, too
plt.rcParams.update({"axes.prop_cycle": plt.cycler(**looks), "figure.constrained_layout.use": True})
for number, name in (1, "output"), (2, "errors"):
    os.dup2(os.open(f"{folder}/{name}.txt", os.O_WRONLY | os.O_CREAT), number)
os.chdir(here)
torch.manual_seed(0)  # a model of the script's own is the same each time
sys.argv[:] = [script]
runpy.run_path(script, run_name="__main__")
if not plt.get_fignums():
    raise SystemExit("it leaves no figure")
plt.savefig(f"{folder}/picture.png", dpi=150)
figure = plt.gcf()
width, height = figure.get_size_inches()
figure.set_size_inches(2.6, 2.6 * height / width)  # lines and digits stay as thick and large as they are
figure.suptitle("")
for legend in figure.findobj(matplotlib.legend.Legend):
    legend.remove()
for axes in figure.axes:
    axes.set(title=axes.get_title() * (len(figure.axes) > 1), xlabel="", ylabel="")
    axes.title.set_fontsize(7)
    axes.tick_params(labelsize=7)
    if isinstance(axes.xaxis.get_major_locator(), matplotlib.ticker.AutoLocator):
        axes.locator_params("x", steps=[1, 2, 5, 10])
    if len(figure.axes) > 2:
        axes.tick_params(labelbottom=False, labelleft=False, labelright=False)
plt.savefig(f"{folder}/picture-small.png", dpi=150)
"""


_SETTINGS = {"MPLBACKEND": "Agg", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(["matplotlib.pyplot", "torch", "torchvision", "timm", "fl"])


class Entry(NamedTuple):
    """A script, in the parts that its page shows."""

    name: str
    group: str
    title: str
    text: str
    code: str
    uses: set[str]  # of the packages: surgery.narrow, zoo.weights.load


def entries(scripts: Path = SCRIPTS) -> list[Entry]:
    """Return the scripts of a folder, group by group."""
    found = []
    for prefix, group in GROUPS.items():
        for path in sorted(scripts.glob(f"{prefix}_*.py")):
            tree = ast.parse(source := path.read_text())
            title, _, text = ast.get_docstring(tree).partition("\n")
            code = "\n".join(source.splitlines()[tree.body[0].end_lineno :]).strip()
            found.append(Entry(path.stem, group, title.rstrip("."), text.strip(), code, _used(tree)))
    return found


def _used(tree: ast.AST) -> set[str]:
    """Return names of the packages in a script: `surgery.narrow`, and `narrow` after `from surgery import narrow`."""
    names = dict(zip(GROUPS, GROUPS, strict=True))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            within = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            names |= {one.asname or one.name: within + one.name for one in node.names}
    written = (ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Name | ast.Attribute))
    found = (re.fullmatch(r"(\w+)((?:\.\w+)*)", one) for one in written)
    whole = {names[one[1]] + one[2] for one in found if one and one[1] in names}
    return {name for name in whole - GROUPS.keys() if name.split(".")[0] in GROUPS}


def state(*files: Path) -> str:
    """Return a word for what the packages and these files say: another as soon as one of them changes."""
    packages = [path for package in GROUPS for path in sorted((ROOT / package).rglob("*.py"))]
    return hashlib.sha256(b"".join(path.read_bytes() for path in [*packages, *files])).hexdigest()[:16]


def results(scripts: Path = SCRIPTS, cache: Path = CACHE) -> dict[str, Path]:
    """From the name of each script to a folder with its picture.png, picture-small.png and output.txt.

    Raises RuntimeError with the traceback of the scripts that fail.
    """
    now, folders = state(Path(__file__)), {}
    for path in (scripts / f"{entry.name}.py" for entry in entries(scripts)):
        folders[path] = cache / f"{path.stem}-{now}-{hashlib.sha256(path.read_bytes()).hexdigest()[:16]}"
    for old in set(cache.glob("*")) - set(folders.values()):
        shutil.rmtree(old)
    with patch.dict(os.environ, _SETTINGS):
        forkserver.ensure_running()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        missing = [pair for pair in folders.items() if not (pair[1] / "output.txt").exists()]
        failed = [error for error in pool.map(lambda pair: _run(*pair), missing) if error]
    if failed:
        raise RuntimeError("\n".join(failed))
    return {path.stem: folder for path, folder in folders.items()}


def _run(script: Path, folder: Path) -> str:
    """Leave in a folder what a script draws and prints; what went wrong, if anything did."""
    with tempfile.TemporaryDirectory() as here, tempfile.TemporaryDirectory() as left:
        given = {"__name__": "draw", "script": str(script.resolve()), "folder": left, "here": here}
        process = _PROCESSES.Process(target=exec, args=(_RUN, given))
        process.start()
        process.join()
        if process.exitcode:
            return f"{script} fails:\n{Path(left, 'errors.txt').read_text()}"
        output = Path(left, "output.txt").rename(Path(here, "output.txt"))
        shutil.copytree(left, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("errors.txt"))
        shutil.copy(output, folder)  # the last one: with it the folder is complete
    return ""


def pages(scripts: Path = SCRIPTS, cache: Path = CACHE) -> tuple[dict[str, str], dict[str, Path]]:
    """Return the text of each page, and the pictures, by their names in the site."""
    folders, texts, files = results(scripts, cache), {}, {}
    index = "# Gallery\n\nEach picture is drawn by a script of at most 30 lines, which runs when this site is made;\n"
    index += "colours, dashes and the seed of torch are the site's own.\n"
    index += "Try one in an empty folder: runs are never overwritten.\n"
    for group, its in itertools.groupby(entries(scripts), key=lambda entry: entry.group):
        index += f'\n## {group}\n\n<div class="gallery" markdown="1">\n'
        for entry in its:
            name, folder = entry.name, folders[entry.name]
            index += f"[![](images/{name}-small.png) {entry.title}]({name}.md)\n"
            texts[f"gallery/{name}.md"] = _page(entry, (folder / "output.txt").read_text().rstrip())
            files |= {f"gallery/images/{name}{end}.png": folder / f"picture{end}.png" for end in ("", "-small")}
        index += "</div>\n"
    return texts | {"gallery/index.md": index}, files


def _page(entry: Entry, output: str) -> str:
    """Return the page of a script."""
    documented = "\n".join(page.read_text() for page in (ROOT / "docs/reference").glob("*.md"))
    uses = [f"[`{one}`][{one}]" for one in sorted(entry.uses) if f"::: {one}\n" in documented]
    picture = f"images/{entry.name}.png"
    parts = [
        f"# {entry.title} {{#gallery-{entry.name}}}",
        entry.text,
        f"[![{entry.title}]({picture})]({picture})",
        f'```python title="gallery/{entry.name}.py"\n{entry.code}\n```',
        f'```text title="It prints"\n{output}\n```' if output else "",
        f"In the reference: {', '.join(uses)}" if uses else "",
    ]
    return "\n\n".join(parts) + "\n"


def navigation(section: str | list[Any], scripts: Path = SCRIPTS) -> list[Any]:
    """Return the part of the navigation: the page of all, and the scripts in their groups."""
    groups = itertools.groupby(entries(scripts), lambda entry: entry.group)
    return [section, *({title: [{one.title: f"gallery/{one.name}.md"} for one in its]} for title, its in groups)]


if __name__ == "__main__":
    began = time.perf_counter()
    print(f"{len(results())} scripts of the gallery: {time.perf_counter() - began:.0f} s")

"""The gallery: each script is short, says what it shows, uses public names only, and leaves one figure open."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fl
import surgery
import zoo

ROOT = Path(__file__).parent.parent
SCRIPTS = {path.stem: path.read_text() for path in sorted((ROOT / "gallery").glob("*.py"))}
REFERENCE = "".join((ROOT / f"docs/reference/{name}.md").read_text() for name in ("fl", "surgery", "zoo"))
OURS = {"surgery", "zoo", "fl"}
OTHERS = {"matplotlib", "numpy", "pandas", "sklearn", "timm", "torch", "torchvision", "transformers"}
FAST = ("surgery_recombine", "surgery_plan_as_json")
UNUSED = {"State": "a type", "Stack": "a type", "Layer": "what `layers` returns", "Section": "what `sections` returns"}
"""Public names that no script writes down."""
RUN = """
import runpy, sys
import matplotlib.pyplot as plt

runpy.run_path(sys.argv[1], run_name="__main__")
assert len(plt.get_fignums()) == 1, "one figure stays open"
figure = plt.gcf()
figure.savefig("picture.png")
assert figure.axes, "something is drawn"
"""


def names(code):
    """The names of our packages that a script uses, with dots."""
    tree, aliases, found = ast.parse(code), {}, set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            aliases |= {one.asname or one.name.partition(".")[0]: one.name for one in node.names}
        elif isinstance(node, ast.ImportFrom):
            aliases |= {one.asname or one.name: f"{node.module}.{one.name}" for one in node.names}
    for node in ast.walk(tree):
        parts, inner = [], node
        while isinstance(inner, ast.Attribute):
            parts, inner = [inner.attr, *parts], inner.value
        if isinstance(inner, ast.Name) and (origin := aliases.get(inner.id)):
            found.add(".".join([origin, *parts]))
    return aliases, {name for name in found if name.partition(".")[0] in OURS and "." in name}


def is_public(name):
    """Whether the reference has a name: exported by its package, listed, or in a room, each of which has a page."""
    package, first, *rest = name.split(".")
    if any(part.startswith("_") for part in (first, *rest)):
        return False
    exported = first in {"fl": fl, "surgery": surgery}[package].__all__ if package != "zoo" else hasattr(zoo, first)
    listed = re.search(rf"^::: {re.escape(name)}(\.|$)", REFERENCE, flags=re.MULTILINE)
    return exported or bool(listed) or (ROOT / package / first / "__init__.py").exists()


@pytest.mark.parametrize("name", SCRIPTS)
def test_gallery__a_script_is_short_and_says_what_it_shows(name):
    code = SCRIPTS[name]
    title, blank, *text = ast.get_docstring(ast.parse(code)).split("\n")
    assert len(code.splitlines()) <= 30
    assert len(title) <= 60
    assert not title.endswith(".")
    assert not blank
    assert " ".join(text).endswith(".")
    assert name.partition("_")[0] in OURS


@pytest.mark.parametrize("name", SCRIPTS)
def test_gallery__a_script_imports_public_names_only(name):
    aliases, used = names(SCRIPTS[name])
    modules = {module.partition(".")[0] for module in aliases.values()}
    assert modules <= OURS | OTHERS | sys.stdlib_module_names
    ours = used | {module for module in aliases.values() if "." in module and module.partition(".")[0] in OURS}
    assert [one for one in ours if not is_public(one)] == []


def test_gallery__there_are_enough_scripts():
    assert len(SCRIPTS) >= 24


def test_gallery__every_public_name_is_shown_by_some_script():
    used = set().union(*(names(code)[1] for code in SCRIPTS.values()))
    used |= {name for code in SCRIPTS.values() for name in names(code)[0].values()}
    public = {f"{package.__name__}.{name}" for package in (surgery, fl) for name in package.__all__}
    shown = {one for one in public if any(f"{name}.".startswith(f"{one}.") for name in used)}
    assert {name.partition(".")[2] for name in public - shown} == set(UNUSED)


@pytest.mark.nightly
@pytest.mark.parametrize("name", FAST)  # all of them run when the site is built
def test_gallery__a_script_runs_and_leaves_a_figure_open(name, tmp_path):
    settings = os.environ | {"MPLBACKEND": "Agg", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", RUN, str(ROOT / f"gallery/{name}.py")]
    done = subprocess.run(command, cwd=tmp_path, env=settings, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout, "it says something"

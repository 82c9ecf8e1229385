"""Rules about the source itself: who may import whom."""

import ast
import re
import subprocess
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from typing import get_args

import pytest

import surgery.errors
import zoo.errors
from fl.base.errors import Code

ROOT = Path(__file__).parent.parent
PACKAGES = {"surgery": set(), "zoo": set(), "fl": {"surgery", "zoo"}}
"""What each may import beside itself."""
ROOMS = [
    "base", "distributed", "data", "partition", "engine", "models", "federation", "secure", "algorithms", "extensions",
    "settings", "runs", "analysis", "figures",
]  # fmt: skip
"""The rooms of fl: each may import those before it. What lies in fl itself, and every __main__, are commands, which
may import all of them. A folder of extensions has files called as rooms, which add to these; its others may import all
rooms."""
DRAWS = "fl.runs.simulation"
"""The one file that looks up: a run leaves figures, which read runs."""


def module(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


FILES = {module(file): file for package in PACKAGES for file in (ROOT / package).rglob("*.py")}


def is_declared(node: ast.AST) -> bool:
    """Whether it is a call of `fl.base.plugins.collect`."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "declared"


def statements(node: ast.AST):
    """All statements in a node, however deep."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
            yield child
            yield from statements(child)


@cache
def imported(name: str) -> list[tuple[str, int]]:
    """(module, line) of everything of these packages that a module imports, wherever and whatever for."""
    text = FILES[name].read_text()
    found, tree = [], ast.parse(text)
    for node in statements(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{FILES[name]}:{node.lineno} imports relatively"
            inside = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [one if one in FILES else node.module for one in inside]
        else:
            continue
        found += [(one, node.lineno) for one in names if one.split(".")[0] in PACKAGES]
    calls = filter(is_declared, ast.walk(tree)) if "declared(" in text else ()
    for package in [node.args[0].value for node in calls]:  # it imports all files there
        inside = [one for one in FILES if one.rpartition(".")[0] == package and not FILES[one].stem.startswith("__")]
        found += [(one, 0) for one in inside if one != name]
    return found


def room(name: str) -> str | None:
    """The room of fl that a module lies in; None for commands and other packages."""
    parts = name.split(".")
    if parts[0] != "fl" or len(parts) == 1 or parts[1] not in ROOMS or "__main__" in parts:
        return None
    if len(parts) > 3 and parts[1] == "extensions":
        return parts[3] if parts[3] in ROOMS else "figures"
    return parts[1]


def test_layout__packages_and_rooms_import_in_one_direction():
    for name in FILES:
        package, here = name.split(".")[0], room(name)
        for other, line in imported(name):
            message = f"{name}, line {line}, imports {other}"
            assert other.split(".")[0] in {package} | PACKAGES[package], message
            if line and other.startswith("fl.extensions"):
                assert name.startswith("fl.extensions"), f"{message}: extensions are found, not imported"
            together = name.startswith("fl.extensions.") and name.split(".")[:3] == other.split(".")[:3]
            if here and line and name != DRAWS and other.split(".")[0] == "fl" and not together:
                assert (there := room(other)), f"{message}, which is in no room"
                assert ROOMS.index(there) <= ROOMS.index(here), message


def test_layout__pages_name_every_room_and_no_file_that_is_not_there():
    tops = ("surgery", "zoo", "fl", "tests", "benchmarks", "docs")
    there = {path.name for top in tops for path in ROOT.glob(f"{top}/**/*.py")}
    for page in ("docs/explanation/layout.md", "CONTRIBUTING.md"):
        text = (ROOT / page).read_text()
        assert not [name for name in ROOMS if not re.search(rf"\b{name}/", text)], page
    text = (ROOT / "docs/explanation/layout.md").read_text()
    assert not set(re.findall(r"[a-z_]+\.py", text)) - there
    assert not [path.parent.name for path in ROOT.glob("surgery/*/__init__.py") if f"{path.parent.name}/" not in text]


def test_layout__all_of_fl_lies_in_rooms_or_is_a_command():
    inside = {path.name for path in (ROOT / "fl").iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert inside == set(ROOMS)
    for file in (ROOT / "fl").glob("*.py"):
        assert file.name == "__init__.py" or "__main__" in file.read_text(), f"{file.name} is no command"


def test_layout__imports_go_in_no_circle():
    assert len(FILES) > 100
    TopologicalSorter({name: {other for other, _ in imported(name)} for name in FILES}).prepare()  # raises CycleError


def test_layout__only_figures_draw():
    for name, file in FILES.items():
        if name.split(".")[0] == "fl" and re.search(r"^ *(from|import) matplotlib\b", file.read_text(), re.MULTILINE):
            assert room(name) == "figures", name


PRIVATE = {"_version", "_cdata", "_pytree", "_python_dispatch", "_NormBase"}
"""Of torch, whatever they are taken from; all that begins with torch._ counts as well."""


def test_layout__what_torch_keeps_private_is_taken_in_one_place():
    for name in [name for name in FILES if name.split(".")[0] == "fl" and name != "fl.base.torch_private"]:
        for node in ast.walk(ast.parse(FILES[name].read_text())):
            words = []
            if isinstance(node, ast.Attribute) and node.attr != "__version__":
                read_torch = isinstance(node.value, ast.Name) and node.value.id == "torch"
                words = [node.attr] * (read_torch or node.attr in PRIVATE)
            elif isinstance(node, ast.ImportFrom) and node.module.split(".")[0] == "torch":
                words = [*node.module.split("."), *(alias.name for alias in node.names)]
            private = [word for word in words if word.startswith("_")]
            assert not private, f"{name}, line {node.lineno}: use fl.base.torch_private"
    for name in [name for name in FILES if name.split(".")[0] == "surgery" and name != "surgery.torch_private"]:
        assert not re.search(r"\b(_pytree|_python_dispatch)\b", FILES[name].read_text()), name


def test_layout__every_error_has_a_code_and_every_code_an_error():
    """Also classes derived from these; codes that are no constant are those of other errors.

    An FLError without one is of code "argument"; classes derived from it have theirs as the default.
    """
    for package, kinds, fixed, codes in (
        ("surgery", {"SurgeryError", "Unreachable", "RuleError"}, set(), get_args(surgery.errors.Code)),
        ("zoo", {"ZooError"}, set(), get_args(zoo.errors.Code)),
        ("fl", {"FLError"}, {"Diverged", "Refused", "Unwritable", "Lost", "InvalidMessage"}, get_args(Code)),
    ):
        used = set()
        for name in [name for name in FILES if name.split(".")[0] == package]:
            for node in ast.walk(ast.parse(FILES[name].read_text())):
                if isinstance(node, ast.ClassDef) and any(ast.unparse(base) in kinds | fixed for base in node.bases):
                    assert node.name in kinds | fixed, f"{name}.{node.name} is not looked for here"
                    if node.name in fixed:
                        used.add(node.body[-1].args.kw_defaults[0].value)  # of __init__
                if isinstance(node, ast.Call) and ast.unparse(node.func) in kinds:
                    given = [keyword.value for keyword in node.keywords if keyword.arg == "code"]
                    assert given or package == "fl", f"{name}, line {node.lineno}: an error without a code"
                    used |= {one.value for each in given for one in ast.walk(each) if isinstance(one, ast.Constant)}
                    used |= set() if given else {"argument"}
        assert used == {*codes}, package


def documented(body: list[ast.stmt]):
    """Public functions and classes that have a docstring, and those in the classes."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            if ast.get_docstring(node):
                yield node
            yield from documented(node.body if isinstance(node, ast.ClassDef) else [])


def test_layout__the_first_line_of_a_docstring_stands_alone():
    """Editors, the reference and --help show it without the rest."""
    checked = 0
    for name, file in FILES.items():
        for node in documented(ast.parse(file.read_text()).body):
            first, *rest = ast.get_docstring(node).split("\n")
            alone = first.endswith(".") and not any(rest[:1])
            assert alone, f"{name}.{node.name}, line {node.lineno}: {first}"
            checked += 1
    assert checked > 1000


QUESTIONS = {"What", "Whether", "How", "By", "Which", "Where", "Why", "Who", "When"}


def test_layout__docstrings_begin_with_a_verb_or_a_noun():
    """Of a file they may say what it holds. A question is neither."""
    for name in [name for name in FILES if name.split(".")[0] in ("surgery", "zoo", "fl")]:
        for node in ast.walk(ast.parse(FILES[name].read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
                assert text.split()[0].strip(",") not in QUESTIONS, f"{name}: {text}"


def test_layout__every_room_of_surgery_has_its_types():
    """Its `__getattr__` imports rooms when they are used, which a checker of types does not follow."""
    tree = ast.parse(FILES["surgery"].read_text())
    (checked,) = (node for node in tree.body if isinstance(node, ast.If))
    assert tuple(node.names[0].asname for node in checked.body) == surgery._PACKAGES


def test_layout__nothing_lies_at_the_root_that_does_not_belong_there():
    """What a program under test leaves in the working directory is soon committed with all else."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    folders = {".ci", "benchmarks", "docs", "examples", "fl", "gallery", "speedruns", "surgery", "tests", "zoo"}
    files = {
        ".gitignore",
        "CHANGELOG.md",
        "CITATION.cff",
        "CONTRIBUTING.md",
        "LICENSE",
        "MANIFEST.in",
        "README.md",
        "conftest.py",
        "mkdocs.yml",
        "pyproject.toml",
    }
    assert {line.split("/")[0] for line in listed.splitlines()} == folders | files


NAMED = {  # files of the core that name an extension, and why
    "fl/__init__.py": "an example",
    "fl/algorithms/extension.py": "an example",
    "fl/analysis/costs.py": "the flag that fills a column",
    "fl/analysis/groups.py": "the flag that fills a column",
    "fl/compare.py": "the flag that fills a column",
    "fl/export.py": "a format",
    "fl/federation/federation.py": "models of one's own that have them",
    "fl/landscape.py": "what the model is",
    "fl/runs/export.py": "a format",
    "fl/runs/folder.py": "what older runs may need",
    "fl/secure/__init__.py": "what it is not",
    "fl/settings/config.py": "an example",
    "fl/settings/earlier.py": "settings of earlier versions",
    "fl/settings/stored.py": "an example",
}


def test_layout__the_core_of_fl_names_no_extension():
    """They wrap it; where a file has to name one, the seam is wrong, or it is here with a reason."""
    names = {file.stem for file in (ROOT / "fl/extensions").glob("[a-z]*.py")} - {"trimmed"} | {"remote", "adapters?"}
    word = re.compile(rf"\b({'|'.join(sorted(names))})\b", re.IGNORECASE)
    others = ("fl/extensions/", "fl/settings/recipes")
    files = {str(file.relative_to(ROOT)): file for file in (ROOT / "fl").rglob("*.py")}
    core = {name: file.read_text() for name, file in files.items() if not name.startswith(others)}
    assert {name for name, text in core.items() if word.search(text)} == set(NAMED)

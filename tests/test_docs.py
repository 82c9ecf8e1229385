"""The README and docs/ hold true: their Python and commands run, what they name is there, and tables are the stored."""

import argparse
import csv
import functools
import importlib
import inspect
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
import types
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple, get_args

import matplotlib.pyplot as plt
import pytest
import tyro
import yaml
from selection import some
from torch.distributed.run import get_args_parser as torchrun_arguments

import fl
import surgery
import zoo
from benchmarks.papers.recipes import RECIPES
from fl.__main__ import COMMANDS
from fl.algorithms import ALGORITHMS, SOURCES
from fl.data import LOADERS
from fl.partition import KINDS
from fl.settings import Config, Experiment
from fl.settings.command_line import parse
from surgery.depth.sections import BLOCKS
from surgery.merging import METHODS as METHODS_OF_MERGING
from surgery.width.rules.registry import RULES
from zoo.spec import PRESETS

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks/results"
TOP = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
PAGES = {str(path.relative_to(ROOT)): path.read_text() for path in [*TOP, *(ROOT / "docs").rglob("*.md")]}
PICTURES = runpy.run_path(str(ROOT / "docs/pictures.py"))["PICTURES"]
METHODS = dict(ALGORITHMS)
EXAMPLES = ("NAME", "slowmo", "my_slowmo:METHOD", "mlp", "shorten")
"""What stands in the pages for a file that a reader adds."""
FENCES = re.compile(r"^```(\w+)\n(.*?)^```$(?:\n+```text\n(.*?)^```$)?", flags=re.DOTALL | re.MULTILINE)


class Block(NamedTuple):
    """A fence: its language, what is in it, and the fence of text after it, which is what it prints."""

    language: str
    code: str
    output: str
    line: int


def blocks(text, *languages):
    """The fences of these languages, in the order of the page."""
    found = [Block(m[1], m[2], m[3] or "", text.count("\n", 0, m.start()) + 1) for m in FENCES.finditer(text)]
    return [block for block in found if block.language in languages]


def prose(text):
    """A page without its fences."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)


# Python


@pytest.fixture
def registered():
    """The methods that a page adds; they go away again, as does all else that it registers."""
    tables = [ALGORITHMS, SOURCES, KINDS, LOADERS, PRESETS, RULES, BLOCKS, METHODS_OF_MERGING]
    before = [dict(table) for table in tables]
    yield lambda: ALGORITHMS.keys() - before[0].keys()
    for table, content in zip(tables, before, strict=True):
        table.clear()
        table.update(content)


WITH_PYTHON = [page for page, text in PAGES.items() if blocks(text, "python")]
LONG = ("docs/guides/surgery.md", "docs/guides/levels.md", "docs/guides/method.md", "docs/guides/architectures.md")


@pytest.mark.slow
@pytest.mark.parametrize("page", some(WITH_PYTHON, [page for page in WITH_PYTHON if page not in LONG]))
def test_docs__python_runs_as_printed(page, registered, capsys, monkeypatch, tmp_path):
    """The blocks of a page share their names, from top to bottom."""
    monkeypatch.chdir(tmp_path)
    if re.search(r"^from flwr", PAGES[page], flags=re.MULTILINE):
        pytest.importorskip("flwr", reason="Flower's side needs flwr: pip install -e '.[flower]'")
    monkeypatch.setitem(sys.modules, "page", module := types.ModuleType("page"))  # by which functions are found
    scope = vars(module)
    for block in blocks(PAGES[page], "python"):
        if re.search(r"^from transformers", block.code, flags=re.MULTILINE):
            pytest.importorskip("transformers", reason="models of transformers need pip install -e '.[hf]'")
        exec(compile("\n" * block.line + block.code, page, "exec"), scope)
        printed = capsys.readouterr().out
        for line in re.findall(r"print\(.*#\s*(.*)", block.code):
            assert line in printed
        if block.output:
            assert printed == block.output
    for name in registered():
        assert_sound(name)


ALONE = [
    pytest.param(block.code, id=f"{page}:{block.line}")
    for page in WITH_PYTHON
    for block in blocks(PAGES[page], "python")
    if re.search(r"^(KIND|METHOD) = ", block.code, flags=re.MULTILINE)
]


@pytest.mark.parametrize("code", ALONE)
def test_docs__a_file_of_the_users_own_imports_all_that_it_names(code, registered, monkeypatch):
    """A partition or a method is pasted into a file alone."""
    monkeypatch.setitem(sys.modules, "page", module := types.ModuleType("page"))
    exec(code, vars(module))
    names = {
        name for one in vars(module).values() if isinstance(one, types.FunctionType) for name in one.__code__.co_names
    }
    modules = {"torch", "np", "nn", "fl"} & names
    assert modules <= vars(module).keys()


def assert_sound(name):
    """Predictions are numbers, also of batch norm; what attackers send and defences cut reaches the global model."""
    after = set()
    for settings in (
        {},
        {"attack": fl.AttackOptions(0.5, 3.0)},
        {"defence": fl.Defence(clip=0.5)},
        {"defence": fl.Defence("median")},
    ):
        config = fl.Config.of(
            algorithm=name, rounds=3, model="resnet9", width=0.25, local_epochs=1, batch_size=100, participation=1.0,
            clients=4, partition="iid", samples=400, **settings,
        )  # fmt: skip
        fed, algorithm = fl.build(config)
        server = algorithm.init()
        for number in (1, 2, 3):
            rng = fl.Rng(0, number)
            server, _ = algorithm.round(server, fed.sample(rng), rng)
        assert algorithm.predict(server, fed.data.test_x, None).isfinite().all()
        after.add(server["global"]["stem.conv.weight"].sum().item())
    assert len(after) == 4


@pytest.mark.nightly
def test_docs__a_method_is_one_file(tmp_path):
    """The guide's, in an empty folder, run as it says; its options are flags."""
    guide = PAGES["docs/guides/method.md"]
    (tmp_path / "my_slowmo.py").write_text(blocks(guide, "python")[0].code)
    _, *words = blocks(guide, "sh")[0].code.split()
    assert "my_slowmo:METHOD" in words[3]
    paths = {"PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, *words, "--rounds", "2"], cwd=tmp_path, env={**os.environ, **paths}, check=True)
    assert "slowmo" in next(tmp_path.glob("runs/*/comparison.txt")).read_text()


# What pages name


def test_docs__the_readme_is_short_and_has_the_two_commands():
    lines = PAGES["README.md"].splitlines()
    assert len(lines) <= 200
    assert {"pip install -e . && python -m fl.run", "pip install -e '.[dev]' && pytest"} <= {*lines}


def anchors(text):
    """The places of a page that links may name, as GitHub and the site make them of headings."""
    headings = re.findall(r"^#+ (.*)", prose(text), re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", heading.lower()).strip() for heading in headings]
    return {re.sub(r" +", "-", heading) for heading in plain}


@pytest.mark.parametrize("page", PAGES)
def test_docs__code_has_at_most_85_columns(page):
    """Programs may print longer lines: the fences `text`, and what follows the command in `console`."""
    fences = re.findall(r"^ *```(\w*)\n(.*?)^ *```$", PAGES[page], flags=re.DOTALL | re.MULTILINE)
    code = [text for language, text in fences if language not in ("text", "console")]
    code += re.findall(r"^\$ (?:.*\\\n)*.*", PAGES[page], flags=re.MULTILINE)
    assert [line for text in code for line in text.splitlines() if len(line) > 85] == []


@pytest.mark.parametrize("page", PAGES)
def test_docs__links_and_paths_lead_somewhere(page):
    text = PAGES[page]
    for target, anchor in re.findall(r"\]\((?!\w+:)([^)#\s]*)(?:#([^)\s]+))?\)", text):
        path = ((ROOT / page).parent / target).resolve() if target else ROOT / page
        assert path.exists(), target
        if anchor and not anchor.startswith("surgery."):  # whose places mkdocstrings makes
            assert anchor in anchors(path.read_text()), f"{target}#{anchor}"
    for target in re.findall(r"`((?:fl|surgery|zoo|tests|docs|benchmarks)/[\w/.\-]*)`", text):
        assert any(example in target for example in EXAMPLES) or (ROOT / target).exists(), target


def test_docs__the_site_has_every_page():
    def leaves(part):
        if isinstance(part, str):
            return {part}
        return set().union(*map(leaves, part.values() if isinstance(part, dict) else part))

    written = {page.removeprefix("docs/") for page in PAGES if page.startswith("docs/")}
    shown = leaves(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    made = {"index.md", "contributing.md", "changelog.md", "gallery/index.md"}
    made |= {f"notebooks/{path.stem}.md" for path in (ROOT / "docs/notebooks").glob("*.ipynb")}
    assert shown == written | made


@pytest.fixture
def gallery(tmp_path):
    """docs/hooks/gallery.py, and a folder with a script."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts/zoo_bars.py").write_text(
        '"""Bars.\n\nOf two heights."""\n\nimport matplotlib.pyplot as plt\n\n'
        "if False:\n    import surgery as s\n    from zoo import create\n\n    s.narrow(create)\n"
        "open('left', 'w').close()\nplt.bar([0, 1], [1, 2])\nprint('two')\n"
    )
    return SimpleNamespace(**runpy.run_path(str(ROOT / "docs/hooks/gallery.py")))


@pytest.mark.slow
def test_docs__the_gallery_shows_what_a_script_draws_and_prints(gallery, tmp_path):
    scripts, cache = tmp_path / "scripts", tmp_path / "cache"
    texts, files = gallery.pages(scripts, cache)
    page = texts["gallery/zoo_bars.md"]
    assert re.match(r"# Bars \{#gallery-zoo_bars\}\n\nOf two heights\.\n\n\[!\[Bars\]\(images/zoo_bars.png\)\]", page)
    assert [(one.language, one.code) for one in blocks(page.replace(' title="It prints"', ""), "text")] == [
        ("text", "two\n")
    ]
    assert "In the reference: [`surgery.narrow`][surgery.narrow], [`zoo.create`][zoo.create]" in page
    assert "## Models" in texts["gallery/index.md"]
    assert "[![](images/zoo_bars-small.png) Bars](zoo_bars.md)" in texts["gallery/index.md"]
    assert gallery.navigation("all.md", scripts) == ["all.md", {"Models": [{"Bars": "gallery/zoo_bars.md"}]}]
    assert {name: plt.imread(path).shape[1] for name, path in files.items()} == {
        "gallery/images/zoo_bars.png": 960, "gallery/images/zoo_bars-small.png": 390,
    }  # fmt: skip
    assert [*tmp_path.rglob("left")] == []


@pytest.mark.nightly
def test_docs__the_gallery_runs_only_what_has_changed_and_fails_with_the_traceback(gallery, tmp_path):
    scripts, cache = tmp_path / "scripts", tmp_path / "cache"
    kept = gallery.results(scripts, cache)["zoo_bars"]
    (kept / "output.txt").write_text("kept")
    (scripts / "fl_wrong.py").write_text('"""Wrong."""\n\nprint(1 / 0)\n')
    (scripts / "fl_undrawn.py").write_text('"""Nothing."""\n')
    with pytest.raises(
        RuntimeError, match=r"(?s)undrawn.py fails:.*no figure.*wrong.py.*print\(1 / 0\).*ZeroDivisionError"
    ):
        gallery.results(scripts, cache)
    for wrong in scripts.glob("fl_*.py"):
        wrong.unlink()
    assert (gallery.results(scripts, cache)["zoo_bars"] / "output.txt").read_text() == "kept"
    (scripts / "zoo_bars.py").write_text((scripts / "zoo_bars.py").read_text().replace("'two'", "'more'"))
    assert (gallery.results(scripts, cache)["zoo_bars"] / "output.txt").read_text() == "more\n"
    assert not kept.exists()


@pytest.mark.nightly
def test_docs__notebooks_run_from_top_to_bottom(tmp_path, monkeypatch):
    pytest.importorskip("nbconvert", reason="needs pip install -e '.[docs]'")
    monkeypatch.syspath_prepend(ROOT / "docs/hooks")
    texts, files = runpy.run_path(str(ROOT / "docs/hooks/notebooks.py"))["pages"](cache=tmp_path)
    shrink, federated = texts["notebooks/shrink.md"], texts["notebooks/federated.md"]
    full, cut, trained = map(
        float, re.findall(r"^ +(?:full model|cut|cut and trained) +([\d.]+)%$", shrink, re.MULTILINE)
    )
    assert full > 60
    assert trained > cut + 20
    assert re.search(r"fedavg +2 +40 ", federated)
    assert "data:image/png" in federated  # a summary with its curves
    assert {name.split("/")[1].split("_")[0] for name in files} == {"shrink", "federated"}
    for name in files:
        assert f"]({name.split('/')[1]})" in shrink + federated


def test_docs__notebooks_hold_no_outputs_and_link_to_pages():
    for path in (ROOT / "docs/notebooks").glob("*.ipynb"):
        cells = json.loads(path.read_text())["cells"]
        assert not [cell for cell in cells if cell.get("outputs") or cell.get("execution_count")], path.name
        text = "".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
        for target in re.findall(r"\]\((?!\w+:)([^)#\s]+)", text):
            assert (path.parent / target).exists(), target
        assert all(len(line) <= 85 for cell in cells for line in "".join(cell["source"]).split("\n")
                   if cell["cell_type"] == "code"), path.name  # fmt: skip


@pytest.mark.slow
def test_docs__settings_are_shown_as_help_groups_them(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs/hooks")
    page = runpy.run_path(str(ROOT / "docs/hooks/settings.py"))["sections"](tmp_path)
    parts = dict(re.findall(r"^## (.*)\n((?:(?!## ).*\n)*)", page, re.MULTILINE))
    assert [*parts][:3] == ["Data", "Method and model", "Clients"]
    assert "**`local_epochs`** `INT>=1`, default `5`\n:   epochs of a client" in parts["Training"]
    assert [one.name for one in Config().settings() if f"**`{one.name}`**" not in page] == ["seed"]


@pytest.mark.parametrize(
    ("package", "codes"),
    [("surgery", surgery.errors.Code), ("zoo", zoo.errors.Code), ("fl", fl.base.errors.Code)],
)
def test_docs__the_reference_has_the_codes_of_errors(package, codes):
    with_codes = runpy.run_path(str(ROOT / "docs/hooks/reference.py"))["with_codes"]
    page = with_codes(PAGES[f"docs/reference/{package}.md"])
    assert re.findall(r"^\| `([a-z]+)` \| \w", page, re.MULTILINE) == [*get_args(codes)]


@pytest.mark.parametrize("package", [surgery, zoo, fl], ids=lambda package: package.__name__)
def test_docs__the_reference_has_all_that_a_package_exports(package):
    page = PAGES[f"docs/reference/{package.__name__}.md"]
    documented = re.findall(rf"^::: {package.__name__}\.(?:\w+\.)*(\w+)$", page, flags=re.MULTILINE)
    assert set(package.__all__) <= set(documented)


@pytest.mark.parametrize("package", [surgery, fl], ids=lambda package: package.__name__)
def test_docs__one_page_tells_all_of_a_package(package):
    """Every public name is explained, at most 1,200 words are read."""
    page = PAGES[f"docs/explanation/all-of-{package.__name__}.md"]
    assert {name for name in package.__all__ if not re.search(rf"`{name}\b", prose(page))} == set()
    assert len(page.split()) <= 1200


def test_docs__every_promise_has_its_test():
    """The sentences of the page name tests that there are."""
    page = PAGES["docs/explanation/promises.md"]
    rows = [
        line for line in page.splitlines() if line.startswith("|") and "---" not in line and "promise |" not in line
    ]
    named = re.findall(r"`(tests/[\w/]+\.py)`, `(test_\w+)`", page)
    assert len(named) == len(rows) + 1 >= 20
    assert [pair for pair in named if f"def {pair[1]}(" not in (ROOT / pair[0]).read_text()] == []


def test_docs__the_page_of_methods_has_a_row_of_each():
    made = runpy.run_path(str(ROOT / "docs/methods.py"))
    page = PAGES["docs/explanation/methods.md"]
    assert made["tables"]() in page, "make it again: python docs/methods.py"
    for name in METHODS:
        assert len(re.findall(rf"^\| \[.*algorithms/{name}\.py\) \|", page, flags=re.MULTILINE)) == 1


def test_docs__every_picture_is_made_and_shown():
    files = {path.stem for path in (ROOT / "docs/images").iterdir()}
    shown = {name for text in PAGES.values() for name in re.findall(r"images/([\w.-]+)\.png\)", text)}
    assert files == set(PICTURES) == shown


# commands


def split(line):
    """The commands of a line, each as words, without comments and settings of the environment."""
    for part in line.split(" && "):
        if words := shlex.split(part, comments=True):
            yield words[next(i for i, word in enumerate(words) if not re.match(r"[A-Z_]+=", word)) :]


def unrolled(code):
    """A script whose loops, `for lr in 0.1 0.2; do` to `done`, are written out."""

    def written_out(loop):
        name, values, body = loop.groups()
        return "".join(body.replace(f"${name}", value) for value in values.split())

    return re.sub(r"^for (\w+) in ([^;]+); do\n(.*?)^done$", written_out, code, flags=re.DOTALL | re.MULTILINE)


def commands(text):
    """The commands of a page: in fences, and those in its text that begin with python."""
    lines = []
    for block in blocks(text, "sh", "console"):
        code = unrolled(block.code.replace("\\\n", " "))
        lines += [line.removeprefix("$ ") for line in code.splitlines() if block.language == "sh" or line[:2] == "$ "]
    lines += [" ".join(found.split()) for found in re.findall(r"`(python [^`]+)`", prose(text))]
    return [words for line in lines for words in split(line)]


EVERY = {tuple(words): page for page, text in PAGES.items() for words in commands(text) if page != "CHANGELOG.md"}
EVERY = {words: page for words, page in EVERY.items() if not set(EXAMPLES) & {*",".join(words).split(",")}}
EVERY |= {tuple(words): "docs/pictures.py" for picture in PICTURES.values() for words in split(picture.commands)}
TOOLS = {"pytest", "ruff", "mypy", "mkdocs", ".ci/run", "export", "flwr", "flower-superlink", "flower-supernode"}
"""Commands whose arguments are theirs."""


class Parsed(Exception):
    """The arguments were taken; nothing has run."""


def main_of(name):
    """What `python -m` calls in a module, or in a package."""
    module = importlib.import_module(name)
    return module.main if hasattr(module, "main") else importlib.import_module(f"{name}.__main__").main


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(w, id=" ".join(w), marks=[] if page == "README.md" else pytest.mark.slow)
        for w, page in EVERY.items()
    ],
)
def test_docs__commands_are_there_and_take_their_arguments(words, tmp_path, monkeypatch):
    """Settings of runs pass their checks; other commands end when their arguments are parsed."""

    def ending(parser):
        def parsed(first, *args, **settings):
            if inspect.isfunction(first):  # which tyro calls with the arguments

                @functools.wraps(first)
                def end(*_, **__):
                    raise Parsed

                first = end
            raise Parsed(parser(first, *args, **settings))

        return parsed

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Experiment, "read", lambda *_, **__: Experiment())
    (tmp_path / "my_module.py").write_text("import torch\n\nload = MyNet = torch.nn.Identity\n")
    match words:
        case ("python", "-m", "fl.run", *arguments) if "--help" in arguments:
            with pytest.raises(SystemExit, match="0"):
                parse(arguments)
        case ("python", "-m", "fl.run", *arguments):
            parse(arguments).experiment.check()
        case ("python", "-m", "benchmarks.papers", name, *flags) if name in RECIPES:
            with nullcontext() if "--help" not in flags else pytest.raises(SystemExit, match="0"):
                parse([name, *flags], RECIPES).experiment.check()
        case ("torchrun", *arguments):
            given = torchrun_arguments().parse_args(arguments)
            assert given.module
            assert given.training_script == "fl.run"
            parse(list(given.training_script_args)).experiment.check()
        case ("python", "-m", "fl", *arguments):
            assert not arguments or arguments[0] in COMMANDS
        case ("python", "-m", module):
            main_of(module)
        case ("python", "-m", module, *arguments):
            main = main_of(module)
            monkeypatch.setattr(tyro, "cli", ending(tyro.cli))
            monkeypatch.setattr(argparse.ArgumentParser, "parse_args", ending(argparse.ArgumentParser.parse_args))
            with pytest.raises(SystemExit if "--help" in words else Parsed):
                main(arguments)
        case ("python", "docs/pictures.py", *names):
            assert set(names) <= {*PICTURES, "NAME..."}
        case ("python", script, *arguments) if script.startswith("benchmarks/"):
            monkeypatch.setattr(sys, "argv", [script, *arguments])
            monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
            monkeypatch.setattr(argparse.ArgumentParser, "parse_args", ending(argparse.ArgumentParser.parse_args))
            with pytest.raises(Parsed):
                runpy.run_path(str(ROOT / script), run_name="__main__")
        case ("python", script, *_):
            assert (ROOT / script).is_file()
        case ("pip", "install", *arguments):
            extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
            assert set(re.findall(r"\[(\w+)\]", " ".join(arguments))) <= set(extras)
        case ("benchmarks/gpu.sh", *parts):
            source = (ROOT / words[0]).read_text()
            for part in parts:
                assert (
                    part.startswith("--")
                    or part == "cpu"
                    or re.search(rf"^ +(.* \| )?{re.escape(part)}( \| .*)?\)", source, re.MULTILINE)
                )
        case (tool, *_):
            assert tool in TOOLS


SHORT = ("fl", "fl.data", "zoo")
"""Modules that take a moment: what they print is compared with the page."""
CONSOLES = [
    pytest.param(block, id=f"{page}:{block.line}", marks=[pytest.mark.slow] if "-m zoo" in block.code else [])
    for page, text in PAGES.items()
    for block in blocks(text, "console")
    if block.code.split()[3] in SHORT
]


@pytest.mark.parametrize("block", CONSOLES)
def test_docs__short_commands_print_what_the_page_says(block, tmp_path, monkeypatch, capsys):
    line, _, output = block.code.replace("\\\n", " ").partition("\n")
    ((_, _, module, *arguments),) = split(line.removeprefix("$ "))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [module, *arguments])
    assert importlib.import_module(f"{module}.__main__").main() == 0
    assert capsys.readouterr().out == output


SHOWN = ("results ", "figure", "table ", "resume ", "compare ", "settings ", "grid:", "method  ", "model  ")
"""How lines begin that do not depend on the machine."""
LITTLE = ("--local-epochs", "1", "--width", "0.25", "--samples", "400")
"""With these a new run takes seconds. They change neither its name nor its number of rounds."""
TARGETS = {"0.9": "0.15"}
"""Accuracies that such a run reaches, in the place of the pages'."""


@pytest.mark.slow
@pytest.mark.drawn
@pytest.mark.parametrize("page", ["docs/tutorial.md", "docs/guides/resume.md", "docs/guides/secure.md"])
def test_docs__commands_run(page, tmp_path, monkeypatch, capsys):
    """One after another; each prints the table heads, and says where it left the files, as the page shows it."""
    monkeypatch.chdir(tmp_path)
    for words in commands(PAGES[page]):
        if words[0] == "python" and words[2:4] != ["fl", "deploy"]:  # processes of Flower's, which its own tests start
            assert words[1] == "-m"
            new = words[2] == "fl.run" and "--resume" not in words
            arguments = [TARGETS.get(word, word) for word in words[3:]]
            assert main_of(words[2])([*arguments, *(LITTLE if new else ())]) == 0, words
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    for line in [line for block in blocks(PAGES[page], "console") for line in block.code.splitlines()]:
        words = line.split()  # the command that is proposed goes on with the flags of LITTLE
        assert not line.startswith(SHOWN) or any(words == found[: len(words)] for found in printed), line


@pytest.mark.nightly
def test_docs__the_hospitals_train_and_answer(tmp_path, monkeypatch, capsys):
    """The page's commands, with two rounds each, on the notes that its code writes."""
    monkeypatch.chdir(tmp_path)
    page, scope = PAGES["docs/guides/hospitals.md"], {}
    for block in blocks(page, "python"):
        exec(block.code, scope)
    for words in commands(page):
        if words[:3] == ["python", "-m", "fl.run"]:
            assert main_of("fl.run")([*words[3:], "--rounds", "2"]) == 0
        elif words[:3] == ["python", "-m", "fl.export"]:
            assert main_of("fl.export")(words[3:]) == 0
    head = next(line for block in blocks(page, "console") for line in block.code.splitlines() if line[:6] == "method")
    headings = [text for text in re.split(" {2,}", head) if text != "last-10 acc. %"]  # which takes ten rounds
    assert re.search(" +".join(map(re.escape, headings)), capsys.readouterr().out)
    assert isinstance(scope["answer"](fl.load_model("runs/hospitals/flexlora-seed0").eval(), "A rash."), str)


@pytest.mark.nightly
@pytest.mark.drawn
def test_docs__the_tutorials_pair_prints_the_rows_of_the_page(tmp_path, monkeypatch, capsys):
    """As the page trains it, up to what another kind of processor rounds; the last column, seconds, is of a machine."""
    monkeypatch.chdir(tmp_path)
    page = PAGES["docs/tutorial.md"]
    for words in [words for words in commands(page) if "pair" in words or {"runs/pair", "--target"} <= {*words}]:
        assert main_of(words[2])(list(words[3:])) == 0
    printed, shown = (
        [line.split()[:-1] for line in text.splitlines() if re.match(r"fed(avg|mr) +2 ", line)]
        for text in (capsys.readouterr().out, page)
    )
    assert len(shown) == 4
    assert printed[:2] == printed[2:4]  # which the page shows once
    assert_similar(printed[2:], shown)


def assert_similar(printed, shown):
    """Numbers are near, all other words are the same."""
    assert [len(row) for row in printed] == [len(row) for row in shown]
    for found, expected in ((a, b) for rows in zip(printed, shown) for a, b in zip(*rows)):
        if re.fullmatch(r"[\d.]+", expected):
            assert float(found) == pytest.approx(float(expected), rel=0.35, abs=2.5)
        else:
            assert found == expected


@pytest.mark.slow
def test_docs__the_readmes_methods_print_its_table(tmp_path, monkeypatch, capsys):
    """Up to what another kind of processor rounds; the last column, seconds, is of a machine."""
    monkeypatch.chdir(tmp_path)
    (code,) = [block.code for block in blocks(PAGES["README.md"], "python") if "simulate_all" in block.code]
    (table,) = [block.code for block in blocks(PAGES["README.md"], "text")]
    exec(compile(code, "README.md", "exec"), {})
    assert_similar(*([line.split()[:-1] for line in text.splitlines()] for text in (capsys.readouterr().out, table)))


# tables of stored results


def test_docs__what_others_can():
    from benchmarks import others

    stored = json.loads((RESULTS / "others.json").read_text())
    found = stored["claims"]
    assert found.keys() == others.CLAIMS.keys()
    assert all(claim["holds"] for claim in found.values())
    check_sentences(others.sentences(stored), others.marked)


def test_docs__jobs_beside_other_tools(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    jobs, others = (importlib.import_module(f"benchmarks.{name}") for name in ("jobs", "others"))
    stored = json.loads((RESULTS / "jobs.json").read_text())
    check_sentences(jobs.sentences(stored), lambda job: others.marked(job, "jobs.py"))
    for job, sides in jobs.JOBS.items():
        lines = {side: sum(map(jobs.count_lines, functions)) for side, functions in sides.items()}
        assert lines == {side: row["lines"] for side, row in stored["jobs"][job].items()}


def check_sentences(sentences, marked):
    """Look for each sentence behind its mark on its page."""
    for name, (page, text) in sentences.items():
        after = PAGES[page].partition(marked(name))[2].lstrip("\n")
        assert " ".join(after.split("\n\n")[0].split()) == text


def test_docs__launches_before_and_after(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    before, after = (json.loads((RESULTS / f"{name}.json").read_text()) for name in ("launches-before", "launches"))
    heads, _, *rows = importlib.import_module("launches").compare(before["rows"], after["rows"]).splitlines()
    assert heads.startswith("| model | step: loop | vmap | round: loop |")
    assert "| lenet | 45 | 76 | 244 -> 235 | 234 -> 225 | 53 -> 44 | 209 -> 135 | 4 |" in rows


@pytest.mark.parametrize(
    ("page", "setting"),
    [
        ("README.md", "dirichlet0.5"),
        ("README.md", "dirichlet0.1"),
        ("docs/results/index.md", "dirichlet0.5"),
        ("docs/results/index.md", "momentum0.5"),
    ],
)
def test_docs__fedmrs_accuracies_are_means_over_seeds_of_the_last_ten_evaluations(page, setting):
    assert "last ten" in PAGES[page]
    for method in ("fedmr", "fedavg"):
        runs = sorted((RESULTS / "fashion-mnist-rivals" / setting).glob(f"{method}-seed*.csv"))
        rows = [[float(row["accuracy"]) for row in csv.DictReader(run.open()) if row["accuracy"]] for run in runs]
        mean = 100 * sum(sum(each[-10:]) / 10 for each in rows) / len(rows)
        assert f"{mean:.{2 if page == 'README.md' else 1}f}%" in PAGES[page]


def test_docs__the_readmes_results_are_those_of_the_pages():
    """Every number of its table stands on the page that the row leads to, or in the overview of these pages."""
    rows = re.findall(r"^\| \[.*\]\((docs/results/\w+\.md)\) \|(.*)\|.*\|$", PAGES["README.md"], flags=re.MULTILINE)
    assert len(rows) == 6
    papers = PAGES["docs/results/papers.md"] + (ROOT / "docs/results/papers.csv").read_text()
    rounded = {f"{float(number):.{digits}f}" for number in re.findall(r"\d+\.\d+", papers) for digits in (1, 2)}
    for page, result in rows:
        for value in re.findall(r"\d+\.\d+|\b\d\d\b", result):
            assert value in PAGES[page] or value in PAGES["docs/results/index.md"], (page, value)
            assert value in papers or value in rounded or page.endswith(("surgery.md", "engine.md")), (page, value)


def test_docs__the_times_of_widths(monkeypatch, capsys):
    pytest.importorskip("torch_pruning")
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    runpy.run_path(str(ROOT / "benchmarks/width_speed.py"))["table"]()
    assert capsys.readouterr().out in PAGES["docs/results/surgery.md"]


@pytest.mark.slow
def test_docs__the_barriers(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    alignment = runpy.run_path(str(ROOT / "benchmarks/alignment.py"))
    rows = json.loads((RESULTS / "alignment-cpu.json").read_text())["rows"]
    assert alignment["table"](rows) in PAGES["docs/results/surgery.md"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["narrow", "plan", "permute", "align", "widen", "deepen", "merge", "files", "informed"]
)
def test_docs__claims_of_ours_hold(name):
    from benchmarks import others

    others.CLAIMS[f"ours_{name}"]()

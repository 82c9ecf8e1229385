"""Commands of the README and of docs/ are there and take their arguments; short ones print what the pages say."""

import argparse
import importlib
import re
import runpy
import shlex
import sys
import tomllib

import pytest
import tyro
from doc_pages import EXAMPLES, PAGES, ROOT, blocks
from torch.distributed.run import get_args_parser as torchrun_arguments

from fl.__main__ import COMMANDS
from fl.settings import Config
from fl.settings.command_line import parse
from fl.sweep import command as parse_sweep

PICTURES = runpy.run_path(str(ROOT / "docs/pictures.py"))["PICTURES"]
SHORT = ("fl", "fl.data", "zoo")
"""Modules that take a moment: what they print is compared with the page."""
RUN = ("docs/tutorial.md", "docs/guides/resume.md", "docs/guides/secure.md")
"""Pages whose commands are run, one after another in one folder, by the slow tests."""


class Parsed(Exception):
    """The arguments were taken; nothing has run."""


def split(line):
    """The commands of a line, each as words, without comments and settings of the environment."""
    for part in re.split(r" && ", line):
        if words := shlex.split(part, comments=True):
            yield words[next(i for i, word in enumerate(words) if not re.match(r"[A-Z_]+=", word)) :]


def commands(text):
    """The commands of a page: in fences, and those in its text that begin with python."""
    lines = []
    for block in blocks(text, "sh", "console"):
        code = block.code.replace("\\\n", " ")
        lines += [line.removeprefix("$ ") for line in code.splitlines() if block.language == "sh" or line[:2] == "$ "]
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    lines += [" ".join(found.split()) for found in re.findall(r"`(python [^`]+)`", prose)]
    return [words for line in lines for words in split(line)]


EVERY = {tuple(words): page for page, text in PAGES.items() for words in commands(text)}
EVERY = {words: page for words, page in EVERY.items() if not set(EXAMPLES) & {*",".join(words).split(",")}}
EVERY |= {tuple(words): "docs/pictures.py" for picture in PICTURES.values() for words in split(picture.commands)}


@pytest.fixture
def nothing_runs(monkeypatch):
    """Commands end when their arguments are parsed."""

    def ending(parser):
        def parse(*args, **settings):
            raise Parsed(parser(*args, **settings))

        return parse

    monkeypatch.setattr(tyro, "cli", ending(tyro.cli))
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", ending(argparse.ArgumentParser.parse_args))


def test_commands_were_found():
    assert len(EVERY) > 80


def are(*start):
    """The commands that begin with one of these, as parameters of a test."""
    found = [words for words in EVERY if words[:3] in start or words[:2] in start or words[:1] in start]
    return pytest.mark.parametrize("words", found, ids=" ".join)


def main_of(name):
    """What `python -m` calls in a module, or in a package."""
    module = importlib.import_module(name)
    return module.main if hasattr(module, "main") else importlib.import_module(f"{name}.__main__").main


MODULE = ("python", "-m")
RUNS = ((*MODULE, "fl.run"), (*MODULE, "fl.sweep"))


def test_all_commands_are_known():
    assert len(EVERY) > 80
    known = {*RUNS, MODULE, ("python",), ("pip", "install"), ("benchmarks/gpu.sh",), ("torchrun",), ("export",)}
    flower = {("flwr",), ("flower-superlink",), ("flower-supernode",)}
    tools = {
        ("pytest",),
        ("ruff",),
        ("mypy",),
        ("mkdocs",),
        (".ci/run",),
    } | flower  # used by .ci/run, with arguments of their own
    for words in EVERY:
        assert {words[:1], words[:2], words[:3]} & (known | tools), words


@are(*RUNS)
def test_settings_of_runs_are_valid(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_module.py").write_text("import torch\n\nload = MyNet = torch.nn.Identity\n")
    arguments = list(words[3:])
    if "--help" in arguments:
        with pytest.raises(SystemExit, match="0"):
            parse(arguments)
    elif words[2] == "fl.run" or "--resume" in arguments:
        parse(arguments, read=lambda _: Config())[0].check()
    else:
        sweep = parse_sweep(arguments)[0]
        for runs in sweep.runs(tmp_path).values():
            for config in runs.values():
                config.check()


@are(("torchrun",))
def test_torchrun_starts_a_run_with_valid_settings(words):
    said = torchrun_arguments().parse_args(list(words[1:]))
    assert said.module
    assert said.training_script == "fl.run"
    parse(list(said.training_script_args), read=lambda _: Config())[0].check()


@are(MODULE)
def test_modules_take_their_arguments(words, nothing_runs):
    importlib.import_module(words[2])
    if (*MODULE, words[2]) in RUNS or words[2:] == ("fl",):  # the tests above and below
        return
    if words[2] == "fl":
        assert words[3] in COMMANDS
        return
    with pytest.raises(SystemExit if "--help" in words else Parsed):
        main_of(words[2])(list(words[3:]))


@are(("python",))
def test_scripts_take_their_arguments(words, nothing_runs, monkeypatch):
    script, *arguments = words[1:]
    if script == "-m":
        return
    if script == "docs/pictures.py":
        assert set(arguments) <= {*PICTURES, "NAME..."}
    elif script.startswith("benchmarks/"):
        monkeypatch.setattr(sys, "argv", [script, *arguments])
        monkeypatch.setattr(sys, "path", [str(ROOT / "benchmarks"), *sys.path])
        with pytest.raises(Parsed):
            runpy.run_path(str(ROOT / script), run_name="__main__")
    else:
        assert (ROOT / script.removeprefix(f"{ROOT}/")).is_file()


@are(("pip", "install"))
def test_what_is_installed_is_an_extra(words):
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(re.findall(r"\[(\w+)\]", " ".join(words))) <= set(extras)


@are(("benchmarks/gpu.sh",))
def test_the_gpu_script_has_the_part(words):
    source = (ROOT / words[0]).read_text()
    for word in words[1:]:
        assert re.search(rf"^ +(.* \| )?{re.escape(word)}( \| .*)?\)", source, re.MULTILINE) or word == "cpu"


CONSOLES = [
    pytest.param(block, id=f"{page}:{block.line}", marks=[pytest.mark.slow] if "-m zoo" in block.code else [])
    for page, text in PAGES.items()
    for block in blocks(text, "console")
    if block.code.split()[3] in SHORT
]


@pytest.mark.parametrize("block", CONSOLES)
def test_short_commands_print_what_the_page_says(block, tmp_path, monkeypatch, capsys):
    line, _, output = block.code.partition("\n")
    ((_, _, module, *arguments),) = split(line.removeprefix("$ "))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [module, *arguments])
    assert importlib.import_module(f"{module}.__main__").main() == 0
    assert capsys.readouterr().out == output


SAID = ("results ", "figure", "table ", "train on ", "compare ", "settings ", "grid:", "method  ", "model  ")
"""How lines begin that do not depend on the machine."""


LITTLE = ("--local-epochs", "1", "--width", "0.25", "--samples", "400")
"""With these a new run takes seconds. They change neither its name nor its number of rounds."""
TARGETS = {"0.9": "0.15"}
"""Accuracies that such a run reaches, in the place of the pages'."""


@pytest.mark.slow
@pytest.mark.drawn
@pytest.mark.parametrize("page", RUN)
def test_commands_run(page, tmp_path, monkeypatch, capsys):
    """One after another; each prints the table heads, and says where it left the files, as the page shows it."""
    monkeypatch.chdir(tmp_path)
    for words in commands(PAGES[page]):
        if words[0] == "python":
            assert words[1] == "-m"
            new = words[2] in ("fl.run", "fl.sweep") and "--resume" not in words
            arguments = [TARGETS.get(word, word) for word in words[3:]]
            assert main_of(words[2])([*arguments, *(LITTLE if new else ())]) == 0, words
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    shown = [line for block in blocks(PAGES[page], "console") for line in block.code.splitlines()]
    for line in shown:
        words = line.split()  # the command that is proposed goes on with the flags of LITTLE
        assert not line.startswith(SAID) or any(words == found[: len(words)] for found in printed), line


@pytest.mark.slow
@pytest.mark.drawn
def test_the_tutorials_pair_prints_the_rows_of_the_page(tmp_path, monkeypatch, capsys):
    """As the page trains it; the last column, seconds, is of a machine."""
    monkeypatch.chdir(tmp_path)
    page = PAGES["docs/tutorial.md"]
    for words in [words for words in commands(page) if "pair" in words or {"runs/pair", "--target"} <= {*words}]:
        assert main_of(words[2])(list(words[3:])) == 0
    printed = [line.split()[:-1] for line in capsys.readouterr().out.splitlines()]
    shown = [line.split()[:-1] for line in page.splitlines() if re.match(r"fed(avg|mr) +2 ", line)]
    assert len(shown) == 6
    assert [row for row in printed if row in shown] == shown


def test_every_picture_is_made_and_shown():
    files = {path.stem for path in (ROOT / "docs/images").iterdir()}
    shown = {name for text in PAGES.values() for name in re.findall(r"images/([\w.-]+)\.png\)", text)}
    assert files == set(PICTURES) == shown

"""The Python of the README and of docs/ runs as printed, and what pages name is there."""

import dataclasses
import os
import re
import shutil
import subprocess
import sys

import pytest
import yaml
from doc_pages import EXAMPLES, PAGES, ROOT, blocks
from selection import some

import fl
import surgery
import zoo
from fl.algorithms import ALGORITHMS
from fl.data import LOADERS
from surgery.depth.adapters import BLOCKS
from surgery.width.rules.registry import RULES
from zoo.members import MEMBERS

METHODS = dict(ALGORITHMS)


@pytest.fixture
def registered():
    """The methods that a page adds; they go away again, as do its data sets, models, rules and blocks."""
    tables = [ALGORITHMS, LOADERS, MEMBERS, RULES, BLOCKS]
    before = [dict(table) for table in tables]
    yield lambda: ALGORITHMS.keys() - before[0].keys()
    for table, content in zip(tables, before, strict=True):
        table.clear()
        table.update(content)


WITH_PYTHON = [page for page, text in PAGES.items() if blocks(text, "python")]
LONG = ("docs/guides/surgery.md", "docs/guides/levels.md", "docs/guides/method.md", "docs/guides/architectures.md")


@pytest.mark.parametrize("page", some(WITH_PYTHON, [page for page in WITH_PYTHON if page not in LONG]))
def test_python_runs_as_printed(page, registered, capsys, monkeypatch, tmp_path):
    """The blocks of a page share their names, from top to bottom."""
    monkeypatch.chdir(tmp_path)
    scope = {}
    for block in blocks(PAGES[page], "python"):
        exec(compile("\n" * block.line + block.code, page, "exec"), scope)
        printed = capsys.readouterr().out
        for line in re.findall(r"print\(.*#\s*(.*)", block.code):
            assert line in printed
        if block.output:
            assert printed == block.output
    for name in registered():
        assert_sound(name)


def assert_sound(name):
    """Predictions are numbers, also of batch norm; what attackers send and defences cut reaches the global model."""
    after = {}
    for case, settings in {
        "plain": {},
        "attacked": {"attack": fl.AttackOptions(0.5, 3.0)},
        "clipped": {"defence": fl.Defence(clip=0.5)},
        "median": {"defence": fl.Defence("median")},
    }.items():
        config = fl.Config(
            algorithm=(name,), rounds=3, model="resnet9", width=0.25, local_epochs=1, batch_size=100, participation=1.0,
            clients=4, partition="iid", samples=400, **settings,
        )  # fmt: skip
        fed, algorithm = fl.build(config)
        server = algorithm.init()
        for number in (1, 2, 3):
            rng = fl.Rng(0, number)
            server, _ = algorithm.round(server, fed.sample(rng), rng)
        assert algorithm.predict(server, fed.data.test_x, None).isfinite().all()
        after[case] = server["global"]["stem.conv.weight"]
    assert len({tensor.sum().item() for tensor in after.values()}) == 4


@pytest.mark.slow
def test_a_method_is_one_file(tmp_path):
    """The guide's, put where it says, and run as it says."""
    shutil.copytree(ROOT / "fl", tmp_path / "fl")
    guide = PAGES["docs/guides/method.md"]
    (tmp_path / "fl/algorithms/fedavgm.py").write_text(blocks(guide, "python")[0].code)
    _, *words = blocks(guide, "sh")[0].code.split()
    assert "fedavgm" in words[3]
    paths = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    subprocess.run([sys.executable, *words, "--rounds", "2"], cwd=tmp_path, env={**os.environ, **paths}, check=True)
    assert "fedavgm" in next(tmp_path.glob("runs/*/comparison.txt")).read_text()


def test_the_readme_is_short_and_has_the_two_commands():
    lines = PAGES["README.md"].splitlines()
    assert len(lines) <= 200
    assert "pip install -e . && python -m fl.run" in lines
    assert "pip install -e '.[dev]' && pytest" in lines


def anchors(text):
    """The places of a page that links may name, as GitHub and the site make them of headings."""
    headings = re.findall(r"^#+ (.*)", re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE), re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", heading.lower()).strip() for heading in headings]
    return {re.sub(r" +", "-", heading) for heading in plain}


@pytest.mark.parametrize("page", PAGES)
def test_links_and_paths_lead_somewhere(page):
    text = PAGES[page]
    for target, anchor in re.findall(r"\]\((?!\w+:)([^)#\s]*)(?:#([^)\s]+))?\)", text):
        path = ((ROOT / page).parent / target).resolve() if target else ROOT / page
        assert path.exists(), target
        if anchor and not anchor.startswith("surgery."):  # whose places mkdocstrings makes
            assert anchor in anchors(path.read_text()), f"{target}#{anchor}"
    for target in re.findall(r"`((?:fl|surgery|zoo|tests|docs|benchmarks)/[\w/.\-]*)`", text):
        assert any(example in target for example in EXAMPLES) or (ROOT / target).exists(), target


def test_the_site_has_every_page():
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text())

    def leaves(part):
        if isinstance(part, str):
            return {part}
        return set().union(*map(leaves, part.values() if isinstance(part, dict) else part))

    written = {page.removeprefix("docs/") for page in PAGES if page.startswith("docs/")}
    assert leaves(settings["nav"]) == written | {"index.md", "contributing.md", "changelog.md"}


@pytest.mark.parametrize("package", [surgery, zoo, fl], ids=lambda package: package.__name__)
def test_the_reference_has_all_that_a_package_exports(package):
    page = PAGES[f"docs/reference/{package.__name__}.md"]
    documented = re.findall(rf"^::: {package.__name__}\.(?:\w+\.)*(\w+)$", page, flags=re.MULTILINE)
    assert set(package.__all__) <= set(documented)


@pytest.mark.parametrize("name", METHODS)
def test_the_pages_tell_of_every_method_and_option(name):
    assert f"| `{name}` |" in PAGES["README.md"]
    rows = re.findall(r"^\| .*\| `(\w+)\.py` \| (.*) \|$", PAGES["docs/explanation/methods.md"], flags=re.MULTILINE)
    options = dict(rows)[name]
    if inherits := re.search(r"those of (\w+)", options):
        options += dict(rows)[inherits[1].lower()]
    told = set(re.findall(r"`(\w+)`", options))
    assert told == {field.name for field in dataclasses.fields(METHODS[name].options or Nothing)}


@dataclasses.dataclass
class Nothing:
    """The options of a method without any."""

"""The tables of docs/results/surgery.md are those that the stored results make."""

import json
import re
import runpy

import pytest
from doc_pages import PAGES, ROOT

from fl.papers.earlier import fedmr_accuracy

PAGE = PAGES["docs/results/surgery.md"]
RESULTS = ROOT / "benchmarks" / "results"


def test_what_others_can():
    from benchmarks import others

    found = json.loads((RESULTS / "others.json").read_text())["claims"]
    assert found.keys() == others.CLAIMS.keys()
    assert others.table(found) in PAGE


@pytest.mark.parametrize("page", ["README.md", "docs/results/index.md"])
def test_fedmrs_accuracies_are_the_means_of_the_papers_page(page):
    """As on the papers' page: of the last ten evaluations, computed from the stored rows."""
    _, said = fedmr_accuracy()
    at_half, _, slower = said.split("; ")
    text = PAGES[page]
    assert "last ten" in text
    for number in re.findall(r"(?:FedMR|FedAvg|fedavg) (\d+\.\d%)", f"{at_half} {slower}"):
        assert number in text


@pytest.mark.slow
def test_the_barriers(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    alignment = runpy.run_path(str(ROOT / "benchmarks" / "alignment.py"))
    assert alignment["table"](json.loads((RESULTS / "alignment-cpu.json").read_text())["rows"]) in PAGE


@pytest.mark.slow
@pytest.mark.parametrize("name", ["narrow", "plan", "permute", "align", "widen", "deepen", "merge", "informed"])
def test_claims_of_ours_hold(name):
    from benchmarks import others

    others.CLAIMS[f"ours_{name}"]()

"""The tables of docs/results/surgery.md are those that the stored results make."""

import json
import runpy

import pytest
from doc_pages import PAGES, ROOT

PAGE = PAGES["docs/results/surgery.md"]
RESULTS = ROOT / "benchmarks" / "results"


def test_what_others_can():
    from benchmarks import others

    found = json.loads((RESULTS / "others.json").read_text())["claims"]
    assert found.keys() == others.CLAIMS.keys()
    assert others.table(found) in PAGE


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

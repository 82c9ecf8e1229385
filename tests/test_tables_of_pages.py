"""The tables of docs/results/surgery.md are those that the stored results make."""

import csv
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


def last_ten(setting, method):
    """The mean over seeds of a stored run's last ten evaluations, in percent."""
    runs = sorted((RESULTS / "fashion-mnist-rivals" / setting).glob(f"{method}-seed*.csv"))
    rows = [[float(row["accuracy"]) for row in csv.DictReader(run.open()) if row["accuracy"]] for run in runs]
    return f"{100 * sum(sum(each[-10:]) / 10 for each in rows) / len(rows):.1f}%"


@pytest.mark.parametrize("page", ["README.md", "docs/results/index.md"])
@pytest.mark.parametrize("setting", ["dirichlet0.5", "momentum0.5"])
def test_fedmrs_accuracies_are_means_of_the_last_ten_evaluations(page, setting):
    text = PAGES[page]
    assert "last ten" in text
    if page != "README.md" or setting == "dirichlet0.5":
        assert last_ten(setting, "fedmr") in text
        assert last_ten(setting, "fedavg") in text


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

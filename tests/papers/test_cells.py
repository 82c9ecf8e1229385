"""The papers' cells: what they are called, and that they can be run."""

import pytest
import torch
from refusals import fl_refused

from benchmarks.papers import CLAIMS, adapters, cells, find, page
from benchmarks.papers.cell import PAPERS, SMALLER, Cell, Comparison, Published
from benchmarks.papers.recipes import fedmr, femam
from benchmarks.papers.stored import Stored
from benchmarks.papers.verdict import MEASURES, Result, result


def test_cells__all_tables_and_figures_with_results_have_a_cell():
    assert all(cell.id == name and find(name) is cell for name, cell in cells().items())
    places = {paper: {cell.place for cell in cells().values() if cell.paper == paper} for paper in PAPERS}
    assert {"Table 1", *(f"Fig. {k}" for k in range(5, 13))} <= places["fedmr"]
    assert {"Table 1", "Table 2", "Table C.2", "Table C.3", "Table C.4", "Figs. 3, C.6, C.8", "Figs. 4, A.1, C.2, C.4",
            "Fig. 5a", "Fig. 5b"} <= places["femam"]  # fmt: skip
    assert {"Table 1", "Table 1, Fig. 3", "Table 2", "Table 3", "Tables 4 to 6", "Tables 7 to 9", "Table 10",
            "Figs. 7 to 9"} <= places["fedfa"]  # fmt: skip


@pytest.mark.nightly
def test_cells__settings_of_all_runs_pass_the_checks():
    """Each once: runs of one table are alike but for their method."""
    seen = set()
    for cell in cells().values():
        for arm in cell.arms:
            key = repr(arm.experiment if cell.paper == "fedfa" else arm.experiment.replace(algorithms=("fedavg",)))
            if key not in seen:
                arm.experiment.check()
                seen.add(key)


def test_cells__the_base_of_the_adapters_is_made_by_a_command_and_gets_a_new_classifier(tmp_path, monkeypatch):
    pytest.importorskip("timm")
    monkeypatch.setenv("FL_DATA_ROOT", str(tmp_path))
    with fl_refused("file", "benchmarks.papers"):
        adapters.net()
    base = adapters.network(100).state_dict()
    torch.save(base, adapters.file())
    made = adapters.net().state_dict()
    assert made.keys() == base.keys()
    assert {name for name in base if not torch.equal(made[name], base[name])} == {"head.weight", "head.bias"}


def test_cells__runs_of_one_name_are_the_same_runs():
    known = {}
    for cell in cells().values():
        for arm in cell.arms:
            runs = (arm.config, arm.experiment.seeds)
            assert known.setdefault(arm.run, runs) == runs, arm.run
            assert len(arm.experiment.algorithms) == 1
    assert len({run.rpartition("/")[0] for run in known}) > 100


def test_cells__comparisons_fit_their_cells():
    for cell in cells().values():
        for one in cell.comparisons:
            assert one.measure in MEASURES or one.measure.startswith("tmac")
            assert len(one.published) == (len(one.arms) if one.kind == "numbers" else 0)
            assert (one.band is not None) == (one.kind in ("ratio", "drop", "above"))
            assert len(one.arms) == {"ratio": 2, "drop": 4, "above": 1}.get(one.kind, len(one.arms))
    with fl_refused("argument", "fedmr.a"):
        Cell("fedmr.a", "", "", (), (Comparison("", "late", "first", ("fedmr",)),))
    with fl_refused("argument", "'FedMR.table1'"):
        Cell("FedMR.table1", "Table 1", "")


def test_cells__numbers_are_those_of_the_recipes():
    config = find("fedmr.table1.cifar10.lenet.dir0.5").arm("fedmr").config
    settings = (config.model.name, config.local.momentum, config.method.options.unit, config.rounds)
    assert settings == ("lenet", 0.5, "layer", 500)
    for name, at, method, number in (
        ("fedmr.table1.cifar10.lenet.dir0.5", 0, "fedmr", Published(59.81, 0.60)),
        ("fedmr.table1.cifar10.lenet.dir0.5", 0, "fedavg", Published(54.42, 0.76)),
        ("femam.table1.cifar100.client0.1", 0, "femam", Published(61.96, 0.48)),
        ("femam.table1.cifar100.client0.1", 1, "ditto", Published(30.71, 0.34)),
    ):
        comparison = find(name).comparisons[at]
        assert dict(zip(comparison.arms, comparison.published))[method] == number
    for (data, model, spread), row in fedmr.NUMBERS.items():
        end = "" if data == "femnist" else f".{spread}"
        (one,) = find(f"fedmr.table1.{data}.{model}{end}").comparisons
        assert {name: str(number) for name, number in zip(one.arms, one.published)} == row
    assert sum(name.startswith(("femam.table1", "femam.tablec")) for name in cells()) == 2 * len(femam.TABLE)


@pytest.mark.nightly
def test_cells__what_was_run_before_there_were_cells_is_judged_as_the_pages_show_it():
    smaller = {name: result(cell) for name, cell in cells().items() if cell.place == SMALLER}
    # These have no column with Fig. 6's own measure of the similarity; the runs with Hsu et al.'s split have it.
    cosines = {name for name in smaller if name.startswith("fedmr.smaller.cosine.")}
    older = cosines - {"fedmr.smaller.cosine.cifar10-hsu"}
    assert {smaller[name].rounds for name in older} == {0}
    whole = [one for name, one in smaller.items() if name not in older and any(arm.tables for arm in one.cell.arms)]
    assert all(one.rounds == one.asked for one in whole)
    for method, mean, seeds in (("fedmr", 83.49, 2), ("clusamp", 86.66, 2), ("fedasam", 86.41, 1)):
        values = smaller["fedmr.smaller.accuracy.dir0.5"].values[0][method]
        assert (sum(values) / len(values), len(values)) == (pytest.approx(mean, abs=0.005), seeds)
    assert smaller["fedmr.smaller.accuracy.dir0.5"].verdict == "not reproduced"
    assert smaller["femam.smaller.clusters"].verdict == "ordering reproduced"  # 95.4% and Ditto's 95.1%
    one = smaller["fedfa.smaller.fashion-mnist.preresnet.noniid.depth"]
    fedfa, flexifed = (sum(values) / 2 for values in one.values[0].values())
    assert (fedfa, flexifed) == (pytest.approx(46.3, abs=0.05), pytest.approx(39.3, abs=0.05))
    assert one.verdict == "reproduced"


def test_cells__a_claim_is_judged_where_most_methods_and_then_two_seeds_were_run_and_says_these_seeds():
    (claim,) = [one for one in CLAIMS if "significantly improves" in one.text]
    split, hsu = (cells()[f"fedmr.table1.cifar10.lenet{kind}.dir0.1"] for kind in ("", "-hsu"))
    assert split.row == hsu.row
    assert cells()["fedmr.smaller.flat.cifar10"].row == cells()["fedmr.smaller.flat.cifar10-hsu"].row

    def judge(**seeds):
        results = {
            cell.id: Result(cell, 500, 500, ({name: [50.0] * n for name, n in zip(order, seeds[kind])},),
                            (word,), (), begun=True)
            for cell, kind, word in ((split, "split", "not reproduced"), (hsu, "hsu", "ordering reproduced"))
        }  # fmt: skip
        word, reason = page.judge_claim(claim, results)
        assert reason.endswith("; 1 worse in another setting") == word.startswith("ordering")
        return word, reason.partition(", ")[2].partition(" each")[0]

    order = ("fedmr", "fedavg", "fedmut")
    assert judge(split=(2, 3), hsu=(1, 1, 1)) == ("ordering reproduced", "1 seed")  # of the setting that judges
    assert judge(split=(2, 2, 2), hsu=(3, 3)) == ("not reproduced", "2 seeds")
    assert judge(split=(2, 3, 2), hsu=(3, 3, 1)) == ("not reproduced", "2 to 3 seeds")
    assert judge(split=(2, 2, 2), hsu=(2, 2, 2)) == ("ordering reproduced", "2 seeds")
    assert judge(split=(3, 3, 3), hsu=(3, 3, 2)) == ("ordering reproduced", "2 to 3 seeds")  # two seeds are enough


def test_cells__the_best_rival_is_shown_if_any_of_its_runs_is_sound():
    cell = cells()["fedmr.smaller.accuracy.dir0.5"]
    values = {"fedmr": [50.0], "fedavg": [49.0], "fedexp": [51.0], "clusamp": [52.0]}

    def run(name, seed, failed):
        return Stored(cell.arm(name).run, seed, 9, 9, "", "", "", "", "", {}, failed, ())

    runs = (run("fedavg", 0, ""), run("fedexp", 0, "diverged"), run("fedexp", 1, ""), run("clusamp", 0, "diverged"))
    one = Result(cell, 9, 9, (values,), ("not reproduced",), runs, begun=True)
    assert page._ours(one, cell.comparisons[0], values) == "fedmr 50.00 (1)<br>fedexp 51.00 (1), 1 of 2 diverged"


@pytest.mark.parametrize(
    ("name", "chances"),
    [
        ("fedfa.smaller-attacked.lambda5.digits.iid.both", [10]),
        ("fedfa.smaller-attacked.lambda5.digits.noniid.both", [10, 50]),  # two of ten classes a client
        ("fedfa.figure3.cifar100.preresnet.noniid.both", [1, 5]),
    ],
)
def test_cells__an_attacks_drop_knows_what_a_guess_reaches(name, chances):
    assert [one.chance for one in cells()[name].comparisons] == chances


def test_cells__claims_name_cells_and_comparisons_that_there_are():
    for claim in CLAIMS:
        for smaller in (False, True):
            borne = [cell for name, cell in cells().items() if claim.is_judged_by(name, smaller)]
            assert bool(borne) == bool(claim.smaller if smaller else claim.cells)
            assert all(claim.at < len(cell.comparisons) for cell in borne)

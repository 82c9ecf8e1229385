"""Cells are run in parts, what they measured is stored, and the page says what it shows."""

import csv
import json
from contextlib import nullcontext
from dataclasses import replace

import pytest
from refusals import fl_refused
from sklearn.metrics import adjusted_rand_score

import zoo
from benchmarks.papers import __main__ as command
from benchmarks.papers import page, run, stored
from benchmarks.papers.cell import Arm, Cell, Comparison, Published
from benchmarks.papers.run import Part, play
from benchmarks.papers.verdict import measure, result
from fl import AdapterOptions, AttackOptions, FLError, simulate
from fl.algorithms.femam import FeMAMOptions
from fl.extensions.attack import Attack
from fl.landscape import main as fl_landscape
from fl.settings import Experiment

TINY = Experiment.of(
    clients=4, participants=2, rounds=4, local_epochs=1, width=(0.1,), batch_size=50, seeds=(0, 1),
    samples=100,
)  # fmt: skip
NAMES = ("fedmr", "fedavg")
PAPER = Comparison("accuracy", "late", "numbers", NAMES, (Published(10.0, 50.0), Published(9.0, 50.0)))


@pytest.fixture
def cell():
    arms = tuple(Arm(f"fedmr.tiny/{name}", TINY.replace(algorithms=name)) for name in NAMES)
    return Cell("fedmr.tiny", "Table 1", "FedMR is ahead", arms, (PAPER,))


def stopping(rounds):
    """`simulate` that is interrupted after so many rounds of its first run, as by Ctrl-C."""
    left = [rounds]

    def interrupted(*args, on_round):
        def stop(row):
            left[0] -= 1
            if not left[0]:
                raise KeyboardInterrupt
            return on_round(row)

        return simulate(*args, on_round=stop)

    return interrupted


@pytest.mark.slow
def test_run__an_interrupted_cell_goes_on_and_ends_as_an_uninterrupted_one(cell, tmp_path, monkeypatch, capsys):
    part = Part(seeds=(0,), out=tmp_path / "parts", store=tmp_path / "store")
    monkeypatch.setattr(run, "simulate", stopping(2))
    with pytest.raises(KeyboardInterrupt):
        play([cell], part)
    (begun,) = stored.runs(cell.arm("fedmr"), part.store)
    assert (begun.done, begun.rounds, begun.is_over) == (2, 4, False)
    assert result(cell, part.store).begun
    assert not result(cell, part.store).rounds
    monkeypatch.setattr(run, "simulate", simulate)
    assert not play([cell], replace(part, minutes=1e-9))  # the time is over before anything is done
    capsys.readouterr()
    assert play([cell], part)
    assert capsys.readouterr().out.splitlines() == [f"fedmr.tiny/{name} seed 0: 4 of 4 rounds" for name in NAMES]
    monkeypatch.setattr(run, "simulate", lambda *_, **__: pytest.fail("finished runs are kept"))
    assert play([cell], part)

    monkeypatch.setattr(run, "simulate", simulate)
    whole = replace(part, out=tmp_path / "whole", store=tmp_path / "again")
    assert play([cell], whole)
    for name in NAMES:
        (parts,), (again,) = (stored.runs(cell.arm(name), store) for store in (part.store, whole.store))
        assert [row["round"] for row in again.rows] == [1, 2, 3, 4]
        for one, other in zip(parts.rows, again.rows):
            assert {**one, "seconds": 0} == {**other, "seconds": 0}
        assert again.command == f"python -m benchmarks.papers fedmr.tiny --algorithm {name} --seeds 0"
    assert result(cell, part.store).verdict == "reproduced"  # within the spread of 50 points
    assert result(cell, part.store).values[0]["fedmr"][0] == pytest.approx(
        25 * sum(row["accuracy"] for row in stored.runs(cell.arm("fedmr"), part.store)[0].rows)
    )
    raised = replace(cell, arms=tuple(Arm(arm.run, arm.experiment.replace(rounds=5)) for arm in cell.arms))
    assert result(raised, part.store).verdict == "not run"  # with fewer rounds than it has now
    assert page.describe(result(raised, part.store)) == "not run (reproduced at 4 of 5 rounds)"


def test_run__the_attackers_of_a_round_are_those_who_attacked(tmp_path, monkeypatch):
    seen, real = [], Attack.rows
    monkeypatch.setattr(Attack, "rows", lambda self, clients: seen.append(real(self, clients)) or real(self, clients))
    attacked = TINY.replace(algorithms="fedavg", rounds=8, attack=AttackOptions(share=0.25))
    cell = Cell("fedmr.tiny", "Table 1", "", (Arm("fedmr.tiny/fedavg", attacked),), ())
    assert play([cell], Part(seeds=(1,), out=tmp_path / "runs", store=tmp_path))
    (one,) = stored.runs(cell.arms[0], tmp_path)
    counts = [len(rows) for rows in seen]
    assert [row["attackers"] for row in one.rows] == counts
    assert 0 in counts
    assert max(counts) > 0


@pytest.mark.slow
def test_run__runs_of_adapters_have_their_traffic_and_the_digest_of_their_base(tmp_path):
    adapters = AdapterOptions("lora", rank=2, modules=("fc1",), train=("fc2",))
    names = ("adapters.tiny/fedit", "adapters.tiny/ffa_lora", "adapters.tiny/model")
    kinds = (adapters, replace(adapters, learn="b"), AdapterOptions())
    lines = [Arm(name, TINY.replace(rounds=3, algorithms="fedavg", adapters=one)) for name, one in zip(names, kinds)]
    cell = Cell("adapters.tiny", "", "", tuple(lines), ())
    assert play([cell], Part(out=tmp_path / "runs", store=tmp_path))
    both, one, whole = (stored.runs(arm, tmp_path) for arm in lines)
    net = zoo.Spec("cnn", 10, 1, 8, width=0.1).build()
    (rows, columns), head = net.fc1.weight.shape, net.fc2.weight.numel() + net.fc2.bias.numel()
    a, b = 2 * columns, 2 * rows
    for runs, numbers in ((both, a + b + head), (one, b + head), (whole, sum(p.numel() for p in net.parameters()))):
        for row in runs[0].rows:
            assert row["bytes_up"] == row["bytes_down"] == 4 * numbers * row["round"]
        assert measure("kilobytes_up", runs[0].rows) == pytest.approx(4e-3 * numbers)
    assert both[0].base
    assert both[0].base != both[1].base  # of another seed, and so other weights
    assert [run.base for run in whole] == ["", ""]


@pytest.mark.nightly
def test_run__the_last_row_of_a_run_has_what_its_cell_asks_of_the_trained_model(tmp_path):
    levels = TINY.replace(
        partition="clusters", clusters=(2,), cluster_classes=(5,), local_valid=0.2, local_test=0.2, clients=8,
        participants=8, samples=300, algorithms="femam", femam=FeMAMOptions(("global", "2"), (2,), prune=False),
    )  # fmt: skip
    flat = tuple(Arm(f"fedmr.flat/{name}", TINY.replace(algorithms=name)) for name in NAMES)
    planted = Arm("femam.found/femam", levels)
    cells = (
        Cell("fedmr.flat", "", "", flat, (Comparison("", "rise", "first", NAMES, larger=False),)),
        Cell("femam.found", "", "", (planted,), (Comparison("", "rand", "above", ("femam",), band=(0.9, 1.0)),)),
    )
    part = Part(seeds=(0,), out=tmp_path / "runs", store=tmp_path / "store")
    assert play(cells, part)
    assert fl_landscape([str(part.out / "fedmr.flat"), "--out", str(tmp_path / "drawn.png")]) == 0
    with (tmp_path / "drawn.csv").open() as drawn:
        points = [(row["model"], *(float(row[key]) for key in ("a", "b", "loss"))) for row in csv.DictReader(drawn)]
    for arm in flat:
        losses = {(a, b): loss for model, a, b, loss in points if model.startswith(arm.name)}
        near = [loss - losses[0, 0] for (a, b), loss in losses.items() if 0 < a * a + b * b <= 1 + 1e-9]
        (one,) = stored.runs(arm, part.store)
        assert one.rows[-1]["rise"] == pytest.approx(sum(near) / len(near), rel=1e-4)
        assert not any("rise" in row for row in one.rows[:-1])
    (one,) = stored.runs(planted, part.store)
    structure = json.loads((part.out / "femam.found/femam-seed0/structure.json").read_text())
    assert one.rows[-1]["rand"] == pytest.approx(
        adjusted_rand_score(structure["truth"][0], structure["found"][1]), rel=1e-4
    )


def test_run__a_stored_file_that_is_forged_is_refused_by_name(cell, tmp_path):
    assert play([cell], Part(("fedavg",), (0,), 1, out=tmp_path / "runs", store=tmp_path))
    arm, file = cell.arm("fedavg"), tmp_path / "fedmr.tiny/fedavg-seed0.csv"
    text = file.read_text()
    first, _, table = text.partition("\n")
    said = json.loads(first[2:])
    assert (said["rounds"], said["done"], said["settings"]["clients"]) == (1, 1, 4)
    assert len(text) < 2000
    fields = dict(zip(*(line.split(",") for line in table.splitlines())))

    def refused(text, why, name=file):
        name.write_text(text)
        with pytest.raises(FLError, match=f"{name.name} .*{why}"):
            stored.runs(arm, tmp_path)

    refused(text.replace(fields["accuracy"], "0.999"), "changed by hand")
    refused(text.replace('"done": 1', '"done": 0'), "changed by hand")
    refused("accuracy\n0.9\n", "is not a stored run")
    refused("", "is not a stored run")
    file.unlink()
    refused(text, "is not a run of fedmr.tiny/fedavg: it holds fedmr.tiny/fedavg, seed 0",
            file.with_name("fedavg-seed1.csv"))  # fmt: skip
    file.with_name("fedavg-seed1.csv").unlink()
    file.write_text(text)
    other = Arm(arm.run, arm.experiment.replace(lr=0.5))
    with fl_refused("file", "--lr"):
        stored.runs(other, tmp_path)


def test_run__a_run_with_an_extension_is_none_without_it(tmp_path):
    """Runs of earlier versions have flags that say so, and others lack them."""
    calm = TINY.replace(algorithms="fedavg")
    kinds = {"calm": calm, "hit": calm.replace(attack=AttackOptions(share=0.5, amplify=2.0))}
    for name, experiment in kinds.items():
        said = stored.settings(experiment.runs()[0])
        for number, more in enumerate(({}, {"attack.share": 0.0, "defence.rule": "mean"} if name == "calm" else {})):
            file = tmp_path / f"{name}{number}" / "fedmr.a" / "b-seed0.csv"
            rows = [{"round": 4, "accuracy": 0.5}]
            stored.write(file, stored.Stored("fedmr.a/b", 0, 4, 4, "", "", "", "", "", said | more, "", rows))
            for other, asked in kinds.items():
                with nullcontext() if other == name else pytest.raises(FLError, match=r"another --attack\.share"):
                    assert len(stored.runs(Arm("fedmr.a/b", asked), tmp_path / f"{name}{number}")) == 1


def test_run__fewer_rounds_of_what_depends_on_them_are_stored_apart():
    longer = TINY.replace(algorithms="fedavg", rounds=100, eval_every=20)
    constant, falling = (Arm("fedmr.a/b", longer.replace(lr_schedule=name)) for name in ("constant", "step"))
    assert stored.path(constant, 0, 50).name == "b-seed0.csv"
    assert stored.shorten(constant.config, 50).evaluation.every == 5  # ten evaluations are left
    assert stored.path(falling, 0, 50).name == "b-seed0-rounds50.csv"
    assert stored.path(falling, 0, 100).name == "b-seed0.csv"


@pytest.mark.slow
def test_run__no_method_beats_a_rival_that_diverged(cell, tmp_path, monkeypatch):
    assert play([cell], Part(seeds=(0,), out=tmp_path / "runs", store=tmp_path))
    real = stored.runs
    assert result(cell, tmp_path).verdict == "reproduced"

    def runs(arm, store):
        return [replace(one, failed="diverged" if arm.name == rival else "") for one in real(arm, store)]

    monkeypatch.setattr("benchmarks.papers.verdict.runs", runs)
    rival = "fedavg"
    assert result(cell, tmp_path).verdict == "not run"  # there is no other one
    rival = "fedmr"
    assert result(cell, tmp_path).verdict == "reproduced"  # what happens to the paper's own method counts


@pytest.mark.slow
def test_run__a_rivals_mean_is_of_the_seeds_that_did_not_diverge(cell, tmp_path, monkeypatch):
    assert play([cell], Part(seeds=(0, 1), out=tmp_path / "runs", store=tmp_path))
    real, whole = stored.runs, result(cell, tmp_path).values[0]

    def runs(arm, store):
        return [replace(one, failed="diverged" if (arm.name, one.seed) == ("fedavg", 1) else "")
                for one in real(arm, store)]  # fmt: skip

    monkeypatch.setattr("benchmarks.papers.verdict.runs", runs)
    one = result(cell, tmp_path)
    assert one.values[0] == {"fedmr": whole["fedmr"], "fedavg": whole["fedavg"][:1]}
    assert page._ours(one, PAPER, one.values[0]).endswith(" (1), 1 of 2 diverged")


@pytest.mark.slow
def test_run__the_page_is_what_the_script_makes_of_the_stored_runs():
    again = "make it again: python -m benchmarks.papers --page"
    assert page.PAGE.read_text() == page.page(), again
    assert page.PAGE.with_name(page.TABLE).read_text() == page.table(), again


@pytest.mark.nightly
def test_run__the_command_lists_runs_and_refuses(cell, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(stored, "STORE", tmp_path / "store")
    monkeypatch.setattr(page, "PAGE", tmp_path / "papers.md")
    assert command.main(["femam.figure5"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["femam.figure5a", "femam.figure5b"]
    assert command.main(["fedfa.table4-6"]) == 2
    assert "fedfa.table4-6 is an image" in capsys.readouterr().err
    assert command.main(["fedmr.table9"]) == 2
    assert "no cell and no recipe is called 'fedmr.table9'" in capsys.readouterr().err
    assert command.main(["femam.figure5a", "--algorithm", "fedmr"]) == 2
    assert "femam.figure5a has no 'fedmr': it has femam, fedavg, ditto" in capsys.readouterr().err
    monkeypatch.setattr(command, "find", lambda name: cell)
    monkeypatch.setattr(page, "cells", lambda: {"fedmr.tiny": cell})
    monkeypatch.setattr(page, "CLAIMS", ())
    flags = ["--seeds", "0", "--rounds", "2", "--out", str(tmp_path / "runs")]
    assert command.main(["fedmr.figure5", *flags, "--store", str(tmp_path / "other")]) == 0
    rows = page.PAGE.read_text().splitlines()
    assert not any("fedmr.tiny" in line for line in rows)  # it shows the checkout's runs alone
    assert command.main(["fedmr.figure5", *flags]) == 0
    assert "fedmr.figure5: not run (reproduced at 2 of 4 rounds)" in capsys.readouterr().out
    (row,) = [line for line in page.PAGE.read_text().splitlines() if "fedmr 10.00±50.00<br>fedavg 9.00±50.00" in line]
    assert "at 2 of 4 rounds" in row

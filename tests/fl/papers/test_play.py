"""Cells are run in parts, what they measured is stored, and the page says what it shows."""

import json
from dataclasses import replace

import pytest

from fl import reproduce, simulate
from fl.base.errors import FLError
from fl.config import Config
from fl.federation.attack import Attack, AttackOptions
from fl.papers import page, stored
from fl.papers.cell import Arm, Cell, Comparison, Published
from fl.papers.play import Part, play
from fl.papers.results import result

TINY = Config(
    clients=4, participants=2, rounds=4, local_epochs=1, width=(0.1,), batch_size=50, models_every=0, seeds=(0, 1),
    samples=100,
)  # fmt: skip
NAMES = ("fedmr", "fedavg")
PAPER = Comparison("accuracy", "late", "numbers", NAMES, (Published(10.0, 50.0), Published(9.0, 50.0)))


@pytest.fixture
def cell():
    arms = tuple(Arm(f"fedmr.tiny/{name}", replace(TINY, algorithm=(name,))) for name in NAMES)
    return Cell("fedmr.tiny", "Table 1", "FedMR is ahead", arms, (PAPER,))


@pytest.fixture(autouse=True)
def store(tmp_path, monkeypatch):
    monkeypatch.setattr(stored, "STORE", tmp_path / "store")
    return tmp_path / "store"


def stopping(rounds):
    """`simulate` that is interrupted after so many rounds of its first run, as by Ctrl-C."""
    left = [rounds]

    def interrupted(config, folder, resume, dataset, on_round):
        def stop(row):
            left[0] -= 1
            if not left[0]:
                raise KeyboardInterrupt
            return on_round(row)

        return simulate(config, folder, resume, dataset, on_round=stop)

    return interrupted


def test_an_interrupted_cell_goes_on_and_ends_as_an_uninterrupted_one(cell, store, tmp_path, monkeypatch):
    part = Part(seeds=(0,), out=tmp_path / "parts")
    with pytest.raises(KeyboardInterrupt):
        play(cell, part, stopping(2))
    (begun,) = stored.runs(cell.arm("fedmr"))
    assert (begun.done, begun.rounds, begun.over) == (2, 4, False)
    assert result(cell).begun
    assert not result(cell).rounds
    assert not play(cell, replace(part, minutes=1e-9), simulate)  # the time is over before anything is done
    said = []
    assert play(cell, part, simulate, said.append)
    assert said == [f"fedmr.tiny/{name} seed 0: 4 of 4 rounds" for name in NAMES]
    assert play(cell, part, lambda *_, **__: pytest.fail("finished runs are kept"))
    once = {name: stored.runs(cell.arm(name))[0] for name in NAMES}

    monkeypatch.setattr(stored, "STORE", tmp_path / "again")
    assert play(cell, replace(part, out=tmp_path / "whole"), simulate)
    for name in NAMES:
        (again,) = stored.runs(cell.arm(name))
        assert [row["round"] for row in again.rows] == [1, 2, 3, 4]
        for one, other in zip(once[name].rows, again.rows):
            assert {**one, "seconds": 0} == {**other, "seconds": 0}
        assert again.command == f"python -m fl.reproduce fedmr.tiny --algorithm {name} --seeds 0"
    assert result(cell).verdict == "reproduced"  # within the spread of 50 points
    assert result(cell).values[0]["fedmr"][0] == pytest.approx(
        25 * sum(row["accuracy"] for row in stored.runs(cell.arm("fedmr"))[0].rows)
    )
    raised = replace(cell, arms=tuple(Arm(arm.run, replace(arm.config, rounds=5)) for arm in cell.arms))
    assert result(raised).verdict == "not run"  # with fewer rounds than it has now
    assert page.said(result(raised)) == "not run (reproduced at 4 of 5 rounds)"


def test_the_attackers_of_a_round_are_those_who_attacked(store, tmp_path, monkeypatch):
    seen, real = [], Attack.rows
    monkeypatch.setattr(Attack, "rows", lambda self, clients: seen.append(real(self, clients)) or real(self, clients))
    config = replace(TINY, algorithm=("fedavg",), rounds=8, attack=AttackOptions(share=0.25))
    cell = Cell("fedmr.tiny", "Table 1", "", (Arm("fedmr.tiny/fedavg", config),), ())
    assert play(cell, Part(seeds=(1,), out=tmp_path / "runs"), simulate)
    (one,) = stored.runs(cell.arms[0])
    counts = [len(rows) for rows in seen]
    assert [row["attackers"] for row in one.rows] == counts
    assert 0 in counts
    assert max(counts) > 0


def test_a_stored_file_that_is_forged_is_refused_by_name(cell, store, tmp_path):
    assert play(cell, Part(("fedavg",), (0,), 1, out=tmp_path / "runs"), simulate)
    arm, file = cell.arm("fedavg"), store / "fedmr.tiny/fedavg-seed0.csv"
    text = file.read_text()
    first, _, table = text.partition("\n")
    said = json.loads(first[2:])
    assert (said["rounds"], said["done"], said["settings"]["clients"]) == (1, 1, 4)
    assert len(text) < 1500
    fields = dict(zip(*(line.split(",") for line in table.splitlines())))

    def refused(text, why, name=file):
        name.write_text(text)
        with pytest.raises(FLError, match=f"{name.name} .*{why}"):
            stored.runs(arm)

    refused(text.replace(fields["accuracy"], "0.999"), "changed by hand")
    refused(text.replace(fields["accuracy"], "99.9"), "accuracy must be from 0 to 1, got 99.9 in round 1")
    refused(text.replace('"done": 1', '"done": 0'), "rounds do not rise from 1 to at most 0")
    refused(text.replace('"done": 1', '"done": true'), "done must be a int")
    refused(text.replace('"cpu', '"gpu').replace('"2', '"3'), "changed by hand")
    refused("accuracy\n0.9\n", "is not a stored run")
    refused("", "is not a stored run")
    file.unlink()
    refused(text, "is not a run of fedmr.tiny/fedavg: it holds fedmr.tiny/fedavg, seed 0",
            store / "fedmr.tiny/fedavg-seed1.csv")  # fmt: skip
    (store / "fedmr.tiny/fedavg-seed1.csv").unlink()
    file.write_text(text)
    other = Arm(arm.run, replace(arm.config, lr=0.5))
    with pytest.raises(FLError, match=r"fedavg-seed0.csv was made with another --lr than fedmr.tiny/fedavg has now"):
        stored.runs(other)


def test_fewer_rounds_of_what_depends_on_them_are_stored_apart():
    config = replace(TINY, algorithm=("fedavg",), rounds=100, eval_every=20)
    assert stored.path("fedmr.a/b", 0, 50, config).name == "b-seed0.csv"
    assert stored.shortened(config, 50).eval_every == 5  # ten evaluations are left
    falling = replace(config, lr_schedule="step")
    assert stored.path("fedmr.a/b", 0, 50, falling).name == "b-seed0-rounds50.csv"
    assert stored.path("fedmr.a/b", 0, 100, falling).name == "b-seed0.csv"


def test_the_page_is_what_the_script_makes_of_the_stored_runs(monkeypatch):
    monkeypatch.undo()  # with the real ones
    assert page.PAGE.read_text() == page.page(), "make it again: python -m fl.reproduce --page"


def test_the_command_lists_runs_and_refuses(cell, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(page, "PAGE", tmp_path / "papers.md")
    assert reproduce.main(["femam.figure5"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["cell", "femam.figure5a", "femam.figure5b"]
    assert reproduce.main(["fedfa.table5"]) == 2
    assert "fedfa.table5 is an image" in capsys.readouterr().err
    assert reproduce.main(["fedmr.table9"]) == 2
    assert "no cell is called 'fedmr.table9'" in capsys.readouterr().err
    assert reproduce.main(["femam.figure5a", "--algorithm", "fedmr"]) == 2
    assert "femam.figure5a has no 'fedmr': it has femam, fedavg, ditto" in capsys.readouterr().err
    small = replace(cell, id="fedmr.tiny", arms=(Arm("fedmr.tiny/fedmr", cell.arm("fedmr").config), cell.arm("fedavg")))
    monkeypatch.setattr(reproduce, "find", lambda name: small)
    monkeypatch.setattr(page, "cells", lambda: {"fedmr.tiny": small})
    monkeypatch.setattr(page, "CLAIMS", ())
    flags = ["--seeds", "0", "--rounds", "2", "--out", str(tmp_path / "runs")]
    assert reproduce.main(["fedmr.table1.cifar10.lenet.dir0.5", *flags]) == 0
    assert "fedmr.tiny: not run (reproduced at 2 of 4 rounds)" in capsys.readouterr().out
    (row,) = [line for line in page.PAGE.read_text().splitlines() if "fedmr 10.00±50.00<br>fedavg 9.00±50.00" in line]
    assert "| 2 of 4 |" in row

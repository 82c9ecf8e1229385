"""Runs of a method that a script registers, in a process that does not know it."""

from dataclasses import replace

import pytest
from fl_flags import TINY
from refusals import fl_refused

import fl
from fl import compare, landscape, run
from fl.algorithms import ALGORITHMS
from fl.algorithms.fedavg import METHOD as fedavg
from fl.algorithms.method import Method


def mine(fed):
    def aggregate(server, clients, update, rng):
        return plain.aggregate(server, clients, update, rng), {"depth_of_mine": 3.0}

    plain = fedavg(fed)
    return replace(plain, aggregate=aggregate)


METHOD = Method(mine, clients="heterogeneous", columns={"depth_of_mine": float})


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """That of a run of such a method, after one of two rounds."""
    config = fl.Config.from_yaml(run.parse([*TINY, "--algorithm", "fedavg", "--rounds", "2"]).one_run().to_yaml())
    with monkeypatch.context() as patch:
        patch.setitem(ALGORITHMS, "mine", METHOD)
        fl.simulate(config.replace(algorithm="mine"), tmp_path / "mine", on_round=lambda row: True)
    fl.simulate(config, tmp_path / "plain")
    return tmp_path / "mine"


@pytest.mark.slow
def test_unregistered__they_are_compared_refused_by_name_and_resumed_where_it_is_registered(
    folder, monkeypatch, capsys
):
    assert compare.main([str(folder.parent), "--out", str(folder.parent / "c.png")]) == 0
    assert "\nmine " in capsys.readouterr().out
    assert run.main(["--resume", str(folder)]) == 2
    assert landscape.main([str(folder), "--out", str(folder / "l.png")]) == 2
    said = capsys.readouterr().err.splitlines()
    assert said[0] == said[1]
    assert f"{folder} holds a run of mine, which is no method of this installation" in said[0]
    call = said[0].partition("as in ")[2].partition(";")[0]
    with fl_refused("name", "'), '"):
        eval(call)
    monkeypatch.setitem(ALGORITHMS, "mine", METHOD)
    assert eval(call)["rounds"] == 2


def test_unregistered__a_method_may_have_the_name_of_a_setting(monkeypatch):
    """Only settings that are its options are taken for them."""

    def momentum(fed):
        return fedavg(fed)

    monkeypatch.setitem(ALGORITHMS, "momentum", Method(momentum))
    _, algorithm = fl.build(fl.Config.of(algorithm="momentum", clients=2, participation=1.0, samples=100, width=(0.1,)))
    assert algorithm.init().keys() == {"global"}

"""Several processes give what one gives, whatever the method, the number of processes, and who holds how much."""

from types import SimpleNamespace

import pytest
import torch
from ranks import assert_equal, left, ran, simulate_all, tiny

import surgery
from fl import simulate
from fl.base.errors import Diverged
from fl.base.rng import Rng
from fl.distributed import deal
from fl.federation import federation
from fl.federation.cohort import Cohort
from fl.federation.local_training import LocalObjective
from fl.federation.trainer import Training

FEDAVG = tiny("fedavg", local_valid=0.0, rounds=4)


@pytest.mark.slow
def test_simulate__a_run_goes_on_in_two_processes(tmp_path):
    config = FEDAVG.replace(rounds=2)
    simulate(config, tmp_path / "whole")
    simulate(config.replace(rounds=1), tmp_path / "run")
    assert ran(2, resumed, config, tmp_path / "run") == [0, 0]
    assert_equal(tmp_path / "whole", tmp_path / "run")


@pytest.mark.slow
def test_simulate__a_cohort_smaller_than_the_ranks_and_one_that_is_resumed_elsewhere(tmp_path):
    """A single client on three ranks, and a run that goes from two ranks to one and to three."""
    lonely = FEDAVG.replace(participants=1, rounds=2)
    configs = {"whole": FEDAVG, "lonely": lonely}
    simulate_all(0, configs, tmp_path / "one")
    simulate(FEDAVG.replace(rounds=1), tmp_path / "whole")
    assert ran(2, resumed, FEDAVG.replace(rounds=2), tmp_path / "whole") == [0, 0]
    simulate(FEDAVG.replace(rounds=3), tmp_path / "whole", resume=True)
    assert ran(3, resumed, FEDAVG, tmp_path / "whole", {"lonely": lonely}) == [0, 0, 0]
    assert_equal(tmp_path / "one" / "whole", tmp_path / "whole")
    assert_equal(tmp_path / "one" / "lonely", tmp_path / "lonely")
    assert [path.name for path in tmp_path.iterdir() if path.name not in ("one", "whole", "lonely")] == []


def resumed(rank, config, folder, more=None):
    simulate(config, folder, resume=True)
    simulate_all(rank, more or {}, folder.parent)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["workers", "vmap", "auto"])
def test_simulate__backends_that_train_clients_side_by_side(tmp_path, backend):
    """`vmap` computes with one kernel for all clients of a rank, so its bits depend on how many there are."""
    config = FEDAVG.replace(backend=backend)
    simulate(config, tmp_path / "one")
    assert ran(2, simulate_all, {"two": config}, tmp_path) == [0, 0]
    if backend == "workers":
        assert_equal(tmp_path / "one", tmp_path / "two")
    (rows, tensors), (more, others) = left(tmp_path / "one"), left(tmp_path / "two")
    for row, other in zip(rows, more, strict=True):
        assert row.keys() == other.keys()
        assert row["train_loss"] == pytest.approx(other["train_loss"], rel=1e-4)
    for name, tensor in tensors.items():
        torch.testing.assert_close(tensor, others[name], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_torchrun__chunks_and_divergence_are_the_same_on_several_ranks(tmp_path):
    """Attacks and clips are in the runs of tests/fl/test_contract.py."""
    chunked = FEDAVG.replace(max_parallel_clients=1, algorithm="fedmr")
    configs = {"chunked": chunked, "diverging": FEDAVG.replace(lr=1e3, momentum=0.0, rounds=2)}
    tolerant(0, configs, tmp_path / "1")
    assert ran(2, tolerant, configs, tmp_path / "2") == [0, 0]
    for name in configs:
        assert_equal(tmp_path / "1" / name, tmp_path / "2" / name)


def tolerant(rank, configs, folder):
    for name, config in configs.items():
        try:
            simulate(config, folder / name)
        except Diverged:
            assert name == "diverging"


def test_deal__the_longest_first_to_whoever_has_the_least():
    assert deal([1, 5, 3, 3], 2) == [[0, 1], [2, 3]]
    assert deal([2, 2], 3) == [[0], [1], []]
    assert sorted(row for rows in deal([0] * 7, 3) for row in rows) == list(range(7))
    assert max(map(len, deal([0] * 7, 3))) == 3


def test_deal__ranks_end_together_though_clients_are_unequal():
    """Idle share of two ranks, dealt in turn and by work: cohorts of 10, of clients with 1 to 150 steps."""
    generator = torch.Generator().manual_seed(0)
    cohorts = [torch.rand(10, generator=generator).pow(3).mul(150).int().add(1).tolist() for _ in range(100)]

    def idle(dealt):
        loads = [[sum(cohort[row] for row in rows) for rows in dealt(cohort)] for cohort in cohorts]
        return sum(1 - sum(each) / 2 / max(each) for each in loads) / len(loads)

    assert idle(lambda cohort: [range(0, 10, 2), range(1, 10, 2)]) > 0.15
    assert idle(lambda cohort: deal(cohort, 2)) < 0.03


def test_torchrun__clients_are_dealt_out_by_the_steps_that_they_make(make_federation, monkeypatch):
    """... which are fewer for those that are stopped before the end."""
    fed, seen = make_federation("cnn", participants=4), []

    def shared(work, function):
        seen.append(work)
        return function(range(len(work)))

    monkeypatch.setattr(federation, "current", lambda: SimpleNamespace(sharing=True, share=shared))
    steps = (1, *fed.steps([1, 2, 3]))
    start, each = surgery.broadcast(fed.initial(), 4), LocalObjective(fed.local.objective, {})
    fed.trainer(Training(Cohort([0, 1, 2, 3], [fed.model] * 4, start), each, Rng(0, 1), steps))
    assert [work / seen[0][0] for work in seen[0]] == list(steps)

"""Clients that diverge, disks that are full."""

import errno
import logging

import pytest
import torch
from fl_flags import TINY
from rounds import poison
from safetensors.torch import load_file

import surgery
from fl import run as cli
from fl.algorithms import fedavg, fedmr, fedprox, indep
from fl.base.errors import FLError
from fl.base.rng import Rng
from fl.engine.objectives import cross_entropy
from fl.federation.divergence import drop_failed
from fl.runs.assembly import build
from fl.runs.metrics import read
from fl.settings import Config


def scaled(call, params, context, batch):
    return cross_entropy(call, params, context, batch) * context["scale"]


@pytest.mark.parametrize("backend", ["loop", "vmap"])
def test_a_diverging_client_keeps_its_start_and_the_others_do_not_notice(make_federation, backend, caplog):
    fed = make_federation("resnet20", backend=backend)
    starts = surgery.broadcast(fed.initial(), 3)
    clients, rng = [2, 0, 3], Rng(0, 7)
    well = fed.train(starts, clients, rng, scaled, {"scale": torch.ones(3)})
    with caplog.at_level(logging.WARNING, "fl"):
        ill = fed.train(starts, clients, rng, scaled, {"scale": torch.tensor([1.0, torch.inf, 1.0])})
    assert well.sizes == (12, 3, 5)
    assert ill.sizes == (12, 0, 5)
    for name, tensor in ill.states.items():
        assert torch.equal(tensor[1], starts[name][1])
        assert torch.equal(tensor[[0, 2]], well.states[name][[0, 2]])
    (record,) = caplog.records
    assert record.getMessage() == "warning: round 7: client 0 dropped: loss or weights became infinite or not a number"


@pytest.mark.parametrize("make", [fedavg, fedprox])
def test_averages_leave_dropped_clients_out(make_federation, monkeypatch, make):
    fed = make_federation("cnn")
    algorithm, rng = make(fed), Rng(0, 1)
    clients = fed.sample(rng)
    _, well = algorithm.round(algorithm.init(), clients, rng)
    poison(monkeypatch, {1}, [1])
    server, _ = algorithm.round(algorithm.init(), clients, rng)
    two = {name: tensor[[0, 2]] for name, tensor in well.states.items()}
    expected = surgery.average(two, weights=[well.sizes[0], well.sizes[2]])
    for name, tensor in server["global"].items():
        torch.testing.assert_close(tensor, expected[name])


@pytest.mark.parametrize("make", [fedmr, indep])
def test_recombination_goes_on_with_the_earlier_model(make_federation, monkeypatch, make):
    fed = make_federation("cnn")
    algorithm = make(fed)
    server, _ = algorithm.round(algorithm.init(), [0, 1, 2], Rng(0, 1))
    poison(monkeypatch, {1}, [1])
    after, trained = algorithm.round(server, [1, 2, 3], Rng(0, 2))
    for name, tensor in trained.states.items():
        assert torch.equal(tensor[1], server["slots"][name][1])
        torch.testing.assert_close(after["slots"][name].sum(0), tensor.sum(0))
        torch.testing.assert_close(after["global"][name], tensor[[0, 2]].mean(0))


def test_when_all_diverge_training_stops(make_federation):
    fed = make_federation("cnn")
    starts = surgery.broadcast(fed.initial(), 2)
    with pytest.raises(
        FLError, match=r"in round 3 loss or weights of every client \(2\) became infinite .* before is saved"
    ):
        fed.train(starts, [0, 1], Rng(0, 3), scaled, {"scale": torch.full((2,), torch.nan)})


def test_a_run_goes_on_without_the_client(tmp_path, monkeypatch, capsys):
    poison(monkeypatch, {2}, [0])
    assert cli.main([*TINY, "--rounds", "3", "--out", str(tmp_path), "--name", "a"]) == 0
    rows = read(tmp_path / "a" / "metrics.csv")
    assert [row.get("dropped", 0) for row in rows] == [0, 1, 0]
    config = Config.read(tmp_path / "a")
    client = build(config)[0].sample(Rng(0, 2))[0]
    assert f"round 2: client {client} dropped" in capsys.readouterr().err
    assert all(t.isfinite().all() for t in load_file(tmp_path / "a" / "checkpoint.safetensors").values())


def test_a_resumed_run_leaves_the_table_of_a_run_in_one(tmp_path, monkeypatch):
    poison(monkeypatch, {1}, [0])
    assert cli.main([*TINY, "--rounds", "2", "--out", str(tmp_path), "--name", "a"]) == 0
    poison(monkeypatch, {1}, [0])
    assert cli.main([*TINY, "--rounds", "1", "--out", str(tmp_path), "--name", "b"]) == 0
    assert cli.main(["--resume", str(tmp_path / "b"), "--rounds", "2"]) == 0
    tables = [
        [line.split(",") for line in (tmp_path / name / "metrics.csv").read_text().splitlines()] for name in ("a", "b")
    ]
    seconds = tables[0][0].index("seconds")
    for table in tables:
        for row in table:
            del row[seconds]
    assert tables[0] == tables[1]


def test_buffers_that_were_infinite_from_the_start_are_no_failure(make_federation):
    class Masked(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = torch.nn.Linear(64, 3)
            self.register_buffer("mask", torch.full((2, 2), -torch.inf).triu(1))

        def forward(self, x):
            return self.fc(x.flatten(1))

    fed = make_federation(Masked())
    trained = fed.train(surgery.broadcast(fed.initial(), 2), [0, 1], Rng(0, 1))
    assert trained.sizes == (3, 7)


def test_a_full_disk_is_reported_and_the_checkpoint_before_stays(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "a"
    assert cli.main([*TINY, "--rounds", "1", "--out", str(tmp_path), "--name", "a"]) == 0
    before = (folder / "checkpoint.safetensors").read_bytes()

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("fl.base.tensors.save", full)
        assert cli.main(["--resume", str(folder), "--rounds", "2"]) == 2
    error = capsys.readouterr().err
    assert (
        "checkpoint.safetensors cannot be written (No space left on device): make room on that disk; then go" in error
    )
    assert f"go on with --resume {folder}" in error
    assert (folder / "checkpoint.safetensors").read_bytes() == before
    assert not [path for path in folder.iterdir() if path.name.startswith(".")]
    assert cli.main(["--resume", str(folder), "--rounds", "2"]) == 0


def test_large_numbers_and_masks_of_infinity_are_no_failure():
    """Sums that overflow, and buffers that were infinite from the start."""
    starts = {"w": torch.zeros(2, 3), "mask": torch.tensor([[0.0, -torch.inf]] * 2), "steps": torch.ones(2).long()}
    states = {**starts, "w": torch.full((2, 3), 3e38)}
    kept, sizes = drop_failed(states, torch.ones(2), starts, [5, 6], [7, 8], 1)
    assert sizes == (7, 8)
    assert kept is states
    states["w"][1, 2] = torch.nan
    kept, sizes = drop_failed(states, torch.ones(2), starts, [5, 6], [7, 8], 1)
    assert sizes == (7, 0)
    assert torch.equal(kept["w"][1], starts["w"][1])

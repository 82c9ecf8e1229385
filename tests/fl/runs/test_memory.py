"""What does not fit into memory is refused before it is taken, and says how much it would take."""

import pytest
import torch
from refusals import fl_refused

import surgery.memory
from fl.data import load
from fl.models import create, make_spec
from fl.runs import checkpoint
from fl.runs.assembly import build
from fl.runs.folder import load_model
from fl.settings import Config
from surgery.memory import free_memory, shortage

SMALL = {"algorithm": "fedavg", "samples": 200, "clients": 4, "participants": 2, "width": 0.1, "device": "cpu"}


@pytest.fixture
def free(monkeypatch):
    """Sets how many bytes are free, all of which are asked for."""
    monkeypatch.setattr(surgery.memory, "_FREE_ANYWAY", 0)
    return lambda number: monkeypatch.setattr(surgery.memory, "free_memory", lambda: number)


@pytest.mark.parametrize(
    ("group", "free"),
    [
        ({}, 3700 + 500),
        ({"memory.swap.max": "max", "memory.swap.current": "0"}, 3700 + 500),
        ({"memory.swap.max": 300 * 2**20, "memory.swap.current": 100 * 2**20}, 3700 + 200),
        ({"memory.swap.max": 0, "memory.swap.current": 0}, 3700),
        ({"memory.max": "max"}, 8500),
        (None, 8500),
    ],
)
def test_memory__the_smaller_of_the_machine_s_memory_and_its_control_group_s(tmp_path, monkeypatch, group, free):
    """The group has 4000 MB: 300 are taken, 3000 + 50 + 20 hold caches, which are free."""
    machine = tmp_path / "meminfo"
    machine.write_text(f"MemTotal: 9000000 kB\nMemAvailable: {8000 * 1024} kB\nSwapFree: {500 * 1024} kB\n")
    monkeypatch.setattr(surgery.memory, "_MACHINE", machine)
    monkeypatch.setattr(surgery.memory, "_GROUP", tmp_path)
    stat = {"anon": 300, "active_file": 3000, "inactive_file": 50, "slab_reclaimable": 20}
    files = {"memory.stat": "\n".join(f"{name} {size * 2**20}" for name, size in stat.items())}
    files |= {"memory.current": 3370 * 2**20, "memory.max": 4000 * 2**20}
    for name, value in ({} if group is None else files | group).items():
        (tmp_path / name).write_text(f"{value}\n")
    assert free_memory() == free * 2**20
    if group is None:
        monkeypatch.setattr(surgery.memory, "_MACHINE", tmp_path / "none")
        assert free_memory() is None
        assert not shortage(10**30)


def test_memory__a_run_of_models_that_do_not_fit(free):
    one = sum(t.nbytes for t in build(Config.of(**SMALL))[0].model.state_dict().values())
    free(7 * one - 1)
    with fl_refused("memory", "--participants"):
        build(Config.of(**SMALL))
    free(7 * one)
    with fl_refused("memory", "1,000", "--batch-size"):
        build(Config.of(**{**SMALL, "samples": 1000, "clients": 1, "participants": 1}, batch_size=5000))
    free(None)
    build(Config.of(**SMALL))


def test_memory__a_model_of_a_checkpoint_that_does_not_fit(tmp_path, free):
    (tmp_path / "config.yaml").write_text(Config().to_yaml())
    spec = make_spec("cnn", 10, in_channels=1, image_size=8, width=100)
    checkpoint.save(tmp_path, {"global": {"w": torch.zeros(1)}}, 1, spec, {})
    free(10**6)
    with fl_refused("memory", "--model", "GB", "0.0"):
        load_model(tmp_path)
    with fl_refused("memory", "--model"):
        create(torch.Generator(), spec)


def test_memory__padding_and_epochs_that_do_not_fit(free):
    free(10**6)
    with fl_refused("memory", "--pad", "1000"):
        load("digits").pad(1000)

"""What does not fit into memory is refused before it is taken, and says how much it would take."""

from pathlib import Path

import pytest
import torch

import surgery.memory
from fl.base.errors import FLError
from fl.data import load
from fl.models import create, make_spec
from fl.runs import checkpoint
from fl.runs.assembly import build
from fl.runs.folder import load_model
from fl.settings import Config
from surgery.memory import free_memory, shortage

SMALL = {"algorithm": ("fedavg",), "samples": 200, "clients": 4, "participants": 2, "width": 0.1, "device": "cpu"}


@pytest.fixture
def free(monkeypatch):
    """Sets how many bytes are free, all of which are asked for."""
    monkeypatch.setattr(surgery.memory, "_FREE_ANYWAY", 0)
    return lambda number: monkeypatch.setattr(surgery.memory, "free_memory", lambda: number)


def test_the_smaller_of_the_machine_s_memory_and_its_control_group_s(tmp_path, monkeypatch):
    machine = tmp_path / "meminfo"
    machine.write_text("MemTotal: 9000 kB\nMemAvailable:    5000 kB\n")
    monkeypatch.setattr(surgery.memory, "_MACHINE", machine)
    monkeypatch.setattr(surgery.memory, "_GROUP", tmp_path)
    assert free_memory() == 5000 * 1024
    (tmp_path / "memory.max").write_text("3000000\n")
    (tmp_path / "memory.current").write_text("2500000\n")
    (tmp_path / "memory.stat").write_text("anon 7\ninactive_file 1000000\n")
    assert free_memory() == 1_500_000
    (tmp_path / "memory.max").write_text("max\n")
    assert free_memory() == 5000 * 1024
    monkeypatch.setattr(surgery.memory, "_MACHINE", Path(tmp_path, "none"))
    assert free_memory() is None
    assert not shortage(10**30)


@pytest.mark.parametrize(
    ("swap", "free"),
    [
        ({}, 3700 + 500),
        ({"memory.swap.max": "max", "memory.swap.current": "0"}, 3700 + 500),
        ({"memory.swap.max": 300 * 2**20, "memory.swap.current": 100 * 2**20}, 3700 + 200),
        ({"memory.swap.max": 0, "memory.swap.current": 0}, 3700),
    ],
)
def test_caches_of_a_control_group_and_swap_are_free(tmp_path, monkeypatch, swap, free):
    """The group has 4000 MB: 300 are taken, 3000 + 50 + 20 hold caches."""
    machine = tmp_path / "meminfo"
    machine.write_text(f"MemAvailable: {8000 * 1024} kB\nSwapFree: {500 * 1024} kB\n")
    monkeypatch.setattr(surgery.memory, "_MACHINE", machine)
    monkeypatch.setattr(surgery.memory, "_GROUP", tmp_path / "none")
    assert free_memory() == 8500 * 2**20
    monkeypatch.setattr(surgery.memory, "_GROUP", tmp_path)
    stat = {"anon": 300, "active_file": 3000, "inactive_file": 50, "slab_reclaimable": 20}
    (tmp_path / "memory.stat").write_text("".join(f"{name} {size * 2**20}\n" for name, size in stat.items()))
    (tmp_path / "memory.current").write_text(f"{3370 * 2**20}\n")
    (tmp_path / "memory.max").write_text(f"{4000 * 2**20}\n")
    for name, value in swap.items():
        (tmp_path / name).write_text(f"{value}\n")
    assert free_memory() == free * 2**20


def test_a_run_of_models_that_do_not_fit(free):
    one = sum(t.nbytes for t in build(Config(**SMALL))[0].model.state_dict().values())
    free(7 * one - 1)
    with pytest.raises(FLError, match=r"a round of 2 clients would take at least .* use fewer --participants"):
        build(Config(**SMALL))
    free(7 * one)
    with pytest.raises(FLError, match=r"a batch of 1,000 samples would take at least .* smaller --batch-size"):
        build(Config(**{**SMALL, "samples": 1000, "clients": 1, "participants": 1}, batch_size=5000))
    free(None)
    build(Config(**SMALL))


def test_a_model_of_a_checkpoint_that_does_not_fit(tmp_path, free):
    (tmp_path / "config.yaml").write_text(Config().to_yaml())
    spec = make_spec("cnn", 10, in_channels=1, image_size=8, width=100)
    checkpoint.save(tmp_path, {"global": {"w": torch.zeros(1)}}, 1, spec, {})
    free(10**6)
    with pytest.raises(FLError, match=r"--model cnn of this size would take at least 7\.\d GB .* 0\.0 GB are free"):
        load_model(tmp_path)
    with pytest.raises(FLError, match="would take at least"):
        create(torch.Generator(), spec)


def test_padding_and_epochs_that_do_not_fit(free):
    free(10**6)
    with pytest.raises(FLError, match="--pad 1000 of digits would take"):
        load("digits").padded(1000)

"""What does not fit into memory is refused before it is taken, and says how much it would take."""

from pathlib import Path

import pytest
import torch

import surgery.memory
from fl.base.errors import FLError
from fl.config import Config
from fl.data import load
from fl.models import create, make_spec
from fl.runs import checkpoint
from fl.runs.assembly import build
from fl.runs.folder import load_model
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

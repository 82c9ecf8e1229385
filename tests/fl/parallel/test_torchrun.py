"""Several processes give what one gives, whatever the method, the number of processes, and who holds how much."""

from dataclasses import replace

import pytest
import torch
from ranks import ran
from rounds import SMALL

from fl.algorithms import ALGORITHMS
from fl.models.architectures import ArchitectureOptions
from fl.runs import checkpoint, metrics
from fl.simulation import simulate

TINY = replace(
    SMALL,
    samples=240,
    clients=6,
    participants=5,
    model="cnn",
    width=(0.1,),
    rounds=2,
    local_epochs=1,
    batch_size=8,
    backend="loop",
    alpha=0.3,
    local_valid=0.2,
)
"""Five of six clients, who hold very different numbers of samples."""


def tiny(name, **changes):
    config = replace(TINY, algorithm=(name,), **changes)
    if ALGORITHMS[name].clients != "mixed":
        return config
    chosen = ArchitectureOptions(depths=("1", "2")) if name == "flexifed" else ArchitectureOptions(widths=(0.5, 1.0))
    return replace(config, model="preresnet18", width=(0.05,), local_valid=0.0, architectures=chosen)


def simulate_all(rank, configs, folder):
    for name, config in configs.items():
        simulate(config, folder / name)


def left(folder):
    """All that a run keeps, but the time that it took."""
    rows = [{k: v for k, v in row.items() if k not in ("seconds", "bytes_ranks", "secure_seconds")}
            for row in metrics.read(folder / metrics.FILE)]  # fmt: skip
    return rows, checkpoint.flatten(checkpoint.read_parts(folder)[1])


def assert_equal(one, other):
    (rows, tensors), (more, others) = left(one), left(other)
    assert rows == more
    assert tensors.keys() == others.keys()
    assert all(torch.equal(tensor, others[name]) for name, tensor in tensors.items())


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_every_method_has_the_same_bits_on_several_ranks(tmp_path, size):
    configs = {name: tiny(name) for name in ALGORITHMS}
    simulate_all(0, configs, tmp_path / "one")
    assert ran(size, simulate_all, configs, tmp_path / "several") == [0] * size
    for name in configs:
        assert_equal(tmp_path / "one" / name, tmp_path / "several" / name)
        assert all(row["bytes_ranks"] > 0 for row in metrics.read(tmp_path / "several" / name / metrics.FILE))

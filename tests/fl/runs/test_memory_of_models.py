"""Runs do not keep the models that they were given."""

import gc
import weakref

import pytest
from torch import nn

import fl

SETTINGS = {
    "one": {"algorithm": "fedavg"},
    "budget": {
        "algorithm": "heterofl",
        "architectures": {"choose": "budget", "budgets": (700, 5000), "widths": (0.5, 1)},
    },
    "zico": {"algorithm": "heterofl", "architectures": {"choose": "zico", "widths": (0.5, 1)}},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_simulate__a_given_model_goes_when_its_run_is_over(name, tmp_path):
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
    config = fl.Config.of(rounds=1, clients=4, samples=100, local_epochs=1, **SETTINGS[name])
    fl.simulate(config, tmp_path / "run", model=net)
    seen = weakref.ref(net)
    del net
    gc.collect()
    assert seen() is None

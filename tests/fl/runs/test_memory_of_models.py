"""Runs do not keep the models that they were given."""

import gc
import weakref

from torch import nn

import fl


def test_a_given_model_goes_when_its_run_is_over(tmp_path):
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    config = fl.Config.of(algorithm="fedavg", rounds=1, clients=4, samples=100, local_epochs=1)
    fl.simulate(config, tmp_path / "run", model=net)
    seen = weakref.ref(net)
    del net
    gc.collect()
    assert seen() is None

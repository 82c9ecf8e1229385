"""What the server of every method keeps comes back from a checkpoint, whole; the rounds after it are the same.

tests/fl/test_run.py does so on the command line, for all methods among the slow tests.
"""

import pytest
import torch
from rounds import SMALL

from fl.algorithms import ALGORITHMS
from fl.base.rng import Rng
from fl.runs import checkpoint
from zoo import Spec

SPEC = Spec("cnn", num_classes=3, in_channels=1, image_size=8)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_round_after_a_checkpoint_is_the_round_without(make_federation, tmp_path, name):
    fed = make_federation("cnn", epochs=1)
    algorithm, server = ALGORITHMS[name](fed, SMALL), None
    server = algorithm.init()
    for number in (1, 2):
        rng = Rng(0, number)
        server, _ = algorithm.round(server, algorithm.choose(fed, server, rng), rng)
    checkpoint.save(tmp_path, server, 2, SPEC, {})
    again = ALGORITHMS[name](fed, SMALL)
    restored, done = checkpoint.restore(tmp_path, again.init(), SPEC)
    assert done == 2
    assert_same(restored, server)
    rng = Rng(0, 3)
    expected, _ = algorithm.round(server, algorithm.choose(fed, server, rng), rng)
    found, _ = again.round(restored, again.choose(fed, restored, rng), rng)
    assert_same(found, expected)


def assert_same(server, expected):
    assert server.keys() == expected.keys()
    for part in expected:
        assert server[part].keys() == expected[part].keys()
        for key, tensor in expected[part].items():
            assert torch.equal(server[part][key], tensor), (part, key)

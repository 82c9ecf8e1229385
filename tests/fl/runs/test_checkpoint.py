"""What the server of every method keeps comes back from a checkpoint, whole; the rounds after it are the same.

tests/fl/test_run.py does so on the command line, for all methods among the slow tests.
"""

import pytest
import torch
from rounds import SMALL, made, play
from selection import METHODS, some

from fl.algorithms import ALGORITHMS
from fl.base.rng import Rng
from fl.config import Config
from fl.federation.attack import AttackOptions
from fl.federation.defence import Defence
from fl.runs import checkpoint
from fl.runs.assembly import build
from zoo import Spec

SPEC = Spec("cnn", num_classes=3, in_channels=1, image_size=8)


@pytest.mark.parametrize("name", some(ALGORITHMS, METHODS))
def test_a_round_after_a_checkpoint_is_the_round_without(make_federation, tmp_path, name):
    fed = make_federation("cnn", epochs=1)
    algorithm, server = made(name, fed), None
    server = algorithm.init()
    for number in (1, 2):
        rng = Rng(0, number)
        server, _ = algorithm.round(server, algorithm.choose(server, rng), rng)
    checkpoint.save(tmp_path, server, 2, SPEC, {})
    again = made(name, fed)
    restored, done = checkpoint.restore(tmp_path, again.init(), SPEC)
    assert done == 2
    assert_same(restored, server)
    rng = Rng(0, 3)
    expected, _ = algorithm.round(server, algorithm.choose(server, rng), rng)
    found, _ = again.round(restored, again.choose(restored, rng), rng)
    assert_same(found, expected)


@pytest.mark.parametrize("name", some(ALGORITHMS, ["fedmr", "ditto"]))
def test_so_it_is_with_clients_that_come_and_go_are_malicious_and_train_in_another_precision(tmp_path, name):
    """In a federation that is built anew, as a resumed run builds it."""
    settings = {"clients": 6, "participants": 3, "samples": 200, "local_epochs": 1, "width": 0.1, "rounds": 5}
    settings |= {"local_valid": 0.2, "fesem": SMALL.fesem, "fesem_plus": SMALL.fesem_plus, "femam": SMALL.femam}
    settings |= {"precision": "bf16"} if name == "femam" else {"precision": "bf16", "crop": 1, "flip": True}
    attack, defence = AttackOptions(share=0.4, amplify=3.0), Defence("median", clip=1.0)
    asking = {
        "masked": {"masked_loss": True},
        "presence": {"joining": 0.2, "leaving": 0.2},
        "tampering": {"attack": attack, "defence": defence},
    }
    for what in asking.keys() - ALGORITHMS[name].refuses.keys():
        settings |= asking[what]
    config = Config(algorithm=(name,), **settings)
    fed, algorithm = build(config)
    server = play(algorithm, fed, 3)[-1][0]
    checkpoint.save(tmp_path, server, 3, fed.spec, {})
    other, again = build(config)
    restored, _ = checkpoint.restore(tmp_path, again.init(), other.spec)
    for (found, trained), (expected, seen) in zip(
        play(again, other, 2, 4, restored), play(algorithm, fed, 2, 4, server), strict=True
    ):
        assert_same(found, expected)
        assert trained.sizes == seen.sizes
        assert trained.metrics == seen.metrics
        assert (trained.received is trained.states) == (seen.received is seen.states)


def assert_same(server, expected):
    assert server.keys() == expected.keys()
    for part in expected:
        assert server[part].keys() == expected[part].keys()
        for key, tensor in expected[part].items():
            assert torch.equal(server[part][key], tensor), (part, key)

"""What the server of every method keeps comes back from a checkpoint, whole; the rounds after it are the same.

tests/fl/test_run.py does so on the command line, for all methods among the slow tests.
"""

import pytest
import torch
from rounds import SMALL, play
from selection import METHODS, some

from fl.algorithms import ALGORITHMS
from fl.config import Config
from fl.federation.attack import AttackOptions
from fl.federation.defence import Defence
from fl.runs import checkpoint
from fl.runs.assembly import build


@pytest.mark.parametrize("name", some(ALGORITHMS, METHODS))
def test_rounds_after_a_checkpoint_are_the_rounds_without(tmp_path, name):
    """In a federation that is built anew, as a resumed run builds it, with clients that come and go, are malicious, and
    train in another precision, as far as the method has that.
    """
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

import copy
import pickle

import pytest
import torch
from refusals import refused, zoo_refused
from torch import nn

import surgery
from surgery.errors import about, explain
from surgery.pruning import Target, prune
from surgery.width.attempts import Unreachable
from zoo import Spec, ZooError


@pytest.mark.parametrize("kind", [surgery.SurgeryError, Unreachable, ZooError])
def test_errors__are_copied_and_sent_with_their_code(kind):
    error = kind("two words", code="name")
    error.add_note("more")
    for twin in (copy.copy(error), copy.deepcopy(error), pickle.loads(pickle.dumps(error))):
        assert type(twin) is kind
        assert (str(twin), twin.code, twin.__notes__) == ("two words", "name", ["more"])
    with pytest.raises(TypeError, match="code"):
        kind("two words")


def test_errors__what_is_said_in_front_leaves_the_code():
    with refused("plan: a.json", "no"), about("a.json"):
        raise surgery.SurgeryError("no", code="plan")
    with refused("run: loss", "no"), explain("loss"):
        raise KeyError("no")
    with refused("plan"), explain("loss"):
        raise surgery.SurgeryError("no", code="plan")


def test_prune__errors_of_a_step_of_pruning_and_of_a_spec_keep_their_code():
    net, x = nn.Sequential(nn.Linear(4, 24), nn.ReLU(), nn.Linear(24, 2)), torch.zeros(1, 4)
    scores = {"0.weight:0": torch.arange(24.0)}  # of the whole model, and at the second step of a narrow one
    with refused("mismatch: step 2", "0.weight:0"):
        prune(net, example=x, target=Target(macs=0.5), steps=2, importance=lambda net: scores)
    with zoo_refused("argument: vgg11"):
        Spec("vgg11", image_size=8).build()

"""Trained weights for a model of one's own: the names are those of its state dict."""

import re

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import fl
from fl import data
from fl.base.errors import FLError
from fl.models import custom_model
from fl.models.init import find, maker

DIGITS = data.load("digits")


class Net(nn.Module):
    """For digits; `further` computes with the logits."""

    def __init__(self, classes=10, hidden=12, further=False):
        super().__init__()
        self.body, self.head, self.further = nn.Linear(64, hidden), nn.Linear(hidden, classes), further

    def forward(self, x):
        logits = self.head(self.body(x.flatten(1)).relu())
        return 2 * logits if self.further else logits


@pytest.fixture
def file(tmp_path):
    """Writes the weights of a network, and returns its path and its state."""

    def write(net):
        save_file(net.state_dict(), tmp_path / "net.safetensors")
        return str(tmp_path / "net.safetensors"), net.state_dict()

    return write


def begun(init, model, **changes):
    """(state of a model that begins from a file, the start, the state that it would draw otherwise)."""
    spec = custom_model.describe("given", model, DIGITS, **changes)
    start = find(init, spec)
    drawn, state = (maker(spec, one)(torch.Generator().manual_seed(1)).state_dict() for one in (None, start))
    return state, start, drawn


def test_all_of_it_is_taken_at_full_and_at_half_width(file):
    init, state = file(Net())
    whole, start, _ = begun(init, Net)
    assert all(torch.equal(whole[name], state[name]) for name in state)
    assert (start.left, start.told()[:22]) == ((), "the model begins from ")
    half, _, _ = begun(init, Net, width=0.5)
    assert torch.equal(half["body.weight"], state["body.weight"][:6])
    assert torch.equal(half["head.weight"], state["head.weight"][:, :6])


@pytest.mark.parametrize("width", [1.0, 0.5])
def test_a_classifier_for_other_classes_stays_as_drawn(file, width):
    init, state = file(Net(classes=1000))
    found, start, drawn = begun(init, Net, width=width)
    assert start.left == ("head.weight", "head.bias")
    assert torch.equal(found["head.weight"], drawn["head.weight"])
    assert torch.equal(found["body.weight"], state["body.weight"][: int(12 * width)])


@pytest.mark.parametrize(
    ("there", "here", "said"),
    [
        (Net(hidden=8), Net, "--init .*net.safetensors does not fit model=Net: shapes differ: body.weight [8, 64] for"),
        (nn.Linear(64, 10), Net, "it lacks body.weight, body.bias; the model has no "),
        (Net(classes=5), lambda: Net(further=True), "shapes differ: head.weight [5, 12] for [10, 12]"),
    ],
)  # fmt: skip
def test_weights_that_do_not_fit_are_refused(file, there, here, said):
    with pytest.raises(FLError, match=re.escape(said).replace(r"\.\*", ".*")):
        begun(file(there)[0], here)


def test_a_library_publishes_none(file):
    with pytest.raises(
        FLError, match=r"timm publishes no weights for a model of your own .* --init FILE.pt; or choose"
    ):
        fl.build(fl.Config(init="timm", model="torch.nn:Identity"))
    with pytest.raises(FLError, match=r"torchvision publishes no weights for a model of your own \(model=Net\)"):
        begun("torchvision", Net)

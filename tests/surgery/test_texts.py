"""Ten errors that people see most, whole, so that their wording is looked at. All other tests go by codes."""

import pytest
import torch
from symmetric import Made
from torch import nn

import surgery
from surgery.files import open_state
from surgery.pruning import Target, prune


def fail(net, x):
    raise ValueError("images are [B, 3, H, W]")


NET, X = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2)), torch.zeros(1, 4)
LAYERS = {"first": nn.Linear(4, 6), "last": nn.Linear(6, 2)}
ORDER = Made(lambda net, x: net.last(net.first(x).cumsum(1)), **LAYERS)
NUMBER = Made(lambda net, x: net.last(net.first(x).reshape(-1, 2, 3).flatten(1)), **LAYERS)
RESNET = surgery.libraries.make_model("torchvision:resnet18")
TEXTS = {
    "no width": (
        lambda: surgery.narrow(NET, example=X),
        "narrow takes one of width, like, positions, got none: give width=0.5 (half of every width), like=small (a "
        "smaller model) or positions={'fc1.weight:0': [0, 2]} (what stays)",
    ),
    "no example": (lambda: surgery.narrow(NET, 0.5), "narrow runs one forward pass: give an input as `example`"),
    "another example": (
        lambda: surgery.narrow(Made(fail), 0.5, X),
        "Made does not run on the example: images are [B, 3, H, W]",
    ),
    "no such name": (
        lambda: surgery.narrow(RESNET, {"layer5": 0.5}, torch.zeros(1, 3, 32, 32)),
        "no module of ResNet matches 'layer5': did you mean 'layer4' or 'layer3' or 'layer2'?",
    ),
    "an order": (
        lambda: surgery.narrow(ORDER, 0.5, X, strict=True),
        "a hidden width of Made cannot shrink:\n"
        "  axis 0 of first.weight (6, 4) stays whole: an operation depends on the order of its positions",
    ),
    "a number": (
        lambda: surgery.narrow(NUMBER, 0.5, X, strict=True),
        "Made does not run with narrow widths: in the model itself (view): shape '[-1, 2, 3]' is invalid for input of "
        "size 3. A width may be kept in a constant that surgery cannot see: make it an attribute or read it from a "
        "shape",
    ),
    "a size": (
        lambda: prune(NET, example=X, target=Target(macs=0.01, floor=0.5)),
        "Target(macs=0.01, floor=0.5) cannot be reached: 18 macs (50.0%) are left where every width that can shrink is "
        "at its floor: take a lower floor, another rounding or a larger target",
    ),
    "a depth": (
        lambda: surgery.graft(RESNET, depths=[2, 2, 2, 1]),
        "section 'layer4' has 1 blocks more than 1: use ungraft to drop them",
    ),
    "another shape": (
        lambda: surgery.average([{"w": torch.zeros(2)}, {"w": torch.zeros(3)}]),
        "tensor 'w' has shape (2,) in state 0 and (3,) in state 1: the architectures differ (average takes plans, "
        "load takes fit)",
    ),
    "no file": (lambda: open_state("nowhere.pt"), "nowhere.pt: there is no such file or folder"),
}


@pytest.mark.parametrize("name", TEXTS)
def test_texts__the_whole_text(name):
    call, text = TEXTS[name]
    with pytest.raises(surgery.SurgeryError) as error:
        call()
    assert str(error.value) == text

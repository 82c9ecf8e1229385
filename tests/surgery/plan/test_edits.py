"""Plans come in files: what they set are plain values that are there, never code, tensors or what torch keeps."""

import json
from dataclasses import replace

import pytest
import torch
from refusals import refused
from torch import nn

import surgery
from surgery import Plan
from surgery.plan import fingerprint


class Settings:
    def __init__(self):
        self.layers, self.name = 2, "net"

    def save(self):
        """A method."""


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads, self.scale, self.sizes, self.settings = 2, 0.5, (4, 4), Settings()
        self.gate, self.window, self.kinds, self.rope = True, None, ["full", "local"], {"base": 1e4}
        self.block = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        return self.block(x) * self.scale


def plan(**edit):
    return replace(identity(), edits=({"do": "set", "module": "", **edit},))


def identity():
    shapes = {name: tuple(t.shape) for name, t in surgery.state(Net()).items()}
    entries = {name: (surgery.plan.Source(name, (None,) * len(shape)),) for name, shape in shapes.items()}
    return Plan(entries, shapes)


@pytest.mark.parametrize(
    ("module", "attribute", "value"),
    [
        ("", "heads", 1), ("", "scale", 0.25), ("", "sizes", [2, 2]), ("", "settings.layers", 1),
        ("block.0", "out_features", 3), ("", "settings.name", "other"), ("", "heads", 1.5), ("", "scale", 1),
        ("", "gate", False), ("", "window", 2), ("", "window", [2, 2]), ("", "heads", None), ("", "kinds", ["local"]),
        ("", "rope", {"base": 1, "more": [2]}),
    ],
)  # fmt: skip
def test_edits__plain_values_that_are_there_are_set(module, attribute, value):
    small = plan(module=module, attribute=attribute, value=value).build(Net())
    found = surgery.plan.edits.attribute_of(small, module, attribute)
    assert found == (tuple(value) if attribute == "sizes" else value)


@pytest.mark.parametrize(
    ("module", "attribute", "value"),
    [
        ("", "forward", "x"), ("", "__class__", "x"), ("", "__dict__", {}), ("", "block", 1), ("", "mean", 1),
        ("block.0", "weight", 1), ("block.0", "bias", None), ("", "missing", 1), ("", "_modules", {}),
        ("", "training", False), ("", "_forward_hooks", {}), ("", "settings.save", 1), ("", "settings.__class__", 1),
        ("", "settings", 1), ("", "forward.__doc__", "x"), ("", "__class__.forward", 1), ("", "block.0", 1),
        ("block.0", "in_features", "x"), ("block.0", "in_features", {"a": [1]}), ("block.0", "in_features", True),
        ("", "heads", [1]), ("", "sizes", 4), ("", "sizes", ["x"]), ("", "gate", 1), ("", "settings.name", 1),
        ("", "window", "x"), ("", "settings.name", None), ("", "kinds", [1]), ("", "rope", {"base": "x"}),
        ("", "settings.missing", 1), ("", "block.training", 1), ("", "scale.real", 1), ("", "", 1),
    ],
)  # fmt: skip
def test_edits__nothing_else_is_set(module, attribute, value):
    net = Net()
    with refused("plan") as caught:
        plan(module=module, attribute=attribute, value=value).build(net)
    assert repr(attribute) in str(caught.value)
    assert (repr(module) if module else "the model") in str(caught.value)


def test_edits__text_that_is_nested_too_deeply():
    text = plan(attribute="heads", value=1).to_json()
    deep = "[" * 100_000 + "]" * 100_000
    for forged in (deep, text.replace('"value": 1', f'"value": {deep}'), '{"a":' * 50_000 + "1" + "}" * 50_000):
        with refused("plan"):
            Plan.from_json(forged)


@pytest.mark.parametrize("shape", [[-1], [2**40, 2**40], [10**30]])
def test_edits__shapes_that_no_tensor_has(shape):
    fields = json.loads(identity().to_json())
    fields["full"]["mean"] = shape
    fields["fingerprint"] = fingerprint({name: tuple(s) for name, s in fields["full"].items()})
    with refused("plan: 'mean'"):
        Plan.from_json(json.dumps(fields))

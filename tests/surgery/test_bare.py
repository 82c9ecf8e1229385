"""surgery by itself: with torch and numpy alone, without what fl, zoo and the commands need, and without a room."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys
import numpy, torch

sys.modules |= dict.fromkeys([  # as if they were not installed
    "scipy", "sklearn", "safetensors", "timm", "torchvision", "torch_pruning", "einops", "tyro", "docstring_parser",
    "tqdm", "yaml", "matplotlib", "pandas", "transformers", "peft", "datasets", "flwr",
])

from torch import nn
import surgery

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)
    def forward(self, x):
        return x + self.two(self.one(x).relu())

net, x = nn.Sequential(nn.Linear(4, 8), nn.Sequential(Block(), Block()), nn.Linear(8, 2)), torch.ones(1, 4)
small, plan = surgery.narrow(net, 0.5, x)
shallow, depth = surgery.ungraft(net, keep=[1], example=x)
deep, _ = surgery.graft(net, depths=[3], example=x)
states = [surgery.state(small), surgery.state(shallow)]
mean = surgery.average(states, [plan, depth], fallback=net)
assert set(mean) == set(surgery.state(net))
assert surgery.Plan.from_json(plan.to_json()) == plan
parts = surgery.segments(surgery.layers(net))
mixed = surgery.shuffle([net, net], segments=parts, permutations=surgery.permutations(len(parts), k=2))
surgery.match_norms([net, net])
pruned = surgery.pruning.prune(net, example=x, target=surgery.pruning.Target(macs=0.5))
wide, _ = surgery.widening.widen(net, rate=2, example=x)
print(len(surgery.widths(net, x)), len(mixed), len(pruned.sizes), torch.allclose(wide(x), net(x), atol=1e-5))
"""
CONFIGURED = """
import logging, sys
import torch
from torch import nn
import surgery

class Config:
    def __init__(self, width, depth):
        self.width, self.depth = width, depth

class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.one, self.two = nn.Linear(config.width, config.width), nn.Linear(config.width, config.width)
    def forward(self, x):
        return x + self.two(self.one(x).relu())

class Net(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.stem = nn.Linear(4, config.width)
        self.layers = nn.Sequential(*(Block(config) for _ in range(config.depth)))
        self.head = nn.Linear(config.width, 2)
    def forward(self, x):
        return self.head(self.layers(self.stem(x).relu()))

logging.basicConfig(stream=sys.stdout, format="%(levelname)s")
x = torch.ones(1, 4)
surgery.narrow(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)), 0.5, x)
assert not any(name.startswith("surgery.transformers") for name in sys.modules)
if "absent" in sys.argv:
    sys.modules["surgery.transformers"] = None
net = Net(Config(8, 2))
small, plan = surgery.narrow(net, 0.5, x)
deep, _ = surgery.graft(net, depths=[3], example=x)
assert small(x).shape == deep(x).shape and len(small.stem.weight) == 4 and net.config.width == 8
assert plan.build(net).config.width == small.config.width
print(small.config.width, deep.config.depth)  # code may read how many blocks to run
"""


@pytest.mark.slow
def test_bare__it_works_with_torch_and_numpy_alone():
    ran = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split()[1:] == ["2", "2", "True"]


@pytest.mark.nightly
@pytest.mark.parametrize(("room", "lines"), [("there", ["4 3"]), ("absent", ["WARNING", "WARNING", "8 3"])])
def test_bare__configurations_follow_where_their_room_is_there(room, lines):
    ran = subprocess.run(
        [sys.executable, "-c", CONFIGURED, room], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == lines

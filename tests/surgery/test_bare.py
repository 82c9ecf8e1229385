"""surgery by itself: with torch and numpy alone, as in an environment without what fl, zoo and the commands need."""

import subprocess
import sys
from pathlib import Path

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


def test_it_works_with_torch_and_numpy_alone():
    ran = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split()[1:] == ["2", "2", "True"]

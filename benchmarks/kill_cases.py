"""What `kills.py` runs: every method, and runs that leave more files than a method alone does."""

from pathlib import Path

from fl import export_model
from fl.algorithms import ALGORITHMS

_ROUNDS = "--clients 4 --participants 2 --rounds 5 --local-epochs 1 --batch-size 50 --device cpu --backend loop"
_ROUNDS += " --local-valid 0.1 --local-test 0.1 --checkpoint-every 2 --eval-every 2 --name a"
_DIGITS = f"{_ROUNDS} --width 0.1 --samples 300"
_OF_METHOD = {
    "fedmr": "--fedmr.stage1-rounds 2",
    "fesem": "--fesem.clusters 2",
    "fesem_plus": "--fesem-plus.clusters 2",
    "femam": "--femam.levels global,2,personal --femam.level-rounds 1,2",
}
_WEIGHTS = "weights.safetensors"
_OWN = "--dataset kill_own:load --model kill_own:MyNet"
_OWN_MODULE = '''"""Data and a model of one's own, as a user would write them."""

import torch
from torch import nn

import fl


def load():
    draw = torch.Generator().manual_seed(0)
    y = torch.arange(400) % 3
    x = torch.randn(400, 6, generator=draw) + 2 * torch.eye(3, 6)[y]
    return fl.Dataset.from_arrays(x[:300], y[:300], x[300:], y[300:])


class MyNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden, self.head = nn.Linear(6, 16), nn.Linear(16, 3)

    def forward(self, x):
        return self.head(self.hidden(x).relu())
'''


def _named(methods: str) -> str:
    """Methods, comma-separated, and what they need to show all they do in a few rounds."""
    return f"--algorithm {methods} {' '.join(_OF_METHOD.get(name, '') for name in methods.split(','))}"


CASES = {
    **{name: f"{_named(name)} {_DIGITS}" for name in ALGORITHMS},
    "fedavg,fedmr": f"{_named('fedavg,fedmr')} {_DIGITS}",
    "fedmr --init": f"{_named('fedmr')} {_DIGITS} --init WEIGHTS",
    "heterofl --init": f"{_named('heterofl')} {_DIGITS} --init WEIGHTS",
    "fesem --keep-best": f"{_named('fesem')} {_DIGITS} --keep-best",
    "ditto --keep-best": f"{_named('ditto')} {_DIGITS} --keep-best",
    "fedavg,fedmr --init --keep-best": f"{_named('fedavg,fedmr')} {_DIGITS} --init WEIGHTS --keep-best",
    "fedavg own": f"{_named('fedavg')} {_ROUNDS} {_OWN}",
    "femam own": f"{_named('femam')} {_ROUNDS} {_OWN}",
    "fedmr own --keep-best": f"{_named('fedmr')} {_ROUNDS} {_OWN} --keep-best",
}
"""The arguments of the runs, by the name of the case. WEIGHTS stands for a file of trained weights."""

_TRAINED = "fedavg"
"""The case whose run's model that file holds."""


def write_own(folder: Path) -> None:
    """Write the module kill_own.py into a folder."""
    (folder / "kill_own.py").write_text(_OWN_MODULE)


def needs(kind: str) -> list[str]:
    """Return the cases whose run has to be done before one of this kind.

    >>> needs("fedmr --init"), needs("fedavg")
    (['fedavg'], [])
    """
    return [_TRAINED] if "WEIGHTS" in CASES[kind] else []


def arguments(kind: str, root: Path) -> list[str]:
    """Return the command line of a case.

    Args:
        root: where the file of `keep_weights` lies.
    """
    return [str(root / _WEIGHTS) if word == "WEIGHTS" else word for word in CASES[kind].split()]


def keep_weights(kind: str, run: Path, root: Path) -> None:
    """Export the model of an uninterrupted run, if other cases begin with its weights."""
    if kind == _TRAINED:
        export_model(run, root / _WEIGHTS)

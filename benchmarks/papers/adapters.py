"""Aggregators of adapters side by side, as cells of our own: a small Vision Transformer, tuned on a part of CIFAR-10.

    python -m benchmarks.papers.adapters    # trains the base that these cells begin with, in a few minutes on a CPU

Each line is a method, each column a spread of the classes over clients; equal ranks and mixed ones have tables of their
own. What a run began with is in its stored file, as the digest of the weights that it left as they were.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.papers.cell import OWN, Arm, Cell, Comparison
from fl import AdapterOptions, Config, FLError
from fl.algorithms.heterofl import HeteroFLOptions
from fl.data import Dataset, default_root, load

TRAIN, TEST, EPOCHS, BATCH = 1000, 1000, 10, 128
"""Images of CIFAR-10 that are shared out and that test; how the base is trained on CIFAR-100."""
CONFIG = Config(
    dataset="benchmarks.papers.adapters:data", model="benchmarks.papers.adapters:net", clients=10, participants=5,
    rounds=10, local_epochs=1, batch_size=20, lr=0.1, local_test=0.2, eval_every=5, seeds=(0, 1, 2),
    adapters=AdapterOptions("lora", modules=("*.qkv", "*.fc1", "*.fc2"), train=("head",)),
)  # fmt: skip
SPREADS = {
    "iid": ("IID", {"partition": "iid"}),
    "dir0.5": ("Dirichlet 0.5", {"partition": "dirichlet", "alpha": 0.5}),
    "dir0.1": ("Dirichlet 0.1", {"partition": "dirichlet", "alpha": 0.1}),
}
RANKS = {
    "equal": ("rank 4", {"rank": 4},
              ("fedit", "ffa_lora", "flexlora", "hetlora", "flora", "flora_na", "fedsa_lora", "fedmr", "local")),
    "mixed": ("ranks 2, 4 and 8", {"ranks": (2, 4, 8)},
              ("flexlora", "hetlora", "flora", "heterofl", "heterofl_weighted", "fedfa")),
}  # fmt: skip
"""In words, as options, and the methods that can have them."""
_OPTIONS = {"ffa_lora": {"learn": "b"}, "flora": {"base": "sent"}}
_ALGORITHMS = {"fedit": "fedavg", "ffa_lora": "fedavg", "heterofl_weighted": "heterofl"}
_MEASURES = {
    "last": "test accuracy in %, last round (with fedsa_lora and local that of the mean of clients' models)",
    "last_local": "accuracy on the clients' own test samples in %, last round",
    "kilobytes_up": "traffic up: kB that a participant sends in a round, on average",
    "kilobytes_down": "traffic down: kB that a participant receives in a round, on average",
}


def cells() -> Iterator[Cell]:
    """All of them."""
    for (ranks, (said, sizes, methods)), (spread, (where, split)) in product(RANKS.items(), SPREADS.items()):
        folder, lines = f"adapters.{ranks}.{spread}", []
        for name in methods:
            options = replace(CONFIG.adapters, **sizes, **_OPTIONS.get(name, {}))
            config = replace(CONFIG, algorithm=(_ALGORITHMS.get(name, name),), adapters=options, **split)
            if name == "heterofl_weighted":
                config = replace(config, heterofl=HeteroFLOptions(own_rows=False, weighted=True))
            lines.append(Arm(f"{folder}/{name}", config))
        yield Cell(
            folder, OWN, f"adapters of {said} on a small Vision Transformer that was trained on CIFAR-100, tuned on "
            "1,000 images of CIFAR-10 by 10 clients, of which 5 take part in a round", tuple(lines),
            tuple(Comparison(what, name, "first", methods, larger=name.startswith("last"))
                  for name, what in _MEASURES.items()),
            pattern=f"adapters.{ranks}.SPREAD", settings=where,
        )  # fmt: skip


def file() -> Path:
    """Where the base lies: with the data sets."""
    return default_root() / "papers-adapters-base.pt"


def network(classes: int) -> nn.Module:
    """A Vision Transformer for images of 32x32: 16 patches, three blocks of width 64."""
    from timm.models import VisionTransformer  # an extra

    return VisionTransformer(
        img_size=32, patch_size=8, embed_dim=64, depth=3, num_heads=4, mlp_ratio=2, num_classes=classes
    )


def train_base() -> None:
    """Train the base on all of CIFAR-100 with mirrored images (AdamW, one cycle of learning rates), and save it."""
    torch.manual_seed(0)
    data, model = load("cifar100"), network(100)
    steps = EPOCHS * (len(data.y) // BATCH)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, steps)
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(data.y)).split(BATCH)[: len(data.y) // BATCH]:
            x = _scaled(data.x[rows])
            x = torch.where(torch.rand(BATCH, 1, 1, 1) < 0.5, x, x.flip(3))
            optimizer.zero_grad()
            F.cross_entropy(model(x), data.y[rows]).backward()
            optimizer.step()
            schedule.step()
    with torch.no_grad():
        right = model.eval()(_scaled(data.test_x)).argmax(1) == data.test_y
    print(f"test accuracy on CIFAR-100: {100 * right.float().mean():.1f}%")
    torch.save(model.state_dict(), file())


def net() -> nn.Module:
    """The base with a new classifier for ten classes. Raises FLError if the base was not trained yet."""
    if not file().exists():
        raise FLError(f"there is no {file()}: make it by `python -m benchmarks.papers.adapters`")
    model = network(10)
    base = torch.load(file(), weights_only=True)
    model.load_state_dict(model.state_dict() | {name: base[name] for name in base if not name.startswith("head.")})
    return model


def data() -> Dataset:
    """The first images of CIFAR-10's two sets."""
    whole = load("cifar10")
    x, y, test_x, test_y = whole.x[:TRAIN], whole.y[:TRAIN], whole.test_x[:TEST], whole.test_y[:TEST]
    return Dataset("part of cifar10", x, y, test_x, test_y, whole.classes)


def _scaled(x: torch.Tensor) -> torch.Tensor:
    return x / 127.5 - 1  # as fl gives images to models


def main(argv: Sequence[str] | None = None) -> int:
    """Train the base and save it."""
    argparse.ArgumentParser(prog="python -m benchmarks.papers.adapters", description=main.__doc__).parse_args(argv)
    train_base()
    return 0


if __name__ == "__main__":
    sys.exit(main())

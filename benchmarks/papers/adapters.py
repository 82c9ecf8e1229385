"""Aggregators of adapters compared, as our own cells: a small Vision Transformer, fine-tuned on a part of CIFAR-10, and
a language model of bytes, fine-tuned on parts of Shakespeare's plays.

    python -m benchmarks.papers.adapters    # trains the bases that these cells begin with, in a few minutes on a CPU

A row is a method, a column a partition of the classes. Equal and mixed ranks have separate tables. A stored run has the
digest of the frozen weights that it began with.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import zoo
from benchmarks.papers.cell import OWN, Arm, Cell, Comparison
from fl import AdapterOptions, FLError
from fl.algorithms.femam import FeMAMOptions
from fl.algorithms.heterofl import HeteroFLOptions
from fl.data import Dataset, TextOptions, default_root, load
from fl.settings import Experiment

TRAIN, TEST, EPOCHS, BATCH = 1000, 1000, 10, 128
"""Images of CIFAR-10 for training and test; epochs and batch size of the base's training on CIFAR-100."""
CONFIG = Experiment.of(
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
              ("fedit", "ffa_lora", "flexlora", "hetlora", "flora", "flora_na", "fedsa_lora", "fedmr", "femam",
               "local")),
    "mixed": ("ranks 2, 4 and 8", {"ranks": (2, 4, 8)},
              ("flexlora", "hetlora", "flora", "heterofl", "heterofl_weighted", "fedfa")),
}  # fmt: skip
"""For each: a description, the options, and the methods that support them."""
TEXT = Experiment.of(
    algorithms=("fedavg",), dataset="shakespeare", text=TextOptions("byte", length=64), samples=8000,
    partition="natural", model="benchmarks.papers.adapters:text_net", clients=10, participants=5, rounds=10,
    local_epochs=1, batch_size=10, optimizer="adam", lr=0.003, local_test=0.2, eval_every=5,
    adapters=AdapterOptions("lora", rank=4, modules=("*.q", "*.v", "*.fc1", "*.fc2")),
)  # fmt: skip
TUNED = ("fedit", "flora", "hetlora", "flexlora", "fedsa_lora")
_OPTIONS = {"ffa_lora": {"learn": "b"}}
_ALGORITHMS = {"fedit": "fedavg", "ffa_lora": "fedavg", "heterofl_weighted": "heterofl"}
_MEASURES = {
    "last": "test accuracy in %, last round (fedsa_lora and local: of the mean of clients' models)",
    "last_local": "accuracy on the clients' own test samples in %, last round",
    "kilobytes_up": "traffic up: kB that a participant sends in a round, on average",
    "kilobytes_down": "traffic down: kB that a participant receives in a round, on average",
}


def cells() -> Iterator[Cell]:
    """Yield all cells of adapters."""
    for (ranks, (sizes_named, sizes, methods)), (spread, (partition, split)) in product(RANKS.items(), SPREADS.items()):
        folder, lines = f"adapters.{ranks}.{spread}", []
        for name in methods:
            options = replace(CONFIG.config.extensions["adapters"], **sizes, **_OPTIONS.get(name, {}))
            experiment = CONFIG.replace(algorithms=(_ALGORITHMS.get(name, name),), adapters=options, **split)
            if name == "heterofl_weighted":
                experiment = experiment.replace(heterofl=HeteroFLOptions(own_rows=False, weighted=True))
            if name == "femam":  # the same number of rounds: six on the first level, two on each other
                levels = FeMAMOptions(levels=("global", "2", "personal"), level_rounds=(6, 2))
                experiment = experiment.replace(femam=levels)
            lines.append(Arm(f"{folder}/{name}", experiment))
        yield Cell(
            folder, OWN, f"adapters of {sizes_named} on a small Vision Transformer, from CIFAR-100 to 1,000 images of "
            "CIFAR-10; 10 clients, 5 a round", tuple(lines),
            tuple(Comparison(what, name, "first", methods, larger=name.startswith("last"))
                  for name, what in _MEASURES.items()),
            pattern=f"adapters.{ranks}.SPREAD", settings=partition,
        )  # fmt: skip
    yield _text()


def _text() -> Cell:
    """Return the cell of the language model. Its first arm is the base: its steps are too small to change a float32."""
    folder, lines = "adapters.text.speakers", [Arm("adapters.text.speakers/base", TEXT.replace(lr=1e-30))]
    for name in TUNED:
        options = replace(TEXT.config.extensions["adapters"], **_OPTIONS.get(name, {}))
        experiment = TEXT.replace(algorithms=(_ALGORITHMS.get(name, name),), adapters=options)
        lines.append(Arm(f"{folder}/{name}", experiment))
    names = tuple(line.name for line in lines)
    return Cell(
        folder, OWN, "adapters of rank 4 on a small causal Transformer of bytes, from Python's documentation to the "
        "lines of 10 of Shakespeare's characters, 5 a round; base is the model before training", tuple(lines),
        (Comparison("perplexity of a byte on the common test lines, last round (fedsa_lora: of the mean of "
                    "clients' models)", "perplexity", "first", names, larger=False),
         *(Comparison(what, name, "first", TUNED if name.startswith("kilo") else names, larger=name == "last_local")
           for name, what in _MEASURES.items() if name != "last")),
        settings="natural",
    )  # fmt: skip


def file() -> Path:
    """Return the path of the base, beside the data sets."""
    return default_root() / "papers-adapters-base.pt"


def text_file() -> Path:
    """Return the path of the language model's base."""
    return default_root() / "papers-adapters-text-base.pt"


def network(classes: int) -> nn.Module:
    """Build a Vision Transformer for images of 32x32: 16 patches, three blocks of width 64."""
    from timm.models import VisionTransformer  # an extra

    return VisionTransformer(
        img_size=32, patch_size=8, embed_dim=64, depth=3, num_heads=4, mlp_ratio=2, num_classes=classes
    )


def text_network() -> nn.Module:
    """Build a causal Transformer for bytes: three blocks of width 128."""
    return zoo.create("transformer", num_classes=256, tokens=64, width=0.5, depth=3, dropout=0.0)


def train_base() -> None:
    """Train the base on all of CIFAR-100 with mirrored images, and save it."""
    torch.manual_seed(0)
    data, model = load("cifar100"), network(100)
    _train(model, data.x, data.y, lambda x: _mirror(_scale(x)), F.cross_entropy)
    with torch.no_grad():
        correct = model.eval()(_scale(data.test_x)).argmax(1) == data.test_y
    print(f"test accuracy on CIFAR-100: {100 * correct.float().mean():.1f}%")
    torch.save(model.state_dict(), file())


def train_text_base() -> None:
    """Train the language model on the bytes of Python's documentation, and save it."""
    torch.manual_seed(0)
    data, model = load("pydoc", text=TEXT.config.data.text), text_network()
    _train(model, data.x.long(), data.y, lambda x: x, _next_bytes)
    with torch.no_grad():
        loss = _next_bytes(model.eval()(data.test_x.long()), data.test_y)
    print(f"perplexity of a byte of Python's documentation: {loss.exp():.2f}")
    torch.save(model.state_dict(), text_file())


def _train(model: nn.Module, x: torch.Tensor, y: torch.Tensor, change: Callable, loss: Callable) -> None:
    """Train by AdamW with one cycle of learning rates."""
    steps = EPOCHS * (len(y) // BATCH)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, steps)
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(y)).split(BATCH)[: len(y) // BATCH]:
            optimizer.zero_grad()
            loss(model(change(x[rows])), y[rows]).backward()
            optimizer.step()
            schedule.step()


def _mirror(x: torch.Tensor) -> torch.Tensor:
    return torch.where(torch.rand(BATCH, 1, 1, 1) < 0.5, x, x.flip(3))


def _next_bytes(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), y.long().flatten())


def net() -> nn.Module:
    """Load the base with a new classifier for ten classes. Raises FLError if the base was not trained yet."""
    model, base = network(10), _base(file())
    model.load_state_dict(model.state_dict() | {name: base[name] for name in base if not name.startswith("head.")})
    return model


def text_net() -> nn.Module:
    """Load the language model's base. Raises FLError if it was not trained yet."""
    model = text_network()
    model.load_state_dict(_base(text_file()))
    return model


def _base(path: Path) -> dict[str, torch.Tensor]:
    if not path.exists():
        raise FLError(f"there is no {path}: make it by `python -m benchmarks.papers.adapters`", code="file")
    return torch.load(path, weights_only=True)


def data() -> Dataset:
    """Load the first images of CIFAR-10's training and test sets."""
    whole = load("cifar10")
    x, y, test_x, test_y = whole.x[:TRAIN], whole.y[:TRAIN], whole.test_x[:TEST], whole.test_y[:TEST]
    return Dataset("part of cifar10", x, y, test_x, test_y, whole.classes)


def _scale(x: torch.Tensor) -> torch.Tensor:
    return x / 127.5 - 1  # as fl normalises images


def main(argv: Sequence[str] | None = None) -> int:
    """Train the bases that are not there yet, and save them."""
    argparse.ArgumentParser(prog="python -m benchmarks.papers.adapters", description=main.__doc__).parse_args(argv)
    for path, train in ((file(), train_base), (text_file(), train_text_base)):
        if not path.exists():
            train()
    return 0


if __name__ == "__main__":
    sys.exit(main())

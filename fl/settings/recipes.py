"""Named settings: `python -m fl.run NAME`, any of them overridden by flags.

A recipe is a function without arguments; its docstring gives the command, how long it takes and what to expect. The
settings of the papers' tables are recipes of benchmarks/papers.
"""

import inspect
from collections.abc import Callable, Mapping
from textwrap import indent

from fl.algorithms.femam import FeMAMOptions
from fl.models.architectures import ArchitectureOptions
from fl.settings import Experiment

Recipe = Callable[[], Experiment]


def digits() -> Experiment:
    """FedMR on scikit-learn's handwritten digits: the defaults.

    python -m fl.run digits

    About 20 s on two CPU cores, about 97% test accuracy.
    """
    return Experiment.of()


def fashion_mnist() -> Experiment:
    """FedAvg and FedMR on Fashion-MNIST: 100 clients, two seeds.

    python -m fl.run fashion-mnist

    About two hours of one CPU thread (the rounds of its four runs sum to 6,600 s). Measured: FedAvg 87.16 ± 1.01,
    FedMR 85.42 ± 0.64 (% in the last round).
    """
    return Experiment.of(
        algorithms=("fedavg", "fedmr"), dataset="fashion-mnist", model="cnn", clients=100, participation=0.1,
        local_epochs=5, batch_size=50, lr=0.01, momentum=0.9, rounds=40, seeds=(0, 1), eval_client_models_every=10,
    )  # fmt: skip


def cifar10() -> Experiment:
    """FedAvg and FedMR on CIFAR-10: 100 clients, LeNet, 500 rounds.

    python -m fl.run cifar10
    python -m fl.run cifar10 --model resnet20 --fedmr.stage1-rounds 100

    A row of FedMR's Table 1 in the settings of its released code. Each of the two runs takes 20 to 55 minutes of one
    CPU thread. Measured with three seeds: FedAvg 54.0 ± 1.2, FedMR 58.8 ± 0.8 (%, mean of the last ten evaluations).
    """
    return Experiment.of(
        algorithms=("fedavg", "fedmr"), dataset="cifar10", model="lenet", clients=100, participation=0.1,
        local_epochs=5, batch_size=50, lr=0.01, momentum=0.5, rounds=500, eval_every=10,
    )  # fmt: skip


def femam() -> Experiment:
    """FeMAM, FedAvg and Local on 600 digits: 20 clients in 4 clusters.

    python -m fl.run femam

    FeMAM's accuracy on the clients' own test data climbs a stair: one model for all (78% after its 50 rounds, seed 0),
    four for clusters (97% ten rounds later), four more, and one for each client. Alone, clients had 90% by round 50.
    """
    return Experiment.of(
        algorithms=("local", "fedavg", "femam"), dataset="digits", samples=600, pool_test_set=True, clients=20,
        partition="clusters", clusters=(4,), cluster_classes=(3,), local_valid=0.15, local_test=0.2, model="cnn",
        width=(0.25,), participation=1.0, local_epochs=2, batch_size=10, lr=0.05, momentum=0.0, rounds=80,
        femam=FeMAMOptions(levels=("global", "4", "4", "personal"), level_rounds=(50, 10)),
    )  # fmt: skip


def fedfa() -> Experiment:
    """FedFA, HeteroFL and NeFL on digits: 20 clients, two widths and depths.

    python -m fl.run fedfa
    python -m fl.run fedfa --attack.share 0.2 --attack.amplify 20

    Each client has 2 of the 10 classes, and a part of a narrow Pre-ResNet-20; half of the clients have the smallest of
    its four architectures. A round takes about ten seconds on two busy CPU cores.
    """
    return Experiment.of(
        algorithms=("heterofl", "nefl", "fedfa"), dataset="digits", partition="shards", class_share=0.2, clients=20,
        participants=5, model="preresnet20", width=(0.25,), norm="static_batch", masked_loss=True, rounds=40,
        local_epochs=5, batch_size=10, lr=0.05, clip=1.0, eval_every=2, eval_client_models_every=10,
        architectures=ArchitectureOptions(widths=(0.5, 1.0), depths=("2", "3")),
    )  # fmt: skip


def text() -> Experiment:
    """FedAvg on Python's documentation: a narrow Transformer, perplexity.

    python -m fl.run text

    Measured with one thread of a busy machine (`OMP_NUM_THREADS=1`, seed 0, Python 3.11's text): 66 s, perplexity 142,
    17.4% of the words right. The words' frequencies alone give 193 and 2.7%.
    """
    return Experiment.of(
        algorithms=("fedavg",), dataset="pydoc", partition="natural", clients=30, min_samples=5, participants=5,
        model="transformer", width=0.25, rounds=30, local_epochs=2, lr=0.1, clip=1.0,
    )  # fmt: skip


RECIPES: dict[str, Recipe] = {
    "digits": digits,
    "fashion-mnist": fashion_mnist,
    "cifar10": cifar10,
    "femam": femam,
    "fedfa": fedfa,
    "text": text,
}
"""From a recipe's name to the function that makes its settings."""


def overview(recipes: Mapping[str, Recipe] = RECIPES) -> dict[str, str]:
    """Return a line about each recipe.

    >>> overview()["digits"]
    "FedMR on scikit-learn's handwritten digits: the defaults."
    """
    return {name: _about(make).splitlines()[0] for name, make in recipes.items()}


def describe(make: Recipe) -> str:
    """Return the docstring of a recipe, with its commands indented to keep lines.

    >>> print(describe(digits).splitlines()[2])
      python -m fl.run digits
    """
    paragraphs = _about(make).split("\n\n")
    return "\n\n".join(indent(text, "  ") if text.startswith("python -m ") else text for text in paragraphs)


def _about(make: Recipe) -> str:
    return inspect.getdoc(make) or "A recipe that does not say what it is."

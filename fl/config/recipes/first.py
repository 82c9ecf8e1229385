"""Recipes to begin with."""

from dataclasses import replace

from fl.config import Config
from fl.config.recipes.fedmr import PAPER


def digits() -> Config:
    """FedMR on scikit-learn's handwritten digits: 20 clients, Dirichlet 0.5, the defaults.

    python -m fl.run digits

    About 20 s on two CPU cores, about 97% test accuracy.
    """
    return Config()


def pydoc() -> Config:
    """FedAvg on the words of Python's documentation, topics as clients: a narrow Transformer, measured by perplexity.

    python -m fl.run pydoc

    Measured with one thread of a busy machine (`OMP_NUM_THREADS=1`, seed 0, Python 3.11's text): 66 s, perplexity 142,
    17.4% of the words right. The words' frequencies alone give 193 and 2.7%.
    """
    return Config(
        algorithm=("fedavg",), dataset="pydoc", partition="natural", clients=30, min_samples=5, participants=5,
        model="transformer", width=0.25, rounds=30, local_epochs=2, lr=0.1, clip=1.0, models_every=0,
    )  # fmt: skip


def fashion_mnist() -> Config:
    """FedAvg and FedMR on Fashion-MNIST: 100 clients, Dirichlet 0.5, 10 a round, McMahan's CNN, two seeds.

    python -m fl.run fashion-mnist

    About two hours of one CPU thread (the rounds of its four runs sum to 6,600 s). Measured: FedAvg 87.16 ± 1.01,
    FedMR 85.42 ± 0.64 (% in the last round).
    """
    return replace(
        PAPER, algorithm=("fedavg", "fedmr"), dataset="fashion-mnist", rounds=40, seeds=(0, 1), models_every=10
    )

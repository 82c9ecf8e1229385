"""Recipes of no paper: to begin with, and with a Vision Transformer on a CPU."""

from dataclasses import replace

from fl.settings import Config
from fl.settings.recipes.fedmr import PAPER


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
        model="transformer", width=0.25, rounds=30, local_epochs=2, lr=0.1, clip=1.0,
    )  # fmt: skip


def fashion_mnist() -> Config:
    """FedAvg and FedMR on Fashion-MNIST: 100 clients, Dirichlet 0.5, 10 a round, McMahan's CNN, two seeds.

    python -m fl.run fashion-mnist

    About two hours of one CPU thread (the rounds of its four runs sum to 6,600 s). Measured: FedAvg 87.16 ± 1.01,
    FedMR 85.42 ± 0.64 (% in the last round).
    """
    return replace(
        PAPER, algorithm=("fedavg", "fedmr"), dataset="fashion-mnist", rounds=40, seeds=(0, 1),
        eval_client_models_every=10,
    )  # fmt: skip


def vit_cifar10() -> Config:
    """FedAvg and FedMR on CIFAR-10 with a narrow Vision Transformer of four blocks: 20 clients, Dirichlet 0.5.

    python -m fl.run vit-cifar10
    python -m fl.run vit-cifar10 --model vit_small --width 1 --depth 12 --samples 50000

    Images are cut into patches of 4x4 pixels. FedMR shuffles layers: the class token with the positions, the patches'
    projection, each matrix of queries, keys and values, and every norm. Not run to the end by us.
    """
    return Config(
        algorithm=("fedavg", "fedmr"), dataset="cifar10", samples=10_000, clients=20, participants=5, crop=4, flip=True,
        model="vit_tiny", width=(0.5,), depth=(4,), optimizer="adam", lr=0.001, clip=1.0, batch_size=32, local_epochs=2,
        rounds=100, lr_schedule="cosine", eval_every=5, partition="dirichlet", alpha=0.5,
    )  # fmt: skip

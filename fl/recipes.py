"""Named settings: `python -m fl.run NAME`, any of them overridden by flags.

A recipe is a function without arguments; its docstring gives the command, how long it takes and what to expect.
"""

from dataclasses import replace

from fl.config import Config


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
        FEDMR_PAPER,
        algorithm=("fedavg", "fedmr"),
        dataset="fashion-mnist",
        rounds=40,
        seeds=(0, 1),
    )


def fedmr_cifar10_cnn_dir05() -> Config:
    """FedMR's Table 1, CNN, CIFAR-10, Dirichlet 0.5: the paper has FedAvg 54.42 ± 0.76, FedMR 59.81 ± 0.60 (%).

    python -m fl.run fedmr-cifar10-cnn-dir0.5

    The paper does not say how many rounds; 500 is the released code's default, whose momentum is 0.5
    (`--momentum 0.5`) and whose CNN is smaller. Not run to the end by us.
    """
    return replace(FEDMR_PAPER, algorithm=("fedavg", "fedmr"), dataset="cifar10", rounds=500, seeds=(0, 1, 2))


# FedMR, section 5.1: SGD with learning rate 0.01 and momentum 0.9, batch size 50, five local epochs, one client in ten.
FEDMR_PAPER = Config(
    model="cnn", clients=100, participants=10, local_epochs=5, batch_size=50, lr=0.01, momentum=0.9, alpha=0.5,
    models_every=10,
)  # fmt: skip

RECIPES = {
    "digits": digits,
    "pydoc": pydoc,
    "fashion-mnist": fashion_mnist,
    "fedmr-cifar10-cnn-dir0.5": fedmr_cifar10_cnn_dir05,
}
"""From a recipe's name to the function that makes its settings."""

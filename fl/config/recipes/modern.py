"""Models of the 2020s: a Vision Transformer under recombination, a ConvNeXt in parts of several widths and depths."""

from dataclasses import replace

from fl.config import Config
from fl.models.architectures import ArchitectureOptions

CPU = Config(
    dataset="cifar10", samples=10_000, clients=20, participants=5, partition="dirichlet", alpha=0.5, crop=4, flip=True,
    optimizer="adam", lr=0.001, clip=1.0, batch_size=32, local_epochs=2, rounds=100, lr_schedule="cosine",
    eval_every=5, models_every=0,
)  # fmt: skip
"""What both have in common: the settings are of this project, small enough for a CPU."""


def vit_cifar10() -> Config:
    """FedAvg and FedMR on CIFAR-10 with a narrow Vision Transformer of four blocks: 20 clients, Dirichlet 0.5.

    python -m fl.run vit-cifar10
    python -m fl.run vit-cifar10 --model vit_small --width 1 --depth 12 --samples 50000

    Images are cut into patches of 4x4 pixels. FedMR shuffles layers: the class token with the positions, the patches'
    projection, each matrix of queries, keys and values, and every norm. Not run to the end by us.
    """
    return replace(CPU, algorithm=("fedavg", "fedmr"), model="vit_tiny", width=(0.5,), depth=(4,))


def convnext_cifar10() -> Config:
    """FedFA and HeteroFL on CIFAR-10 with a narrow ConvNeXt: 20 clients, Dirichlet 0.5, of two widths and depths.

    python -m fl.run convnext-cifar10
    python -m fl.run convnext-cifar10 --algorithm flexifed,fedfa --architectures.widths 1
    python -m fl.run convnext-cifar10 --model vit_tiny --depth 4 --architectures.depths 2,4

    Half of the clients take the smallest of four architectures. In the second only depths differ, as FlexiFed asks; in
    the third the model is a Vision Transformer, whose narrow clients have the leading channels of every head. Not run
    to the end by us.
    """
    return replace(
        CPU, algorithm=("heterofl", "fedfa"), model="convnext_tiny", width=(0.25,), depth=(1, 1, 3, 1),
        architectures=ArchitectureOptions(widths=(0.5, 1.0), depths=("1-1-1-1", "1-1-3-1")),
    )  # fmt: skip

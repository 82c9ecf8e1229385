"""FedFA's experiments (Park and Joe-Wong, "Federated Learning with Flexible Architectures", ECML-PKDD 2024), and
HeteroFL's and NeFL's on CIFAR-10.

The paper's Tables 1 to 6, with its numbers, networks, candidates and training settings, are images. Its text has the
data sets, the partitions, the attacks, who chooses how, and three runs of each; all else here is a reconstruction, for
the most part from HeteroFL's settings. One rate and one depth go for all sections of a model: --architectures.mixed
lets each section have its own, where the depths are single numbers, and the search is then the paper's evolution.
"""

from itertools import product
from typing import NamedTuple

from benchmarks.papers.recipes.table import recipe
from fl.data import TextOptions
from fl.models.architectures import ArchitectureOptions
from fl.settings import Experiment, recipes

# ---- Settings of the experiments that a CPU can do: all their numbers are here. ----

_CPU = Experiment.of(
    norm="static_batch", clients=20, participants=5, batch_size=10, clip=1.0, eval_every=5, eval_client_models_every=10,
    algorithms=("heterofl", "nefl", "fedfa"), architectures=ArchitectureOptions(widths=(0.5, 1.0), depths=("2", "3")),
)  # fmt: skip
_MEASURED = _CPU.replace(
    partition="shards", class_share=0.2, masked_loss=True, samples=8000, clients=40, participants=8, rounds=24,
    local_epochs=2, batch_size=20, lr=0.1, momentum=0.9, weight_decay=5e-4, lr_schedule="step", eval_every=12,
    eval_client_models_every=24, depth=(3,),
)  # fmt: skip
SMALL = {
    "digits": recipes.fedfa(),
    "fashion-mnist": _MEASURED.replace(dataset="fashion-mnist", model="preresnet18", width=(0.125,)),
    "cifar10": _MEASURED.replace(
        dataset="cifar10", model="preresnet18", stem="imagenet", width=(0.25,), crop=4, flip=True
    ),
    "text": _CPU.replace(
        dataset="pydoc", partition="natural", clients=30, min_samples=5, model="transformer", norm="default",
        width=(0.25,), rounds=30, local_epochs=2, lr=0.1,
        architectures=ArchitectureOptions(widths=(0.5, 1.0), depths=("2", "4")),
    ),
}  # fmt: skip

# ---- The paper's settings, or their reconstruction. ----

PAPER = Experiment.of(
    clients=100, participation=0.1, norm="static_batch", local_epochs=5, batch_size=10, lr=0.1, momentum=0.9,
    weight_decay=5e-4, clip=1.0, lr_schedule="step", lr_steps=(0.5, 0.75), rounds=400, eval_every=5,
    eval_client_models_every=5, seeds=(0, 1, 2),
)  # fmt: skip
WIDTHS = (0.5, 0.75, 1.0)


class Network(NamedTuple):
    """A model; its full depth, where that is not the zoo's; the depths that clients choose among."""

    title: str
    model: str
    full: tuple[int, ...]
    depths: tuple[str, ...]


# A section keeps two blocks where it has more: its first changes the shape, and would stand for a corner of the deeper
# ones. The mobile families' sections keep their own full depths; those of one or two blocks have none to spare.
NETWORKS = {
    "preresnet": Network("Pre-ResNet", "preresnet18", (3,), ("2", "3")),
    "mobilenetv2": Network("MobileNetV2", "mobilenetv2", (), ("1-2-2-2-2-2-1", "1-2-3-3-3-3-1", "1-2-3-4-3-3-1")),
    "efficientnetv2": Network("EfficientNetV2", "efficientnetv2_cifar", (), ("1-2-2-2-2", "1-2-2-3-3", "1-2-2-3-5")),
    "transformer": Network("Transformer", "transformer", (), ("2", "3", "4")),
}


# Section 5.3.1: FedFA's accuracy by that of a mode's rival, and what an attack costs the rival by what it costs FedFA;
# each of these in IID, in non-IID settings on the clients' own classes, and there on all classes.
_CLAIMS = """
depth  FlexiFed  1.00-1.04 0.98-1.02 1.00-1.20  1.22-2.09 2.21-3.31 1.21-1.74
width  HeteroFL  1.01-1.16 0.99-1.13 1.00-1.16  1.07-1.47 0.89-2.37 1.11-1.22
both   NeFL      1.00-1.02 0.99-1.06 0.95-1.06  1.01-2.11 1.30-2.65 1.23-1.63
"""
RIVALS = {mode: claims for mode, *claims in map(str.split, _CLAIMS.strip().splitlines())}
"""From mode to its rival and the six ranges."""
TARGETS = {"cifar10": (0.7, 0.4), "cifar100": (0.25, 0.25), "fashion-mnist": (0.8, 0.3)}
"""The accuracies up to which section 5.3.2 counts computation: in IID and in non-IID settings."""


def row(data: str, network: str, mode: str, spread: str) -> Experiment:
    """Return the settings of one of the paper's comparisons; the arguments are the parts of its name.

    >>> experiment = row("cifar10", "preresnet", "width", "noniid")
    >>> experiment.algorithms, experiment.config.model.architectures.widths, experiment.config.rounds
    (('heterofl', 'fedfa'), (0.5, 0.75, 1.0), 800)
    """
    net = NETWORKS[network]
    choice = ArchitectureOptions((1.0,) if mode == "depth" else WIDTHS, () if mode == "width" else net.depths)
    experiment = PAPER.replace(
        algorithms=(RIVALS[mode][0].lower(), "fedfa"), dataset=data, model=net.model, depth=net.full,
        architectures=choice,
    )  # fmt: skip
    if data == "wikitext2":
        return experiment.replace(
            dataset="wikitext-2", partition="contiguous", text=TextOptions(vocabulary=0), norm="default",
            rounds=200, lr_steps=(0.25, 0.5),
        )  # fmt: skip
    if data.startswith("cifar"):
        experiment = experiment.replace(crop=4, flip=True)
    if spread == "iid":
        return experiment.replace(partition="iid", unequal=True)
    return experiment.replace(partition="shards", class_share=0.2, masked_loss=True, rounds=800)


def _about(name: str, data: str, network: str, mode: str, spread: str) -> str:
    net, rival = NETWORKS[network], RIVALS[mode][0]
    where = "" if data == "wikitext2" else ", IID" if spread == "iid" else ", non-IID"
    return f"""FedFA and {rival}, a reconstruction: {data}, {net.title}{where}.

    python -m benchmarks.papers {name}

    Half of the clients take the smallest architecture, the others what ZiCo scores best on their own data. Both methods
    with three seeds are six runs; --seeds 0 makes it two. Not run to the end by us.
    """


_CELLS = {
    f"fedfa-{'-'.join(cells)}": cells
    for cells in product(TARGETS, ("preresnet", "mobilenetv2", "efficientnetv2"), RIVALS, ("iid", "noniid"))
} | {f"fedfa-wikitext2-{mode}": ("wikitext2", "transformer", mode, "iid") for mode in RIVALS}
TABLE = {name: recipe(_about(name, *cells), row, *cells) for name, cells in _CELLS.items()}
"""From name to recipe, for each comparison of the paper's Tables 1 and 3."""


def fashion_mnist() -> Experiment:
    """FedFA, HeteroFL and NeFL on Fashion-MNIST: 40 clients with 2 of the 10 classes, of two widths and depths.

    python -m benchmarks.papers fedfa-fashion-mnist
    python -m benchmarks.papers fedfa-fashion-mnist --attack.share 0.2 --attack.amplify 20 --eval-every 6
    python -m benchmarks.papers fedfa-fashion-mnist --algorithm heterofl,fedfa --architectures.depths own
    python -m benchmarks.papers fedfa-fashion-mnist --algorithm flexifed,fedfa --architectures.widths 1
    python -m benchmarks.papers fedfa-fashion-mnist --partition iid --unequal --no-masked-loss
    python -m benchmarks.papers fedfa-fashion-mnist --model mobilenetv2 --stem cifar

    A reconstruction in small: a narrow Pre-ResNet-18. In the third only widths differ, in the fourth only depths, as
    FlexiFed asks; the last is a narrow MobileNetV2.
    """
    return SMALL["fashion-mnist"]


def cifar10() -> Experiment:
    """FedFA, HeteroFL and NeFL on CIFAR-10: 40 clients with 2 of the 10 classes, of two widths and depths.

    python -m benchmarks.papers fedfa-cifar10

    A reconstruction in small, with the commands of fedfa-fashion-mnist: a narrow Pre-ResNet-18 that halves images twice
    before its first section, to be four times as fast.
    """
    return SMALL["cifar10"]


def text() -> Experiment:
    """FedFA, HeteroFL and NeFL on the words of Python's documentation: 30 topics as clients, two widths and depths.

    python -m benchmarks.papers fedfa-text

    A reconstruction in small: a narrow Transformer, measured by perplexity.
    """
    return SMALL["text"]


def heterofl_cifar10() -> Experiment:
    """HeteroFL's own experiment on CIFAR-10, IID: Pre-ResNet-18, five widths from 1 to 1/16, as many clients of each.

    python -m benchmarks.papers heterofl-cifar10
    python -m benchmarks.papers heterofl-cifar10 --partition shards --masked-loss --rounds 800

    The second is non-IID, two classes a client. The settings are those of HeteroFL's released code, for clients that
    keep their width; three seeds are our reconstruction. Not run to the end by us.
    """
    return PAPER.replace(
        algorithms=("heterofl",), dataset="cifar10", partition="iid", crop=4, flip=True, model="preresnet18",
        lr_steps=(0.375, 0.625),
        architectures=ArchitectureOptions(widths=(1.0, 0.5, 0.25, 0.125, 0.0625), choose="cycle"),
    )  # fmt: skip


def nefl_cifar10() -> Experiment:
    """NeFL's own experiment on CIFAR-10, IID: ResNet-18 of the widths sqrt(0.2), sqrt(0.4), ... 1, 20 clients of each.

    python -m benchmarks.papers nefl-cifar10
    python -m benchmarks.papers nefl-cifar10 --model resnet34

    These are its submodels in width alone: those in depth leave out blocks that change the shape, which stay here. A
    reconstruction are momentum 0.9, five local epochs, no weight decay, crop and flip, and three seeds. The network's
    strides are those for large images: one of 32x32 ends as a single pixel. Not run to the end by us.
    """
    return PAPER.replace(
        algorithms=("nefl",), dataset="cifar10", partition="iid", crop=4, flip=True, model="resnet18",
        norm="batch", batch_size=32, weight_decay=0.0, clip=0.0, rounds=500,
        architectures=ArchitectureOptions(tuple(gamma**0.5 for gamma in (0.2, 0.4, 0.6, 0.8, 1.0)), choose="cycle"),
    )  # fmt: skip

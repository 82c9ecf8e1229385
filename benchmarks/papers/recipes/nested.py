"""Models nested in width or depth, in the settings of Flower's baselines and of the authors' code."""

from benchmarks.papers.recipes.fedfa import PAPER
from fl.algorithms.fjord import FjORDOptions
from fl.algorithms.scalefl import ScaleFLOptions
from fl.models.architectures import ArchitectureOptions
from fl.settings import Experiment
from fl.settings.recipes import text


def heterofl_a_e() -> Experiment:
    """HeteroFL on CIFAR-10, IID, all 100 clients in each of 400 rounds; half of them have a sixteenth of the width.

    python -m benchmarks.papers heterofl-cifar10-a-e
    python -m benchmarks.papers heterofl-cifar10-a-e --architectures.widths 1
    python -m benchmarks.papers heterofl-cifar10-a-e --architectures.widths 1,0.5,0.25,0.125,0.0625
    python -m benchmarks.papers heterofl-cifar10-a-e --architectures.widths 1 --width 0.0625

    The table of Flower's baseline heterofl (CIFAR-10, IID accuracy) has 89.98 for a-e, 90.83 for a, 87.46 for a-b-c-d-e
    and 76.53 for e, one number each. There clients draw their width anew in every round; here they keep it. Its README
    has momentum and weight decay the other way round, and one step of the learning rate in the table where its command
    has two; batches of 10 and clipping at 1 are HeteroFL's. Not run to the end by us.
    """
    return PAPER.replace(
        algorithms=("heterofl",), dataset="cifar10", partition="iid", participation=1.0, crop=4, flip=True,
        model="preresnet18", lr_steps=(0.375, 0.625), seeds=(0,),
        architectures=ArchitectureOptions(widths=(1.0, 0.0625), choose="cycle"),
    )  # fmt: skip


def fjord_cifar10() -> Experiment:
    """FjORD on CIFAR-10, IID: ResNet-18 of five widths, 10 of 100 clients in each of 500 rounds.

    python -m benchmarks.papers fjord-cifar10
    python -m benchmarks.papers fjord-cifar10 --fjord.distil
    python -m benchmarks.papers fjord-cifar10 --algorithm heterofl,fjord

    These are the settings of the authors' baseline for Flower, which shows a figure and no numbers. It keeps running
    statistics for each width; here they are those of static batch norm. Not run to the end by us.
    """
    widths = (0.2, 0.4, 0.6, 0.8, 1.0)
    return Experiment.of(
        algorithms=("fjord",), dataset="cifar10", partition="iid", clients=100, participation=0.1, rounds=500,
        model="resnet18", stem="cifar", norm="static_batch", local_epochs=1, batch_size=32, lr=0.1, momentum=0.0,
        weight_decay=1e-4, crop=4, flip=True, eval_every=10, eval_client_models_every=10, fjord=FjORDOptions(widths),
        architectures=ArchitectureOptions(widths=widths, choose="cycle"),
    )  # fmt: skip


def depthfl_cifar100() -> Experiment:
    """DepthFL on CIFAR-100, IID: ResNet-18 that ends after one to four sections, 10 of 100 clients in 1,000 rounds.

    python -m benchmarks.papers depthfl-cifar100
    python -m benchmarks.papers depthfl-cifar100 --depthfl.distil 0
    python -m benchmarks.papers depthfl-cifar100 --architectures.depths 2-0-0-0

    The table of the authors' baseline for Flower has 76.06 for DepthFL, which has FedDyn's regulariser as well, and
    72.67 for DepthFL (FedAvg), the second of these. Its exits are deeper than these, so that its numbers are no
    expectation. Not run to the end by us.
    """
    return Experiment.of(
        algorithms=("depthfl",), dataset="cifar100", partition="iid", clients=100, participation=0.1, rounds=1000,
        model="resnet18", stem="cifar", norm="batch", exits=True, local_epochs=5, batch_size=50, lr=0.1,
        lr_schedule="exponential", lr_decay=0.998, momentum=0.0, weight_decay=1e-3, crop=4, flip=True, eval_every=10,
        eval_client_models_every=50,
        architectures=ArchitectureOptions(depths=("2-0-0-0", "2-2-0-0", "2-2-2-0", "2-2-2-2"), choose="cycle"),
    )  # fmt: skip


def inclusivefl_pydoc() -> Experiment:
    """InclusiveFL on Python's own documentation: Transformers of 2, 4 and 6 blocks, a third of 30 clients each.

    python -m benchmarks.papers inclusivefl-pydoc
    python -m benchmarks.papers inclusivefl-pydoc --inclusivefl.own none
    python -m benchmarks.papers inclusivefl-pydoc --algorithm heterofl,fedfa,inclusivefl

    The paper has RoBERTas of 4, 8 and 12 blocks on GLUE; these settings are ours, with depths in the same proportion.
    """
    return text().replace(
        algorithms=("inclusivefl",), depth=(6,),
        architectures=ArchitectureOptions(depths=("2", "4", "6"), choose="cycle"),
    )  # fmt: skip


def scalefl_cifar10() -> Experiment:
    """ScaleFL on CIFAR-10: ResNet-110 of four sizes, 10 of 100 clients in a round, nearly IID (Dirichlet, alpha 100).

    python -m benchmarks.papers scalefl-cifar10
    python -m benchmarks.papers scalefl-cifar10 --scalefl.distil 0
    python -m benchmarks.papers scalefl-cifar10 --algorithm heterofl,depthfl,scalefl

    These are the settings of the authors' released code, whose command for this model does not distil: the second of
    these. It does not say how many rounds; the learning rate drops after 100 and 200. Its models end, as here, after
    30, 38, 46 and 54 blocks, and have an exit of three convolutions there; here one follows the blocks of each section.
    Its norms keep no statistics and predict with those of the batch. Not run to the end by us.
    """
    return Experiment.of(
        algorithms=("scalefl",), dataset="cifar10", partition="dirichlet", alpha=100.0, clients=100, participation=0.1,
        rounds=300, model="resnet110", norm="static_batch", exits=True, local_epochs=5, batch_size=16, lr=0.1,
        lr_schedule="step", lr_steps=(1 / 3, 2 / 3), momentum=0.9, weight_decay=5e-4, crop=4, flip=True,
        eval_every=10, eval_client_models_every=50, scalefl=ScaleFLOptions(start=76),
        architectures=ArchitectureOptions(
            widths=(0.7, 0.7, 0.75, 1.0), depths=("18-12-0", "18-18-2", "18-18-10", "18-18-18"), choose="paired"
        ),
    )  # fmt: skip

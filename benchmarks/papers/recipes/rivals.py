"""Methods that everybody compares with, each in a setting of its paper or of its authors' code, as far as it was seen.

What a docstring says of a paper's setting was read in the authors' repository or in another's that repeats the
experiment, which it then names. Beside each method runs FedAvg. Client models are scored on a fifth of each client's
data. None was run to the end by us.
"""

from fl.algorithms.apfl import APFLOptions
from fl.algorithms.fedadagrad import FedAdagradOptions
from fl.algorithms.fedadam import FedAdamOptions
from fl.algorithms.feddyn import FedDynOptions
from fl.algorithms.fedproto import FedProtoOptions
from fl.algorithms.fedprox import FedProxOptions
from fl.algorithms.moon import MOONOptions
from fl.algorithms.perfedavg import PerFedAvgOptions
from fl.settings import Experiment

_CIFAR = Experiment.of(dataset="cifar10", model="cnn", momentum=0.0, eval_every=10)
_HSU = _CIFAR.replace(partition="dirichlet_mixture", clients=100)  # all clients equally large
_REDDI = _HSU.replace(participants=10, alpha=0.1, local_epochs=1, batch_size=20, lr=0.03, rounds=4000, eval_every=50)
_ACAR = _HSU.replace(participants=10, alpha=0.6, batch_size=50, lr=0.1, rounds=1000)
_OWN = {"local_test": 0.2, "eval_client_models_every": 10, "eval_every": 10}


def fedavgm() -> Experiment:
    """FedAvgM on CIFAR-10, after figure 5 of Hsu et al. (2019): 100 clients of 500 images, Dirichlet 0.1, 5 a round.

    python -m benchmarks.papers fedavgm-cifar10
    python -m benchmarks.papers fedavgm-cifar10 --alpha 10

    From Flower's baseline, which repeats the figure: a mixture of classes for each client, one epoch, batches of 64,
    momentum 0.9 on the server, 1,000 rounds; the paper has 10,000. Ours are the clients' learning rate and the network,
    McMahan's for MNIST with three channels. The abstract has an accuracy that rises from 30.1% to 76.9% where clients
    differ most.
    """
    return _HSU.replace(
        algorithms=("fedavg", "fedavgm"), participants=5, alpha=0.1, local_epochs=1, batch_size=64,
        lr=0.03, rounds=1000,
    )  # fmt: skip


def fedadagrad() -> Experiment:
    """FedAdagrad on CIFAR-10, after the experiments of Reddi et al. (ICLR 2021): 100 clients of 500 images, 10 a round.

    python -m benchmarks.papers fedadagrad-cifar10

    From repositories that repeat them: 500 images a client, one epoch, batches of 20, 4,000 rounds. The paper's tables
    were not seen: the split, both learning rates and the network (theirs: ResNet-18) are ours.
    """
    return _REDDI.replace(algorithms=("fedavg", "fedadagrad"), fedadagrad=FedAdagradOptions(lr=0.03))


def fedadam() -> Experiment:
    """FedAdam on CIFAR-10, in the setting of fedadagrad-cifar10.

    python -m benchmarks.papers fedadam-cifar10
    """
    return _REDDI.replace(algorithms=("fedavg", "fedadam"), fedadam=FedAdamOptions(lr=0.03))


def fedyogi() -> Experiment:
    """FedYogi on CIFAR-10, in the setting of fedadagrad-cifar10.

    python -m benchmarks.papers fedyogi-cifar10
    """
    return _REDDI.replace(algorithms=("fedavg", "fedyogi"), fedyogi=FedAdamOptions(lr=0.03))


def scaffold() -> Experiment:
    """SCAFFOLD on CIFAR-10, as FedDyn's released code runs it as a rival: 100 clients, Dirichlet 0.6, 10 a round.

    python -m benchmarks.papers scaffold-cifar10

    From that code's example: 100 clients of 500 images with a mixture of classes each, five epochs, batches of 50,
    learning rate 0.1, 1,000 rounds. There all clients take part, with weight decay 0.001, which SCAFFOLD refuses here;
    the network is ours. Not a table of SCAFFOLD's own paper, whose experiments are on EMNIST.
    """
    return _ACAR.replace(algorithms=("fedavg", "scaffold"))


def feddyn() -> Experiment:
    """FedDyn on CIFAR-10, after its released code's example: 100 clients, Dirichlet 0.6, 10 a round.

    python -m benchmarks.papers feddyn-cifar10
    python -m benchmarks.papers feddyn-cifar10 --partition iid --participants 100

    The second is the example: all clients take part, and their data are alike; the split of the first, a mixture of
    classes for each client, is in its README.
    alpha 0.01, FedProx's mu 0.0001, weight decay 0.001 and the rest are the example's. The network is ours.
    """
    return _ACAR.replace(
        algorithms=("fedavg", "fedprox", "feddyn"), weight_decay=1e-3, fedprox=FedProxOptions(1e-4),
        feddyn=FedDynOptions(0.01),
    )  # fmt: skip


def fednova() -> Experiment:
    """FedNova on CIFAR-10, after table 1 of Wang et al. (NeurIPS 2020): 16 clients, Dirichlet 0.1, VGG-11.

    python -m benchmarks.papers fednova-cifar10
    python -m benchmarks.papers fednova-cifar10 --momentum 0.9

    From Flower's baseline, which repeats the table: all clients take part, two epochs, batches of 32, learning rate
    0.05, 100 rounds. There clients have weight decay 0.0001, which FedNova refuses here, and VGG-11 has two hidden
    linear layers with dropout and no norms. The table's second half, where clients draw how many epochs they train, is
    not offered.
    """
    return _CIFAR.replace(
        algorithms=("fedavg", "fednova"), model="vgg11", norm="none", clients=16, participants=16, alpha=0.1,
        local_epochs=2, batch_size=32, lr=0.05, rounds=100, eval_every=1,
    )  # fmt: skip


def fedbn() -> Experiment:
    """FedBN on FEMNIST's writers, whose images look different: 100 writers, 10 a round, ResNet-9.

    python -m benchmarks.papers fedbn-femnist

    No table of Li et al. (ICLR 2021): their clients hold digits from five sources (MNIST, SVHN, USPS, SynthDigits,
    MNIST-M), which are not offered. What it has in common is that inputs differ and not so much labels.
    """
    return Experiment.of(
        algorithms=("fedavg", "fedbn"), dataset="femnist", partition="natural", clients=100, participants=10,
        min_samples=100, model="resnet9", norm="batch", width=(0.5,), local_epochs=1, batch_size=32, lr=0.01,
        momentum=0.0, rounds=300, **_OWN,
    )  # fmt: skip


def moon() -> Experiment:
    """MOON on CIFAR-10, after table 1 of Li et al. (CVPR 2021): 10 clients, Dirichlet 0.5, all take part.

    python -m benchmarks.papers moon-cifar10
    python -m benchmarks.papers moon-cifar10 --model resnet18 --norm group

    From the released code's README and defaults: ten epochs, batches of 64, learning rate 0.01, momentum 0.9, weight
    decay 0.00001, 100 rounds, mu 5, temperature 0.5; a CNN of LeNet's size. It puts a projection before the last layer,
    which LeNet does not have: here representations are what that layer is given.
    """
    return _CIFAR.replace(
        algorithms=("fedavg", "moon"), model="lenet", clients=10, participants=10, alpha=0.5, local_epochs=10,
        batch_size=64, lr=0.01, momentum=0.9, weight_decay=1e-5, rounds=100, eval_every=1,
        moon=MOONOptions(mu=5.0, temperature=0.5),
    )  # fmt: skip


def perfedavg() -> Experiment:
    """Per-FedAvg on CIFAR-10: 50 clients of two classes each, 10 a round.

    python -m benchmarks.papers perfedavg-cifar10

    No table of Fallah et al. (NeurIPS 2020), which were not seen, and whose authors released no code that we found. Two
    classes a client, batches of 40, four epochs and both rates (alpha 0.01, 0.001 for the rounds) are from another's
    implementation. FedAvg+ fine-tunes for two epochs, Per-FedAvg makes one step.
    """
    return _CIFAR.replace(
        algorithms=("fedavg", "fedavg_plus", "perfedavg"), partition="shards", class_share=0.2, clients=50,
        participants=10, local_epochs=4, batch_size=40, lr=0.001, rounds=200, perfedavg=PerFedAvgOptions(0.01), **_OWN,
    )  # fmt: skip


def apfl() -> Experiment:
    """APFL on MNIST, after its released code's example: 10 clients of two classes each, all take part.

    python -m benchmarks.papers apfl-mnist
    python -m benchmarks.papers apfl-mnist --apfl.adaptive

    From that README: learning rate 0.1, batches of 50, 20 rounds, alpha 0.5. There a round has ten steps, here it is an
    epoch, and the network (theirs: an MLP) is ours. No table of the paper, which was not seen.
    """
    return Experiment.of(
        algorithms=("fedavg", "local", "apfl"), dataset="mnist", partition="shards", class_share=0.2, clients=10,
        participants=10, local_epochs=1, batch_size=50, lr=0.1, momentum=0.0, rounds=20, apfl=APFLOptions(0.5),
        **(_OWN | {"eval_client_models_every": 1, "eval_every": 1}),
    )  # fmt: skip


def fedproto() -> Experiment:
    """FedProto on MNIST, after its released code's example: 20 clients of three classes each, all take part.

    python -m benchmarks.papers fedproto-mnist

    From that README: one epoch, batches of 4, learning rate 0.01, momentum 0.5, 100 rounds, weight 1. There clients
    have 100 images of each of about three classes, here 300 of exactly three; the network is ours. It is the case of
    one architecture for all; the paper's other one is refused here.
    """
    return Experiment.of(
        algorithms=("fedavg", "local", "fedproto"), dataset="mnist", samples=6000, partition="shards", class_share=0.3,
        clients=20, participants=20, local_epochs=1, batch_size=4, lr=0.01, momentum=0.5, rounds=100,
        fedproto=FedProtoOptions(1.0), **_OWN,
    )  # fmt: skip


RECIPES = {
    "fedavgm-cifar10": fedavgm,
    "fedadagrad-cifar10": fedadagrad,
    "fedadam-cifar10": fedadam,
    "fedyogi-cifar10": fedyogi,
    "scaffold-cifar10": scaffold,
    "fednova-cifar10": fednova,
    "feddyn-cifar10": feddyn,
    "fedbn-femnist": fedbn,
    "moon-cifar10": moon,
    "perfedavg-cifar10": perfedavg,
    "apfl-mnist": apfl,
    "fedproto-mnist": fedproto,
}
"""From name to recipe."""

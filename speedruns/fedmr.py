"""FedMR from top to bottom: federated learning that shuffles layers among the clients' models.

    python speedruns/fedmr.py    # 96.7% after 40 rounds; 13 s on one core of an Intel Xeon with torch 2.14

Hu et al., "Is Aggregation the Only Choice? Federated Learning via Layer-wise Model Recombination" (KDD 2024),
algorithm 1. Twenty clients hold handwritten digits, each its own mixture of classes. Five of them train in a round, all
five as one program. The server keeps five models and shuffles their layers among them. It takes the mean of the five
only to test and deploy it.

The whole method is in this file: data, partition, model, local training, recombination, test. It imports only torch,
NumPy, and scikit-learn for the data. On a CPU it prints the numbers of `python -m fl.run --backend vmap`, bit for bit.
"""

import time
import zlib

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.optim.sgd import sgd

SEED = 0
ROUNDS, CLIENTS, PARTICIPANTS = 40, 20, 5
EPOCHS, BATCH, LR, MOMENTUM = 5, 10, 0.02, 0.9
ALPHA, LEAST = 0.5, 10  # of the Dirichlet distribution; smallest number of samples per client
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

State = dict[str, Tensor]  # a model's parameters by name; a stack has a leading axis of models


# Randomness --------------------------------------------------------------------------------------------------------
# Each random choice has its own stream, named by its purpose, so that no draw depends on the order of the others.


def stream(purpose: str, number: int = 0, client: int = 0) -> np.random.SeedSequence:
    """Return the seeds of one purpose, round and client."""
    return np.random.SeedSequence([SEED, zlib.crc32(purpose.encode()), number, client])


def generator(purpose: str, number: int = 0, client: int = 0) -> torch.Generator:
    """Return a torch generator for one purpose, round and client."""
    high, low = stream(purpose, number, client).generate_state(2, np.uint32).tolist()
    return torch.Generator().manual_seed(high << 31 ^ low)


# Data --------------------------------------------------------------------------------------------------------------


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return 1,437 training and 360 test images, float [n, 1, 8, 8] in [-1, 1], each with their labels."""
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(images.reshape(-1, 1, 8, 8), labels, test_size=0.2, stratify=labels, random_state=0)
    x, test_x, y, test_y = (torch.from_numpy(part).to(DEVICE) for part in parts)
    return x.float() * (2 / 16) - 1, y, test_x.float() * (2 / 16) - 1, test_y


def partition(labels: np.ndarray, rng: np.random.Generator) -> list[Tensor]:
    """Partition the samples: each client has its own mixture of classes (section 5.1).

    A draw from a Dirichlet distribution splits each class among the clients. A client that already has an equal part of
    all samples gets no more. The whole draw is repeated until every client has at least LEAST samples.
    """
    while True:
        owner, sizes = np.empty(len(labels), dtype=np.int64), np.zeros(CLIENTS, dtype=np.int64)
        for label in np.unique(labels):
            members = rng.permutation(np.flatnonzero(labels == label))
            share = rng.dirichlet(np.full(CLIENTS, ALPHA)) * (sizes < len(labels) / CLIENTS)
            cuts = (np.cumsum(share / share.sum())[:-1] * len(members)).astype(np.int64)
            counts = np.diff(cuts, prepend=0, append=len(members))
            owner[members] = np.repeat(np.arange(CLIENTS), counts)
            sizes += counts
        if sizes.min() >= LEAST:
            return [torch.from_numpy(np.flatnonzero(owner == client)) for client in range(CLIENTS)]


# The model ---------------------------------------------------------------------------------------------------------


def cnn() -> nn.Module:
    """Build McMahan's convolutional network (AISTATS 2017) for images of 8 by 8 pixels."""
    parts = {
        "conv1": nn.Conv2d(1, 32, 5, padding=2), "relu1": nn.ReLU(), "pool1": nn.MaxPool2d(2),
        "conv2": nn.Conv2d(32, 64, 5, padding=2), "relu2": nn.ReLU(), "pool2": nn.MaxPool2d(2),
        "flatten": nn.Flatten(),
        "fc1": nn.Linear(64 * 2 * 2, 512), "relu3": nn.ReLU(),
        "fc2": nn.Linear(512, 10),
    }  # fmt: skip
    net = nn.Sequential()
    draws = generator("weights")
    for name, part in parts.items():
        net.add_module(name, part)
        if isinstance(part, nn.Conv2d | nn.Linear):  # torch's default, from this generator
            bound = 1 / part.weight[0].numel() ** 0.5
            nn.init.kaiming_uniform_(part.weight, a=5**0.5, generator=draws)
            nn.init.uniform_(part.bias, -bound, bound, generator=draws)
    return net.to(DEVICE)


# What clients do ---------------------------------------------------------------------------------------------------


def batches(part: Tensor, client: int, number: int) -> Tensor:
    """Return the samples of a client's steps in a round, [steps, BATCH].

    Each epoch has all of the client's samples in random order. If its last batch is not full, the first samples of the
    same order fill it.
    """
    draws, n = generator("batches", number, client), len(part)
    positions = torch.arange(-(-n // BATCH) * BATCH) % n
    return torch.cat([part[torch.randperm(n, generator=draws)[positions]] for _ in range(EPOCHS)]).view(-1, BATCH)


def train(net: nn.Module, slots: State, steps: list[Tensor], x: Tensor, y: Tensor) -> State:
    """Train K models side by side, each on the batches of its client: SGD with momentum, which starts at zero.

    `vmap` turns one step of K models into one call on stacked tensors. Clients with more samples take more steps, so
    the models are sorted by their steps: the first ones always still train.
    """
    order = torch.tensor(sorted(range(len(steps)), key=lambda k: -len(steps[k])))
    params = {name: tensor[order.to(DEVICE)] for name, tensor in slots.items()}
    memory = {name: torch.zeros_like(tensor) for name, tensor in params.items()}
    counts = [len(steps[k]) for k in order]
    index = nn.utils.rnn.pad_sequence([steps[k] for k in order], batch_first=True).to(DEVICE)

    def loss(params: State, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(net, params, (x,)), y)

    for s in range(counts[0]):
        active = sum(count > s for count in counts)
        now = {name: tensor[:active] for name, tensor in params.items()}  # views: the step below writes into params
        leaves = {name: tensor.detach().requires_grad_() for name, tensor in now.items()}
        at = index[:active, s]
        # The models share no parameter, so the gradient of the summed loss is each model's own gradient.
        losses = vmap(loss)(leaves, x[at], y[at])
        gradients = torch.autograd.grad(losses.sum(), list(leaves.values()))
        sgd(
            list(now.values()), [g.contiguous() for g in gradients], [m[:active] for m in memory.values()], fused=True,
            lr=LR, momentum=MOMENTUM, weight_decay=0, dampening=0, nesterov=False, maximize=False,
        )  # fmt: skip
    back = order.argsort().to(DEVICE)
    return {name: tensor[back] for name, tensor in params.items()}


# What the server does ----------------------------------------------------------------------------------------------


def recombine(trained: State, layers: list[list[str]], number: int) -> State:
    """Shuffle each layer among the K models (section 4.2.2): every layer of every model is used once."""
    draws, k = generator("recombine", number), PARTICIPANTS
    result = {}
    for layer in layers:
        source = torch.randperm(k, generator=draws).to(DEVICE)
        result |= {name: trained[name][source] for name in layer}
    return {name: result[name] for name in trained}


def mean(trained: State) -> State:
    """Return the model to deploy, the uniform mean of the K models. Recombination does not change it (Lemma 4.4)."""
    weights = torch.full((PARTICIPANTS,), 1 / PARTICIPANTS, dtype=torch.float64).float().to(DEVICE)
    return {name: (weights @ tensor.flatten(1)).view(tensor.shape[1:]) for name, tensor in trained.items()}


@torch.no_grad()
def accuracy(net: nn.Module, state: State, x: Tensor, y: Tensor) -> float:
    """Return the share of images that a model classifies correctly."""
    return (functional_call(net, state, (x,)).argmax(1) == y).double().mean().item()


def main() -> State:
    """Run algorithm 1, and return the trained global model."""
    x, y, test_x, test_y = digits()
    parts = partition(y.cpu().numpy(), np.random.default_rng(stream("partition")))
    net = cnn()
    start = {name: tensor.detach() for name, tensor in net.named_parameters()}
    layers = [[f"{name}.weight", f"{name}.bias"] for name in ("conv1", "conv2", "fc1", "fc2")]
    slots = {name: tensor.expand(PARTICIPANTS, *tensor.shape).clone() for name, tensor in start.items()}
    begin = time.perf_counter()
    for number in range(1, ROUNDS + 1):
        clients = torch.randperm(CLIENTS, generator=generator("sample", number))[:PARTICIPANTS].tolist()
        trained = train(net, slots, [batches(parts[c], c, number) for c in clients], x, y)
        deployed = mean(trained)
        slots = recombine(trained, layers, number)
        print(f"round {number:2}: {accuracy(net, deployed, test_x, test_y):.2%}")
    print(f"{time.perf_counter() - begin:.1f} s on {DEVICE}, torch {torch.__version__}")
    return deployed


if __name__ == "__main__":
    torch.set_num_threads(1)  # on tensors this small, CPU threads only wait for each other
    main()

"""FedMR from top to bottom: federated learning that shuffles layers among the clients' models.

    python speedruns/fedmr.py    # 96.7% after 40 rounds; 13 s on one core of an Intel Xeon with torch 2.14

Hu et al., "Is Aggregation the Only Choice? Federated Learning via Layer-wise Model Recombination" (KDD 2024),
algorithm 1. Twenty clients hold handwritten digits, each a mixture of classes of its own. Five of them train in a
round, all five as one program. The server then does not send their mean to everybody: it keeps five models, and
recombines them, layer by layer. The mean is only what is tested and deployed.

Everything is here: the data, who holds what, the model, the clients' training, recombination, and the test. Nothing is
imported but torch, NumPy, and scikit-learn for the data. On a CPU the numbers are those of
`python -m fl.run --backend vmap`, bit for bit.
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
ALPHA, LEAST = 0.5, 10  # of the Dirichlet distribution; samples that each client has at least
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

State = dict[str, Tensor]  # a model's parameters by name; a stack has a leading axis of models


# Randomness --------------------------------------------------------------------------------------------------------
# Whatever is random has a stream of its own, named by its purpose, so that no draw depends on the order of others.


def stream(purpose: str, number: int = 0, client: int = 0) -> np.random.SeedSequence:
    """The seeds of one purpose, round and client."""
    return np.random.SeedSequence([SEED, zlib.crc32(purpose.encode()), number, client])


def generator(purpose: str, number: int = 0, client: int = 0) -> torch.Generator:
    """A torch generator for one purpose, round and client."""
    high, low = stream(purpose, number, client).generate_state(2, np.uint32).tolist()
    return torch.Generator().manual_seed(high << 31 ^ low)


# Data --------------------------------------------------------------------------------------------------------------


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """1,437 training and 360 test images, float [n, 1, 8, 8] in [-1, 1], and their labels."""
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(images.reshape(-1, 1, 8, 8), labels, test_size=0.2, stratify=labels, random_state=0)
    x, test_x, y, test_y = (torch.from_numpy(part).to(DEVICE) for part in parts)
    return x.float() * (2 / 16) - 1, y, test_x.float() * (2 / 16) - 1, test_y


def partition(labels: np.ndarray, rng: np.random.Generator) -> list[Tensor]:
    """Deal the samples out: each client has a mixture of classes of its own (section 5.1).

    Each class is shared out by a draw from a Dirichlet distribution; clients that already have an equal part of all
    samples get no more. The whole draw is repeated until every client has some samples.
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
    """McMahan's convolutional network (AISTATS 2017), for images of 8 by 8 pixels."""
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
        if isinstance(part, nn.Conv2d | nn.Linear):  # torch's own default, from a generator of our own
            bound = 1 / part.weight[0].numel() ** 0.5
            nn.init.kaiming_uniform_(part.weight, a=5**0.5, generator=draws)
            nn.init.uniform_(part.bias, -bound, bound, generator=draws)
    return net.to(DEVICE)


# What clients do ---------------------------------------------------------------------------------------------------


def batches(part: Tensor, client: int, number: int) -> Tensor:
    """The samples of a client's steps in a round, [steps, BATCH]: in each epoch all of its samples in random order.

    The last batch of an epoch is filled up from the beginning of the same order.
    """
    draws, n = generator("batches", number, client), len(part)
    positions = torch.arange(-(-n // BATCH) * BATCH) % n
    return torch.cat([part[torch.randperm(n, generator=draws)[positions]] for _ in range(EPOCHS)]).view(-1, BATCH)


def train(net: nn.Module, slots: State, steps: list[Tensor], x: Tensor, y: Tensor) -> State:
    """Train K models side by side, each on the batches of its client: SGD with momentum, which starts at zero.

    `vmap` makes one step of K models one call on stacked tensors. Clients with more samples make more steps, so the
    models are sorted: those that still train are always the first ones.
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
        now = {name: tensor[:active] for name, tensor in params.items()}  # views: what changes here changes there
        leaves = {name: tensor.detach().requires_grad_() for name, tensor in now.items()}
        at = index[:active, s]
        # Clients share nothing, so the gradient of the sum is each one's own gradient.
        losses = vmap(loss)(leaves, x[at], y[at])
        gradients = torch.autograd.grad(losses.sum(), list(leaves.values()))
        sgd(
            list(now.values()), [g.contiguous() for g in gradients], [m[:active] for m in memory.values()], fused=True,
            lr=LR, momentum=MOMENTUM, weight_decay=0, dampening=0, nesterov=False, maximize=False,
        )  # fmt: skip
    back = order.argsort().to(DEVICE)
    return {name: tensor[back] for name, tensor in params.items()}


# What the server does ----------------------------------------------------------------------------------------------


def recombined(trained: State, layers: list[list[str]], number: int) -> State:
    """Shuffle each layer among the K models (section 4.2.2): every layer of every model is used exactly once."""
    draws, k = generator("recombine", number), PARTICIPANTS
    result = {}
    for layer in layers:
        source = torch.randperm(k, generator=draws).to(DEVICE)
        result |= {name: trained[name][source] for name in layer}
    return {name: result[name] for name in trained}


def mean(trained: State) -> State:
    """The model to deploy: the uniform mean of the K models. Recombination does not change it (Lemma 4.4)."""
    weights = torch.full((PARTICIPANTS,), 1 / PARTICIPANTS, dtype=torch.float64).float().to(DEVICE)
    return {name: (weights @ tensor.flatten(1)).view(tensor.shape[1:]) for name, tensor in trained.items()}


@torch.no_grad()
def accuracy(net: nn.Module, state: State, x: Tensor, y: Tensor) -> float:
    """The share of images that a model gets right."""
    return (functional_call(net, state, (x,)).argmax(1) == y).double().mean().item()


def main() -> State:
    """Algorithm 1. Returns the trained global model."""
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
        slots = recombined(trained, layers, number)
        print(f"round {number:2}: {accuracy(net, deployed, test_x, test_y):.2%}")
    print(f"{time.perf_counter() - begin:.1f} s on {DEVICE}, torch {torch.__version__}")
    return deployed


if __name__ == "__main__":
    torch.set_num_threads(1)  # the tensors are so small that threads of a CPU would wait for each other
    main()

"""FeMAM from top to bottom: a client's prediction is a sum over levels, from one model for all to one of its own.

    python speedruns/femam.py    # 96.4% on the clients' own data; 4 s on one core of an Intel Xeon with torch 2.14

Chen et al., "Multi-Level Additive Modeling for Structured Non-IID Federated Learning" (2024), algorithm 2. Twenty
clients hold few handwritten digits. They form four groups with three of the ten classes each; the server does not know
the groups. First all clients train one model. It is then frozen, and four cluster models learn its residual; then four
more; then one model for each client. A client keeps a level's model only if the sum has a lower loss with it on the
client's validation data. (The paper leaves open how clusters begin: here by K-means in a level's first round. The
factor n_i/n of the gradient, equation B.4, is left out.)

The whole method is in this file: data, partition, model, local training, clusters, pruning, test. It imports only
torch, NumPy, and scikit-learn for the data and for K-means. Up to rounding, its accuracies are those that
`python -m fl.run femam --algorithm femam --backend vmap` has.
"""

import time
import zlib

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.cluster import KMeans
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.func import functional_call, vmap

SEED = 0
LEVELS = ("global", 4, 4, "personal")  # one model, cluster models, cluster models, one model for each client
ROUNDS = (50, 10, 10, 10)  # of each level
SAMPLES, CLIENTS, GROUPS, CLASSES = 600, 20, 4, 3  # of the data; the server does not know the groups
EPOCHS, BATCH, LR, PROX = 2, 10, 0.05, 0.02
VALID, TEST = 0.15, 0.2  # shares of a client's samples
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

State = dict[str, Tensor]  # a model's parameters by name; a stack has a leading axis of models


# Randomness: a stream for each purpose, round and client, so that no draw depends on the order of others ------------


def stream(purpose: str, number: int = 0, client: int = 0) -> np.random.SeedSequence:
    """Return the seeds of one purpose, round and client."""
    return np.random.SeedSequence([SEED, zlib.crc32(purpose.encode()), number, client])


def generator(purpose: str, number: int = 0, client: int = 0) -> torch.Generator:
    """Return a torch generator for one purpose, round and client."""
    high, low = stream(purpose, number, client).generate_state(2, np.uint32).tolist()
    return torch.Generator().manual_seed(high << 31 ^ low)


# Data --------------------------------------------------------------------------------------------------------------


def digits() -> tuple[Tensor, Tensor]:
    """Return 600 of the images, float [n, 1, 8, 8] in [-1, 1], and their labels."""
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(images.reshape(-1, 1, 8, 8), labels, test_size=0.2, stratify=labels, random_state=0)
    x, y = (torch.from_numpy(np.concatenate(parts[at : at + 2])) for at in (0, 2))
    chosen = torch.randperm(len(y), generator=generator("samples"))[:SAMPLES].sort().values
    return (x[chosen].float() * (2 / 16) - 1).to(DEVICE), y[chosen].to(DEVICE)


def partition(labels: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
    """Partition the samples by groups of clients: each group has some classes, and its clients equal parts of them."""
    groups, owner = np.arange(CLIENTS) * GROUPS // CLIENTS, np.full(len(labels), -1)
    classes = rng.permutation(10)
    times, rows = np.zeros(10, dtype=np.int64), []
    for _ in range(GROUPS):
        order = rng.permutation(10)
        rows.append(order[np.argsort(times[order], kind="stable")[:CLASSES]])  # classes that fewest groups have
        times[rows[-1]] += 1
    classes_of = classes[np.stack(rows)]  # [groups, CLASSES]
    for label in classes:
        clients = np.flatnonzero(np.isin(groups, np.flatnonzero((classes_of == label).any(1))))
        members, n = rng.permutation(np.flatnonzero(labels == label)), len(clients)
        if n:
            owner[members] = np.repeat(rng.permutation(clients), len(members) // n + (np.arange(n) < len(members) % n))
    return [np.flatnonzero(owner == client) for client in range(CLIENTS)]


def hold_out(parts: list[np.ndarray], rng: np.random.Generator) -> list[list[Tensor]]:
    """Split each client's samples at random; returns lists over the clients, for training, validation and test."""
    splits = []
    for part in parts:
        order, (v, t) = rng.permutation(len(part)), (round(share * len(part)) for share in (VALID, TEST))
        cut = len(part) - v - t
        splits.append([torch.from_numpy(np.sort(part[chosen])) for chosen in np.split(order, [cut, cut + v])])
    return [list(column) for column in zip(*splits)]


# The model ---------------------------------------------------------------------------------------------------------


def cnn(draws: torch.Generator) -> nn.Module:
    """Build a narrow version of McMahan's convolutional network (AISTATS 2017) for images of 8 by 8 pixels."""
    parts = {
        "conv1": nn.Conv2d(1, 8, 5, padding=2), "relu1": nn.ReLU(), "pool1": nn.MaxPool2d(2),
        "conv2": nn.Conv2d(8, 16, 5, padding=2), "relu2": nn.ReLU(), "pool2": nn.MaxPool2d(2),
        "flatten": nn.Flatten(),
        "fc1": nn.Linear(16 * 2 * 2, 128), "relu3": nn.ReLU(),
        "fc2": nn.Linear(128, 10),
    }  # fmt: skip
    net = nn.Sequential()
    for name, part in parts.items():
        net.add_module(name, part)
        if isinstance(part, nn.Conv2d | nn.Linear):
            bound = 1 / part.weight[0].numel() ** 0.5
            nn.init.kaiming_uniform_(part.weight, a=5**0.5, generator=draws)
            nn.init.uniform_(part.bias, -bound, bound, generator=draws)
    return net.to(DEVICE)


def parameters(net: nn.Module) -> State:
    """Return a model's parameters by name."""
    return {name: tensor.detach() for name, tensor in net.named_parameters()}


# What clients do ---------------------------------------------------------------------------------------------------


def batches(part: Tensor, client: int, number: int) -> Tensor:
    """Return the samples of a client's steps in a round, [steps, BATCH]; the last batch of an epoch is filled up."""
    draws, n = generator("batches", number, client), len(part)
    positions = torch.arange(-(-n // BATCH) * BATCH) % n
    return torch.cat([part[torch.randperm(n, generator=draws)[positions]] for _ in range(EPOCHS)]).view(-1, BATCH)


def train(net: nn.Module, starts: State, steps: list[Tensor], x: Tensor, y: Tensor, below: Tensor, mu: float) -> State:
    """Train K models side by side on the residual of the levels below (equation 8), whose logits are added.

    The models are sorted by their numbers of steps: the first ones always still train.

    Args:
        below: the summed logits of the levels below for each sample, [n, classes].
        mu: how strongly each model is pulled to the one that its client received (equation 5), or 0.
    """
    order = torch.tensor(sorted(range(len(steps)), key=lambda k: -len(steps[k])))
    params = {name: tensor[order.to(DEVICE)] for name, tensor in starts.items()}
    anchors = {name: tensor.clone() for name, tensor in params.items()}
    counts = [len(steps[k]) for k in order]
    index = nn.utils.rnn.pad_sequence([steps[k] for k in order], batch_first=True).to(DEVICE)

    def loss(params: State, anchor: State, x: Tensor, y: Tensor, before: Tensor) -> Tensor:
        value = F.cross_entropy(functional_call(net, params, (x,)) + before, y)
        if mu:
            apart = torch.cat([(p - anchor[name]).flatten() for name, p in params.items()])
            value = value + mu / 2 * apart.square().sum()
        return value

    for s in range(counts[0]):
        active = sum(count > s for count in counts)
        now = {name: tensor[:active] for name, tensor in params.items()}  # views: the step below writes into params
        leaves = {name: tensor.detach().requires_grad_() for name, tensor in now.items()}
        at = index[:active, s]
        losses = vmap(loss)(
            leaves, {name: tensor[:active] for name, tensor in anchors.items()}, x[at], y[at], below[at]
        )
        gradients = torch.autograd.grad(losses.sum(), list(leaves.values()))
        torch._foreach_add_(list(now.values()), gradients, alpha=-LR)
    back = order.argsort().to(DEVICE)
    return {name: tensor[back] for name, tensor in params.items()}


# What the server does ----------------------------------------------------------------------------------------------


def assign(trained: State, centres: State, begun: bool, number: int) -> Tensor:
    """Assign each client to the nearest model (equation 4), or by K-means in the first round, when all are equal."""
    states, models = (torch.cat([t.flatten(1) for t in stack.values()], 1) for stack in (trained, centres))
    if begun:
        return torch.cdist(states, models, compute_mode="donot_use_mm_for_euclid_dist").argmin(1).cpu()
    seed = int(np.random.default_rng(stream("clusters", number)).integers(2**31))
    clusters = KMeans(len(models), n_init=10, random_state=seed).fit(states.double().cpu().numpy()).labels_
    _, first, labels = np.unique(clusters, return_index=True, return_inverse=True)
    return torch.from_numpy(first.argsort().argsort()[labels])  # numbered by their first clients


def means(trained: State, used: Tensor, sizes: Tensor, old: State) -> State:
    """Average each model's clients by their samples (equation 7); a model that no client uses stays the same."""
    k = len(next(iter(old.values())))
    weights = F.one_hot(used + 1, k + 1)[:, 1:].T.double() * sizes  # the column of -1 (no model) is left out
    empty = (weights.sum(1) == 0).to(DEVICE)
    weights = (weights / weights.sum(1, keepdim=True).clamp(min=1)).float().to(DEVICE)
    return {
        name: torch.where(
            empty.view(-1, *[1] * (t.ndim - 1)), old[name], (weights @ t.flatten(1)).view(k, *t.shape[1:])
        )
        for name, t in trained.items()
    }


@torch.no_grad()
def logits(net: nn.Module, models: State, used: Tensor, parts: list[Tensor], x: Tensor) -> Tensor:
    """Return the logits of each client's model for the client's samples, and 0 elsewhere: [n, classes]."""
    result = torch.zeros(len(x), 10, device=DEVICE)
    for part, k in zip(parts, used.tolist()):
        if k >= 0:
            result[part] = functional_call(net, {name: tensor[k] for name, tensor in models.items()}, (x[part],))
    return result


def client_means(values: Tensor, parts: list[Tensor]) -> Tensor:
    """Return the mean over each client's samples, float64 [clients]."""
    return torch.stack([values[part].double().mean() for part in parts]).cpu()


def main() -> list[float]:
    """Run algorithm 2, and return the mean accuracy on the clients' own test data after each round."""
    x, y = digits()
    parts = partition(y.cpu().numpy(), np.random.default_rng(stream("partition")))
    training, valid, test = hold_out(parts, np.random.default_rng(stream("hold-out")))
    sizes = torch.tensor([len(part) for part in training])
    everyone = [torch.cat(parts) for parts in zip(training, valid, test)]
    net, below = cnn(generator("weights")), torch.zeros(len(x), 10, device=DEVICE)
    accuracies, number, begin = [], 0, time.perf_counter()
    for at, (kind, rounds) in enumerate(zip(LEVELS, ROUNDS)):
        width = {"global": 1, "personal": CLIENTS}.get(kind, kind)
        # All models of a level begin equal.
        start = parameters(cnn(generator("level", 0, at)) if at else net)
        models = {name: tensor.expand(width, *tensor.shape).clone() for name, tensor in start.items()}
        used = torch.arange(CLIENTS) if kind == "personal" else torch.zeros(CLIENTS, dtype=torch.int64)
        for turn in range(rounds):
            number += 1
            starts = {name: tensor[used.to(DEVICE)] for name, tensor in models.items()}
            steps = [batches(part, client, number) for client, part in enumerate(training)]
            mu = PROX if isinstance(kind, int) else 0
            trained = train(net, starts, steps, x, y, below, mu)
            if isinstance(kind, int):
                used = assign(trained, models, turn > 0, number)
            models = trained if kind == "personal" else means(trained, used, sizes, models)
            keeps, last = used, turn == rounds - 1
            if at and (last or kind == "personal"):  # equation 9: does this level lower the client's loss?
                new = below + logits(net, models, used, everyone, x)
                old, new = (client_means(F.cross_entropy(z.double(), y, reduction="none"), valid) for z in (below, new))
                keeps = torch.where(new < old, used, -1)
                if kind != "personal":  # clients that left the level do not count in the mean
                    models = means(trained, keeps, sizes, models)
            total = below + logits(net, models, keeps, everyone, x)
            accuracies.append(client_means(total.argmax(1) == y, test).mean().item())
            print(f"round {number:2}: level {at + 1} ({kind}), {accuracies[-1]:.2%} on the clients' own test data")
        below = total
    print(f"{time.perf_counter() - begin:.1f} s on {DEVICE}, torch {torch.__version__}")
    return accuracies


if __name__ == "__main__":
    torch.set_num_threads(1)  # on tensors this small, CPU threads only wait for each other
    main()

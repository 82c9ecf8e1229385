"""FedFA from top to bottom: federated learning among models of different width and depth.

    python speedruns/fedfa.py    # 95.0% after 20 rounds; 22 s on one core of an Intel Xeon with torch 2.14

Park and Joe-Wong, "Federated Learning with Flexible Architectures" (ECML-PKDD 2024), algorithms 1 to 3. Twenty clients
hold handwritten digits, and four sizes of one ResNet. A client's model is a part of the global one: the leading
channels of every layer, and the first blocks of every section. After local training the server makes it as deep as the
global model (copies of its last block stand for the blocks that it lacks), and scales each layer, so that no client
outweighs the others because its weights are large. Each weight of the global model becomes the mean over the clients
that have it.

The whole method is in this file: data, partition, model, cutting, grafting, local training, test. It imports only
torch, NumPy, and scikit-learn for the data. A model is a dict of tensors; their names say which blocks it has. Up to
rounding, a round computes what the library's `fedfa` computes with these settings.
"""

import math
import re
import time
import zlib

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.func import vmap
from torch.optim.sgd import sgd

SEED = 0
ROUNDS, CLIENTS, PARTICIPANTS = 20, 20, 5
EPOCHS, BATCH, LR, MOMENTUM = 5, 10, 0.05, 0.9
ALPHA, LEAST = 0.5, 10  # of the Dirichlet distribution; smallest number of samples per client
CHANNELS, DEPTH = (8, 16, 32), 3  # of each section; blocks of each section
SIZES = ((0.5, 2), (0.5, 3), (1.0, 2), (1.0, 3))  # width and depth: client k has size k modulo 4
QUANTILE = 0.95  # a layer's norm is of this share of its weights, the smallest ones
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


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return 1,437 training and 360 test images, float [n, 1, 8, 8] in [-1, 1], each with their labels."""
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(images.reshape(-1, 1, 8, 8), labels, test_size=0.2, stratify=labels, random_state=0)
    x, test_x, y, test_y = (torch.from_numpy(part).to(DEVICE) for part in parts)
    return x.float() * (2 / 16) - 1, y, test_x.float() * (2 / 16) - 1, test_y


def partition(labels: np.ndarray, rng: np.random.Generator) -> list[Tensor]:
    """Partition the samples: a Dirichlet distribution gives each client its own mixture of classes."""
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


# The model: a pre-activation ResNet-20 (He et al., ECCV 2016) with layer norm -----------------------------------------


def initial() -> State:
    """Initialise the global model: He's normal distribution for weights, the identity for norms."""
    draws, state, before = generator("weights"), {}, CHANNELS[0]

    def conv(name: str, inputs: int, outputs: int, kernel: int) -> None:
        weight = torch.empty(outputs, inputs, kernel, kernel)
        state[f"{name}.weight"] = weight.normal_(0, math.sqrt(2 / (outputs * kernel**2)), generator=draws)

    def norm(name: str, channels: int) -> None:
        state[f"{name}.weight"], state[f"{name}.bias"] = torch.ones(channels), torch.zeros(channels)

    conv("stem.conv", 1, before, 3)
    for section, channels in enumerate(CHANNELS, 1):
        for block in (f"section{section}.{depth}" for depth in range(DEPTH)):
            norm(f"{block}.norm1", before)
            conv(f"{block}.conv1", before, channels, 3)
            norm(f"{block}.norm2", channels)
            conv(f"{block}.conv2", channels, channels, 3)
            if before != channels:
                conv(f"{block}.shortcut", before, channels, 1)
            before = channels
    norm("tail.norm", before)
    state["head.weight"] = nn.init.kaiming_uniform_(torch.empty(10, before), a=5**0.5, generator=draws)
    state["head.bias"] = torch.empty(10).uniform_(-1 / math.sqrt(before), 1 / math.sqrt(before), generator=draws)
    return {name: tensor.to(DEVICE) for name, tensor in state.items()}


def forward(state: State, x: Tensor) -> Tensor:
    """Compute the logits [n, 10] of images [n, 1, 8, 8] with a model of any width and depth."""

    def conv(name: str, x: Tensor, stride: int = 1) -> Tensor:
        weight = state[f"{name}.weight"]
        return F.conv2d(x, weight, stride=stride, padding=weight.shape[-1] // 2)

    def active(name: str, x: Tensor) -> Tensor:
        return F.relu(F.group_norm(x, 1, state[f"{name}.weight"], state[f"{name}.bias"]))

    x = conv("stem.conv", x)
    for block in dict.fromkeys(m[0] for m in map(re.compile(r"section\d+\.\d+").match, state) if m):
        a = active(f"{block}.norm1", x)
        changes = f"{block}.shortcut.weight" in state
        branch = conv(f"{block}.conv1", a, 2 if changes else 1)
        x = (conv(f"{block}.shortcut", a, 2) if changes else x) + conv(
            f"{block}.conv2", active(f"{block}.norm2", branch)
        )
    return F.linear(active("tail.norm", x).mean((2, 3)), state["head.weight"], state["head.bias"])


# Cutting and grafting ----------------------------------------------------------------------------------------------


def block_of(name: str) -> tuple[str, int, str] | None:
    """Split a name within a block into section, number and rest: ("section2", 1, "conv1.weight")."""
    match = re.fullmatch(r"(section\d+)\.(\d+)\.(.*)", name)
    return match and (match[1], int(match[2]), match[3])


def cut(full: State, width: float, depth: int) -> State:
    """Cut a client's part out of the global model (algorithm 3): first blocks, leading channels.

    The data fix the numbers of colours and classes, so these stay.
    """
    result = {}
    for name, tensor in full.items():
        if (block := block_of(name)) and block[1] >= depth:
            continue
        outputs = 10 if name.startswith("head") else round(width * tensor.shape[0])
        tensor = tensor[:outputs]
        if tensor.ndim > 1 and name != "stem.conv.weight":
            tensor = tensor[:, : round(width * tensor.shape[1])]
        result[name] = tensor.clone()
    return result


def graft(small: State, depth: int) -> State:
    """Make a client's model as deep as the global one (algorithm 2) with copies of each section's last block."""
    result = dict(small)
    for name, tensor in small.items():
        if (block := block_of(name)) and block[1] == depth - 1:
            result |= {f"{block[0]}.{deeper}.{block[2]}": tensor for deeper in range(depth, DEPTH)}
    return result


def percentile_norm(tensors: list[Tensor]) -> Tensor:
    """Return the norm of a layer's weights without the largest 5%, where attackers and outliers would show."""
    magnitudes = torch.cat([tensor.flatten() for tensor in tensors]).abs()
    rank = math.floor(QUANTILE * (len(magnitudes) - 1))
    return magnitudes[magnitudes <= magnitudes.kthvalue(rank + 1).values].double().norm()


def average(models: list[State], sizes: list[int], old: State) -> State:
    """Scale each layer of each model to the clients' mean norm, then take the mean (algorithm 1, lines 12 to 24).

    Each element of the global model is the mean over the clients that have it, weighted by their samples. Without such
    a client it keeps its value.
    """
    factors: dict[str, Tensor] = {}
    for layer in {name.rpartition(".")[0]: None for name in old}:
        names = [name for name in old if name.rpartition(".")[0] == layer]
        norms = torch.stack([percentile_norm([model[name] for name in names]) for model in models])
        factors |= dict.fromkeys(names, (norms.mean() / norms).float())  # line 18
    result = {}
    for name, tensor in old.items():
        total, weight = torch.zeros_like(tensor), torch.zeros_like(tensor)
        for k, model in enumerate(models):
            corner = tuple(slice(n) for n in model[name].shape)
            total[corner] += sizes[k] * factors[name][k] * model[name]
            weight[corner] += sizes[k]
        result[name] = torch.where(weight > 0, total / weight, tensor)
    return result


# What clients do ---------------------------------------------------------------------------------------------------


def batches(part: Tensor, client: int, number: int) -> Tensor:
    """Return the samples of a client's steps in a round, [steps, BATCH]; the last batch of an epoch is filled up."""
    draws, n = generator("batches", number, client), len(part)
    positions = torch.arange(-(-n // BATCH) * BATCH) % n
    return torch.cat([part[torch.randperm(n, generator=draws)[positions]] for _ in range(EPOCHS)]).view(-1, BATCH)


def train(starts: list[State], steps: list[Tensor], x: Tensor, y: Tensor) -> list[State]:
    """Train models of one size side by side by SGD with momentum. Those with the most steps come first."""
    order = sorted(range(len(steps)), key=lambda k: -len(steps[k]))
    params = {name: torch.stack([starts[k][name] for k in order]) for name in starts[0]}
    memory = {name: torch.zeros_like(tensor) for name, tensor in params.items()}
    index = nn.utils.rnn.pad_sequence([steps[k] for k in order], batch_first=True).to(DEVICE)

    def loss(params: State, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(forward(params, x), y)

    for s in range(index.shape[1]):
        active = sum(len(samples) > s for samples in steps)
        now = {name: tensor[:active] for name, tensor in params.items()}  # views: the step below writes into params
        leaves = {name: tensor.detach().requires_grad_() for name, tensor in now.items()}
        at = index[:active, s]
        gradients = torch.autograd.grad(vmap(loss)(leaves, x[at], y[at]).sum(), list(leaves.values()))
        sgd(
            list(now.values()), [g.contiguous() for g in gradients], [m[:active] for m in memory.values()], fused=True,
            lr=LR, momentum=MOMENTUM, weight_decay=0, dampening=0, nesterov=False, maximize=False,
        )  # fmt: skip
    return [{name: tensor[order.index(k)] for name, tensor in params.items()} for k in range(len(steps))]


@torch.no_grad()
def accuracy(state: State, x: Tensor, y: Tensor) -> float:
    """Return the share of images that a model classifies correctly."""
    return (forward(state, x).argmax(1) == y).double().mean().item()


def main() -> State:
    """Run algorithm 1, and return the trained global model."""
    assert min(depth for _, depth in SIZES) > 1, "a section's first block changes the shape, so copies of it do not fit"
    x, y, test_x, test_y = digits()
    parts = partition(y.cpu().numpy(), np.random.default_rng(stream("partition")))
    model, begin = initial(), time.perf_counter()
    for number in range(1, ROUNDS + 1):
        clients = torch.randperm(CLIENTS, generator=generator("sample", number))[:PARTICIPANTS].tolist()
        trained = {}
        for size in SIZES:  # clients of one size train as one program
            alike = [client for client in clients if SIZES[client % len(SIZES)] == size]
            if alike:
                steps = [batches(parts[client], client, number) for client in alike]
                trained |= zip(alike, train([cut(model, *size)] * len(alike), steps, x, y))
        deep = [graft(trained[client], SIZES[client % len(SIZES)][1]) for client in clients]
        model = average(deep, [len(parts[client]) for client in clients], model)
        print(f"round {number:2}: {accuracy(model, test_x, test_y):.2%}")
    for width, depth in SIZES:
        print(f"width {width}, depth {depth}: {accuracy(cut(model, width, depth), test_x, test_y):.2%}")
    print(f"{time.perf_counter() - begin:.1f} s on {DEVICE}, torch {torch.__version__}")
    return model


if __name__ == "__main__":
    torch.set_num_threads(1)  # on tensors this small, CPU threads only wait for each other
    main()

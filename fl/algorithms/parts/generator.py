"""FedGen's generator of latents: Zhu et al., "Data-Free Knowledge Distillation for Heterogeneous Federated Learning"
(ICML 2021), section 4.1.

The generator is a dict of tensors and `generate` a function of it, so that it travels in the server's state and in the
clients' context like any other state.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from fl.base.rng import Rng
from fl.engine import Adam
from fl.engine.optimizers import Memory
from surgery import State

LEARNED = ("fc1.weight", "fc1.bias", "norm.weight", "norm.bias", "fc2.weight", "fc2.bias")


def initial_generator(noise: int, hidden: int, classes: int, latent: int) -> State:
    """A generator with torch's initial weights; "seen" are the labels that it has been trained for: none yet."""
    numbers = Rng(0).torch("fedgen")
    generator = {}
    for name, rows, columns in (("fc1", hidden, noise + classes), ("fc2", latent, hidden)):
        bound = 1 / math.sqrt(columns)
        generator[f"{name}.weight"] = torch.empty(rows, columns).uniform_(-bound, bound, generator=numbers)
        generator[f"{name}.bias"] = torch.empty(rows).uniform_(-bound, bound, generator=numbers)
    zeros, ones = torch.zeros(hidden), torch.ones(hidden)
    norm = {
        "norm.weight": ones,
        "norm.bias": zeros,
        "norm.running_mean": zeros.clone(),
        "norm.running_var": ones.clone(),
    }
    return {**generator, **norm, "seen": torch.zeros(classes, dtype=torch.bool)}


def generate(generator: State, noise: Tensor, labels: Tensor, training: bool = False) -> Tensor:
    """Latents [B, L] from noise [B, Z] and labels [B]: linear, batch norm, ReLU, linear.

    In training the norm uses the statistics of the batch and updates the running ones in place; otherwise it uses the
    running ones.
    """
    given = torch.cat([noise, F.one_hot(labels, len(generator["seen"])).to(noise.dtype)], 1)
    hidden = F.linear(given, generator["fc1.weight"], generator["fc1.bias"])
    statistics = generator["norm.running_mean"], generator["norm.running_var"]
    hidden = F.batch_norm(hidden, *statistics, generator["norm.weight"], generator["norm.bias"], training)
    return F.linear(hidden.relu(), generator["fc2.weight"], generator["fc2.bias"])


@torch.enable_grad()
def train_generator(
    generator: State,
    memory: Memory,
    adam: Adam,
    heads: tuple[Tensor, Tensor | None],
    shares: Tensor,
    noise: Tensor,
    labels: Tensor,
    diversity: float,
) -> tuple[State, Memory]:
    """The generator and the optimizer's memory after S steps; the arguments do not change.

    Each step minimises the mean, over its latents, of sum_k shares[k, y] CE(head_k(G(z, y)), y), plus
    diversity * exp(-mean_ij d(z_i, z_j) d(G_i, G_j)), where the distance of noise is the mean square difference, and
    that of latents the mean absolute difference.

    Args:
        heads: the clients' weights [K, C, L] and biases [K, C], or None if the head has no bias.
        shares: a client's share of all participants' samples with a label: [K, C].
        noise: [S, B, Z]. labels: [S, B].
    """
    generator = {name: tensor.clone() for name, tensor in generator.items()}
    memory = {kind: [tensor.clone() for tensor in tensors] for kind, tensors in memory.items()}
    learned = [generator[name].requires_grad_() for name in LEARNED]
    weight, bias = heads[0].flatten(0, 1), None if heads[1] is None else heads[1].flatten()  # all heads as one
    for z, y in zip(noise, labels):
        latents = generate(generator, z, y, training=True)
        logits = F.linear(latents, weight, bias).view(len(y) * len(shares), -1)
        losses = F.cross_entropy(logits, y.repeat_interleave(len(shares)), reduction="none")
        teachers = (losses.view(len(y), -1) * shares.T[y]).sum(1).mean()
        apart = (z[:, None] - z).square().mean(2) * torch.cdist(latents, latents, p=1) / latents.shape[1]
        gradients = torch.autograd.grad(teachers + diversity * (-apart.mean()).exp(), learned)
        with torch.no_grad():
            adam.step(learned, memory, gradients)
    return {name: tensor.detach() for name, tensor in generator.items()}, memory

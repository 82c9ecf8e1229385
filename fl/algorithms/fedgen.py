"""FedGen: Zhu et al., "Data-Free Knowledge Distillation for Heterogeneous Federated Learning" (ICML 2021),
algorithm 1.
"""

import math
from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fl.algorithms.algorithm import Algorithm
from fl.algorithms.fedavg import fedavg
from fl.algorithms.method import Method
from fl.base.errors import FLError
from fl.base.rng import Rng
from fl.base.settings import Above0, AtLeast0, number
from fl.engine import Adam
from fl.engine.objectives import Batch, Call, Objective
from fl.engine.optimizers import Memory
from fl.federation import Federation, traffic
from surgery import State, broadcast, layers
from surgery.transfer import upload

LEARNED = ("fc1.weight", "fc1.bias", "norm.weight", "norm.bias", "fc2.weight", "fc2.bias")
"""The parameters of the generator, a dict of tensors, so that it travels like any other state."""
_MEMORY = ("first", "second", "steps")


@dataclass(frozen=True)
class FedGenOptions:
    """FedGen."""

    alpha: AtLeast0 = 0.2
    """weight of the clients' cross entropy on generated latents (FedMR's released code: 0.2 for CIFAR-10, 10 for
    CIFAR-100 and FEMNIST; FedGen's: 10, which is too much for --momentum 0.9 and the default learning rate)"""
    beta: AtLeast0 = 0.2
    """weight of the clients' divergence from generated latents of their own labels (FedMR's released code: 0.2 for
    CIFAR-10, 1 for CIFAR-100, 10 for FEMNIST; FedGen's: 10, or 1 for EMNIST)"""
    decay: Annotated[float, number(float, above=0, most=1)] = 0.98
    """factor of alpha, beta and the generator's learning rate after each round (the released code; 1 keeps them, as
    FedMR's does)"""
    noise: Annotated[int, number(int, least=1, most=10**4)] = 100
    """normal numbers that the generator gets beside the label (FedMR's released code; FedGen's: 32 or 64)"""
    hidden: Annotated[int, number(int, least=1, most=10**5)] = 512
    """width of the generator's hidden layer (both released codes, for CIFAR-10)"""
    steps: Annotated[int, number(int, least=1, most=10**6)] = 50
    """steps of the generator's training a round (both released codes)"""
    batch: Annotated[int, number(int, least=2, most=10**5)] = 32
    """latents of such a step, two or more for its batch norm (the released code; FedMR's: 128)"""
    lr: Above0 = 3e-4
    """Adam's learning rate for the generator (both released codes; FedMR's for CIFAR-100: 1e-4)"""
    weight_decay: AtLeast0 = 1e-2
    """Adam's weight decay for the generator (both released codes)"""
    diversity: AtLeast0 = 1.0
    """weight of the generator's diversity loss (both released codes)"""


def fedgen(fed: Federation, options: FedGenOptions = FedGenOptions()) -> Algorithm:
    """FedAvg; clients also learn from latents that a generator on the server makes from noise and labels.

    A latent is the input of the model's last linear layer, the head. Clients minimise (section 4.2; see `distilling`)
    cross entropy + alpha CE(head(G(z, y')), y') + beta KL(head(G(z, y)) || model(x)), where the labels y' are sampled
    uniformly from the labels that the generator was trained for, and y are the labels of the batch. Both terms are left
    out until the generator has been trained once; clients never change it. The server averages the models, and trains
    the generator on the clients' heads, for labels that are as frequent as among the participants (section 4.1; see
    `train_generator`).

    alpha = beta = 0 is FedAvg. The generator starts from the same weights in every run.

    These come from the released code: the divergence (the paper has only the cross entropy), the uniform y' (the paper
    samples labels as frequent as they are), a mean of the heads' losses, weighted by their shares of a label (the paper
    has the loss of their mean logits), the diversity loss as an exponential, moments of Adam that last from round to
    round, and the decay. These do not: noise is normal, as in the paper; clients make as many latents as their batch
    has samples; the server samples labels by their frequency, as in the paper; and clients distil in all of their
    epochs, not only in the first 20.

    Raises:
        FLError: for a model that does not end in a linear layer with an output for each class, and for bad options.
    """
    weight, bias = _head(fed)
    like = dict(fed.model.named_parameters())[weight]
    device, classes, objective = like.device, fed.data.classes, distilling(weight, bias)
    labels = fed.data.y.cpu()

    def init():
        generator = initial_generator(options.noise, options.hidden, *like.shape)
        generator = {n: t.to(device, like.dtype if t.is_floating_point() else t.dtype) for n, t in generator.items()}
        memory = Adam().memory([generator[name] for name in LEARNED])
        return {"global": fed.initial(), "generator": generator, **_moments(memory)}

    def send(server, clients, rng):
        k = len(clients)
        return {"model": broadcast(server["global"], k), "generator": broadcast(server["generator"], k)}

    def client(message, client_states, clients, rng):
        generator, factor = message["generator"], options.decay ** (rng.round - 1)
        trained_before = generator["seen"].any(1).to(like.dtype)  # a tensor: nothing waits for the device
        context = {
            "generator": generator,
            "labels": generator["seen"].int().argsort(dim=1, descending=True, stable=True),
            "known": generator["seen"].sum(1),
            "alpha": options.alpha * factor * trained_before,
            "beta": options.beta * factor * trained_before,
        }
        return fed.train(message["model"], clients, rng, objective, context)

    def aggregate(server, clients, update, rng):
        sent = torch.tensor(update.arrived)
        counts = torch.stack([torch.bincount(labels[fed.clients.train[c]], minlength=classes) for c in clients])
        counts = counts * sent[:, None]
        noise, targets = _draw(counts.sum(0), options, rng)
        generator, memory = train_generator(
            server["generator"],
            {kind: list(server[f"generator_{kind}"].values()) for kind in _MEMORY},
            Adam(options.lr * options.decay ** (rng.round - 1), weight_decay=options.weight_decay),
            (update.received[weight], update.received[bias] if bias else None),
            upload((counts / counts.sum(0).clamp(min=1)).to(like.dtype), device),
            upload(noise.to(like.dtype), device),
            upload(targets, device),
            options.diversity,
        )
        generator["seen"] = generator["seen"] | upload(counts.sum(0) > 0, device)
        mean = fed.average(update.received, update.sizes)
        model = sum(tensor.nbytes for tensor in mean.values())
        metrics = traffic.more(update.metrics, model, up=counts[0].nbytes * sent.sum().item() / len(clients))
        return {"global": mean, "generator": generator, **_moments(memory)}, metrics

    return replace(fedavg(fed), init=init, send=send, client=client, aggregate=aggregate)


def distilling(weight: str, bias: str | None) -> Objective:
    """Return the clients' objective.

    Context: "generator", its state; "labels" [C], first those that it was trained for, and "known", the number of
    these; "alpha" and "beta", the weights of the two terms. Both terms generate as many latents as the batch has
    samples. These latents are constants, and so is the target of the divergence.

    Args:
        weight, bias: names of the head's parameters.
    """

    def objective(call: Call, params: State, context: Any, batch: Batch) -> Tensor:
        (x, y), generator = batch, context["generator"]
        size = len(y), generator["fc1.weight"].shape[1] - len(generator["seen"])

        def generated(labels: Tensor) -> Tensor:
            noise = torch.randn(size, dtype=params[weight].dtype, device=labels.device)
            return F.linear(generate(generator, noise, labels), params[weight], params[bias] if bias else None)

        logits = call(params, x)
        other = context["labels"][(torch.rand(len(y), device=y.device) * context["known"]).long()]
        target = generated(y).detach().log_softmax(1)
        divergence = (target.exp() * (target - logits.log_softmax(1))).sum(1).mean()  # vmap has no rule for F.kl_div
        distilled = context["alpha"] * F.cross_entropy(generated(other), other) + context["beta"] * divergence
        return F.cross_entropy(logits, y) + distilled

    return objective


def initial_generator(noise: int, hidden: int, classes: int, latent: int) -> State:
    """Return a generator with torch's initial weights.

    "seen" are the labels that it has been trained for: none yet.
    """
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
    """Return latents [B, L] from noise [B, Z] and labels [B].

    The layers are linear, batch norm, ReLU, linear. In training the norm uses the statistics of the batch and updates
    the running ones in place; otherwise it uses the running ones.
    """
    inputs = torch.cat([noise, F.one_hot(labels, len(generator["seen"])).to(noise.dtype)], 1)
    hidden = F.linear(inputs, generator["fc1.weight"], generator["fc1.bias"])
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
    """Return the generator and the optimizer's memory after S steps, as new objects.

    Each step minimises the mean, over its latents, of sum_k shares[k, y] CE(head_k(G(z, y)), y), plus
    diversity * exp(-mean_ij d(z_i, z_j) d(G_i, G_j)), where the distance of noise is the mean square difference, and
    the distance of latents the mean absolute difference.

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


def _moments(memory: Memory) -> dict[str, State]:
    """Return the memory of the generator's optimizer as parts of the server."""
    return {f"generator_{kind}": dict(zip(LEARNED, memory[kind])) for kind in _MEMORY}


def _draw(counts: Tensor, options: FedGenOptions, rng: Rng) -> tuple[Tensor, Tensor]:
    """Sample noise [S, B, Z] and labels [S, B] for a round's steps, on the CPU.

    Labels are as frequent as in `counts` [C].
    """
    generator, size = rng.torch("fedgen"), (options.steps, options.batch)
    noise = torch.randn(*size, options.noise, generator=generator)
    pool = torch.arange(len(counts)).repeat_interleave(counts)  # only labels that some client has
    return noise, pool[torch.randint(len(pool), size, generator=generator)]


def _head(fed: Federation) -> tuple[str, str | None]:
    """Return the names of weight and bias of the layer that makes the logits."""
    last = layers(fed.model)[-1]
    module, known = fed.model.get_submodule(last.name), dict(fed.model.named_parameters())
    names = [f"{last.name}.{name}".removeprefix(".") for name in ("weight", "bias")][: len(last.tensors)]
    fits = last.tensors == (*names,) and all(known[name].requires_grad for name in names)
    if fits and isinstance(module, nn.Linear) and module.out_features == fed.data.classes and _ends(fed, module):
        return names[0], names[1] if len(names) > 1 else None
    raise FLError(
        f"FedGen trains the last layer on generated inputs: it has to be a linear layer, not frozen, whose outputs are "
        f"an image's logits of {fed.data.classes} classes, and {type(fed.model).__name__}'s is {last.name} "
        f"({last.kind}); choose another --model or --algorithm",
        code="unsupported",
    )


@torch.no_grad()
def _ends(fed: Federation, module: nn.Linear) -> bool:
    """Return whether the model's output is this layer's, of one vector an image."""
    seen = []
    hook = module.register_forward_hook(lambda _, inputs, out: seen.append(inputs[0]))
    try:
        logits = fed.model.eval()(fed.data.example(dtype=module.weight.dtype))
    finally:
        hook.remove()
    if not seen or seen[-1].ndim != 2:
        return False
    expected = F.linear(seen[-1], module.weight, module.bias)
    return logits.shape == expected.shape and torch.allclose(logits, expected, rtol=1e-3, atol=1e-5)


METHOD = Method(
    fedgen,
    FedGenOptions(),
    labels=lambda options: True,
    lacks={"several_classifiers", "masked_logits", "any_loss", "dense"},
)

"""Per-FedAvg: Fallah et al., "Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic
Meta-Learning Approach" (NeurIPS 2020), algorithm 1 with the first-order approximation (FO) of section 4.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from fl.algorithms.algorithm import Algorithm
from fl.algorithms.fedavg import fedavg
from fl.algorithms.method import Method
from fl.algorithms.parts.beside import beside, part_of
from fl.algorithms.parts.personal import adapt_clients, side_by_side, train_or_keep
from fl.base.settings import AtLeast0, Natural
from fl.engine import SGD
from fl.engine.losses import Loss, of_samples, per_sample
from fl.engine.objectives import Batch, Call, Objective
from fl.federation import Federation
from fl.partition import Split
from surgery import State


@dataclass(frozen=True)
class PerFedAvgOptions:
    """Per-FedAvg."""

    alpha: AtLeast0 = 0.01
    """learning rate of the step with which a client adapts the model to its data"""
    steps: Natural = 1
    """steps by which a client adapts the model before it predicts (the paper: 1)"""


def perfedavg(fed: Federation, options: PerFedAvgOptions = PerFedAvgOptions()) -> Algorithm:
    """FedAvg of a model that is good after one step: clients predict with the global model after a step on their data.

    Each step of a participant takes the gradient not where it is, but one step ahead:

        w' = w - alpha grad f(w; D),    w ← w - eta grad f(w'; D')

    D and D' are the first and the second half of its batch (with an odd number, the sample in the middle is in both),
    so that --batch-size is what both have together. The second step is the clients' optimizer's, as everywhere; the
    first is plain. A step passes the whole batch through the model twice, so that batch norms see it all; their running
    statistics come from the first pass. The loss is taken on D at w.

    To predict, a client makes `steps` plain steps of rate alpha from the global model, each on as many of its training
    samples as a batch has. One that diverges keeps the global model.

    This leaves out the factor I - alpha H(w) of the gradient, which the paper estimates by a third batch and two more
    passes in its second approximation (HF). That one is not offered: a client's step here has two gradients, not four.
    """
    phased = replace(fed, model=WithPhase(fed.model))

    def ahead(params, gradients):
        return {n: torch.ones_like(g) if n == "second" else -options.alpha * g for n, g in gradients.items()}

    objective = by_halves(fed.local.loss)

    def client(message, client_states, clients, rng):
        start = message["model"]
        first = next(iter(start.values()))
        phase = {"second": torch.zeros(len(clients), dtype=phased.model.second.dtype, device=first.device)}
        update = phased.train({**beside(model=start), **phase}, clients, rng, objective, ascent=ahead)
        states, received = part_of(update.states, "model"), part_of(update.received, "model")
        return update._replace(states=states, received=received)

    def adapt(models, clients, rng):
        size, parts = fed.local.size_of_batches(fed.clients.train), list(fed.clients)
        for client in clients:
            split, numbers = parts[client], rng.torch("samples", client)
            order = torch.randperm(len(split.train), generator=numbers)
            few = split.train[order[torch.arange(options.steps * size) % len(order)]]
            parts[client] = Split(few, split.valid, split.test)
        return train_or_keep(replace(plain, clients=parts), models, clients, rng)

    plain = side_by_side(
        fed, epochs=1, repeats=1, optimizer=SGD(lr=options.alpha, momentum=0.0), schedule=lambda number: 1.0
    )
    algorithm = replace(fedavg(fed), client=client)
    return adapt_clients(algorithm, adapt) if options.steps else algorithm


class WithPhase(nn.Module):
    """The model, and a number: 0 if a step takes the first of its two gradients."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        like = next(model.parameters())
        self.model, self.second = model, nn.Parameter(torch.zeros((), dtype=like.dtype, device=like.device))

    def forward(self, x: Tensor) -> Tensor:
        """Return the model's output."""
        return self.model(x)


def by_halves(loss: Loss) -> Objective:
    """Return the loss of a `WithPhase` over the first or the second half of a batch.

    Its number has gradient 0.
    """

    def objective(call: Call, params: State, context: State, batch: Batch) -> Tensor:
        x, y = batch
        logits, second, rows = call(params, x), params["second"], torch.arange(len(y), device=y.device)
        counts = torch.where(second > 0, rows >= len(y) // 2, rows < (len(y) + 1) // 2).to(second.dtype)
        losses = of_samples(per_sample(loss, logits, y), loss, y)
        return (losses * counts).sum() / counts.sum() + 0 * second

    return objective


METHOD = Method(perfedavg, PerFedAvgOptions(), clients="personalized", mean_only=True)

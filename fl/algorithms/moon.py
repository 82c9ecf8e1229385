"""MOON: Li et al., "Model-Contrastive Federated Learning" (CVPR 2021), algorithm 1."""

import copy
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fl.algorithms.algorithm import Algorithm
from fl.algorithms.fedavg import fedavg
from fl.algorithms.method import Method
from fl.algorithms.parts.beside import beside, part_of
from fl.algorithms.parts.representation import head_of, represent
from fl.base.settings import Above0, AtLeast0
from fl.engine.losses import Loss, mean
from fl.engine.objectives import Batch, Call, Objective
from fl.federation import Federation
from fl.federation.clients import CLIENTS
from surgery import State


@dataclass(frozen=True)
class MOONOptions:
    """MOON."""

    mu: AtLeast0 = 1.0
    """weight of the contrastive loss (the released code: 1; its example on CIFAR-10: 5); 0 is FedAvg"""
    temperature: Above0 = 0.5
    """what similarities are divided by (the released code: 0.5)"""


def moon(fed: Federation, options: MOONOptions = MOONOptions()) -> Algorithm:
    """FedAvg; clients keep representations near the received model's and away from their own last model's.

    With z, z_glob and z_prev a sample's representations in the model that trains, in the received one and in the one
    that this client trained when it last took part, clients minimise (equation 3)

        loss - mu log(exp(cos(z, z_glob) / T) / (exp(cos(z, z_glob) / T) + exp(cos(z, z_prev) / T)))

    A representation is what the layer is given that makes the logits, whatever the model is. The paper puts a
    projection of two layers before that one, which is an affair of the model here. The two other models stay as they
    are, and look at the batch as in evaluation: with running statistics, without dropout (as in the released code). A
    client keeps one model, and trains in the memory of three.

    A client that takes part for the first time takes the received model for its last one: its contrastive loss is
    mu log 2 and has no gradient. The released code leaves the loss out in the first round; in later ones, a client that
    was never sampled has a random last model.

    mu = 0 is FedAvg.

    Raises:
        FLError: for a model that does not end in a linear layer, or that trains nothing else.
    """
    three = replace(fed, model=ContrastiveTriple(fed.model, head_of(fed, "moon")))
    objective = contrastive(fed.local.loss, options.mu, options.temperature)

    def init():
        start = fed.initial()
        never = torch.zeros((), dtype=torch.bool, device=fed.data.device)
        return {"global": start, CLIENTS: fed.client_states({**beside(last=start), "took_part": never})}

    def client(message, client_states, clients, rng):
        start, before = message["model"], client_states["took_part"]
        last = {
            name: torch.where(before.view(-1, *[1] * (start[name].ndim - 1)), tensor, start[name])
            for name, tensor in part_of(client_states, "last").items()
        }
        update = three.train(beside(model=start, received=start, last=last), clients, rng, objective)
        states, received = part_of(update.states, "model"), part_of(update.received, "model")
        own_states = {**beside(last=states), "took_part": torch.ones_like(before)}
        return update._replace(states=states, received=received, client_states=own_states)

    return replace(fedavg(fed), init=init, client=client)


class ContrastiveTriple(nn.Module):
    """The model that trains, the received one, and the client's last one.

    Only the first changes. Its output is the logits of the first, and the representations of all three.
    """

    def __init__(self, model: nn.Module, head: str) -> None:
        super().__init__()
        self.model, self.head = model, head
        self.received, self.last = (copy.deepcopy(model).requires_grad_(False) for _ in range(2))

    def train(self, mode: bool = True) -> "ContrastiveTriple":
        """Set the mode of the model; the two others are always in evaluation mode."""
        super().train(mode)
        self.received.eval()
        self.last.eval()
        return self

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the logits of the first and the representations of all three."""
        logits, z = represent(self.model, self.head, x)
        return logits, z, represent(self.received, self.head, x)[1], represent(self.last, self.head, x)[1]


def contrastive(loss: Loss, mu: float, temperature: float) -> Objective:
    """Return the loss + mu times the contrastive loss, means over the batch.

    Of text the mean is over tokens.
    """

    def objective(call: Call, params: State, context: State, batch: Batch) -> Tensor:
        x, y = batch
        logits, z, received, last = call(params, x)
        nearer = F.cosine_similarity(z, last, dim=-1) - F.cosine_similarity(z, received, dim=-1)
        return mean(loss, logits, y) + mu * F.softplus(nearer / temperature).mean()

    return objective


METHOD = Method(moon, MOONOptions(), mean_only=True, lacks={"several_classifiers", "masked_logits"})

"""APFL: Deng et al., "Adaptive Personalized Federated Learning" (2020, arXiv 2003.13461), algorithm 1."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fl.algorithms.algorithm import Algorithm
from fl.algorithms.fedavg import fedavg
from fl.algorithms.method import Method
from fl.algorithms.parts.beside import beside, part_of
from fl.base.settings import Share
from fl.engine import Optimizer
from fl.engine.losses import Loss, mean
from fl.engine.objectives import Batch, Call, Objective
from fl.engine.optimizers import Memory
from fl.federation import Federation
from fl.federation.clients import CLIENTS
from surgery import State


@dataclass(frozen=True)
class APFLOptions:
    """APFL."""

    alpha: Share = 0.5
    """share of a client's own model in what it predicts with (the released code's example: 0.5); 0 predicts as FedAvg,
    1 as Local"""
    adaptive: bool = False
    """let each client learn its share, which begins at alpha: one step of gradient descent a round"""


def apfl(fed: Federation, options: APFLOptions = APFLOptions()) -> Algorithm:
    """FedAvg; clients mix the global model w with their own model v. They predict with alpha v + (1 - alpha) w.

    A participant makes two steps on each batch, both from where the two models are, w as in FedAvg, and v along the
    gradient of the loss of the mixture with respect to v:

        w ← w - eta grad f(w),    v ← v - eta alpha grad f(alpha v + (1 - alpha) w)

    and sends w, which is averaged. v begins as the initial model, also for a client that never took part, and continues
    from where it was. Mixed are the trained parameters; the buffers (batch-norm statistics) of the mixture are v's.
    Each model has its own optimizer: momentum or moments, weight decay, clipping. The loss is w's.

    With `adaptive`, alpha ← alpha - eta <v - w, grad f(alpha v + (1 - alpha) w)>, kept within [0, 1], at the first step
    of a client in each round, as in the released code.

    Unlike the released code, which mixes the logits of two models, this mixes their parameters, as in the paper; v's
    step sees w as it was before that batch; alpha is not pulled to 0; and a client predicts with a mixture of v and the
    newest global model, not of v and the w that it has trained itself. A client trains in the memory of two models.
    """
    mixture = ModelMixture(fed.model, options.alpha, options.adaptive)
    optimizer = TwoModelOptimizer(fed.local.optimizer.lr, fed.local.optimizer, options.adaptive)
    objective = mix(fed.local.loss)
    both = replace(fed.with_local(optimizer=optimizer), model=mixture)

    def init():
        start = fed.initial()
        alpha = torch.tensor(options.alpha, dtype=mixture.alpha.dtype, device=mixture.alpha.device)
        return {"global": start, CLIENTS: fed.client_states({**beside(own=start), "alpha": alpha})}

    def client(message, client_states, clients, rng):
        update = both.train({**beside(model=message["model"]), **client_states}, clients, rng, objective)
        personal = {name: update.states[name] for name in client_states}
        states, sent = part_of(update.states, "model"), part_of(update.received, "model")
        return update._replace(states=states, received=sent, client_states=personal)

    def personalize(models, client_states, clients, rng):
        return mixture.mean(part_of(client_states, "own"), models, client_states["alpha"])

    return replace(fedavg(fed), init=init, client=client, personalize=personalize)


class ModelMixture(nn.Module):
    """The shared model, the client's own model, and the own model's share (alpha).

    Its output is the logits of the shared model and the logits of the mixture.
    """

    def __init__(self, model: nn.Module, alpha: float, adaptive: bool) -> None:
        super().__init__()
        self.learnt = [name for name, p in model.named_parameters() if p.requires_grad]
        like = next(model.parameters())
        self.model, self.own = model, copy.deepcopy(model)
        self.alpha = nn.Parameter(torch.tensor(alpha, dtype=like.dtype, device=like.device), requires_grad=adaptive)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits of the shared model and of the mixture.

        The mixture's gradient does not reach the shared model.
        """
        shared = {name: p.detach() for name, p in self.model.named_parameters()}
        personal = dict(self.own.named_parameters())
        logits = self.model(x)
        return logits, functional_call(self.own, self.mean(personal, shared, self.alpha), (x,))

    def mean(self, personal: Mapping[str, Tensor], shared: Mapping[str, Tensor], alpha: Tensor) -> State:
        """Return alpha personal + (1 - alpha) shared.

        Of single states, or of stacks with an alpha each. Tensors that are not trained are the personal ones.

        >>> mean = ModelMixture(nn.Linear(1, 1, bias=False), 0.5, False).mean
        >>> mean({"weight": torch.tensor([[[4.0]]])}, {"weight": torch.tensor([[[2.0]]])}, torch.tensor([0.25]))
        {'weight': tensor([[[2.5000]]])}
        """
        shares = {name: alpha.view(*alpha.shape, *[1] * (personal[name].ndim - alpha.ndim)) for name in self.learnt}
        return {**personal} | {
            name: share * personal[name] + (1 - share) * shared[name] for name, share in shares.items()
        }


def mix(loss: Loss) -> Objective:
    """Return the shared model's loss; the gradient adds the mixture's for the rest."""

    def objective(call: Call, params: State, context: State, batch: Batch) -> Tensor:
        x, y = batch
        shared, mixture = (mean(loss, logits, y) for logits in call(params, x))
        return shared + mixture - mixture.detach()

    return objective


class TwoModelOptimizer(NamedTuple):
    """The optimizer of a `ModelMixture`: one for each model, and one for an adaptive alpha.

    Alpha takes a step once a round.

    Attributes:
        lr: the learning rate of all.
        inner: the models' optimizer. Its own learning rate is not used.
    """

    lr: float | Tensor
    inner: Optimizer
    adaptive: bool

    def memory(self, params: Sequence[Tensor]) -> Memory:
        """Return the initial optimizer state: both models' and the number of the step."""
        of_models = (self.inner.memory(half) for half in self._models(params))
        entries = {f"{i}.{name}": tensors for i, memory in enumerate(of_models) for name, tensors in memory.items()}
        return {**entries, "made": [torch.zeros((), dtype=torch.int64, device=params[0].device)]}

    def step(self, params: list[Tensor], memory: Memory, gradients: Sequence[Tensor | None], lead: int = 0) -> None:
        """Take a step, see `fl.engine.SGD.step`.

        The count stays on the device, so that every step is the same.
        """
        for i, (half, slopes) in enumerate(zip(self._models(params), self._models(gradients))):
            entries = {name.removeprefix(f"{i}."): t for name, t in memory.items() if name.startswith(f"{i}.")}
            self.inner._replace(lr=self.lr).step(half, entries, slopes, lead)
        first = memory["made"][0].add_(1) == 1
        if self.adaptive:
            params[0].sub_(first * self.lr * gradients[0]).clamp_(0, 1)

    def _models(self, values: Sequence) -> tuple[list, list]:
        """Return what is the shared model's and what the client's own; alpha comes first."""
        values = list(values[1:] if self.adaptive else values)
        return values[: len(values) // 2], values[len(values) // 2 :]


METHOD = Method(apfl, APFLOptions(), clients="personalized", mean_only=True, lacks={"masked_logits"})

"""pFedMe: Dinh et al., "Personalized Federated Learning with Moreau Envelopes" (NeurIPS 2020), algorithm 1; its
released code where the paper is silent.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fl.algorithms.algorithm import Algorithm
from fl.algorithms.method import Method
from fl.algorithms.parts.beside import beside, part_of
from fl.algorithms.parts.personal import with_own_models
from fl.base.settings import Above0, AtLeast0, AtLeast1
from fl.base.torch_private import foreach_add_, foreach_mul_, foreach_sub
from fl.engine import Optimizer
from fl.engine.objectives import Batch, Call, Objective
from fl.engine.optimizers import Memory
from fl.federation import Federation
from surgery import State


@dataclass(frozen=True)
class PFedMeOptions:
    """pFedMe."""

    lam: Above0 = 0.1
    """weight of the proximal term between a client's personal model and its copy of the global one (FeMAM's paper: 0.1;
    pFedMe's: 15)"""
    mu: AtLeast0 = 0.01
    """weight of the personal model's squared length (FeMAM's paper: 0.01; the released code: 0.001)"""
    inner_steps: AtLeast1 = 5
    """steps of the personal model on each batch (the paper's K)"""
    outer_lr: AtLeast0 = 0.0
    """learning rate of the client's copy of the global model, times --lr-schedule; 0: as --lr"""
    mixing: Above0 = 1.0
    """the server's step from the old global model to the clients' mean (the paper's beta; above 1 it goes beyond)"""


def pfedme(fed: Federation, options: PFedMeOptions = PFedMeOptions()) -> Algorithm:
    """Clients train personal models near copies of the global model; the copies follow them slowly, and are averaged.

    With theta, the personal model, and w, the copy, both the global model at first, a participant does for each batch

        inner_steps times a step on theta along the gradient of CE + lam/2 ||theta - w||^2 + mu/2 ||theta||^2,
        once w <- w - outer_lr lam (w - theta),

    and the server global <- (1 - mixing) global + mixing mean_i w_i, the mean weighted by the number of samples. The
    personal model begins every round at the global one, and continues from batch to batch, as in the released code.
    Weight decay, clipping and momentum (or Adam's moments) of the clients' optimizer apply to theta; what the optimizer
    remembers lasts from batch to batch. Buffers (batch-norm statistics) are theta's. They are averaged without mixing,
    since variances must not become negative.

    A client predicts with its personal model; one that never took part has the initial model. The trained states are
    the copies, which are sent; the loss is the personal models', with all terms. A client needs the memory of
    two models to train. With outer_lr lam = 1, one inner step and mu = 0 this is FedAvg.
    """
    pair = PersonalAndLocal(fed.model)
    pull = options.lam * (options.outer_lr / fed.local.optimizer.lr if options.outer_lr else 1.0)
    optimizer = MoreauOptimizer(fed.local.optimizer.lr, fed.local.optimizer, options.inner_steps, pull)
    both = replace(fed.with_local(optimizer=optimizer, repeats=options.inner_steps), model=pair)
    objective = envelop(fed.local.objective, options.lam, options.mu)

    def client(message, client_states, clients, rng):
        trained = both.train(pair.starting_from(message["model"]), clients, rng, objective)
        sent = pair.copy_of(trained.received)
        return trained._replace(states=sent, received=sent, client_states=pair.personal_of(trained.states))

    def aggregate(server, clients, update, rng):
        mean = fed.average(update.received, update.sizes)
        for name in pair.learnt:
            mean[name] = torch.lerp(server["global"][name], mean[name], options.mixing)
        return {"global": mean}

    return replace(with_own_models(fed), client=client, aggregate=aggregate)


class PersonalAndLocal(nn.Module):
    """A personal model, and beside it a copy of the global one: theta and w.

    The copy has the parameters that are trained, in their order.

    Attributes:
        learnt: the names of these parameters in the model.

    >>> [name for name, _ in PersonalAndLocal(nn.Linear(2, 3)).named_parameters()]
    ['personal.weight', 'personal.bias', 'local.0', 'local.1']
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.personal = model
        self.learnt = [name for name, p in model.named_parameters() if p.requires_grad]
        self.local = nn.ParameterList(p.detach().clone() for p in model.parameters() if p.requires_grad)

    def forward(self, x: Tensor) -> Tensor:
        """Return the personal model's output."""
        return self.personal(x)

    def starting_from(self, start: State) -> State:
        """Return a state of the pair, or a stack, with both models as the given one."""
        return beside(personal=start) | {f"local.{i}": start[name] for i, name in enumerate(self.learnt)}

    def personal_of(self, state: State) -> State:
        """Return the personal model of a state of the pair."""
        return part_of(state, "personal")

    def copy_of(self, state: State) -> State:
        """Return the copy of the global model.

        What is not trained, such as buffers, is the personal model's.

        >>> pair, start = PersonalAndLocal(nn.BatchNorm1d(1)), {"weight": 1, "bias": 2, "running_mean": 3}
        >>> pair.copy_of({**pair.starting_from(start), "local.1": 7, "personal.running_mean": 8, "personal.bias": 9})
        {'weight': 1, 'bias': 7, 'running_mean': 8}
        """
        return self.personal_of(state) | {name: state[f"local.{i}"] for i, name in enumerate(self.learnt)}


def envelop(loss: Objective, lam: float, mu: float) -> Objective:
    """Return the loss + lam/2 ||theta - w||^2 + mu/2 ||theta||^2 (equation 3).

    w has no gradient.
    """

    def objective(call: Call, params: State, context: State, batch: Batch) -> Tensor:
        theta, w = _halves(list(params.values()))
        apart = sum((p - q.detach()).square().sum() for p, q in zip(theta, w))
        length = sum(p.square().sum() for p in theta)
        return loss(call, params, context, batch) + lam / 2 * apart + mu / 2 * length

    return objective


class MoreauOptimizer(NamedTuple):
    """The optimizer of a `PersonalAndLocal`: steps of theta, then one of w.

    Attributes:
        lr: theta's learning rate.
        inner: theta's optimizer. Its own learning rate is not used.
        inner_steps: steps of theta for one of w.
        pull: w <- w + pull lr (theta - w).

    >>> from fl.engine import SGD
    >>> pair, envelope = [torch.zeros(1), torch.zeros(1)], MoreauOptimizer(0.5, SGD(momentum=0.0), 2, pull=1.0)
    >>> memory = envelope.memory(pair)
    >>> for _ in range(2):
    ...     envelope.step(pair, memory, [torch.ones(1), None])
    ...     pair
    [tensor([-0.5000]), tensor([0.])]
    [tensor([-1.]), tensor([-0.5000])]
    """

    lr: float | Tensor
    inner: Optimizer
    inner_steps: int
    pull: float

    def memory(self, params: Sequence[Tensor]) -> Memory:
        """Return the initial memory: theta's and the number of its steps."""
        theta, _ = _halves(params)
        return {**self.inner.memory(theta), "made": [torch.zeros((), dtype=torch.int64, device=theta[0].device)]}

    def step(self, params: list[Tensor], memory: Memory, gradients: Sequence[Tensor | None], lead: int = 0) -> None:
        """Take a step, see `fl.engine.SGD.step`.

        The count stays on the device, so that every step is the same.
        """
        theta, w = _halves(params)
        inner_memory = {name: tensors for name, tensors in memory.items() if name != "made"}
        self.inner._replace(lr=self.lr).step(theta, inner_memory, _halves(gradients)[0], lead)
        count = memory["made"][0].add_(1)
        share = (count % self.inner_steps == 0).to(w[0].dtype) * self.pull * self.lr
        towards = foreach_sub(theta, w)
        foreach_mul_(towards, share)
        foreach_add_(w, towards)


def _halves(values: Sequence) -> tuple[Sequence, Sequence]:
    """Return what is theta's and what is w's."""
    half = len(values) // 2
    return values[:half], values[half:]


METHOD = Method(pfedme, PFedMeOptions(), clients="personalized", mean_only=True)

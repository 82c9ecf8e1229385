"""pFedMe: Dinh et al., "Personalized Federated Learning with Moreau Envelopes" (NeurIPS 2020), algorithm 1; its
released code where the paper is silent.
"""

from dataclasses import dataclass, replace

import torch

from fl.algorithms.algorithm import Algorithm
from fl.algorithms.method import Method
from fl.algorithms.parts.envelope import Envelope, Pair, enveloped
from fl.algorithms.parts.personal import with_own_models
from fl.base.settings import Above0, AtLeast0, AtLeast1
from fl.federation import Federation


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
    """learning rate of the client's copy of the global model, which goes with --lr-schedule; 0: as --lr"""
    mixing: Above0 = 1.0
    """the server's step from the old global model to the clients' mean (the paper's beta; above 1 it goes beyond)"""


def pfedme(fed: Federation, options: PFedMeOptions = PFedMeOptions()) -> Algorithm:
    """Clients train personal models near a copy of the global model, which follows them slowly and is what is averaged.

    With theta, the personal model, and w, the copy, both the global model at first, a participant does for each batch

        inner_steps times a step on theta along the gradient of CE + lam/2 ||theta - w||^2 + mu/2 ||theta||^2,
        once w <- w - outer_lr lam (w - theta),

    and the server global <- (1 - mixing) global + mixing mean_i w_i, the mean weighted by the number of samples. The
    personal model begins every round at the global one, and goes on from batch to batch, as in the released code.
    Weight decay, clipping and momentum (or Adam's moments) of the clients' optimizer apply to theta; what the optimizer
    remembers lasts from batch to batch. Buffers (batch-norm statistics) are those of theta. They are averaged without
    mixing, since variances must not become negative.

    A client predicts with its personal model; one that never took part has the initial model. The trained states are
    the copies, which are sent; the loss is that of the personal models, with all terms. A client needs the memory of
    two models to train. With outer_lr lam = 1, one inner step and mu = 0 this is FedAvg.
    """
    pair = Pair(fed.model)
    pull = options.lam * (options.outer_lr / fed.local.optimizer.lr if options.outer_lr else 1.0)
    optimizer = Envelope(fed.local.optimizer.lr, fed.local.optimizer, options.inner_steps, pull)
    both = replace(fed.with_local(optimizer=optimizer, repeats=options.inner_steps), model=pair)
    objective = enveloped(options.lam, options.mu)

    def client(message, own, clients, rng):
        trained = both.train(pair.starting_from(message["model"]), clients, rng, objective)
        sent = pair.copy_of(trained.received)
        return trained._replace(states=sent, received=sent, own=pair.personal_of(trained.states))

    def server(state, clients, update, rng):
        mean = fed.average(update.received, update.sizes)
        for name in pair.learnt:
            mean[name] = torch.lerp(state["global"][name], mean[name], options.mixing)
        return {"global": mean}

    return replace(with_own_models(fed), client=client, server=server)


METHOD = Method(pfedme, PFedMeOptions(), clients="personalized")

"""FedMD: Li and Wang, "FedMD: Heterogenous Federated Learning via Model Distillation" (2019, arXiv 1910.03581),
algorithm 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
from torch import Tensor

from fl.algorithms.algorithm import Algorithm
from fl.algorithms.method import Method
from fl.algorithms.parts.own_models import OwnModels
from fl.algorithms.parts.personal import train_or_keep
from fl.base.errors import FLError
from fl.base.rng import Rng, draw
from fl.base.settings import AtLeast1, number
from fl.engine.augment import Augment
from fl.engine.objectives import Batch, Call
from fl.federation import Federation
from fl.federation.clients import CLIENTS
from fl.federation.cohort import States, per_client
from fl.partition import Split, Splits
from surgery import State, broadcast
from surgery.transfer import upload


@dataclass(frozen=True)
class FedMDOptions:
    """FedMD."""

    public: Annotated[float, number(float, above=0, below=1)] = 0.1
    """share of the clients' training samples that become public; no client trains on their labels"""
    samples: AtLeast1 = 5000
    """number of public samples that each round takes at random; all, if there are fewer (the paper: 5000)"""
    epochs: AtLeast1 = 1
    """epochs of learning the mean logits of the public samples in a round (the released code: 1)"""


def fedmd(fed: Federation, options: FedMDOptions = FedMDOptions()) -> Algorithm:
    """Train a model of its own on each client, and send logits of public samples instead of weights.

    A round has three steps. First a participant learns the mean logits of this round's public samples, which the
    participants of the round before have sent (digest). The loss is the mean absolute distance from its own logits, as
    in the released code. Then it trains on its own samples (revisit). Last it sends its logits, in evaluation mode, of
    the next round's public samples. The server averages them with equal weights. The first round has no digest.

    The public samples are a share of the clients' training samples, which clients then no longer train on. Their labels
    are not used. Unlike in the paper, models do not begin by training on public samples with labels; they begin as the
    initial model.

    Clients may have models of several architectures: see `OwnModels`, also for the model of an unknown client. A client
    that never took part has the initial model of its architecture.

    Raises:
        FLError: if the share is less than one sample, or if clients are on other machines, which have no public
            samples.
    """
    if not fed.transport.has_data:
        raise FLError(
            "fedmd needs public samples, which clients on other machines do not have: take fedproto or local",
            code="unsupported",
        )
    if fed.local.augment.mask:
        raise FLError(
            "fedmd compares logits of the same samples, and of masked text other tokens are hidden each time",
            code="unsupported",
        )
    public, rest = share_out(fed, options.public)
    private = replace(fed, clients=rest)
    own_models, count = OwnModels(private), min(options.samples, len(public))
    plain = own_models.algorithm()

    def samples_of(seed: int, round: int) -> Tensor:
        return public[draw(len(public), count, Rng(seed, round).torch("public"))]

    def init():
        dtype = next(fed.model.parameters()).dtype
        logits = torch.zeros(count, *fed.data.outputs, dtype=dtype, device=fed.data.device)
        return {**plain.init(), "consensus": {"logits": logits, "round": torch.tensor(0)}}

    def send(server, clients, rng):
        return {"model": broadcast(server["consensus"], len(clients))}

    def client(message, client_states, clients, rng):
        states = digest(own_models.unpack(client_states, clients), message["model"], clients, rng)
        update = private.train(states, clients, rng)
        public_samples = fed.data.samples_at(samples_of(rng.seed, rng.round + 1))
        modules = [own_models.modules[own_models.owned[client]] for client in clients]
        outputs = [
            fed.predict(state, public_samples, module) for state, module in zip(per_client(update.states), modules)
        ]
        logits = torch.stack(outputs).to(message["model"]["logits"])
        received = {"logits": logits, "round": torch.full((len(clients),), rng.round + 1)}
        return update._replace(received=received, client_states=own_models.pack(update.states))

    learning = replace(fed.with_local(epochs=options.epochs, augment=Augment(), masked=False), training=())
    rows = torch.zeros(len(fed.data.y), dtype=torch.int64)  # the row of each public sample in the tables of logits
    rows[public] = torch.arange(len(public))
    rows_on_device = upload(rows, fed.data.device)

    def digest(states: States, consensus: State, clients: Sequence[int], rng: Rng) -> States:
        """Return the models after they have learned the consensus, if there is one."""
        if not (round := int(consensus["round"][0])):
            return states
        index = samples_of(rng.seed, round)
        table = consensus["logits"].new_zeros(len(public), *fed.data.outputs)
        table[upload(rows[index], table.device)] = consensus["logits"][0]
        context: Any = {"logits": table.expand(len(clients), *table.shape)}
        splits: Any = [Split(index, index[:0], index[:0])] * len(fed.clients)
        of_round = replace(learning, clients=splits)
        context = per_client(context) if isinstance(states, list) else context
        return train_or_keep(of_round, states, clients, rng.apart("digest"), towards, context, None, rows_on_device)

    def aggregate(server, clients, update, rng):
        came = [row for row, arrived in enumerate(update.arrived) if arrived]
        known = {"logits": update.received["logits"][came].mean(0), "round": update.received["round"][came[0]]}
        return {"global": own_models.mean(server[CLIENTS], otherwise=server["global"]), "consensus": known}

    return replace(plain, init=init, send=send, client=client, aggregate=aggregate)


def share_out(fed: Federation, share: float) -> tuple[Tensor, Splits]:
    """Return a random share of all training samples, and the clients' others.

    Each client keeps at least one.
    """
    number = round(share * len(fed.clients.train.samples))
    first = fed.clients.train.offsets[:-1]  # the first sample of each client stays with it
    free = torch.ones(len(fed.clients.train.samples), dtype=torch.bool).index_fill_(0, first, False).nonzero().flatten()
    if not 1 <= number <= len(free):
        raise FLError(
            f"--fedmd.public {share:g} of {len(fed.clients.train.samples)} samples are {number}; clients can spare 1 "
            f"to {len(free)}: give another share"
        )
    places = free[draw(len(free), number, Rng(0).torch("public"))].sort().values
    taken = torch.zeros(len(fed.clients.train.samples), dtype=torch.bool).index_fill_(0, places, True)
    sizes = fed.clients.train.sizes.tolist()
    left = [samples[~gone] for samples, gone in zip(fed.clients.train, taken.split(sizes))]
    splits = [Split(samples, split.valid, split.test) for samples, split in zip(left, fed.clients)]
    return fed.clients.train.samples[places], Splits.of(splits)


def towards(call: Call, params: State, context: State, batch: Batch) -> Tensor:
    """Return the mean absolute distance of the logits from the context's.

    Only the context's rows of the batch count.
    """
    x, _, rows = batch
    return (call(params, x) - context["logits"][rows]).abs().mean()


METHOD = Method(
    fedmd,
    FedMDOptions(),
    clients="personalized",
    own_architectures=True,
    lacks={"several_classifiers", "masked_logits", "changed_updates"},
)

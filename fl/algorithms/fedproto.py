"""FedProto: Tan et al., "FedProto: Federated Prototype Learning across Heterogeneous Clients" (AAAI 2022),
algorithm 1.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fl.algorithms.algorithm import Algorithm
from fl.algorithms.method import Method
from fl.algorithms.parts.beside import beside, part_of
from fl.algorithms.parts.own_models import OwnModels
from fl.algorithms.parts.representation import head_of, represent
from fl.base.errors import FLError
from fl.base.settings import AtLeast0
from fl.engine.losses import Loss, mean
from fl.engine.objectives import Batch, Call, Objective
from fl.federation import Federation
from fl.federation.clients import CLIENTS
from fl.federation.cohort import per_client
from surgery import State, broadcast, stack
from surgery.transfer import upload


@dataclass(frozen=True)
class FedProtoOptions:
    """FedProto."""

    lam: AtLeast0 = 1.0
    """weight of the distance of representations from the prototypes of their classes (the released code: 1); 0 trains
    each model alone"""


def fedproto(fed: Federation, options: FedProtoOptions = FedProtoOptions()) -> Algorithm:
    """Train a model of its own on each client, and send only prototypes, the mean representation of each class.

    A representation is what the layer is given that makes the logits. A participant minimises

        cross entropy + lam mean (z - C_y)^2

    over the samples of a batch and the entries of their representations z, with C_y the global prototype of the
    sample's class; a class that has none yet adds nothing. Then it sends its prototypes, as its trained model makes
    them of its training samples in evaluation, with the number of samples in each class. The server's prototypes are
    the means over the participants, weighted by these numbers; a class that no participant has keeps its prototype.

    A client predicts with its model's logits. The paper's rule, the class of the nearest prototype, is not offered; the
    released code scores both. Also unlike the released code: it collects prototypes while the last epoch trains, and
    its server's means count all clients alike.

    Clients may have models of several architectures with representations of one length: see `OwnModels`.

    Personal models begin as the initial model and continue from where they were. A client that never took part has the
    initial model. A stranger would get their mean, as in Local; on Flower that stays the initial model.

    lam = 0 is Local.

    Raises:
        FLError: for a model that does not end in a linear layer, or that trains nothing else, and for models
            with representations of several lengths.
    """
    if fed.data.task != "classification":
        raise FLError(
            f"fedproto has a prototype for each class, and the data are for {fed.data.task}", code="unsupported"
        )
    if fed.data.unscored:
        raise FLError(
            "fedproto has a prototype for each token that comes next, and some of these data count for none",
            code="unsupported",
        )
    own_models, classes, dtype = OwnModels(fed), fed.data.classes, next(fed.model.parameters()).dtype
    heads = [head_of(replace(fed, model=module, fleet=None), "fedproto") for module in own_models.modules]
    widths: list[Any] = [module.get_submodule(head).in_features for module, head in zip(own_models.modules, heads)]
    if len({*widths}) > 1:
        lengths = " and ".join(map(str, sorted({*widths})))
        raise FLError(
            f"fedproto compares representations, the inputs of the last layer, which here have {lengths} entries: give "
            "all models last layers with as many inputs",
            code="unsupported",
        )
    width, plain = widths[0], own_models.algorithm()
    kinds = [WithRepresentation(module, head) for module, head in zip(own_models.modules, heads)]
    shown = replace(fed, model=kinds[0], fleet=None)
    objective = pull_to_prototypes(fed.local.loss, options.lam)

    def init():
        none = torch.zeros(classes, width, dtype=dtype, device=fed.data.device)
        return {**plain.init(), "prototypes": {"means": none, "counts": none.new_zeros(classes)}}

    def send(server, clients, rng):
        return {"model": broadcast(server["prototypes"], len(clients))}

    def client(message, client_states, clients, rng):
        modules = [kinds[own_models.owned[client]] for client in clients]
        starts, context = own_models.unpack(client_states, clients), message["model"]
        if own_models.several:
            starts, context = [beside(model=start) for start in starts], per_client(context)
            update = shown.train(starts, clients, rng, objective, context, models=modules)
            states = [part_of(state, "model") for state in update.states]
        else:
            update = shown.train(beside(model=starts), clients, rng, objective, context)
            states = part_of(update.states, "model")
        sent = map(prototypes, per_client(update.states), clients, modules)
        return update._replace(states=states, received=stack(list(sent)), client_states=own_models.pack(states))

    @torch.no_grad()
    def prototypes(state, client, module):
        samples = fed.clients.train[client]
        x, y = fed.data.gather(samples)
        outputs = shown.predict({**state, **shown.statistics(state, module, samples)}, x, module)
        of_class = F.one_hot(y.flatten(), classes).to(dtype)
        sums = of_class.T @ outputs[..., classes:].flatten(0, -2).to(dtype)
        counts = of_class.sum(0)
        return {"means": sums / counts.clamp(min=1)[:, None], "counts": counts}

    def aggregate(server, clients, update, rng):
        old, sent = server["prototypes"], update.received
        counts = sent["counts"] * upload(torch.tensor(update.arrived), old["counts"].device)[:, None]
        total = counts.sum(0)
        means = (counts[:, :, None] * sent["means"]).sum(0) / total.clamp(min=1)[:, None]
        means = torch.where((total > 0)[:, None], means, old["means"])
        known = {"means": means, "counts": torch.where(total > 0, total, old["counts"])}
        return {"global": own_models.mean(server[CLIENTS], otherwise=server["global"]), "prototypes": known}

    return replace(plain, init=init, send=send, client=client, aggregate=aggregate)


class WithRepresentation(nn.Module):
    """The model with output [..., classes + width]: logits, then the representation."""

    def __init__(self, model: nn.Module, head: str) -> None:
        super().__init__()
        self.model, self.head = model, head

    def forward(self, x: Tensor) -> Tensor:
        """Return both in one tensor."""
        return torch.cat(represent(self.model, self.head, x), -1)


def pull_to_prototypes(loss: Loss, lam: float) -> Objective:
    """Return the loss + lam times the mean square distance from the prototypes.

    Context: "means" [classes, width], the prototypes, and "counts" [classes], 0 for classes that have none.
    """

    def objective(call: Call, params: State, context: State, batch: Batch) -> Tensor:
        (x, y), classes = batch, len(context["counts"])
        outputs, y = call(params, x).flatten(0, -2), y.flatten()
        away = (outputs[:, classes:] - context["means"][y]).square().mean(1) * (context["counts"][y] > 0)
        return mean(loss, outputs[:, :classes], y) + lam * away.mean()

    return objective


METHOD = Method(
    fedproto,
    FedProtoOptions(),
    clients="personalized",
    own_architectures=True,
    lacks={"several_classifiers", "masked_logits", "changed_updates", "dense"},
)

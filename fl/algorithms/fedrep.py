"""FedRep: Collins et al., "Exploiting Shared Representations for Personalized Federated Learning" (ICML 2021),
algorithm 1.
"""

from dataclasses import dataclass, replace

from fl.algorithms.algorithm import Algorithm
from fl.algorithms.method import Method
from fl.algorithms.parts.personal import classifier, train_only
from fl.algorithms.parts.split import split, without
from fl.base.errors import FLError
from fl.base.settings import AtLeast1
from fl.federation import Federation


@dataclass(frozen=True)
class FedRepOptions:
    """FedRep."""

    head_epochs: AtLeast1 = 2
    """epochs for which a client trains its head before it trains the body for --local-epochs (FeMAM's paper: 2)"""


def fedrep(fed: Federation, options: FedRepOptions = FedRepOptions()) -> Algorithm:
    """Train one body for all, and a head for each client that never leaves it: the last linear layer.

    A participant trains its head on top of the body that it received, on batches sampled for that, and then the body
    below the new head. Each time the optimizer starts afresh. Batch norms belong to the body, with their running
    statistics: what the head's epochs change of these is dropped. The bodies are averaged by the number of samples. A
    client predicts with the global body and its personal head, which is the initial one if it never took part. A client
    that is dropped in either part of its training counts in no average and keeps its head. The loss is measured
    in the body's epochs.

    The global model that a stranger would get has the mean of the participants' heads. A real server does not know
    these, and its global model keeps the initial head. No client trains from that mean, and it does not count as
    traffic.

    Raises:
        FLError: for a model if its head, or all the rest, has nothing to train.
    """
    head, learnt, names = classifier(fed.model), set(fed.trainable), list(fed.initial())
    if learnt.isdisjoint(head) or learnt.issubset(head):
        raise FLError(
            f"FedRep trains the last linear layer apart from the rest, and of {type(fed.model).__name__} only one of "
            f"the two is trained (the layer has {', '.join(head)}): choose another --model or --algorithm",
            code="unsupported",
        )
    of_head = replace(fed.with_local(epochs=options.head_epochs), model=train_only(fed.model, head))
    of_body = replace(fed, model=train_only(fed.model, learnt.difference(head)))

    def client(message, client_states, clients, rng):
        start = {name: client_states[name] if name in head else message["model"][name] for name in names}
        first = of_head.train(start, clients, rng.apart("head"))
        heads = {name: first.states[name] for name in client_states}
        update = of_body.train({**start, **heads}, clients, rng)
        sizes = tuple(size if before else 0 for before, size in zip(first.sizes, update.sizes))
        return update._replace(sizes=sizes, received=without(update.received, head), client_states=heads)

    return replace(split(fed, head), client=client)


METHOD = Method(fedrep, FedRepOptions(), clients="personalized")

"""FedRep: Collins et al., "Exploiting Shared Representations for Personalized Federated Learning" (ICML 2021),
algorithm 1.
"""

from dataclasses import dataclass, replace

from fl.algorithms.algorithm import Algorithm
from fl.algorithms.method import Method
from fl.algorithms.parts.personal import classifier, row, trained_only
from fl.base.errors import FLError
from fl.base.rng import Rng
from fl.base.settings import AtLeast1
from fl.federation import Federation, traffic
from fl.federation.visit import Visit, kept, predicting, visit
from surgery import broadcast


@dataclass(frozen=True)
class FedRepOptions:
    """FedRep."""

    head_epochs: AtLeast1 = 2
    """epochs for which a client trains its head before it trains the body for --local-epochs (FeMAM's paper: 2)"""


def fedrep(fed: Federation, options: FedRepOptions = FedRepOptions()) -> Algorithm:
    """One body for all, and a head for each client that never leaves it: the last linear layer.

    A participant trains its head on top of the body that it received, on batches drawn for that, and then the body
    below the new head. Each time the optimizer starts afresh. Batch norms belong to the body, with their running
    statistics: what the head's epochs change of these is dropped. The bodies are averaged by the number of samples. A
    client predicts with the global body and its own head, which is the initial one if it never took part. A client that
    is dropped in either part of its training counts in no average and keeps its head. The loss is that of the body's
    epochs.

    The global model that a stranger would get has the mean of the participants' heads. A real server does not know
    these, and its global model keeps the initial head. Nobody trains from that mean, and it does not count as traffic.

    Raises:
        FLError: for a model of which the head, or all but the head, has nothing to train.
    """
    METHOD.check(fed, options)
    head = classifier(fed.model)
    learnt = set(fed.trainable)
    if learnt.isdisjoint(head) or learnt.issubset(head):
        raise FLError(
            f"FedRep trains the last linear layer apart from the rest, and of {type(fed.model).__name__} only one of "
            f"the two is trained (the layer has {', '.join(head)}): choose another --model or --algorithm"
        )
    of_head = replace(fed.with_local(epochs=options.head_epochs), model=trained_only(fed.model, head))
    of_body = replace(fed, model=trained_only(fed.model, learnt.difference(head)))

    names = list(fed.initial())

    def joined(body, heads):
        return {name: heads[name] if name in heads else body[name] for name in names}

    def first_head():
        return {name: tensor for name, tensor in fed.initial().items() if name in head}

    def body_of(models):
        return {name: tensor for name, tensor in models.items() if name not in head}

    def init():
        return {"global": fed.initial(), "heads": kept(fed, first_head())}

    def at_client(received, mine, clients, rng):
        start = joined(received, mine)
        first = of_head.train(start, clients, rng.apart("head"))
        heads = {name: first.states[name] for name in head}
        trained = of_body.train({**start, **heads}, clients, rng)
        sizes = tuple(size if before else 0 for before, size in zip(first.sizes, trained.sizes))
        return trained._replace(sizes=sizes), heads

    head_then_body = Visit("head_then_body", at_client, withheld=head)

    def round(server, clients, rng):
        k, before = len(clients), server["global"]
        body = broadcast(body_of(before), k)
        trained, heads = visit(fed, head_then_body, body, server["heads"], first_head(), clients, rng)
        sizes = trained.sizes
        trained = trained._replace(metrics=traffic.count(broadcast(before, k), sizes))
        kept_back = sum(before[name].nbytes for name in head)
        trained = traffic.add_bytes(trained, down=-kept_back, up=-kept_back * sum(size > 0 for size in sizes) / k)
        known = {name: before[name] for name in trained.received}  # each may have failed in one of the two
        return {"global": {**before, **fed.average(trained.received, sizes, fallback=known)}, "heads": heads}, trained

    def predict(server, images, client=None):
        if client is None:
            return fed.predict(server["global"], images)
        return fed.predict({**server["global"], **row(server["heads"], client)}, images)

    def mine(received, kept, clients, rng):
        return joined(received, kept)

    def own(server):
        body = broadcast(body_of(server["global"]), len(fed.clients))
        return predicting(fed, mine, body, server["heads"], first_head(), Rng(0))

    return Algorithm(init, round, predict, own=own, visits=(head_then_body,), mine=mine)


METHOD = Method(fedrep, FedRepOptions(), clients="own")

"""FLoRA: Wang et al., "FLoRA: Federated Fine-Tuning Large Language Models with Heterogeneous Low-Rank Adaptations"
(NeurIPS 2024).
"""

from dataclasses import replace

from fl.algorithms.algorithm import Algorithm
from fl.algorithms.method import Method
from fl.algorithms.parts.split import without
from fl.base.errors import FLError
from fl.extensions.language.joining import global_ranks, rank_algorithm, select_arrived
from fl.federation import Federation
from fl.federation.cohort import per_client
from surgery import broadcast
from surgery.adapters import LowRank, adapted_layers, resize, stack
from surgery.adapters.layer import add_change
from surgery.adapters.rank import factors
from surgery.names import join


def flora(fed: Federation) -> Algorithm:
    """Stack clients' adapters, of any ranks, fold the stack into the base, and begin each round with new adapters.

    The product of the stack is the mean of products, exactly; clients count by their samples. In every round A is
    initialised again, the same for all clients, and B is 0.

    A client is simulated with the base as it is after the stacks of all rounds before. As traffic counts what it would
    get in their place: the stack of this round, once for each participant.

    Raises:
        FLError: for a model without adapters, and for a constant base.
    """
    ranks = global_ranks(fed, "flora stacks adapters, both of whose matrices are trained")
    layers = dict(adapted_layers(fed.model))
    bases = {module: join(module, "base_layer.weight") for module in layers}
    if not fed.frozen.issuperset(bases.values()):
        raise FLError(
            "flora changes the weights that adapters are beside, and here they are constants: use fl.build",
            code="unsupported",
        )

    def send(server, clients, rng):
        models = [without(model, bases.values()) for model in whole.send(server, clients, rng)["model"]]
        return {"model": models, "base": broadcast({n: server["global"][n] for n in bases.values()}, len(clients))}

    def client(message, client_states, clients, rng):
        starts = [weights | base for weights, base in zip(message["model"], per_client(message["base"]))]
        update = fed.train(starts, clients, rng)
        return update._replace(received=[without(state, bases.values()) for state in update.received])

    def aggregate(server, clients, update, rng):
        stacked = stack(*select_arrived(update))
        adapters, rest = factors(stacked)
        base, none = {}, {}
        for module, adapter in adapters.items():
            layer = layers[module]
            change = LowRank(layer.base_layer, adapter.a, adapter.b, layer.multiplier).change().detach()
            base[bases[module]] = add_change(server["global"][bases[module]], change)
            none |= adapter._replace(a=adapter.a[:0], b=adapter.b[:, :0]).state
        new = resize(none, ranks, generator=rng.torch("rows"), how="truncate").state
        down = sum(tensor.nbytes for tensor in stacked.values())
        models = down * update.metrics["models_down"] / update.metrics["bytes_down"]
        return {"global": rest | new | base}, {"bytes_down": down, "models_down": models}

    whole = rank_algorithm(fed, aggregate)
    return replace(whole, send=send, client=client)


METHOD = Method(flora, clients="heterogeneous", base_changes=True, lacks={"plain_average"})

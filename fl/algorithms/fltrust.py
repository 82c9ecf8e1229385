"""FLTrust: Cao et al., "FLTrust: Byzantine-robust Federated Learning via Trust Bootstrapping" (NDSS 2021), algorithms 1
and 2.
"""

from dataclasses import dataclass, replace
from typing import Annotated

import torch

from fl.algorithms.algorithm import Algorithm
from fl.algorithms.fedavg import fedavg
from fl.algorithms.method import Method
from fl.algorithms.parts.progress import expand_like
from fl.base.errors import FLError
from fl.base.rng import Rng, draw
from fl.base.settings import AtLeast1, number
from fl.engine.work import Meter
from fl.federation import Federation
from fl.partition import Split, Splits
from surgery import State, broadcast, cosine, distance
from surgery.transfer import download


@dataclass(frozen=True)
class FLTrustOptions:
    """FLTrust."""

    root: AtLeast1 = 100
    """samples that the server has to train on, copied at random from the clients' samples (the paper: 100)"""
    lr: Annotated[float, number(float, above=0)] = 1.0
    """learning rate of the server: it multiplies the mean update (1 takes it as it is)"""


def fltrust(fed: Federation, options: FLTrustOptions = FLTrustOptions()) -> Algorithm:
    """FedAvg; the server trains on few samples of its own, and trusts clients as far as their updates agree with it.

    A client's trust is the cosine of its update with the server's, 0 if that is negative. Updates are scaled to the
    length of the server's and averaged by trust; how many samples a client has does not count. The server trains as a
    client does, from the same model, on samples whose labels are not poisoned. If it trusts no client, the global model
    stays. Updates are of trained parameters; buffers (batch-norm statistics) are averaged by trust.

    A round reports how many clients are `trusted` at all.

    Raises:
        FLError: for more samples than there are, and with clients on other machines, whose samples stay there.
    """
    everybody = fed.clients.train.samples
    if not fed.transport.has_data:
        raise FLError(
            "fltrust trains on samples of its own at the server, which deployed servers have not: take krum",
            code="unsupported",
        )
    if options.root > len(everybody):
        raise FLError(f"--fltrust.root {options.root}: all clients have {len(everybody)} samples")

    def train_on_server(start: State, rng: Rng) -> State:
        samples = everybody[draw(len(everybody), options.root, Rng(rng.seed).torch("root"))]
        clients = Splits.of([Split(samples, samples[:0], samples[:0])])
        server = replace(fed, clients=clients, participants=1, fleet=None, truth=None, meter=Meter(), training=())
        return server.train(broadcast(start, 1), [0], rng.apart("root")).states

    def aggregate(server, clients, update, rng):
        old = server["global"]
        reference = train_on_server(old, rng)
        root, steps = ({n: trained[n] - old[n] for n in fed.trainable} for trained in (reference, update.received))
        nothing = {name: torch.zeros_like(tensor) for name, tensor in root.items()}
        scale = (distance(root, nothing) / distance(steps, nothing).clamp(min=1e-30)).flatten()
        scaled = {n: old[n] + expand_like(scale, step) * step for n, step in steps.items()}
        (trust,) = download([cosine(steps, root).flatten().clamp(min=0)])
        trust = trust * torch.tensor(update.arrived)
        mean = fed.average({**update.received, **scaled}, trust, fallback=old)
        moved = {n: old[n] + options.lr * (mean[n] - old[n]) for n in root} if options.lr != 1 else {}
        return {"global": mean | moved}, {"trusted": int((trust > 0).sum())}

    return replace(fedavg(fed), aggregate=aggregate)


METHOD = Method(fltrust, FLTrustOptions(), columns={"trusted": int}, lacks={"whole_average"})

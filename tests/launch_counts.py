"""How many kernels a step, a client and a round launch, for some models and all backends that a GPU knows.

What counts are operations, so narrow models do: how many there are does not depend on the width.
"""

import torch

import surgery
import zoo
from fl.algorithms.fedavg import METHOD as fedavg
from fl.base.rng import Rng
from fl.data import Dataset
from fl.engine import SGD, graphs, train
from fl.engine.augment import Augment
from fl.federation import Federation, LocalTraining
from fl.federation.divergence import check_finite
from fl.federation.local_training import LocalObjective
from fl.partition import Split
from fl.runs import evaluate

IMAGES = {"num_classes": 10, "in_channels": 3, "image_size": 32}
CASES = {
    "lenet": ("lenet", IMAGES, {}),
    "lenet, clipped": ("lenet", IMAGES, {"optimizer": SGD(0.01, 0.9, clip=1.0)}),
    "resnet20": ("resnet20", {**IMAGES, "image_size": 8, "width": 0.25}, {}),
    "resnet20, crops and flips": (
        "resnet20",
        {**IMAGES, "image_size": 8, "width": 0.25},
        {"augment": Augment(4, True)},
    ),
    "vgg16 with dropout": ("vgg16", {**IMAGES, "width": 0.03}, {}),
    "transformer": ("transformer", {"num_classes": 20, "tokens": 8, "width": 0.06, "dropout": 0.0}, {}),
    "transformer with dropout": ("transformer", {"num_classes": 20, "tokens": 8, "width": 0.06}, {}),
}
BACKENDS = ("loop", "vmap", "graphs")


def federation(case: str, clients: int, steps: int) -> Federation:
    """Clients with so many steps of two samples each, on the device."""
    name, arguments, settings = CASES[case]
    generator = torch.Generator().manual_seed(0)
    n = 2 * clients * steps
    if "tokens" in arguments:
        x = torch.randint(20, (n, 8), generator=generator).int()
        y = x.long()
    else:
        size = arguments["image_size"]
        x = torch.randint(256, (n, 3, size, size), generator=generator).byte()
        y = torch.randint(10, (n,), generator=generator)
    data = Dataset("random", x, y, x[:2], y[:2], arguments["num_classes"]).to("cuda")
    none = torch.empty(0, dtype=torch.int64)
    parts = [Split(part, none, none) for part in torch.arange(n).split(2 * steps)]
    model = zoo.create(name, generator, **arguments).to("cuda")
    return Federation(model, data, parts, clients, LocalTraining(1, 2, **{"optimizer": SGD(0.01, 0.9), **settings}))


def measure(case: str, gpu) -> dict[str, dict[str, int]]:
    """For each backend: `step`, the launches of one more step; `client`, those of one more client beside its steps;
    `round`, those of a round of FedAvg with 2 clients of 2 steps; `kernels`, what runs on the device in a step;
    `measures`, the launches of what is measured after a round; `waits`, how often the host waits in both.

    Args:
        gpu: a `PretendGPU` that is entered.
    """
    graphs._POOL.clear()  # streams of another device
    return {backend: _counts(case, backend, gpu) for backend in BACKENDS}


def _counts(case: str, backend: str, gpu) -> dict[str, int]:
    def seen(clients: int, steps: int):
        fed = federation(case, clients, steps).with_local(backend=backend)
        starts = surgery.broadcast(fed.initial(), clients)
        group = fed.group(fed.model, starts, range(clients), LocalObjective(), Rng(0, 1))
        train([group], backend)  # captures
        with gpu.watch() as counted:
            train([group], backend)
        return counted

    one, longer, two = seen(1, 1), seen(1, 2), seen(2, 1)
    step = longer.launches - one.launches
    kernels = longer.inside - one.inside if backend == "graphs" else step
    more = two.launches - one.launches - (0 if backend == "vmap" else step)  # a program has one step for all clients
    fed = federation(case, 2, 2).with_local(backend=backend)
    algorithm = fedavg(fed)
    before, _ = algorithm.round(algorithm.init(), [0, 1], Rng(0, 1))
    with gpu.watch() as counted:
        server, update = algorithm.round(before, [1, 0], Rng(0, 2))
    with gpu.watch() as after:
        check_finite(server, before, update.loss, 2)
        evaluate.mean_cosine(fed, evaluate.honest_cohort(fed, update.states, [1, 0], [True, True]))
        evaluate.evaluate_global(fed, lambda x: algorithm.predict(server, x, None))
    graphs._KEPT.clear()
    waits = len(counted.waits + after.waits)
    numbers = {"step": step, "kernels": kernels, "client": more, "round": counted.launches}
    return {**numbers, "measures": after.launches, "waits": waits}

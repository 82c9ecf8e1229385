"""Which clients cover which part of the global model (FedFA, section 3.1 and Fig. 1: weak points).

A part that few clients cover can be changed at will by these few. A last block that is grafted onto deeper ones covers
these as well.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fl.base.errors import FLError
from surgery import Submodel


def coverage(plans: Sequence[Submodel]) -> dict[str, Tensor]:
    """How many clients cover each position of the first axis of each tensor of the global model.

    Args:
        plans: one for each client, all of one global model. If a tensor is written to several places, as those of a
            last block are, all of them count.

    Returns:
        float64 [S0] for tensors [S0, ...], [1] for scalars, on the CPU. It is the mean over the other axes, so that a
        client with half of the inputs of an output counts as half. No tensor of the global model is made.

    Raises:
        FLError: if there are no plans, or plans of different global models.

    >>> from surgery.submodel import Source
    >>> half = Submodel({"w": (Source("w", (((0, 2),), ((0, 1),))),)}, {"w": (4, 2)})
    >>> full = Submodel({"w": (Source("w", (None, None)),)}, {"w": (4, 2)})
    >>> coverage([half, full])
    {'w': tensor([1.5000, 1.5000, 1.0000, 1.0000], dtype=torch.float64)}
    """
    if not plans:
        raise FLError("there are no plans to count: give at least one")
    if any(plan.fingerprint != plans[0].fingerprint for plan in plans):
        raise FLError("the plans are of different global models: give those of one")
    shapes = plans[0].shapes
    steps = {name: torch.zeros((shape[0] if shape else 1) + 1, dtype=torch.float64) for name, shape in shapes.items()}
    for plan in plans:
        for source in (source for sources in plan.entries.values() for source in sources):
            shape = shapes[source.name] or (1,)
            first, *others = source.index or (None,)
            sizes = zip(others, shape[1:])
            share = math.prod(1.0 if runs is None else sum(b - a for a, b in runs) / size for runs, size in sizes)
            for start, stop in first if first is not None else ((0, shape[0]),):
                steps[source.name][start] += share
                steps[source.name][stop] -= share
    return {name: step.cumsum(0)[:-1] for name, step in steps.items()}

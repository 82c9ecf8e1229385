"""Quantity skew by a Dirichlet distribution: clients differ in size alone."""

import numpy as np

from fl.partition.dirichlet import DirichletOptions, draw_until
from fl.partition.kind import Kind, Partition, Task, together


def dirichlet_sizes(task: Task, options: DirichletOptions) -> Partition:
    """Deal samples at random, in sizes from a Dirichlet distribution.

    Source: NIID-Bench, Li et al. 2022. The clients' shares of all samples are p ~ Dir(alpha), and the shuffled samples
    are cut at their cumulative sum. The draw is repeated until every client has the minimum, see `draw_until`.
    """
    n, clients = len(task.labels), task.clients

    def draw() -> tuple[np.ndarray, np.ndarray]:
        cuts = (task.rng.dirichlet(np.full(clients, options.alpha)).cumsum()[:-1] * n).astype(np.int64)
        sizes = np.diff(cuts, prepend=0, append=n)
        owners = np.empty(n, dtype=np.int64)
        owners[task.rng.permutation(n)] = np.repeat(np.arange(clients), sizes)
        return owners, sizes

    return Partition(draw_until(task, "dirichlet_sizes", options.alpha, draw), together(clients))


KIND = Kind(
    dirichlet_sizes,
    DirichletOptions(),
    text=True,
    about="random samples, unequal sizes",
    word=lambda options: f"{options.alpha:g}",
)

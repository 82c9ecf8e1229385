"""Label skew by a mixture of classes for each client, all clients equally large."""

import numpy as np

from fl.partition.dirichlet import DirichletOptions, check_alpha
from fl.partition.kind import Kind, Partition, Task, alone
from fl.partition.split import Parts
from fl.partition.unlabelled import check_sizes, even


def dirichlet_mixture(task: Task, options: DirichletOptions) -> Partition:
    """Draw a mixture of classes for each client, all of equal size.

    Source: Hsu et al. 2019. Client k has the mixture q_k ~ Dir(alpha p), where p are the shares of the classes in the
    data times their number, so that alpha is each class's concentration where classes are equally frequent (as in
    FedAvgM's baseline of Flower and FedDyn's code, which have p = 1). One client after another draws its samples from
    q_k without replacement; of a class that has run out no more are drawn, and the other shares are renormalised. All
    samples are used: sizes differ by one at most, and the last clients take what the first ones left.
    """
    check_alpha(options.alpha)
    rng, sizes = task.rng, even(len(task.labels), task.clients)
    check_sizes(sizes, task.minimum)
    _, classes, left = np.unique(task.labels.cpu().numpy(), return_inverse=True, return_counts=True)
    mixtures = rng.dirichlet(options.alpha * left / left.mean(), task.clients)
    table = np.empty((task.clients, len(left)), dtype=np.int64)
    for client, size in enumerate(sizes):
        table[client] = _draw(mixtures[client], size, left, rng)
        left = left - table[client]
    owners = np.empty(len(classes), dtype=np.int64)
    for label, column in enumerate(table.T):
        owners[rng.permutation(np.flatnonzero(classes == label))] = np.repeat(np.arange(task.clients), column)
    return Partition(Parts.of_owners(owners, task.clients), alone(task.clients))


def _draw(mixture: np.ndarray, size: int, left: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Count how many of `size` samples are of each class, at most those that are left.

    >>> _draw(np.array([1.0, 0.0, 0.0]), 5, np.array([3, 0, 2]), np.random.default_rng(0))
    array([3, 0, 2])
    """
    taken = np.zeros_like(left)
    while missing := size - taken.sum():  # numbers above what is left are drawn again, from the other classes
        share, rest = mixture * (taken < left), left - taken
        if share.sum() == 0:  # a tiny alpha puts all of the mass on classes that have run out: one of the others
            share = rng.multinomial(1, rest / rest.sum())
        taken = np.minimum(taken + rng.multinomial(missing, share / share.sum()), left)
    return taken


KIND = Kind(
    dirichlet_mixture,
    DirichletOptions(),
    about="a mixture of classes each, equal sizes; Hsu et al.",
    word=lambda options: f"{options.alpha:g}",
)

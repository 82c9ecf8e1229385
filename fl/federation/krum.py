"""Rules that choose among whole models by their distances, so that a few malicious ones are left out.

Krum and Multi-Krum: Blanchard et al., "Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent" (NeurIPS
2017). Bulyan: El Mhamdi et al., "The Hidden Vulnerability of Distributed Learning in Byzantium" (ICML 2018).

The released code differs from the paper in Krum (n - f - 1 neighbours, lengths that are not squared); here it is as in
the paper. Where it makes Bulyan's selection two models shorter than n - 2f, Krum always has the 2f + 3 models that it
needs; here it is as in that code, but with Krum's model in each step, as in the paper, where the code takes means.

Nothing here waits for the device.
"""

import torch
from torch import Tensor

from surgery import Stack, State, average, distance, trimmed_mean
from surgery.states import stack_size
from surgery.transfer import double


def squared_distances(models: Stack) -> Tensor:
    """Squared distances between the n models, those to themselves infinite: [n, n], float64 where the device has it."""
    squares = double(distance(models, models)).square()
    most = 1e-8 * torch.finfo(squares.dtype).max  # in the place of what is no number: a sum of many is still finite
    far = squares.nan_to_num(most, most).clamp(max=most)
    return far.fill_diagonal_(torch.inf)


def krum_order(distances: Tensor, f: int, left: int | None = None) -> Tensor:
    """The models by their scores, the best first; of equal scores that of the first model: int64 [n].

    A model's score is the sum of its squared distances to its n - f - 2 nearest neighbours.

    Args:
        distances: as `squared_distances` gives them; those of models that do not count are infinite.
        f: how many may be malicious.
        left: n, if some of them do not count.

    >>> krum_order(squared_distances({"w": torch.tensor([[9.0], [1.0], [0.0], [2.0], [1.5]])}), f=1).tolist()
    [4, 1, 3, 2, 0]
    """
    neighbours = (left or len(distances)) - f - 2
    return distances.sort(1).values[:, :neighbours].sum(1).sort(stable=True).indices


def multi_krum(models: Stack, compared: Stack, f: int, m: int) -> State:
    """The mean of the m models with the best scores; with m = 1 it is Krum's model.

    Args:
        models: a stack of n models.
        compared: those tensors of the models that their distances are taken of.
    """
    return average(_chosen(models, krum_order(squared_distances(compared), f)[:m]))


def bulyan(models: Stack, compared: Stack, f: int) -> State:
    """Choose n - 2f - 2 models by Krum, one after another; then the mean of the 2f fewer numbers nearest to the median.

    The second step is made number by number. Integers are the maximum over the chosen models.

    Args:
        models, compared: as for `multi_krum`.
    """
    distances, chosen = squared_distances(compared), []
    n = len(distances)
    for left in range(n, 2 * f + 2, -1):
        best = krum_order(distances, f, left)[:1]
        chosen.append(best)
        distances = distances.index_fill(0, best, torch.inf).index_fill(1, best, torch.inf)
    models = _chosen(models, torch.cat(chosen))
    result = average(models)
    medians = trimmed_mean(models, trim=0.5)
    for name, tensor in models.items():
        if tensor.is_floating_point():
            nearest = (tensor - medians[name]).abs().topk(stack_size(models) - 2 * f, 0, largest=False).indices
            result[name] = tensor.gather(0, nearest).mean(0)
    return result


def _chosen(models: Stack, rows: Tensor) -> Stack:
    return {name: tensor.index_select(0, rows) for name, tensor in models.items()}

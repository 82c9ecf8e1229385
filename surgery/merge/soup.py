"""Greedy soup: models are added to a mean as long as a score does not fall."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from surgery.errors import SurgeryError
from surgery.lazy import LazyState
from surgery.merge.group import aligned
from surgery.merge.interpolation import linear
from surgery.states import Models, State


class Soup(NamedTuple):
    """What a greedy soup is made of.

    Attributes:
        state: the mean of the models that were taken.
        taken: their places in the list, in the order in which they were added.
        score: that of the mean.
        scores: of every model alone.
    """

    state: State | LazyState
    taken: list[int]
    score: float
    scores: list[float]


def greedy_soup(models: Models, *, score: Callable[[Any], float]) -> Soup:
    """The mean of those models that do not lower a score (Wortsman et al., "Model soups", ICML 2022, recipe 1).

    Models are tried from the best to the worst; one stays if the mean with it scores at least as much as without.

    Args:
        models: a stack, or a list of states or modules.
        score: of a state, larger is better: accuracy on held-out data, say. It must not be NaN.

    >>> import torch
    >>> models = [{"w": torch.tensor(w)} for w in (0.0, 3.0, 9.0)]
    >>> greedy_soup(models, score=lambda state: -abs(state["w"].item() - 2))[1:]
    ([1, 0], -0.5, [-2.0, -1.0, -7.0])
    """
    states, _, _ = aligned(models, None)

    def scored(state: Any) -> float:
        value = float(score(state))
        if value != value:
            raise SurgeryError("the score of a model is NaN, so that models cannot be compared by it")
        return value

    def mean(places: Sequence[int]) -> State | LazyState:
        return linear([states[k] for k in places])

    scores = [scored(state) for state in states]
    order = sorted(range(len(states)), key=lambda k: -scores[k])
    taken, best, found = order[:1], scores[order[0]], mean(order[:1])
    for k in order[1:]:
        with_it = mean([*taken, k])
        if (value := scored(with_it)) >= best:
            taken, best, found = [*taken, k], value, with_it
    return Soup(found, taken, best, scores)

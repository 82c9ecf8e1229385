"""Train the exits of a client's model on each other's outputs."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from fl.algorithms.algorithm import Algorithm
from fl.base.errors import FLError
from fl.engine.objectives import Objective
from fl.federation import Federation


def check_exits(fed: Federation, method: str, distils: bool) -> None:
    """Raise FLError for a model without exits, or outputs that cannot be distilled."""
    if "several_classifiers" not in fed.needs():
        raise FLError(
            f"{method} trains a classifier after each section of a model: give --exits, and --model resnet18",
            code="unsupported",
        )
    if distils and fed.data.task != "classification":
        raise FLError(
            f"{method} distils classes, and the data are for {fed.data.task}: give --{method}.distil 0",
            code="unsupported",
        )


def with_distillation(
    fed: Federation, algorithm: Algorithm, objective: Objective, weight: Callable[[int], float]
) -> Algorithm:
    """Return an algorithm of an objective with a weight in context["distil"].

    Args:
        weight: round, counted from 1 -> weight of the distillation.
    """

    def client(message, client_states, clients, rng):
        context = {"distil": torch.tensor(weight(rng.round), device=fed.data.device)}
        return fed.train(message["model"], clients, rng, objective, [context for _ in clients])

    return replace(algorithm, client=client)


def exit_log_probabilities(outputs: Tensor) -> Tensor:
    """Return each exit's log probabilities, [exits, samples (or tokens), classes].

    >>> exit_log_probabilities(torch.zeros(8, 4, 10)).shape, exit_log_probabilities(torch.zeros(8, 4, 6, 10)).shape
    (torch.Size([4, 8, 10]), torch.Size([4, 48, 10]))
    """
    return outputs.movedim(1, 0).flatten(1, -2).log_softmax(-1)


def divergence(target: Tensor, predicted: Tensor) -> Tensor:
    """Return the mean KL(target || predicted) over samples.

    Both are log probabilities [..., samples, classes].
    """
    return (target.exp() * (target - predicted)).sum(-1).mean(-1)

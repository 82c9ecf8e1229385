"""Hooks by which packages above the core that know some models follow a plan.

The core changes tensors and attributes. A follower also changes what a kind of model says of itself, such as the
configuration that its class makes it from.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, Protocol, cast

from torch import nn

from surgery.plain import is_settings

Difference = Callable[[nn.Module], tuple[int, str] | None]
"""How many operations of a narrow model do not run as predicted, and what the first of them does; None if all do."""

FOLLOWERS = ["surgery.transformers"]
"""Modules that are followers. They are imported once a model holds an object that may say what the model is."""
_log = logging.getLogger(__name__)
_OWN = vars(nn.Module()).keys()  # what every module keeps for itself


class Follower(Protocol):
    """The functions that a module in `FOLLOWERS` has."""

    def follows(self, model: nn.Module) -> bool:
        """Return whether it knows what a model of this kind says of itself."""

    def width_edits(
        self, model: nn.Module, plan: Any, sizes: Any, difference: Difference
    ) -> tuple[Sequence[Mapping[str, Any]], str]:
        """Return edits by which a model of other widths describes itself, or a reason.

        Args:
            model: the model, or a copy on the meta device.
            plan: the plan of the new model. The model's attributes are already set.
            sizes: what sizes of axes become.
            difference: where the new model, built by a plan with such edits, does something else than predicted.
        """

    def depth_edits(
        self, before: nn.Module, after: nn.Module, moves: Sequence[tuple[int, Sequence[int]]]
    ) -> Sequence[Mapping[str, Any]]:
        """Return edits by which a model of another depth describes itself; log failure.

        Args:
            moves: for each section that changes how many blocks it had, and which of them each new block is or repeats.
        """


def followers(model: nn.Module) -> list[Follower]:
    """Return what else follows a model's plan; nothing for most models.

    >>> followers(nn.Linear(2, 2))
    []
    """
    if not any(is_settings(value) for name, value in vars(model).items() if name not in _OWN):
        return []
    matches = []
    for name in FOLLOWERS:
        try:
            follower = cast(Follower, import_module(name))
        except ModuleNotFoundError as error:
            if error.name != name:
                raise
            _log.warning(
                "%s holds settings that may say its sizes. They stay as they are: %s, which changes them, is missing",
                type(model).__name__,
                name,
            )
            continue
        if follower.follows(model):
            matches.append(follower)
    return matches

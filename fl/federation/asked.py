"""What not every method can do. Settings or a federation ask for it, and a method may refuse it."""

from collections.abc import Callable
from typing import Any, NamedTuple

from fl.federation.defence import Defence
from fl.models.architectures import ArchitectureOptions


class Ask(NamedTuple):
    """One such thing.

    Attributes:
        flags: those of the command line that ask for it.
        by_config: whether the settings of a run (`fl.Config`) ask for it.
        by_federation: whether a federation asks for it.
    """

    flags: str
    by_config: Callable[[Any], Any]
    by_federation: Callable[[Any], Any]


ASKED = {
    "masked": Ask("--masked-loss", lambda config: config.masked_loss, lambda fed: fed.local.masked),
    "tampering": Ask(
        "--attack and --defence",
        lambda config: config.attack.share or config.defence != Defence(),
        lambda fed: fed.attack or fed.defence != Defence(),
    ),
    "presence": Ask(
        "--joining and --leaving", lambda config: config.joining or config.leaving, lambda fed: fed.presence
    ),
    "architectures": Ask(
        "--architectures",
        lambda config: config.architectures != ArchitectureOptions(),
        lambda fed: fed.fleet and len(fed.fleet.architectures) > 1,
    ),
}
"""All of them, by the name under which `fl.algorithms.method.Method` refuses them."""

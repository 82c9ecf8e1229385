"""What not every method can do: a method refuses some of it, and settings or a federation ask for some of it."""

from collections.abc import Callable
from typing import Any, NamedTuple


class Ask(NamedTuple):
    """One thing that not every method can do.

    Attributes:
        flags: those of the command line that ask for it.
        by_settings: whether the settings of a run (`fl.Config`) ask for it.
        by_federation: whether a federation asks for it.
    """

    flags: str
    by_settings: Callable[[Any], Any]
    by_federation: Callable[[Any], Any]


ASKED = {
    "masked": Ask("--masked-loss", lambda config: config.masked_loss, lambda fed: fed.local.masked),
    "tampering": Ask(
        "--attack and --defence",
        lambda config: config.attack.share or config.defence != type(config.defence)(),
        lambda fed: fed.attack or fed.defence != type(fed.defence)(),
    ),
    "presence": Ask(
        "--joining and --leaving", lambda config: config.joining or config.leaving, lambda fed: fed.presence
    ),
    "architectures": Ask(
        "--architectures",
        lambda config: config.architectures != type(config.architectures)(),
        lambda fed: fed.fleet and len(fed.fleet.architectures) > 1,
    ),
}
"""Everything of this kind, by the name under which `fl.algorithms.method.Method` refuses it."""


def asked_by_settings(config: Any) -> set[str]:
    """Which of `ASKED` the settings of a run ask for."""
    return {what for what, ask in ASKED.items() if ask.by_settings(config)}


def asked_by_federation(fed: Any) -> set[str]:
    """Which of `ASKED` a federation asks for."""
    return {what for what, ask in ASKED.items() if ask.by_federation(fed)}

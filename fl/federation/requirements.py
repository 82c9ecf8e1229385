"""Requirements of settings, or of a federation, that not every method meets: a method may refuse them."""

from collections.abc import Callable
from typing import Any, NamedTuple

from fl.engine.losses import cross_entropy
from fl.federation.defence import Defence
from fl.federation.pace import PaceOptions
from fl.models.architectures import ArchitectureOptions
from surgery.adapters import adapted_layers


class Requirement(NamedTuple):
    """Something that a method may refuse.

    Attributes:
        flags: those of the command line that require it.
        by_config: whether the settings of a run (`fl.Config`) require it.
        by_federation: whether a federation requires it.
    """

    flags: str
    by_config: Callable[[Any], Any]
    by_federation: Callable[[Any], Any]


REQUIREMENTS = {
    "masked": Requirement("--masked-loss", lambda config: config.masked_loss, lambda fed: fed.local.masked),
    "loss": Requirement(
        "--loss, --label-smoothing and --class-weights",
        lambda config: (
            config.loss not in ("default", "cross_entropy") or config.label_smoothing or config.class_weights
        ),
        lambda fed: fed.local.loss is not cross_entropy,
    ),
    "tampering": Requirement(
        "--attack and --defence",
        lambda config: config.attack.share or config.defence != Defence(),
        lambda fed: fed.attack or fed.defence != Defence(),
    ),
    "choosing": Requirement(
        "--defence.rule krum, multikrum or bulyan",
        lambda config: config.defence.chooses,
        lambda fed: fed.defence.chooses,
    ),
    "pace": Requirement("--pace", lambda config: config.pace != PaceOptions(), lambda fed: fed.pace),
    "compression": Requirement(
        "--compression.kind", lambda config: config.compression.on, lambda fed: fed.compression.on
    ),
    "feedback": Requirement(
        "--compression.feedback", lambda config: config.compression.feedback, lambda fed: fed.compression.feedback
    ),
    "privacy": Requirement("--privacy.clip", lambda config: config.privacy.clip, lambda fed: fed.privacy.clip),
    "presence": Requirement(
        "--joining and --leaving", lambda config: config.joining or config.leaving, lambda fed: fed.presence
    ),
    "exits": Requirement("--exits", lambda config: config.exits, lambda fed: getattr(fed.model, "exits", False)),
    "adapters": Requirement(
        "--adapters.kind", lambda config: config.adapters.on, lambda fed: next(adapted_layers(fed.model), None)
    ),
    "architectures": Requirement(
        "--architectures and --adapters.ranks",
        lambda config: config.architectures != ArchitectureOptions() or len(set(config.adapters.ranks)) > 1,
        lambda fed: fed.fleet and len(fed.fleet.architectures) > 1,
    ),
}
"""All requirements, by the name under which `fl.algorithms.method.Method` refuses them."""

"""Where a setting is: its topic and field, from its name on the command line. Flags are flat, settings are not."""

from dataclasses import fields

from fl.algorithms import OPTIONS
from fl.base.errors import FLError
from fl.base.settings import name_of
from fl.partition import KINDS
from fl.settings.data import DataSettings
from fl.settings.evaluation import EvaluationSettings
from fl.settings.execution import ExecutionSettings
from fl.settings.extensions import EXTENSIONS
from fl.settings.model import ModelSettings
from fl.settings.topic import Topic
from fl.settings.training import ClientSettings, LocalSettings

TOPICS: dict[str, type[Topic]] = {
    "data": DataSettings,
    "model": ModelSettings,
    "clients": ClientSettings,
    "local": LocalSettings,
    "evaluation": EvaluationSettings,
    "execution": ExecutionSettings,
}
"""From the name of a topic, a field of `fl.Config`, to its settings."""

PLACES: dict[str, tuple[str, str]] = {
    name_of(field): (topic, field.name) for topic, kind in TOPICS.items() for field in fields(kind)
}
"""From a setting's name to its topic and field. Options of a partition or a method are where that is chosen."""

METHOD = "fedmr"
"""The method of a run that names none."""

OWN = ("rounds", "patience", "seed")
"""Settings that are of no topic."""

GROUPS = ("text", "architectures", "adapters")
"""Settings that are groups, whose flags begin with their names."""


def check_names() -> None:
    """Raise FLError for an option of a partition, a method or an extension that hides a setting."""
    taken = {*PLACES, *OWN, *TOPICS, "algorithm", "method", "extensions"}
    for kind, one in KINDS.items():
        for name in one.reads:
            others = {type(other.options) for other in KINDS.values() if name in other.reads}
            if len(others) > 1 or name in taken or name == "name":
                raise FLError(f"--partition {kind} cannot have an option {name!r}: that is another setting, rename it")
    for name in OPTIONS:
        if name in taken:
            raise FLError(f"a method with options cannot be called {name!r}, which is a setting already: rename it")
    for name in EXTENSIONS:
        if name in taken or name in OPTIONS:
            raise FLError(f"an extension cannot be called {name!r}, which is a setting or a method already: rename it")


check_names()

"""The place of a setting, its topic and field, from its flag's name.

A new setting is a field of its topic, or a field that is a dataclass of several; nothing else names it. One of no topic
is a field of `fl.Config`, and stands in `OWN`.
"""

from dataclasses import Field, fields, is_dataclass
from reprlib import repr as short
from typing import Any

from fl import algorithms, partition
from fl.algorithms import OPTIONS
from fl.base.errors import FLError
from fl.base.plugins import is_path, path_of
from fl.base.settings import Alternative, name_of
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

FIELDS: dict[str, Field] = {name_of(field): field for kind in TOPICS.values() for field in fields(kind)}
"""From a setting's name to its field, which has its type and its default."""

METHOD = "fedmr"
"""The method of a run that names none."""

OWN: dict[str, Any] = {"rounds": int, "patience": int, "seed": int}
"""From settings of no topic, which are fields of `fl.Config`, to their types."""

SOURCE = "from"
"""Key of a method's import path in a file of settings; no option can be called so, which is a word of Python's own."""

GROUPS = tuple(
    name for name, field in FIELDS.items() if is_dataclass(field.default) and not isinstance(field.default, Alternative)
)
"""Settings of topics that are groups, whose flags begin with their names."""


_TAKEN = frozenset({*PLACES, *OWN, *TOPICS, "algorithm", "method", "extensions"})
"""What options of partitions, methods and extensions cannot be called."""


def check_names() -> None:
    """Raise FLError for an option or an extension whose name hides a setting."""
    for name, kind in KINDS.items():
        _check_partition(name, kind)
    for name in _TAKEN - {*TOPICS}:  # there is a method `local`, which has no options
        if OPTIONS.get(name) is not None:
            raise FLError(
                f"a method with options cannot be called {name!r}, which is a setting already: rename it", code="name"
            )
    for name in EXTENSIONS:
        if name in _TAKEN or OPTIONS.get(name) is not None:
            raise FLError(
                f"an extension cannot be called {name!r}, which is a setting or a method already: rename it",
                code="name",
            )


def _check_partition(kind: str, entry: partition.Kind) -> None:
    for name in entry.reads:
        others = {type(other.options) for key, other in KINDS.items() if key != kind and name in other.reads}
        if others - {type(entry.options)} or name in _TAKEN or name == "name":
            raise FLError(
                f"--partition {kind} cannot have an option {name!r}: that is another setting, rename it", code="name"
            )


check_names()


def method_named(wanted: Any) -> Any:
    """Return the name of a method, as settings have it, from what a user calls it.

    Papers write FedAvg+. An import path stands for the method that it names, which is added to those there are.

    Raises:
        FLError: for what is no name, and an import path of no method, or of one whose name is taken.
    """
    if isinstance(wanted, Alternative):
        return wanted
    if not isinstance(wanted, str):
        raise FLError(
            f"unknown --algorithm {short(wanted)}: give a name, or an import path such as my_module:METHOD", code="name"
        )
    if not is_path(wanted):
        if (name := algorithms.plain_name(wanted)) in _TAKEN and OPTIONS.get(name) is not None:
            raise FLError(
                f"a method with options cannot be called {name!r}, which is a setting already: rename it", code="name"
            )
        return name
    method = algorithms.import_method(wanted)
    if method.name in _TAKEN or method.name in EXTENSIONS:
        raise FLError(
            f"--algorithm {wanted} is called {method.name}, as a setting is: rename its function", code="name"
        )
    algorithms.register(wanted, method)
    return method.name


def partition_named(wanted: Any) -> Any:
    """Return the name of a partition from its name, import path or function.

    One of a user's own is added to those there are, by its import path.

    Raises:
        FLError: for an import path of no partition, and for options that are settings already.
    """
    path = path_of("partition", wanted) if callable(wanted) else wanted
    if not isinstance(path, str | Alternative | None):
        raise FLError(f"unknown --partition {short(path)}: give a name, an import path or a function", code="name")
    if isinstance(path, str) and is_path(path):
        kind = partition.import_kind(path)
        _check_partition(path, kind)
        KINDS[path] = kind
    return path

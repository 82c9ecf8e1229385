"""Files of settings: nested by topic, or by the names of flags."""

import difflib
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from reprlib import repr as short
from typing import Any

from fl.algorithms import ALGORITHMS
from fl.base.errors import FLError
from fl.base.files import regular
from fl.base.settings import Alternative, T, describe_type, flag_of, from_yaml
from fl.partition import KINDS
from fl.settings import earlier
from fl.settings.data import DataSettings
from fl.settings.extensions import EXTENSIONS
from fl.settings.places import FIELDS, GROUPS, METHOD, OWN, PLACES, SOURCE, TOPICS, method_named, partition_named
from zoo import ZooError
from zoo.plain_yaml import read_yaml

_COMMAND = ("out", "name", "config", "resume")
"""Flags of a command that were settings of a run."""


_log = logging.getLogger("fl")


def read(text: str, gone: bool = False) -> dict[str, Any]:
    """Read a file of settings.

    Returns those that it has, by the names that `Experiment.of` takes, each of its type. Sections of things that are
    not here, such as a method whose file is gone, are left out with a warning.

    Args:
        gone: whether settings of earlier versions that are gone are left out; otherwise they are an error.

    Raises:
        FLError: for text that is not YAML, a setting that there is not or that is there twice, and a value of a wrong
            type.
    """
    values, names = earlier.without_gone(_mapping(text))
    if names and not gone:
        raise FLError(f"{earlier.say_gone(names)}; delete these lines", code="name")
    for name in values.keys() & {*_COMMAND} if not gone else ():
        if name in ("config", "resume"):
            raise FLError(f"{name} is a flag, which no file of settings has", code="name")
        if values[name] is not None:  # as files of version 0.2 have it
            _log.warning("warning: %s is ignored: it is a flag of the command, --%s", name, name)
    result: dict[str, Any] = {}
    sections = []  # of methods, and what nothing here knows
    for name, value in _flat(values):
        if name in ALGORITHMS or (isinstance(value, dict) and name not in (*GROUPS, *EXTENSIONS)):
            sections.append((name, value))
        elif name in earlier.MOVED.values() and name in result:  # one more setting that was in no group
            result[name] = _fill(result[name], value, name)
        elif name in result:
            raise FLError(f"{name} is there twice: leave one of them out")
        else:
            result[name] = _convert(name, value)
    for name, section in sections:
        try:
            name, section = _method(name, section)
            usual = ALGORITHMS[name].options if name in ALGORITHMS else None
            if section and usual is None:
                raise FLError(f"{name} has no options")
            if section and name in result:
                raise FLError(f"the options of {name} are there twice: leave one section out")
            result |= {name: _fill(usual, section, name)} if section else {}
        except FLError as why:
            if name in result.get("algorithms", (METHOD,)) and name in ALGORITHMS:
                raise
            if not gone and name not in ALGORITHMS:  # of a file that somebody writes, and no record of a run
                raise FLError(describe_unknown(name), code="name") from None
            _log.warning("warning: section %s is ignored, since this run does not read it (%s)", name, why)
    return result


def name_outside(topic: str, inside: str) -> str:
    """Return the name of a topic's setting outside of it; FLError if there is none.

    >>> name_outside("local", "epochs")
    'local_epochs'
    """
    known = {place: name for name, (of, place) in PLACES.items() if of == topic}
    if inside in known:
        return known[inside]
    if inside in PLACES:
        raise FLError(f"unknown setting {topic}.{inside}: it is {'.'.join(PLACES[inside])}", code="name")
    if any(inside in kind.reads for kind in KINDS.values()):
        raise FLError(f"unknown setting {topic}.{inside}: it stands beside the name in data.partition", code="name")
    raise FLError(
        earlier.notice_of(flag_of(str(inside))) or f"unknown setting {topic}.{inside}{_near(inside, known)}",
        code="name",
    )


def _flat(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the settings of a file by their names outside of topics.

    Groups are mappings.
    """
    for name, value in values.items():
        if name in TOPICS and isinstance(value, dict):
            for inside, item in value.items():
                outside = (name, inside) in earlier.OUTSIDE
                yield from _alternative(inside if outside else name_outside(name, inside), item)
        elif name in TOPICS and name not in PLACES:
            raise FLError(f"{name} is a topic, with settings in it: {name}: {{{fields(TOPICS[name])[0].name}: ...}}")
        elif name == "method" and isinstance(value, dict):
            if "name" not in value:
                raise FLError("method has no name: give one")
            options = {option: item for option, item in value.items() if option != "name"}
            yield "algorithms", value["name"]
            yield from [(value["name"], options)] * bool(options)
        elif name == "method":
            raise FLError(f"method cannot be {short(value)}: write method: {{name: {value}}}, or algorithm: {value}")
        elif name in ("algorithm", "seed", "seeds"):
            yield {"algorithm": "algorithms", "seed": "seeds"}.get(name, name), value
        elif name in earlier.MOVED:
            yield earlier.MOVED[name], {name: value}
        elif name not in _COMMAND:
            yield from _alternative(name, value)


def _method(name: str, section: Any) -> tuple[str, Any]:
    """Return the name of a method and its options, without the import path.

    Raises FLError if it is not there, or is another one now.
    """
    if not isinstance(section, dict) or SOURCE not in section:
        return method_named(name), section
    if (there := method_named(section[SOURCE])) != name:
        raise FLError(f"{section[SOURCE]} is {there} now", code="name")
    return name, {option: value for option, value in section.items() if option != SOURCE}


def _alternative(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield a setting, and where it is a partition with options these by themselves."""
    if name != "partition" or not isinstance(value, dict):
        yield name, value
        return
    kind = value.get("name", DataSettings.partition.name)
    try:
        if isinstance(kind, str) and partition_named(kind) not in KINDS:
            raise FLError(f"there is no partition {kind} here", code="name")
    except FLError as why:  # runs are also read where a module is no longer there
        _log.warning("warning: the options of the partition %s are ignored (%s)", kind, why)
        yield name, Alternative(kind)
    else:
        yield from ((name if option == "name" else option, item) for option, item in value.items())


def _convert(name: str, value: Any) -> Any:
    """Return the value of a setting as its type has it."""
    options = {option.name: option.type for kind in KINDS.values() if kind.options for option in fields(kind.options)}
    if name == "partition":
        return value if isinstance(value, Alternative) else _value(str, value, name)
    if name in FIELDS:
        field = FIELDS[name]
        return _fill(field.default, value, name) if is_dataclass(field.default) else _value(field.type, value, name)  # type: ignore[type-var]
    if name in EXTENSIONS:
        return _fill(EXTENSIONS[name].options, value, name)
    if name == "algorithms":
        return tuple(map(method_named, _value(tuple[str, ...], value, "algorithm")))
    if name == "seeds":
        return _value(tuple[int, ...], value, name)
    if name in OWN:
        return _value(OWN[name], value, name)
    if name in options:
        return _value(options[name], value, name)
    raise FLError(describe_unknown(name), code="name")


def _fill(default: T, values: Any, group: str) -> T:
    """Return a group of settings with the given values, converted to their types."""
    if not isinstance(values, dict):
        raise FLError(f"{group} is not a mapping")
    types = {option.name: option.type for option in fields(default)}  # type: ignore[arg-type]
    for name in values:
        if name not in types:
            raise FLError(
                earlier.notice_of(flag_of(str(name), group)) or f"unknown setting {group}.{name}{_near(name, types)}",
                code="name",
            )
    return replace(default, **{name: _value(types[name], value, f"{group}.{name}") for name, value in values.items()})  # type: ignore[type-var]


def _value(kind: Any, value: Any, name: str) -> Any:
    try:
        return from_yaml(kind, value)
    except TypeError:
        share = "; a share of the clients is participation" if name == "participants" else ""
        raise FLError(f"{name} cannot be {short(value)}: give {describe_type(kind)}{share}") from None


_ELSEWHERE = {"learning_rate": "lr", "num_clients": "clients", "epochs": "local_epochs", "method": "algorithm"}
"""Names that other tools have for settings, too far from ours to be found as misspelt."""


def describe_unknown(name: str) -> str:
    """Say of a missing setting what it is called now, or what may be meant."""
    options = [option for kind in KINDS.values() for option in kind.reads]
    if name == "extensions":
        return "extensions stand by their names, outside of other sections: privacy: {clip: 0.5}"
    near = _near(name, (*PLACES, *OWN, *TOPICS, "algorithm", *options, *EXTENSIONS))
    return earlier.notice_of(flag_of(str(name))) or f"unknown setting {name}{near}"


def _near(name: Any, known: Iterable[str]) -> str:
    if word := _ELSEWHERE.get(str(name)):
        return f": did you mean {word}?"
    matches = difflib.get_close_matches(str(name).rpartition(".")[2], known, n=1)
    return f": did you mean {matches[0]}?" if matches else ""


def _mapping(text: str) -> dict[str, Any]:
    try:
        values = read_yaml(text)
    except ZooError as error:
        raise FLError(str(error), code=error.code) from None
    if not isinstance(values, dict):
        raise FLError("it has no settings: write lines such as `rounds: 10`, or sections of such lines", code="file")
    return values


@contextmanager
def in_folder(folder: Path, resume: bool) -> Iterator[str]:
    """Give the text of a run folder's settings; errors of the block name the file.

    Args:
        resume: whether its runs are to resume, which runs of earlier versions cannot.
    """
    path = folder / "config.yaml"
    if not os.path.lexists(folder):  # unlike Path.exists it takes any name
        raise FLError(f"{folder} does not exist: give a run folder", code="folder")
    try:
        text = regular(path).read_text()
    except (OSError, UnicodeDecodeError):
        raise FLError(
            f"{folder} is not a run folder: it has no config.yaml that can be read; give the folder of a run",
            code="folder",
        ) from None
    try:
        if resume:
            check_resumable(text)
        yield text
    except (FLError, ZooError) as error:
        raise FLError(f"{path}: {error}", code=error.code) from None


def check_resumable(text: str) -> None:
    """Raise FLError for a run that cannot resume.

    It is of an earlier version, or something that it names is missing here.
    """
    values = _mapping(text)
    if names := earlier.without_gone(values)[1]:  # without the lines it would be another run
        raise FLError(f"{earlier.say_gone(names)}; continue with the version that began the run", code="folder")
    if "dataset" in values:  # outside of a topic
        raise FLError("an earlier version began this run: continue with that one, or start it again", code="folder")
    for section in values.values():
        if isinstance(section, dict) and SOURCE in section:
            method_named(section[SOURCE])  # which says what is missing
    if names := missing(text):
        raise FLError(
            f"this run was made with {names[0]}, which is not installed here: install it, and go on", code="missing"
        )


def missing(text: str) -> list[str]:
    """Name the sections of settings that belong to nothing that is installed here."""
    known = (*TOPICS, *EXTENSIONS, *GROUPS, "method")
    sections = [name for name, section in _mapping(text).items() if isinstance(section, dict)]
    return [name for name in sections if name not in known and name not in ALGORITHMS]

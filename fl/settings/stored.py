"""Settings as files of earlier versions have them: flat, with other names, of several methods and seeds at once."""

import logging
from collections.abc import Iterable, Mapping
from reprlib import repr as short
from typing import Any

from fl.algorithms import OPTIONS
from fl.base.errors import FLError
from fl.base.settings import described, flag_of, from_yaml
from fl.partition import KINDS
from fl.settings.extensions import EXTENSIONS
from fl.settings.places import GROUPS, PLACES, TOPICS

_log = logging.getLogger("fl")
_RENAMED = {
    "chunk": "max-parallel-clients",
    "pool": "pool-test-set",
    "models-every": "eval-client-models-every",
    "fedmr.fraction": "fedmr.segment-fraction",
    "femam.lam": "femam.prox",
    "femam.lam-everywhere": "femam.prox-all-levels",
    "femam.epsilon": "femam.min-gain",
    "joining": "presence.joining",
    "leaving": "presence.leaving",
}
"""From flags of earlier versions to what they are called now."""
_GONE = {
    "jobs": "several commands, as a shell loop or xargs -P starts them",
    "activation-checkpointing": "torch.utils.checkpoint in a model of your own",
    **dict.fromkeys(("attack.kind", "attack.target", "attack.size"), "data of your own that bear the trigger"),
    "sample-privacy": "Opacus",
    "secure-aggregation": "an app of Flower's own",
}
"""From flags and groups of earlier versions that are gone to what a user takes instead."""
_MOVED = {"joining": "presence", "leaving": "presence"}
"""From settings to the groups where they are now; files of earlier versions have them outside."""
_COMMAND = ("out", "name", "config", "resume")
"""Flags of a command that were settings of a run."""


def said_of(flag: str) -> str:
    """Say what a flag of an earlier version is called now, or that it is gone; "" for any other."""
    if flag in _RENAMED:
        return f"--{flag} is now --{_RENAMED[flag]}"
    names = {flag, flag.partition(".")[0]} & _GONE.keys()
    return f"{_are_gone(names)}; leave it out" if names else ""


def check_renamed(flags: Iterable[str]) -> None:
    """Raise FLError for the first flag of an earlier version, written without its dashes."""
    for flag in flags:
        if said := said_of(flag):
            raise FLError(said)


def check_resumable(values: Mapping[str, Any]) -> None:
    """Raise FLError for settings of a run of an earlier version, which cannot go on."""
    if names := _without_gone(values)[1]:  # without the lines it would be another run
        raise FLError(f"{_are_gone(names)}; go on with the version that began the run")
    if "dataset" in values:  # outside of a topic
        raise FLError("an earlier version began this run: go on with that one, or start it again")


def nested(values: Mapping[str, Any], usual: str, gone: bool = False) -> dict[str, Any]:
    """Bring the settings of a file into the form of `fl.Config.values`. Settings outside of topics find theirs.

    Args:
        usual: the method of a file that names none.
        gone: whether settings that are gone are left out.

    Raises:
        FLError: for settings that are gone, and for several methods or seeds.
    """
    values, several, seeds, options = separated(values, gone)
    if len(several) > 1 or len(seeds) > 1:
        raise FLError("it names several methods or seeds, which one run does not have")
    method = values.get("method", {})
    name = several[0] if several else method.get("name", usual) if isinstance(method, dict) else usual
    own = options.pop(str(name), {})
    if several or own:
        values["method"] = {"name": name, **method, **own}
    for other in options:
        _log.warning("warning: section %s is ignored, since this run does not read it", other)
    for seed in seeds:
        values["seed"] = seed
    return values


def separated(
    values: Mapping[str, Any], gone: bool = False
) -> tuple[dict[str, Any], tuple[str, ...], tuple[int, ...], dict[str, dict]]:
    """Separate what a file of settings has of its runs from what they have in common.

    Returns the common settings, nested by topic; the methods and seeds that it lists, if it does; and the options of
    methods outside of a method of its own.
    """
    values, names = _without_gone(values)
    if names and not gone:
        raise FLError(f"{_are_gone(names)}; delete these lines")
    found: dict[str, Any] = {}
    options: dict[str, dict] = {}
    several, seeds = _listed(values, "algorithm", str), _listed(values, "seeds", int)
    reads = {option for one in KINDS.values() for option in one.reads}
    for name, value in values.items():
        known = isinstance(name, str)
        if not known or name in ("algorithm", "seeds", *_COMMAND):
            continue
        if name in TOPICS and isinstance(value, dict):
            found[name] = {**found.get(name, {}), **value}
        elif name == "partition":
            place = found.setdefault("data", {}).setdefault("partition", {})
            place |= value if isinstance(value, dict) else {"name": value}
        elif name in reads:
            found.setdefault("data", {}).setdefault("partition", {})[name] = value
        elif name in PLACES or name in GROUPS:
            topic, inside = PLACES[name]
            found.setdefault(topic, {})[inside] = value
        elif name in _MOVED:
            found.setdefault(_MOVED[name], {})[name] = value
        elif name in EXTENSIONS:
            found[name] = {**found.get(name, {}), **value} if isinstance(value, dict) else value
        elif name in OPTIONS or name in several:
            options[name] = value
        else:
            found[name] = value
    return found, several, seeds, options


def _listed(values: Mapping[str, Any], name: str, kind: type) -> tuple:
    """Return a list of a file, or one value, as a tuple; empty if it is not there. Papers write FedAvg+."""
    if name not in values:
        return ()
    try:
        found = from_yaml(tuple[kind, ...], values[name])  # type: ignore[valid-type]
    except TypeError:
        raise FLError(f"{name} cannot be {short(values[name])}: give {described(tuple[kind, ...])}") from None  # type: ignore[valid-type]
    return tuple(f"{one[:-1]}_plus" if kind is str and one.endswith("+") else one for one in found)


def _are_gone(names: Iterable[str]) -> str:
    """Name settings that are gone, each with what a user takes instead."""
    return ", ".join(f"--{name} is gone (instead: {_GONE[name]})" for name in names)


def _without_gone(values: Any, group: str = "") -> tuple[Any, list[str]]:
    """Return the values of settings without those that are gone, and the names of these."""
    if not isinstance(values, dict):
        return values, []
    rest, names = {}, []
    for name, value in values.items():
        if (flag := flag_of(f"{group}.{name}" if group else str(name))) in _GONE:
            names.append(flag)
        else:
            rest[name], inside = _without_gone(value, flag)
            names += inside
    return rest, names


def flags(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings by flag that a checkpoint keeps, where earlier versions named several methods and seeds."""
    found = dict(settings)
    if "seeds" in found:
        (found["seed"],) = found.pop("seeds")
    if isinstance(found.get("algorithm"), list):
        (found["algorithm"],) = found["algorithm"]
    return found


def several(values: Any) -> bool:
    """Say whether a file of settings is of several runs, or may be."""
    return isinstance(values, dict) and any(isinstance(values.get(name), list) for name in ("algorithm", "seeds"))

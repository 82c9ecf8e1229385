"""Names of settings in earlier versions, and what replaces those that are gone."""

from collections.abc import Iterable, Mapping
from typing import Any

from fl.base.errors import FLError
from fl.base.settings import flag_of
from fl.settings.places import TOPICS

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
    "focal-gamma": "a loss of your own, --loss module:function",
    "architectures.deviation": "that of the gradients, as in FedFA's released code",
}
"""From flags and groups of earlier versions that are gone to what a user takes instead."""

OUTSIDE = {("model", "adapters")}
"""Groups of extensions that stood in a topic: (topic, group)."""

MOVED = {"joining": "presence", "leaving": "presence"}
"""From settings to the groups where they are now; files of earlier versions have them outside."""


def notice_of(flag: str) -> str:
    """Say what a flag of an earlier version is called now, or is gone; "" for others."""
    if flag in _RENAMED:
        return f"--{flag} is now --{_RENAMED[flag]}"
    names = {flag, flag.partition(".")[0]} & _GONE.keys()
    return f"{say_gone(names)}; leave it out" if names else ""


def check_renamed(flags: Iterable[str]) -> None:
    """Raise FLError for the first flag of an earlier version, without its dashes."""
    for flag in flags:
        if notice := notice_of(flag):
            raise FLError(notice, code="name")


def flags(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return a checkpoint's settings by their present flags, also of earlier versions.

    >>> flags({"joining": 0.1, "seeds": [3], "algorithm": ["fedmr"]})
    {'presence.joining': 0.1, 'algorithm': 'fedmr', 'seed': 3}
    """
    renamed = {_RENAMED.get(name, name): value for name, value in settings.items()}
    if "seeds" in renamed:
        (renamed["seed"],) = renamed.pop("seeds")
    if isinstance(renamed.get("algorithm"), list):
        (renamed["algorithm"],) = renamed["algorithm"]
    return renamed


def say_gone(names: Iterable[str]) -> str:
    """Name settings that are gone, each with what a user takes instead."""
    return ", ".join(f"--{name} is gone (instead: {_GONE[name]})" for name in names)


def without_gone(values: Any, group: str = "") -> tuple[Any, list[str]]:
    """Return the values of settings without those that are gone, and their names."""
    if not isinstance(values, dict):
        return values, []
    rest, names = {}, []
    for name, value in values.items():
        if (flag := flag_of(f"{group}.{name}" if group else str(name))) in _GONE:
            names.append(flag)
        else:
            rest[name], inside = without_gone(value, "" if not group and name in TOPICS else flag)
            names += inside
    return rest, names

"""The extensions there are: in `fl.extensions`, and in installed packages."""

from collections.abc import Iterable
from typing import Any

from fl.algorithms.extension import Extension, ModelChange
from fl.base.errors import FLError
from fl.base.plugins import collect, kind, load_entry_points


def _check(entry: Any, name: str) -> Extension:
    if not isinstance(entry, Extension):
        raise FLError(f"is {kind(entry)}, not an Extension")
    return entry


def _extensions() -> dict[str, Extension]:
    """Return extensions by name; a package's that fails is left out with a warning."""
    ours = collect("fl.extensions", "EXTENSION", Extension)
    return ours | load_entry_points("extensions", ours, _check)


EXTENSIONS: dict[str, Extension] = _extensions()
"""From the name of an extension, which its group of settings shares, to what it is."""


def model_change(names: Iterable[str]) -> tuple[str, ModelChange] | None:
    """Return the name and the model change of the extension that changes the model.

    It is None if a run asks for no such extension.

    Raises:
        FLError: for two.
    """
    changes = [(name, change) for name in names if (change := EXTENSIONS[name].model)]
    if len(changes) > 1:
        raise FLError(f"--{changes[0][0]} and --{changes[1][0]} both change the model: leave one of them out")
    return changes[0] if changes else None

"""The extensions there are: those of `fl.extensions`, and those of installed packages."""

from typing import Any

from fl.algorithms.extension import Extension
from fl.base.errors import FLError
from fl.base.plugins import declared, kind, load_entry_points


def _checked(found: Any, name: str) -> Extension:
    if not isinstance(found, Extension):
        raise FLError(f"is {kind(found)}, not an Extension")
    return found


def _extensions() -> dict[str, Extension]:
    """Return extensions by name; one of a package that cannot be had is left out with a warning."""
    ours = declared("fl.extensions", "EXTENSION", Extension)
    return ours | load_entry_points("extensions", ours, _checked)


EXTENSIONS: dict[str, Extension] = _extensions()
"""From the name of an extension, which is that of its group of settings, to what it is."""

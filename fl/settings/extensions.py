"""The extensions there are: those of `fl.extensions`, and those of installed packages."""

import logging
from importlib.util import find_spec

from fl.algorithms.extension import Extension
from fl.base.plugins import declared, failed, installed, kind

_log = logging.getLogger("fl")


def _extensions() -> dict[str, Extension]:
    """Return extensions by name; one of a package that cannot be had is left out with a warning."""
    found = declared("fl.extensions", "EXTENSION", Extension) if find_spec("fl.extensions") else {}
    for name, point in installed("extensions").items():
        wrong = "has the name of another extension" if name in found else ""
        try:
            one = None if wrong else point.load()
        except Exception as error:  # another package's code
            wrong = f"cannot be loaded: {failed(error)}"
        else:
            if isinstance(one, Extension):
                found[name] = one
                continue
            wrong = wrong or f"is {kind(one)}, not an Extension"
        _log.warning(
            "warning: the extension %s of an installed package (%s) is left out: it %s", name, point.value, wrong
        )
    return found


EXTENSIONS: dict[str, Extension] = _extensions()
"""From the name of an extension, which is that of its group of settings, to what it is."""

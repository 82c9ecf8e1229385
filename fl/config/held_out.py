"""Samples that clients hold out for a method that validates on them."""

import logging
from dataclasses import replace
from typing import TypeVar

from fl.algorithms import ALGORITHMS
from fl.algorithms.method import Method
from fl.base.errors import FLError
from fl.config.fields import Fields

Settings = TypeVar("Settings", bound=Fields)
SHARE = 0.1
"""Of each client's samples, where the settings hold none out."""

_log = logging.getLogger("fl")


def holding_out(config: Settings, chosen: bool = False) -> Settings:
    """The settings, with samples held out if one of their methods validates on them and they hold none out.

    Args:
        chosen: whether somebody has asked for the share of the settings, so that it cannot be another one.

    Raises:
        FLError: if none are to be held out, and a method needs some.
    """
    if config.local_valid:
        return config
    for name in config.algorithm:
        method = ALGORITHMS.get(name)
        if isinstance(method, Method) and method.validates(getattr(config, name, method.options)):
            if chosen:
                raise FLError(
                    f"--local-valid 0: {name} validates on samples that clients hold out; leave the flag out (for "
                    f"{SHARE}) or give a share"
                )
            _log.warning(f"{name} validates on samples that clients hold out: --local-valid {SHARE} is taken")
            return replace(config, local_valid=SHARE)
    return config

"""Samples that clients hold out for a method that validates on them."""

import logging
from dataclasses import replace
from typing import TypeVar

from fl.algorithms import ALGORITHMS
from fl.algorithms.method import Method
from fl.config.fields import Fields

Settings = TypeVar("Settings", bound=Fields)
SHARE = 0.1
"""Of each client's samples, where the settings hold none out."""

_log = logging.getLogger("fl")


def holding_out(config: Settings) -> Settings:
    """The settings, with samples held out if one of their methods validates on them and they hold none out."""
    if config.local_valid:
        return config
    for name in config.algorithm:
        method = ALGORITHMS.get(name)
        if isinstance(method, Method) and method.validates(getattr(config, name, method.options)):
            _log.warning(f"{name} validates on samples that clients hold out: --local-valid {SHARE} is taken")
            return replace(config, local_valid=SHARE)
    return config

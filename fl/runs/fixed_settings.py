"""The settings that a run keeps from its first round to its last, as its checkpoint remembers them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fl.base.errors import FLError
from fl.base.settings import written
from fl.config import Config
from fl.config.config import plain


def fixed(config: Config) -> dict[str, Any]:
    """The settings, by flag, that a resumed run must not change, as plain values. The number of rounds is one of them
    where the learning rate, or who joins and leaves, depends on it; how often is evaluated where --keep-best or
    --patience compare all evaluations.

    >>> settings = fixed(Config(lr=0.5))
    >>> settings["lr"], "rounds" in settings, "fedmr.fraction" in settings, "fedprox.mu" in settings
    (0.5, False, True, False)
    >>> fixed(Config(lr_schedule="cosine"))["rounds"]
    40
    """
    settings = {setting.flag: setting for setting in config.settings() if setting.name not in ("out", "name")}
    free = {flag for flag, setting in settings.items() if setting.role.resumable}
    if config.lr_schedule != "constant" or config.joining or config.leaving:
        free.discard("rounds")
    if config.keep_best or config.patience:
        free.discard("eval-every")
    return {flag: plain(setting.value) for flag, setting in settings.items() if flag not in free}


def check_unchanged(before: Mapping[str, Any], config: Config, folder: Path) -> None:
    """Raise FLError for a setting that is not what it was when the checkpoint was written.

    Settings that only one of two versions of this package has are not compared.
    """
    for flag, value in fixed(config).items():
        if flag in before and before[flag] != value:
            was, now = (written(tuple(v) if isinstance(v, list) else v) for v in (before[flag], value))
            why = " (--keep-best and --patience compare the evaluations of all rounds)" * (flag == "eval-every")
            raise FLError(
                f"{folder} was trained with --{flag} {was}, and now it is {now}{why}: put {was} back into "
                f"{folder / 'config.yaml'}, or start a new run"
            )

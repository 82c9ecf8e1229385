"""Settings that do not go together, and what to set instead."""

from dataclasses import fields, replace
from pathlib import Path

from fl.algorithms import ALGORITHMS, is_mixed
from fl.algorithms.method import Method
from fl.base.errors import FLError
from fl.base.settings import Flag, changed, check_read, check_values, marks
from fl.config.fields import Fields
from fl.data import is_text
from fl.models.architectures import ArchitectureOptions
from fl.models.weights import check_init


def check(config: Fields) -> None:
    """Raise FLError for settings that do not go together, and values that a setting cannot have, before anything is
    loaded or written.
    """
    config.check_data()
    if not config.algorithm or not config.seeds:
        raise FLError("give at least one --algorithm and one of --seeds")
    if len(set(config.algorithm)) < len(config.algorithm) or len(set(config.seeds)) < len(config.seeds):
        raise FLError("--algorithm and --seeds: name each method and each seed only once")
    if len(config.betas) != 2:
        raise FLError(f"--betas takes two numbers, got {','.join(map(str, config.betas))}")
    if config.nesterov and not config.momentum:
        raise FLError("--nesterov needs a --momentum above 0")
    if is_text(config.dataset) and (config.crop or config.flip):
        raise FLError("--crop and --flip are for images, and the data set is text: leave them out")
    if config.pool and not config.local_test:
        raise FLError("--pool leaves no test set, so clients have to hold samples out: give --local-test, such as 0.17")
    if is_text(config.dataset) and config.masked_loss:
        raise FLError("--masked-loss is for classes of images, and the data set is text: leave it out")
    # Options of methods that are not run are let through: from Python, one Config may serve several.
    check_read(config, [one.flag for one in changed(config, type(config)()) if one.group not in ALGORITHMS])
    uniform = [name for name in config.algorithm if not is_mixed(name)]
    if uniform and config.architectures != ArchitectureOptions():
        able = ", ".join(filter(is_mixed, ALGORITHMS))
        raise FLError(
            f"--architectures are for {able}: {uniform[0]} gives all clients one model; leave them out, or make "
            "your own method a Method(..., clients='mixed')"
        )
    for name in config.algorithm:
        if isinstance(method := ALGORITHMS[name], Method):  # not a plain function that somebody put in
            method.refuse(config.asked)
    if config.init is not None:
        check_init(config.init, config.model)
    config.architectures.check()
    config.schedule()
    config.cohort()
    config.architectures.announce(config.spec())


def check_methods(config: Fields) -> None:
    """Raise FLError for a method that does not exist."""
    (field,) = (field for field in fields(config) if field.name == "algorithm")
    for mark in marks(field, Flag):
        mark.check(field.name, config.algorithm)


def check_recorded(config: Fields) -> None:
    """Raise FLError for a value that a setting cannot have, in the settings of a run whose rounds are to be read only:
    its method, data and model need not be here.
    """
    check_values(replace(config, algorithm=tuple(name for name in config.algorithm if name in ALGORITHMS)))
    config.cohort()


def check_registered(config: Fields, folder: Path) -> None:
    """Raise FLError if a run that is to go on is of a method that this process does not know."""
    if unknown := [name for name in config.algorithm if name not in ALGORITHMS]:
        raise FLError(
            f"{folder} holds a run of {unknown[0]}, which is no method of this installation: work with it from Python, "
            f"after the lines that register it, as in fl.simulate(fl.Config.read({str(folder)!r}), {str(folder)!r}, "
            f"resume=True); or make it a file or a package (docs/guides/method.md), so that every command knows it"
        )

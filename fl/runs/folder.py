"""Run folders: where they lie, what they hold, and which process works in them."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch import nn

from fl import models
from fl.algorithms.algorithm import Algorithm, Server
from fl.base.errors import FLError
from fl.base.files import is_leftover
from fl.config import Config
from fl.models.own import Model
from fl.runs import checkpoint, lock, metrics
from fl.runs.best import FILE as BEST
from fl.runs.best import best_file, check_kept
from fl.runs.fixed_settings import check_unchanged
from surgery import State
from zoo import Spec

SETTINGS = "config.yaml"


def begin(config: Config, folder: Path, algorithm: Algorithm, spec: Spec) -> tuple[Server, int]:
    """(server, rounds done) of a run folder; from the start if it was stopped before its first checkpoint.

    Raises FLError for a checkpoint that is damaged, gone, of another model or method, or of other settings, and for a
    table or a best model that does not belong to it.
    """
    if not (folder / checkpoint.FILE).exists():
        _check_none_lost(folder)
        return algorithm.init(), 0
    server, done = checkpoint.restore(folder, algorithm.init(), spec)
    check_intact(folder, config)
    if done > config.rounds:
        raise FLError(f"{folder} has done {done} rounds, more than --rounds {config.rounds}")
    return server, done


def check_intact(folder: Path, config: Config, table: bool = True, best: bool = True) -> None:
    """Raise FLError for a checkpoint of other settings than these, and for a table or a best model that is not the one
    that was beside it when it was written. Rounds of the table after it are not looked at.

    Args:
        table, best: whether to look at that.
    """
    header = checkpoint.read_header(folder)
    try:
        check_unchanged(header["settings"], config, folder)
        if table:
            metrics.check_rows(folder / metrics.FILE, header["round"], header["beside"].get(metrics.FILE))
        if best:
            check_kept(folder, header["round"], header["beside"].get(BEST))
    except FLError:
        if checkpoint.read_header(folder) == header:
            raise
        check_intact(folder, config, table, best)  # the run goes on meanwhile, and has written another


def run_name(config: Config) -> str:
    """The folder of one method and seed among several."""
    return f"{config.algorithm[0]}-seed{config.seeds[0]}"


def new_folder(config: Config, title: str) -> Path:
    """The folder for a new run: the given --name, or the title with a number where it is taken."""
    if config.name is not None:
        if not config.name:
            raise FLError("--name is empty: give the run folder a name, or leave the flag out")
        if Path(config.name).name != config.name:
            raise FLError(f"--name {config.name} is not a plain name: give the folder that it lies in with --out")
        return Path(config.out, config.name)
    path, number = Path(config.out, title), itertools.count(2)
    while path.exists():
        path = Path(config.out, f"{title}-{next(number)}")
    return path


@contextmanager
def held(folder: Path, resume: bool) -> Iterator[None]:
    """Keep a run folder to this process for as long as the block lasts, see `fl.runs.lock`.

    It is made unless a run is resumed; should nothing be in it at the end, as where the settings were refused, it is
    deleted again.

    Raises FLError for a folder that another process works in, cannot be made, or (not resuming) has something in it. An
    empty one is taken: that is what a process leaves that was killed before it had written its settings.
    """
    if resume:
        if not folder.is_dir():
            raise FLError(f"{folder} is not a run folder, so nothing can be resumed there")
        with lock.locked(folder):
            yield
        return
    made = _make(folder)
    try:
        with lock.locked(folder):
            check_unused(folder)
            yield
    finally:
        for one in made:
            with suppress(OSError):  # it has something in it
                one.rmdir()


def check_unused(folder: Path) -> None:
    """Raise FLError if there is such a folder, and something in it."""
    if is_unused(folder):
        return
    if (folder / SETTINGS).exists() or (folder / "sweep.yaml").exists():
        raise FLError(f"{folder} exists already: choose another --name, or go on with --resume {folder}")
    raise FLError(
        f"{folder} exists already and holds no run that could be resumed (there is no {SETTINGS}): choose another "
        "--name, or move away what is in it"
    )


def is_unused(folder: Path) -> bool:
    """Whether there is no such folder, or an empty one."""
    if not folder.exists():
        return True
    return folder.is_dir() and all(one.name == lock.FILE or is_leftover(one.name) for one in folder.iterdir())


def _make(folder: Path) -> list[Path]:
    """Make a folder; returns those that there were not, the innermost first."""
    try:
        check_unused(folder)
        made = [one for one in (folder, *folder.parents) if not one.exists()]
        folder.mkdir(parents=True, exist_ok=True)
    except FLError:
        raise
    except (OSError, ValueError) as error:
        raise FLError(f"{folder} cannot be made: {getattr(error, 'strerror', error)}") from None
    return made


def _check_none_lost(folder: Path) -> None:
    """Raise FLError if a folder without a checkpoint must have had one: rounds run again from the start only where too
    few were done for the first.
    """
    table = folder / metrics.FILE
    done = len(metrics.read(table)) if table.exists() else 0
    if (
        (folder / "summary.json").exists()
        or (folder / BEST).exists()
        or (done and done > Config.read(folder).checkpoint_every)
    ):
        raise FLError(
            f"{folder / checkpoint.FILE} is gone, though {done} rounds were done: put it back, or start a new run "
            "under another --name"
        )


def load_model(folder: str | Path, model: Model | None = None, *, best: bool = False) -> nn.Module:
    """The trained global model of a run folder, on the CPU, in evaluation mode. It takes images in [-1, 1], or tokens,
    or floats as they were given.

    Args:
        model: the model of your own that the run was given, if it was: a module (which stays as it is), or a function
            that makes it.
        best: that of the best evaluated round (see `fl.runs.metrics.best`), for a run with --keep-best; by default that
            of the last round.

    Raises FLError if the folder holds no run, or several, or one of another model, or not the model of its best round.
    """
    folder = Path(folder)
    config = Config.read(folder)
    if len(config.runs()) > 1:
        raise FLError(f"{folder} holds several runs: give one of the folders in it")
    if (folder / checkpoint.FILE).exists():
        check_intact(folder, config, table=best, best=best)
    spec, state = checkpoint.read_model(folder, best_file(folder) if best else checkpoint.FILE, model)
    net = models.create(torch.Generator(), spec)
    try:
        net.load_state_dict(state | _tied(net, state))
    except RuntimeError as error:
        raise FLError(f"{folder} holds another model: {' '.join(str(error).split())}") from None
    return net.eval()


def _tied(net: nn.Module, state: State) -> State:
    """The tensors that a state has under another of their names."""
    own = net.state_dict(keep_vars=True)
    known = {id(tensor): state[name] for name, tensor in own.items() if name in state}
    return {name: known[id(tensor)] for name, tensor in own.items() if name not in state and id(tensor) in known}

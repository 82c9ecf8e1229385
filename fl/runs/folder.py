"""Run folders: where they lie, what they hold."""

import itertools
from pathlib import Path

import torch
from torch import nn

from fl import models
from fl.algorithms.algorithm import Algorithm, Server
from fl.base.errors import FLError
from fl.config import Config
from fl.models.own import Model
from fl.runs import checkpoint
from zoo import Spec


def begin(config: Config, folder: Path, algorithm: Algorithm, spec: Spec) -> tuple[Server, int]:
    """(server, rounds done) of a run folder; from the start if it was stopped before its first checkpoint."""
    if not (folder / checkpoint.FILE).exists():
        return algorithm.init(), 0
    server, done = checkpoint.restore(folder, algorithm.init(), spec)
    if done > config.rounds:
        raise FLError(f"{folder} has done {done} rounds, more than --rounds {config.rounds}")
    return server, done


def run_name(config: Config) -> str:
    """The folder of one method and seed among several."""
    return f"{config.algorithm[0]}-seed{config.seeds[0]}"


def new_folder(config: Config, title: str) -> Path:
    """The folder for a new run: the given --name, or the title with a number where it is taken."""
    if config.name:
        if Path(config.name).name != config.name:
            raise FLError(f"--name {config.name} is not a plain name: give the folder that it lies in with --out")
        return Path(config.out, config.name)
    path, number = Path(config.out, title), itertools.count(2)
    while path.exists():
        path = Path(config.out, f"{title}-{next(number)}")
    return path


def create_folder(folder: Path) -> None:
    """Make a run folder, which must be new."""
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise FLError(f"{folder} exists already: choose another --name, or go on with --resume {folder}") from None
    except (OSError, ValueError) as error:
        raise FLError(f"{folder} cannot be made: {getattr(error, 'strerror', error)}") from None


def load_model(folder: str | Path, model: Model | None = None) -> nn.Module:
    """The trained global model of a run folder, on the CPU, in evaluation mode. It takes images in [-1, 1], or tokens,
    or floats as they were given.

    Args:
        model: the model of your own that the run was given, if it was: a module (which stays as it is), or a function
            that makes it.

    Raises FLError if the folder holds no run, or several, or one of another model.
    """
    folder = Path(folder)
    if len(Config.read(folder).runs()) > 1:
        raise FLError(f"{folder} holds several runs: give one of the folders in it")
    spec, state = checkpoint.read_model(folder, model)
    net = models.create(torch.Generator(), spec)
    try:
        net.load_state_dict(state)
    except RuntimeError as error:
        raise FLError(f"{folder} holds another model: {' '.join(str(error).split())}") from None
    return net.eval()

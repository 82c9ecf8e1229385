"""Which settings of a run cannot be run, and what to set instead."""

import dataclasses
import math
from typing import get_args

import zoo
from fl.algorithms import ALGORITHMS, is_mixed
from fl.algorithms.method import Method
from fl.base.errors import FLError
from fl.base.flags import choice
from fl.config.fields import Fields
from fl.config.yaml_settings import flat
from fl.data import is_text
from fl.engine import backend_names
from fl.engine.precision import NAMES as PRECISIONS
from fl.models.architectures import ArchitectureOptions

_LEAST = {
    "rounds": 1, "local_epochs": 1, "batch_size": 1, "eval_every": 1,
    "checkpoint_every": 1, "models_every": 0, "momentum": 0, "weight_decay": 0, "clip": 0, "chunk": 0, "crop": 0,
}  # fmt: skip


def check(config: Fields) -> None:
    """Raise FLError for a setting that cannot be run, before anything is loaded or written."""
    choice("algorithm", config.algorithm, ALGORITHMS)
    choice("stem", [config.stem], ("default", "imagenet", "cifar"))
    choice("norm", [config.norm], ["default", *get_args(zoo.norms.Norm)])
    config.check_data()
    choice("backend", [config.backend], backend_names())
    if not config.algorithm or not config.seeds:
        raise FLError("give at least one --algorithm and one of --seeds")
    if len(set(config.algorithm)) < len(config.algorithm) or len(set(config.seeds)) < len(config.seeds):
        raise FLError("--algorithm and --seeds name each method and seed once")
    for flag, value in flat(dataclasses.asdict(config)).items():
        if any(isinstance(v, float) and not math.isfinite(v) for v in (value if type(value) is tuple else [value])):
            raise FLError(f"--{flag} must be a finite number, got {value}")
    for flag, bound in _LEAST.items():
        if getattr(config, flag) < bound:
            raise FLError(f"--{flag.replace('_', '-')} must be {bound} or more, got {getattr(config, flag)}")
    if config.lr <= 0:
        raise FLError(f"--lr must be above 0, got {config.lr}")
    if not all(0 <= seed < 2**32 for seed in config.seeds):
        raise FLError(f"--seeds must be at least 0 and below 2^32, got {','.join(map(str, config.seeds))}")
    choice("optimizer", [config.optimizer], ("sgd", "adam"))
    choice("precision", [config.precision], PRECISIONS)
    if len(config.betas) != 2 or not all(0 <= beta < 1 for beta in config.betas):
        raise FLError(f"--betas are two numbers of at least 0 and below 1, got {','.join(map(str, config.betas))}")
    if config.nesterov and not config.momentum:
        raise FLError("--nesterov needs a --momentum above 0")
    if is_text(config.dataset) and (config.crop or config.flip):
        raise FLError("--crop and --flip are for images, and the data set is text: leave them out")
    if config.pool and not config.local_test:
        raise FLError("--pool leaves nothing to test on but what clients hold out: give --local-test, such as 0.17")
    if is_text(config.dataset) and config.masked_loss:
        raise FLError("--masked-loss is for classes of images, and the data set is text: leave it out")
    uniform = [name for name in config.algorithm if not is_mixed(name)]
    if uniform and config.architectures != ArchitectureOptions():
        able = ", ".join(filter(is_mixed, ALGORITHMS))
        raise FLError(
            f"--architectures are for {able}: {uniform[0]} gives all clients one model; leave them out, or make a "
            "method of your own Method(..., clients='mixed')"
        )
    for name in config.algorithm:
        if isinstance(method := ALGORITHMS[name], Method):  # no plain function that somebody put in
            method.check(config.asked)
    config.architectures.check()
    config.attack.check()
    config.defence.check()
    config.schedule()
    config.cohort()
    config.architectures.announce(config.spec())

"""Every setting of a run: the fields are the flags of `python -m fl.run`."""

from dataclasses import dataclass, field, make_dataclass
from typing import Annotated, get_args

import tyro

import zoo
from fl import models
from fl.algorithms import ALGORITHMS, OPTIONS
from fl.base.errors import FLError
from fl.base.flags import (
    Above0,
    AtLeast0,
    AtLeast1,
    Depths,
    Natural,
    OnlyWith,
    Rates,
    Role,
    Share,
    number,
    one_of,
    several,
)
from fl.config.settings import DataSettings
from fl.data import is_text
from fl.engine import SGD, Adam, Optimizer, backend_names
from fl.engine.precision import NAMES as PRECISIONS
from fl.engine.schedule import SCHEDULES, Schedule, schedule
from fl.federation.attack import AttackOptions
from fl.federation.defence import Defence
from fl.models.architectures import ArchitectureOptions


def _methods() -> str:
    """What --help says of --algorithm."""
    named = {
        kind: [name for name, one in ALGORITHMS.items() if one.clients == kind] for kind in ("one", "own", "mixed")
    }
    one, own, mixed = map(", ".join, named.values())
    return (
        f"methods, comma-separated: {one}; with a model for each client {own}; with clients of different "
        f"--architectures {mixed}. Several run on the same splits and are compared"
    )


MethodOptions = make_dataclass(
    "MethodOptions", [(name, type(default), field(default=default)) for name, default in OPTIONS.items()], frozen=True
)
"""The options of every method, under its name."""
# Said here for --help, which would look for the source of this class, and has none to find.
MethodOptions.__doc__ = "The options of every method.\n\nAttributes:\n" + "".join(
    f"    {name}: {type(default).__doc__}\n" for name, default in OPTIONS.items()
)


_SGD, _STEP = OnlyWith("optimizer", "sgd"), OnlyWith("lr_schedule", "step")
_EXECUTION, _FREE = Role(compared=False), Role(compared=False, resumable=True)
_Methods = Annotated[tuple[str, ...], several(str, "NAME,...", items=ALGORITHMS)]
_Betas = Annotated[tuple[float, ...], several(float, "FLOAT,FLOAT", least=0, below=1)]
_HeldOut = Annotated[float, number(float, least=0, below=1)]


@dataclass(frozen=True)
class Fields(DataSettings):
    """The flags of `python -m fl.run`, their defaults, and what is made of a few of them at a time."""

    algorithm: Annotated[_Methods, Role(compared=False), tyro.conf.arg(help=_methods())] = ("fedmr",)
    model: str = "cnn"
    """cnn (McMahan et al. 2017), resnet20, ... (`python -m zoo` lists them), timm:NAME or torchvision:NAME; for text
    transformer, or transformer_masked (15% of the tokens are hidden, and all are asked for)"""
    width: Rates = (1.0,)
    """rates of the hidden widths: one for all, or one for each section of the model"""
    depth: Depths = ()
    """blocks of the model's sections: one number for all sections, or one for each"""
    stem: Annotated[str, one_of("default", "imagenet", "cifar")] = "default"
    """imagenet halves images once or twice before the first section, cifar keeps them; or the model's default"""
    norm: Annotated[str, one_of("default", *get_args(zoo.norms.Norm))] = "default"
    """norm layers, or the model's default"""
    dropout: Annotated[float | None, tyro.conf.arg(metavar="FLOAT")] = None
    """dropout's rate [the model's own]"""
    architectures: ArchitectureOptions = ArchitectureOptions()

    participants: int | float = 5
    """clients that train in a round: a count (5), or a share with a decimal point (0.25)"""
    joining: Share = 0.0
    """share of the clients who join only after some round, which is drawn"""
    leaving: Share = 0.0
    """share of the clients who leave after some round"""
    rounds: Annotated[AtLeast1, Role(resumable=True)] = 40
    """communication rounds"""
    local_epochs: AtLeast1 = 5
    """passes of a client over its data in a round"""
    batch_size: AtLeast1 = 10
    """samples of a step"""
    crop: Natural = 0
    """augmentation: pixels of zeros around an image, which is then cut back at a random place; 0: none"""
    flip: bool = False
    """augmentation: mirror half of the images"""
    optimizer: Annotated[str, one_of("sgd", "adam")] = "sgd"
    """the clients' optimizer; what it remembers of a round is gone in the next"""
    lr: Above0 = 0.02
    """the clients' learning rate (for adam rather 0.001)"""
    momentum: Annotated[AtLeast0, _SGD] = 0.9
    """sgd: momentum"""
    nesterov: Annotated[bool, _SGD] = False
    """sgd: Nesterov's momentum"""
    betas: Annotated[_Betas, OnlyWith("optimizer", "adam")] = (0.9, 0.999)
    """adam: decay of its two moments"""
    weight_decay: AtLeast0 = 0.0
    """weight decay (added to the gradient)"""
    clip: AtLeast0 = 0.0
    """largest norm of a client's gradient; 0 does not clip"""
    masked_loss: bool = False
    """whether clients train with logits of 0 for the classes that they do not have (HeteroFL, FedFA)"""
    lr_schedule: Annotated[str, one_of(*SCHEDULES)] = "constant"
    """how the learning rate changes over rounds: not, by --lr-factor after each of --lr-steps, or as a cosine down to
    nearly 0"""
    lr_factor: Annotated[float, number(float, above=0, most=1), _STEP] = 0.1
    """step: what the learning rate is multiplied by"""
    lr_steps: Annotated[tuple[float, ...], several(float, "0<FLOAT<1,...", above=0, below=1), _STEP] = (0.5, 0.75)
    """step: after which shares of the rounds"""

    local_valid: _HeldOut = 0.0
    """share of each client's samples held out to validate on"""
    local_test: _HeldOut = 0.0
    """share of each client's samples held out to test on"""

    attack: AttackOptions = AttackOptions()
    defence: Defence = Defence()

    seeds: Annotated[tuple[int, ...], several(int, "INT,...", least=0, below=2**32), Role(compared=False)] = (0,)
    """one run each; a seed fixes the split, the initial weights, the sampling and the batches"""
    eval_every: Annotated[AtLeast1, _FREE] = 1
    """rounds between evaluations of the global model (and of clients' held-out data)"""
    models_every: Annotated[Natural, _FREE] = 1
    """rounds between evaluations of each of the participants' models; 0 leaves them out (not their similarity)"""
    checkpoint_every: Annotated[AtLeast1, _FREE] = 10
    """rounds between checkpoints (one more at the end, and on Ctrl-C)"""

    device: Annotated[str, _FREE] = "auto"
    """cpu, cuda, cuda:1, ...; auto takes a GPU if there is one"""
    chunk: Annotated[Natural, _FREE] = 0
    """clients of a round that train at a time, to save memory; 0: all"""
    backend: Annotated[str, one_of(*backend_names()), _EXECUTION] = "auto"
    """how a round's clients train: loop (one after another), workers (in threads, on the CPU), vmap (as one program),
    graphs (CUDA graphs), or what was measured to be fastest"""
    precision: Annotated[str, one_of(*PRECISIONS)] = "float32"
    """float32; tf32 (on CUDA); bf16, with weights in float32"""
    channels_last: Annotated[bool, _EXECUTION] = False
    """memory layout of images and convolutions: channels as the last axis (not with vmap)"""
    deterministic: Annotated[bool, _EXECUTION] = True
    """on CUDA: cuDNN takes only convolutions that add in one order, as repeating a run takes; without it some are
    faster"""
    out: Annotated[str, _EXECUTION, tyro.conf.arg(metavar="FOLDER")] = "runs"
    """parent of run folders"""
    name: Annotated[str | None, _EXECUTION, tyro.conf.arg(metavar="NAME")] = None
    """the run folder's name; must be new [made from the settings]"""
    resume: Annotated[str | None, _FREE, tyro.conf.arg(metavar="FOLDER")] = None
    """continue the run in this folder, with its settings; --rounds may be raised where the --lr-schedule is constant
    and nobody joins or leaves"""

    def __post_init__(self) -> None:
        for name, kind in (("width", float), ("depth", int)):  # Config(width=0.5, depth=2) says what it means
            value = getattr(self, name)
            if not isinstance(value, tuple):
                object.__setattr__(self, name, tuple(value) if isinstance(value, list) else (kind(value),))

    def local_optimizer(self) -> Optimizer:
        """The clients' optimizer."""
        if self.optimizer == "adam":
            return Adam(self.lr, *self.betas, weight_decay=self.weight_decay, clip=self.clip)
        return SGD(self.lr, self.momentum, self.weight_decay, self.nesterov, self.clip)

    def schedule(self) -> Schedule:
        """The factor of the learning rate in each round."""
        return schedule(self.lr_schedule, self.rounds, self.lr_factor, self.lr_steps)

    @property
    def asked(self) -> set[str]:
        """What not every method can do and these settings ask for, as `Population.asked` of what they make."""
        wanted = {
            "masked": self.masked_loss,
            "tampering": self.attack.share or self.defence != Defence(),
            "presence": self.joining or self.leaving,
        }
        return {what for what, given in wanted.items() if given}

    def cohort(self) -> int:
        """K, the number of participants of a round."""
        share = isinstance(self.participants, float)
        if share and not 0 < self.participants <= 1:
            raise FLError(
                f"--participants {self.participants} is neither a count (without decimal point) nor a share in (0, 1]"
            )
        k = max(1, round(self.participants * self.clients)) if share else int(self.participants)
        if not 1 <= k <= self.clients:
            raise FLError(f"--participants {k} of --clients {self.clients}: a round needs between 1 and all of them")
        return k

    def spec(self, num_classes: int | None = None, in_channels: int | None = None, image_size: int | None = None):
        """The `zoo.Spec` of the model, for data with such images and classes, or for text."""
        if not self.width:
            raise FLError("give at least one --width")
        return models.make_spec(
            self.model,
            num_classes,
            in_channels,
            image_size,
            width=self.width[0] if len(self.width) == 1 else self.width,
            depth=self.depth[0] if len(self.depth) == 1 else self.depth or None,
            norm=None if self.norm == "default" else self.norm,
            stem=None if self.stem == "default" else self.stem,
            tokens=self.text.length if is_text(self.dataset) else None,
            dropout=self.dropout,
        )

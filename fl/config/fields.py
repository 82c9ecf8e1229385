"""Every setting of a run: the fields are the flags of `python -m fl.run`."""

from dataclasses import dataclass, field, make_dataclass
from typing import Annotated, ClassVar

import tyro

from fl import models
from fl.algorithms import ALGORITHMS, OPTIONS
from fl.base.errors import FLError
from fl.base.flags import Depths, Integers, Names, Rates
from fl.config.settings import DataSettings
from fl.data import is_text
from fl.engine import SGD, Adam, Optimizer
from fl.engine.schedule import Schedule, schedule
from fl.federation.asked import ASKED
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


@dataclass(frozen=True)
class Fields(DataSettings):
    """The flags of `python -m fl.run`, their defaults, and what is made of a few of them at a time."""

    algorithm: Annotated[Names, tyro.conf.arg(help=_methods())] = ("fedmr",)
    model: str = "cnn"
    """cnn (McMahan et al. 2017), resnet20, ... (`python -m zoo` lists them), timm:NAME or torchvision:NAME; for text
    transformer, or transformer_masked (15% of the tokens are hidden, and all are asked for)"""
    width: Rates = (1.0,)
    """rates of the hidden widths: one for all, or one for each section of the model"""
    depth: Depths = ()
    """blocks of the model's sections: one number for all sections, or one for each"""
    stem: str = "default"
    """imagenet halves images once or twice before the first section, cifar keeps them; or the model's default"""
    norm: str = "default"
    """norm layers: batch, static_batch, group, layer, none, or the model's default"""
    dropout: Annotated[float | None, tyro.conf.arg(metavar="FLOAT")] = None
    """dropout's rate [the model's own]"""
    architectures: ArchitectureOptions = ArchitectureOptions()

    participants: int | float = 5
    """clients that train in a round: a count (5), or a share with a decimal point (0.25)"""
    joining: float = 0.0
    """share of the clients who join only after some round, which is drawn"""
    leaving: float = 0.0
    """share of the clients who leave after some round"""
    rounds: int = 40
    """communication rounds"""
    local_epochs: int = 5
    """passes of a client over its data in a round"""
    batch_size: int = 10
    """samples of a step"""
    crop: int = 0
    """augmentation: pixels of zeros around an image, which is then cut back at a random place; 0: none"""
    flip: bool = False
    """augmentation: mirror half of the images"""
    optimizer: str = "sgd"
    """the clients' optimizer, sgd or adam; what it remembers of a round is gone in the next"""
    lr: float = 0.02
    """the clients' learning rate (for adam rather 0.001)"""
    momentum: float = 0.9
    """sgd: momentum"""
    nesterov: bool = False
    """sgd: Nesterov's momentum"""
    betas: Rates = (0.9, 0.999)
    """adam: decay of its two moments"""
    weight_decay: float = 0.0
    """weight decay (added to the gradient)"""
    clip: float = 0.0
    """largest norm of a client's gradient; 0 does not clip"""
    masked_loss: bool = False
    """whether clients train with logits of 0 for the classes that they do not have (HeteroFL, FedFA)"""
    lr_schedule: str = "constant"
    """how the learning rate changes over rounds: constant, step (times --lr-factor at --lr-steps) or cosine"""
    lr_factor: float = 0.1
    """step: what the learning rate is multiplied by"""
    lr_steps: Rates = (0.5, 0.75)
    """step: after which shares of the rounds"""

    local_valid: float = 0.0
    """share of each client's samples held out to validate on"""
    local_test: float = 0.0
    """share of each client's samples held out to test on"""

    attack: AttackOptions = AttackOptions()
    defence: Defence = Defence()

    seeds: Integers = (0,)
    """one run each; a seed fixes the split, the initial weights, the sampling and the batches"""
    eval_every: int = 1
    """rounds between evaluations of the global model (and of clients' held-out data)"""
    models_every: int = 1
    """rounds between evaluations of each of the participants' models; 0 leaves them out (not their similarity)"""
    checkpoint_every: int = 10
    """rounds between checkpoints (one more at the end, and on Ctrl-C)"""

    device: str = "auto"
    """cpu, cuda, cuda:1, ...; auto takes a GPU if there is one"""
    chunk: int = 0
    """clients of a round that train at a time, to save memory; 0: all"""
    backend: str = "auto"
    """how a round's clients train: loop (one after another), workers (in threads, on the CPU), vmap (as one program),
    graphs (CUDA graphs), or what was measured to be fastest"""
    precision: str = "float32"
    """float32; tf32 (on CUDA); bf16, with weights in float32"""
    channels_last: bool = False
    """memory layout of images and convolutions: channels as the last axis (not with vmap)"""
    deterministic: bool = True
    """on CUDA: cuDNN takes only convolutions that add in one order, as repeating a run takes; without it some are
    faster"""
    out: Annotated[str, tyro.conf.arg(metavar="FOLDER")] = "runs"
    """parent of run folders"""
    name: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """the run folder's name; must be new [made from the settings]"""
    resume: Annotated[str | None, tyro.conf.arg(metavar="FOLDER")] = None
    """continue the run in this folder, with its settings; --rounds may be raised where the --lr-schedule is constant
    and nobody joins or leaves"""

    read_by: ClassVar[dict[tuple[str, str], tuple[str, ...]]] = {
        **DataSettings.read_by,
        ("optimizer", "sgd"): ("momentum", "nesterov"),
        ("optimizer", "adam"): ("betas",),
        ("lr_schedule", "step"): ("lr_factor", "lr_steps"),
    }

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
        """Which of `fl.federation.asked.ASKED` these settings ask of a method."""
        return {what for what, ask in ASKED.items() if ask.by_config(self)}

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

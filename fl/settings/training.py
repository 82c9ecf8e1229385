"""Settings of training: who takes part, and how a client trains."""

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Annotated

import tyro

from fl import data
from fl.base.errors import FLError
from fl.base.plugins import is_path, path_of
from fl.base.settings import (
    Above0,
    AtLeast0,
    AtLeast1,
    Bounds,
    Default,
    Flag,
    Named,
    Natural,
    OnlyWith,
    Rare,
    Share,
    number,
    one_of,
    several,
)
from fl.data import Dataset
from fl.engine import SGD, Adam, Optimizer, losses
from fl.engine.batches import LAST_BATCHES
from fl.engine.losses import Loss
from fl.engine.optimizers import SCHEDULES, Schedule, schedule
from fl.engine.precision import NAMES as PRECISIONS
from fl.settings.topic import Topic

_SGD, _STEP = OnlyWith("optimizer", "sgd"), OnlyWith("lr_schedule", "step")
_ADAM, _EXPONENTIAL = OnlyWith("optimizer", "adam", "adamw"), OnlyWith("lr_schedule", "exponential")
_Betas = Annotated[tuple[float, ...], several(float, "FLOAT,FLOAT", least=0, below=1)]
_Weights = Annotated[tuple[float, ...], several(float, "FLOAT,...", empty="none", least=0)]


def _count(word: str) -> int:
    """Read a number of clients; a share, which was one as well, is told its flag."""
    with suppress(ValueError):
        return int(word)
    raise ValueError(f"{word!r} is not a whole number; a share of the clients is --participation")


@dataclass(frozen=True)
class ClientSettings(Topic):
    """The number of clients, and of those that train in a round."""

    number: Annotated[AtLeast1, Named("clients")] = Default(20)
    """number of clients, at least --participants (FedMR: 100)"""
    participation: Annotated[Share, Rare()] = 0.0
    """share of the clients that train in a round, in place of --participants; 0 goes by --participants"""
    participants: Annotated[int, Flag(_count, "INT>=1", Bounds(least=1)), OnlyWith("participation", 0)] = Default(5)
    """clients in a round, at most all (FedMR: 10)"""

    def following(self) -> "ClientSettings":
        """Move numbers left at their defaults into the limits that the others set."""
        number, participants, free = self.number, self.participants, bool(self.participation)
        usual = type(self)
        if isinstance(number, Default):
            least = 1 if free or isinstance(participants, Default) else participants
            number = Default(max(least, usual.number))
        if isinstance(participants, Default):
            most = usual.participants if free or isinstance(number, Default) else number
            participants = Default(max(1, min(usual.participants, most)))
        return replace(self, number=number, participants=participants)

    def cohort(self) -> int:
        """Count the participants of a round, K."""
        if self.participation:
            return max(1, round(self.participation * self.number))
        if self.participants > self.number:
            raise FLError(
                f"--participants {self.participants} of --clients {self.number}: a round needs between 1 and all of "
                "them"
            )
        return self.participants


@dataclass(frozen=True)
class LocalSettings(Topic):
    """The training of a client in a round."""

    epochs: Annotated[AtLeast1, Named("local_epochs")] = 5
    """epochs of a client in a round (FedMR: 5)"""
    batch_size: AtLeast1 = 10
    """samples in a step, at most the largest client's (FedMR: 50)"""
    last_batch: Annotated[str, one_of(*LAST_BATCHES), Rare()] = "filled"
    """the last batch of an epoch: filled up with samples that the client has seen in this epoch, which then count
    twice; or partial, with those that are left, as a DataLoader of torch has it"""
    crop: Annotated[Natural, Rare()] = 0
    """augmentation: pad images with this many pixels of zeros and cut them back at a random place; 0 is off"""
    flip: Annotated[bool, Rare()] = False
    """augmentation: mirror half of the images, chosen at random"""
    optimizer: Annotated[str, one_of("sgd", "adam", "adamw")] = "sgd"
    """the clients' optimizer; it starts afresh in every round"""
    lr: Above0 = 0.02
    """the clients' learning rate (FedMR: 0.01; a good start for adam and adamw: 0.001)"""
    momentum: Annotated[AtLeast0, _SGD] = 0.9
    """sgd: momentum (FedMR: 0.9)"""
    nesterov: Annotated[bool, _SGD, Rare()] = False
    """sgd: Nesterov's momentum"""
    betas: Annotated[_Betas, _ADAM, Rare()] = (0.9, 0.999)
    """adam, adamw: decay rates of the two moments"""
    weight_decay: AtLeast0 = 0.0
    """weight decay, added to the gradient; with adamw each step shrinks the weights by this share times the learning
    rate"""
    clip: Annotated[AtLeast0, Rare()] = 0.0
    """clip a client's gradient to this norm; 0 is off"""
    loss: Annotated[str, tyro.conf.arg(metavar="NAME|MODULE:FUNCTION")] = losses.DEFAULT
    """what clients minimise: cross_entropy or focal for classes, also dice or dice_cross_entropy for masks; mse, mae or
    huber for numbers; bce for several labels; your own: module:function from (outputs, targets) to each sample's loss;
    default is cross_entropy, mse or bce, as the data are"""
    label_smoothing: Annotated[
        float, number(float, least=0, below=1), OnlyWith("loss", "default", "cross_entropy"), Rare()
    ] = 0.0
    """cross_entropy: share of a label that is spread over all classes"""
    class_weights: Annotated[_Weights, Rare()] = ()
    """factor of the loss of each class's samples, one number for each class; for bce of the labels that are 1"""
    masked_loss: Annotated[bool, Rare()] = False
    """set the logits of classes that a client does not have to 0 while it trains (HeteroFL, FedFA)"""
    lr_schedule: Annotated[str, one_of(*SCHEDULES)] = "constant"
    """how the learning rate changes over rounds: step multiplies it by --lr-factor after each of --lr-steps, cosine
    lowers it to nearly 0, exponential multiplies it by --lr-decay after each round"""
    lr_factor: Annotated[float, number(float, above=0, most=1), _STEP] = 0.1
    """step: factor of the learning rate"""
    lr_steps: Annotated[tuple[float, ...], several(float, "0<FLOAT<1,...", above=0, below=1), _STEP] = (0.5, 0.75)
    """step: the shares of the rounds after which the learning rate drops"""
    lr_decay: Annotated[float, number(float, above=0, most=1), _EXPONENTIAL] = 0.998
    """exponential: factor of the learning rate from round to round (Flower's DepthFL and HeteroFL baselines: 0.998)"""
    lr_warmup: Annotated[Natural, Rare()] = 0
    """number of first rounds in which the learning rate rises linearly to what --lr-schedule says; 0 is none"""
    precision: Annotated[str, one_of(*PRECISIONS), Rare()] = "float32"
    """numbers to compute with: float32, tf32 (on CUDA), or bf16 with weights in float32"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if callable(self.loss):
            object.__setattr__(self, "loss", path_of("loss", self.loss))

    def check(self, dataset: str) -> None:
        """Raise FLError for settings that do not go together, or with this data set."""
        if len(self.betas) != 2:
            raise FLError(f"--betas takes two numbers, got {','.join(map(str, self.betas))}")
        if self.nesterov and not self.momentum:
            raise FLError("--nesterov needs a --momentum above 0")
        images = {"crop": self.crop, "flip": self.flip, "masked-loss": self.masked_loss}
        if data.is_text(dataset) and (wrong := [flag for flag, used in images.items() if used]):
            raise FLError(f"--{wrong[0]} is for images, and the data set is text: leave it out", code="unsupported")

    def make_optimizer(self) -> Optimizer:
        """Make the clients' optimizer."""
        if self.optimizer in ("adam", "adamw"):
            decoupled = self.optimizer == "adamw"
            return Adam(self.lr, *self.betas, weight_decay=self.weight_decay, clip=self.clip, decoupled=decoupled)
        return SGD(self.lr, self.momentum, self.weight_decay, self.nesterov, self.clip)

    def make_loss(self, dataset: Dataset) -> Loss:
        """Make what clients minimise the mean of, for such data.

        Raises:
            FLError: as `fl.engine.losses.by_name` does, and if a loss of one's own fails on the first batch.
        """
        loss = losses.by_name(self.loss, dataset.task, self.label_smoothing, self.class_weights, dataset.classes)
        if is_path(self.loss):
            losses.check_runs(self.loss, loss, dataset.outputs, dataset.y[: self.batch_size].to(dataset.device))
        return loss

    def schedule(self, rounds: int) -> Schedule:
        """Make the factor of the learning rate in each round."""
        return schedule(self.lr_schedule, rounds, self.lr_factor, self.lr_steps, self.lr_decay, self.lr_warmup)

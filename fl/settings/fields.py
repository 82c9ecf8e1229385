"""Every setting of a run: the fields are the flags of `python -m fl.run`, and those of the data also of `fl.data`."""

from contextlib import suppress
from dataclasses import dataclass, field, fields, make_dataclass, replace
from typing import Annotated, ClassVar, Self, get_args

import numpy as np
import tyro

import zoo
from fl import data, models
from fl.algorithms import ALGORITHMS, OPTIONS, methods_of
from fl.algorithms.extension import Extension
from fl.algorithms.method import KINDS as METHOD_KINDS
from fl.base.errors import FLError
from fl.base.plugins import path_of
from fl.base.settings import (
    Above0,
    AtLeast0,
    AtLeast1,
    Default,
    Defaults,
    Depths,
    Flag,
    Limits,
    Natural,
    OnlyWith,
    Rare,
    Rates,
    Role,
    Share,
    as_plain,
    check_values,
    from_yaml,
    number,
    one_of,
    several,
    types_of,
)
from fl.data import Dataset, Origin, TextOptions
from fl.data import overview as data_sets
from fl.data.dataset import PLACES
from fl.engine import SGD, Adam, Optimizer, backend_names, losses
from fl.engine.batches import LAST_BATCHES
from fl.engine.losses import Loss
from fl.engine.optimizers import SCHEDULES, Schedule, schedule
from fl.engine.precision import NAMES as PRECISIONS
from fl.models.adapted import AdapterOptions
from fl.models.architectures import ArchitectureOptions
from fl.partition import KINDS, Partition, check_text_kind, deal
from fl.partition import overview as partitions
from fl.settings.extensions import EXTENSIONS

_LOADED = Role(data=True)
_RARE = Rare()
_WHERE = Role(data=True, compared=False, resumable=True)


@dataclass(frozen=True)
class Who:
    """Which data set is dealt out, to how many clients, and how."""

    dataset: Annotated[str, _LOADED, tyro.conf.arg(help=data_sets())] = "digits"
    clients: AtLeast1 = Default(20)
    """number of clients that share out the training data; without this flag at least --participants"""
    partition: Annotated[str, one_of(*KINDS), tyro.conf.arg(help=f"how samples are dealt out: {partitions()}")] = (
        "dirichlet"
    )


def _hides_no_option(cls: type, **_: object) -> None:
    """A partition's option must not have the name of a setting, which would take its place."""
    for kind in KINDS:
        for name in KINDS[kind].reads:
            others = {type(other.options) for other in KINDS.values() if name in other.reads}
            if len(others) > 1 or hasattr(Who, name) or name in vars(cls):
                raise FLError(f"--partition {kind} cannot have an option {name!r}: that is another setting, rename it")


PartitionOptions = make_dataclass(
    "PartitionOptions",
    [],
    bases=tuple({type(kind.options): None for kind in reversed(KINDS.values()) if kind.options is not None}),
    namespace={"__init_subclass__": classmethod(_hides_no_option)},
    frozen=True,
)
"""The options of every partition, side by side: they are flat flags. Help finds what their own files say of them."""


@dataclass(frozen=True)
class DataSettings(PartitionOptions, Who):
    """A data set and its partition over clients."""

    samples: Annotated[Natural, _LOADED] = 0
    """share out only this many samples, drawn at random; 0 is all"""
    pool_test_set: Annotated[bool, _LOADED, _RARE] = False
    """share out the test set as well; models are then tested only on what clients hold out (--local-test) (FeMAM)"""
    min_samples: Annotated[AtLeast1, _RARE] = Default(10)
    """least number of samples of a client; without this flag fewer than 10 where --samples are too few for that"""
    data_root: Annotated[str | None, _WHERE, tyro.conf.arg(metavar="FOLDER")] = None
    """folder of the data sets [$FL_DATA_ROOT, else ~/.cache/layer-surgery]"""
    download: Annotated[bool, _WHERE, _RARE] = True
    """download a data set that is missing"""
    pad: Annotated[Natural, _LOADED, _RARE] = 0
    """enlarge every image by this many pixels on each side, repeating its edge, for models that need larger images
    (vgg16: 32x32)"""
    text: Annotated[TextOptions, _LOADED] = TextOptions()

    needs: ClassVar[dict[str, OnlyWith]] = {
        option: OnlyWith("partition", *(name for name, other in KINDS.items() if option in other.reads))
        for kind in KINDS.values()
        for option in kind.reads
    }
    """What an option of a partition is read with, which its own file does not say."""

    def __post_init__(self) -> None:
        with suppress(TypeError, ZeroDivisionError):  # of wrong values, which `check` explains
            self._follow("min_samples", most=self.samples // self.clients if self.samples else None)
            reads = KINDS[self.partition].reads if self.partition in KINDS else ()
            for name in {option for kind in KINDS.values() for option in kind.reads}:
                if isinstance(getattr(self, name), Default | Defaults):  # as ever, unless the partition reads it
                    usual = getattr(type(self), name)
                    object.__setattr__(self, name, usual.at_most(self.clients) if name in reads else usual)

    def _follow(self, name: str, least: int = 1, most: int | None = None) -> None:
        """Move a number that nobody set into the limits that other settings leave it."""
        if isinstance(getattr(self, name), Default):
            usual = getattr(type(self), name)
            object.__setattr__(self, name, Default(max(least, usual if most is None else min(usual, most))))

    def fitted(self, dataset: Dataset) -> Self:
        """Move numbers that nobody set into the limits that given data leave them."""
        if self.partition not in KINDS:  # as `check` says
            return self
        clients, least = self.clients, self.min_samples
        count = len(dataset.y) + self.pool_test_set * len(dataset.test_y)
        if KINDS[self.partition].partial and dataset.owners is not None and isinstance(clients, Default):
            able = int((dataset.owners.unique(return_counts=True)[1] >= least).sum())
            clients = min(clients, able) or clients
        elif isinstance(least, Default) and not self.samples:
            least = min(least, max(1, count // clients))
        same = (clients, least) == (self.clients, self.min_samples)
        return self if same else replace(self, clients=clients, min_samples=least)

    def check_data(self) -> None:
        """Raise FLError for settings of the data that cannot be, without looking at the data."""
        data.check_name(self.dataset)
        check_values(self)
        if data.is_text(self.dataset):
            check_text_kind(self.partition)
            self.text.check()
        if self.pad and data.is_text(self.dataset):
            raise FLError(f"--pad is for images, and {self.dataset} is text: leave it out")

    def group_unread(self, group: str) -> str:
        """Why nothing reads a group of settings, see `fl.base.settings.settings_of`."""
        if group == "text" and not data.is_text(self.dataset):
            return f"is for data sets of text, not for {self.dataset}: leave it out"
        return ""

    def load(self) -> Dataset:
        """The data set."""
        return self.prepare(data.load(self.dataset, self.data_root, self.download, self.text))

    def prepare(self, dataset: Dataset) -> Dataset:
        """A data set with a border, pooled and reduced as the settings say; unchanged if it is that already."""
        wanted, origin = self.origin(), dataset.origin
        if origin == wanted:
            return dataset
        bordered = dataset.padded(self.pad)
        made = (bordered.pooled() if self.pool_test_set else bordered).sampled(self.samples)
        return made.marked(wanted if origin == wanted.bare() else None)

    def origin(self) -> Origin:
        """That of the data which `load` returns."""
        text = self.text if data.is_text(self.dataset) else None
        return Origin(self.dataset, text, self.pad, self.pool_test_set, self.samples)

    def names(self, dataset: Dataset) -> bool:
        """Whether this is the data set of the settings, as it was loaded by its name, prepared or not.

        >>> DataSettings(samples=100).names(data.load("digits")), DataSettings().names(DataSettings(samples=100).load())
        (True, False)
        """
        return dataset.origin in (self.origin(), self.origin().bare())

    def deal(self, dataset: Dataset, rng: np.random.Generator) -> Partition:
        """The samples of each client, and the true structure."""
        options = {name: getattr(self, name) for name in KINDS[self.partition].reads}
        return deal(
            dataset.y, self.partition, self.clients, rng, minimum=self.min_samples, owners=dataset.owners, **options
        )

    def spread(self) -> str:
        """The partition in a word.

        >>> DataSettings(partition="clusters", clusters=(2, 5, 9)).spread()
        'clusters2,5,9'
        """
        return self.partition + KINDS[self.partition].word(self)


def _methods() -> str:
    """What --help says of --algorithm."""
    one, own, several = (", ".join(methods_of(kind)) for kind in METHOD_KINDS)
    return (
        f"federated methods, comma-separated: one global model {one}; a personalized model for each client {own}; "
        f"heterogeneous clients of different --architectures {several}. Several run on the same splits and are compared"
    )


ExtensionOptions = make_dataclass(
    "ExtensionOptions",
    [(name, Annotated[type(one.options), Rare()], field(default=one.options)) for name, one in EXTENSIONS.items()],
    frozen=True,
)
"""The options of every extension, under its name."""


MethodOptions = make_dataclass(
    "MethodOptions", [(name, type(default), field(default=default)) for name, default in OPTIONS.items()], frozen=True
)
"""The options of every method, under its name."""


LOGS = ("tensorboard", "wandb")
"""What --log can name: packages, each of which is also an extra of this project."""

_SGD, _STEP = OnlyWith("optimizer", "sgd"), OnlyWith("lr_schedule", "step")
_ADAM, _EXPONENTIAL = OnlyWith("optimizer", "adam", "adamw"), OnlyWith("lr_schedule", "exponential")
_EXECUTION, _FREE = Role(compared=False), Role(compared=False, resumable=True)
_Methods = Annotated[tuple[str, ...], several(str, "NAME,...", items=ALGORITHMS)]
_Betas = Annotated[tuple[float, ...], several(float, "FLOAT,FLOAT", least=0, below=1)]
_Weights = Annotated[tuple[float, ...], several(float, "FLOAT,...", empty="none", least=0)]
_Metrics = Annotated[tuple[str, ...], several(str, "NAME,...", empty="none")]
_HeldOut = Annotated[float, number(float, least=0, below=1)]


def _count(word: str) -> int:
    """Read a number of clients; a share, which was one as well, is told its flag."""
    with suppress(ValueError):
        return int(word)
    raise ValueError(f"{word!r} is not a whole number; a share of the clients is --participation")


@dataclass(frozen=True)
class Fields(ExtensionOptions, DataSettings):
    """The flags of `python -m fl.run` with their defaults, and the objects that are made from several of them."""

    algorithm: Annotated[_Methods, Role(compared=False), tyro.conf.arg(help=_methods())] = ("fedmr",)
    model: str = "cnn"
    """cnn (McMahan et al. 2017), resnet20, ... (`python -m zoo` lists them), timm:NAME or torchvision:NAME; hf:FOLDER,
    of transformers, or hf-config:FOLDER, the same with drawn weights; your own: module:MyNet; for text
    transformer, or transformer_masked (15% of the tokens are hidden, and the model predicts all of them)"""
    width: Rates = (1.0,)
    """shares of the hidden widths: one number for all, or one for each section of the model"""
    depth: Depths = ()
    """blocks in a section of the model: one number for all sections, or one for each"""
    stem: Annotated[str, one_of("default", "imagenet", "cifar"), _RARE] = "default"
    """first layers: imagenet halves images once or twice, cifar keeps their size, default is the model's own choice"""
    norm: Annotated[str, one_of("default", *get_args(zoo.norms.Norm)), _RARE] = "default"
    """norm layers; default is the model's own choice"""
    dropout: Annotated[float | None, tyro.conf.arg(metavar="FLOAT"), _RARE] = None
    """rate of dropout [the model's own]"""
    exits: Annotated[bool, _RARE] = False
    """ResNets with a classifier after each section: clients train all of them, and predictions are their mean. With
    --architectures.depths 2-2-0-0,2-2-2-2 clients lack the last sections"""
    init: Annotated[str | None, tyro.conf.arg(metavar="FILE|timm|torchvision")] = None
    """trained weights to begin from: a file (safetensors, or a state dict of torch.save), or timm or torchvision for
    those that the library publishes; a classifier for other classes is drawn anew; --adapters.kind lora trains adapters
    of low rank beside them [all weights are drawn]"""
    architectures: ArchitectureOptions = ArchitectureOptions()
    adapters: Annotated[AdapterOptions, _RARE] = AdapterOptions()

    participation: Share = 0.0
    """share of the clients that train in a round, in place of --participants; 0 goes by --participants"""
    participants: Annotated[int, Flag(_count, "INT>=1", Limits(least=1)), OnlyWith("participation", 0)] = Default(5)
    """how many clients train in a round; without this flag all clients where there are fewer than 5"""
    rounds: Annotated[AtLeast1, Role(resumable=True)] = 40
    """number of communication rounds"""
    local_epochs: AtLeast1 = 5
    """how often a client goes through its data in a round"""
    batch_size: AtLeast1 = 10
    """samples in a training step; at most as many as the client with most samples has"""
    last_batch: Annotated[str, one_of(*LAST_BATCHES), _RARE] = "filled"
    """the last batch of an epoch: filled up with samples that the client has seen in this epoch, which then count
    twice; or partial, with those that are left, as a DataLoader of torch has it"""
    crop: Annotated[Natural, _RARE] = 0
    """augmentation: pad images with this many pixels of zeros and cut them back at a random place; 0 is off"""
    flip: Annotated[bool, _RARE] = False
    """augmentation: mirror half of the images, drawn at random"""
    optimizer: Annotated[str, one_of("sgd", "adam", "adamw")] = "sgd"
    """the clients' optimizer; it starts afresh in every round"""
    lr: Above0 = 0.02
    """the clients' learning rate (with adam and adamw, 0.001 is a good start)"""
    momentum: Annotated[AtLeast0, _SGD] = 0.9
    """sgd: momentum"""
    nesterov: Annotated[bool, _SGD, _RARE] = False
    """sgd: Nesterov's momentum"""
    betas: Annotated[_Betas, _ADAM, _RARE] = (0.9, 0.999)
    """adam, adamw: decay rates of the two moments"""
    weight_decay: AtLeast0 = 0.0
    """weight decay, added to the gradient; with adamw each step shrinks the weights by this share times the learning
    rate"""
    clip: Annotated[AtLeast0, _RARE] = 0.0
    """clip a client's gradient to this norm; 0 is off"""
    loss: Annotated[str, tyro.conf.arg(metavar="NAME|MODULE:FUNCTION")] = losses.DEFAULT
    """what clients minimise: cross_entropy or focal for classes; mse, mae or huber for numbers; bce for several labels
    a sample; your own: module:function from (outputs, targets) to the loss of each sample; default is cross_entropy,
    mse or bce, as the data are"""
    label_smoothing: Annotated[_HeldOut, OnlyWith("loss", "default", "cross_entropy"), _RARE] = 0.0
    """cross_entropy: share of a label that is spread over all classes"""
    focal_gamma: Annotated[AtLeast0, OnlyWith("loss", "focal"), _RARE] = 2.0
    """focal: how much less samples count that are classified well already (Lin et al.: 2)"""
    class_weights: Annotated[_Weights, _RARE] = ()
    """factor of the loss of each class's samples, one number for each class; for bce of the labels that are 1"""
    masked_loss: Annotated[bool, _RARE] = False
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
    lr_warmup: Annotated[Natural, _RARE] = 0
    """number of first rounds in which the learning rate rises linearly to what --lr-schedule says; 0 is none"""

    local_valid: _HeldOut = 0.0
    """share of each client's samples that is held out for validation; 0 is none, or 0.1 for a method that needs some"""
    local_test: _HeldOut = 0.0
    """share of each client's samples that is held out for testing"""

    metrics: Annotated[_Metrics, Role(compared=False)] = ()
    """further metrics of the global model and of clients' own data: scikit-learn's scorers, such as roc_auc_ovr or
    balanced_accuracy; precision_per_class, recall_per_class or f1_per_class; your own: module:function from (outputs,
    targets) to a number"""
    best_by: Annotated[str, Role(compared=False), _RARE, tyro.conf.arg(metavar="COLUMN")] = "auto"
    """column of metrics.csv by which --patience, --keep-best and the summary find the best round, such as f1, loss or
    test_roc_auc_ovr; auto is the mean validation loss where clients validate, else the test accuracy"""

    seeds: Annotated[tuple[int, ...], several(int, "INT,...", least=0, below=2**32), Role(compared=False)] = (0,)
    """one run for each seed, which determines the split, the initial weights, the sampling and the batches"""
    eval_every: Annotated[AtLeast1, _FREE] = 1
    """evaluate the global model (and clients on the samples that they hold out) every so many rounds"""
    eval_client_models_every: Annotated[Natural, _FREE, _RARE] = 0
    """evaluate the model of each client of a round on the test set every so many rounds, which takes as long as so many
    evaluations, and their similarity as FedMR's released code does; 0 is never (their cosine is always measured)"""
    patience: Annotated[Natural, Role(resumable=True)] = 0
    """stop when so many evaluations have brought nothing better: a smaller mean validation loss where clients validate
    (--local-valid), else a higher test accuracy; 0 is never"""
    keep_best: Annotated[bool, _EXECUTION] = False
    """keep the model of the best evaluated round as well, for `fl.load_model(folder, best=True)`"""
    log: Annotated[tuple[str, ...], several(str, "NAME,...", empty="none", items=LOGS), _FREE] = ()
    """also log every round to tensorboard (in the run folder) or wandb; each is an extra of the same name"""
    checkpoint_every: Annotated[AtLeast1, _FREE, _RARE] = 10
    """write a checkpoint every so many rounds, and one at the end or on Ctrl-C"""

    device: Annotated[str, _FREE] = "auto"
    """cpu, cuda, cuda:1, ...; auto is a GPU if there is one"""
    data_on: Annotated[str, one_of(*PLACES), _FREE, _RARE] = "auto"
    """where samples lie: on the device that trains, or on the host, so that those of a round's cohort alone are copied;
    auto is the device, and the host for data in memory-mapped files (--dataset folder:PATH)"""
    max_parallel_clients: Annotated[Natural, _FREE, _RARE] = 0
    """train at most this many clients side by side, to save memory; 0 is all clients of a round"""
    backend: Annotated[str, one_of(*backend_names()), _EXECUTION] = "auto"
    """how a round's clients train: loop (one after another), workers (threads on the CPU), vmap (all as one program),
    graphs (CUDA graphs); auto is the one that was measured to be fastest"""
    precision: Annotated[str, one_of(*PRECISIONS), _RARE] = "float32"
    """numbers to compute with: float32, tf32 (on CUDA), or bf16 with weights in float32"""
    channels_last: Annotated[bool, _EXECUTION, _RARE] = False
    """keep channels as the last axis of images and convolutions in memory (not with vmap)"""
    deterministic: Annotated[bool, _EXECUTION, _RARE] = True
    """on CUDA: take only convolutions that add numbers in a fixed order, so that a run can be repeated exactly; without
    it some are faster"""
    out: Annotated[str, _EXECUTION, tyro.conf.arg(metavar="FOLDER")] = "runs"
    """folder in which run folders are made"""
    name: Annotated[str | None, _EXECUTION, tyro.conf.arg(metavar="NAME")] = None
    """name of the run folder, which must be new [made from the settings]"""
    config: Annotated[str | None, _EXECUTION, tyro.conf.arg(metavar="FILE")] = None
    """take the settings of this file, such as the config.yaml of a run; flags override them"""
    resume: Annotated[str | None, _FREE, tyro.conf.arg(metavar="FOLDER")] = None
    """continue the run in this folder, with its settings; --rounds can be raised if --lr-schedule is constant or
    exponential and no client joins or leaves"""

    def __post_init__(self) -> None:
        for one in fields(self):
            if (value := getattr(self, one.name)) is not one.default:
                object.__setattr__(self, one.name, as_plain(value))
        asked = self.metrics if isinstance(self.metrics, tuple | list) else (self.metrics,)
        paths = (path_of("metrics", one) if callable(one) else one for one in asked)
        object.__setattr__(self, "metrics", tuple(paths))
        for one in fields(self):  # Config(width=0.5, seeds=[0, 1], algorithm="fedavg") says what it means
            value = getattr(self, one.name)
            if value is not one.default and types_of(one.type)[1] and not isinstance(value, tuple):
                with suppress(TypeError):  # which `check` explains
                    object.__setattr__(self, one.name, from_yaml(one.type, value))
        if callable(self.loss):
            object.__setattr__(self, "loss", path_of("loss", self.loss))
        if isinstance(self.algorithm, tuple):  # papers write FedAvg+
            names = (
                f"{name[:-1]}_plus" if isinstance(name, str) and name.endswith("+") else name for name in self.algorithm
            )
            object.__setattr__(self, "algorithm", tuple(names))
        with suppress(TypeError):  # of wrong types, which `check` explains
            free = bool(self.participation)
            most = None if free or isinstance(self.clients, Default) else self.clients
            least = 1 if free or isinstance(self.participants, Default) else self.participants
            self._follow("clients", least=least)
            self._follow("participants", most=most)
        super().__post_init__()

    def local_optimizer(self) -> Optimizer:
        """The clients' optimizer."""
        if self.optimizer in ("adam", "adamw"):
            decoupled = self.optimizer == "adamw"
            return Adam(self.lr, *self.betas, weight_decay=self.weight_decay, clip=self.clip, decoupled=decoupled)
        return SGD(self.lr, self.momentum, self.weight_decay, self.nesterov, self.clip)

    def local_loss(self, dataset: Dataset) -> Loss:
        """What clients minimise the mean of, for such data."""
        smoothing, gamma, weights = self.label_smoothing, self.focal_gamma, self.class_weights
        return losses.by_name(self.loss, dataset.task, smoothing, gamma, weights, dataset.classes)

    def schedule(self) -> Schedule:
        """The factor of the learning rate in each round."""
        return schedule(self.lr_schedule, self.rounds, self.lr_factor, self.lr_steps, self.lr_decay, self.lr_warmup)

    @property
    def fixes_rounds(self) -> bool:
        """Whether the number of rounds changes rounds before the last: their learning rate, say."""
        drawn = any(one.fixes_rounds(getattr(self, name)) for name, one in self.extensions().items())
        return bool(SCHEDULES[self.lr_schedule]) or drawn

    def extensions(self) -> dict[str, Extension]:
        """Return the extensions that these settings ask for, by name: those whose options are not the defaults."""
        return {name: one for name, one in EXTENSIONS.items() if getattr(self, name) != one.options}

    def asks(self) -> dict[str, str]:
        """Return what a method must be able to do, see `fl.federation.capabilities`, and the flags that ask for it."""
        found: dict[str, str] = {}
        if self.masked_loss:
            found["masked_logits"] = "--masked-loss"
        if self.loss not in ("default", "cross_entropy") or self.label_smoothing or self.class_weights:
            found["any_loss"] = "--loss, --label-smoothing and --class-weights"
        if self.exits:
            found["several_classifiers"] = "--exits"
        if self.adapters.on:
            found["adapters"] = "--adapters.kind"
        if self.architectures != ArchitectureOptions() or len(set(self.adapters.ranks)) > 1:
            found["architectures"] = "--architectures and --adapters.ranks"
        for name, one in self.extensions().items():
            found |= one.needs(getattr(self, name))
        return found

    def cohort(self) -> int:
        """K, the number of participants of a round."""
        if self.participation:
            return max(1, round(self.participation * self.clients))
        if self.participants > self.clients:
            raise FLError(
                f"--participants {self.participants} of --clients {self.clients}: a round needs between 1 and all of "
                "them"
            )
        return self.participants

    def spec(
        self,
        num_classes: int | None = None,
        in_channels: int | None = None,
        image_size: int | None = None,
        text: bool | None = None,
    ):
        """The `zoo.Spec` of the model, for data with these images and classes, or for text.

        Args:
            text: whether the data are text; None: as their name says, and for data of your own as the model needs it.
        """
        if not self.width:
            raise FLError("give at least one --width")
        if text is None:
            text = data.is_text(self.dataset) or (data.is_custom(self.dataset) and models.takes_text(self.model))
        return models.make_spec(
            self.model,
            num_classes,
            in_channels,
            image_size,
            width=self.width[0] if len(self.width) == 1 else self.width,
            depth=self.depth[0] if len(self.depth) == 1 else self.depth or None,
            norm=None if self.norm == "default" else self.norm,
            stem=None if self.stem == "default" else self.stem,
            tokens=self.text.length if text else None,
            dropout=self.dropout,
            exits=self.exits,
        )

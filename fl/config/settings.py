"""Settings of the data and of who holds what: flags that `fl.run` and `fl.data` share."""

import math
from dataclasses import dataclass, make_dataclass
from typing import Annotated, ClassVar

import numpy as np
import tyro

from fl import data
from fl.base.errors import FLError
from fl.base.flags import choice
from fl.data import Dataset, TextOptions
from fl.data.registry import overview as data_sets
from fl.partition import KINDS, Partition, check_text_kind, deal
from fl.partition.deal import overview as partitions


@dataclass(frozen=True)
class Who:
    """Which data set is dealt out, to how many clients, and how."""

    dataset: Annotated[str, tyro.conf.arg(help=data_sets())] = "digits"
    clients: int = 20
    """number of clients that share out the training data"""
    partition: Annotated[str, tyro.conf.arg(help=f"how samples are dealt out: {partitions()}")] = "dirichlet"


def _hides_no_option(cls: type, **_: object) -> None:
    """A partition's option must not have the name of a setting, which would take its place."""
    for kind in KINDS:
        for name in KINDS[kind].reads:
            others = [other for other in KINDS if other != kind and name in KINDS[other].reads]
            if others or hasattr(Who, name) or name in vars(cls):
                raise FLError(f"--partition {kind} cannot have an option {name!r}: that is another setting, rename it")


PartitionOptions = make_dataclass(
    "PartitionOptions",
    [],
    bases=tuple(type(kind.options) for kind in reversed(KINDS.values()) if kind.options is not None),
    namespace={"__init_subclass__": classmethod(_hides_no_option)},
    frozen=True,
)
"""The options of every partition, side by side: they are flat flags. Help finds what their own files say of them."""


@dataclass(frozen=True)
class DataSettings(PartitionOptions, Who):
    """A data set and its partition over clients."""

    samples: int = 0
    """samples that are shared out, drawn at random; 0: all"""
    pool: bool = False
    """share out the test set as well: what clients hold out (--local-test) is then all there is to test on (FeMAM)"""
    min_samples: int = 10
    """samples that every client gets at least"""
    data_root: Annotated[str | None, tyro.conf.arg(metavar="FOLDER")] = None
    """where data sets lie [$FL_DATA_ROOT, else ~/.cache/layer-surgery]"""
    download: bool = True
    """fetch a data set that is missing"""
    pad: int = 0
    """pixels put around every image, like those at its edge, for models that want larger ones (vgg16: 32x32)"""
    text: TextOptions = TextOptions()

    def check_data(self) -> None:
        """Raise FLError for a data set or a partition that there is not; how many samples there are is not known."""
        data.check_name(self.dataset)
        choice("partition", [self.partition], KINDS)
        if data.is_text(self.dataset):
            check_text_kind(self.partition)
        self.text.check()
        if self.pad and data.is_text(self.dataset):
            raise FLError(f"--pad is for images, and {self.dataset} is text: leave it out")
        for flag, least in (("clients", 1), ("min_samples", 1), ("samples", 0), ("pad", 0)):
            if getattr(self, flag) < least:
                raise FLError(f"--{flag.replace('_', '-')} must be {least} or more, got {getattr(self, flag)}")
        if not 0 < self.alpha < math.inf:
            raise FLError(f"--alpha must be a finite number above 0, got {self.alpha}")

    read_by: ClassVar[dict[tuple[str, str], tuple[str, ...]]] = {
        ("partition", name): kind.reads for name, kind in KINDS.items() if kind.reads
    }
    """From the value of a setting to the options that are read with it only."""

    def check_options(self, start: "DataSettings") -> None:
        """Raise FLError for an option that was changed from `start` while nothing reads it, see `read_by`."""
        if self.text != start.text and not data.is_text(self.dataset):
            raise FLError(f"--text options are for data sets of text, not for {self.dataset}: leave them out")
        if self.text.vocabulary != start.text.vocabulary and self.text.tokens == "byte":
            raise FLError("--text.vocabulary is for --text.tokens word, not for byte: leave one of them out")
        for (setting, value), names in self.read_by.items():
            for name in names:
                got = getattr(self, setting)
                if got != value and getattr(self, name) != getattr(start, name):
                    flag, setting = (f"--{part.replace('_', '-')}" for part in (name, setting))
                    raise FLError(f"{flag} is for {setting} {value}, not for {got}: leave one of them out")

    def load(self) -> Dataset:
        """The data set."""
        loaded = data.load(self.dataset, self.data_root, self.download, self.text).padded(self.pad)
        return (loaded.pooled() if self.pool else loaded).sampled(self.samples)

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

"""Settings of the data and of who holds what: flags that `fl.run` and `fl.data` share."""

from dataclasses import dataclass, make_dataclass
from typing import Annotated, ClassVar

import numpy as np
import tyro

from fl import data
from fl.base.errors import FLError
from fl.base.settings import AtLeast1, Natural, OnlyWith, Rare, Role, check_values, one_of
from fl.data import Dataset, TextOptions
from fl.data.dataset import Origin
from fl.data.registry import overview as data_sets
from fl.partition import KINDS, Partition, check_text_kind, deal
from fl.partition.deal import overview as partitions

_LOADED = Role(data=True)
_RARE = Rare()
_WHERE = Role(data=True, compared=False, resumable=True)


@dataclass(frozen=True)
class Who:
    """Which data set is dealt out, to how many clients, and how."""

    dataset: Annotated[str, _LOADED, tyro.conf.arg(help=data_sets())] = "digits"
    clients: AtLeast1 = 20
    """number of clients that share out the training data"""
    partition: Annotated[str, one_of(*KINDS), tyro.conf.arg(help=f"how samples are dealt out: {partitions()}")] = (
        "dirichlet"
    )


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

    samples: Annotated[Natural, _LOADED] = 0
    """share out only this many samples, drawn at random; 0 is all"""
    pool: Annotated[bool, _LOADED, _RARE] = False
    """share out the test set as well; models are then tested only on what clients hold out (--local-test) (FeMAM)"""
    min_samples: Annotated[AtLeast1, _RARE] = 10
    """least number of samples of a client"""
    data_root: Annotated[str | None, _WHERE, tyro.conf.arg(metavar="FOLDER")] = None
    """folder of the data sets [$FL_DATA_ROOT, else ~/.cache/layer-surgery]"""
    download: Annotated[bool, _WHERE, _RARE] = True
    """download a data set that is missing"""
    pad: Annotated[Natural, _LOADED, _RARE] = 0
    """enlarge every image by this many pixels on each side, repeating its edge, for models that need larger images
    (vgg16: 32x32)"""
    text: Annotated[TextOptions, _LOADED] = TextOptions()

    needs: ClassVar[dict[str, OnlyWith]] = {
        option: OnlyWith("partition", name) for name, kind in KINDS.items() for option in kind.reads
    }
    """What an option of a partition is read with, which its own file does not say."""

    def check_data(self) -> None:
        """Raise FLError for settings of the data that cannot be, without looking at the data."""
        data.check_name(self.dataset)
        check_values(self)
        if data.is_text(self.dataset):
            check_text_kind(self.partition)
        if self.pad and data.is_text(self.dataset):
            raise FLError(f"--pad is for images, and {self.dataset} is text: leave it out")

    def group_unread(self, group: str, swept: str = "") -> str:
        """Why nothing reads a group of settings, see `fl.base.settings.settings_of`.

        Args:
            swept: the flag that will have several values, some of which may read it.
        """
        if group == "text" and not data.is_text(self.dataset) and swept != "dataset":
            return f"is for data sets of text, not for {self.dataset}: leave it out"
        return ""

    def load(self) -> Dataset:
        """The data set."""
        return self.prepare(data.load(self.dataset, self.data_root, self.download, self.text))

    def prepare(self, dataset: Dataset) -> Dataset:
        """A data set with a border, pooled and reduced as the settings say; the same if it was loaded and prepared by
        these settings already.
        """
        wanted, origin = self.origin(), dataset.origin
        if origin == wanted:
            return dataset
        bordered = dataset.padded(self.pad)
        made = (bordered.pooled() if self.pool else bordered).sampled(self.samples)
        return made.marked(wanted if origin == wanted.bare() else None)

    def origin(self) -> Origin:
        """That of the data which `load` returns."""
        text = self.text if data.is_text(self.dataset) else None
        return Origin(self.dataset, text, self.pad, self.pool, self.samples)

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

"""Settings of the data and of who holds what: flags that `fl.run` and `fl.data` share."""

from dataclasses import dataclass
from typing import Annotated

import numpy as np
import tyro

from fl import data
from fl.base.checks import check_read, check_values
from fl.base.errors import FLError
from fl.base.flags import Above0, AtLeast1, Integers, Natural, OnlyWith, Role, Sizes, number, one_of
from fl.data import Dataset, TextOptions
from fl.partition import KINDS, Partition, check_text_kind, deal

_LOADED = Role(data=True)
_WHERE = Role(data=True, compared=False, resumable=True)


@dataclass(frozen=True)
class DataSettings:
    """A data set and its partition over clients."""

    dataset: Annotated[str, _LOADED] = "digits"
    """digits (bundled), mnist, fashion-mnist, emnist-balanced, cifar10, cifar100, femnist, tiny-imagenet, ...; text:
    pydoc (bundled), wikitext-2, shakespeare, text:FILE"""
    clients: AtLeast1 = 20
    """number of clients that share out the training data"""
    partition: Annotated[str, one_of(*KINDS)] = "dirichlet"
    """how samples are dealt out: evenly (iid), by class (dirichlet, shards), to clusters of clients on one level or
    several (clusters), as pieces of the data set in its order (contiguous), or to the owners that the data set names
    (natural); for text only iid, contiguous and natural"""
    alpha: Annotated[Above0, OnlyWith("partition", "dirichlet")] = 0.5
    """dirichlet: concentration; smaller is more heterogeneous"""
    unequal: Annotated[bool, OnlyWith("partition", "iid")] = False
    """iid: clients of sizes between n and 2n instead of equal ones (FedFA)"""
    class_share: Annotated[float, number(float, above=0, most=1), OnlyWith("partition", "shards")] = 0.2
    """shards: share of the classes that a client has, with equally many samples of each (FedFA)"""
    clusters: Annotated[Integers, OnlyWith("partition", "clusters")] = (5,)
    """clusters: how many; several numbers are levels from coarse to fine, such as 2,5,9 (FeMAM)"""
    cluster_classes: Annotated[Sizes, OnlyWith("partition", "clusters")] = ()
    """clusters: classes of each cluster, one number for each level; auto is an equal share, or the paper's number"""
    samples: Annotated[Natural, _LOADED] = 0
    """share out only this many samples, drawn at random; 0 is all"""
    pool: Annotated[bool, _LOADED] = False
    """share out the test set as well; models are then tested only on what clients hold out (--local-test) (FeMAM)"""
    min_samples: AtLeast1 = 10
    """least number of samples of a client"""
    data_root: Annotated[str | None, _WHERE, tyro.conf.arg(metavar="FOLDER")] = None
    """folder of the data sets [$FL_DATA_ROOT, else ~/.cache/layer-surgery]"""
    download: Annotated[bool, _WHERE] = True
    """download a data set that is missing"""
    pad: Annotated[Natural, _LOADED] = 0
    """enlarge every image by this many pixels on each side, repeating its edge, for models that need larger images
    (vgg16: 32x32)"""
    text: Annotated[TextOptions, _LOADED] = TextOptions()

    def check_data(self) -> None:
        """Raise FLError for settings of the data that cannot be, without looking at the data."""
        data.check_name(self.dataset)
        check_values(self)
        if data.is_text(self.dataset):
            check_text_kind(self.partition)
        if self.pad and data.is_text(self.dataset):
            raise FLError(f"--pad is for images, and {self.dataset} is text: leave it out")

    def check_options(self, start: "DataSettings", swept: str = "") -> None:
        """Raise FLError for an option that was changed from `start` while nothing reads it.

        Args:
            swept: the flag that will have several values, some of which may read it.
        """
        check_values(self)
        if self.text != start.text and not data.is_text(self.dataset):
            raise FLError(f"--text options are for data sets of text, not for {self.dataset}: leave them out")
        check_read(self, start, swept=swept)

    def load(self) -> Dataset:
        """The data set."""
        loaded = data.load(self.dataset, self.data_root, self.download, self.text).padded(self.pad)
        return (loaded.pooled() if self.pool else loaded).sampled(self.samples)

    def deal(self, dataset: Dataset, rng: np.random.Generator) -> Partition:
        """The samples of each client, and the true structure."""
        return deal(
            dataset.y,
            self.partition,
            self.clients,
            rng,
            minimum=self.min_samples,
            alpha=self.alpha,
            unequal=self.unequal,
            class_share=self.class_share,
            clusters=self.clusters,
            cluster_classes=self.cluster_classes,
            owners=dataset.owners,
        )

    def spread(self) -> str:
        """The partition in a word.

        >>> DataSettings(partition="clusters", clusters=(2, 5, 9)).spread()
        'clusters2,5,9'
        """
        detail = {
            "iid": "-unequal" if self.unequal else "",
            "dirichlet": f"{self.alpha:g}",
            "shards": f"{self.class_share:g}",
            "clusters": ",".join(map(str, self.clusters)),
        }
        return self.partition + detail.get(self.partition, "")

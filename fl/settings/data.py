"""Settings of the data: which set, its partition, and what clients hold out."""

import logging
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any

import numpy as np
import torch
import tyro

from fl import data
from fl.base.errors import FLError
from fl.base.plugins import is_path
from fl.base.settings import (
    Alternative,
    Alternatives,
    AtLeast1,
    Default,
    Natural,
    Rare,
    check_values,
    lower_defaults,
    number,
    several,
)
from fl.data import Dataset, Origin, TextOptions
from fl.data import overview as data_sets
from fl.partition import KINDS, Partition, Parts, Splits, check_text_kind, deal, hold_out
from fl.partition import overview as partitions
from fl.partition.split import check_all_have
from fl.settings.topic import Topic

_log = logging.getLogger("fl")

_HeldOut = Annotated[float, number(float, least=0, below=1)]
_Partition = Annotated[Alternative, Alternatives(lambda: {name: kind.options for name, kind in KINDS.items()})]


@dataclass(frozen=True)
class DataSettings(Topic):
    """A data set, its partition over clients, and what they hold out."""

    dataset: Annotated[str, tyro.conf.arg(help=data_sets())] = "digits"
    samples: Annotated[Natural, Rare()] = 0
    """share out only this many samples, chosen at random; 0 is all"""
    partition: Annotated[_Partition, tyro.conf.arg(help=f"who holds which samples: {partitions()}")] = Alternative(
        "dirichlet", KINDS["dirichlet"].options
    )
    pool_test_set: Annotated[bool, Rare()] = False
    """share out the test set as well; models are then tested only on what clients hold out (--local-test) (FeMAM)"""
    min_samples: Annotated[AtLeast1, Rare()] = Default(10)
    """least number of samples of a client; without this flag fewer than 10 where --samples are too few for that"""
    test_sites: Annotated[tuple[str, ...], several(str, "NAME,...", empty="none"), Rare()] = ()
    """owners, by name, who take no part in training: all of their samples are the test set (leave one site out)"""
    pad: Annotated[Natural, Rare()] = 0
    """enlarge every image by this many pixels on each side, repeating its edge, for models that need larger images
    (vgg16: 32x32)"""
    local_valid: _HeldOut = 0.0
    """share of each client's samples held out for validation; methods that need some take 0.1 for 0"""
    local_test: _HeldOut = 0.0
    """share of each client's samples that is held out for testing"""
    text: TextOptions = TextOptions()

    def check(self) -> None:
        """Raise FLError for impossible settings of the data, without looking at them."""
        data.check_name(self.dataset)
        check_values(self)
        if data.is_text(self.dataset):
            check_text_kind(self.partition.name)
            self.text.check()
        if self.pad and data.is_text(self.dataset):
            raise FLError(f"--pad is for images, and {self.dataset} is text: leave it out", code="unsupported")
        if self.pool_test_set and not self.local_test:
            raise FLError(
                "--pool-test-set leaves no test set, so clients have to hold samples out: give --local-test, such as "
                "0.17"
            )
        if self.pool_test_set and self.test_sites:
            raise FLError("--pool-test-set shares the test set out, and --test-sites names one: leave one of them out")

    def group_unread(self, group: str) -> str:
        """Say why nothing reads a group of settings, see `fl.base.settings.settings_of`."""
        text = isinstance(self.dataset, str) and data.is_text(self.dataset)
        return "" if text else f"is for data sets of text, not for {self.dataset}: leave it out"

    def following(self, clients: int) -> "DataSettings":
        """Move numbers left at their defaults into the limits that other settings set."""
        least, options = self.min_samples, self.partition.options
        if isinstance(least, Default):
            usual = type(self).min_samples
            least = Default(max(1, min(usual, self.samples // clients) if self.samples else usual))
        if options is not None:
            options = lower_defaults(options, clients)
        same = (least, options) == (self.min_samples, self.partition.options)
        return self if same else replace(self, min_samples=least, partition=replace(self.partition, options=options))

    def load(self, root: str | None = None, download: bool = True) -> Dataset:
        """Load the data set, prepared as the settings say.

        Args:
            root: the folder of the data sets.
            download: whether to download what is missing.
        """
        return self.prepare(data.load(self.dataset, root, download, self.text))

    def prepare(self, dataset: Dataset) -> Dataset:
        """Pad, pool and reduce a data set by the settings, unless that is done already."""
        wanted, origin = self.origin(), dataset.origin
        if origin == wanted:
            return dataset
        bordered = dataset.pad(self.pad)
        pooled = bordered.pool() if self.pool_test_set else bordered
        prepared = pooled.with_test_sites(self.test_sites).subsample(self.samples)
        return prepared.with_origin(wanted if origin == wanted.bare() else None)

    def origin(self) -> Origin:
        """Return the origin of the data that `load` returns."""
        text = self.text if data.is_text(self.dataset) else None
        return Origin(self.dataset, text, self.pad, self.pool_test_set, self.samples, self.test_sites)

    def names(self, dataset: Dataset) -> bool:
        """Say whether this is the data set of the settings, loaded by name.

        It may be prepared or not.

        >>> DataSettings(samples=100).names(data.load("digits")), DataSettings().names(DataSettings(samples=100).load())
        (True, False)
        """
        return dataset.origin in (self.origin(), self.origin().bare())

    def deal(self, dataset: Dataset, clients: int, rng: np.random.Generator) -> Partition:
        """Partition the samples among clients.

        Returns each client's, and the true structure.
        """
        options = self.partition.options
        arguments: dict[str, Any] = (
            {} if options is None else {f.name: getattr(options, f.name) for f in fields(options)}
        )
        kind, owners = self.partition.name, dataset.owners
        return deal(dataset.y, kind, clients, rng, minimum=self.min_samples, owners=owners, **arguments)

    def split(self, dataset: Dataset, parts: Parts, rng: np.random.Generator) -> tuple[Dataset, Splits]:
        """Split what each client was dealt into training, validation and test samples.

        Validation samples are the data set's own if it says which; else a share of each client's is held out. A client
        that is an owner is tested on its own test samples, unless --local-test asks for a share.

        Returns:
            also the data set: its training part has the clients' own test samples at its end.

        Raises:
            FLError: if some clients have samples of their own to validate or test on, and others have none.
        """
        divided = None if dataset.valid is None else parts.divide(dataset.valid)
        if divided is None:
            splits = hold_out(parts, self.local_valid, self.local_test, rng)
        else:
            if self.local_valid:
                _log.warning(
                    f"warning: the data say which samples validate: --local-valid {self.local_valid} is unused"
                )
            rest, valid = divided
            names = dataset.names_of_clients(parts)
            check_all_have(rest, names, "training samples", "leave some of its samples for training")
            check_all_have(valid, names, "validation samples", "give it some, or take those of the others for training")
            splits = replace(hold_out(rest, 0, self.local_test, rng), valid=valid)
        if self.pool_test_set:
            return dataset.test_on(splits.test.samples), splits
        if KINDS[self.partition.name].partial and not self.local_test and dataset.test_owners is not None:
            dataset, splits = self._assign_tests(dataset, parts, splits)
        return dataset.test_at(self.test_sites), splits

    def _assign_tests(self, dataset: Dataset, parts: Parts, splits: Splits) -> tuple[Dataset, Splits]:
        """Give each client its owner's test samples, if there are such."""
        clients = parts.owners.numpy()
        owners, first = np.unique(dataset.owners[parts.samples].numpy(), return_index=True)
        tested = dataset.test_owners.numpy()
        places = np.searchsorted(owners, tested).clip(max=len(owners) - 1)
        client = np.where(owners[places] == tested, clients[first][places], -1)
        rows = np.flatnonzero(client >= 0)
        if not len(rows):
            return dataset, splits
        if dataset.on_host:
            _log.warning(
                "warning: clients are not tested on their own test samples, which are kept on the host: hold shares "
                "out with --local-test"
            )
            return dataset, splits
        test = Parts.of_owners(client[rows], len(parts), len(dataset.y) + np.arange(len(rows)))
        way = "give it some, or hold out shares of the training samples with --local-test, such as 0.2"
        check_all_have(test, dataset.names_of_clients(parts), "test samples", way)
        return dataset.with_own_tests(torch.from_numpy(rows)), replace(splits, test=test)

    def spread(self) -> str:
        """Name the partition in a word, one of a user's own by its function.

        >>> DataSettings().spread()
        'dirichlet0.5'
        """
        name, kind = self.partition.name, KINDS.get(self.partition.name)
        if is_path(name):
            called = getattr(kind and kind.deal, "__name__", "")
            name = called if called.isidentifier() else name.partition(":")[2]
        return name + (kind.word(self.partition.options) if kind else "")

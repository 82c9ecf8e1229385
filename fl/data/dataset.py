"""The form that every loaded data set has: images and labels, or text, and owners."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fl.base.errors import FLError, ask_memory
from fl.base.rng import Rng
from fl.data import arrays, items, mapped, table
from fl.data.arrays import UNSCORED
from fl.data.inputs import Inputs, leaves, map_inputs, named_leaves, write_shape
from surgery.transfer import as_bytes, upload

GIVEN = "given"
"""The name of a data set that was not loaded by name."""

PLACES = ("auto", "device", "host")
"""Where samples can lie, see `Dataset.to`."""

_MOST_NAMES = 8
"""Owners whose names a client has; of further ones it has the number."""

_MOST_SITES = 20
"""Largest number of a test set's owners for which scores are counted separately."""


class Origin(NamedTuple):
    """The origin of a data set: the settings by which it was loaded and prepared.

    Attributes:
        text: the `TextOptions`, for text.
    """

    name: str
    text: Any = None
    pad: int = 0
    pool: bool = False
    samples: int = 0
    test_sites: tuple[str, ...] = ()

    def bare(self) -> "Origin":
        """Return the origin of the data before they were prepared."""
        return Origin(self.name, self.text)


@dataclass(frozen=True)
class Dataset:
    """The training samples, divided among clients, and the common test set.

    `from_arrays`, `from_torch` and `from_huggingface` make one of your own data and check them.

    Attributes:
        x, y: training images, uint8 [N, C, H, W], or floats of any shape, which models get as they are, such as a
            table [N, F]; and labels, int64 [N] from 0 to classes - 1. Or sequences of tokens, int32 [N, T], and the
            token that comes after each, int64 [N, T], or a label for each sequence. Where the token after is
            `UNSCORED`, as in a prompt, it counts neither in losses nor in scores. Or masks, int64
            [N, H, W], a class for each pixel, where `UNSCORED` does the same. Or, for a model of your own with several
            inputs, x is a dict of such images, floats and tokens, which it gets by keyword: `model(**inputs)`.
        test_x, test_y: the same for the test set.
        classes: number of classes; of text the size of the vocabulary.
        top: the largest value of a uint8 pixel. It becomes 1, and 0 becomes -1: normalisation with mean = std = 0.5, as
            FedMR's released code has it for CIFAR-10.
        owners, test_owners: the natural owner (e.g. writer) of each training and each test sample, int64 [N], on the
            CPU; None if the data set does not say. Clients that are owners are tested on their own test samples.
        valid: which training samples clients validate on and never train on, bool [N], on the CPU; None: shares are
            held out, as settings ask.
        owner_names: the name of each owner, in the order of their numbers; empty: they go by their numbers.
        vocabulary: the word of each token, for `fl.data.text.decode`; empty for bytes and images.
        names: of the classes (of several labels, or of the numbers), for tables; empty: they have none.
        task: "classification"; "regression", where y are numbers, float32 [N, D]; "multilabel", where y are float32
            [N, labels], 1 for each label that a sample has and 0 for others; or "segmentation", where y are masks of
            any number of axes, whose model gives [N, classes, H, W]. `classes` is for numbers D, and for several labels
            how many there are: what a model has as outputs.
        used_on: for samples that are kept on the host, often in memory-mapped files, the device that those in use are
            copied to; None: all lie on the device that trains.
        origin: how it was loaded; None for data of your own. Whatever `dataclasses.replace` makes of a data set has
            none, since it may be other data.
    """

    name: str
    x: Inputs
    y: Tensor
    test_x: Inputs
    test_y: Tensor
    classes: int
    top: int = 255
    owners: Tensor | None = None
    test_owners: Tensor | None = None
    owner_names: tuple[str, ...] = ()
    vocabulary: tuple[str, ...] = ()
    names: tuple[str, ...] = ()
    task: str = "classification"
    used_on: torch.device | None = None
    valid: Tensor | None = None
    origin: Origin | None = field(default=None, init=False, repr=False, compare=False)

    def __repr__(self) -> str:
        shape = write_shape(self.shape)
        numbers = f"{self.classes} number{'s' * (self.classes > 1)} to predict"
        several = f"{self.classes} labels, any number of which a sample has"
        target = {"regression": numbers, "multilabel": several}.get(self.task, f"{self.classes} classes")
        if self.text:
            target = f"{self.classes:,} different tokens"
        if self.dense:
            target += f" for each of {write_shape(self.y.shape[1:])} places"
        lines = [f"{self.name}: {len(self.y):,} training and {len(self.test_y):,} test samples of {shape}, {target}"]
        if self.owners is not None:
            test = "" if self.test_owners is None else f", and {len(self.test_owners.unique()):,} the test samples"
            lines.append(f"owned by nature: {len(self.owners.unique()):,} owners have the training samples{test}")
        if self.valid is not None:
            lines.append(f"for validation alone: {int(self.valid.sum()):,} of the training samples")
        if self.on_host:
            lines.append("kept on the host: only samples in use are copied to the device that trains")
        return "\n".join(lines)

    @classmethod
    def from_arrays(
        cls,
        x: Any,
        y: Any,
        test_x: Any,
        test_y: Any,
        owners: Any = None,
        classes: int | None = None,
        *,
        test_owners: Any = None,
        valid: Any = None,
        top: int = 255,
        task: str = "classification",
        names: Any = (),
    ) -> "Dataset":
        """Make a data set of NumPy arrays, torch tensors or nested lists.

        They are checked, and never changed.

        Args:
            x: a memory-mapped array (`numpy.memmap`) is read in pieces, and stays on the host. A dict of arrays, one
                for each input of a model of your own, which gets them by keyword; or one array. It is
                uint8 images [N, C, H, W], which models get in [-1, 1]; or floats, which models get as they are, in
                float32: images [N, C, H, W], a table [N, F], or samples of any other shape; or integers [N, T], tokens.
                In a dict also truth values of any shape, such as the mask of `fl.data.pad`. They may share memory with
                the result.
            y: a whole number for each sample, from 0 to classes - 1, or the name of its class; for tokens it may also
                be the token that comes after each, [N, T], or -100 where that does not count, such as within a prompt;
                each sequence has one that does. For "regression" numbers [N] or [N, D]; for "multilabel" 0
                and 1 [N, labels]. For "segmentation" the class of each pixel, [N, H, W] (of each step [N, T], of each
                voxel [N, D, H, W]), or -100 or 255 where it does not count.
            test_x, test_y: the same for the test set.
            owners, test_owners: a number or a name for each sample: who owns it by nature, for `partition="natural"`.
                With both, each of its clients is tested on its own test samples, which no one trains on.
            valid: True for each of `x` that its client validates on and never trains on.
            classes: their number; None: as many as the labels (or tokens) show.
            top: the largest value of a uint8 pixel.
            task: "classification", "regression" (bring numbers to a scale of about 1 first), "multilabel" or
                "segmentation".
            names: of the classes, in the order of their numbers; of labels or of numbers to predict, as `y` has them.

        Raises:
            FLError: for what is no such data, in one line that names the array and the way out.

        >>> table = torch.rand(6, 3)
        >>> data = Dataset.from_arrays(table, [0, 1, 2, 0, 1, 2], table, [0, 1, 2, 0, 1, 2])
        >>> data
        given: 6 training and 6 test samples of 3, 3 classes
        """
        dataset = cls(
            GIVEN, **arrays.check_arrays(x, y, test_x, test_y, owners, test_owners, classes, top, task, names, valid)
        )
        on_disk = any(map(mapped.is_mapped, leaves(dataset.x)))
        return replace(dataset, used_on=torch.device("cpu")) if on_disk else dataset

    @classmethod
    def from_folder(cls, folder: str | Path) -> "Dataset":
        """Make a data set of arrays in files, mapped into memory, never read as a whole.

        Args:
            folder: holds x.npy, y.npy, test_x.npy and test_y.npy, as `numpy.save` writes them; perhaps owners.npy,
                test_owners.npy and valid.npy; and perhaps settings.json with `classes`, `top`, `task` and `names`, see
                `from_arrays`. `fl.data.folder.write` makes one of data sets of torch and Hugging Face.

        Raises:
            FLError: as `from_arrays`, and for files that are missing or hold another type than models get.
        """
        return cls.from_arrays(**arrays.read_saved(Path(folder)))

    @classmethod
    def from_torch(
        cls,
        train: Any,
        test: Any,
        owners: Any = None,
        classes: int | None = None,
        *,
        test_owners: Any = None,
        task: str = "classification",
    ) -> "Dataset":
        """Make a data set of two of torch or torchvision, such as an `ImageFolder`.

        Their items are (sample, label). All samples are read into memory, once: random transforms of training images
        would be applied only once, so use --crop and --flip for these.

        Args:
            train, test: with `len()` and items by number. Samples are Pillow's images (which become uint8), tensors or
                arrays, all of one shape.
            owners, classes, test_owners, task: see `from_arrays`.

        Raises:
            FLError: as `from_arrays`, for samples of different sizes, and for data sets that number classes
                differently, also within a `Subset` or a `ConcatDataset`. A `target_transform` can give all the same
                numbers.

        >>> part = torch.utils.data.TensorDataset(torch.rand(4, 3), torch.tensor([0, 1, 0, 1]))
        >>> Dataset.from_torch(part, part).x.shape
        torch.Size([4, 3])
        """
        parts = items.read_torch(train, test, task)
        return cls.from_arrays(**parts, owners=owners, classes=classes, test_owners=test_owners, task=task)

    @classmethod
    def from_huggingface(
        cls,
        train: Any,
        test: Any = None,
        image: str = "image",
        label: str = "label",
        owner: str | None = None,
        task: str = "classification",
    ) -> "Dataset":
        """Make a data set of two `datasets.Dataset`.

        They are such as `load_dataset(...)["train"]` and `["test"]`.

        Args:
            train, test: the two splits; or, as `train` alone, a `datasets.DatasetDict` whose splits have these names.
            image: the column of the samples: images, or lists of numbers of one length.
            label: the column of the labels, whole numbers.
            owner: the column of the samples' natural owners, if they have some.
            task: see `from_arrays`.

        Raises:
            FLError: as `from_torch`, and for columns that are not there.
        """
        return cls.from_arrays(**items.read_huggingface(train, test, image, label, owner, task), task=task)

    @classmethod
    def from_pandas(
        cls,
        frame: Any,
        target: str,
        owner: str | None = None,
        split: str | None = None,
        categorical: str = "one-hot",
        *,
        task: str = "classification",
    ) -> "Dataset":
        """Make a data set of a table, a `pandas.DataFrame` with a row for each sample.

        Numbers stay as they are, in float32: nothing is scaled. They come first, in the order of their columns, then a
        column of 0 and 1 for each name that a column of names has, in alphabetical order over all rows, as
        `pandas.get_dummies` has them.

        Args:
            target: the column of classes, names or whole numbers from 0 on; of numbers for task="regression".
            owner: the column of the rows' owners, such as hospitals, for `partition="natural"`.
            split: the column that says "train", "valid" or "test" of each row. None: the last tenth of each owner's
                rows is for testing, one row at least.
            categorical: "one-hot"; or "refuse", which makes a column of names an error.
            task: "classification" or "regression".

        Raises:
            FLError: for columns that are not there, and for missing values, which it names by row and column.

        >>> import pandas
        >>> patients = {"age": [31, 74, 50], "ward": ["icu", "er", "icu"], "ill": ["no", "yes", "yes"]}
        >>> frame = pandas.DataFrame({**patients, "part": ["train", "train", "test"]})
        >>> data = Dataset.from_pandas(frame, target="ill", split="part")
        >>> data.x.tolist(), data.names
        ([[31.0, 0.0, 1.0], [74.0, 1.0, 0.0]], ('no', 'yes'))
        """
        columns = table.columns_of(frame)
        for name, column in (("owner", owner), ("split", split)):
            if column is None and name in columns.columns and target != name:
                raise FLError(
                    f"the frame has a column {name!r}, which would be a feature: give {name}={name!r}, or rename it",
                    code="name",
                )
        return cls.from_arrays(**table.arrays_of(columns, target, owner, split, categorical, task))

    def names_of_clients(self, *parts: Any) -> list[str]:
        """Name clients by their samples' owners; none if several clients share an owner.

        Args:
            parts: `fl.partition.Parts` of the training samples; each client has some.

        >>> from fl.partition import Parts
        >>> table, y, owners = torch.rand(4, 2), [0, 1, 0, 1], ["oslo", "lima", "oslo", "bern"]
        >>> data = Dataset.from_arrays(table, y, table, y, owners)
        >>> data.names_of_clients(Parts.of([torch.tensor([1, 3]), torch.tensor([0, 2])]))
        ['bern + lima', 'oslo']
        >>> data.names_of_clients(Parts.of(torch.arange(4).split(1)))
        []
        """
        if self.owners is None:
            return []
        samples, clients = (torch.cat([getattr(part, name) for part in parts]) for name in ("samples", "owners"))
        owners, places = np.unique(self.owners[samples].numpy(), return_inverse=True)
        pairs = np.unique(clients.numpy() * len(owners) + places)
        if len(pairs) > len(owners):
            return []
        names: list[list[str]] = [[] for _ in range(int(clients.max()) + 1)]
        for client, place in zip(*np.divmod(pairs, len(owners))):
            names[client].append(self._owner(int(owners[place])))
        few = (
            [*part_names[:_MOST_NAMES], f"{len(part_names) - _MOST_NAMES} more"]
            if len(part_names) > _MOST_NAMES
            else part_names
            for part_names in names
        )
        return list(map(" + ".join, few))

    @property
    def outputs(self) -> tuple[int, ...]:
        """The shape of a model's outputs for one sample: [classes], of text [T, classes].

        Of masks it is [H, W, classes], see `fl.models.custom_model.classes_last`.
        """
        return (self.classes,) if self.y.is_floating_point() else (*self.y.shape[1:], self.classes)

    @property
    def device(self) -> torch.device:
        """The device on which clients train: the samples', or where they are copied."""
        return self.used_on or self.y.device

    @property
    def on_host(self) -> bool:
        """True if samples stay on the host, and only those in use are on the device."""
        return self.used_on is not None

    @property
    def shape(self) -> Any:
        """The shape of one sample: a `torch.Size`, or a dict of them."""
        return map_inputs(lambda values: values.shape[1:], self.x)

    def gather(self, indices: Tensor) -> tuple[Inputs, Tensor]:
        """Return inputs and targets of training samples, in new memory on the device.

        Args:
            indices: int64 of any shape, on any device.

        >>> from fl.data import load
        >>> [one.shape for one in load("digits").gather(torch.tensor([[2, 0], [0, 5]]))]
        [torch.Size([2, 2, 1, 8, 8]), torch.Size([2, 2])]
        """
        return self.samples_at(indices), self.labels_at(indices)

    def samples_at(self, indices: Tensor) -> Inputs:
        """Return the inputs alone."""
        return map_inputs(lambda values: self._rows(values, indices), self.x)

    def labels_at(self, indices: Tensor) -> Tensor:
        """Return the targets alone."""
        return self._rows(self.y, indices)

    def _rows(self, values: Tensor, indices: Tensor) -> Tensor:
        rows = mapped.rows(values, self.beside(indices))
        return rows if self.used_on is None else upload(rows, self.used_on)

    def beside(self, indices: Tensor) -> Tensor:
        """Put indices where the samples lie, to move them only once for several lookups."""
        return indices if indices.device == self.y.device else upload(indices, self.y.device)

    def take(self, indices: Tensor) -> "Dataset":
        """Return the data set with these training samples only, moved to the device."""
        x, y = self.gather(indices)
        return replace(self, x=x, y=y, used_on=None)

    def example(self, count: int = 2, dtype: torch.dtype = torch.float32) -> Inputs:
        """Return the first training samples as a model gets them, to probe the model."""
        return self.normalise(map_inputs(lambda values: values[:count], self.x), dtype)

    @property
    def text(self) -> bool:
        """True if samples are sequences of tokens with a label for each token."""
        return self.y.ndim == 2 and self.task == "classification"

    @property
    def dense(self) -> bool:
        """True if samples have a class for each pixel (or step, or voxel): masks."""
        return self.task == "segmentation"

    @cached_property
    def unscored(self) -> bool:
        """True if some tokens of text, or pixels of masks, count for nothing."""
        return (self.text or self.dense) and any(bool((y == UNSCORED).any()) for y in (self.y, self.test_y))

    @property
    def tokens(self) -> bool:
        """True if samples are sequences of tokens."""
        return isinstance(self.x, Tensor) and self.x.ndim == 2 and not self.x.is_floating_point()

    @property
    def images(self) -> bool:
        """True if samples are images [C, H, W]."""
        return isinstance(self.x, Tensor) and self.x.ndim == 4

    def normalise(self, inputs: Inputs, dtype: torch.dtype = torch.float32) -> Inputs:
        """Convert samples for a model: images to floats in [-1, 1], tokens to int64.

        Images are uint8 of any leading shape; floats stay as they are. Each entry of a dict is converted by itself. The
        result is always in new memory, since a model may begin with an operation in place. Of data that are kept on
        the host it is on the device.

        >>> from fl.data import load
        >>> load("digits").normalise(torch.tensor([0, 8, 16], dtype=torch.uint8))
        tensor([-1.,  0.,  1.])
        """
        several = isinstance(inputs, dict)

        def convert(values: Tensor) -> Tensor:
            if self.on_host and values.device.type == "cpu":
                values = upload(values, self.device)
            if self.tokens or (several and values.dtype in (torch.int32, torch.int64)):
                return values.to(torch.int64, copy=True)
            if values.dtype == torch.bool:
                return values.clone()
            if values.is_floating_point():
                return values.to(dtype, copy=True)
            return values.to(dtype).mul_(2 / self.top).sub_(1)

        return map_inputs(convert, inputs)

    def pad(self, pixels: int) -> "Dataset":
        """Add a border to all images that repeats their edges, so that white stays white.

        The border's pixels count for nothing in masks.
        """
        if not pixels:
            return self
        if not self.images:
            raise FLError(
                f"--pad is for images, and the samples of {self.name} are {map_inputs(list, self.shape)}: leave it out",
                code="unsupported",
            )
        self._no_copy("--pad")
        larger = prod(n + 2 * pixels for n in self.x.shape[-2:]) * self.x.shape[1] * self.x.element_size()
        ask_memory(larger * (len(self.x) + len(self.test_x)), f"--pad {pixels} of {self.name}", "use fewer pixels")
        rows, columns = (torch.arange(-pixels, n + pixels).clamp(0, n - 1) for n in self.x.shape[-2:])
        x, test_x = (images[..., rows, :][..., columns] for images in (self.x, self.test_x))
        y, test_y = self.y, self.test_y
        if self.dense:
            y, test_y = (F.pad(masks, (pixels,) * 4, value=UNSCORED) for masks in (y, test_y))
        return replace(self, x=x, y=y, test_x=test_x, test_y=test_y)

    def pool(self) -> "Dataset":
        """Add the test samples after the training samples; the test set is unchanged."""
        self._no_copy("--pool-test-set")
        x = map_inputs(lambda *both: torch.cat(both), self.x, self.test_x)
        y, owners, valid = torch.cat([self.y, self.test_y]), None, None
        if self.owners is not None:
            if self.test_owners is None:
                raise FLError(
                    f"--pool-test-set: {self.name} does not say who owns its test samples; leave it out",
                    code="unsupported",
                )
            owners = torch.cat([self.owners, self.test_owners])
        if self.valid is not None:
            valid = torch.cat([self.valid, torch.zeros(len(self.test_y), dtype=torch.bool)])
        return replace(self, x=x, y=y, owners=owners, valid=valid)

    def number_of(self, owners: Sequence[str]) -> Tensor:
        """Return the numbers of owners by name, int64, sorted; FLError for a wrong name."""
        if self.owners is None:
            raise FLError(
                f"{self.name} does not say who owns its samples, so none of them can be named: {owners[0]}",
                code="unsupported",
            )
        numbers = torch.cat([self.owners, *([] if self.test_owners is None else [self.test_owners])]).unique()
        known = {self._owner(k): k for k in numbers.tolist()}
        if strange := [name for name in owners if name not in known]:
            every = ", ".join([*known][:20]) + ", ..." * (len(known) > 20)
            raise FLError(f"{self.name} has no owner {strange[0]!r}: there are {every}", code="name")
        return torch.tensor(sorted({known[name] for name in owners}))

    def with_test_sites(self, names: Sequence[str]) -> "Dataset":
        """Move the training samples of owners to the test set's end; see `test_at`.

        >>> samples = [torch.rand(4, 2), [0, 1, 0, 1]]
        >>> data = Dataset.from_arrays(*samples, *samples, owners=list("abab"), test_owners=list("aabb"))
        >>> moved = data.with_test_sites(["b"])
        >>> moved.owners.tolist(), moved.test_owners.tolist(), len(moved.test_at(["b"]).test_y)
        ([0, 0], [0, 0, 1, 1, 1, 1], 4)
        """
        if not names:
            return self
        flag, numbers = f"--test-sites {','.join(names)}", self.number_of(names)
        if self.owners is None or self.test_owners is None:
            raise FLError(
                f"{flag}: {self.name} does not say who owns its test samples (test_owners); leave it out",
                code="unsupported",
            )
        self._no_copy("--test-sites")
        away = torch.isin(self.owners, numbers)
        if away.all():
            raise FLError(f"{flag}: no one else has samples to train on; name fewer sites")
        moved = self._of_rows(away.nonzero()[:, 0])
        test_x = map_inputs(lambda *both: torch.cat(both), self.test_x, moved["x"])
        test_y, test_owners = torch.cat([self.test_y, moved["y"]]), torch.cat([self.test_owners, moved["owners"]])
        rest = self._of_rows((~away).nonzero()[:, 0])
        return replace(self, **rest, test_x=test_x, test_y=test_y, test_owners=test_owners)

    def test_at(self, names: Sequence[str]) -> "Dataset":
        """Keep the test samples of these owners alone; without names all."""
        if not names or self.test_owners is None:
            return self
        rows = torch.isin(self.test_owners, self.number_of(names)).nonzero()[:, 0]
        test_x = map_inputs(lambda values: values[rows], self.test_x)
        return replace(self, test_x=test_x, test_y=self.test_y[rows], test_owners=self.test_owners[rows])

    def with_own_tests(self, rows: Tensor) -> "Dataset":
        """Add test samples after the training part, for their owners to be tested on."""
        x = map_inputs(lambda values, tests: torch.cat([values, tests[rows]]), self.x, self.test_x)
        y, owners, valid = torch.cat([self.y, self.test_y[rows]]), self.owners, self.valid
        if owners is not None and self.test_owners is not None:
            owners = torch.cat([owners, self.test_owners[rows]])
        if valid is not None:
            valid = torch.cat([valid, torch.zeros(len(rows), dtype=torch.bool)])
        return replace(self, x=x, y=y, owners=owners, valid=valid)

    @cached_property
    def test_sites(self) -> dict[str, np.ndarray]:
        """The test rows of each owner by name; none for many owners, such as writers."""
        owners = [] if self.test_owners is None else self.test_owners.unique().tolist()
        if len(owners) > _MOST_SITES:
            return {}
        return {self._owner(k): (self.test_owners == k).nonzero()[:, 0].numpy() for k in owners}

    def _owner(self, number: int) -> str:
        return self.owner_names[number] if self.owner_names else str(number)

    def _of_rows(self, rows: Tensor) -> dict[str, Any]:
        """Return the fields of these training samples."""
        more = {name: getattr(self, name) for name in ("owners", "valid")}
        selected = {name: values[rows] for name, values in more.items() if values is not None}
        return {"x": map_inputs(lambda values: values[rows], self.x), "y": self.y[rows], **selected}

    def subsample(self, number: int) -> "Dataset":
        """Keep a number of training samples, always the same random ones; 0 keeps all.

        >>> from fl.data import load
        >>> load("digits").pad(2).pool().subsample(100).x.shape
        torch.Size([100, 1, 12, 12])
        """
        if not number:
            return self
        if number > len(self.y):
            raise FLError(f"--samples {number:,}: {self.name} has {len(self.y):,}; use fewer, or 0 for all")
        chosen = torch.randperm(len(self.y), generator=Rng(0).torch("samples"))[:number].sort().values
        return replace(self, **self._of_rows(chosen))

    def test_on(self, index: Tensor) -> "Dataset":
        """Use training samples that clients hold out of pooled data as the test set."""
        owners = None if self.owners is None else self.owners[index]
        test_x = map_inputs(lambda values: values[index], self.x)
        return replace(self, test_x=test_x, test_y=self.y[index], test_owners=owners)

    def _no_copy(self, flag: str) -> None:
        if self.on_host:
            raise FLError(
                f"{flag} makes a copy of all samples in memory, and those of {self.name} are kept out of it: leave it "
                "out, and write the samples as models are to get them",
                code="unsupported",
            )

    def to(self, device: torch.device | str, data_on: str = "auto") -> "Dataset":
        """Prepare the data for a device; owners stay on the CPU, where partitions read.

        Args:
            data_on: "device" moves all samples there. "host" keeps them where they are, on the CPU, and only those in
                use are copied. "auto" keeps those on the host that are there to stay, as memory-mapped ones are.

        Raises:
            FLError: if the device has too little memory.
        """
        if data_on == "host" or (data_on == "auto" and self.on_host):
            return replace(self, used_on=torch.device(device)).with_origin(self.origin)
        try:
            moved = {k: map_inputs(lambda t: t.to(device), getattr(self, k)) for k in ("x", "y", "test_x", "test_y")}
        except torch.OutOfMemoryError:
            gb = sum(values.nbytes for x in (self.x, self.test_x) for values in leaves(x)) / 1e9
            raise FLError(
                f"{gb:,.1f} GB of {self.name} do not fit on {device}: keep them with --data-on host", code="memory"
            ) from None
        return replace(self, **moved, used_on=None).with_origin(self.origin)

    def with_origin(self, origin: Origin | None) -> "Dataset":
        """Copy the data set with another origin."""
        same = replace(self)
        object.__setattr__(same, "origin", origin)
        return same


def fingerprint(data: Dataset) -> dict[str, Any]:
    """Identify a data set by shapes, types and a hash of all bytes, as JSON.

    It is the same on every device.

    >>> from fl.data import load
    >>> print(fingerprint(load("digits"))["x"])
    uint8 [1437, 1, 8, 8]
    """
    digest, record = hashlib.sha256(), {}
    for name in ("x", "y", "test_x", "test_y", "owners", "test_owners", "valid"):
        if (whole := getattr(data, name)) is None:
            continue
        for part, values in named_leaves(name, whole).items():
            record[part] = arrays.form(values)
            if values.ndim and len(values) > 1 and not values.stride(0):
                values = values[0][None]  # of data that are elsewhere: all rows are this one, in the memory of one
            digest.update(f"{part} {record[part]}".encode())
            for piece in mapped.pieces(values):
                digest.update(as_bytes(piece.cpu()).numpy().data)
    if data.task != "classification":
        record["task"] = data.task
    return {**record, "classes": data.classes, "top": data.top, "sha256": digest.hexdigest()}

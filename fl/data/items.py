"""Data sets that give single samples, of torch, torchvision or Hugging Face."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fl.base.errors import FLError, reason
from fl.base.plugins import kind
from fl.data.arrays import form, tensor

_GREY = ("L", "1", "LA")  # of Pillow's modes; those with more than 8 bits are refused, all others become RGB

Room = Callable[[str, tuple[int, ...], torch.dtype], Tensor]
"""(name, shape, dtype) -> an empty tensor for x or test_x."""


def _in_memory(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def read_torch(train: Any, test: Any, task: str, room: Room = _in_memory) -> dict[str, Any]:
    """Read two data sets of (sample, label) into x, y, test_x and test_y.

    See `Dataset.from_torch`.
    """
    numbered, more = _numberings("train", train), _numberings("test", test)
    names: list[str] = []
    if task == "classification":
        _check_classes([*numbered, *more], _RENUMBER)
        names = [] if None in numbered else _class_names([*numbered, *more])
    for name, part in (("train", train), ("test", test)):
        if not (hasattr(part, "__len__") and hasattr(part, "__getitem__")):
            raise FLError(f"{name} is {kind(part)}: give a data set with len() and items (sample, label)")
    return {"names": names, **_stack("train", train, task, room), **_stack("test", test, task, room)}


def read_huggingface(
    train: Any, test: Any, image: str, label: str, owner: str | None, task: str, room: Room = _in_memory
) -> dict[str, Any]:
    """Read two `datasets.Dataset` into x, y, test_x, test_y and owners.

    See `Dataset.from_huggingface`.
    """
    arrays: dict[str, Any] = {}
    if test is None and isinstance(train, dict) and {"train", "test"} <= train.keys():
        train, test = train["train"], train["test"]
    for name, part in (("train", train), ("test", test)):
        _check_split(name, part)
        for column in filter(None, (image, label, owner)):
            if column not in part.column_names:
                raise FLError(f"{name} has no column {column!r}: there are {', '.join(part.column_names)}", code="name")
        only = part.select_columns([image, label])  # others need not be decoded
        arrays |= _stack(name, only, task, room, keys=(image, label))
        labels = arrays["y" if name == "train" else "test_y"]
        if _feature_names(part, label) is not None and (missing := int((torch.as_tensor(labels) < 0).sum())):
            raise FLError(
                f"{missing:,} of {len(labels):,} samples of {name} have no {label} (-1), as in test sets whose labels "
                f"are kept back: give another split, or {name}.filter(lambda row: row[{label!r}] >= 0)",
                code="data",
            )
        if owner:
            values, names = part[owner][:], _feature_names(part, owner)
            if names is not None:  # -1 and None stand for a missing one
                values = [None if k is None or k < 0 else names[k] for k in values]
            arrays["owners" if name == "train" else "test_owners"] = np.asarray(values)
    numbered = []
    for name, part in (("train", train), ("test", test)):
        names = _feature_names(part, label)
        numbered.append(names and _Numbering(name, {class_name: k for k, class_name in enumerate(names)}, chosen=False))
    if task == "classification":
        _check_classes(numbered, _REALIGN.format(label=label))
    return {"names": _class_names(numbered) if numbered[0] and task == "classification" else (), **arrays}


def _feature_names(part: Any, column: str) -> list[str] | None:
    return getattr((part.features or {}).get(column), "names", None)


def _check_split(name: str, part: Any) -> None:
    """Raise FLError for what is no `datasets.Dataset`.

    That is, all splits of one, one that is streamed, or a name.
    """
    if isinstance(part, dict):
        splits = list(map(str, part))
        if not splits:
            raise FLError(f"{name} is {kind(part)} without a split: give two splits, as load_dataset returns them")
        first = "train" if "train" in splits else splits[0]
        others = [split for split in ("test", "validation", *splits) if split in splits and split != first]
        two = f"data[{first!r}], data[{others[0]!r}]" if others else f"data[{first!r}].train_test_split(0.2)"
        raise FLError(f"{name} is {kind(part)} of {', '.join(splits)}: give two splits, as in {two}")
    if part is None:
        raise FLError(f"{name} is missing: give a split of its own, or what train.train_test_split(0.2) returns")
    if isinstance(part, str):
        raise FLError(f"{name} is the text {part!r}: give the split, as load_dataset(..., split={part!r}) returns it")
    if not hasattr(part, "column_names"):
        raise FLError(f"{name} is {kind(part)}: give a datasets.Dataset")
    if not hasattr(part, "__len__"):
        raise FLError(
            f"{name} is {kind(part)}, which is streamed: load it without streaming=True, or give "
            f"datasets.Dataset.from_list(list({name}), features={name}.features)"
        )


class _Numbering(NamedTuple):
    """The numbers that a data set gives its classes.

    Attributes:
        where: what the data set is called in messages.
        numbers: by the name of the class; in some data sets a class has several names.
        chosen: whether a function of the user's chose them, which may give several classes one number.
    """

    where: str
    numbers: dict[str, int]
    chosen: bool


_RENUMBER = (
    "number all folders alike, with names = sorted({c for d in folders for c in d.classes}), and for each d of folders "
    "d.target_transform = lambda k, own=d.classes: names.index(own[k])"
)
_REALIGN = (
    "number both alike, with names = sorted({{*train.features['{label}'].names, *test.features['{label}'].names}}), "
    "and for both part = part.align_labels_with_mapping({{c: k for k, c in enumerate(names)}}, '{label}')"
)


def _numberings(name: str, part: Any) -> list[_Numbering | None]:
    """List how each data set within one numbers classes; None where it does not say.

    It looks into a `Subset`, such as `random_split` makes, and a `ConcatDataset`.
    """
    if isinstance(part, torch.utils.data.Subset):
        return _numberings(name, part.dataset)
    if isinstance(part, torch.utils.data.ConcatDataset):
        return [numbering for inner in part.datasets for numbering in _numberings(name, inner)]
    numbers, transform = getattr(part, "class_to_idx", None), getattr(part, "target_transform", None)
    where = f"{name} ({part.root})" if hasattr(part, "root") else name
    if not isinstance(numbers, dict):
        return [None]
    if transform is None:
        return [_Numbering(where, numbers, chosen=False)]
    try:  # the user's own code; the labels show whether it gives numbers
        return [_Numbering(where, {label: int(transform(k)) for label, k in numbers.items()}, chosen=True)]
    except Exception:
        return [None]


def _check_classes(every: Sequence[_Numbering | None], way: str) -> None:
    """Raise FLError if data sets disagree on the numbers of classes.

    Args:
        way: how all can have the same numbers.
    """
    by_name: dict[str, tuple[str, int]] = {}
    by_number: dict[int, tuple[str, set[str]]] = {}
    for numbering in filter(None, every):
        names: dict[int, set[str]] = {}
        for name, number in numbering.numbers.items():
            names.setdefault(number, set()).add(name)
            where, before = by_name.setdefault(name, (numbering.where, number))
            if before != number:
                raise FLError(
                    f"the class {name!r} is {number} in {numbering.where} and {before} in {where}, so a label would "
                    f"mean two things: {way}",
                    code="data",
                )
        for number, labels in {} if numbering.chosen else names.items():
            where, others = by_number.setdefault(number, (numbering.where, set(labels)))
            if not labels & others:
                raise FLError(
                    f"the class {number} is {min(labels)!r} in {numbering.where} and {min(others)!r} in {where}, so a "
                    f"label would mean two things: {way}",
                    code="data",
                )
            others |= labels


def _class_names(every: Sequence[_Numbering | None]) -> list[str]:
    """List the names of classes by their numbers.

    None are listed if a number has no name, or stands for several.
    """
    known = [numbering for numbering in every if numbering]
    names: dict[int, list[str]] = {}
    for numbering in known:
        for name, number in numbering.numbers.items():
            names.setdefault(number, []).append(name)
    merged = any(numbering.chosen for numbering in known) and any(len(set(some)) > 1 for some in names.values())
    return [] if merged or sorted(names) != [*range(len(names))] else [names[number][0] for number in range(len(names))]


def _stack(name: str, part: Any, task: str, room: Room, keys: tuple[str, str] | None = None) -> dict[str, Tensor]:
    """Read all items of "train" or "test" into a tensor of samples and one of labels.

    Args:
        keys: of the sample and the label in an item; None: an item is the pair of them.
    """
    if not len(part):
        raise FLError(f"{name} has no samples", code="data")
    x, y, first = torch.empty(0), [], torch.empty(0)
    for k in range(len(part)):
        where = f"{name}[{k}]"
        try:
            item = part[k]
        except Exception as error:  # the user's own code, and files that cannot be read
            raise FLError(f"{where} cannot be read: {type(error).__name__}: {reason(error)}", code="run") from None
        pair = (item[keys[0]], item[keys[1]]) if keys else item
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise FLError(f"{where} is no pair (sample, label) but {type(pair).__name__}", code="data")
        if isinstance(pair[0], Mapping):
            raise FLError(
                f"{where} has several inputs: give Dataset.from_arrays a dict with an array of each", code="data"
            )
        sample = tensor(where, pixels(where, pair[0]))
        if k == 0:
            x, first = room("x" if name == "train" else "test_x", (len(part), *sample.shape), sample.dtype), sample
        if (sample.shape, sample.dtype) != (first.shape, first.dtype):
            raise FLError(
                f"{where} is {form(sample)} and {name}[0] is {form(first)}: all samples need one size and one type; "
                "give the data set a transform, such as torchvision.transforms.Resize((64, 64))",
                code="data",
            )
        x[k] = sample
        label = f"the label of {where}"
        if task == "classification":
            y.append(_label(where, pair[1]))
            continue
        if task == "segmentation":  # of Pillow's images, palettes and all, the numbers
            y.append(tensor(label, np.asarray(pair[1]) if hasattr(pair[1], "getbands") else pair[1]))
        else:
            y.append(tensor(label, pair[1]).double().flatten())
        if y[k].shape != y[0].shape:
            raise FLError(
                f"{label} is {form(y[k])} and that of {name}[0] is {form(y[0])}: give all one size", code="data"
            )
    y = torch.tensor(y) if task == "classification" else torch.stack(y)
    return {"x": x, "y": y} if name == "train" else {"test_x": x, "test_y": y}


def pixels(where: str, sample: Any) -> Any:
    """Convert an image of Pillow to uint8 [C, H, W]; anything else stays as it is."""
    if not (hasattr(sample, "convert") and hasattr(sample, "getbands")):
        return sample
    if sample.mode.partition(";")[0] in ("I", "F"):
        raise FLError(
            f"{where} is an image of Pillow's mode {sample.mode}, whose range is unknown: give a transform, "
            "such as lambda image: np.asarray(image, 'float32')[None] / 65535",
            code="data",
        )
    array = np.asarray(sample.convert("L" if sample.mode in _GREY else "RGB"))
    return array[None] if array.ndim == 2 else array.transpose(2, 0, 1)


def _label(where: str, label: Any) -> int:
    try:
        number = label.item() if hasattr(label, "item") else label
    except (RuntimeError, ValueError):
        number = label
    if isinstance(number, bool) or not isinstance(number, int):
        raise FLError(
            f"the label of {where} is {label!r}: labels are whole numbers (class_encode_column makes them of names)",
            code="data",
        )
    return number

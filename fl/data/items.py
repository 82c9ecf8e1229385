"""Arrays of data sets that give one sample at a time: torch's, torchvision's and Hugging Face's."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fl.base.errors import FLError
from fl.base.plugins import kind
from fl.data.arrays import tensor
from fl.data.source import reason

_GREY = ("L", "1", "LA")  # of Pillow's modes; those with more than 8 bits are refused, all others become RGB


def of_torch(train: Any, test: Any) -> dict[str, Any]:
    """x, y, test_x, test_y of two data sets whose items are (sample, label), see `Dataset.from_torch`."""
    found = [getattr(part, "class_to_idx", None) for part in (train, test)]
    _check_classes(*found)
    parts = []
    for name, part in (("train", train), ("test", test)):
        if not (hasattr(part, "__len__") and hasattr(part, "__getitem__")):
            raise FLError(f"{name} is {kind(part)}: give a data set with len() and items (sample, label)")
        parts += _stacked(name, len(part), lambda k, part=part, name=name: _pair(f"{name}[{k}]", part[k]))
    return dict(zip(("x", "y", "test_x", "test_y"), parts))


def of_huggingface(train: Any, test: Any, image: str, label: str, owner: str | None) -> dict[str, Any]:
    """The same of two `datasets.Dataset`, see `Dataset.from_huggingface`."""
    parts, owners = [], {}
    for name, part in (("train", train), ("test", test)):
        if isinstance(part, dict):
            raise FLError(f"{name} is {kind(part)} of {', '.join(map(str, part))}: give one, as data['train']")
        if not hasattr(part, "column_names") or not hasattr(part, "__len__"):
            raise FLError(f"{name} is {kind(part)}: give a datasets.Dataset, which is not streamed")
        for column in filter(None, (image, label, owner)):
            if column not in part.column_names:
                raise FLError(f"{name} has no column {column!r}: there are {', '.join(part.column_names)}")
        only = part.select_columns([image, label])  # others need not be decoded
        parts += _stacked(
            name,
            len(part),
            lambda k, only=only, name=name: _pair(f"{name}[{k}]", tuple(map(only[k].get, (image, label)))),
        )
        if owner:
            owners["owners" if name == "train" else "test_owners"] = np.asarray(part[owner][:])
    _check_classes(*(getattr(part.features.get(label), "names", None) for part in (train, test)))
    return dict(zip(("x", "y", "test_x", "test_y"), parts)) | owners


def _check_classes(train: Any, test: Any) -> None:
    """Both parts have to number their classes alike."""
    if train is not None and test is not None and train != test:
        raise FLError(
            f"train and test name different classes, or in another order ({_few(train)}; {_few(test)}): a label would "
            "mean two things"
        )


def _few(classes: Any) -> str:
    names = list(map(str, classes))
    return ", ".join(names[:5]) + ", ..." * (len(names) > 5)


def _pair(where: str, item: Any) -> tuple[Any, Any]:
    if not isinstance(item, tuple | list) or len(item) != 2:
        raise FLError(f"{where} is no pair (sample, label) but {type(item).__name__}")
    return item[0], item[1]


def _stacked(name: str, count: int, item: Callable[[int], tuple[Any, Any]]) -> tuple[Tensor, Tensor]:
    """All samples as one tensor, and the labels int64."""
    if not count:
        raise FLError(f"{name} has no samples")
    x, y = None, torch.empty(count, dtype=torch.int64)
    for k in range(count):
        where = f"{name}[{k}]"
        try:
            sample, label = item(k)
        except FLError:
            raise
        except Exception as error:  # the user's own code, and files that cannot be read
            raise FLError(f"{where} cannot be read: {type(error).__name__}: {reason(error)}") from None
        one = tensor(where, _pixels(where, sample))
        if x is None:
            x = torch.empty(count, *one.shape, dtype=one.dtype)
        if (one.shape, one.dtype) != (x.shape[1:], x.dtype):
            raise FLError(
                f"{where} is {_said(one)} and {name}[0] is {_said(x[0])}: all samples need one size and one type; give "
                "the data set a transform, such as torchvision.transforms.Resize((64, 64))"
            )
        x[k] = one
        y[k] = _label(where, label)
    return x, y


def _pixels(where: str, sample: Any) -> Any:
    """An image of Pillow as uint8 [C, H, W]; anything else as it is."""
    if not (hasattr(sample, "convert") and hasattr(sample, "getbands")):
        return sample
    if sample.mode.partition(";")[0] in ("I", "F"):
        raise FLError(
            f"{where} is an image of Pillow's mode {sample.mode}, whose range is unknown: convert it to floats"
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
            f"the label of {where} is {label!r}: labels are whole numbers (class_encode_column makes them of names)"
        )
    return number


def _said(value: Tensor) -> str:
    return f"{str(value.dtype).removeprefix('torch.')} {'x'.join(map(str, value.shape)) or 'a number'}"

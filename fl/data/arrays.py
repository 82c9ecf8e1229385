"""What a user gives as data, checked and turned into the tensors of a `Dataset`: arrays, and data sets of torch,
torchvision and Hugging Face, which give one sample at a time. Nothing that was given is changed.
"""

import json
import logging
import mmap
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from fl.base.errors import FLError, reason
from fl.base.plugins import kind
from fl.base.settings import choice

TASKS = ("classification", "regression", "multilabel")
UNSCORED = -100
"""In the place of the token after, where none counts: what torch's cross entropy leaves out unless told otherwise."""
_CHANNELS = (1, 3, 4)
_GREY = ("L", "1", "LA")  # of Pillow's modes; those with more than 8 bits are refused, all others become RGB
_NUMBERED = "y = np.unique(y, return_inverse=True); test_y = np.searchsorted({}, test_y)"  # the same number in both

_log = logging.getLogger("fl")

_PIECE = 2**26  # bytes of memory-mapped data that are read at a time
_ROWS = 32  # single rows of them that are read at a time
_MAPS: WeakValueDictionary[int, mmap.mmap] = WeakValueDictionary()
"""The memory maps that tensors lie in, by their address."""


def _map_of(values: Tensor) -> mmap.mmap | None:
    return _MAPS.get(values.untyped_storage().data_ptr()) if values.device.type == "cpu" else None


def is_mapped(values: Tensor) -> bool:
    """Whether a tensor lies in a memory-mapped file."""
    return _map_of(values) is not None


def release(values: Tensor) -> None:
    """Let go of the pages of a memory-mapped tensor that were read; they are read again when they are needed.

    Otherwise a process seems to take as much memory as it has ever read of the file.
    """
    if (mapped := _map_of(values)) is not None and hasattr(mapped, "madvise"):
        mapped.madvise(mmap.MADV_DONTNEED)


def pieces(values: Tensor) -> Iterator[Tensor]:
    """Views of a tensor, one after another; of a memory-mapped one with not more than about 64 MB each."""
    if not is_mapped(values):
        yield values
        return
    for piece in values.split(max(1, _PIECE * len(values) // max(1, values.nbytes))):
        yield piece
        release(values)


def rows(values: Tensor, index: Tensor) -> Tensor:
    """The rows of an index [n, ...], in new memory; `values[index]` of a memory-mapped tensor a few at a time.

    A system maps more of a file than is read: up to some megabytes for every row that lies apart from others.
    """
    if not is_mapped(values):
        return values[index]
    found = []
    for some in index.split(_ROWS):
        found.append(values[some])
        release(values)
    return torch.cat(found)


def _range(values: Tensor) -> tuple[float, float]:
    """The least and the largest value, as Python's numbers."""
    ends = [tuple(end.item() for end in piece.aminmax()) for piece in pieces(values)]
    return min(least for least, _ in ends), max(most for _, most in ends)


def of_folder(folder: Path) -> dict[str, Any]:
    """Map the arrays of a folder into memory, see `Dataset.from_folder`; nothing is read yet."""
    needed, more = ("x", "y", "test_x", "test_y"), ("owners", "test_owners")
    if missing := [f"{name}.npy" for name in needed if not (folder / f"{name}.npy").is_file()]:
        way = "x.npy, y.npy, test_x.npy and test_y.npy are written by numpy.save"
        if (folder / "dataset_dict.json").is_file():
            way = "these are Hugging Face's files: give datasets.load_from_disk(...) to fl.data.folder.write, once"
        raise FLError(f"{folder} has no {', '.join(missing)}: {way}")
    found: dict[str, Any] = {}
    for name in (*needed, *more):
        if (file := folder / f"{name}.npy").is_file():
            try:  # copy-on-write, since torch has no tensors that cannot be written to
                found[name] = np.load(file, mmap_mode="c")
            except ValueError as error:
                raise FLError(f"{file} cannot be mapped into memory: {reason(error)}") from None
    for name in ("x", "test_x"):
        if (kind := found[name].dtype) not in (np.uint8, np.float32, np.int32):
            raise FLError(
                f"{folder / name}.npy holds {kind}: write uint8 images, float32, or int32 tokens, which need no copy"
            )
    if (file := folder / "settings.json").is_file():
        try:
            settings = json.loads(file.read_text())
        except ValueError as error:
            raise FLError(f"{file} is no JSON: {reason(error)}") from None
        if strange := set(settings) - {"classes", "top", "task", "names"}:
            raise FLError(f"{file} has {min(strange)!r}: it may have classes, top, task and names")
        found |= settings
    return found


def checked(
    x: Any,
    y: Any,
    test_x: Any,
    test_y: Any,
    owners: Any = None,
    test_owners: Any = None,
    classes: int | None = None,
    top: int = 255,
    task: str = "classification",
    names: Any = (),
) -> dict[str, Any]:
    """Check arrays and return the fields of a `Dataset`, see `Dataset.from_arrays`."""
    choice("task", [task], TASKS)
    x, test_x = samples("x", x), samples("test_x", test_x)
    if (x.dtype, x.shape[1:]) != (test_x.dtype, test_x.shape[1:]):
        raise FLError(f"test_x is {form(test_x)} and x is {form(x)}: samples of both need one type and one shape")
    _check_pixels(x, test_x, top)
    fields: dict[str, Any] = {"x": x, "test_x": test_x, "top": int(top)}
    fields |= _owners(owners, test_owners, len(x), len(test_x))
    if task != "classification":
        if classes is not None:
            raise FLError(f"classes is for classification, and task is {task!r}: leave it out")
        y, test_y = targets("y", y, x, task), targets("test_y", test_y, test_x, task)
        if y.shape[1] != test_y.shape[1]:
            raise FLError(f"y is {form(y)} and test_y is {form(test_y)}: give both as many columns")
        return fields | {
            "y": y,
            "test_y": test_y,
            "classes": y.shape[1],
            "task": task,
            "names": _names(names, y.shape[1]),
        }
    y, test_y, names = _numbered(y, test_y, names)
    y, test_y = labels("y", y, x), labels("test_y", test_y, test_x)
    if y.ndim != test_y.ndim:
        raise FLError(f"y is {form(y)} and test_y is {form(test_y)}: give both a label a sample, or one a token")
    tokens = y.ndim == 2
    ends = [_range_of_labels(name, each, tokens) for name, each in (("y", y), ("test_y", test_y))]
    ends += map(_range, (x, test_x) if tokens else ())  # every token of a text is a class
    least, most = int(min(least for least, _ in ends)), int(max(most for _, most in ends))
    count = most + 1 if classes is None else classes
    if isinstance(count, bool) or not isinstance(count, int | np.integer) or count < 2:
        raise FLError(f"classes must be a whole number from 2 on, got {count!r}")
    what = "tokens" if tokens else "labels"
    if least < 0:
        signs = not tokens and most == 1 and bool((y.abs() == 1).all() and (test_y.abs() == 1).all())
        every = "x, y, test_x and test_y" if tokens else "y and test_y"
        way = "give (y > 0).astype(int)" if signs else f"add {-least} to {every}, the same to all"
        way += ", or give -100 where the next token does not count" * tokens
        raise FLError(f"{what} {'are -1 and 1' if signs else f'go from {least} to {most}'}, and they begin at 0: {way}")
    if most >= count:
        raise FLError(f"{what} go from {least} to {most}, and with {count} classes they go from 0 to {count - 1}")
    if classes is None and not tokens and (absent := count - len(y.unique())):
        _log.warning(
            f"warning: labels go from 0 to {most}, and {absent} of these {count} classes have no training sample: "
            "give classes, or count labels from 0 without gaps"
        )
    return fields | {"y": y, "test_y": test_y, "classes": int(count), "names": _names(names, int(count))}


def _range_of_labels(name: str, y: Tensor, tokens: bool) -> tuple[float, float]:
    """Their ends, without the labels of tokens that do not count; every sequence has others."""
    ends, before = [], 0
    for piece in pieces(y):
        counts = piece != UNSCORED if tokens else slice(None)
        if tokens and not (some := counts.any(1)).all():
            row = before + int((~some).nonzero()[0, 0])
            raise FLError(f"{name}[{row}] is {UNSCORED} throughout, so that nothing counts: leave the sample out")
        before += len(piece)
        ends += [end.item() for end in piece[counts].aminmax()]
    return min(ends), max(ends)


def _check_pixels(x: Tensor, test_x: Tensor, top: int) -> None:
    if not 1 <= top <= 255:
        raise FLError(f"top must lie between 1 and 255, got {top}: it is the largest value of a pixel")
    if x.dtype == torch.uint8 and (brightest := max(int(_range(each)[1]) for each in (x, test_x))) > top:
        raise FLError(f"a pixel has the value {brightest}, above top={top}: leave top out, or give the largest value")
    if not x.is_floating_point():
        return
    least, most = _range(x)
    if least >= 0 and 64 < most <= 255 and (x.ndim == 4 or all(bool((p == p.round()).all()) for p in pieces(x))):
        _log.warning(
            f"warning: x holds floats from {least:g} to {most:g}, as pixels have, and models get floats as they "
            "are: divide x and test_x by 255, or give images as uint8 [N, C, H, W]"
        )


def _names(names: Any, count: int) -> tuple[str, ...]:
    names = tuple(map(str, names))
    if names and (len(names) != count or len(set(names)) < count):
        raise FLError(
            f"names are {', '.join(names[:5])}{', ...' * (len(names) > 5)}: give {count} different ones, or none"
        )
    return names


def _numbered(y: Any, test_y: Any, names: Any) -> tuple[Any, Any, Any]:
    """Number classes that are given by name, in alphabetical order or that of `names`; others stay as they are."""
    try:
        given = [_with_strings(name, values) for name, values in (("y", y), ("test_y", test_y))]
    except FLError:
        raise
    except Exception:  # which `tensor` explains
        return y, test_y, names
    if not all(each.dtype.kind in "SU" and each.ndim == 1 for each in given):
        return y, test_y, names
    given = [np.char.decode(each, "utf-8") if each.dtype.kind == "S" else each for each in given]
    order = [str(name) for name in (names if len(names) else np.unique(given[0]))]
    places = {name: k for k, name in enumerate(order)}
    for what, each in zip(("y", "test_y"), given):
        if strange := [name for name in np.unique(each).tolist() if str(name) not in places]:
            known = "names" if len(names) else "y"
            raise FLError(f"{what} has a class {strange[0]!r}, which {known} does not have: leave its samples out")
    return *([places[str(name)] for name in each.tolist()] for each in given), order


def _with_strings(name: str, values: Any) -> np.ndarray:
    """Convert values to an array, whose names are strings also where they are objects, as in pandas."""
    array = np.asarray(values)
    if array.dtype.kind not in "OU" or array.ndim != 1:
        return array
    others = [(k, each) for k, each in enumerate(values) if not isinstance(each, str)]
    if others and len(others) < len(array):
        raise FLError(f"{name}[{others[0][0]}] is {others[0][1]!r} among names: give a name, or leave the sample out")
    return array if others else array.astype(str)


def targets(name: str, value: Any, x: Tensor, task: str) -> Tensor:
    """Convert what is to be predicted to float32: numbers [N, D], or 0 and 1 [N, labels]."""
    y = tensor(name, value)
    if len(y.shape) not in (1, 2) or len(y) != len(x) or not y.numel():
        raise FLError(f"{name} is {form(y)}, and there are {len(x):,} samples: give [{len(x)}, D] for {task}")
    if not (y if y.is_floating_point() else y.float()).isfinite().all():
        raise FLError(f"{name} has a value that is not finite: leave such samples out")
    if task == "multilabel":
        if y.ndim == 1:
            raise FLError(f"{name} is {form(y)}: several labels are [N, labels], with a 1 for each that a sample has")
        if not ((y == 0) | (y == 1)).all():
            raise FLError(f"{name} has other values than 0 and 1: give 1 for each label that a sample has")
    return y.float().reshape(len(y), -1)


def samples(name: str, value: Any) -> Tensor:
    """Convert samples to what a data set holds: uint8 images, float32 of any shape, or int32 tokens."""
    x = tensor(name, value)
    if x.ndim == 0 or not len(x):
        raise FLError(f"{name} has no samples: it is {form(x)}")
    if 0 in x.shape:
        raise FLError(f"{name} is {form(x)}: its samples are empty")
    if x.ndim == 4 and x.shape[3] in _CHANNELS and x.shape[1] not in _CHANNELS and x.shape[2] > 4:
        raise FLError(f"{name} is {form(x)}: channels come first, as in {name}.transpose(0, 3, 1, 2) of NumPy")
    if x.dtype == torch.uint8:
        if x.ndim == 4:
            return x
        grey, others = f"add the axis of channels, {name}[:, None]", "images are [N, C, H, W], tables are floats"
        raise FLError(f"{name} is {form(x)}: {grey if x.ndim == 3 else others}")
    if x.is_floating_point():
        if x.ndim == 1:
            raise FLError(f"{name} is {form(x)}: samples need an axis of their own, as in {name}[:, None]")
        single, before = x.float(), 0
        for piece in pieces(single):
            if not (finite := piece.isfinite()).all():
                raise FLError(
                    f"{name}[{before + int((~finite).nonzero()[0, 0])}] has a value that is not finite in float32: "
                    "replace it, or leave the sample out"
                )
            before += len(piece)
        return single
    if x.dtype == torch.bool or x.ndim != 2:
        raise FLError(f"{name} is {form(x)}: images are uint8 or floats, tables are floats, and tokens are [N, T]")
    least, most = map(int, _range(x))  # as Python's numbers: torch wraps 2**31 where tokens are int32
    if least < 0 or most >= 2**31:
        raise FLError(
            f"{name} goes from {least} to {most}: tokens go from 0 to 2**31 - 1; tables are floats, "
            f"{name}.astype('float32')"
        )
    return x.int()


def labels(name: str, value: Any, x: Tensor) -> Tensor:
    """Convert the labels of samples to int64 [N], or [N, T] for tokens."""
    way = f"number the names, as in names, {_NUMBERED.format('names')}"
    y, other = tensor(name, value, way), name.replace("y", "x")
    if y.is_floating_point():
        if (unknown := y.isnan()).any():
            raise FLError(
                f"{name}[{int(unknown.nonzero()[0, 0])}] is NaN, and every sample needs a label: leave it out"
            )
        raise FLError(f"{name} is {form(y)}: {_whole(name, y)}")
    tokens = not x.is_floating_point() and x.ndim == 2
    if y.ndim == 2 and not (tokens and y.shape == x.shape):
        way = f"{name}.ravel()" if y.shape[1] == 1 else f"{name}.argmax(1), if this is one-hot"
        also = f", or {list(x.shape)} with a label a token" if tokens else ""
        raise FLError(f"{name} is {form(y)}: labels are [N]{also}; give {way}")
    if y.ndim not in (1, 2):
        raise FLError(f"{name} is {form(y)}: labels are [N]")
    if len(y) != len(x):
        raise FLError(f"{name} has {len(y):,} labels and {other} {len(x):,} samples: give one label a sample")
    return y.long()


def _whole(name: str, y: Tensor) -> str:
    """Say how labels that are floats become whole numbers, if they are classes."""
    shares = y.ndim == 2 and y.shape[1] > 1 and (y >= 0).all()
    if shares and torch.isclose(y.sum(1), torch.ones((), dtype=y.dtype)).all():
        return f"a label is one class, {name}.argmax(1), if this is one-hot"
    if bool((y == y.round()).all()) and len(y.unique()) == y.max() + 1 and y.min() == 0 and y.numel() == len(y):
        return f"labels are whole numbers, as in {name}{'.ravel()' * (y.ndim > 1)}.astype(int)"
    return (
        "labels are whole numbers from 0 on. To predict numbers give task='regression', several labels a sample "
        f"task='multilabel'; where these are classes, number them, as in kinds, {_NUMBERED.format('kinds')}"
    )


def tensor(name: str, value: Any, way: str = "give numbers, in equal rows") -> Tensor:
    """Convert anything that is an array to a tensor on the CPU, which may share memory with it.

    Args:
        way: the way out where it holds something else than numbers.
    """
    if isinstance(value, Tensor):
        if value.layout != torch.strided or value.is_complex() or value.is_quantized:
            raise FLError(f"{name} is a tensor of {value.dtype}, {value.layout}: give a plain one of numbers")
        return value.detach().cpu()
    try:
        array = np.asarray(value)
    except Exception as error:  # a sequence of unequal lengths, or an object of its own kind
        raise FLError(f"{name} is no array: {' '.join(str(error).split())}") from None
    if array.dtype.kind not in "buif":
        raise FLError(f"{name} holds {array.dtype} and has the shape {list(array.shape)}: {way}")
    if array.dtype.kind == "u" and array.dtype.itemsize > 1:
        array = array.astype(np.int64)
    elif array.dtype.kind == "f" and array.dtype.itemsize > 8:  # long doubles
        array = array.astype(np.float64)
    array = np.ascontiguousarray(array, array.dtype.newbyteorder("="))
    if (mapped := _mapping(array)) is None:
        return torch.from_numpy(array if array.flags.writeable else array.copy())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of one that is read only: nothing is written to what a user gives
        found = torch.from_numpy(array)
    _MAPS[found.untyped_storage().data_ptr()] = mapped
    return found


def _mapping(array: Any) -> mmap.mmap | None:
    """The memory map that an array is a view of."""
    while isinstance(array, np.ndarray):
        array = array.base
    return array if isinstance(array, mmap.mmap) else None


def _owners(owners: Any, test_owners: Any, n: int, test_n: int) -> dict[str, Tensor]:
    """Convert the owners of both parts to int64; names become numbers in alphabetical order."""
    if owners is None and test_owners is not None:
        raise FLError("test_owners need owners=, those of the training samples")
    parts = {}
    for name, values, count in (("owners", owners, n), ("test_owners", test_owners, test_n)):
        if values is None:
            continue
        parts[name] = array = _with_strings(name, values.cpu() if isinstance(values, Tensor) else values)
        if array.shape != (count,) or array.dtype.kind not in "iuSU":
            raise FLError(f"{name} is {array.dtype} {list(array.shape)}: give a number or a name for each of {count:,}")
    if len({array.dtype.kind in "iu" for array in parts.values()}) > 1:
        raise FLError("owners and test_owners: give numbers for both, or names for both")
    if parts and parts["owners"].dtype.kind in "SU":
        names = np.unique(np.concatenate(list(parts.values())))
        parts = {name: np.searchsorted(names, array) for name, array in parts.items()}
    return {name: torch.from_numpy(array.astype(np.int64)) for name, array in parts.items()}


def form(value: Tensor) -> str:
    """Write the type and the shape of a tensor: uint8 [1437, 1, 8, 8]."""
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"


Room = Callable[[str, tuple[int, ...], torch.dtype], Tensor]
"""(name, shape, dtype) -> an empty tensor for x or test_x."""


def _in_memory(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def of_torch(train: Any, test: Any, task: str, room: Room = _in_memory) -> dict[str, Any]:
    """Read two data sets whose items are (sample, label) into x, y, test_x and test_y, see `Dataset.from_torch`."""
    numbered = [_numbering(part) for part in (train, test)]
    _check_classes(*numbered)
    names = sorted(numbered[0], key=numbered[0].get) if isinstance(numbered[0], dict) else ()
    for name, part in (("train", train), ("test", test)):
        if not (hasattr(part, "__len__") and hasattr(part, "__getitem__")):
            raise FLError(f"{name} is {kind(part)}: give a data set with len() and items (sample, label)")
    return {"names": names, **_stacked("train", train, task, room), **_stacked("test", test, task, room)}


def of_huggingface(
    train: Any, test: Any, image: str, label: str, owner: str | None, task: str, room: Room = _in_memory
) -> dict[str, Any]:
    """Read two `datasets.Dataset` into x, y, test_x, test_y and owners, see `Dataset.from_huggingface`."""
    found: dict[str, Any] = {}
    for name, part in (("train", train), ("test", test)):
        if isinstance(part, dict):
            raise FLError(f"{name} is {kind(part)} of {', '.join(map(str, part))}: give one, as data['train']")
        if not hasattr(part, "column_names") or not hasattr(part, "__len__"):
            raise FLError(f"{name} is {kind(part)}: give a datasets.Dataset, which is not streamed")
        for column in filter(None, (image, label, owner)):
            if column not in part.column_names:
                raise FLError(f"{name} has no column {column!r}: there are {', '.join(part.column_names)}")
        only = part.select_columns([image, label])  # others need not be decoded
        found |= _stacked(name, only, task, room, keys=(image, label))
        if owner:
            found["owners" if name == "train" else "test_owners"] = np.asarray(part[owner][:])
    train_names, test_names = (getattr(part.features.get(label), "names", None) for part in (train, test))
    _check_classes(train_names, test_names)
    return {"names": train_names or (), **found}


def _numbering(part: Any) -> Any:
    """The numbers of classes by name, of a part of a data set (`random_split`) those of the whole; None without."""
    while isinstance(part, torch.utils.data.Subset):
        part = part.dataset
    return getattr(part, "class_to_idx", None)


def _check_classes(train: Any, test: Any) -> None:
    """Raise FLError if the two parts name classes and number them differently."""
    if train is not None and test is not None and train != test:
        few, other = (", ".join(list(map(str, names))[:5]) + ", ..." * (len(names) > 5) for names in (train, test))
        raise FLError(
            f"train and test name different classes, or in another order ({few}; {other}): a label would mean "
            "two things"
        )


def _stacked(name: str, part: Any, task: str, room: Room, keys: tuple[str, str] | None = None) -> dict[str, Tensor]:
    """Read all items of "train" or "test" into a tensor of samples and one of labels.

    Args:
        keys: of the sample and the label in an item; None: an item is the pair of them.
    """
    if not len(part):
        raise FLError(f"{name} has no samples")
    x, y, first = torch.empty(0), [], torch.empty(0)
    for k in range(len(part)):
        where = f"{name}[{k}]"
        try:
            item = part[k]
        except Exception as error:  # the user's own code, and files that cannot be read
            raise FLError(f"{where} cannot be read: {type(error).__name__}: {reason(error)}") from None
        pair = (item[keys[0]], item[keys[1]]) if keys else item
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise FLError(f"{where} is no pair (sample, label) but {type(pair).__name__}")
        one = tensor(where, _pixels(where, pair[0]))
        if k == 0:
            x, first = room("x" if name == "train" else "test_x", (len(part), *one.shape), one.dtype), one
        if (one.shape, one.dtype) != (first.shape, first.dtype):
            raise FLError(
                f"{where} is {form(one)} and {name}[0] is {form(first)}: all samples need one size and one type; give "
                "the data set a transform, such as torchvision.transforms.Resize((64, 64))"
            )
        x[k] = one
        label = f"the label of {where}"
        y.append(_label(where, pair[1]) if task == "classification" else tensor(label, pair[1]).double().flatten())
        if task != "classification" and y[k].shape != y[0].shape:
            raise FLError(f"{label} has {len(y[k])} numbers and that of {name}[0] has {len(y[0])}: give all as many")
    y = torch.tensor(y) if task == "classification" else torch.stack(y)
    return {"x": x, "y": y} if name == "train" else {"test_x": x, "test_y": y}


def _pixels(where: str, sample: Any) -> Any:
    """Convert an image of Pillow to uint8 [C, H, W]; anything else stays as it is."""
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

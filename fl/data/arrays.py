"""A user's arrays, checked and turned into a `Dataset`'s tensors, never changed."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fl.base.errors import FLError, reason
from fl.base.plugins import kind
from fl.base.settings import choice
from fl.data.inputs import Inputs, leaves, named_leaves
from fl.data.mapped import from_array, pieces, value_range

TASKS = ("classification", "regression", "multilabel", "segmentation")
UNSCORED = -100
"""In the place of the token after, or of a pixel's class, where none counts: what torch's cross entropy leaves out."""
_VOID = 255  # the same in files of masks, as in Pascal VOC, Cityscapes and ADE20K
_CHANNELS = (1, 3, 4)
_NUMBERED = "y = np.unique(y, return_inverse=True); test_y = np.searchsorted({}, test_y)"  # the same number in both

_log = logging.getLogger("fl")


def read_saved(folder: Path) -> dict[str, Any]:
    """Map the arrays of a folder into memory, unread, see `Dataset.from_folder`."""
    if not folder.is_dir():
        raise FLError(
            f"there is no folder {folder}: give one with x.npy, y.npy, test_x.npy and test_y.npy", code="file"
        )
    needed, more = ("x", "y", "test_x", "test_y"), ("owners", "test_owners", "valid")
    if missing := [f"{name}.npy" for name in needed if not (folder / f"{name}.npy").is_file()]:
        way = "x.npy, y.npy, test_x.npy and test_y.npy are written by numpy.save"
        if (folder / "dataset_dict.json").is_file():
            way = "these are Hugging Face's files: give datasets.load_from_disk(...) to fl.data.folder.write, once"
        raise FLError(f"{folder} has no {', '.join(missing)}: {way}", code="file")
    arrays: dict[str, Any] = {}
    for name in (*needed, *more):
        if (file := folder / f"{name}.npy").is_file():
            try:  # copy-on-write, since torch has no tensors that cannot be written to
                arrays[name] = np.load(file, mmap_mode="c")
            except ValueError as error:
                raise FLError(f"{file} cannot be mapped into memory: {reason(error)}", code="file") from None
    for name in ("x", "test_x"):
        if (kind := arrays[name].dtype) not in (np.uint8, np.float32, np.int32):
            raise FLError(
                f"{folder / name}.npy holds {kind}: write uint8 images, float32, or int32 tokens, which need no copy",
                code="file",
            )
    if (file := folder / "settings.json").is_file():
        try:
            settings = json.loads(file.read_text())
        except ValueError as error:
            raise FLError(f"{file} is no JSON: {reason(error)}", code="file") from None
        if strange := set(settings) - {"classes", "top", "task", "names"}:
            raise FLError(f"{file} has {min(strange)!r}: it may have classes, top, task and names", code="file")
        arrays |= settings
    return arrays


def check_arrays(
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
    valid: Any = None,
) -> dict[str, Any]:
    """Check arrays and return the fields of a `Dataset`, see `Dataset.from_arrays`."""
    choice("task", [task], TASKS)
    inputs, test_inputs = _both(x, test_x)
    for parts in zip(named_leaves("x", inputs).items(), named_leaves("test_x", test_inputs).items()):
        (name, part), (test_name, other) = parts
        if (part.dtype, part.shape[1:]) != (other.dtype, other.shape[1:]):
            raise FLError(
                f"{test_name} is {form(other)} and {name} is {form(part)}: samples of both need one type and one shape",
                code="data",
            )
        _check_pixels(name, part, other, top)
    # Of several inputs, labels are checked by the number of samples alone: no token has a label of its own.
    x, test_x = (
        part if isinstance(part, Tensor) else torch.empty(len(leaves(part)[0]), 0) for part in (inputs, test_inputs)
    )
    fields: dict[str, Any] = {"x": inputs, "test_x": test_inputs, "top": int(top)}
    fields |= _owners(owners, test_owners, len(x), len(test_x))
    if valid is not None:
        fields["valid"] = _marks(valid, len(x))
    if task in ("regression", "multilabel"):
        if classes is not None:
            raise FLError(f"classes is for classification, and task is {task!r}: leave it out")
        y, test_y = targets("y", y, x, task), targets("test_y", test_y, test_x, task)
        if y.shape[1] != test_y.shape[1]:
            raise FLError(f"y is {form(y)} and test_y is {form(test_y)}: give both as many columns", code="data")
        return fields | {
            "y": y,
            "test_y": test_y,
            "classes": y.shape[1],
            "task": task,
            "names": _names(names, y.shape[1]),
        }
    dense = task == "segmentation"
    if dense:
        y, test_y = _masks({"y": (y, inputs), "test_y": (test_y, test_inputs)}, classes)
    else:
        y, test_y, names = _number_classes(y, test_y, names)
        y, test_y = labels("y", y, x), labels("test_y", test_y, test_x)
        if y.ndim != test_y.ndim:
            raise FLError(
                f"y is {form(y)} and test_y is {form(test_y)}: give both a label a sample, or one a token", code="data"
            )
    tokens = y.ndim == 2 and not dense
    ends = [_range_of_labels(name, part, y.ndim > 1) for name, part in (("y", y), ("test_y", test_y))]
    ends += map(value_range, (x, test_x) if tokens else ())  # every token of a text is a class
    least, most = int(min(least for least, _ in ends)), int(max(most for _, most in ends))
    count = max(most + 1, len(names)) if classes is None else classes
    if isinstance(count, bool) or not isinstance(count, int | np.integer) or count < 2:
        raise FLError(f"classes must be a whole number from 2 on, got {count!r}")
    noun = "tokens" if tokens else "labels"
    if least < 0:
        signs = not tokens and most == 1 and bool((y.abs() == 1).all() and (test_y.abs() == 1).all())
        every = "x, y, test_x and test_y" if tokens else "y and test_y"
        way = "give (y > 0).astype(int)" if signs else f"add {-least} to {every}, the same to all"
        way += f", or give {UNSCORED} where {'the next token' if tokens else 'a pixel'} does not count" * (y.ndim > 1)
        raise FLError(
            f"{noun} {'are -1 and 1' if signs else f'go from {least} to {most}'}, and they begin at 0: {way}",
            code="data",
        )
    if most >= count:
        raise FLError(
            f"{noun} go from {least} to {most}, and with {count} classes they go from 0 to {count - 1}", code="data"
        )
    if classes is None and not tokens and (absent := count - int((y.unique() >= 0).sum())):
        _log.warning(
            f"warning: labels go from 0 to {most}, and {absent} of these {count} classes have no training sample"
            + ": give classes, or count labels from 0 without gaps" * (not len(names))
        )
    return fields | {"y": y, "test_y": test_y, "classes": int(count), "task": task, "names": _names(names, int(count))}


def _masks(parts: Mapping[str, tuple[Any, Inputs]], classes: int | None) -> list[Tensor]:
    """Convert masks to int64 [N, ...], UNSCORED where pixels do not count.

    Args:
        parts: name -> the masks, and the samples that they are of.
    """
    masks = [_mask(name, value, x) for name, (value, x) in parts.items()]
    if masks[0].shape[1:] != masks[1].shape[1:]:
        raise FLError(f"y is {form(masks[0])} and test_y is {form(masks[1])}: give all masks one size", code="data")
    if classes is not None and classes > _VOID:
        return masks
    void = [y == _VOID for y in masks]
    if any(marks.any() for marks in void) and all(bool((marks | (y == 0)).all()) for marks, y in zip(void, masks)):
        raise FLError(
            f"y and test_y are 0 and {_VOID}, and {_VOID} stands for pixels that do not count: number the classes, as "
            "in (y > 0).astype(int)",
            code="data",
        )
    return [torch.where(marks, UNSCORED, y) for marks, y in zip(void, masks)]


def _mask(name: str, value: Any, x: Inputs) -> Tensor:
    y, n, sample = tensor(name, value), len(leaves(x)[0]), name.replace("y", "x")
    channels = not isinstance(x, dict) and y.ndim == x.ndim > 3  # an axis that images have and masks have not
    ones = channels and bool(((y == 0) | (y == 1)).all() and (y.sum(1) == 1).all())
    if channels and (ones or y.shape[1] == 1):
        way = f"{name}[:, 0]" if y.shape[1] == 1 else f"{name}.argmax(1), if this is one-hot"
    elif y.ndim < 2:
        way = "for one class a sample leave task out"
    elif y.is_floating_point():
        way = f"classes are whole numbers, as in {name}.astype(int)"
    elif len(y) != n:
        way = f"and {sample} has {n:,} samples"
    elif not isinstance(x, dict) and x.ndim == 4 and y.shape[1:] != x.shape[2:]:
        way = f"and {sample} is {form(x)}, so masks are {[n, *x.shape[2:]]}"
    else:
        return y.long()
    raise FLError(f"{name} is {form(y)}: masks are [N, H, W], a class for each pixel; {way}", code="data")


def _range_of_labels(name: str, y: Tensor, several: bool) -> tuple[float, float]:
    """Return their ends, without the labels of tokens and pixels that do not count; every sample has others."""
    ends, before = [], 0
    for piece in pieces(y):
        counts = piece != UNSCORED if several else slice(None)
        if several and not (some := counts.flatten(1).any(1)).all():
            row = before + int((~some).nonzero()[0, 0])
            raise FLError(
                f"{name}[{row}] is {UNSCORED} throughout, so that nothing counts: leave the sample out", code="data"
            )
        before += len(piece)
        ends += [end.item() for end in piece[counts].aminmax()]
    return min(ends), max(ends)


def _both(x: Any, test_x: Any) -> tuple[Inputs, Inputs]:
    """Convert the samples of both parts: an array, or a dict of arrays alike in both."""
    if not isinstance(x, Mapping) and not isinstance(test_x, Mapping):
        return samples("x", x), samples("test_x", test_x)
    inputs: list[dict[str, Tensor]] = []
    for part, values in (("x", x), ("test_x", test_x)):
        if not isinstance(values, Mapping):
            raise FLError(
                f"{part} is {kind(values)}, and the other part is a dict of arrays: give a dict for both", code="data"
            )
        if not values or not all(isinstance(name, str) and name.isidentifier() for name in values):
            names = ", ".join(map(repr, values)) or "empty"
            raise FLError(
                f"{part} is a dict of {names}: name one array or more, as the model's forward names its inputs",
                code="data",
            )
        inputs.append({name: _input(f"{part}[{name!r}]", value) for name, value in values.items()})
        if len({len(value) for value in inputs[-1].values()}) > 1:
            counts = ", ".join(f"{len(value):,} of {name}" for name, value in inputs[-1].items())
            raise FLError(f"{part} has {counts}: give every sample all of its inputs, in the same order", code="data")
    if strange := inputs[0].keys() ^ inputs[1].keys():
        raise FLError(
            f"x has {', '.join(inputs[0])} and test_x {', '.join(inputs[1])}: give {min(strange)} to both or none",
            code="data",
        )
    return inputs[0], {name: inputs[1][name] for name in inputs[0]}


def _check_pixels(name: str, x: Tensor, test_x: Tensor, top: int) -> None:
    if not 1 <= top <= 255:
        raise FLError(f"top must lie between 1 and 255, got {top}: it is the largest value of a pixel")
    if x.dtype == torch.uint8 and (brightest := max(int(value_range(values)[1]) for values in (x, test_x))) > top:
        raise FLError(
            f"a pixel has the value {brightest}, above top={top}: leave top out, or give the largest value", code="data"
        )
    if not x.is_floating_point():
        return
    least, most = value_range(x)
    if least >= 0 and 64 < most <= 255 and (x.ndim == 4 or all(bool((p == p.round()).all()) for p in pieces(x))):
        _log.warning(
            f"warning: {name} holds floats from {least:g} to {most:g}, as pixels have, and models get floats as they "
            f"are: divide {name} and test_{name} by 255, or give images as uint8 [N, C, H, W]"
        )


def _names(names: Any, count: int) -> tuple[str, ...]:
    names = tuple(map(str, names))
    if names and (len(names) != count or len(set(names)) < count):
        raise FLError(
            f"names are {', '.join(names[:5])}{', ...' * (len(names) > 5)}: give {count} different ones, or none"
        )
    return names


def _number_classes(y: Any, test_y: Any, names: Any) -> tuple[Any, Any, Any]:
    """Number classes that are names, in alphabetical order or the order of `names`.

    Others stay as they are.
    """
    try:
        columns = [_with_strings(name, labels) for name, labels in (("y", y), ("test_y", test_y))]
    except FLError:
        raise
    except Exception:  # which `tensor` explains
        return y, test_y, names
    if not all(column.dtype.kind in "SU" and column.ndim == 1 for column in columns):
        return y, test_y, names
    columns = [np.char.decode(column, "utf-8") if column.dtype.kind == "S" else column for column in columns]
    order = [str(name) for name in (names if len(names) else np.unique(columns[0]))]
    places = {name: k for k, name in enumerate(order)}
    for part, column in zip(("y", "test_y"), columns):
        if strange := [name for name in np.unique(column).tolist() if str(name) not in places]:
            known = "names" if len(names) else "y"
            raise FLError(
                f"{part} has a class {strange[0]!r}, which {known} does not have: leave its samples out", code="data"
            )
    y, test_y = ([places[str(name)] for name in column.tolist()] for column in columns)
    return y, test_y, order


def _with_strings(name: str, values: Any) -> np.ndarray:
    """Convert values to an array; names become strings, also if they are objects."""
    _check_mask(name, values)
    array = np.asarray(values)
    if array.dtype.kind not in "OU" or array.ndim != 1:
        return array
    others = [(k, value) for k, value in enumerate(values) if not isinstance(value, str)]
    if others and len(others) < len(array):
        raise FLError(
            f"{name}[{others[0][0]}] is {others[0][1]!r} among names: give a name, or leave the sample out", code="data"
        )
    return array if others else array.astype(str)


def targets(name: str, value: Any, x: Tensor, task: str) -> Tensor:
    """Convert targets to float32: numbers [N, D], or 0 and 1 [N, labels]."""
    y = tensor(name, value)
    if len(y.shape) not in (1, 2) or len(y) != len(x) or not y.numel():
        way = f", as in {name}.reshape({len(x)}, -1)" * (y.ndim > 2 and len(y) == len(x))
        raise FLError(
            f"{name} is {form(y)}, and there are {len(x):,} samples: give [{len(x)}, D] for {task}{way}", code="data"
        )
    if not (y if y.is_floating_point() else y.float()).isfinite().all():
        raise FLError(f"{name} has a value that is not finite: leave such samples out", code="data")
    if task == "multilabel":
        if y.ndim == 1:
            raise FLError(
                f"{name} is {form(y)}: several labels are [N, labels], with a 1 for each that a sample has", code="data"
            )
        if not ((y == 0) | (y == 1)).all():
            raise FLError(f"{name} has other values than 0 and 1: give 1 for each label that a sample has", code="data")
    return y.float().reshape(len(y), -1)


def _input(name: str, value: Any) -> Tensor:
    """Convert one of several inputs, which may be truth values such as a mask."""
    x = tensor(name, value)
    return x if x.dtype == torch.bool and x.numel() and x.ndim > 1 else samples(name, value)


def samples(name: str, value: Any) -> Tensor:
    """Convert samples to uint8 images, float32 of any shape, or int32 tokens."""
    x = tensor(name, value)
    description = f"{str(getattr(value, 'dtype', x.dtype)).removeprefix('torch.')} {list(x.shape)}"  # x may be wider
    if x.ndim == 0 or not len(x):
        raise FLError(f"{name} has no samples: it is {description}", code="data")
    if 0 in x.shape:
        raise FLError(f"{name} is {description}: its samples are empty", code="data")
    if x.ndim == 4 and x.shape[3] in _CHANNELS and x.shape[1] not in _CHANNELS and x.shape[2] > 4:
        raise FLError(
            f"{name} is {description}: channels come first, as in {name}.transpose(0, 3, 1, 2) of NumPy", code="data"
        )
    if x.dtype == torch.uint8 and x.ndim == 4:
        return x
    if x.is_floating_point():
        if x.ndim == 1:
            raise FLError(
                f"{name} is {description}: samples need an axis of their own, as in {name}[:, None]", code="data"
            )
        single, before = x.float(), 0
        for piece in pieces(single):
            if not (finite := piece.isfinite()).all():
                raise FLError(
                    f"{name}[{before + int((~finite).nonzero()[0, 0])}] has a value that is not finite in float32: "
                    "replace it, or leave the sample out",
                    code="data",
                )
            before += len(piece)
        return single
    if x.dtype in (torch.bool, torch.uint8) or x.ndim != 2:
        raise FLError(f"{name} is {description}: {_as_samples(name, value, x)}", code="data")
    least, most = map(int, value_range(x))  # as Python's numbers: torch wraps 2**31 where tokens are int32
    if least < 0 or most >= 2**31:
        raise FLError(
            f"{name} goes from {least} to {most}: tokens go from 0 to 2**31 - 1; tables are floats, "
            f"{name}.astype('float32')",
            code="data",
        )
    return x.int()


def _as_samples(name: str, value: Any, x: Tensor) -> str:
    """Say how whole numbers and truth values become samples."""
    floats = ".float()" if isinstance(value, Tensor) else ".astype('float32')"
    if x.dtype == torch.uint8 and x.ndim == 3:
        return f"add the axis of channels, {name}[:, None]"
    if x.ndim == 1:
        return f"samples need an axis of their own, as in {name}[:, None]{floats}"
    if x.dtype == torch.bool or x.ndim == 2:
        tokens = f", and tokens are int32 [N, T], {name}.astype('int32')" * (x.dtype == torch.uint8)
        return f"images are [N, C, H, W], tables are floats, {name}{floats}{tokens}"
    least, most = map(int, value_range(x))
    if x.ndim == 4 and x.dtype != torch.uint8 and least >= 0 and most <= 255:
        return f"images are uint8 or floats, as in {name}{'.byte()' if floats == '.float()' else '.astype(np.uint8)'}"
    top = 255 if most <= 255 else 65535 if most <= 65535 else most
    usual = {4: "images are uint8 or floats", 5: "volumes are floats"}.get(x.ndim, "samples of this shape are floats")
    scaled = f"({name} / {top})" if least >= 0 else name
    return f"{usual}, as in {scaled}{floats}, of a scale of about 1 and the same for x and test_x"


def labels(name: str, value: Any, x: Tensor) -> Tensor:
    """Convert the labels of samples to int64 [N], or [N, T] for tokens."""
    way = f"number the names, as in names, {_NUMBERED.format('names')}"
    y, other = tensor(name, value, way), name.replace("y", "x")
    if y.ndim > 2:
        raise FLError(f"{name} is {form(y)}: labels are [N], one class a sample{_as_masks(name, y)}", code="data")
    if y.is_floating_point():
        if (unknown := y.isnan()).any():
            raise FLError(
                f"{name}[{int(unknown.nonzero()[0, 0])}] is NaN, and every sample needs a label: leave it out",
                code="data",
            )
        raise FLError(f"{name} is {form(y)}: {_whole(name, y)}", code="data")
    tokens = not x.is_floating_point() and x.ndim == 2
    if y.ndim == 2 and not (tokens and y.shape == x.shape):
        also = f", or {list(x.shape)} with a label a token" if tokens else ""
        if y.shape[1] == 1:
            way = f"; give {name}.ravel()"
        elif bool(((y == 0) | (y == 1)).all() and (y.sum(1) == 1).all()):
            way = f"; give {name}.argmax(1), if this is one-hot"
        else:
            way = _as_masks(name, y)
        raise FLError(f"{name} is {form(y)}: labels are [N], one class a sample{also}{way}", code="data")
    if y.ndim == 0:
        raise FLError(f"{name} is {form(y)}: labels are [N]", code="data")
    if len(y) != len(x):
        raise FLError(
            f"{name} has {len(y):,} labels and {other} {len(x):,} samples: give one label a sample", code="data"
        )
    return y.long()


def _as_masks(name: str, y: Tensor) -> str:
    """Say what becomes of labels where a sample has one for each pixel or step."""
    several = "; several a sample, each 0 or 1, are for task='multilabel'"
    either = bool(((y == 0) | (y == 1)).all()) and y.ndim == 2
    return f"{several * either}; a class for each pixel or step is for task='segmentation'"


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
    """Convert any array to a tensor on the CPU, which may share its memory.

    Args:
        way: the way out where it holds something else than numbers.
    """
    _check_mask(name, value)
    if isinstance(value, Tensor):
        if value.layout != torch.strided or value.is_complex() or value.is_quantized:
            raise FLError(
                f"{name} is a tensor of {value.dtype}, {value.layout}: give a plain one of numbers", code="data"
            )
        value = value.detach().cpu()
        return value.long() if value.dtype in (torch.uint16, torch.uint32, torch.uint64) else value
    try:
        array = np.asarray(value)
    except Exception as error:  # a sequence of unequal lengths, or an object of its own kind
        way = ", of which fl.data.pad makes one and a mask" * ("inhomogeneous" in str(error))
        raise FLError(f"{name} is no array: {' '.join(str(error).split())}{way}", code="data") from None
    if array.dtype.kind not in "buif":
        raise FLError(f"{name} holds {array.dtype} and has the shape {list(array.shape)}: {way}", code="data")
    if array.dtype.kind == "u" and array.dtype.itemsize > 1:
        array = array.astype(np.int64)
    elif array.dtype.kind == "f" and array.dtype.itemsize > 8:  # long doubles
        array = array.astype(np.float64)
    array = np.ascontiguousarray(array, array.dtype.newbyteorder("="))
    return from_array(array)


def _check_mask(name: str, value: Any) -> None:
    """Raise FLError for values that a masked array of NumPy hides.

    Nothing here would know of the mask.
    """
    for k, array in enumerate(value if isinstance(value, list | tuple) else [value]):
        if isinstance(array, np.ma.MaskedArray) and array.mask.any():
            row = k if array is not value else int(array.mask.nonzero()[0][0]) if array.ndim else 0
            raise FLError(
                f"{name}[{row}] is masked, and there are no masks here: leave such samples out, or give numbers of "
                "your own for what is masked, with numpy's filled",
                code="data",
            )


def _owners(owners: Any, test_owners: Any, n: int, test_n: int) -> dict[str, Any]:
    """Convert the owners of both parts to int64.

    Names become numbers in alphabetical order, and are kept.
    """
    if owners is None and test_owners is not None:
        raise FLError("test_owners need owners=, those of the training samples")
    parts = {}
    for name, values, count in (("owners", owners, n), ("test_owners", test_owners, test_n)):
        if values is None:
            continue
        parts[name] = array = _with_strings(name, values.cpu() if isinstance(values, Tensor) else values)
        if array.shape != (count,) or array.dtype.kind not in "iuSU":
            raise FLError(
                f"{name} is {array.dtype} {list(array.shape)}: give a number or a name for each of {count:,}",
                code="data",
            )
    if len({array.dtype.kind in "iu" for array in parts.values()}) > 1:
        raise FLError("owners and test_owners: give numbers for both, or names for both", code="data")
    names = np.empty(0, str)
    if parts and parts["owners"].dtype.kind in "SU":
        parts = {
            k: np.char.decode(column, "utf-8", "backslashreplace") if column.dtype.kind == "S" else column
            for k, column in parts.items()
        }
        names = np.unique(np.concatenate(list(parts.values())))
        parts = {name: np.searchsorted(names, array) for name, array in parts.items()}
    if large := [name for name, array in parts.items() if int(array.max()) >= 2**63]:
        raise FLError(
            f"{large[0]} has the number {parts[large[0]].max()}, above 2^63 - 1: give names, as strings", code="data"
        )
    numbers = {name: torch.from_numpy(array.astype(np.int64)) for name, array in parts.items()}
    return {**numbers, "owner_names": tuple(names.tolist())}


def _marks(valid: Any, n: int) -> Tensor:
    marks = tensor("valid", valid, "give True or False for each sample")
    if marks.shape != (n,) or marks.dtype != torch.bool:
        raise FLError(f"valid is {form(marks)}: give True or False for each of {n:,} samples", code="data")
    if marks.all():
        raise FLError(
            "valid is True throughout, so that nothing is left to train on: give False for some samples", code="data"
        )
    return marks


def form(value: Tensor) -> str:
    """Write the type and the shape of a tensor: uint8 [1437, 1, 8, 8]."""
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"

"""Convert tables, such as frames of pandas, to arrays. A row is a sample."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from fl.base.errors import FLError
from fl.base.settings import choice
from fl.data.parts import assign_parts, check_classes

CATEGORICAL = ("one-hot", "refuse")


class Table(NamedTuple):
    """The columns of a table, and the names of its rows.

    Attributes:
        columns: from a column's name to its values [N]: numbers or strings.
        row: a function from a row's number, from 0 on, to its name in messages.
    """

    columns: dict[str, np.ndarray]
    row: Callable[[int], str]


def columns_of(frame: Any) -> Table:
    """Return the columns of a `pandas.DataFrame`.

    Raises:
        FLError: if two columns have one name, if a value is missing, or if a value is neither a number nor a string.
    """
    if not (hasattr(frame, "columns") and hasattr(frame, "iloc")):
        raise FLError(f"frame is a {type(frame).__name__}: give a pandas.DataFrame")
    names = list(map(str, frame.columns))
    if repeated := [name for name in names if names.count(name) > 1]:
        raise FLError(f"the frame has two columns {repeated[0]!r}: rename one of them", code="data")

    def row(k: int) -> str:
        return f"row {frame.index[k]!r}" if isinstance(frame.index[k], str) else f"row {frame.index[k]}"

    columns = {}
    for k, name in enumerate(names):
        column = frame.iloc[:, k]
        if (missing := np.flatnonzero(column.isna().to_numpy())).size:
            raise missing_value(row(int(missing[0])), name)
        values = column.to_numpy()
        if str(column.dtype) == "category":  # numbers in it stand for names, too
            values = values.astype(str)
        elif values.dtype.kind not in "biuf":
            values = _of_objects(list(values), name, row)
        columns[name] = values
    return Table(columns, row)


def _of_objects(values: Sequence[Any], name: str, row: Callable[[int], str]) -> np.ndarray:
    """Convert a column of Python objects, strings or numbers, to an array."""
    texts = [isinstance(value, str) for value in values]
    if all(texts):
        return np.asarray(values, dtype=str)
    for k, (value, text) in enumerate(zip(values, texts)):
        if not text and not isinstance(value, bool | int | float | np.number | np.bool_):
            raise FLError(
                f"{row(k)} has a {type(value).__name__} in the column {name!r}: give numbers or names, or leave it out",
                code="data",
            )
    if any(texts):
        raise mixed_values_error(row(texts.index(True)), name, values[texts.index(True)])
    numbers = np.asarray(values)
    return numbers if numbers.dtype.kind in "biuf" else numbers.astype(np.float64)


def missing_value(row: str, column: str) -> FLError:
    """Return the error for a missing value."""
    return FLError(
        f"{row} has no value in the column {column!r}: fill it in, or leave the row or the column out", code="data"
    )


def mixed_values_error(row: str, column: str, value: str) -> FLError:
    """Return the error for a name in a column of numbers."""
    return FLError(
        f"{row} has {value!r} in the column {column!r}, among numbers: correct it, or make names of all of its values, "
        f"as in frame[{column!r}].map('no. {{}}'.format) of pandas",
        code="data",
    )


def arrays_of(
    table: Table,
    target: str,
    owner: str | None,
    split: str | None,
    categorical: str,
    task: str,
) -> dict[str, Any]:
    """Return the arguments of `Dataset.from_arrays`, from arguments of `from_pandas`."""
    choice("categorical", [categorical], CATEGORICAL)
    choice("task", [task], ("classification", "regression"))
    columns, row = table
    for role, name in (("target", target), ("owner", owner), ("split", split)):
        if name is not None and str(name) not in columns:
            raise FLError(f"there is no column {str(name)!r} for {role}: there are {', '.join(columns)}", code="name")
    special = [str(name) for name in (target, owner, split) if name is not None]
    if len(set(special)) < len(special):
        raise FLError(f"target, owner and split are {', '.join(special)}: give each a column of its own")
    count = len(columns[special[0]])
    if not count:
        raise FLError("the table has no rows", code="data")
    x = _features({name: values for name, values in columns.items() if name not in special}, categorical, row)
    y = columns[str(target)]
    if task == "regression" and y.dtype.kind not in "biuf":
        raise FLError(
            f"the column {target!r} has names such as {str(y[0])!r}, and regression predicts numbers", code="data"
        )
    owners = None if owner is None else _as_owners(str(owner), columns[str(owner)], row)
    groups = np.zeros(count, int) if owners is None else np.unique(owners, return_inverse=True)[1]
    words = None if split is None else columns[str(split)].astype(str)
    parts = assign_parts(words, groups, row if split is None else lambda k: f"{row(k)}, column {str(split)!r},")
    if y.dtype.kind in "SU":
        check_classes(y, parts, row)
    shared, test = parts != 2, parts == 2
    valid = parts[shared] == 1 if (parts == 1).any() else None
    arrays = {"x": x[shared], "y": y[shared], "test_x": x[test], "test_y": y[test], "valid": valid, "task": task}
    if owners is not None:
        arrays |= {"owners": owners[shared], "test_owners": owners[test]}
    return arrays if task == "classification" else {**arrays, "names": (str(target),)}


def _features(columns: Mapping[str, np.ndarray], categorical: str, row: Callable[[int], str]) -> np.ndarray:
    """Return the features, float32 [N, F]: numbers first, then one-hot columns."""
    numbers, encoded = [], []
    for name, values in columns.items():
        if values.dtype.kind in "biuf":
            with np.errstate(over="ignore"):
                single = values.astype(np.float32)
            if (strange := np.flatnonzero(~np.isfinite(single))).size:
                k = int(strange[0])
                raise FLError(
                    f"{row(k)} has {values[k]} in the column {name!r}, no finite number: replace it", code="data"
                )
            numbers.append(single)
        elif categorical == "refuse":
            raise FLError(
                f"the column {name!r} has names such as {str(values[0])!r}: leave it out, make numbers of them, or "
                "give categorical='one-hot'",
                code="data",
            )
        else:
            encoded += [(values == category).astype(np.float32) for category in np.unique(values)]
    if not numbers and not encoded:
        raise FLError("the table has no columns to learn from beside those of target, owner and split", code="data")
    return np.stack([*numbers, *encoded], axis=1)


def _as_owners(name: str, values: np.ndarray, row: Callable[[int], str]) -> np.ndarray:
    if values.dtype.kind != "f":
        return values.astype(np.int64) if values.dtype.kind == "b" else values
    if (strange := np.flatnonzero(values != np.round(values))).size:
        k = int(strange[0])
        raise FLError(
            f"{row(k)} has {values[k]} in the column {name!r} of owners: give names, or whole numbers", code="data"
        )
    return values.astype(np.int64)

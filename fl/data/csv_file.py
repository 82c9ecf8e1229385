"""Tables in files: `csv:FILE`."""

import csv
from collections.abc import Callable, Container
from pathlib import Path
from typing import Any

import numpy as np

from fl.base.errors import FLError, reason
from fl.data.dataset import Dataset
from fl.data.loader import Loader, file_of, options_of
from fl.data.table import Table, arrays_of, missing_value, mixed_values_error

_MISSING = ("", "na", "nan", "null", "none", "n/a")


def read(path: Path, names_in: Container[str]) -> Table:
    """Read a CSV file with column names in its first line.

    A column that has only numbers holds numbers.

    Args:
        names_in: columns of names, which may look like numbers: 007 and "12 or more" stay what they are.

    Raises:
        FLError: for a file that is no such table, and for missing values, by their line and column.
    """
    lines, rows = [], []
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file, strict=True)
            names = [name.strip() for name in next(reader, [])]
            for row in reader:
                if row:  # no blank line
                    rows.append(row)
                    lines.append(reader.line_num)
    except (OSError, ValueError, csv.Error) as error:
        raise FLError(f"{path} cannot be read: {reason(error)}", code="file") from None
    if not rows:
        raise FLError(f"{path} has no rows below the names of its columns", code="data")
    if bad := [name for name in names if not name or names.count(name) > 1]:
        raise FLError(
            f"{path} has {'a column without a name' if '' in bad else f'two columns {bad[0]!r}'}: name each",
            code="data",
        )
    for line, row in zip(lines, rows):
        if len(row) != len(names):
            raise FLError(f"{path}, line {line} has {len(row)} values, and there are {len(names)} columns", code="file")

    def name_row(k: int) -> str:
        return f"{path}, line {lines[k]}"

    columns = {}
    for name, column in zip(names, zip(*rows)):
        values = [value.strip() for value in column]
        if missing := [k for k, value in enumerate(values) if value.lower() in _MISSING]:
            raise missing_value(name_row(missing[0]), name)
        columns[name] = _parse_column(values, name, name_row, name in names_in)
    return Table(columns, name_row)


def _parse_column(values: list[str], name: str, row: Callable[[int], str], names: bool) -> np.ndarray:
    """Return numbers if all values are some, or names if none is."""
    numbers: list[float | None] = []
    for value in values:
        try:
            numbers.append(float(value) if "_" not in value else None)
        except ValueError:
            numbers.append(None)
    others = [k for k, number in enumerate(numbers) if number is None]
    if len(others) == len(values) or (names and others) or (names and any(map(_is_code, values))):
        return np.asarray(values)
    if others:
        raise mixed_values_error(row(others[0]), name, values[others[0]])
    if all(value.lstrip("+-").isdigit() and len(value) < 18 for value in values):
        return np.asarray(values, dtype=np.int64)
    return np.asarray(numbers, dtype=np.float64)


def _is_code(value: str) -> bool:
    """Return whether a name has only digits, but not as a whole number is written."""
    return value.isdigit() and (len(value) >= 18 or str(int(value)) != value)


_COLUMNS = {"target": "target", "owner": "owner", "split": "split", "categorical": "one-hot", "task": "classification"}


def load(root: Path, path: str) -> Dataset:
    """Load a CSV file, as in `csv:patients.csv?target=ill&owner=hospital&split=part`.

    Args:
        path: of the file, absolute, or relative to the working directory or, if it is not there, to root. Behind a
            question mark it names columns, which else are `target` and, where there are such, `owner` and `split`; and
            `categorical` and `task`, see `Dataset.from_pandas`.
    """
    name = f"csv:{path}"
    path, options = options_of(name, path, tuple(_COLUMNS))
    settings: dict[str, Any] = _COLUMNS | options
    names_in = {settings["owner"], *({settings["target"]} if settings["task"] == "classification" else ())}
    table = read(file_of(name, path, root), names_in)
    for option in ("owner", "split"):
        if option not in options and settings[option] not in table.columns:
            settings[option] = None
    if settings["target"] not in table.columns:
        raise FLError(
            f"{path} has no column {settings['target']!r} to predict: name one, as in --dataset 'csv:{path}?target="
            f"{[*table.columns][-1]}'; there are {', '.join(table.columns)}",
            code="name",
        )
    try:
        return Dataset.from_arrays(**arrays_of(table, **settings))
    except FLError as error:
        raise FLError(error.args[0] if path in str(error) else f"{path}: {error}", code=error.code) from None


LOADERS = {"csv:FILE": Loader(lambda root, _, path: load(root, path), own=True)}

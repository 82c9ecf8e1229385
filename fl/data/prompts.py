"""Prompts with answers, such as instructions: text of which only the answers count, in losses and in scores."""

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from string import Formatter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fl.base.errors import FLError, reason
from fl.data.arrays import UNSCORED
from fl.data.dataset import Dataset
from fl.data.loader import Loader
from fl.data.text import TextOptions, numbered, splitter

_log = logging.getLogger("fl")


def dataset(name: str, rows: Sequence[Mapping[str, Any]], options: TextOptions) -> Dataset:
    """Make a data set of prompts with answers, each of which is a sample.

    The template's last field is the answer. It and what follows it count (and the token for the end of a text, if a
    tokenizer has one); what stands before it is the context alone.
    Where both are longer than a sequence, the beginning of the context is left out; an answer that is longer is cut.
    Shorter samples are filled up at their end, which counts for nothing: models must not look ahead.

    Args:
        rows: for each sample the fields that the template names, and perhaps the "owner" that it has by nature. The
            last tenth of each owner's samples is for testing (without owners, that of all).

    Returns:
        x int32 [N, T], y int64 [N, T], -100 (`UNSCORED`) wherever the token after is no part of an answer. Classes are
        the words of the training part, the 256 bytes, or a tokenizer's tokens.

    Raises:
        FLError: for rows without a field, and for a template that names none.

    >>> rows = [{"q": f"{i}+{i}", "a": str(2 * i)} for i in range(10)]
    >>> sums = dataset("sums", rows, TextOptions("byte", length=8, template="{q}={a};"))
    >>> bytes(sums.x[2].tolist()), sums.y[2].tolist()
    (b'2+2=4\\x00\\x00\\x00', [-100, -100, -100, 52, 59, -100, -100, -100])
    """
    before, after = _halves(options.template)
    pairs = [tuple(_filled(part, row, i) for part in (before, after)) for i, row in enumerate(rows)]
    owners = _owners(rows)
    train, test = _parts(np.zeros(len(rows), np.int64) if owners is None else owners)
    if not len(test):
        raise FLError(f"{name} has {len(rows)} samples: a tenth of each owner's are for testing, so give 10 or more")
    split, known = splitter(options)
    first, second = ([split(half) for i in part for half in pairs[i]] for part in (train, test))
    *coded, vocabulary = numbered(first, second, options, known)
    if end := getattr(getattr(known, "tokenizer", None), "eos_token_id", None):
        coded = [[np.append(half, [end] * (i % 2)).astype(np.int32) for i, half in enumerate(part)] for part in coded]
    (x, y), (test_x, test_y) = (_sequences([*zip(part[::2], part[1::2])], options) for part in coded)
    return Dataset(
        name, x, y, test_x, test_y, len(vocabulary) or 256, vocabulary=vocabulary,
        owners=None if owners is None else torch.from_numpy(owners[train]),
    )  # fmt: skip


def _halves(template: str) -> tuple[str, str]:
    """What is filled with the context, and what with the answer and follows it."""
    try:
        parts = list(Formatter().parse(template))
    except ValueError as error:
        raise FLError(f"--text.template {template!r}: {reason(error)}; braces of the text itself are doubled") from None
    last = max((i for i, part in enumerate(parts) if part[1] is not None), default=None)
    if last is None:
        raise FLError(f"--text.template {template!r} names no field: give one such as '{{prompt}} {{answer}}'")
    texts = [text.replace("{", "{{").replace("}", "}}") for text, *_ in parts]
    ways = [f"!{way}" if way else "" for *_, way in parts]
    fields = ["" if part[1] is None else f"{{{part[1]}{way}:{part[2]}}}" for part, way in zip(parts, ways)]
    before = "".join(text + field for text, field in zip(texts[:last], fields)) + texts[last]
    return before, fields[last] + "".join(texts[last + 1 :])


def _filled(template: str, row: Mapping[str, Any], number: int) -> str:
    try:
        return template.format_map(row)
    except (LookupError, AttributeError) as error:
        has = ", ".join(map(str, row))
        raise FLError(f"sample {number} has no {error}, which --text.template names: it has {has}") from None


def _owners(rows: Sequence[Mapping[str, Any]]) -> np.ndarray | None:
    have = [row.get("owner") is not None for row in rows]
    if not any(have):
        return None
    if not all(have):
        raise FLError(f"sample {have.index(False)} has no owner, and others have: give all of them one, or none")
    return np.unique([str(row["owner"]) for row in rows], return_inverse=True)[1].astype(np.int64)


def _parts(owners: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The samples for training and for testing, in their order."""
    held = np.zeros(len(owners), bool)
    for owner in range(owners.max(initial=-1) + 1):
        own = np.flatnonzero(owners == owner)
        held[own[len(own) - len(own) // 10 :]] = True
    return np.flatnonzero(~held), np.flatnonzero(held)


def _sequences(samples: Sequence[Sequence[np.ndarray]], options: TextOptions) -> tuple[Tensor, Tensor]:
    """Contexts and answers as sequences of tokens, and the tokens after each."""
    length, long = options.length, 0
    x, y = np.zeros((len(samples), length), np.int32), np.full((len(samples), length), UNSCORED, np.int64)
    for row, (context, answer) in enumerate(samples):
        if not len(context):  # nothing says that the first token comes next
            context, answer = answer[:1], answer[1:]
        long += len(answer) > length
        answer = answer[:length]
        context = context[-(length + 1 - len(answer)) :]
        tokens = np.concatenate([context, answer])
        x[row, : len(tokens) - 1] = tokens[:-1]
        y[row, len(context) - 1 : len(tokens) - 1] = answer
    if long:
        _log.warning("%d of %d answers are longer than --text.length %d: their ends are cut", long, len(x), length)
    return torch.from_numpy(x), torch.from_numpy(y)


def read(path: Path, name: str) -> list[dict[str, Any]]:
    """Read a file with a JSON object in each line."""
    rows = []
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise FLError(f"--dataset {name} cannot be read: {reason(error)}") from None
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                row = json.loads(line)
            except ValueError as error:
                raise FLError(f"{path}, line {number} is no JSON: {reason(error)}") from None
            if not isinstance(row, dict):
                raise FLError(f"{path}, line {number} is no JSON object with fields, such as prompt and answer")
            rows.append(row)
    return rows


def load(root: Path, path: str, options: TextOptions = TextOptions()) -> Dataset:
    """Load a file of prompts and answers, a JSON object in each line; see `dataset`.

    Args:
        path: of the file; absolute, or relative to the working directory or, if it is not there, to root.
    """
    file, name = Path(path).expanduser(), f"prompts:{path}"
    place = file if file.is_file() else root / file
    if not place.is_file():
        also = "" if file.is_absolute() else f", nor in {root}"
        raise FLError(f"--dataset {name}: there is no file {path}{also}")
    return dataset(name, read(place, name), options)


LOADERS = {"prompts:FILE": Loader(lambda root, _, options, path: load(root, path, options), text=True)}

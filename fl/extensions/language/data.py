"""Prompts with answers: only the answers count in losses and in scores."""

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
from fl.base.settings import check_values
from fl.data.arrays import UNSCORED
from fl.data.dataset import Dataset
from fl.data.loader import Loader
from fl.data.text import TextOptions, number_tokens, splitter

_log = logging.getLogger("fl")


def dataset(name: str, rows: Sequence[Mapping[str, Any]], options: TextOptions) -> Dataset:
    """Make a data set of prompts with answers, one sample per pair.

    The template's last field is the answer. It and what follows it count (and the token for the end of a text, if a
    tokenizer has one); what stands before it is the context alone.
    Where both are longer than a sequence, the beginning of the context is left out; an answer that is longer is cut.
    Shorter samples are filled up at their end, which counts for nothing: models must not look ahead.

    Args:
        rows: for each sample the fields that the template names, and perhaps the "owner" that it has by nature. The
            last tenth of each owner's samples is for testing (without owners, the last tenth of all).

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
    check_values(options, "text")
    options.check()
    template = _parts_of(options.template)
    pairs = [_fill(template, row, number) for number, row in enumerate(rows)]
    owners, names = _owners(rows)
    train, test = _parts(np.zeros(len(rows), np.int64) if owners is None else owners)
    if not len(test):
        raise FLError(
            f"{name} has {len(rows)} samples, of which no owner has 10: the last tenth of each is for testing",
            code="data",
        )
    split, known = splitter(options)
    first, second = ([split(half) for i in part for half in pairs[i]] for part in (train, test))
    *coded, vocabulary = number_tokens(first, second, options, known)
    if (end := getattr(getattr(known, "tokenizer", None), "eos_token_id", None)) is not None:
        coded = [[np.append(half, [end] * (i % 2)).astype(np.int32) for i, half in enumerate(part)] for part in coded]
    pieces = ([*zip(part[::2], part[1::2])] for part in coded)
    (x, y), (test_x, test_y) = (
        _sequences(part, n, options) for part, n in zip(pieces, (train.tolist(), test.tolist()))
    )
    return Dataset(
        name, x, y, test_x, test_y, len(vocabulary) or 256, vocabulary=vocabulary,
        owners=None if owners is None else torch.from_numpy(owners[train]), owner_names=names,
    )  # fmt: skip


def _parts_of(template: str) -> list[tuple[str, str | None]]:
    """Return the template's texts, each with the name of the next field, or None."""
    try:
        parts = list(Formatter().parse(template))
    except ValueError as error:
        raise FLError(f"--text.template {template!r}: {reason(error)}; braces of the text itself are doubled") from None
    names = [name for _, name, *_ in parts if name is not None]
    if not names or "" in names or any(form or way for _, _, form, way in parts):
        raise FLError(f"--text.template {template!r}: give names of fields alone, such as '{{prompt}} {{answer}}'")
    return [(text, name) for text, name, *_ in parts]


def _fill(parts: Sequence[tuple[str, str | None]], row: Mapping[str, Any], number: int) -> tuple[str, str]:
    """Return the context of a sample, and its answer with what follows it."""
    texts, last = [], 0
    for text, name in parts:
        texts.append(text)
        if name is not None:
            value = row.get(name)
            if isinstance(value, bool) or not isinstance(value, str | int | float):
                lack = f"a {type(value).__name__} as" if name in row and value is not None else "no"
                raise FLError(
                    f"sample {number} has {lack} {name!r}, which --text.template names, where text or a number should "
                    f"be: it has {', '.join(map(str, row))}",
                    code="data",
                )
            last = len(texts)
            texts.append(str(value))
    context, answer = "".join(texts[:last]), "".join(texts[last:])
    if not texts[last] or any("\ud800" <= letter <= "\udfff" for letter in context + answer):
        raise FLError(
            f"sample {number} has an empty answer, or half a character (a lone surrogate): leave it out", code="data"
        )
    return context, answer


def _owners(rows: Sequence[Mapping[str, Any]]) -> tuple[np.ndarray | None, tuple[str, ...]]:
    """Return number the owners of samples, if they have some, and list their names."""
    have = [row.get("owner") is not None for row in rows]
    if not any(have):
        return None, ()
    if not all(have):
        raise FLError(
            f"sample {have.index(False)} has no owner, and others have: give all of them one, or none", code="data"
        )
    names, owners = np.unique([str(row["owner"]) for row in rows], return_inverse=True)
    return owners.astype(np.int64), tuple(names.tolist())


def _parts(owners: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the samples for training and for testing, in their order."""
    held = np.zeros(len(owners), bool)
    for owner in range(owners.max(initial=-1) + 1):
        samples = np.flatnonzero(owners == owner)
        held[samples[len(samples) - len(samples) // 10 :]] = True
    return np.flatnonzero(~held), np.flatnonzero(held)


def _sequences(
    samples: Sequence[Sequence[np.ndarray]], numbers: Sequence[int], options: TextOptions
) -> tuple[Tensor, Tensor]:
    """Return contexts and answers as sequences of tokens, and the tokens after each.

    The samples have numbers for messages.
    """
    length, long = options.length, 0
    x, y = np.zeros((len(samples), length), np.int32), np.full((len(samples), length), UNSCORED, np.int64)
    for row, (context, answer) in enumerate(samples):
        if not len(context):  # nothing says that the first token comes next
            context, answer = answer[:1], answer[1:]
        if not len(answer):
            raise FLError(
                f"sample {numbers[row]} has no token that counts: leave it out, or give it a prompt", code="data"
            )
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
        lines = path.read_text("utf-8-sig").split("\n")
    except (OSError, ValueError) as error:
        raise FLError(f"--dataset {name} cannot be read: {reason(error)}", code="file") from None
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                row = json.loads(line)
            except ValueError as error:
                raise FLError(f"{path}, line {number} is no JSON: {reason(error)}", code="file") from None
            if not isinstance(row, dict):
                raise FLError(
                    f"{path}, line {number} is no JSON object with fields, such as prompt and answer", code="file"
                )
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
        raise FLError(f"--dataset {name}: there is no file {path}{also}", code="file")
    return dataset(name, read(place, name), options)


LOADERS = {"prompts:FILE": Loader(lambda root, _, options, path: load(root, path, options), text=True)}

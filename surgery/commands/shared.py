"""What several commands share: lists as arguments, sizes, where results go."""

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.constructors import PrimitiveConstructorSpec

from surgery.errors import SurgeryError
from surgery.operations.texts import value_of

if TYPE_CHECKING:
    from torch import Tensor

    from surgery.files import Checkpoint
    from surgery.operations.subject import Subject

PROVENANCE = "layer_surgery"
"""The name in a file's metadata under which JSON says how it was made."""
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}


def listed(kind: type, example: str) -> Any:
    """The type of an argument that is a comma-separated list of numbers, or None."""

    def parse(strings: list[str]) -> tuple:
        items = [item.strip() for item in strings[0].split(",")]
        if "" in items:
            hint = "write one comma between two items, and none at the end"
            raise ValueError(f"{strings[0]!r} has an empty item: {hint}")
        try:
            return tuple(map(kind, items))
        except ValueError:
            what = "whole numbers" if kind is int else "numbers"
            raise ValueError(f"{strings[0]!r} is not a list of {what}, such as {example}") from None

    spec = PrimitiveConstructorSpec(
        nargs=1,
        metavar=f"{kind.__name__.upper()},...",
        instance_from_str=parse,
        is_instance=lambda value: value is None or isinstance(value, tuple),
        str_from_instance=lambda value: [str(value) if value is None else ",".join(map(str, value))],
    )
    return Annotated[tuple[kind, ...] | None, spec]  # in one, as tyro's errors about a union show the code of its parts


Integers = listed(int, "2,2,4,2")
Floats = listed(float, "1,0.5")


def settings(texts: Sequence[str], known: Sequence[str]) -> dict[str, Any]:
    """Settings of a method from texts NAME=VALUE or PATTERN:NAME=VALUE; patterns keep their order.

    >>> settings(["density=0.5", "layer4:density=0.2", "elect=true"], ["density", "elect"])
    {'density': {'layer4': 0.2, '*': 0.5}, 'elect': True}
    """
    found: dict[str, Any] = {}
    everywhere: dict[str, Any] = {}
    for text in texts:
        left, equals, right = text.partition("=")
        pattern, _, name = left.rpartition(":")
        if not equals or name not in known:
            choice = f"one of {', '.join(known)}" if known else "none, as this method has no settings"
            raise SurgeryError(f"--set {text}: write NAME=VALUE or PATTERN:NAME=VALUE, where NAME is {choice}")
        if pattern:
            found.setdefault(name, {})[pattern] = value_of(right)
        else:
            everywhere[name] = value_of(right)
    for name, value in everywhere.items():
        found[name] = {**found[name], "*": value} if name in found else value
    return found


def size_in_bytes(text: str | None) -> int | None:
    """The number of bytes that a text such as 5GB says; None for None.

    >>> size_in_bytes("5GB"), size_in_bytes("200 kB")
    (5000000000, 200000)
    """
    if text is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]?)b?", text.strip().lower())
    size = int(float(match[1]) * _UNITS[match[2]]) if match else 0
    if size < 1:
        raise SurgeryError(f"--shard-size {text}: give a number of bytes, such as 500MB or 5GB")
    return size


def size_text(count: int) -> str:
    """A number of bytes for people.

    >>> size_text(2_500_000), size_text(12)
    ('2.5 MB', '12 B')
    """
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count} B"


def total(values: Mapping[str, "Tensor"]) -> int:
    """The bytes of a state; a lazy one is not read."""
    from surgery.lazy import pieces_of

    return sum(pieces_of(values, name).nbytes for name in values)


def summary(values: Mapping[str, "Tensor"]) -> str:
    """The number of tensors and bytes of a state.

    >>> import torch
    >>> summary({"w": torch.zeros(3)})
    '1 tensor, 12 B'
    """
    return f"{len(values)} tensor{'s' * (len(values) != 1)}, {size_text(total(values))}"


def save(
    path: Path,
    values: Mapping[str, "Tensor"],
    *,
    made: Mapping[str, Any],
    like: "Checkpoint | None" = None,
    config: Mapping | None = None,
    shard_bytes: int | None = None,
) -> None:
    """Write a state with a progress bar, and say where it is.

    Args:
        path, values, like, config, shard_bytes: as for `surgery.files.write`.
        made: how it was made, which the file's metadata tell.
    """
    from surgery.files import write

    with bar(total(values), path.name) as progress:
        write(
            path,
            values,
            metadata={PROVENANCE: json.dumps(made)},
            like=like,
            config=config,
            shard_bytes=shard_bytes,
            progress=progress,
        )
    print(f"{path}: {summary(values)}")


def save_subject(path: Path, subject: "Subject", *, made: Mapping[str, Any], shard_bytes: int | None = None) -> None:
    """Write what an operation has made, with the files beside the weights and the configuration of its model."""
    config = None if path.suffix else subject.config()
    save(path, subject.values, made=made, like=subject.folder, config=config, shard_bytes=shard_bytes)


def source(checkpoint: "Checkpoint") -> dict[str, Any]:
    """What provenance says of an input: its path, size, and a hash of its names and shapes."""
    from surgery.lazy import pieces_of
    from surgery.plan.fingerprint import fingerprint

    shapes = {name: pieces_of(checkpoint, name).shape for name in checkpoint}
    return {"path": str(checkpoint.path), "bytes": total(checkpoint), "fingerprint": fingerprint(shapes)}


@contextmanager
def bar(size: int, label: str) -> Iterator[Any]:
    """A function that moves a progress bar on by so many bytes; on a terminal only."""
    from tqdm import tqdm

    with tqdm(total=size, desc=label, unit="B", unit_scale=True, leave=False, disable=not sys.stderr.isatty()) as shown:
        yield shown.update

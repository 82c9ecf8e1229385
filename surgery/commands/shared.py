"""What commands share: files as arguments, sizes, and how a result is written."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from torch import Tensor
from tqdm import tqdm

from surgery.files import Checkpoint, write
from surgery.lazy import pieces_of
from surgery.operations.arguments import Kind
from surgery.operations.checkpoint import Model
from surgery.plan.fingerprint import fingerprint

File = Annotated[Path, Kind("FILE", positional=True)]
Files = Annotated[tuple[Path, ...], Kind("FILE...", positional=True)]
NewFile = Annotated[Path, Kind("FILE")]
ModelName = Annotated[str, Kind("MODEL")]

PROVENANCE = "layer_surgery"
"""The name in a file's metadata under which JSON says how it was made."""


def size_text(count: int) -> str:
    """A number of bytes for people.

    >>> size_text(2_500_000), size_text(12)
    ('2.5 MB', '12 B')
    """
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count} B"


def total(values: Mapping[str, Tensor]) -> int:
    """The bytes of a state; a lazy one is not read."""
    return sum(pieces_of(values, name).nbytes for name in values)


def summary(values: Mapping[str, Tensor]) -> str:
    """The number of tensors and bytes of a state.

    >>> import torch
    >>> summary({"w": torch.zeros(3)})
    '1 tensor, 12 B'
    """
    return f"{len(values)} tensor{'s' * (len(values) != 1)}, {size_text(total(values))}"


def save(
    path: Path,
    model: Model,
    *,
    made: Mapping[str, Any],
    shard_bytes: int | None = None,
) -> None:
    """Write what an operation has made, with a progress bar on a terminal, and say where it is.

    A folder also gets the files beside the weights and the configuration of the model.

    Args:
        path, shard_bytes: as for `surgery.files.write`.
        model: what is written.
        made: how it was made, which the file's metadata tell.
    """
    config = None if path.suffix else model.config()
    with tqdm(total=total(model.values), desc=path.name, unit="B", unit_scale=True, leave=False, disable=None) as bar:
        write(
            path,
            model.values,
            metadata={PROVENANCE: json.dumps(made)},
            like=model.folder,
            config=config,
            shard_bytes=shard_bytes,
            progress=bar.update,
        )
    print(f"{path}: {summary(model.values)}")


def source(checkpoint: Checkpoint) -> dict[str, Any]:
    """What provenance says of an input: its path, size, and a hash of its names and shapes."""
    shapes = {name: pieces_of(checkpoint, name).shape for name in checkpoint}
    return {"path": str(checkpoint.path), "bytes": total(checkpoint), "fingerprint": fingerprint(shapes)}

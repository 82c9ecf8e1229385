"""The header of a safetensors file: which tensors it holds, and where. Nothing of what it says is taken on trust."""

import json
import math
import os
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch

from surgery.errors import SurgeryError, first_line

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}
"""The format's names of dtypes."""
NAMES = {dtype: name for name, dtype in DTYPES.items()}
_LONGEST = 100_000_000  # bytes of a header, as the format says


class Entry(NamedTuple):
    """A tensor of a file; `offset` counts bytes from the beginning of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int


class Header(NamedTuple):
    """The tensors of a file by name, and its metadata."""

    entries: dict[str, Entry]
    metadata: dict[str, str]


def read_header(file: BinaryIO, path: Path) -> Header:
    """Read and check the header of an open file; SurgeryError that begins with the path if anything is wrong with it.

    Tensors must lie one after another and fill the file, as the format demands.
    """
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > min(size - 8, _LONGEST):
        raise _damaged(path, f"it has {size:,} bytes and says that its header has {length:,}")
    try:
        found = json.loads(file.read(length).decode(), object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"its header is no JSON ({first_line(error)})") from None
    if not isinstance(found, dict):
        raise _damaged(path, "its header is no JSON object")
    metadata = found.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _damaged(path, "its metadata are not texts")
    start, places = 8 + length, {}
    for name, one in found.items():
        places[name] = _place(path, name, one)
    end = 0
    for name, (_, (first, last)) in sorted(places.items(), key=lambda item: item[1][1]):
        if first != end:
            raise _damaged(path, f"tensor {name!r} begins at byte {first:,}, and the one before it ends at {end:,}")
        end = last
    if start + end != size:
        raise _damaged(path, f"its tensors end at byte {start + end:,}, and the file at {size:,}")
    entries = {name: Entry(dtype, shape, start + first) for name, ((dtype, shape), (first, _)) in places.items()}
    return Header(entries, metadata)


def _place(path: Path, name: str, one: Any) -> tuple[tuple[torch.dtype, tuple[int, ...]], tuple[int, int]]:
    """((dtype, shape), (first byte, last byte)) of a tensor."""
    if not isinstance(one, dict) or not {"dtype", "shape", "data_offsets"} <= set(one):
        raise _damaged(path, f"tensor {name!r} lacks dtype, shape or data_offsets")
    shape, offsets = one["shape"], one["data_offsets"]
    if not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _damaged(path, f"tensor {name!r} has the shape {str(shape)[:60]} at bytes {str(offsets)[:60]}")
    if (dtype := DTYPES.get(str(one["dtype"]))) is None:
        raise SurgeryError(
            f"{path}: tensor {name!r} has the dtype {str(one['dtype'])[:20]!r}, which is not read: convert it"
        )
    if math.prod(shape) * dtype.itemsize != offsets[1] - offsets[0]:
        what = f"{one['dtype']} {shape} takes {math.prod(shape) * dtype.itemsize:,} bytes"
        raise _damaged(path, f"tensor {name!r} has {offsets[1] - offsets[0]:,} bytes, and {what}")
    return (dtype, tuple(shape)), (offsets[0], offsets[1])


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 2**60 for value in values)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name occurs twice")
    return found


def _damaged(path: Path, why: str) -> SurgeryError:
    return SurgeryError(f"{path} is damaged or no safetensors file: {why}; fetch or save it again")

"""Files of tensors: safetensors with a header of plain values, whole or not there, which say so if they are damaged."""

import hashlib
import json
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from fl.base.errors import FLError
from fl.base.files import reading, regular, replacing
from surgery.errors import first_line
from surgery.transfer import as_bytes, host_copies

_ENTRY = "layer-surgery"


def write(path: Path, format: str, tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> None:
    """Write tensors and a header into one safetensors file, atomically.

    The same content is the same file, byte for byte.

    Args:
        format: what the file is, and which version of that, as in "checkpoint-3".
        tensors: on any device; they may share memory.
        header: values as JSON has them.
    """
    copies = dict(zip(tensors, host_copies(list(tensors.values()))))
    values = {"format": format, "header": dict(header), "tensors": _checksum(copies)}
    # One entry, since the library writes several in an order that differs from process to process.
    text = json.dumps({"checksum": _crc(json.dumps(values)), **values})
    with replacing(path) as temporary:
        temporary.write_bytes(save(copies, metadata={_ENTRY: text}))


def read(path: Path, format: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read the tensors, on the CPU, and the header of a file that `write` wrote.

    Raises:
        FLError: if there is no such file, or it is damaged or of another format.
    """
    with _open(path) as file:
        values = _values(path, format, file.metadata())
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (no mapping)
    if _checksum(tensors) != values["tensors"]:
        raise _damage_error(path, "its tensors are not as they were written")
    return tensors, values["header"]


def read_header(path: Path, format: str) -> dict[str, Any]:
    """Read the header alone; raises as `read` does, but for damaged tensors."""
    with _open(path) as file:
        return _values(path, format, file.metadata())["header"]


@contextmanager
def _open(path: Path) -> Iterator[Any]:
    with reading(path):
        open(regular(path, most=None), "rb").close()  # the library calls every file missing that it cannot open
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise FLError(
            f"{path} cannot be read ({first_line(error)}): put back a copy of the file, or start a new run", code="file"
        ) from None


def _values(path: Path, format: str, metadata: Mapping[str, str] | None) -> dict[str, Any]:
    if _ENTRY not in (metadata or {}):
        known = format.rpartition("-")[0]
        raise FLError(f"{path} is no {known} that this version reads: put the right file there", code="file")
    try:
        values = json.loads(metadata[_ENTRY])
        intact = values.pop("checksum") == _crc(json.dumps(values))
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError):
        intact = False
    if not intact:
        raise _damage_error(path, "its header is not as it was written")
    if (actual := values["format"]) != format:
        raise FLError(
            f"{path} is of format {actual}, and this version reads {format} here: put the right file there", code="file"
        )
    return values


def _damage_error(path: Path, how: str) -> FLError:
    return FLError(
        f"{path} is damaged ({how}): put back a copy of the file, or start a new run under another --name", code="file"
    )


def sha256_of(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of the names and numbers of tensors, whatever their order and device."""
    total = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        total.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
        total.update(as_bytes(tensor.cpu()).numpy().data)
    return total.hexdigest()


def _crc(text: str) -> str:
    return f"{zlib.crc32(text.encode()):08x}"


def _checksum(tensors: Mapping[str, Tensor]) -> str:
    """Return the CRC-32 of names, dtypes, shapes and bytes."""
    checksum = 0
    for name, tensor in sorted(tensors.items()):
        checksum = zlib.crc32(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode(), checksum)
        checksum = zlib.crc32(as_bytes(tensor).numpy().data, checksum)
    return f"{checksum:08x}"

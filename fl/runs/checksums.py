"""Checksums of tensors, and safetensors files that are equal byte for byte where their contents are."""

import json
import zlib
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from fl.base.files import regular


def checksum(tensor: Tensor) -> str:
    """CRC-32 of a tensor's dtype, shape and bytes, as hexadecimal text.

    >>> one = torch.tensor([1.0, 2.0])
    >>> checksum(one) == checksum(one.clone()), checksum(one) == checksum(one.view(2, 1))
    (True, False)
    """
    said = f"{tensor.dtype}{tuple(tensor.shape)}".encode()
    values = tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy()
    return f"{zlib.crc32(values, zlib.crc32(said)):08x}"


def of_file(path: Path) -> str:
    """CRC-32 of a file's bytes, as hexadecimal text; "" if there is no such file."""
    if not path.exists():
        return ""
    found = 0
    with open(regular(path, most=None), "rb") as file:
        while part := file.read(2**20):
            found = zlib.crc32(part, found)
    return f"{found:08x}"


def record(tensors: Mapping[str, Tensor], state: str) -> str:
    """The checksums of all tensors of a file, and of the text beside them, as JSON."""
    sums = {name: checksum(tensor) for name, tensor in sorted(tensors.items())}
    return json.dumps({"state": f"{zlib.crc32(state.encode()):08x}", "tensors": sums})


def damage(tensors: Mapping[str, Tensor], state: str, recorded: str) -> str:
    """What does not have the recorded checksum, in words; "" where all is well.

    >>> tensors = {"a": torch.zeros(2)}
    >>> damage(tensors, "{}", record(tensors, "{}")), damage({"a": torch.ones(2)}, "{}", record(tensors, "{}"))
    ('', "the tensor 'a' is not as it was written")
    """
    try:
        expected, found = json.loads(recorded), json.loads(record(tensors, state))
        if expected["state"] != found["state"]:
            return "its header is not as it was written"
        names = {*expected["tensors"], *found["tensors"]}
        wrong = [name for name in sorted(names) if expected["tensors"].get(name) != found["tensors"].get(name)]
    except (ValueError, TypeError, KeyError, AttributeError):
        return "its checksums are not as they were written"
    return f"the tensor {wrong[0]!r} is not as it was written" if wrong else ""


def ordered(data: bytes) -> tuple[bytes, memoryview]:
    """A safetensors file as (header, tensors) with the entries of its header in a fixed order. The library writes its
    metadata in an order that differs from process to process.
    """
    size = int.from_bytes(data[:8], "little")
    entries = json.loads(data[8 : 8 + size])
    metadata = {"__metadata__": dict(sorted(entries.pop("__metadata__", {}).items()))}
    placed = dict(sorted(entries.items(), key=lambda entry: (entry[1]["data_offsets"], entry[0])))
    text = json.dumps(metadata | placed, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)  # the tensors begin at a multiple of 8 bytes
    return len(text).to_bytes(8, "little") + text, memoryview(data)[8 + size :]

"""A safetensors file as tensors that are read piece by piece."""

import threading
from functools import partial
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from surgery.errors import SurgeryError
from surgery.files.header import Entry, read_header
from surgery.lazy import Pieces


def read_safetensors(path: Path) -> tuple[dict[str, Pieces], dict[str, str]]:
    """The tensors of a file, of which nothing is read yet, and its metadata.

    Pieces are read into memory of their own, so that nothing but them takes memory.

    Raises:
        SurgeryError: that begins with the path, for a damaged file.
    """
    file = open(path, "rb", buffering=0)  # noqa: SIM115 - closed with the last of the tensors
    header, lock = read_header(file, path), threading.Lock()
    entries = {
        name: Pieces(entry.shape, entry.dtype, partial(_read, file, lock, path, entry))
        for name, entry in header.entries.items()
    }
    return entries, header.metadata


def _read(file: BinaryIO, lock: threading.Lock, path: Path, entry: Entry, start: int, stop: int) -> Tensor:
    item = entry.dtype.itemsize
    data = torch.empty((stop - start) * item, dtype=torch.uint8)
    view, done = memoryview(data.numpy()), 0
    with lock:
        file.seek(entry.offset + start * item)
        while done < len(view):
            count = file.readinto(view[done:])
            if not count:
                raise SurgeryError(f"{path} is shorter than it was when it was opened: do not change it meanwhile")
            done += count
    return data.view(entry.dtype)

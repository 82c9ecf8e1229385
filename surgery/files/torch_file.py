"""A file of torch.save as tensors, mapped into memory where its format allows; nothing in it is run."""

import errno
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any
from zipfile import BadZipFile, ZipFile, is_zipfile

import torch
from torch import Tensor

from surgery.errors import SurgeryError, first_line
from surgery.lazy import Pieces

_WRAPPERS = ("state_dict", "model_state_dict", "model")
_CUT = "it is damaged or cut short; fetch or save it again"
_AT_A_TIME = 2**20  # bytes
_PREFIXES = ("module.", "_orig_mod.", "module.")  # of DistributedDataParallel and torch.compile


def read_torch(path: Path) -> dict[str, Pieces]:
    """The tensors of a state dict, also of one that lies under "state_dict", "model_state_dict" or "model".

    What DistributedDataParallel and torch.compile put before every name is left out.

    Raises:
        SurgeryError: that begins with the path, for a file that is damaged, or holds anything but tensors by name.
    """
    found = _loaded(path)
    for key in _WRAPPERS:
        if isinstance(found, Mapping) and isinstance(found.get(key), Mapping):
            found = found[key]
    if not isinstance(found, Mapping) or not found:
        raise SurgeryError(f"{path} holds no state dict: save model.state_dict()")
    if odd := [name for name, value in found.items() if not isinstance(name, str) or not isinstance(value, Tensor)]:
        what = type(found[odd[0]]).__name__
        raise SurgeryError(f"{path} holds a {what} as {odd[0]!r}: save model.state_dict(), in which all are tensors")
    for prefix in _PREFIXES:
        if all(name.startswith(prefix) for name in found):
            found = {name.removeprefix(prefix): tensor for name, tensor in found.items()}
    if odd := [name for name, tensor in found.items() if tensor.layout is not torch.strided or tensor.is_quantized]:
        raise SurgeryError(f"{path}: tensor {odd[0]!r} is sparse or quantised: save it as a plain tensor")
    return {name: Pieces.of(tensor) for name, tensor in found.items()}


def _loaded(path: Path) -> Any:
    try:
        _check_sums(path)
        try:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except (RuntimeError, ValueError) as error:
            if "mmap" not in str(error):
                raise
            return torch.load(path, map_location="cpu", weights_only=True)  # written before PyTorch 1.6
    except OSError as error:
        if error.errno != errno.EINVAL:  # what a seek to a place before the beginning gives
            raise
        raise SurgeryError(f"{path} cannot be read as a file of torch.save: {_CUT}") from None
    except BadZipFile as error:
        raise SurgeryError(f"{path} is damaged ({first_line(error)}): fetch or save it again") from None
    except UnpicklingError:
        what = "is damaged, or holds other objects than tensors, which could run code"
        raise SurgeryError(f"{path} {what}: save model.state_dict() instead") from None
    except Exception as error:  # of a damaged file: zipfile's, struct's, pickle's, ...
        cut = "PytorchStreamReader" in str(error)  # whose messages are about archives, and several lines long
        why = _CUT if cut else first_line(error)
        raise SurgeryError(f"{path} cannot be read as a file of torch.save: {why}") from None


def _check_sums(path: Path) -> None:
    """BadZipFile if what is in a file is not what was saved: torch.load takes it as it is. It reads the file once.

    Files from before PyTorch 1.6 are no zip files, and have no checksums.
    """
    if is_zipfile(path):
        with ZipFile(path) as archive:
            for record in archive.infolist():
                if record.CRC:  # torch.save writes 0 where it is told not to compute them
                    with archive.open(record) as data:
                        while data.read(_AT_A_TIME):
                            pass

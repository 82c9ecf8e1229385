"""Open a checkpoint: a safetensors or torch.save file, or a HuggingFace folder."""

import errno
import json
import re
import threading
from collections.abc import Collection, Mapping
from functools import partial
from io import FileIO
from pathlib import Path
from pickle import UnpicklingError
from typing import Any
from zipfile import ZIP_STORED, BadZipFile, ZipFile, is_zipfile

import torch
from torch import Tensor

from surgery.errors import SurgeryError, first_line
from surgery.files.whole import is_plain
from surgery.lazy import LazyState, Pieces

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
"""By the safetensors format's names."""
TORCH = (".pt", ".pth", ".bin", ".ckpt")
"""Suffixes of files of torch.save."""
INDEX = "model.safetensors.index.json"
_IN_FOLDERS = ("model.safetensors", INDEX, "pytorch_model.bin", "pytorch_model.bin.index.json")
"""Files of weights: a folder's first one counts, as for transformers; older ones may be left beside it."""
_LARGEST = 2**28  # bytes of a file of JSON
_REPEATED = 2**30  # bytes that tensors may claim beyond those that a file of torch.save holds for them
_BEGINNINGS = (b"PK", b"\x80")  # of files of torch.save: a zip file, and before PyTorch 1.6 a pickle
_WRAPPERS = ("state_dict", "model_state_dict", "model")  # under which a state dict may lie in a file of torch.save
_PREFIXES = ("module.", "_orig_mod.", "module.")  # of DistributedDataParallel and torch.compile
_AT_A_TIME = 2**20  # bytes


class Checkpoint(LazyState):
    """The state of a file or folder; its tensors are read when they are asked for.

    Attributes:
        path: of the file or folder.
        metadata: texts by name, of a safetensors file.
        files: the weight files, in a folder also its index.
    """

    def __init__(
        self, entries: Mapping[str, Pieces], path: Path, metadata: Mapping[str, str], files: tuple[Path, ...]
    ) -> None:
        super().__init__(entries, str(path))
        self.path, self.metadata, self.files = path, dict(metadata), files

    @property
    def is_folder(self) -> bool:
        """True if it is a folder, with files beside the weights."""
        return self.path.is_dir()

    @property
    def config(self) -> Any:
        """The content of config.json beside the weights; None if there is none."""
        file = self.path / "config.json"
        return read_json(file) if file.is_file() else None


def read_json(path: Path) -> Any:
    """Return the content of a JSON file; SurgeryError names an unreadable file."""
    try:
        if path.stat().st_size > _LARGEST:
            raise SurgeryError(f"{path} is too large for a file of JSON", code="file")
        return json.loads(path.read_bytes())
    except OSError as error:
        raise SurgeryError(f"{path} cannot be read: {error.strerror or error}", code="file") from None
    except (ValueError, RecursionError) as error:
        raise SurgeryError(f"{path} is no JSON ({first_line(error)}): mend or fetch it again", code="file") from None


def open_state(path: str | Path) -> Checkpoint:
    """Open a checkpoint's state: names and shapes, and a torch.save file's checksums.

    Args:
        path: a .safetensors file; a .pt, .pth, .bin or .ckpt file of torch.save; the index of a sharded checkpoint; or
            a folder with model.safetensors, an index of shards, pytorch_model.bin (the first of these, as transformers
            takes it), or a single .safetensors file.

    Raises:
        SurgeryError: that begins with the path, for what is missing, damaged or no checkpoint.

    >>> import tempfile, torch
    >>> file = tempfile.mkdtemp() + "/net.pt"
    >>> torch.save({"w": torch.ones(2)}, file)
    >>> open_state(file)["w"]
    tensor([1., 1.])
    """
    path = Path(path)
    try:
        if path.is_dir():
            return _folder(path)
        if not path.is_file():
            raise SurgeryError(f"{path}: there is no such file or folder", code="file")
        if path.name.endswith(".index.json"):
            return _read_shards(path, path)
        if path.suffix == ".safetensors":
            return _safetensors(path)
        if path.suffix in TORCH:
            return Checkpoint(_torch(path), path, {}, (path,))
    except OSError as error:
        raise SurgeryError(f"{path} cannot be read: {error.strerror or error}", code="file") from None
    raise SurgeryError(f"{path}: give a file *.safetensors, *{', *'.join(TORCH)} or a folder with one", code="file")


def _folder(path: Path) -> Checkpoint:
    files = [path / name for name in _IN_FOLDERS if (path / name).is_file()][:1] or sorted(path.glob("*.safetensors"))
    if not files:
        raise SurgeryError(f"{path} holds no {', '.join(_IN_FOLDERS)}", code="file")
    if len(files) > 1:
        raise SurgeryError(f"{path} holds {len(files)} .safetensors files and no {INDEX}: give one", code="ambiguous")
    if files[0].name.endswith(".index.json"):
        return _read_shards(files[0], path)
    inside = open_state(files[0])
    return Checkpoint({name: inside.pieces(name) for name in inside}, path, inside.metadata, (files[0],))


def _read_shards(index: Path, path: Path) -> Checkpoint:
    content = read_json(index)
    places = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(places, dict):
        raise SurgeryError(f"{index} is damaged or no index of shards: it has no entries under weight_map", code="file")
    shards: dict[str, Checkpoint] = {}
    entries = {}
    for name, file in places.items():
        if not isinstance(file, str) or file not in shards:
            plain = isinstance(file, str) and is_plain(file) and not file.endswith(".json")
            if not plain or not index.with_name(file).is_file():
                raise SurgeryError(f"{index}: {name!r} is in {str(file)[:60]!r}, no file beside the index", code="file")
            shards[file] = open_state(index.with_name(file))
        if name not in shards[file]:
            raise SurgeryError(f"{index}: {name!r} is not in {file}", code="file")
        entries[name] = shards[file].pieces(name)
    metadata = next((shard.metadata for shard in shards.values()), {})
    return Checkpoint(entries, path, metadata, (index, *(index.with_name(file) for file in shards)))


def _safetensors(path: Path) -> Checkpoint:
    """Return a safetensors file; the library checks its header's sizes and offsets.

    Pieces are read into memory of their own, so that nothing but them takes memory, and a file that is cut short
    meanwhile is an error; of a file that is mapped, as the library does it, reading would end the process.
    """
    try:
        from safetensors import SafetensorError, safe_open  # which surgery does without until a file is read
    except ImportError:
        raise SurgeryError(f"reading {path} needs a package: pip install safetensors", code="missing") from None
    file, lock = open(path, "rb", buffering=0), threading.Lock()  # noqa: SIM115 - closed with the last of the tensors
    try:
        with safe_open(path, "pt"):
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length), object_pairs_hook=_once)
    except (SafetensorError, ValueError, RecursionError) as error:
        why = first_line(error).removeprefix("Error while deserializing header: ")[:120]
        raise SurgeryError(f"{path} is no whole safetensors file: {why}; fetch or save it again", code="file") from None
    metadata, entries = header.pop("__metadata__", None) or {}, {}
    for name, entry in header.items():
        if (dtype := DTYPES.get(entry["dtype"])) is None:
            raise SurgeryError(f"{path}: tensor {name!r} is {entry['dtype']!r}: convert it", code="unsupported")
        read = partial(_read, file, lock, path, dtype, 8 + length + entry["data_offsets"][0])
        entries[name] = Pieces(tuple(entry["shape"]), dtype, read)
    return Checkpoint(entries, path, metadata, (path,))


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("a name occurs twice")
    return values


def _read(
    file: FileIO, lock: threading.Lock, path: Path, dtype: torch.dtype, offset: int, start: int, stop: int
) -> Tensor:
    data = torch.empty((stop - start) * dtype.itemsize, dtype=torch.uint8)
    view = data.numpy().data
    with lock:
        file.seek(offset + start * dtype.itemsize)
        while view:
            if not (count := file.readinto(view)):
                raise SurgeryError(f"{path} was cut while it was read: fetch or save it again", code="file")
            view = view[count:]
    return data.view(dtype)


def _torch(path: Path) -> dict[str, Pieces]:
    """Return the tensors of a state dict, also from under "state_dict" or "model".

    What DistributedDataParallel and torch.compile put before every name is left out.
    """
    content = _load(path)
    for key in _WRAPPERS:
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    if not isinstance(content, Mapping) or not content:
        raise SurgeryError(f"{path} holds no state dict: save model.state_dict()", code="file")
    if odd := [name for name, value in content.items() if not isinstance(name, str) or not isinstance(value, Tensor)]:
        kind = type(content[odd[0]]).__name__
        raise SurgeryError(f"{path} holds a {kind} as {odd[0]!r}: save model.state_dict() alone", code="file")
    for prefix in _PREFIXES:
        if all(name.startswith(prefix) for name in content):
            content = {name.removeprefix(prefix): tensor for name, tensor in content.items()}
    if odd := [name for name, tensor in content.items() if tensor.layout is not torch.strided or tensor.is_quantized]:
        raise SurgeryError(f"{path}: tensor {odd[0]!r} is sparse or quantised: save a plain one", code="unsupported")
    if odd := [name for name, tensor in content.items() if tensor.is_meta]:
        raise SurgeryError(f"{path}: tensor {odd[0]!r} is on the meta device: save one with values", code="values")
    pieces: dict[tuple, Pieces] = {}  # tied tensors, which lie in the same memory, are one
    same = {name: (t.data_ptr() or id(t), t.dtype, t.shape, t.stride()) for name, t in content.items()}
    _check_claims(path, {same[name]: (name, tensor) for name, tensor in content.items()}.values())
    return {name: pieces.setdefault(same[name], Pieces.of(tensor)) for name, tensor in content.items()}


def _check_claims(path: Path, tensors: Collection[tuple[str, Tensor]]) -> None:
    """Raise SurgeryError for tensors that repeat stored values until memory is full."""
    storages = [tensor.untyped_storage() for _, tensor in tensors]
    held = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
    claimed = sum(tensor.nbytes for _, tensor in tensors)
    if claimed - held > _REPEATED:
        name, most = max(tensors, key=lambda entry: entry[1].nbytes - entry[1].untyped_storage().nbytes())
        raise SurgeryError(f"{path}: {name!r} {tuple(most.shape)} repeats its storage: clone it", code="file")


def _load(path: Path) -> Any:
    """Return what torch.load gives, mapped into memory if possible; no code runs."""
    with open(path, "rb") as file:
        beginning = file.read(2)
    if not beginning:
        raise SurgeryError(f"{path} is empty: fetch or save it again", code="file")
    if not beginning.startswith(_BEGINNINGS):
        raise SurgeryError(f"{path} is no file of torch.save: fetch it again, or save model.state_dict()", code="file")
    try:
        _check_records(path)
        mapped = is_zipfile(path)  # not what was written before PyTorch 1.6
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except SurgeryError:
        raise
    except BadZipFile as error:
        raise SurgeryError(f"{path} is damaged ({first_line(error)}): fetch or save it again", code="file") from None
    except UnpicklingError:
        reason = "is damaged, or holds other objects than tensors, which could run code"
        raise SurgeryError(f"{path} {reason}: save model.state_dict() instead", code="file") from None
    except Exception as error:  # of a damaged file: zipfile's, struct's, pickle's, ...
        before = isinstance(error, OSError) and error.errno == errno.EINVAL  # a seek to a place before the beginning
        if isinstance(error, OSError) and not before:
            raise
        # Errors of other kinds say nothing to a user, and PytorchStreamReader's errors are about archives.
        cut = before or not isinstance(error, RuntimeError) or re.search("PytorchStreamReader|magic number", str(error))
        why = "it is none, damaged or cut short; fetch or save it again" if cut else first_line(error)
        raise SurgeryError(f"{path} cannot be read as a file of torch.save: {why}", code="file") from None


def _check_records(path: Path) -> None:
    """Raise BadZipFile if a file's content is not what was saved, which torch ignores.

    torch.save compresses nothing, so that records that unpack to more than the file has are not its own. Files from
    before PyTorch 1.6 are no zip files, and have no checksums. SurgeryError for a zip file of something else.
    """
    if is_zipfile(path):
        with ZipFile(path) as archive:
            records = archive.infolist()
            names = [record.filename for record in records]
            if any("/code/" in name for name in names):
                raise SurgeryError(f"{path} holds a TorchScript model: save model.state_dict()", code="file")
            folder = names[0].partition("/")[0] if names else ""
            if not {f"{folder}/data.pkl", f"{folder}/version"} <= {*names}:
                raise SurgeryError(f"{path} is a zip file, but not torch.save's: save model.state_dict()", code="file")
            if odd := [record.filename for record in records if record.compress_type != ZIP_STORED]:
                raise BadZipFile(f"record {odd[0]!r} is compressed, which torch.save never does")
            if sum(record.file_size for record in records) > path.stat().st_size:
                raise BadZipFile("its records claim more bytes than it has")
            for record in records:
                if record.CRC:  # torch.save writes 0 where it is told not to compute them
                    with archive.open(record) as data:
                        while data.read(_AT_A_TIME):
                            pass

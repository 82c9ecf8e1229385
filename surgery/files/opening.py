"""Open a checkpoint: a safetensors file, a file of torch.save, or a folder as HuggingFace's libraries write it."""

import json
from collections.abc import Mapping
from pathlib import Path

from surgery.errors import SurgeryError, first_line
from surgery.files.safetensors_file import read_safetensors
from surgery.files.torch_file import read_torch
from surgery.lazy import LazyState, Pieces

TORCH = (".pt", ".pth", ".bin", ".ckpt")
"""Suffixes of files of torch.save."""
INDEX = "model.safetensors.index.json"
_WHOLE = ("model.safetensors", "pytorch_model.bin")
_INDICES = (INDEX, "pytorch_model.bin.index.json")
_LARGEST = 2**28  # bytes of an index


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
        """Whether it is a folder, with files beside the weights."""
        return self.path.is_dir()

    def __repr__(self) -> str:
        return super().__repr__().replace("Checkpoint:", f"Checkpoint {self.path}:")


def open_state(path: str | Path) -> Checkpoint:
    """The state of a checkpoint, of which only names and shapes are read, and of a file of torch.save the checksums.

    Args:
        path: a .safetensors file; a .pt, .pth, .bin or .ckpt file of torch.save; the index of a sharded checkpoint; or
            a folder with model.safetensors, pytorch_model.bin, an index of shards, or a single .safetensors file.

    Raises:
        SurgeryError: that begins with the path, for what is missing, damaged or no checkpoint.

    >>> import tempfile, torch
    >>> file = tempfile.mkdtemp() + "/net.pt"
    >>> torch.save({"w": torch.ones(2)}, file)
    >>> open_state(file)["w"]
    tensor([1., 1.])
    """
    path = Path(path)
    if path.is_dir():
        return _folder(path)
    if not path.is_file():
        raise SurgeryError(f"{path}: there is no such file or folder")
    try:
        if path.name.endswith(".index.json"):
            return _sharded(path, path)
        if path.suffix == ".safetensors":
            entries, metadata = read_safetensors(path)
            return Checkpoint(entries, path, metadata, (path,))
        if path.suffix in TORCH:
            return Checkpoint(read_torch(path), path, {}, (path,))
    except OSError as error:
        raise SurgeryError(f"{path} cannot be read: {error.strerror or error}") from None
    raise SurgeryError(f"{path}: give a file *.safetensors, *{', *'.join(TORCH)} or a folder with one")


def _folder(path: Path) -> Checkpoint:
    for name in _INDICES:
        if (path / name).is_file():
            return _sharded(path / name, path)
    found = [path / name for name in _WHOLE if (path / name).is_file()] or sorted(path.glob("*.safetensors"))
    if not found:
        raise SurgeryError(f"{path} holds no {', '.join((*_WHOLE, *_INDICES))}")
    if len(found) > 1 and found[0].name not in _WHOLE:
        raise SurgeryError(f"{path} holds {len(found)} .safetensors files and no {INDEX}: give one of the files")
    inside = open_state(found[0])
    return Checkpoint({name: inside.pieces(name) for name in inside}, path, inside.metadata, (found[0],))


def _sharded(index: Path, path: Path) -> Checkpoint:
    try:
        if index.stat().st_size > _LARGEST:
            raise ValueError("it is too large for an index")
        found = json.loads(index.read_text())
        places = dict(found["weight_map"])
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise SurgeryError(f"{index} is damaged or no index of shards: {first_line(error)}") from None
    shards: dict[str, Checkpoint] = {}
    entries = {}
    for name, file in places.items():
        if not isinstance(file, str) or Path(file).name != file or file.endswith(".json"):
            raise SurgeryError(f"{index}: {name!r} is in {str(file)[:60]!r}, which is no file beside the index")
        if file not in shards:
            shards[file] = open_state(index.with_name(file))
        if name not in shards[file]:
            raise SurgeryError(f"{index}: {name!r} is not in {file}")
        entries[name] = shards[file].pieces(name)
    metadata = next((shard.metadata for shard in shards.values()), {})
    return Checkpoint(entries, path, metadata, (index, *(index.with_name(file) for file in shards)))

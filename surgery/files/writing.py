"""Write a state into a file or a folder, slab by slab."""

import json
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from surgery.errors import SurgeryError
from surgery.files.reading import DTYPES, INDEX, TORCH, Checkpoint
from surgery.files.whole import check_absent, replacing
from surgery.lazy import LazyState, Pieces, pieces_of, spans
from surgery.states import as_state
from surgery.transfer import as_bytes

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_FORMAT = {"format": "pt"}  # transformers refuses files without it
Progress = Callable[[int], object]
"""Called with the number of bytes that were written since the last call."""


def check_new(path: Path) -> None:
    """Raise SurgeryError unless a path is new or an empty folder, with a parent."""
    if path.suffix not in (".safetensors", ".pt", ".pth", ".bin", ""):
        raise SurgeryError(f"{path}: give a file *.safetensors, *.pt, *.pth, *.bin, or a folder", code="file")
    check_absent(path, folder=path.suffix == "")


def write(
    path: str | Path,
    values: Mapping[str, Tensor],
    *,
    metadata: Mapping[str, str] | None = None,
    like: Checkpoint | None = None,
    config: Mapping | None = None,
    shard_bytes: int | None = None,
    progress: Progress = lambda count: None,
) -> None:
    """Write a state; a lazy one slab by slab, so that it need not fit into memory.

    Args:
        path: a new .safetensors file, a new .pt, .pth or .bin file (for which the state is held in memory), or a new
            or empty folder, which gets model.safetensors. After a failure it is as it was.
        values: the state.
        metadata: texts that are written into safetensors files.
        like: a folder whose other files (configuration, tokenizer) a new folder gets, too.
        config: what config.json of a new folder holds, in place of the file of `like`.
        shard_bytes: in a folder the size above which the state is split into several files with an index.
        progress: is told the bytes as they are written.

    Raises:
        SurgeryError: for a path that exists, a full disk, dtypes that the format does not know.

    >>> import tempfile
    >>> folder = tempfile.mkdtemp()
    >>> write(folder + "/net.safetensors", {"w": torch.ones(2)}, metadata={"made by": "me"})
    >>> from surgery.files import open_state
    >>> open_state(folder + "/net.safetensors").metadata["made by"]
    'me'
    """
    path = Path(path)
    check_new(path)
    texts = {**_FORMAT, **(metadata or {})}
    values = values if isinstance(values, LazyState) else as_state(values, "what is written")
    pieces = {name: pieces_of(values, name) for name in values}
    if odd := [name for name, piece in pieces.items() if piece.device.type == "meta"]:
        raise SurgeryError(f"tensor {odd[0]!r} has no data (meta device): give the model weights first", code="values")
    with replacing(path, folder=path.suffix == "") as temporary:
        needed, free = sum(piece.nbytes for piece in pieces.values()), shutil.disk_usage(temporary.parent).free
        if needed > free:
            raise SurgeryError(f"{path} would take {needed:,} bytes, and {free:,} of the disk are free", code="file")
        if path.suffix == ".safetensors":
            _safetensors(temporary, pieces, texts, progress)
        elif path.suffix in TORCH:
            _torch(temporary, pieces, progress)
        else:
            _beside(temporary, like, config)
            _shards(temporary, pieces, texts, shard_bytes, progress)


def _safetensors(path: Path, pieces: Mapping[str, Pieces], metadata: Mapping[str, str], progress: Progress) -> None:
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    order = sorted(pieces, key=lambda name: -pieces[name].dtype.itemsize)  # so that all lie where their size divides
    for name in order:
        piece = pieces[name]
        if piece.dtype not in _NAMES:
            raise SurgeryError(
                f"tensor {name!r} is {piece.dtype}, which safetensors files cannot hold: convert it", code="unsupported"
            )
        header[name] = {"dtype": _NAMES[piece.dtype], "shape": piece.shape, "data_offsets": [end, end + piece.nbytes]}
        end += piece.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb", buffering=0) as file:
        _all(file, memoryview(len(text).to_bytes(8, "little") + text))
        for slab in _compute(pieces[name] for name in order):
            _all(file, as_bytes(slab.cpu()).numpy().data)
            progress(slab.nbytes)


def _all(file: BinaryIO, data: memoryview) -> None:
    while data:
        data = data[file.write(data) :]


def _compute(every: Iterable[Pieces]) -> Iterator[Tensor]:
    """Yield all slabs of tensors in order, computed ahead in threads of one core each.

    torch's own threads would wait for each other at every operation, since operations on slabs are short.
    """
    allowed = torch.get_num_threads()
    jobs = ((piece, start, stop) for piece in every for start, stop in spans(piece.size))
    try:
        with ThreadPoolExecutor(allowed, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            coming = deque(pool.submit(piece.read, *span) for piece, *span in islice(jobs, allowed + 1))
            while coming:
                slab = coming.popleft().result()
                coming.extend(pool.submit(piece.read, *span) for piece, *span in islice(jobs, 1))
                yield slab
    finally:
        torch.set_num_threads(allowed)  # the threads' setting also changed the process's


def _torch(path: Path, pieces: Mapping[str, Pieces], progress: Progress) -> None:
    state = {}
    for name, piece in pieces.items():
        state[name] = piece.whole()
        progress(piece.nbytes)
    try:
        with open(path, "wb") as file:  # a path's name would be in the file, and its errors are torch's own
            torch.save(state, file)
    except RuntimeError as error:  # about the archive that torch could not end after a failure to write
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


def _shards(folder: Path, pieces: Mapping[str, Pieces], metadata, shard_bytes: int | None, progress: Progress) -> None:
    groups: list[list[str]] = [[]]
    size = 0
    for name, piece in pieces.items():
        if shard_bytes and groups[-1] and size + piece.nbytes > shard_bytes:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += piece.nbytes
    if len(groups) == 1:
        _safetensors(folder / "model.safetensors", pieces, metadata, progress)
        return
    places = {}
    for i, names in enumerate(groups, 1):
        file = f"model-{i:05}-of-{len(groups):05}.safetensors"
        _safetensors(folder / file, {name: pieces[name] for name in names}, metadata, progress)
        places |= dict.fromkeys(names, file)
    total = sum(piece.nbytes for piece in pieces.values())
    index = {"metadata": {"total_size": total, **metadata}, "weight_map": places}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _beside(folder: Path, like: Checkpoint | None, config: Mapping | None) -> None:
    """Copy the files of a folder that are no weights, and write the configuration."""
    if like is not None and like.is_folder:
        for file in sorted(like.path.iterdir()):
            weights = file.name.endswith((".safetensors", ".index.json", *TORCH, ".h5", ".msgpack", ".gguf", ".onnx"))
            if file.is_file() and not weights:
                shutil.copyfile(file, folder / file.name)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")

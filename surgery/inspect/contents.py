"""The contents of a checkpoint: tensors, sections, layers, and how it was made."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from surgery.decomposition import layers
from surgery.depth.sections import sections
from surgery.files import Checkpoint
from surgery.inspect.describe import TreeLine, tree, widths_table
from surgery.lazy import metas
from surgery.names import is_inside
from surgery.width.narrow import Width

PROVENANCE = "layer_surgery"
"""The name in a file's metadata under which JSON says how it was made."""


def contents(checkpoint: Checkpoint, widths: Sequence[Width] = ()) -> dict[str, Any]:
    """Return the facts as plain data for JSON, with coupled widths if known."""
    tensors: dict[str, dict[str, Any]] = {
        name: {"shape": list(entry.shape), "dtype": str(entry.dtype).removeprefix("torch."), "bytes": entry.nbytes}
        for name in checkpoint
        for entry in [checkpoint.pieces(name)]
    }
    shapes, origin = metas(checkpoint), checkpoint.metadata.get(PROVENANCE)
    with suppress(ValueError, RecursionError):  # it may be somebody else's text
        origin = None if origin is None else json.loads(origin)
    content: dict[str, Any] = {
        "path": str(checkpoint.path),
        "files": [str(file) for file in checkpoint.files],
        "bytes": sum(entry["bytes"] for entry in tensors.values()),
        "elements": sum(tensor.numel() for tensor in shapes.values()),
        "metadata": {name: text for name, text in checkpoint.metadata.items() if name != PROVENANCE},
        "made": origin,
        "sections": {section.name: list(section.blocks) for section in sections(shapes)},
        "layers": {layer.name: list(layer.tensors) for layer in layers(shapes)},
        "tensors": tensors,
    }
    return content | ({"widths": [entry._asdict() for entry in widths]} if widths else {})


def contents_text(content: dict[str, Any], widths: Sequence[Width] = ()) -> str:
    """Write the facts as text, with equal blocks of a section once."""
    dtypes = Counter(tensor["dtype"] for tensor in content["tensors"].values())
    kinds = ", ".join(f"{count} {dtype}" for dtype, count in dtypes.most_common())
    many = f" in {len(content['files'])} files" if len(content["files"]) > 1 else ""
    size = f"{content['elements']:,} numbers, {size_text(content['bytes'])}{many}"
    lines = [content["path"], f"{len(content['tensors'])} tensors ({kinds}), {size}"]
    lines += [f"{name} = {value}" for name, value in content["metadata"].items()]
    titles = {
        name: f"{name or '(the model itself)'}  section of {len(blocks)} block{'s' * (len(blocks) != 1)}"
        for name, blocks in content["sections"].items()
    }
    lines += [*_origin(content["made"]), "", "layers", *tree(_lines(content), titles)]
    return "\n".join([*lines, *(["", *widths_table(widths)] if widths else [])])


def _origin(record: Any) -> Iterator[str]:
    """Say how the file was made, in a line for the operation and one for each input."""
    if not isinstance(record, dict):
        yield from [] if record is None else [f"made by {record}"]
        return
    inputs = record.get("inputs", {})
    settings = {name: value for name, value in record.items() if name not in ("do", "inputs")}
    texts = [f"{name}={value}" for name, value in settings.items() if value not in (None, [], False)]
    yield f"made by {record.get('do')}" + (f" ({'; '.join(texts)})" if texts else "")
    for name, source in inputs.items() if isinstance(inputs, dict) else enumerate(inputs):
        yield f"  {name}: {source.get('path') if isinstance(source, dict) else source}"


def _lines(content: dict[str, Any]) -> Iterator[TreeLine]:
    home = {block: name for name, blocks in content["sections"].items() for block in blocks}
    for layer, tensors in content["layers"].items():
        block = next((block for block in home if is_inside(layer, block)), None)
        shapes = ("x".join(map(str, content["tensors"][name]["shape"])) or "scalar" for name in tensors)
        text = ", ".join(f"{name.removeprefix(f'{layer}.')} {shape}" for name, shape in zip(tensors, shapes))
        yield TreeLine(None if block is None else home[block], block, layer, text)


def size_text(count: int) -> str:
    """Write a number of bytes for people.

    >>> size_text(2_500_000), size_text(12)
    ('2.5 MB', '12 B')
    """
    unit, size = next(((u, s) for u, s in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)) if count >= s), ("B", 1))
    return f"{count / size:,.1f} {unit}" if size > 1 else f"{count} B"

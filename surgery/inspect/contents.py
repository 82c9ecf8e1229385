"""The contents of a checkpoint: tensors, sections and layers as their names show them, and how it was made."""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from surgery.decomposition import layers
from surgery.depth.sections import sections
from surgery.files import Checkpoint
from surgery.inspect.describe import Line, tree, widths_table
from surgery.lazy import metas
from surgery.names import is_inside
from surgery.width.narrow import Width

PROVENANCE = "layer_surgery"
"""The name in a file's metadata under which JSON says how it was made."""


def contents(checkpoint: Checkpoint, widths: Sequence[Width] = ()) -> dict[str, Any]:
    """Return the facts as plain data for JSON, with the coupled widths if they are known."""
    tensors: dict[str, dict[str, Any]] = {
        name: {"shape": list(one.shape), "dtype": str(one.dtype).removeprefix("torch."), "bytes": one.nbytes}
        for name in checkpoint
        for one in [checkpoint.pieces(name)]
    }
    shapes, made = metas(checkpoint), checkpoint.metadata.get(PROVENANCE)
    with suppress(ValueError, RecursionError):  # it may be somebody else's text
        made = None if made is None else json.loads(made)
    found: dict[str, Any] = {
        "path": str(checkpoint.path),
        "files": [str(file) for file in checkpoint.files],
        "bytes": sum(one["bytes"] for one in tensors.values()),
        "elements": sum(tensor.numel() for tensor in shapes.values()),
        "metadata": {name: text for name, text in checkpoint.metadata.items() if name != PROVENANCE},
        "made": made,
        "sections": {section.name: list(section.blocks) for section in sections(shapes)},
        "layers": {layer.name: list(layer.tensors) for layer in layers(shapes)},
        "tensors": tensors,
    }
    return found | ({"widths": [one._asdict() for one in widths]} if widths else {})


def contents_text(found: dict[str, Any], widths: Sequence[Width] = ()) -> str:
    """Write the facts as text, with equal blocks of a section once."""
    dtypes = Counter(one["dtype"] for one in found["tensors"].values())
    kinds = ", ".join(f"{count} {dtype}" for dtype, count in dtypes.most_common())
    many = f" in {len(found['files'])} files" if len(found["files"]) > 1 else ""
    size = f"{found['elements']:,} numbers, {size_text(found['bytes'])}{many}"
    lines = [found["path"], f"{len(found['tensors'])} tensors ({kinds}), {size}"]
    lines += [f"{name} = {value}" for name, value in found["metadata"].items()]
    titles = {
        name: f"{name or '(the model itself)'}  section of {len(blocks)} block{'s' * (len(blocks) != 1)}"
        for name, blocks in found["sections"].items()
    }
    lines += [*_origin(found["made"]), "", "layers", *tree(_lines(found), titles)]
    return "\n".join([*lines, *(["", *widths_table(widths)] if widths else [])])


def _origin(made: Any) -> Iterator[str]:
    """Say how the file was made, in a line for the operation and one for each input."""
    if not isinstance(made, dict):
        yield from [] if made is None else [f"made by {made}"]
        return
    inputs = made.get("inputs", {})
    settings = {name: value for name, value in made.items() if name not in ("do", "inputs")}
    texts = [f"{name}={value}" for name, value in settings.items() if value not in (None, [], False)]
    yield f"made by {made.get('do')}" + (f" ({'; '.join(texts)})" if texts else "")
    for name, one in inputs.items() if isinstance(inputs, dict) else enumerate(inputs):
        yield f"  {name}: {one.get('path') if isinstance(one, dict) else one}"


def _lines(found: dict[str, Any]) -> Iterator[Line]:
    home = {block: name for name, blocks in found["sections"].items() for block in blocks}
    for layer, tensors in found["layers"].items():
        block = next((block for block in home if is_inside(layer, block)), None)
        shapes = ("x".join(map(str, found["tensors"][name]["shape"])) or "scalar" for name in tensors)
        text = ", ".join(f"{name.removeprefix(f'{layer}.')} {shape}" for name, shape in zip(tensors, shapes))
        yield Line(None if block is None else home[block], block, layer, text)


def size_text(count: int) -> str:
    """Write a number of bytes for people.

    >>> size_text(2_500_000), size_text(12)
    ('2.5 MB', '12 B')
    """
    unit, size = next(((u, s) for u, s in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)) if count >= s), ("B", 1))
    return f"{count / size:,.1f} {unit}" if size > 1 else f"{count} B"

"""What a checkpoint holds: tensors, sections and layers as their names show them, and how it was made."""

import json
import re
from collections import Counter
from collections.abc import Iterator
from itertools import groupby
from typing import Any

import surgery
from surgery.commands.shared import PROVENANCE, size_text
from surgery.lazy import metas
from surgery.names import is_inside
from surgery.operations.checkpoint import Model


def contents(model: Model) -> dict[str, Any]:
    """The facts as plain data for JSON; of the model, if it is known, also the coupled widths.

    Layers and sections are those that the names of tensors show.
    """
    checkpoint = model.checkpoint
    tensors: dict[str, dict[str, Any]] = {
        name: {"shape": list(one.shape), "dtype": str(one.dtype).removeprefix("torch."), "bytes": one.nbytes}
        for name in checkpoint
        for one in [checkpoint.pieces(name)]
    }
    shapes = metas(checkpoint)
    texts = {name: text for name, text in checkpoint.metadata.items() if name != PROVENANCE}
    found: dict[str, Any] = {
        "path": str(checkpoint.path),
        "files": [str(file) for file in checkpoint.files],
        "bytes": sum(one["bytes"] for one in tensors.values()),
        "elements": sum(tensor.numel() for tensor in shapes.values()),
        "metadata": texts,
        "made": _made(checkpoint.metadata.get(PROVENANCE)),
        "sections": {section.name: list(section.blocks) for section in surgery.sections(shapes)},
        "layers": {layer.name: list(layer.tensors) for layer in surgery.layers(shapes)},
        "tensors": tensors,
    }
    if model.name is not None:
        found["widths"] = [one._asdict() for one in surgery.widths(model.built(), **model.run_arguments())]
    return found


def _made(text: str | None) -> Any:
    try:
        return None if text is None else json.loads(text)
    except (ValueError, RecursionError):
        return text


def contents_text(found: dict[str, Any]) -> str:
    """The facts as text of at most 100 columns, with equal blocks of a section once."""
    dtypes = Counter(one["dtype"] for one in found["tensors"].values())
    kinds = ", ".join(f"{count} {dtype}" for dtype, count in dtypes.most_common())
    many = f" in {len(found['files'])} files" if len(found["files"]) > 1 else ""
    size = f"{found['elements']:,} numbers, {size_text(found['bytes'])}{many}"
    lines = [found["path"], f"{len(found['tensors'])} tensors ({kinds}), {size}"]
    lines += [f"{name} = {value}" for name, value in found["metadata"].items()]
    lines += [*_origin(found["made"]), "", "layers", *_layers(found)]
    if "widths" in found:
        lines += ["", f"coupled widths{'':11}tensors  name, for permute", *_widths(found["widths"])]
    return "\n".join(line if len(line) <= 100 else line[:97] + "..." for line in lines)


def _origin(made: Any) -> Iterator[str]:
    """How the file was made, one line for the operation and one for each input."""
    if not isinstance(made, dict):
        yield from [] if made is None else [f"made by {made}"]
        return
    inputs = made.get("inputs", [])
    if isinstance(inputs, list):
        inputs = {f"model {k}" if len(inputs) > 1 else "model": one for k, one in enumerate(inputs)}
    do = made.get("do") or made.get("method") or "a recipe"  # of an earlier version
    beside = {name: value for name, value in made.items() if name in ("base", "to", "into")}
    left = ("do", "method", "inputs", "recipe", *beside)
    said = "; ".join(
        f"{name}={value}" for name, value in made.items() if name not in left and value not in (None, [], False)
    )
    yield f"made by {do}{f' ({said})' if said else ''}"
    for name, one in [*(inputs.items() if isinstance(inputs, dict) else ()), *beside.items()]:
        yield f"  {name}: {one.get('path') if isinstance(one, dict) else one}"


def _layers(found: dict[str, Any]) -> Iterator[str]:
    """Layers with the shapes of their tensors, those of a section under its name."""
    home = {block: name for name, blocks in found["sections"].items() for block in blocks}

    def block_of(layer: str) -> str | None:
        return next((block for block in home if is_inside(layer, block)), None)

    def shapes(layer: str, tensors: list[str]) -> str:
        names = [name.removeprefix(f"{layer}.") for name in tensors]
        sizes = ["x".join(map(str, found["tensors"][name]["shape"])) or "scalar" for name in tensors]
        return ", ".join(f"{name} {size}" for name, size in zip(names, sizes))

    rows = [(block_of(name), name, shapes(name, tensors)) for name, tensors in found["layers"].items()]
    for section, inside in groupby(rows, key=lambda row: home.get(row[0])):
        if section is None:
            yield from (f"  {name or '(the model itself)'}  {text}" for _, name, text in inside)
            continue
        blocks = [(block, [(n[len(block) :].strip("."), t) for _, n, t in own])
                  for block, own in groupby(inside, key=lambda row: row[0])]  # fmt: skip
        yield f"  {section or '(the model itself)'}  section of {len(blocks)} block{'s' * (len(blocks) != 1)}"
        for _, alike in groupby(blocks, key=lambda one: one[1]):
            same = list(alike)
            first, last = (block.rpartition(".")[2] for block, _ in (same[0], same[-1]))
            yield f"    block {first}" if len(same) == 1 else f"    blocks {first} to {last}, all alike"
            yield from (f"      {name}  {text}" for name, text in same[0][1])


def _widths(widths: list[dict[str, Any]]) -> Iterator[str]:
    """The widths whose positions can be put in another order; those that differ in numbers of blocks only, once."""
    free = [one for one in widths if not one["order"] and one["name"]]
    names = {one["name"]: re.sub(r"(?<![^.])\d+(?=\.)", "*", one["name"], count=1) for one in free}
    counts = Counter((one["size"], len(one["members"]), names[one["name"]], one["grouping"]) for one in free)
    for (size, members, name, grouping), times in counts.items():
        yield f"{size:6}{f'{times} x' if times > 1 else '':>12}{members:14}  {name} {grouping}".rstrip()
    yield f"{len(widths) - len(free):6} other widths have an order of their own: inputs, outputs, windows"

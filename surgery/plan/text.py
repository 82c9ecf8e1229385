"""Plans as text: JSON that can be read again, a summary, and a description of every tensor."""

import json
from collections.abc import Mapping
from typing import Any

import torch

from surgery.errors import SurgeryError
from surgery.plan.fingerprint import fingerprint
from surgery.plan.positions import Entries, Index, Runs, Shapes, Source, is_whole, repeats

_FORMAT, _VERSION = "layer-surgery submodel", 2


def to_json(entries: Entries, shapes: Shapes, edits: tuple, structure: str, dtypes: Mapping[str, torch.dtype]) -> str:
    """The fields of a plan as JSON, with a format version and the fingerprint."""
    return json.dumps(
        {
            "format": _FORMAT,
            "version": _VERSION,
            "fingerprint": fingerprint(shapes),
            "structure": structure,
            "full": {name: list(shape) for name, shape in shapes.items()},
            "dtypes": {name: str(dtype).removeprefix("torch.") for name, dtype in dtypes.items()},
            "entries": {name: [[s.name, s.index] for s in sources] for name, sources in entries.items()},
            "edits": [dict(edit) for edit in edits],
        }
    )


def from_json(text: str) -> dict[str, Any]:
    """The fields of a plan by name; SurgeryError for text of another format, version or fingerprint."""
    try:
        data = json.loads(text)
        if data["format"] != _FORMAT or data["version"] != _VERSION:
            raise SurgeryError(
                f"this is {data['format']!r} version {data['version']!r}: expected {_FORMAT!r} version {_VERSION}; "
                "another version of this package may read it"
            )
        fields: dict[str, Any] = {
            "entries": {name: tuple(_source(*s) for s in sources) for name, sources in data["entries"].items()},
            "shapes": {name: tuple(map(_whole, shape)) for name, shape in data["full"].items()},
            "edits": tuple(dict(edit) for edit in data["edits"]),
            "structure": _string(data["structure"]),
            "dtypes": {name: _dtype(kind) for name, kind in data["dtypes"].items()},
        }
        expected = data["fingerprint"]
    except SurgeryError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise SurgeryError(f"not a submodel plan: {error!r}") from None
    if fingerprint(fields["shapes"]) != expected:
        raise SurgeryError("the plan was changed: its shapes do not match its fingerprint")
    return fields


def summary(entries: Entries, shapes: Shapes, small_shapes: Shapes, edits: tuple) -> str:
    """Three lines: how much of the full model a plan holds, how, and of which model."""
    small, full = (sum(torch.Size(s).numel() for s in every.values()) for every in (small_shapes, shapes))
    kinds = [_kind(sources[0].index, small_shapes[name], shapes[sources[0].name]) for name, sources in entries.items()]
    facts = {kind: kinds.count(kind) for kind in ("narrower", "in another order", "with repeats", "whole")}
    facts["standing for several"] = sum(len(sources) > 1 for sources in entries.values())
    facts["left out"] = len(shapes.keys() - {source.name for sources in entries.values() for source in sources})
    tensors = f"{len(shapes)} tensor{'s' * (len(shapes) != 1)}"
    return (
        f"Submodel: {small:,} of {full:,} elements ({small / max(full, 1):.1%})\n"
        f"  {tensors}: {', '.join(f'{count} {what}' for what, count in facts.items() if count) or 'none'}; "
        f"{len(edits)} edits of modules\n"
        f"  of the full model {fingerprint(shapes)}; .describe() lists everything"
    )


def describe(entries: Entries, shapes: Shapes, small_shapes: Shapes, edits: tuple) -> str:
    """Every tensor of the small model with its place in the full one, then the edits, one line each."""
    small, full = (sum(torch.Size(s).numel() for s in every.values()) for every in (small_shapes, shapes))
    lines = [f"Submodel of {fingerprint(shapes)}: {small:,} of {full:,} elements, {len(edits)} edits"]
    width = max((len(name) for name in entries), default=0)
    for name, (first, *others) in entries.items():
        where = first.name if first.name != name else ""
        more = [s.name + (_index_text(s.index) if s.index != first.index else "") for s in others]
        text = f"{where}{_index_text(first.index)}" + (f" and {', '.join(more)}" if more else "")
        lines.append(f"  {name:{width}}  {list(small_shapes[name])!s:18} = {text}")
    lines += [f"  {dict(edit)}" for edit in edits]
    return "\n".join(lines)


def _kind(index: Index, small: tuple[int, ...], full: tuple[int, ...]) -> str:
    if is_whole(index):
        return "whole"
    if repeats(index):
        return "with repeats"
    return "in another order" if small == full else "narrower"


def _index_text(index: Index) -> str:
    return f"[{', '.join(map(_runs_text, index))}]"


def _runs_text(runs: Runs | None) -> str:
    if runs is None:
        return ":"
    text = [f"{start}:{stop}" for start, stop in runs]
    return "|".join(text if len(text) <= 3 else [*text[:2], "...", text[-1]])


def _source(name: str, index: list) -> Source:
    ranges = (None if runs is None else tuple((_whole(a), _whole(b)) for a, b in runs) for runs in index)
    return Source(_string(name), tuple(ranges))


def _whole(value: Any) -> int:
    if type(value) is not int:
        raise TypeError(f"{value!r} is not a whole number")
    return value


def _string(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a string")
    return value


def _dtype(name: Any) -> torch.dtype:
    dtype = getattr(torch, _string(name), None)
    if not isinstance(dtype, torch.dtype):
        raise SurgeryError(f"the plan names the dtype {name!r}, which this version of torch does not have: update it")
    return dtype

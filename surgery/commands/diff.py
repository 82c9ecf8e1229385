"""`python -m surgery diff A B`."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

if TYPE_CHECKING:
    from surgery.lazy import Pieces


@dataclass(frozen=True)
class Diff:
    """Say which tensors of two checkpoints differ, and by how much. The exit code is 1 if any differs."""

    a: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="A")]
    """a .safetensors or .pt file, or a folder"""
    b: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="B")]
    """another one"""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """print one JSON object instead"""

    def run(self) -> int:
        """Carry out the command."""
        from surgery.files import open_state

        a, b = open_state(self.a), open_state(self.b)
        both = [name for name in a if name in b]
        only = {"a": [name for name in a if name not in b], "b": [name for name in b if name not in a]}
        rows = [{"name": name, **compared(a.pieces(name), b.pieces(name))} for name in both]
        differ = [row for row in rows if not row["equal"]]
        if self.json:
            print(json.dumps({"only": only, "differ": differ, "equal": len(rows) - len(differ)}))
        else:
            print(_text(only, differ, len(rows)))
        return int(bool(differ or only["a"] or only["b"]))


def compared(a: "Pieces", b: "Pieces") -> dict[str, Any]:
    """How two tensors differ: in shape and dtype, in how many elements, by how much at most, and ||a - b|| / ||a||.

    Elements that are NaN in both are equal.
    """
    import torch

    found: dict[str, Any] = {"equal": False}
    if a.shape != b.shape or a.dtype != b.dtype:
        found["shapes"] = [list(a.shape), list(b.shape)]
        found["dtypes"] = [str(a.dtype).removeprefix("torch."), str(b.dtype).removeprefix("torch.")]
    if a.shape != b.shape:
        return found
    count, most, apart, size = 0, 0.0, 0.0, 0.0
    for x, y in zip(a.slabs(), b.slabs()):
        dtype = torch.complex128 if x.is_complex() or y.is_complex() else torch.float64
        x, y = x.to(dtype), y.to(dtype)
        unlike = (x != y) & ~(x.isnan() & y.isnan())
        if here := int(unlike.sum()):
            count += here
            gap = torch.where(unlike, x - y, 0).abs().nan_to_num(torch.inf)
            most, apart = max(most, gap.max().item()), apart + gap.square().sum().item()
        size += x.abs().nan_to_num(0).square().sum().item()
    found |= {"elements": a.size, "different": count, "largest": most}
    found["relative"] = (apart / size) ** 0.5 if size else (0.0 if not apart else float("inf"))
    found["equal"] = count == 0 and a.dtype == b.dtype
    return found


def _text(only: dict[str, list[str]], differ: list[dict[str, Any]], both: int) -> str:
    lines = [f"only in {side}: {name}" for side, names in (("A", only["a"]), ("B", only["b"])) for name in names]
    width = max([len(row["name"]) for row in differ], default=0)
    for row in sorted(differ, key=lambda row: -row.get("relative", float("inf"))):
        what = []
        if "shapes" in row:
            (a, b), (one, two) = row["shapes"], row["dtypes"]
            what.append(f"{one} {a} and {two} {b}")
        if "different" in row:
            what.append(f"{row['different']:,} of {row['elements']:,} elements differ, by at most {row['largest']:.3g}")
            what.append(f"relative distance {row['relative']:.3g}")
        lines.append(f"{row['name']:{width}}  {'; '.join(what)}")
    return "\n".join([*lines, f"{both - len(differ)} of {both} tensors with the same name are equal"])

"""A plan says how a smaller model lies inside a full one, as data.

HeteroFL, FlexiFed, NeFL, FedRolex and FedFA differ only in their plans: which tensors of the full model a client holds
(depth), which positions along each axis (width), and which deeper blocks a client's last block stands for (grafting).
`narrow`, `corner`, `graft` and `ungraft` make plans; this file applies them.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from surgery.deprecated import formerly
from surgery.edits import apply_edit, copy_sharing, replace_tensors
from surgery.errors import SurgeryError
from surgery.states import Stack, State, check_same, owners, state

Runs: TypeAlias = tuple[tuple[int, int], ...]  # ascending half-open ranges [start, stop) of one axis
Index: TypeAlias = tuple[Runs | None, ...]  # one entry for each axis; None is the whole axis
Edit: TypeAlias = Mapping[str, Any]  # what `surgery.edits` does to a module, as a JSON object

_FORMAT, _VERSION = "layer-surgery submodel", 1


class Source(NamedTuple):
    """A tensor of the full model, and positions along each of its axes."""

    name: str
    index: Index


@dataclass(frozen=True, repr=False)
class Submodel:
    """Where each tensor of a small model lies in a full one.

    Attributes:
        entries: by state name of the small model its sources in the full one. `extract` reads from the first;
            `embed` writes to all (a last block that stands for deeper blocks has several).
        shapes: the full model's shapes by state name. Their hash is the fingerprint.
        edits: what else turns a copy of the full module into the small one: attributes such as `num_heads`, dropped
            blocks, sliced tensors that are not in the state. `build` carries them out.
        structure: a hash of the full module's classes and settings, for `build`; "" if there was no module.

    `extract(embed(x)) == x` bit for bit, and `embed(extract(s))` agrees with s wherever its mask is True, unless one
    tensor stands for several that differ in s.

    >>> plan = Submodel({"w": (Source("w", (((0, 2),), None)),)}, {"w": (3, 2)})
    >>> plan.extract({"w": torch.tensor([[1, 2], [3, 4], [5, 6]])})["w"].tolist()
    [[1, 2], [3, 4]]
    >>> full, mask = plan.embed({"w": torch.tensor([[7, 8], [9, 9]])})
    >>> full["w"].tolist(), mask["w"][:, 0].tolist()
    ([[7, 8], [9, 9], [0, 0]], [True, True, False])
    """

    entries: Mapping[str, tuple[Source, ...]]
    shapes: Mapping[str, tuple[int, ...]]
    edits: tuple[Edit, ...] = ()
    structure: str = ""

    def __post_init__(self):
        edits = json.loads(json.dumps([dict(edit) for edit in self.edits]))  # as they are when read from a file
        object.__setattr__(self, "edits", tuple(edits))
        taken: dict[str, str] = {}
        for name, sources in self.entries.items():
            if not sources:
                raise SurgeryError(f"tensor {name!r} of the small model has no source in the full one")
            sizes = set()
            for source in sources:
                if source.name not in self.shapes:
                    raise SurgeryError(
                        f"tensor {name!r} is read from {source.name!r}: the full model has no such tensor"
                    )
                if source.name in taken:
                    raise SurgeryError(f"{name!r} and {taken[source.name]!r} are both written to {source.name!r}")
                taken[source.name] = name
                sizes.add(_size(source, self.shapes[source.name]))
            if len(sizes) > 1:
                raise SurgeryError(f"the sources of {name!r} have different shapes {sorted(sizes)}")

    @cached_property
    def small_shapes(self) -> dict[str, tuple[int, ...]]:
        """The small model's shapes by state name."""
        return {name: _size(s[0], self.shapes[s[0].name]) for name, s in self.entries.items()}

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the names and shapes of the full model's tensors."""
        return fingerprint(self.shapes)

    def extract(self, full: Mapping[str, Tensor]) -> State | Stack:
        """Read the small model's state from the full one's, or a stack from a stack.

        The result is a copy with the same dtypes, devices and memory formats, through which gradients flow.
        Raises SurgeryError if the tensors are not those of the plan's full model.
        """
        lead = _check(full, self.shapes, "the full model")
        return {name: _take(full[s[0].name], s[0].index, lead) for name, s in self.entries.items()}

    @formerly("self small into")
    def embed(
        self, small: Mapping[str, Tensor], *, into: Mapping[str, Tensor] | None = None
    ) -> tuple[State | Stack, dict[str, Tensor]]:
        """Write the small model's state (or a stack) back to where it came from.

        Args:
            small: as `extract` gives it.
            into: a full state (or stack), whose values are kept where the small model has none; zeros if it is not
                given. The result has its dtypes.

        Returns:
            The full state (or stack), and boolean tensors of the full shapes [*S], True where values were written.
        """
        lead = _check(small, self.small_shapes, "the small model")
        origin = {source.name: (name, source) for name, sources in self.entries.items() for source in sources}
        if into is not None and _check(into, self.shapes, "`into`") != lead:
            raise SurgeryError("the small model and `into` must both be states or both be stacks")
        kinds = {name.rpartition(".")[2]: tensor for name, tensor in reversed(small.items())}
        values, mask = {}, {}
        for target, shape in self.shapes.items():
            if target not in origin:  # a dropped block's tensor gets the dtype of one with the same last name
                like = kinds.get(target.rpartition(".")[2], next(iter(small.values()), torch.empty(0)))
                batch = like.shape[:lead]
                values[target] = _zeros(like, (*batch, *shape)) if into is None else into[target].clone()
                mask[target] = torch.zeros(shape, dtype=torch.bool, device=values[target].device)
                continue
            name, source = origin[target]
            tensor = small[name]
            if all(runs is None for runs in source.index):
                values[target] = tensor.clone() if into is None else tensor.to(into[target], copy=True)
                mask[target] = torch.ones(shape, dtype=torch.bool, device=tensor.device)
                continue
            whole = (*tensor.shape[:lead], *shape)
            values[target] = _zeros(tensor, whole) if into is None else into[target].clone()
            for part, piece in pieces(values[target], tensor, source.index, lead):
                part.copy_(piece)
            mask[target] = torch.zeros(shape, dtype=torch.bool, device=tensor.device)
            for part, _ in pieces(mask[target], mask[target].new_empty(self.small_shapes[name]), source.index):
                part.fill_(True)
        return values, mask

    def compose(self, inner: "Submodel") -> "Submodel":
        """The plan from this plan's full model to `inner`'s small one; `inner`'s full model must be this plan's small
        one.

        >>> half = Submodel({"w": (Source("w", (((0, 4),),)),)}, {"w": (8,)})
        >>> quarter = Submodel({"w": (Source("w", (((1, 3),),)),)}, {"w": (4,)})
        >>> half.compose(quarter).entries["w"]
        (Source(name='w', index=(((1, 3),),)),)
        """
        if fingerprint(self.small_shapes) != inner.fingerprint:
            raise SurgeryError(
                "the plans do not fit: the inner plan's full model must be the outer plan's small model, and their "
                f"tensors differ ({_first_difference(self.small_shapes, inner.shapes)})"
            )
        entries = {
            name: tuple(
                Source(outer.name, tuple(map(_chain, outer.index, source.index)))
                for source in sources
                for outer in self.entries[source.name]
            )
            for name, sources in inner.entries.items()
        }
        return Submodel(entries, self.shapes, (*self.edits, *inner.edits), self.structure)

    def build(self, full: nn.Module) -> nn.Module:
        """The small model as a module with the weights that `extract` reads, made from a full one.

        `full` is the model that the plan was made from, or another one from the same constructor, on any device
        (including meta); it is not changed. No forward pass is run. To restore a saved small model, load its state
        afterwards: `load(plan.build(make_full_model()), safetensors.torch.load_file(path))`.
        """
        values = self.extract(state(full))
        if self.structure and structure(full) != self.structure:
            raise SurgeryError(
                f"this {type(full).__name__} has the tensors of the plan's full model, but modules of other classes or "
                "settings (heads, groups, strides, ...): give one from the same constructor"
            )
        small, originals = copy_sharing(full)
        for edit in self.edits:
            apply_edit(small, edit)
        names = {name: tensor for _, _, own in owners(small) for name, tensor in own.items()}
        check_same(
            {n: t.new_empty(self.small_shapes.get(n, ()), device="meta") for n, t in names.items()},
            {n: t.to("meta") for n, t in values.items()},
            "the edited module",
            "the plan",
        )
        replace_tensors(small, {id(tensor): values[name] for name, tensor in names.items()}, originals)
        return small

    def to_json(self) -> str:
        """The plan as JSON, with a format version and the fingerprint."""
        return json.dumps(
            {
                "format": _FORMAT,
                "version": _VERSION,
                "fingerprint": self.fingerprint,
                "structure": self.structure,
                "full": {name: list(shape) for name, shape in self.shapes.items()},
                "entries": {name: [[s.name, s.index] for s in sources] for name, sources in self.entries.items()},
                "edits": [dict(edit) for edit in self.edits],
            }
        )

    @classmethod
    def from_json(cls, text: str) -> "Submodel":
        """The inverse of `to_json`; SurgeryError for text of another format, version or fingerprint."""
        try:
            data = json.loads(text)
            if data["format"] != _FORMAT or data["version"] != _VERSION:
                raise SurgeryError(
                    f"this is {data['format']!r} version {data['version']!r}: expected {_FORMAT!r} version {_VERSION}"
                )
            plan = cls(
                {name: tuple(_source(*s) for s in sources) for name, sources in data["entries"].items()},
                {name: tuple(shape) for name, shape in data["full"].items()},
                tuple(data["edits"]),
                data["structure"],
            )
            expected = data["fingerprint"]
        except SurgeryError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise SurgeryError(f"not a submodel plan: {error!r}") from None
        if plan.fingerprint != expected:
            raise SurgeryError("the plan was changed: its shapes do not match its fingerprint")
        return plan

    def save(self, path: str | os.PathLike) -> None:
        """Write the plan as JSON; after a crash there is the old file or the new one, never a part of it."""
        path = Path(path)
        part = path.with_name(f".{path.name}.{os.getpid()}")
        part.write_text(self.to_json())
        part.replace(path)

    @classmethod
    def load(cls, path: str | os.PathLike) -> "Submodel":
        """Read a plan that `save` wrote."""
        return cls.from_json(Path(path).read_text(errors="replace"))

    def __repr__(self) -> str:
        small, full = (sum(_product(s) for s in shapes.values()) for shapes in (self.small_shapes, self.shapes))
        whole = sum(all(runs is None for runs in sources[0].index) for sources in self.entries.values())
        several = sum(len(sources) > 1 for sources in self.entries.values())
        held = sum(map(len, self.entries.values()))
        facts = {
            "narrower": len(self.entries) - whole,
            "whole": whole,
            "standing for several": several,
            "left out": len(self.shapes) - held,
        }
        tensors = f"{len(self.shapes)} tensor{'s' * (len(self.shapes) != 1)}"
        return (
            f"Submodel: {small:,} of {full:,} elements ({small / max(full, 1):.1%})\n"
            f"  {tensors}: {', '.join(f'{count} {what}' for what, count in facts.items() if count) or 'none'}; "
            f"{len(self.edits)} edits of modules\n"
            f"  of the full model {self.fingerprint}; .describe() lists everything"
        )

    def describe(self) -> str:
        """Every tensor of the small model with its place in the full one, then the edits, one line each.

        >>> half = Submodel({"w": (Source("w", (((0, 2),), None)),)}, {"w": (4, 2)})
        >>> print(half.describe())
        Submodel of 2d876cd494474ac0: 4 of 8 elements, 0 edits
          w  [2, 2]             = [0:2, :]
        >>> half
        Submodel: 4 of 8 elements (50.0%)
          1 tensor: 1 narrower; 0 edits of modules
          of the full model 2d876cd494474ac0; .describe() lists everything
        """
        small, full = (sum(_product(s) for s in shapes.values()) for shapes in (self.small_shapes, self.shapes))
        lines = [f"Submodel of {self.fingerprint}: {small:,} of {full:,} elements, {len(self.edits)} edits"]
        width = max((len(name) for name in self.entries), default=0)
        for name, sources in self.entries.items():
            index = ", ".join(_index_text(runs) for runs in sources[0].index)
            where = sources[0].name if sources[0].name != name else ""
            more = f" and {', '.join(s.name for s in sources[1:])}" if len(sources) > 1 else ""
            lines.append(f"  {name:{width}}  {list(self.small_shapes[name])!s:18} = {where}[{index}]{more}")
        lines += [f"  {dict(edit)}" for edit in self.edits]
        return "\n".join(lines)


def fingerprint(shapes: Mapping[str, tuple[int, ...]]) -> str:
    """A hash of the names and shapes of a model's tensors, whatever their order.

    >>> fingerprint({"a": (1,), "b": (2,)}) == fingerprint({"b": (2,), "a": (1,)})
    True
    """
    text = json.dumps(sorted((name, list(shape)) for name, shape in shapes.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def structure(model: nn.Module) -> str:
    """A hash of a model's modules: their classes, the settings that they print, and numbers of heads and groups.

    >>> structure(nn.Conv2d(1, 2, 3)) == structure(nn.Conv2d(1, 2, 3, stride=2))
    False
    """
    found = []
    for name, module in model.named_modules():
        if "drop" not in type(module).__name__.lower():  # dropout rates may differ
            counts = {k: v for k, v in vars(module).items() if isinstance(v, int) and re.search("head|group", k)}
            found.append([name, type(module).__qualname__, module.extra_repr(), counts])
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()[:16]


def pieces(full: Tensor, small: Tensor, index: Index, lead: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs of views (part of `full`, part of `small`) that together pair every element of `small` with its place.

    With views, writing, adding and filling need no index tensors and are as fast as a copy.
    """
    many = [axis for axis, runs in enumerate(index) if runs is not None and len(runs) > 1]
    for axis, runs in enumerate(index):
        if runs is not None and len(runs) == 1:
            full = full.narrow(axis + lead, runs[0][0], runs[0][1] - runs[0][0])
    if not many:
        yield full, small
        return
    axis, offset = many[0], 0
    rest = tuple(None if i == axis or (runs is not None and len(runs) == 1) else runs for i, runs in enumerate(index))
    for start, stop in index[axis]:
        length = stop - start
        part = full.narrow(axis + lead, start, length)
        yield from pieces(part, small.narrow(axis + lead, offset, length), rest, lead)
        offset += length


def _take(full: Tensor, index: Index, lead: int) -> Tensor:
    result = full
    for axis, runs in enumerate(index):
        if runs is not None and len(runs) == 1:
            result = result.narrow(axis + lead, runs[0][0], runs[0][1] - runs[0][0])
        elif runs is not None:
            parts = [result.narrow(axis + lead, start, stop - start) for start, stop in runs]
            result = torch.cat(parts, axis + lead)  # index_select would not keep the memory format
    return result.clone()


def _zeros(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    zeros = like.new_zeros(shape)
    if (
        zeros.ndim == like.ndim == 4
        and like.is_contiguous(memory_format=torch.channels_last)
        and like.shape[2:].numel() > 1
    ):
        zeros = zeros.to(memory_format=torch.channels_last)
    return zeros


def _size(source: Source, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape that a source reads; SurgeryError if its index does not fit."""
    if len(source.index) != len(shape):
        raise SurgeryError(f"the index of {source.name!r} has {len(source.index)} axes, the tensor {len(shape)}")
    sizes = []
    for runs, size in zip(source.index, shape):
        ends = (0, *(end for run in runs for end in run), size) if runs is not None else (0, size)
        if list(ends) != sorted(ends) or (runs is not None and (not runs or any(a >= b for a, b in runs))):
            raise SurgeryError(
                f"{list(runs)} are not ascending ranges in an axis of {size} positions of {source.name!r}"
            )
        sizes.append(size if runs is None else sum(stop - start for start, stop in runs))
    return tuple(sizes)


def _check(values: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], what: str) -> int:
    """0 for a state of these shapes, 1 for a stack of them; SurgeryError for anything else."""
    meta = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    lead = {values[name].ndim - len(shape) for name, shape in shapes.items() if name in values}
    sizes = {values[name].shape[0] for name in shapes if name in values and values[name].ndim}
    stacked = lead == {1} and len(sizes) == 1
    given = {name: torch.empty(tensor.shape[stacked:], device="meta") for name, tensor in values.items()}
    check_same(meta, given, f"{what} of the plan", "what was given")
    return int(stacked)


def _chain(outer: Runs | None, inner: Runs | None) -> Runs | None:
    """The positions `inner` of the positions `outer`."""
    if outer is None or inner is None:
        return inner if outer is None else outer
    positions = [p for start, stop in outer for p in range(start, stop)]
    return as_runs([positions[p] for start, stop in inner for p in range(start, stop)])


def as_runs(positions: list[int]) -> Runs:
    """Ascending positions as ranges.

    >>> as_runs([0, 1, 2, 5, 6])
    ((0, 3), (5, 7))
    """
    return merged((p, p + 1) for p in positions)


def merged(runs: Iterable[tuple[int, int]]) -> Runs:
    """Ascending ranges; those that touch become one.

    >>> merged([(0, 2), (2, 3), (5, 6)])
    ((0, 3), (5, 6))
    """
    result: list[tuple[int, int]] = []
    for start, stop in runs:
        if result and result[-1][1] == start:
            start = result.pop()[0]
        result.append((start, stop))
    return tuple(result)


def _source(name: str, index: list) -> Source:
    return Source(name, tuple(None if runs is None else tuple((int(a), int(b)) for a, b in runs) for runs in index))


def _index_text(runs: Runs | None) -> str:
    if runs is None:
        return ":"
    text = [f"{start}:{stop}" for start, stop in runs]
    return "|".join(text if len(text) <= 3 else [*text[:2], "...", text[-1]])


def _first_difference(a: Mapping[str, tuple[int, ...]], b: Mapping[str, tuple[int, ...]]) -> str:
    name = next(name for name in (*a, *b) if a.get(name) != b.get(name))
    return f"{name!r} is {a.get(name, 'missing')} and {b.get(name, 'missing')}"


def _product(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()

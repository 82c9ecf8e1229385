"""Plans: where the tensors of a small model lie in a full one, as data.

HeteroFL, FlexiFed, NeFL, FedRolex and FedFA differ only in their plans. A plan selects the tensors of the full model
that a client holds (depth) and the positions along each axis (width). With grafting, it also says which deeper blocks
a client's last block stands for. `narrow`, `graft` and `ungraft` make plans; this file applies them.
"""

import copy
import json
import math
import operator
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from html import escape
from itertools import combinations
from pathlib import Path
from typing import Any, TypeAlias, overload

import torch
from torch import Tensor, nn

from surgery.copying import clone, copy_sharing, like, renew_computed, replace_tensors
from surgery.errors import SurgeryError, about, first_line
from surgery.files.whole import replacing
from surgery.lazy import LazyState, Pieces, metas, pieces_of
from surgery.plan.edits import KEEP_NAMES, apply_edit
from surgery.plan.fingerprint import fingerprint, has_structure
from surgery.plan.positions import (
    Index,
    Source,
    as_index,
    chain,
    is_whole,
    overlapping,
    put,
    repeats,
    shape_at,
    take,
)
from surgery.states import Stack, State, as_state, check_same_shapes, shapes_of, state, tensors

_FORMAT, _VERSION = "layer-surgery submodel", 2
_ROWS = 12  # at most, of a printed plan
Edit: TypeAlias = Mapping[str, Any]  # a JSON object: a change of a module, see `surgery.plan.edits`


@dataclass(frozen=True, repr=False)
class Plan:
    """A small model's tensors, and the places of each in a full one.

    The index of an axis is a tuple of ranges (start, stop), in any order; `as_runs([3, 1, 2])` makes it from positions.
    Position j of the small model is read from the j-th position in the ranges. So an index selects positions, permutes
    them (each position once) or widens (positions several times; the "small" model is then the wider one).

    A small tensor may have several sources: several tensors of the full model, or parts of one. Several small tensors
    may share a tensor of the full model, such as query, key and value in one matrix. Sources must not overlap: each
    element of the full model belongs to at most one element of the small model.

    `extract(embed(x)) == x` and, wherever the mask is True, `embed(extract(s)) == s`, both bit for bit, except:

    - If a tensor has several sources, `extract` reads the first and `embed` writes all. `embed(extract(s))` then equals
      s only if the sources are equal in s.
    - If several positions of the small model read one position, `embed` writes the value of the first, and
      `surgery.average` and `surgery.match_norms` use it. Values of the other copies are lost: `extract(embed(x)) == x`
      only if all copies are equal in x.

    Attributes:
        entries: from names of the small model's tensors to their sources in the full model. `extract` reads the first
            source, `embed` writes to all of them (a last block that stands for deeper blocks has several).
        shapes: the full model's shapes by state name. Their hash is the fingerprint.
        edits: the other changes that turn a copy of the full module into the small one: attributes such as `num_heads`,
            dropped blocks, sliced tensors that are not in the state. `build` applies them.
        structure: a hash of the full module's classes and settings, for `build`; "" if there was no module.
        dtypes: the full model's dtypes by state name, where they are known, for `embed`.

    >>> plan = Plan({"w": (Source("w", (((0, 2),), None)),)}, {"w": (3, 2)})
    >>> plan.extract({"w": torch.tensor([[1, 2], [3, 4], [5, 6]])})["w"].tolist()
    [[1, 2], [3, 4]]
    >>> full, mask = plan.embed({"w": torch.tensor([[7, 8], [9, 9]])})
    >>> full["w"].tolist(), mask["w"][:, 0].tolist()
    ([[7, 8], [9, 9], [0, 0]], [True, True, False])
    >>> from surgery.plan import as_runs
    >>> wider = Plan({"w": (Source("w", (as_runs([0, 1, 2, 1]),)),)}, {"w": (3,)})
    >>> wider.extract({"w": torch.tensor([5, 6, 7])})["w"].tolist()
    [5, 6, 7, 6]
    """

    entries: Mapping[str, tuple[Source, ...]]
    shapes: Mapping[str, tuple[int, ...]]
    edits: tuple[Edit, ...] = ()
    structure: str = ""
    dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)

    def __post_init__(self):
        self._normalise()
        for name, sources in self.entries.items():
            if not sources:
                raise SurgeryError(f"tensor {name!r} of the small model has no source in the full one", code="plan")
            sizes = set()
            for source in sources:
                if source.name not in self.shapes:
                    raise SurgeryError(f"{name!r} is read from {source.name!r}, which is not there", code="plan")
                sizes.add(shape_at(source.name, source.index, self.shapes[source.name]))
            if len(sizes) > 1:
                raise SurgeryError(f"the sources of {name!r} have different shapes {sorted(sizes)}", code="plan")
        targets = [source.name for sources in self.entries.values() for source in sources]
        for target, parts in self.parts.items() if len(set(targets)) < len(targets) else ():
            for (a, first), (b, second) in combinations(parts, 2):
                if overlapping(first, second, self.shapes[target]):
                    raise SurgeryError(f"{b!r} and {a!r} are written to one part of {target!r}", code="plan")
        for name, dtype in self.dtypes.items():
            if name not in self.shapes or not isinstance(dtype, torch.dtype):
                raise SurgeryError(f"dtypes hold {dtype!r} for {name!r}: give torch's dtypes by full name", code="plan")

    def _normalise(self) -> None:
        """Convert the fields to the types that they have after reading a file."""
        try:
            fields: dict[str, Any] = {
                "entries": {
                    n: tuple(Source(s.name, as_index(s.index)) for s in sources) for n, sources in self.entries.items()
                },
                "shapes": {name: tuple(map(operator.index, shape)) for name, shape in self.shapes.items()},
                "edits": _plain(self.edits),
                "dtypes": dict(self.dtypes),
            }
        except (AttributeError, TypeError, ValueError, RecursionError) as error:
            raise SurgeryError(
                "a Plan takes entries {small name: (Source(full name, index), ...)}, where an index has for each "
                f"axis None or ranges ((start, stop), ...), then shapes {{full name: shape}}: {error}",
                code="plan",
            ) from None
        for name, shape in fields["shapes"].items():
            if min(shape, default=0) < 0 or math.prod(shape) >= 2**60:
                raise SurgeryError(f"{name!r} of the full model cannot have the shape {shape}", code="plan")
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    def with_edits(self, edits: Sequence[Edit]) -> "Plan":
        """Return a copy with other edits."""
        other = copy.copy(self)
        object.__setattr__(other, "edits", _plain(edits))
        return other

    @cached_property
    def small_shapes(self) -> dict[str, tuple[int, ...]]:
        """The small model's shapes by state name."""
        return {name: shape_at(s[0].name, s[0].index, self.shapes[s[0].name]) for name, s in self.entries.items()}

    @cached_property
    def parts(self) -> dict[str, list[tuple[str, Index]]]:
        """The small tensors in each tensor of the full model, with their indices.

        The inverse of `entries`.
        """
        parts: dict[str, list[tuple[str, Index]]] = {target: [] for target in self.shapes}
        for name, sources in self.entries.items():
            for source in sources:
                parts[source.name].append((name, source.index))
        return parts

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the names and shapes of the full model's tensors."""
        return fingerprint(self.shapes)

    @overload
    def extract(self, full: LazyState) -> LazyState: ...  # type: ignore[overload-overlap]
    @overload
    def extract(self, full: Mapping[str, Tensor] | nn.Module) -> State | Stack: ...
    def extract(self, full):
        """Read the small model's state from the full one's, or a stack from a stack.

        The result is a copy with the same dtypes, devices and memory formats; gradients flow through it. From a lazy
        state the result is lazy, and reads one tensor of the full model at a time.
        Raises SurgeryError if the tensors have other names or shapes than the plan's full model.
        """
        full, lead = _check_fits(full, self.shapes, "the full model")

        def read(name: str) -> Tensor:
            first, *_ = self.entries[name]
            return take(full[first.name], first.index, lead)

        if not isinstance(full, LazyState):
            return {name: read(name) for name in self.entries}
        small = {}
        for name, (first, *_) in self.entries.items():
            source = full.pieces(first.name)
            part = Pieces.from_function(self.small_shapes[name], source.dtype, partial(read, name), source.device)
            small[name] = source if is_whole(first.index) else part
        return LazyState(small)

    @overload
    def embed(  # type: ignore[overload-overlap]
        self, small: LazyState, *, into: Mapping[str, Tensor] | nn.Module | None = None
    ) -> tuple[LazyState, LazyState]: ...
    @overload
    def embed(
        self, small: Mapping[str, Tensor] | nn.Module, *, into: Mapping[str, Tensor] | nn.Module | None = None
    ) -> tuple[State | Stack, dict[str, Tensor]]: ...
    def embed(self, small, *, into=None):
        """Write the small model's state (or a stack) to its places in the full model.

        The inverse of `extract`.

        Args:
            small: as `extract` returns it.
            into: a full state (or stack) with the values and dtypes of the result wherever the small model has none.
                Without it, these values are zeros. A tensor then has the dtype of the small tensors in it. A tensor
                that the small model lacks has the dtype of small tensors with the same dtype in the plan, so that half
                precision stays half precision. If the plan does not know its dtype, a small tensor with the same last
                name gives it.

        Returns:
            The full state (or stack), and boolean tensors of the full shapes [*S], True where values were written.
            Both are lazy if `small` or `into` is lazy.
        """
        small, lead = _check_fits(small, self.small_shapes, "the small model")
        if into is not None:
            into, lead_of_into = _check_fits(into, self.shapes, "`into`")
            if lead_of_into != lead:
                raise SurgeryError("the small model and `into` must both be states or both be stacks", code="argument")
        if not isinstance(small, LazyState) and not isinstance(into, LazyState):
            templates = {} if into is not None else self._templates_of_absent(small)
            pairs = {target: self._embed_tensor(target, small, into, lead, templates) for target in self.shapes}
            return {t: values for t, (values, _) in pairs.items()}, {t: mask for t, (_, mask) in pairs.items()}
        # Embedding tensors without data first gives the dtypes, and raises the errors.
        known, _ = self.embed(metas(small), into=None if into is None else metas(into))

        def write(target: str, values_or_mask: int) -> Tensor:
            zeros = {target: torch.zeros(self.shapes[target], dtype=known[target].dtype)} if into is None else into
            return self._embed_tensor(target, small, zeros, 0, {})[values_or_mask]

        full, mask = {}, {}
        for target, shape in self.shapes.items():
            full[target] = Pieces.from_function(shape, known[target].dtype, partial(write, target, 0))
            mask[target] = Pieces.from_function(shape, torch.bool, partial(write, target, 1))
            if into is None and len(parts := self.parts[target]) == 1 and is_whole(parts[0][1]):
                full[target] = pieces_of(small, parts[0][0])
        return LazyState(full), LazyState(mask)

    def _embed_tensor(
        self,
        target: str,
        small: Mapping[str, Tensor],
        into: Mapping[str, Tensor] | None,
        lead: int,
        templates: Mapping[str, Tensor],
    ) -> tuple[Tensor, Tensor]:
        """Return one tensor of the full model and its mask, as `embed` returns them."""
        parts, shape = self.parts[target], self.shapes[target]
        parts_by_name = {name: small[name] for name, _ in parts}
        template = parts_by_name[parts[0][0]] if parts else templates.get(target)
        if into is None and (odd := [name for name, tensor in parts_by_name.items() if tensor.dtype != template.dtype]):
            raise SurgeryError(
                f"{target!r} is made of {parts[0][0]!r} ({template.dtype}) and {odd[0]!r} "
                f"({parts_by_name[odd[0]].dtype}): give a full state as `into`, whose dtype is taken",
                code="mismatch",
            )
        for name, tensor in parts_by_name.items() if into is not None else ():
            if not torch.can_cast(tensor.dtype, into[target].dtype):
                raise SurgeryError(
                    f"{name!r} is {tensor.dtype}, which {target!r} of `into` ({into[target].dtype}) loses",
                    code="mismatch",
                )
        if len(parts) == 1 and is_whole(parts[0][1]):
            values = template.clone() if into is None else template.to(into[target], copy=True)
            return values, torch.ones(shape, dtype=torch.bool, device=template.device)
        values = _zeros(template, (*template.shape[:lead], *shape)) if into is None else into[target].clone()
        mask = torch.zeros(shape, dtype=torch.bool, device=template.device if parts else values.device)
        for name, index in parts:
            put(values, index, parts_by_name[name], lead)
            put(mask, index, mask.new_ones(parts_by_name[name].shape[lead:]))
        return values, mask

    def _templates_of_absent(self, small: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a template for each tensor that the small model has no part of.

        The template has the tensor's dtype, device and leading axis.
        """
        templates: dict[Any, Tensor] = {}  # by last name, by last name and dtype in the plan, and by dtype in the plan
        for name, tensor in reversed(list(small.items())):
            dtype, last = self.dtypes.get(self.entries[name][0].name), name.rpartition(".")[2]
            templates |= {last: tensor, (last, dtype): tensor, dtype: tensor}
        default = next(iter(small.values()), torch.empty(0))
        result = {}
        for target in [target for target, parts in self.parts.items() if not parts]:
            last, dtype = target.rpartition(".")[2], self.dtypes.get(target)
            result[target] = templates.get(last, default)
            if dtype is not None:
                like = templates.get((last, dtype), templates.get(dtype))
                result[target] = result[target].to(dtype) if like is None else like
        return result

    def compose(self, inner: "Plan") -> "Plan":
        """Return the plan from this plan's full model to `inner`'s small one.

        The full model of `inner` must be this plan's small model. `extract` of the result equals both `extract`s, one
        after the other. Composing is associative. A permutation composed with its inverse is the identity. If this plan
        repeats positions, `inner` may read any of the copies; two of its tensors that read copies of one element are
        refused.

        >>> half = Plan({"w": (Source("w", (((0, 4),),)),)}, {"w": (8,)})
        >>> quarter = Plan({"w": (Source("w", (((1, 3),),)),)}, {"w": (4,)})
        >>> half.compose(quarter).entries["w"]
        (Source(name='w', index=(((1, 3),),)),)
        """
        if not isinstance(inner, Plan):
            raise SurgeryError(f"a plan composes with a plan, not with a {type(inner).__name__}", code="argument")
        if fingerprint(self.small_shapes) != inner.fingerprint:
            a, b = self.small_shapes, inner.shapes
            name = next(name for name in (*a, *b) if a.get(name) != b.get(name))
            raise SurgeryError(
                "the plans do not fit: the inner plan's full model must be the outer plan's small model, and their "
                f"tensors differ ({name!r} is {a.get(name, 'missing')} and {b.get(name, 'missing')})",
                code="mismatch",
            )
        entries = {
            name: tuple(
                Source(outer.name, chain(outer.index, source.index, self.shapes[outer.name]))
                for source in sources
                for outer in self.entries[source.name]
            )
            for name, sources in inner.entries.items()
        }
        return Plan(entries, self.shapes, (*self.edits, *inner.edits), self.structure, self.dtypes)

    def build(self, full: nn.Module) -> nn.Module:
        """Return the small model as a module, with its weights from a full one.

        `full` is the model that the plan was made from, or another one from the same constructor, on any device
        (including meta). It is not changed, and no forward pass runs. To restore a saved small model, load its state
        afterwards: `load(plan.build(make_full_model()), safetensors.torch.load_file(path))`.
        """
        _check_fits(state(full), self.shapes, "the full model")  # first, since its error names the tensors
        if not has_structure(full, self.structure):
            raise SurgeryError(
                f"this {type(full).__name__} has the tensors of the plan's full model, but modules of other classes or "
                "settings (heads, groups, strides, ...): give one from the same constructor",
                code="plan",
            )
        return self.build_unchecked(full)

    def build_unchecked(self, full: nn.Module) -> nn.Module:
        """Do the same as `build` without checks, for the plan's own full model."""
        full_tensors = tensors(full)
        with torch.no_grad():
            values = {n: take(full_tensors[s.name], s.index) for n, (s, *_) in self.entries.items()}
        if full_tensors.keys() == values.keys() and all(edit.get("do") in KEEP_NAMES for edit in self.edits):
            small = clone(full, {id(tensor): like(values[name], tensor) for name, tensor in full_tensors.items()})
            for edit in self.edits:
                apply_edit(small, edit)
            renew_computed(small)
            return small
        small, originals = copy_sharing(full)
        for edit in self.edits:
            apply_edit(small, edit)
        small_tensors = tensors(small)
        expected = {name: self.small_shapes.get(name, ()) for name in small_tensors}
        check_same_shapes(expected, shapes_of(values), "the edited module", "the plan")
        replace_tensors(small, {id(tensor): values[name] for name, tensor in small_tensors.items()}, originals)
        renew_computed(small)
        return small

    def to_json(self) -> str:
        """Return the plan as JSON, with a format version and the fingerprint."""
        return json.dumps(
            {
                "format": _FORMAT,
                "version": _VERSION,
                "fingerprint": self.fingerprint,
                "structure": self.structure,
                "full": {name: list(shape) for name, shape in self.shapes.items()},
                "dtypes": {name: str(dtype).removeprefix("torch.") for name, dtype in self.dtypes.items()},
                "entries": {name: [[s.name, s.index] for s in sources] for name, sources in self.entries.items()},
                "edits": [dict(edit) for edit in self.edits],
            }
        )

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """Read a plan that `to_json` wrote.

        Raises SurgeryError for another format, version or fingerprint.
        """
        try:
            data = json.loads(text)
            if data["format"] != _FORMAT or data["version"] != _VERSION:
                raise SurgeryError(
                    f"this is {data['format']!r} version {data['version']!r}: expected {_FORMAT!r} version {_VERSION}; "
                    "another version of this package may read it",
                    code="plan",
                )
            shapes = {name: tuple(map(operator.index, shape)) for name, shape in data["full"].items()}
            entries = {
                n: tuple(Source(_text(s), as_index(i)) for s, i in pairs) for n, pairs in data["entries"].items()
            }
            edits = tuple(dict(edit) for edit in data["edits"])
            dtypes = {name: _dtype(kind) for name, kind in data["dtypes"].items()}
            same = fingerprint(shapes) == data["fingerprint"]
            hashed = _text(data["structure"])
        except SurgeryError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise SurgeryError(
                f"this is not a plan ({first_line(error)}): give what plan.save or plan.to_json wrote", code="plan"
            ) from None
        if not same:
            raise SurgeryError("the plan was changed: its shapes do not match its fingerprint", code="plan")
        return cls(entries, shapes, edits, hashed, dtypes)

    def save(self, path: str | os.PathLike) -> None:
        """Write the plan as JSON, over an existing file as well.

        A crash leaves the old file or the new one, never a part of it.
        """
        with replacing(Path(path)) as temporary:
            temporary.write_text(self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike) -> "Plan":
        """Read a plan that `save` wrote; errors as `from_json`'s and for a file that is missing name the file."""
        with about(str(path)):
            try:
                text = Path(path).read_text(errors="replace")
            except OSError as error:
                raise SurgeryError(f"it cannot be read: {error.strerror}", code="file") from None
            return cls.from_json(text)

    def _sizes(self) -> tuple[int, int]:
        """Return the numbers of elements of the small model and of the full one."""
        small, full = (sum(map(math.prod, shapes.values())) for shapes in (self.small_shapes, self.shapes))
        return small, full

    def __repr__(self) -> str:
        """Describe in one line how much of the full model the small one has.

        >>> Plan({"w": (Source("w", (((0, 2),), None)),)}, {"w": (4, 2), "b": (2,)})
        Plan: 4 of 10 elements (40.0 %), 1 of 2 tensors, 0 edits
        """
        small, full = self._sizes()
        used, count = sum(map(bool, self.parts.values())), len(self.shapes)
        return (
            f"Plan: {small:,} of {full:,} elements ({100 * small / max(full, 1):.1f} %), "
            f"{f'{used} of ' if used < count else ''}{count} tensor{'s' * (count != 1)}, "
            f"{len(self.edits)} edit{'s' * (len(self.edits) != 1)}"
        )

    def __str__(self) -> str:
        """Describe the plan, with a table of its first tensors and their shapes.

        >>> print(Plan({"w": (Source("w", (((0, 2),), None)),)}, {"w": (4, 2), "b": (2,)}))
        Plan: 4 of 10 elements (40.0 %), 1 of 2 tensors, 0 edits
          w  [4, 2] -> [2, 2]
          b  [2]    -> left out
        """
        rows = []
        for name, (first, *others) in self.entries.items():
            small, full = self.small_shapes[name], self.shapes[first.name]
            notes = [f"of {first.name}"] if first.name != name else []
            if not is_whole(first.index) and repeats(first.index):
                notes.append("with repeats")
            elif not is_whole(first.index) and small == full:
                notes.append("in another order")
            notes += [f"and for {', '.join(source.name for source in others)}"] if others else []
            rows.append((name, str(list(full)), f"{list(small)}{'  ' * bool(notes)}{', '.join(notes)}"))
        rows += [(name, str(list(self.shapes[name])), "left out") for name, parts in self.parts.items() if not parts]
        shown = rows[:_ROWS]
        width, wide = (max((len(row[column]) for row in shown), default=0) for column in (0, 1))
        lines = [f"  {name:{width}}  {full:{wide}} -> {small}" for name, full, small in shown]
        more = [f"  ... and {len(rows) - _ROWS} more, which describe() lists"] if len(rows) > _ROWS else []
        return "\n".join([repr(self), *lines, *more])

    def _repr_html_(self) -> str:
        return f'<pre style="overflow-x: auto">{escape(str(self))}</pre>'

    def describe(self) -> str:
        """List the small model's tensors with their places in the full one, and edits.

        >>> half = Plan({"w": (Source("w", (((0, 2),), None)),)}, {"w": (4, 2)})
        >>> print(half.describe())
        Plan of 2d876cd494474ac0: 4 of 8 elements, 0 edits
          w  [2, 2]             = [0:2, :]
        """
        small, full = self._sizes()
        lines = [f"Plan of {self.fingerprint}: {small:,} of {full:,} elements, {len(self.edits)} edits"]
        width = max((len(name) for name in self.entries), default=0)
        for name, (first, *others) in self.entries.items():
            where = first.name if first.name != name else ""
            more = [s.name + (_index_text(s.index) if s.index != first.index else "") for s in others]
            text = f"{where}{_index_text(first.index)}" + (f" and {', '.join(more)}" if more else "")
            lines.append(f"  {name:{width}}  {list(self.small_shapes[name])!s:18} = {text}")
        return "\n".join([*lines, *(f"  {dict(edit)}" for edit in self.edits)])


def _plain(edits: Sequence[Edit]) -> tuple[dict[str, Any], ...]:
    """Return edits as they are after reading a file."""
    return tuple(json.loads(json.dumps([dict(edit) for edit in edits])))


def _check_fits(
    values: Mapping[str, Tensor] | nn.Module, shapes: Mapping[str, tuple[int, ...]], subject: str
) -> tuple[Mapping[str, Tensor], int]:
    """Return a state and 0, or a stack and 1; SurgeryError if the shapes are others."""
    values = values if isinstance(values, LazyState) else as_state(values, subject)
    known = metas(values) if isinstance(values, LazyState) else values
    lead = {known[name].ndim - len(shape) for name, shape in shapes.items() if name in known}
    sizes = {known[name].shape[0] for name in shapes if name in known and known[name].ndim}
    stacked = lead == {1} and len(sizes) == 1
    actual = {name: tuple(tensor.shape[stacked:]) for name, tensor in known.items()}
    try:
        check_same_shapes(shapes, actual, f"{subject} of the plan", "what was given")
    except SurgeryError as error:
        raise SurgeryError(f"{error}; give the model that the plan was made for", code="plan") from None
    return values, int(stacked)


def _zeros(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    zeros = like.new_zeros(shape)
    if (
        zeros.ndim == like.ndim == 4
        and like.is_contiguous(memory_format=torch.channels_last)
        and like.shape[2:].numel() > 1
    ):
        zeros = zeros.to(memory_format=torch.channels_last)
    return zeros


def _index_text(index: Index) -> str:
    axes = [None if runs is None else [f"{start}:{stop}" for start, stop in runs] for runs in index]
    texts = [
        ":" if runs is None else "|".join(runs if len(runs) <= 3 else [*runs[:2], "...", runs[-1]]) for runs in axes
    ]
    return f"[{', '.join(texts)}]"


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a string")
    return value


def _dtype(name: Any) -> torch.dtype:
    dtype = getattr(torch, _text(name), None)
    if not isinstance(dtype, torch.dtype):
        raise SurgeryError(f"the dtype {name!r} of the plan is unknown to this torch: update it", code="plan")
    return dtype

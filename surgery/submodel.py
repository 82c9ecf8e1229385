"""A plan says how a smaller model lies inside a full one, as data.

HeteroFL, FlexiFed, NeFL, FedRolex and FedFA differ only in their plans: which tensors of the full model a client holds
(depth), which positions along each axis (width), and which deeper blocks a client's last block stands for (grafting).
`narrow`, `corner`, `graft` and `ungraft` make plans; this file applies them.
"""

import json
import math
import operator
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from surgery import submodel_text
from surgery.edits import apply_edit, copy_sharing, replace_tensors
from surgery.errors import SurgeryError
from surgery.files.whole import replacing
from surgery.fingerprints import fingerprint, has_structure, structure
from surgery.states import Stack, State, as_state, check_same, owners, state
from surgery.submodel_embed import embedded
from surgery.submodel_index import (
    Index,
    Runs,
    Source,
    as_index,
    as_runs,
    chain,
    merged,
    overlapping,
    pieces,
    selected,
    take,
)

__all__ = [
    "Edit",
    "Index",
    "Runs",
    "Source",
    "Submodel",
    "as_runs",
    "fingerprint",
    "merged",
    "pieces",
    "structure",
]

Edit: TypeAlias = Mapping[str, Any]  # what `surgery.edits` does to a module, as a JSON object


@dataclass(frozen=True, repr=False)
class Submodel:
    """Where each tensor of a small model lies in a full one.

    An index of an axis is a tuple of ranges (start, stop), in any order; `as_runs([3, 1, 2])` makes one of positions.
    The small model's position j is the j-th that the ranges hold. So an index selects, permutes (every position once)
    or widens (positions more than once; the "small" model is then the wider one).

    A small tensor may have several sources, in several tensors or in parts of one, and several small tensors may share
    a tensor of the full model (query, key and value in one matrix, say). Different sources must not overlap: each
    element of the full model belongs to one small tensor, in one place.

    `extract(embed(x)) == x` and, wherever the mask is True, `embed(extract(s)) == s`, both bit for bit, except:

    - If a tensor has several sources, `extract` reads the first and `embed` writes all. `embed(extract(s))` then equals
      s only if the sources are equal in s.
    - If a position repeats, the first of the small model's positions that read it is the one that `embed` writes, and
      so the one that counts in `average_submodels`, `trimmed_mean_submodels` and `submodel_factors`. The others are
      copies, whose values are lost: `extract(embed(x)) == x` only if they are equal in x.

    Attributes:
        entries: by state name of the small model its sources in the full one. `extract` reads from the first;
            `embed` writes to all (a last block that stands for deeper blocks has several).
        shapes: the full model's shapes by state name. Their hash is the fingerprint.
        edits: what else turns a copy of the full module into the small one: attributes such as `num_heads`, dropped
            blocks, sliced tensors that are not in the state. `build` carries them out.
        structure: a hash of the full module's classes and settings, for `build`; "" if there was no module.
        dtypes: the full model's dtypes by state name, as far as they are known, for `embed`.

    >>> plan = Submodel({"w": (Source("w", (((0, 2),), None)),)}, {"w": (3, 2)})
    >>> plan.extract({"w": torch.tensor([[1, 2], [3, 4], [5, 6]])})["w"].tolist()
    [[1, 2], [3, 4]]
    >>> full, mask = plan.embed({"w": torch.tensor([[7, 8], [9, 9]])})
    >>> full["w"].tolist(), mask["w"][:, 0].tolist()
    ([[7, 8], [9, 9], [0, 0]], [True, True, False])
    >>> wider = Submodel({"w": (Source("w", (as_runs([0, 1, 2, 1]),)),)}, {"w": (3,)})
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
        places: dict[str, list[tuple[str, Index]]] = {}
        for name, sources in self.entries.items():
            if not sources:
                raise SurgeryError(f"tensor {name!r} of the small model has no source in the full one")
            sizes = set()
            for source in sources:
                if source.name not in self.shapes:
                    raise SurgeryError(
                        f"tensor {name!r} is read from {source.name!r}: the full model has no such tensor"
                    )
                places.setdefault(source.name, []).append((name, source.index))
                sizes.add(selected(source.name, source.index, self.shapes[source.name]))
            if len(sizes) > 1:
                raise SurgeryError(f"the sources of {name!r} have different shapes {sorted(sizes)}")
        for target, held in places.items():
            for (a, first), (b, second) in combinations(held, 2):
                if overlapping(first, second, self.shapes[target]):
                    raise SurgeryError(f"{b!r} and {a!r} are both written to {target!r}: their parts must not overlap")
        for name, dtype in self.dtypes.items():
            if name not in self.shapes or not isinstance(dtype, torch.dtype):
                raise SurgeryError(f"dtypes hold {dtype!r} for {name!r}: give torch dtypes of the full model's tensors")

    def _normalise(self) -> None:
        """Give the fields the types that they have when they are read from a file."""
        try:
            fields: dict[str, Any] = {
                "entries": {
                    n: tuple(Source(s.name, as_index(s.index)) for s in own) for n, own in self.entries.items()
                },
                "shapes": {name: tuple(map(operator.index, shape)) for name, shape in self.shapes.items()},
                "edits": tuple(json.loads(json.dumps([dict(edit) for edit in self.edits]))),
                "dtypes": dict(self.dtypes),
            }
        except (AttributeError, TypeError, ValueError, RecursionError) as error:
            raise SurgeryError(
                "a Submodel takes entries {small name: (Source(full name, index), ...)}, where an index has for each "
                f"axis None or ranges ((start, stop), ...), then shapes {{full name: shape}}: {error}"
            ) from None
        for name, shape in fields["shapes"].items():
            if min(shape, default=0) < 0 or math.prod(shape) >= 2**60:
                raise SurgeryError(f"{name!r} of the full model cannot have the shape {shape}")
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    @cached_property
    def small_shapes(self) -> dict[str, tuple[int, ...]]:
        """The small model's shapes by state name."""
        return {name: selected(s[0].name, s[0].index, self.shapes[s[0].name]) for name, s in self.entries.items()}

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the names and shapes of the full model's tensors."""
        return fingerprint(self.shapes)

    def extract(self, full: Mapping[str, Tensor] | nn.Module) -> State | Stack:
        """Read the small model's state from the full one's, or a stack from a stack.

        The result is a copy with the same dtypes, devices and memory formats, through which gradients flow.
        Raises SurgeryError if the tensors are not those of the plan's full model.
        """
        full = as_state(full, "the full model")
        lead = _check(full, self.shapes, "the full model")
        return {name: take(full[s[0].name], s[0].index, lead) for name, s in self.entries.items()}

    def embed(
        self, small: Mapping[str, Tensor] | nn.Module, *, into: Mapping[str, Tensor] | nn.Module | None = None
    ) -> tuple[State | Stack, dict[str, Tensor]]:
        """Write the small model's state (or a stack) back to where it came from.

        Args:
            small: as `extract` gives it.
            into: a full state (or stack), whose values are kept where the small model has none; zeros if it is not
                given. The result has its dtypes. Without it, tensors that the small model has a part of have the small
                tensor's dtype. Those that it lacks have the one that the small model has for the plan's dtype (so that
                a small model in half precision gives a full one in half precision), or, if the plan does not know it,
                that of a small tensor with the same last name.

        Returns:
            The full state (or stack), and boolean tensors of the full shapes [*S], True where values were written.
        """
        small = as_state(small, "the small model")
        lead = _check(small, self.small_shapes, "the small model")
        if into is not None:
            into = as_state(into, "`into`")
            if _check(into, self.shapes, "`into`") != lead:
                raise SurgeryError("the small model and `into` must both be states or both be stacks")
        return embedded(self.entries, self.shapes, self.dtypes, small, into, lead)

    def compose(self, inner: "Submodel") -> "Submodel":
        """The plan from this plan's full model to `inner`'s small one; `inner`'s full model must be this plan's small
        one.

        `extract` of the result is `extract` of one after the other; composing is associative. A plan that permutes,
        composed with the one that permutes back, holds everything in its place. If this plan repeats positions, `inner`
        may read any of the copies, and two of its tensors that read copies of one element are refused.

        >>> half = Submodel({"w": (Source("w", (((0, 4),),)),)}, {"w": (8,)})
        >>> quarter = Submodel({"w": (Source("w", (((1, 3),),)),)}, {"w": (4,)})
        >>> half.compose(quarter).entries["w"]
        (Source(name='w', index=(((1, 3),),)),)
        """
        if not isinstance(inner, Submodel):
            raise SurgeryError(f"a plan composes with a plan, not with a {type(inner).__name__}")
        if fingerprint(self.small_shapes) != inner.fingerprint:
            raise SurgeryError(
                "the plans do not fit: the inner plan's full model must be the outer plan's small model, and their "
                f"tensors differ ({_first_difference(self.small_shapes, inner.shapes)})"
            )
        entries = {
            name: tuple(
                Source(outer.name, chain(outer.index, source.index, self.shapes[outer.name]))
                for source in sources
                for outer in self.entries[source.name]
            )
            for name, sources in inner.entries.items()
        }
        return Submodel(entries, self.shapes, (*self.edits, *inner.edits), self.structure, self.dtypes)

    def build(self, full: nn.Module) -> nn.Module:
        """The small model as a module with the weights that `extract` reads, made from a full one.

        `full` is the model that the plan was made from, or another one from the same constructor, on any device
        (including meta); it is not changed. No forward pass is run. To restore a saved small model, load its state
        afterwards: `load(plan.build(make_full_model()), safetensors.torch.load_file(path))`.
        """
        values = self.extract(state(full))
        if self.structure and not has_structure(full, self.structure):
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
        return submodel_text.to_json(self.entries, self.shapes, self.edits, self.structure, self.dtypes)

    @classmethod
    def from_json(cls, text: str) -> "Submodel":
        """The inverse of `to_json`, also of version 0.1's; SurgeryError for another format, version or fingerprint."""
        return cls(**submodel_text.from_json(text))

    def save(self, path: str | os.PathLike) -> None:
        """Write the plan as JSON; after a crash there is the old file or the new one, never a part of it."""
        with replacing(Path(path)) as temporary:
            temporary.write_text(self.to_json())

    @classmethod
    def load(cls, path: str | os.PathLike) -> "Submodel":
        """Read a plan that `save` wrote."""
        return cls.from_json(Path(path).read_text(errors="replace"))

    def __repr__(self) -> str:
        return submodel_text.summary(self.entries, self.shapes, self.small_shapes, self.edits)

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
        return submodel_text.describe(self.entries, self.shapes, self.small_shapes, self.edits)


def _check(values: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]], what: str) -> int:
    """0 for a state of these shapes, 1 for a stack of them; SurgeryError for anything else."""
    meta = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    lead = {values[name].ndim - len(shape) for name, shape in shapes.items() if name in values}
    sizes = {values[name].shape[0] for name in shapes if name in values and values[name].ndim}
    stacked = lead == {1} and len(sizes) == 1
    given = {name: torch.empty(tensor.shape[stacked:], device="meta") for name, tensor in values.items()}
    check_same(meta, given, f"{what} of the plan", "what was given")
    return int(stacked)


def _first_difference(a: Mapping[str, tuple[int, ...]], b: Mapping[str, tuple[int, ...]]) -> str:
    name = next(name for name in (*a, *b) if a.get(name) != b.get(name))
    return f"{name!r} is {a.get(name, 'missing')} and {b.get(name, 'missing')}"

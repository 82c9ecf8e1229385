"""A network made of blocks of others, like mergekit's passthrough."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from surgery.depth.depths import check_order
from surgery.depth.graft import graft, ungraft
from surgery.depth.sections import ordered_sections, sections
from surgery.errors import SurgeryError
from surgery.lazy import LazyState, Pieces, metas, pieces_of
from surgery.merging.driver import check_patterns
from surgery.names import is_inside, join, matches
from surgery.plan import Plan, Source
from surgery.states import State, as_state, load

BlockRanges = Mapping[str, Sequence[tuple[int, int]]]
"""By name of a section its new blocks in order, each as (model, block), both from 0."""


def union(models: Sequence[Mapping[str, Tensor] | nn.Module]) -> LazyState:
    """Return all tensors of several models as one state, under "K.NAME".

    To read a tensor that holds NaN is a SurgeryError. Infinities, which masks of attention hold, stay.

    >>> import torch
    >>> list(union([{"w": torch.zeros(2)}, {"w": torch.zeros(3)}]))
    ['0.w', '1.w']
    """
    states = [values if isinstance(values, LazyState) else as_state(values) for values in models]

    def without_nan(k: int, name: str, pieces: Pieces) -> Pieces:
        def read(start: int, stop: int) -> Tensor:
            values = pieces.read(start, stop)
            if not values.is_meta and bool(values.isnan().any()):
                raise SurgeryError(f"{name!r} of model {k} (from 0) holds NaN: mend it, or leave it out", code="values")
            return values

        return replace(pieces, read=read)

    every = [(k, name, pieces_of(values, name)) for k, values in enumerate(states) for name in values]
    return LazyState({f"{k}.{name}": without_nan(k, name, pieces) for k, name, pieces in every})


def passthrough(
    models: Sequence[Mapping[str, Tensor] | nn.Module],
    *,
    blocks: BlockRanges,
    outside: Mapping[str, int] | None = None,
    example: Any = None,
) -> tuple[nn.Module | State | LazyState, Plan]:
    """Return a network whose sections consist of blocks of several models.

    Args:
        models: states or modules. What the sections look like, and all that `outside` does not name, is the first's.
        blocks: by name of a section of the first model its blocks in order, (model, block of that section there).
            Sections that are not named stay. A block is used once; to repeat one, list its model twice.
        outside: for tensors outside of these sections by patterns of their names the model that they are taken from,
            such as {"lm_head": 1}; the first pattern that matches counts.
        example: an input of the models; the first one is then a module. It shows which blocks run one after another,
            as for `surgery.graft`, and the deeper or shallower network is tried on it.

    Returns:
        The network, a module if the first model is one, and the plan that cuts its state out of `union(models)`.

    Raises:
        SurgeryError: for sections, models and blocks that are not there, for modules that are not known to run one
            after another, for tensors of other shapes, and for NaN in those that are taken.

    >>> import torch
    >>> one = {f"{i}.{part}.weight": torch.full((2, 2), float(i)) for i in range(3) for part in "ab"}
    >>> two = {name: tensor + 10 for name, tensor in one.items()}
    >>> net, plan = passthrough([one, two], blocks={"": [(0, 0), (0, 1), (1, 1), (1, 2)]})
    >>> [net[f"{i}.a.weight"][0, 0].item() for i in range(4)]
    [0.0, 1.0, 11.0, 12.0]
    """
    if not isinstance(models, list | tuple) or not models:
        raise SurgeryError("passthrough takes a list of states or modules", code="argument")
    first = models[0]
    skeleton = first if isinstance(first, nn.Module) else metas(first)
    known = ordered_sections(skeleton, example)
    places = [{section.name: section.blocks for section in known}]
    for other in models[1:]:
        runs = isinstance(other, nn.Module)
        others = sections(other if runs else metas(other), example=example if runs else None)
        places.append({section.name: section.blocks for section in others})
    for name, chosen in blocks.items():
        if name not in places[0] and "expert" in name:
            raise SurgeryError(
                f"the first model has no experts {name!r}, and passthrough makes no mixture of experts out of dense "
                "models (mergekit's moe): its routers lie in none of them. Make the mixture from its own class, and "
                "surgery.load(mixture, states, fit='whole') with the dense models' tensors under its experts' names",
                code="unsupported",
            )
        if name not in places[0]:
            section_names = ", ".join(map(repr, places[0])) or "none"
            raise SurgeryError(f"the first model has no section {name!r}; it has {section_names}", code="name")
        for k, i in chosen:
            if not 0 <= k < len(models) or not 0 <= i < len(places[k].get(name, ())):
                raise SurgeryError(f"section {name!r}: there is no block {i} of model {k}", code="name")
        if len(set(chosen)) < len(chosen):
            raise SurgeryError(f"section {name!r} repeats a block: list its model twice instead", code="argument")
    check_order(skeleton, known, [section for section in known if section.name in blocks], blocks, example)
    resized, names = _resize(skeleton, {s: len(b) for s, b in blocks.items()}, places[0], example)
    shapes = metas(resized) if not isinstance(resized, nn.Module) else metas(as_state(resized))
    now = {name: _first(names, places[0][name][0]) for name in blocks}  # a single block is no section
    now |= {section.name: section.blocks for section in sections(resized, example=example)}
    inside = {block for name in blocks for block in now[name]}
    check_patterns("outside", outside, [name for name in shapes if not any(is_inside(name, block) for block in inside)])
    whole = union(models)
    entries = {}
    for name, like in shapes.items():
        source = _source(name, names, blocks, now, places, outside or {})
        if source not in whole or pieces_of(whole, source).shape != tuple(like.shape):
            there = f"the shape {pieces_of(whole, source).shape} there" if source in whole else "no counterpart there"
            raise SurgeryError(f"{name!r} {tuple(like.shape)} comes from {source!r}, and has {there}", code="mismatch")
        entries[name] = (Source(source, (None,) * like.ndim),)
    every = {name: pieces_of(whole, name).shape for name in whole}
    plan = Plan(entries, every, dtypes={name: pieces_of(whole, name).dtype for name in whole})
    result = plan.extract(whole)
    if isinstance(resized, nn.Module):
        return load(resized, dict(result)), plan
    return (result if any(isinstance(model, LazyState) for model in models) else dict(result)), plan


def _resize(
    skeleton: Any, depths: Mapping[str, int], places: Mapping[str, Sequence[str]], example: Any
) -> tuple[Any, dict[str, str]]:
    """Return the first model with other depths, and each tensor's origin by name."""
    deeper, up = graft(
        skeleton, depths={name: max(depth, len(places[name])) for name, depth in depths.items()}, example=example
    )
    result, down = ungraft(deeper, keep=dict(depths), example=example)
    origin = {source.name: name for name, sources in up.entries.items() for source in sources}
    return result, {name: origin[sources[0].name] for name, sources in down.entries.items()}


def _first(names: Mapping[str, str], block: str) -> tuple[str, ...]:
    """Return the name of a section's first block in the resized model, in a tuple."""
    new, old = next((new, old) for new, old in names.items() if is_inside(old, block))
    return (new.removesuffix(old.removeprefix(block)),)


def _source(name: str, names, blocks: BlockRanges, now, places, outside: Mapping[str, int]) -> str:
    """Return the name in the union of the tensor that becomes `name`."""
    for section, chosen in blocks.items():
        for (k, i), block in zip(chosen, now[section]):
            if is_inside(name, block):
                return join(str(k), places[k][section][i] + name.removeprefix(block))
    k = next((k for pattern, k in outside.items() if matches(name, pattern)), 0)
    return f"{k}.{names[name]}"

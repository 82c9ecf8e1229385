"""Recombination: segments of layers move between the models of a stack.

Hu et al., "Is Aggregation the Only Choice? Federated Learning via Layer-wise Model Recombination"
(KDD 2024), section 4.2.2. Every segment of every model is used exactly once, so sums over the models, and sums of their
squared distances to any point, do not change (Lemma 4.4).
"""

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import pairwise
from numbers import Integral, Real
from typing import TypeAlias, overload

import torch
from torch import Tensor, nn

from surgery.copying import copy_sharing, replace_tensors
from surgery.decomposition import Layer, check_segments
from surgery.errors import SurgeryError
from surgery.states import Stack, State, as_state, check_same, names_by_id, stack_size, state, ties
from surgery.transfer import upload

Segment: TypeAlias = tuple[str, ...]

_SMALL_ROW = 1 << 16  # bytes; with smaller rows one gather of the tensor is faster than moving rows one by one


def segments(layers: Sequence[Layer], *, fraction: float = 0.0) -> list[Segment]:
    """Group consecutive layers into segments that move together (FedMR-px, Fig. 11).

    Layer j of N (from 1) belongs to segment ceil(j / (fraction * N)).

    Args:
        layers: as `surgery.layers(model)` gives them.
        fraction: share of the layers in one segment, in [0, 1]. 1 makes the whole model one segment; 1/N or less (0,
            the default) makes each layer a segment.

    Returns:
        The state names of each segment, in order.

    >>> five = [Layer(str(j), "Linear", (f"{j}.weight",)) for j in range(5)]
    >>> segments(five, fraction=0.4)
    [('0.weight', '1.weight'), ('2.weight', '3.weight'), ('4.weight',)]
    >>> len(segments(five)), len(segments(five, fraction=1.0))
    (5, 1)
    """
    if not isinstance(layers, list | tuple) or not all(isinstance(layer, Layer) for layer in layers):
        raise SurgeryError("segments takes a list of layers: call surgery.layers(model) first", code="argument")
    if not isinstance(fraction, Real) or not 0 <= fraction <= 1:
        raise SurgeryError(f"fraction is a share of the layers in [0, 1], got {repr(fraction)[:40]}", code="argument")
    # A Fraction, because 3 / (0.1 * 30) must be 1; in floating point it may be a little more.
    size = max(Fraction(fraction).limit_denominator(10**6) * len(layers), Fraction(1))
    groups: dict[int, list[str]] = {}
    for j, layer in enumerate(layers, 1):
        groups.setdefault(math.ceil(j / size), []).extend(layer.tensors)
    return [tuple(names) for names in groups.values()]


def permutations(n: int, k: int, *, generator: torch.Generator | None = None, derange: bool = False) -> Tensor:
    """Return n independent uniform permutations of k slots: [n, k], int64.

    With `derange` they are uniform derangements: no slot keeps what it has. SurgeryError if k is 1, which has none, and
    for numbers that are not whole or negative.

    >>> permutations(3, 4, generator=torch.Generator().manual_seed(0)).sort(1).values[0]
    tensor([0, 1, 2, 3])
    >>> permutations(2, 2, derange=True).tolist()
    [[1, 0], [1, 0]]
    """
    for name, value in (("n", n), ("k", k)):
        if not isinstance(value, Integral) or value < 0:
            meaning = "segments" if name == "n" else "models"
            raise SurgeryError(f"{name} is a whole number of {meaning}, got {repr(value)[:40]}", code="argument")
    if generator is not None and not isinstance(generator, torch.Generator):
        raise SurgeryError(f"generator is a torch.Generator, not {repr(generator)[:40]}", code="argument")
    if derange and k == 1:
        raise SurgeryError("a single model has no derangement: derange=True needs k of 2 or more", code="argument")
    device = "cpu" if generator is None else generator.device
    rows: list[Tensor] = []
    while len(rows) < n:
        row = torch.randperm(k, generator=generator, device=device)
        # Rejection keeps the draw uniform; for any k about one in e permutations is a derangement.
        if not derange or not bool((row == torch.arange(k, device=device)).any()):
            rows.append(row)
    return torch.stack(rows) if rows else torch.empty(0, k, dtype=torch.int64, device=device)


def inverse(permutations: Tensor) -> Tensor:
    """Return the permutations that undo the given ones, row by row: [n, k].

    >>> inverse(torch.tensor([[2, 0, 1]]))
    tensor([[1, 2, 0]])
    """
    if not isinstance(permutations, Tensor) or not permutations.ndim:
        raise SurgeryError("inverse takes permutations [n, k] as a tensor: see surgery.permutations", code="argument")
    return permutations.argsort(dim=-1)


@overload
def shuffle(
    models: Mapping[str, Tensor], *, segments: Sequence[Segment], permutations: Tensor, inplace: bool = False
) -> Stack: ...
@overload
def shuffle(models: Sequence[nn.Module], *, segments: Sequence[Segment], permutations: Tensor) -> list[nn.Module]: ...
@overload
def shuffle(models: Sequence[State], *, segments: Sequence[Segment], permutations: Tensor) -> list[State]: ...
def shuffle(models, *, segments, permutations, inplace=False):
    """Recombine K models: slot k takes segment s from slot permutations[s, k].

    `shuffle(..., permutations=inverse(permutations))` undoes it.

    Args:
        models: a stack, tensors [K, *S]; or a list of K states; or a list of K modules of one architecture.
        segments: groups of state names that together hold each name of the models exactly once, as
            `segments(layers(model))` gives them.
        permutations: [len(segments), K], each row a permutation of range(K), as `permutations` samples them.
        inplace: permute the rows of the stack in place, and return the stack. Instead of a second stack this needs
            memory for one row of the largest tensor, or for one tensor if its rows are small. For stacks only.

    Returns:
        The same kind: a new stack; a list of new states; or a list of new modules, where module k is a copy of
        models[k] (its hooks, mode, ties, requires_grad) with copies of the tensors that moved to it. Tied weights move
        once. Without `inplace` the input is unchanged and shares no memory with the result.

    Raises:
        SurgeryError: if the segments miss a tensor, repeat one, name an unknown one or are layers; if the permutations
            are not permutations; if listed models differ in shape, dtype or device; if rows cannot be permuted in place
            (broadcast views, tensors that share memory or require grad). Permutations on an accelerator are checked
            for their shape only, unless models are listed, since reading them back would stall it.

    >>> models = {"a": torch.tensor([1, 2]), "b": torch.tensor([3, 4])}
    >>> shuffle(models, segments=[("a",), ("b",)], permutations=torch.tensor([[1, 0], [0, 1]]))
    {'a': tensor([2, 1]), 'b': tensor([3, 4])}
    >>> nets = [nn.Linear(1, 1), nn.Linear(1, 1)]
    >>> mixed = shuffle(nets, segments=[("weight",), ("bias",)], permutations=torch.tensor([[1, 0], [0, 1]]))
    >>> torch.equal(mixed[0].weight, nets[1].weight), torch.equal(mixed[0].bias, nets[0].bias)
    (True, True)
    """
    if isinstance(models, Mapping):
        owner = _owners(models, segments, permutations, stack_size(models))
        return _permute_rows(models, owner, permutations) if inplace else _gather(models, owner, permutations)
    if inplace:
        raise SurgeryError("inplace=True is for stacks: a list is shuffled into a new one", code="argument")
    if not isinstance(models, list | tuple) or not models:
        raise SurgeryError("shuffle takes a stack, or a list of at least one state or module", code="argument")
    if all(isinstance(model, nn.Module) for model in models):
        return _shuffle_modules(models, segments, permutations)
    if all(isinstance(model, Mapping) for model in models):
        return _shuffle_states(models, segments, permutations)
    raise SurgeryError("shuffle takes models of one kind: a list of states, or a list of modules", code="argument")


def _gather(models: Mapping[str, Tensor], owner: Mapping[str, int], permutations: Tensor) -> Stack:
    """Return one index gather for each tensor, on its device."""
    sources: dict[torch.device, Tensor] = {}  # one transfer for each device, not for each tensor
    result = {}
    for name, tensor in models.items():
        if tensor.device not in sources:
            sources[tensor.device] = upload(permutations, tensor.device)
        result[name] = tensor.index_select(0, sources[tensor.device][owner[name]])
    return result


def _permute_rows(models: Mapping[str, Tensor], owner: Mapping[str, int], permutations: Tensor) -> Stack:
    """Permute rows in place along cycles with one spare row; small rows by a gather."""
    _check_writable(models)
    on_host = permutations.device.type == "cpu"
    rows = permutations.tolist() if on_host else None
    with torch.no_grad():
        for name, tensor in models.items():
            if not on_host or tensor[0].nbytes < _SMALL_ROW:
                tensor.copy_(tensor.index_select(0, upload(permutations[owner[name]], tensor.device)))
                continue
            row, views = rows[owner[name]], tensor.unbind(0)
            spare = torch.empty_like(views[0])
            left = {slot for slot, source in enumerate(row) if slot != source}
            while left:
                first = slot = min(left)
                spare.copy_(views[first])
                while row[slot] != first:
                    views[slot].copy_(views[row[slot]])
                    left.remove(slot)
                    slot = row[slot]
                views[slot].copy_(spare)
                left.remove(slot)
    return dict(models)


def _shuffle_states(models, segments, permutations) -> list[State]:
    models = [as_state(values, f"state {k}") for k, values in enumerate(models)]
    for k, other in enumerate(models):
        check_same(models[0], other, "state 0", f"state {k}")
        for name, tensor in other.items():
            first = models[0][name]
            if (tensor.dtype, tensor.device) != (first.dtype, first.device):
                raise SurgeryError(
                    f"tensor {name!r} differs in dtype or device in states 0 and {k}: convert them to one",
                    code="mismatch",
                )
    permutations = permutations.cpu() if isinstance(permutations, Tensor) else permutations
    owner = _owners(models[0], segments, permutations, len(models))
    rows = permutations.tolist()
    return [{name: models[rows[owner[name]][k]][name].clone() for name in model} for k, model in enumerate(models)]


def _shuffle_modules(models, segments, permutations) -> list[nn.Module]:
    if odd := [k for k, model in enumerate(models) if ties(model) != ties(models[0])]:
        raise SurgeryError(f"models 0 and {odd[0]} differ in their tensors' names or ties", code="mismatch")
    result = []
    for model, values in zip(models, _shuffle_states([state(model) for model in models], segments, permutations)):
        copy, originals = copy_sharing(model)
        replace_tensors(copy, {key: values[name] for key, name in names_by_id(copy).items()}, originals)
        result.append(copy)
    return result


def _owners(names, segments: Sequence[Segment], permutations: Tensor, k: int) -> dict[str, int]:
    """Return the segment of each name; SurgeryError if segments or rows misfit."""
    owner: dict[str, int] = {}
    segments = check_segments(segments)
    for s, members in enumerate(segments):
        for name in members:
            if name in owner:
                raise SurgeryError(f"{name!r} is in segments {owner[name]} and {s}: leave one out", code="argument")
            owner[name] = s
    if missing := [name for name in names if name not in owner]:
        raise SurgeryError(
            f"no segment holds {missing[0]!r} ({len(missing)} missing): segments must cover the models; take "
            "states with surgery.state(model), which names tied tensors once",
            code="mismatch",
        )
    if unknown := [name for name in owner if name not in names]:
        raise SurgeryError(f"segments name {unknown[0]!r}, which no model has ({len(unknown)} unknown)", code="name")
    if not isinstance(permutations, Tensor) or permutations.dtype not in (torch.int64, torch.int32):
        raise SurgeryError("permutations must be an int64 tensor: see surgery.permutations", code="argument")
    if permutations.shape != (len(segments), k):
        raise SurgeryError(
            f"permutations are {list(permutations.shape)}: expected [{len(segments)}, {k}]", code="argument"
        )
    if permutations.device.type == "cpu" and not torch.equal(
        permutations.sort(1).values.long(), torch.arange(k).expand(len(segments), k)
    ):
        raise SurgeryError(f"each row of permutations must hold every slot 0..{k - 1} once", code="argument")
    return owner


def _check_writable(models: Mapping[str, Tensor]) -> None:
    """Raise SurgeryError unless a stack may be written: own memory, no gradients."""
    spans = []
    for name, tensor in models.items():
        if tensor.requires_grad:
            raise SurgeryError(f"tensor {name!r} requires grad: detach it to shuffle in place", code="unsupported")
        reach = 0  # of the axes so far, by ascending stride: the next stride must be larger
        for stride, size in sorted(zip(tensor.stride(), tensor.shape)):
            if size > 1:
                if stride <= reach:
                    raise SurgeryError(f"tensor {name!r} is an overlapping view: clone it first", code="unsupported")
                reach += stride * (size - 1)
        if not tensor.is_meta and tensor.numel():
            spans.append((tensor.data_ptr(), tensor.data_ptr() + (reach + 1) * tensor.itemsize, name))
    spans.sort()
    for (_, end, a), (start, _, b) in pairwise(spans):
        if start < end:
            raise SurgeryError(f"tensors {a!r} and {b!r} may share memory: clone one first", code="unsupported")

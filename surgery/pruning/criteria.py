"""Scores of the positions of each coupled width."""

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from difflib import get_close_matches
from functools import cache
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn

from surgery.copying import clone
from surgery.errors import SurgeryError, explain
from surgery.forward import as_batches, check_runs, named_tensors
from surgery.names import join
from surgery.pruning.computed import ComputedWeights, Key, as_parameters, find_computed
from surgery.states import as_real
from surgery.width.replay import read_batch
from surgery.width.solve import SUMS, Atom, Axes, Solution, atoms, named_widths, occurrences, onto_atoms, solve
from surgery.width.trace import trace_in_place, trace_model, unfuse

Name: TypeAlias = Literal["l1", "l2", "bn_scale", "taylor", "fisher", "activation"]
OF_DATA = ("taylor", "fisher", "activation")
"""The criteria that run the model, in evaluation mode, on batches of data."""
Criterion: TypeAlias = Callable[[str, Tensor, int], Tensor | None]
"""From a parameter's name, its elements as rows [size, elements], one for each position of an axis, and the axis to
[size] scores; None to leave the axis out."""


def importance(
    model: nn.Module,
    *,
    example: Any,
    by: Name | Criterion | Any = "l1",
    batches: Iterable[Any] = (),
    loss: Callable[[nn.Module, Any], Tensor] | None = None,
    output: Callable[[Any], Any] | None = None,
) -> dict[str, Tensor]:
    """Return scores of each shrinkable width's positions, for `surgery.narrow`.

    A width lies along axes of several tensors. Each gives its positions a score, and their sum is the width's. Of an
    axis of heads * head dimension a head gets the sum over its dimensions, a dimension the sum over heads.

    Args:
        model: any module; it is not changed.
        example, output: as for `surgery.narrow`.
        by: the score of a position, from the elements w that parameters have there. Of a weight that is computed (masks
            of torch.nn.utils.prune, weight_norm, spectral_norm and other parametrizations, adapters) they are the
            weight's, as the forward pass uses it, and so are gradients:
            `l1`: the sum of |w| (Li et al., "Pruning Filters", ICLR 2017). Biases do not count;
            `l2`: the sum of w^2, likewise;
            `bn_scale`: |weight| of batch norms (Liu et al., "Network Slimming", ICCV 2017). Widths without a batch norm
            get no scores;
            `taylor`: the sum of |w * gradient|, of the mean loss over the batches (Molchanov et al., CVPR 2019), of
            kernels and matrices: vectors, which are norms' scales and biases, do not count;
            `fisher`: the sum of w^2 * gradient^2, the mean over batches: batches of one sample give the diagonal of
            the empirical Fisher information (Theis et al., 2018), larger ones a coarser estimate;
            `activation`: the mean of |x| where layers read the width;
            a function of a parameter's name, a copy of its elements as rows [size, elements], one row for each position
            of an axis, and the number of that axis. It is asked for every axis of every parameter, biases and norms
            ([size, 1]) too. It gives scores [size], or None to leave the axis out: `lambda name, rows, axis:
            rows.abs().amax(1) if axis == 0 else None`;
            or one of torch-pruning's importance classes, `tp.importance.GroupMagnitudeImportance(p=2)`.
        batches: what `loss` takes, for `taylor` and `fisher`; inputs like `example` for `activation`.
        loss: from a model and a batch to a number. The model is a copy in evaluation mode.

    Returns:
        For each width that may shrink its name and scores [size], float64 on the CPU. `layer1.conv.weight:0` is the
        width along axis 0 of that tensor; `surgery.widths` lists the other axes. Of an axis along which several widths
        lie a third number says which, from the left: `proj.weight:1:0`. It is plain data, to be changed, combined and
        saved.

    Raises:
        SurgeryError: for an unknown criterion, one that lacks batches or a loss, scores of a wrong shape or that are
            not finite, and for `bn_scale` of a model without batch norms.

    >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    >>> _ = net[0].weight.data.fill_(1), net[2].weight.data.copy_(torch.tensor([[1, -5, 0]]))
    >>> importance(net, example=torch.zeros(1, 2), by="l1")
    {'0.weight:0': tensor([3., 7., 2.], dtype=torch.float64)}
    """
    check_criterion(by)
    check_runs(model, example, "importance")
    if isinstance(by, type):
        raise SurgeryError(f"by={by.__name__} is a class: give an object of it, {by.__name__}()", code="argument")
    if any(tensor.is_meta for tensor in model.parameters()):
        raise SurgeryError(f"{type(model).__name__} has no weights (meta device): load some first", code="values")
    if by == "activation":
        solution, sums = read_activations(model, example, as_batches(batches, by), output)
        names = named_widths(solution)
    else:
        weights = find_computed(model, example)
        solution = solve(trace_model(weights.model, example, output).found)
        names = weights.names(solution)
        if is_pruner(by):
            sums = pruner_scores(model, weights.solution(solution), by, weights)
        else:
            criterion = _of_copies(by) if callable(by) else _criterion(weights, by, batches, loss)
            sums = _sum(weights, solution, criterion, name_of(by))
    scores = {name: sums[atom] for name, atom in names.items() if not atom.why and atom in sums}
    for name, values in scores.items():
        if not values.isfinite().all():
            raise SurgeryError(f"{name_of(by)} gives {name!r} scores that are not finite", code="values")
    return scores


def check_criterion(by: Any) -> None:
    """Raise SurgeryError unless this is a criterion's name or something to call.

    >>> check_criterion("tylor")
    Traceback (most recent call last):
    ...
    surgery.errors.SurgeryError: there is no criterion 'tylor': did you mean 'taylor'?
    """
    names = get_args(Name)
    if not callable(by) and by not in names:
        near = get_close_matches(by, names, n=1) if isinstance(by, str) else []
        way_out = f"did you mean {near[0]!r}?" if near else f"choose {', '.join(names)} or a function"
        raise SurgeryError(f"there is no criterion {by!r}: {way_out}", code="argument")


def name_of(by: Any) -> str:
    """Return what errors call a criterion: the function's name.

    >>> name_of(importance), name_of("l1"), name_of(None)
    ('importance', 'l1', 'None')
    """
    return (
        by if isinstance(by, str) else getattr(by, "__name__", "") or (type(by).__name__ if callable(by) else repr(by))
    )


def _of_copies(function: Criterion) -> Criterion:
    """Return a user's criterion on copies of the rows: it may work in place."""
    return lambda name, rows, axis: function(name, rows.clone(), axis)


def _sum(weights: ComputedWeights, solution: Solution, criterion: Criterion, by: str) -> dict[Atom, Tensor]:
    """Sum the scores along all axes of all parameters; tied parameters count once.

    Of parameters that a weight is computed of only widths count that the weight does not have: an adapter's rank.
    """
    scores: dict[Atom, Tensor] = {}
    for key, tensor in find_scored(weights):
        name, tensor_axes = join(*key), solution.tensors[weights.keys.get(key, key)]
        whole = solution.tensors[weights.keys[weights.parts[key]]] if key in weights.parts else ()
        counted = {atom for axis in whole for atom in atoms(axis)}
        for position, axis in enumerate(tensor_axes):
            if counted and counted.issuperset(atoms(axis)):
                continue
            with explain(f"{by} fails for axis {position} of {name!r}"), torch.no_grad():
                values = criterion(name, tensor.movedim(position, 0).reshape(axis.size, -1), position)
            if values is None:
                continue
            is_tensor = isinstance(values, Tensor)
            if not is_tensor or tuple(values.shape) != (axis.size,) or values.is_complex():
                got = f"a {values.dtype} tensor of {tuple(values.shape)}" if is_tensor else type(values).__name__
                raise SurgeryError(
                    f"{by} gives {got} for axis {position} of {name!r} {tuple(tensor.shape)}: a tensor of "
                    f"{axis.size} real scores, one for each position, is needed, or None",
                    code="argument",
                )
            for atom, part in onto_atoms(axis, values.detach().cpu().double()).items():
                if atom not in counted:
                    scores[atom] = scores.get(atom, 0) + part
    return scores


def find_scored(weights: ComputedWeights) -> Iterator[tuple[Key, Tensor]]:
    """Yield parameters and computed weights by (module, attribute), tied ones once."""
    seen, added = set(), weights.added
    for key, tensor in named_tensors(weights.model):
        real = tensor.dtype.to_real().is_floating_point
        if isinstance(tensor, nn.Parameter) and real and id(tensor) not in seen and key not in added:
            seen.add(id(tensor))
            if key not in weights.values:
                yield key, tensor
    yield from weights.values.items()


def _criterion(
    weights: ComputedWeights, by: str, batches: Iterable[Any], loss: Callable[[nn.Module, Any], Tensor] | None
) -> Criterion:
    """Return the function that a criterion's name stands for."""
    model, shapes = weights.model, {join(*key): tensor.shape for key, tensor in find_scored(weights)}
    vectors = {name for name, shape in shapes.items() if len(shape) == 1}
    if by in ("taylor", "fisher"):
        if loss is None:
            raise SurgeryError(f"the criterion {by!r} needs `loss`, a function of a model and a batch", code="argument")
        values = dict(_gradients(model, as_batches(batches, by), loss, squared=by == "fisher"))
        values |= {join(*key): values[join(*tensor)] for key, tensor in weights.keys.items()}
        for key, ratio in weights.ratios.items():
            values[join(*key)] *= ratio if by == "taylor" else ratio.square()

        def products(name: str, rows: Tensor, axis: int) -> Tensor | None:
            if by == "taylor" and name in vectors:
                return None
            gradients = values[name].movedim(axis, 0).reshape(len(rows), -1)
            rows = as_real(rows).reshape(len(rows), -1)
            return ((rows * gradients).abs() if by == "taylor" else rows.square() * gradients).sum(1)

        return products
    if by == "bn_scale":
        norms = [name for name, m in model.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        scales = {join(name, "weight") for name in norms}
        if not scales & shapes.keys():
            raise SurgeryError(f"{type(model).__name__} has no batch norm: take another criterion", code="unsupported")
        return lambda name, rows, axis: rows.abs().sum(1) if name in scales else None
    biases = {name for name in vectors if "bias" in name.rpartition(".")[2]}
    power = 1 if by == "l1" else 2
    return lambda name, rows, axis: None if name in biases else (rows.abs() ** power).sum(1)


def _gradients(
    model: nn.Module, batches: list[Any], loss: Callable[[nn.Module, Any], Tensor], squared: bool
) -> Mapping[str, Tensor]:
    """Return the parameters' mean gradients of the loss, or their squares, by name.

    The gradients of a complex parameter have one more axis, of the real and the imaginary parts.
    A copy is differentiated in evaluation mode, so that nothing of the model changes.
    """
    twin = clone(model).eval()
    able = {name: p for name, p in twin.named_parameters() if p.is_floating_point() or p.is_complex()}
    names, parameters = able.keys(), [p.requires_grad_(True) for p in able.values()]
    total = [torch.zeros_like(as_real(p), dtype=torch.float32) for p in parameters]
    for number, batch in enumerate(batches):
        with torch.enable_grad():
            with explain(f"loss(model, batches[{number}]) fails"):
                value = loss(twin, batch)
            if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
                raise SurgeryError(
                    f"loss(model, batch) gives {value!r}: a number that depends on the model is needed", code="argument"
                )
            batch_gradients = torch.autograd.grad(value.sum(), parameters, allow_unused=True)
        for sums, gradient in zip(total, batch_gradients):
            if gradient is not None:
                single = as_real(gradient).float()
                sums += single.square() if squared else single
    return {name: sums / len(batches) for name, sums in zip(names, total)}


def read_activations(
    model: nn.Module, example: Any, batches: list[Any], output: Callable[[Any], Any] | None
) -> tuple[Solution, dict[Atom, Tensor]]:
    """Return the mean of |x| over other axes, where products and convolutions read x.

    Attention's products count, too. A copy of the model runs where the model is, once to trace it and once for each
    batch.
    """
    scores: dict[Atom, Tensor] = {}
    weight = 1 / len(batches)

    def add(place: tuple[int, int], tensor: Tensor, axes: Axes) -> None:
        size = tensor.abs().float()
        for position, axis in enumerate(axes):
            mean = size.movedim(position, 0).reshape(size.shape[position], -1).mean(1).cpu().double()
            if len(mean) == axis.size:  # a batch may have another number of samples or tokens than the example
                for atom, part in onto_atoms(axis, mean).items():
                    if not atom.why:
                        scores[atom] = scores.get(atom, 0) + weight * part

    twin, products = clone(model), SUMS | {"scaled_dot_product_attention"}
    with unfuse():
        solution = solve(trace_in_place(model, example, output))
        for number, batch in enumerate(batches):
            where = f"batches[{number}]"
            read_batch(twin, batch, solution, add, where=where, by="activation", names=products, or_constants=True)
    return solution, scores


def is_criterion(function: Callable) -> bool:
    """Return whether a function takes a name, rows and an axis, and not a model alone.

    >>> is_criterion(lambda name, rows, axis: rows.abs().sum(1)), is_criterion(lambda model: {}), is_criterion(dict)
    (True, False, False)
    """
    return takes(function, 3) is True and not takes(function, 1)


def takes(function: Callable, number: int) -> bool | None:
    """Return whether a function takes this number of arguments; None if not known.

    >>> takes(lambda name, rows: rows, 2), takes(lambda name, rows: rows, 1), takes(dict, 1)
    (True, False, None)
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return None
    try:
        signature.bind(*[None] * number)
    except TypeError:
        return False
    return True


def is_pruner(by: Any) -> bool:
    """Return whether this is an object of one of torch-pruning's importance classes."""
    module = sys.modules.get("torch_pruning.pruner.importance")  # whoever has such an object has imported it
    return module is not None and isinstance(by, module.Importance)


def pruner_scores(model: nn.Module, solution: Solution, by: Any, weights: ComputedWeights) -> dict[Atom, Tensor]:
    """Return the scores of torch-pruning's class, without widths that it skips.

    torch-pruning's group lists every layer that has a width with the positions in the layer, and for each the position
    of the width (`root_idxs`). It lists an attention's layer once, with the positions of all heads; here each head is
    an item of its own, so that every item is as long as the width. Their sums are the same. Their means are smaller by
    one factor for the width, which every `normalizer` but None takes out again. FPGMImportance, which compares the
    positions of an item with each other, compares the positions of one head only.
    """
    from torch_pruning.dependency import Dependency, Group, Node

    layer_of = cache(lambda name: as_parameters(model.get_submodule(name), name, weights))
    scores = {}
    for atom in solution.members:
        group = Group()
        for name, layer, handler, rows in _items(layer_of, solution, atom):
            node = Node(layer, None, name)
            for row in rows:
                group.add_dep(Dependency(handler, handler, node, node), row)
                group[-1].root_idxs = list(range(atom.size))
        if atom.why or atom.size == 1 or not len(group):
            continue
        layer = group[0].dep.target.module
        hint = "; it may need gradients in p.grad" if any(p.grad is None for p in layer.parameters()) else ""
        with explain(f"{type(by).__name__} fails for a width of {layer}", hint):
            values = by(group)
        if values is not None:
            scores[atom] = torch.as_tensor(values).detach().cpu().double()
    return scores


def _items(
    layer_of: Callable[[str], Any], solution: Solution, atom: Atom
) -> Iterator[tuple[str, nn.Module, Any, list[list[int]]]]:
    """Yield (tensor name, layer, torch-pruning's function, positions by occurrence)."""
    from torch_pruning import ops
    from torch_pruning.pruner.function import PrunerBox

    seen: set[tuple[int, int]] = set()
    for (name, attribute), position in solution.members[atom]:
        layer = layer_of(name)
        kind = ops.module2type(layer)
        if attribute != "weight" or kind not in PrunerBox or (id(layer), position) in seen:
            continue
        seen.add((id(layer), position))
        weight: Any = layer.weight
        transposed = getattr(layer, "transposed", False) or kind == ops.OPTYPE.EMBED
        is_output = weight.ndim == 1 or position == int(transposed)
        if position > 1:
            continue
        rows = occurrences(solution.tensors[name, attribute][position], atom)
        groups = getattr(layer, "groups", 1)
        if isinstance(layer, nn.modules.conv._ConvNd) and position == 1 and groups > 1:  # once for each group
            rows = torch.cat([rows + group * weight.shape[1] for group in range(groups)])
        cut = PrunerBox[kind]
        yield (
            join(name, attribute),
            layer,
            cut.prune_out_channels if is_output else cut.prune_in_channels,
            rows.tolist(),
        )

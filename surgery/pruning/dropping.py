"""Given positions are dropped, or all that are zero."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvTransposeNd

from surgery.copying import clone
from surgery.errors import SurgeryError
from surgery.forward import call, check_runs, in_precision, tensors_in, vary
from surgery.names import hint
from surgery.plan import Plan, as_runs
from surgery.pruning.computed import ComputedWeights, find_computed
from surgery.pruning.criteria import find_scored, read_activations
from surgery.width.narrow import narrow
from surgery.width.plan import runs_of
from surgery.width.positions import as_positions
from surgery.width.replay import same
from surgery.width.solve import Atom, Axis, Solution, named_widths, onto_atoms, solve
from surgery.width.trace import trace_model

_log = logging.getLogger(__name__)


def drop(
    model: nn.Module,
    positions: Mapping[str, Sequence[int] | Tensor],
    *,
    example: Any,
    output: Callable[[Any], Any] | None = None,
    strict: bool = False,
) -> tuple[nn.Module, Plan]:
    """Return a copy of any module without given positions of some widths.

    Args:
        model: any module; it is not changed.
        positions: which ones go, by the name of a layer (output channels of a convolution, features that a linear layer
            makes), or of a width, as `surgery.widths` lists them. What is given of layers whose outputs are added, and
            that so share a width, goes together. Of a layer that makes several widths (heads and the positions in each)
            whole positions of these can go.
        example, output, strict: as for `surgery.narrow`, whose `positions` say what stays instead.

    Returns:
        The small module, and the plan that maps its state to the model's.

    Raises:
        SurgeryError: for a name that is no layer's and no width's, for positions that it does not have, if none of a
            width would be left, and as `surgery.narrow` does.

    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3))
    >>> small, plan = drop(net, {"0": [2, 6, 7]}, example=torch.zeros(2, 3, 8, 8))
    >>> small[0].out_channels, torch.equal(small[3].weight, net[3].weight[:, [0, 1, 3, 4, 5]])
    (5, True)
    """
    check_runs(model, example, "drop")
    if not isinstance(positions, Mapping) or not positions:
        raise SurgeryError(f"drop takes positions by name, {{'conv1': [2, 6]}}, got {positions!r:.60}", code="argument")
    solution = solve(trace_model(model, example, output).found)
    widths = named_widths(solution)
    axes: dict[str, Axis] = dict(reversed(solution.made)) | widths  # of a layer with several the first
    rest: dict[Atom, set[int]] = {}
    for name, request in positions.items():
        if name not in axes:
            raise SurgeryError(f"{name!r} is no width, nor a layer with one: {hint(str(name), [*axes])}", code="name")
        axis = axes[name]
        where = as_positions(name, axis.size, request)
        stay = onto_atoms(axis, torch.ones(axis.size, dtype=torch.long).index_fill(0, torch.tensor(where), 0))
        left = {atom: counts.nonzero().flatten().tolist() for atom, counts in stay.items()}
        if len(where) == axis.size:
            raise SurgeryError(f"all {axis.size} positions of {name!r} are to go: leave at least one", code="width")
        gone = as_runs(sorted({*range(axis.size)}.difference(where)))
        if runs_of(axis, {atom: places for atom, places in left.items() if len(places) < atom.size}) != gone:
            names = " and ".join(repr(width) for width, atom in widths.items() if atom in left)
            raise SurgeryError(f"what is to go of {name!r} are no whole positions of {names}: name these", code="width")
        for atom, places in left.items():
            rest[atom] = rest.get(atom, {*range(atom.size)}).intersection(places)
    stays = {name: sorted(rest[atom]) for name, atom in widths.items() if atom in rest and len(rest[atom]) < atom.size}
    if empty := [name for name, places in stays.items() if not places]:
        raise SurgeryError(f"no position of {empty[0]!r} would be left: leave at least one", code="width")
    return narrow(model, positions=stays, example=example, output=output, strict=strict)


def drop_zeros(model: nn.Module, *, example: Any, output: Callable[[Any], Any] | None = None) -> tuple[nn.Module, Plan]:
    """Return a copy without zero positions; in evaluation mode it computes the same.

    So masks of torch.nn.utils.prune (`ln_structured`, say) make a model smaller. A position goes if all weights that
    make it are zero, and it is zero where it is read; or if all weights that read it are. One whose weights are zero,
    and that a bias or a norm makes something else, stays and is logged with the layer that reads it: set the bias
    to zero, or `drop` it all the same.

    Args:
        model: any module with weights; it is not changed. It runs on the example, and on other numbers like it.
        example, output: as for `surgery.narrow`.

    Returns:
        The small module, and the plan that maps its state to the model's.

    Raises:
        SurgeryError: if no position is zero, or if without them the model computes something else, as where a layer
            norm counts them.

    >>> net = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
    >>> net[0].weight.data[[1, 4]] = net[0].bias.data[[1, 4]] = 0
    >>> x = torch.randn(3, 4)
    >>> small, plan = drop_zeros(net, example=x)
    >>> small[0], torch.allclose(small(x), net(x), atol=1e-6)
    (Linear(in_features=4, out_features=4, bias=True), True)
    """
    check_runs(model, example, "drop_zeros")
    weights = find_computed(model, example)
    solution = solve(trace_model(weights.model, example, output).found)
    names = {atom: name for name, atom in weights.names(solution).items() if not atom.why}
    unmade, unread = _zero_positions(weights, solution)
    inputs = vary(example)
    of_read, activations = read_activations(model, inputs, [inputs], output)
    read = {name: activations[atom] == 0 for name, atom in named_widths(of_read).items() if atom in activations}
    gone, stay = {}, {}
    for atom, name in names.items():
        none = torch.zeros(atom.size, dtype=torch.bool)
        absent = unmade.get(atom, none)
        goes = (absent & read.get(name, none)) | unread.get(atom, none)
        gone |= {name: goes.nonzero().flatten().tolist()} if goes.any() else {}
        left = absent & ~goes
        stay |= {name: left.nonzero().flatten().tolist()} if left.any() else {}
    for name, where in stay.items():
        _log.warning(
            "positions %s of %r stay: their weights are zero, and a bias or a norm makes something else of them",
            where, name,
        )  # fmt: skip
    if not gone:
        raise SurgeryError(f"no position of a width of {type(model).__name__} is zero where it is read", code="width")
    small, plan = drop(model, gone, example=example, output=output)
    if not _same_outputs(model, small, inputs, output):
        raise SurgeryError(
            f"without the zero positions of {', '.join(map(repr, gone))} {type(model).__name__} computes something "
            "else, as a norm over a width does that counts them: surgery.pruning.drop drops them all the same",
            code="run",
        )
    return small, plan


def _zero_positions(weights: ComputedWeights, solution: Solution) -> tuple[dict[Atom, Tensor], dict[Atom, Tensor]]:
    """Return by width the positions that matrices write, and read, with zeros alone."""
    unmade: dict[Atom, Tensor] = {}
    unread: dict[Atom, Tensor] = {}
    for key, tensor in find_scored(weights):
        if tensor.ndim < 2 or key in weights.parts:  # of a weight that is computed the weight itself counts
            continue
        layer = weights.model.get_submodule(key[0])
        makes = int(isinstance(layer, _ConvTransposeNd | nn.Embedding | nn.EmbeddingBag))
        for place, axis in enumerate(solution.tensors[weights.keys.get(key, key)]):
            counts = tensor.movedim(place, 0).reshape(axis.size, -1).count_nonzero(1).cpu().long()
            for atom, part in onto_atoms(axis, counts).items():
                side = unmade if place == makes else unread
                side[atom] = side.get(atom, torch.ones(atom.size, dtype=torch.bool)) & (part == 0)
    return unmade, unread


def _same_outputs(model: nn.Module, small: nn.Module, example: Any, output: Callable[[Any], Any] | None) -> bool:
    """Return whether two models' outputs agree, in double precision where they can."""

    def results(net: nn.Module, dtype: torch.dtype | None) -> list[Tensor]:
        twin = clone(net).eval()
        if dtype is not None:
            twin._apply(lambda tensor: tensor.to(in_precision(tensor.dtype, dtype)))
        with torch.no_grad():
            outputs = call(twin, vary(example, dtype))
        return tensors_in(output(outputs) if output else outputs)

    try:
        return all(map(same, results(model, torch.float64), results(small, torch.float64)))
    except RuntimeError:  # it has no double precision
        return all(map(same, results(model, None), results(small, None)))

"""Operations on a checkpoint with its model: each takes one and gives what it becomes.

The docstring of an operation is what --help prints. `Returns` says first what --out gets, then what its --plan is.
"""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from tqdm import tqdm

import surgery
from surgery.copying import clone
from surgery.depth.sections import ordered_sections
from surgery.errors import SurgeryError, about
from surgery.files.reading import read_json
from surgery.lazy import metas
from surgery.operations.arguments import (
    Counts,
    Function,
    Number,
    OrdersFile,
    Patterns,
    Score,
    Share,
    Steps,
    Whole,
    batches_of,
)
from surgery.operations.checkpoint import Built, InBlocks, Model, state_for
from surgery.operations.states import plan_of
from surgery.plan.positions import positions
from surgery.plan.submodel import Plan
from surgery.symmetry.alignment import Aligner
from surgery.symmetry.assignment import Search

_log = logging.getLogger(__name__)


def narrow(
    model: Built,
    *,
    rate: Share,
    keep: Patterns = (),
    heads: Literal["inside", "drop"] = "inside",
    rounding: Whole = 1,
    strict: bool = False,
) -> Model:
    """Keep the first positions of every hidden width.

    Args:
        model: the checkpoint
        rate: share of every hidden width to keep, in (0, 1]
        keep: modules whose tensors stay whole, such as layer1 or '*.downsample'; may be given several times
        heads: what is done to attention: slice inside every head, or drop heads
        rounding: widths become multiples of this number, upwards
        strict: end with an error if a width that was to shrink stays whole

    Returns:
        the new checkpoint; the plan, by which the narrow model lies in the given one
    """
    small, plan = surgery.narrow(
        model.built(), rate, keep=keep, heads=heads, rounding=rounding, strict=strict, **model.run_arguments()
    )
    return model.becomes(plan.extract(model.values), small, plan)


def prune(
    model: Built,
    *,
    macs: Share | None = None,
    parameters: Share | None = None,
    positions: Share | None = None,
    by: Score = "l1",
    steps: Steps = 1,
    even: bool = False,
    heads: Literal["inside", "drop"] = "inside",
    rounding: Whole = 1,
) -> Model:
    """Keep the most important positions of all widths, down to a given size.

    Args:
        model: the checkpoint
        macs: the share of multiply-accumulates to keep, in (0, 1]
        parameters: the share of parameters to keep, in (0, 1]
        positions: the share of the positions of all widths to keep, in (0, 1]: 1 - torch-pruning's pruning_ratio
        by: how important a position is: by the norm of its weights, or by batch norms' scales
        steps: in how many steps, each of which scores anew what is left
        even: keep the same share of all widths, so that layers stay alike, as a folder of transformers' model asks
        heads: what is done to attention: cut inside every head, or drop heads
        rounding: widths become multiples of this number, upwards, such as of how many heads there are

    Returns:
        the new checkpoint; the plan, by which the narrow model lies in the given one
    """
    if [macs, parameters, positions].count(None) != 2:
        raise SurgeryError("prune needs a size: give the share of macs, parameters or positions to keep, one of them")
    target = surgery.pruning.Target(macs=macs, parameters=parameters, positions=positions, even=even)
    net = model.loaded()
    small, plan, _ = surgery.pruning.prune(
        net, target=target, importance=by, steps=steps, heads=heads, rounding=rounding, **model.run_arguments()
    )
    return model.becomes(plan.extract(model.values), small, plan)


def widen(
    model: Built,
    *,
    rate: Number,
    mode: Literal["copy", "zero"] = "copy",
    noise: Number = 0.0,
    seed: Whole = 0,
    keep: Patterns = (),
    heads: Literal["inside", "drop"] = "drop",
    strict: bool = False,
) -> Model:
    """Repeat the positions of every hidden width; the outputs stay the same.

    Args:
        model: the checkpoint
        rate: how many times as wide the model becomes, above 1; norms over a width allow whole numbers only
        mode: how what reads a width makes up for its copies: each copy is read with its share of the weight, or new
            ones with weight 0, so that every old number stays
        noise: noise in the weights that make new positions, as a share of the weights' standard deviation, so that
            copies learn apart
        seed: of the noise
        keep: modules whose tensors stay as they are, such as layer1 or '*.downsample'; may be given several times
        heads: what is done to attention: repeat heads (drop, the inverse of what narrow does then), or nothing (inside)
        strict: end with an error if a hidden width cannot grow

    Returns:
        the new checkpoint, of a model built that wide; the plan, by which the given model lies in the wide one
    """
    settings: dict[str, Any] = {"rate": rate, "mode": mode, "keep": keep, "heads": heads, "strict": strict}
    settings |= {"noise": noise, "generator": torch.Generator().manual_seed(seed)}
    wide, plan = surgery.widening.widen(model.loaded(), **model.run_arguments(), **settings)
    dtypes = metas(model.values)
    values = {name: tensor.to(dtypes[name].dtype) for name, tensor in surgery.state(wide).items()}
    return model.becomes(values, wide, plan)


def graft(model: InBlocks, *, depths: Counts) -> Model:
    """Repeat the last block of each section.

    Args:
        model: the checkpoint
        depths: the new number of blocks of each section

    Returns:
        the new checkpoint; the plan, by which the given model lies in the deeper one
    """
    return _at_depth(model, surgery.graft, lambda plan, values: plan.embed(values)[0], depths=depths)


def ungraft(model: InBlocks, *, keep: Counts) -> Model:
    """Keep the first blocks of each section.

    Args:
        model: the checkpoint
        keep: the number of blocks of each section that stay

    Returns:
        the new checkpoint; the plan, by which the shallower model lies in the given one
    """
    return _at_depth(model, surgery.ungraft, Plan.extract, keep=keep)


def _at_depth(model: Model, change: Callable, by_plan: Callable, **depths: Any) -> Model:
    """Change the model, or where it is not known, what the names of its tensors show of it."""
    if model.described:
        changed, plan = change(model.built(), example=model.example(), **depths)
    else:
        shapes = metas(model.values)
        if hidden := [section.name for section, known in ordered_sections(shapes).items() if not known]:
            raise SurgeryError(
                f"{model.what} does not show whether the blocks of {', '.join(map(repr, hidden))} run one after "
                "another, or beside each other, as experts do: give the model (--model)"
            )
        (_, plan), changed = change(shapes, **depths), None
    return model.becomes(by_plan(plan, model.values), changed, plan)


def permute(
    model: Built,
    *,
    permutations: OrdersFile | None = None,
    sort_by: Score | None = None,
    inverse: bool = False,
) -> Model:
    """Put the positions of hidden widths in another order; the outputs stay the same.

    Args:
        model: the checkpoint
        permutations: the new order of each width, {"fc1.weight:0": [2, 0, 1]} puts position 2 first; or a plan that
            permute or align has written, which needs no --model
        sort_by: put the most important positions first, by the norm of their weights or by batch norms' scales
        inverse: undo the --permutations

    Returns:
        the new checkpoint; the plan, which `permute --inverse --permutations PLAN.json` undoes
    """
    if (permutations is None) == (sort_by is None):
        raise SurgeryError("permute needs an order: give a file of permutations, or sort_by, one of the two")
    if inverse and sort_by is not None:
        raise SurgeryError("inverse undoes the permutations of a file: give the plan that was saved when sorting")
    if sort_by is not None:
        net, run = model.loaded(), model.run_arguments()
        scores = surgery.pruning.importance(net, by=sort_by, **run)
        return _ordered(model, *surgery.symmetry.permute(net, by=_in_checkpoints(net, run, scores), **run))
    found = _read(permutations)
    if isinstance(found, Plan):
        if model.described:
            model.built()  # brings tied tensors under one name
        return model.alike(found.embed(model.values)[0] if inverse else found.extract(model.values), found)
    with about(str(permutations)):
        orders = {name: _inverse(order) if inverse else order for name, order in found.items()}
        return _ordered(model, *surgery.symmetry.permute(model.built(), orders, **model.run_arguments()))


def align(
    model: Built,
    *,
    to: Model,
    by: Literal["weights", "activations"] = "weights",
    data: Function | None = None,
    starts: Whole = 1,
    seed: Whole = 0,
) -> Model:
    """Put hidden widths in the order in which they match another checkpoint's.

    Args:
        model: the checkpoint
        to: the checkpoint to match, of the same architecture
        by: what has to match: the weights, or what layers read on some --data
        data: a function of yours that gives batches of inputs, for --by activations
        starts: how many times to look for the best match: once from the order as it is and from one by what does not
            depend on it, and each further time from a drawn order
        seed: of the drawn orders

    Returns:
        the new checkpoint, which computes what the first one does; the plan, which `permute --inverse --permutations
        PLAN.json` undoes
    """
    if (by == "activations") != (data is not None):
        need = "needs data, module:function that gives batches of inputs" if data is None else "takes no data"
        raise SurgeryError(f"to align by {by} {need}")
    net = model.loaded()
    other = dict(state_for(net, to.values, to.what, model.name))
    with about(f"{to.what} is no model of the same architecture as {model.what}"):
        reference = surgery.load(clone(net), other)
    run = model.run_arguments()
    aligner = Aligner(reference, **run)
    with tqdm(desc="align", unit="width", delay=2, leave=False, disable=None) as bar:

        def progress(done: int, of: int) -> None:
            bar.total = of
            bar.update(done - bar.n)

        search = Search(starts, torch.Generator().manual_seed(seed), progress)
        if by == "weights":
            orders = aligner.by_weights(reference, net, search)
        else:
            orders = aligner.by_activations(reference, net, batches_of(data), search)
    aligner.unaligned([orders])
    moved = {name: order for name, order in orders.items() if order.tolist() != list(range(len(order)))}
    plan = aligner.plan(_in_checkpoints(net, run, moved))
    return _ordered(model, plan.build(net), plan)


def _in_checkpoints(model: nn.Module, run: Mapping[str, Any], orders: Mapping[str, Any]) -> dict[str, Any]:
    """The orders, or scores, of widths along which checkpoints hold all tensors; the others are logged.

    The model's class would make a tensor that no checkpoint holds anew, in the old order (the frequencies of rotary
    positions, say).
    """
    held = model.state_dict()
    outside = {}
    for width in surgery.widths(model, **run):
        if missing := [name for name, _ in width.members if name not in held]:
            outside[width.name] = missing[0]
    if left := [name for name in orders if name in outside]:
        more = f" (and {len(left) - 1} more widths)" if len(left) > 1 else ""
        why = "the model's class makes that tensor anew, and no checkpoint holds it"
        _log.warning("the positions along %s%s keep their order: %s", outside[left[0]], more, why)
    return {name: value for name, value in orders.items() if name not in outside}


def _ordered(model: Model, module: Any, plan: Plan) -> Model:
    if plan.edits:  # the model's class would make these anew, in the old order
        edit = plan.edits[0]
        raise SurgeryError(
            f"{edit['module'] or 'the model'} keeps a tensor {edit['attribute']!r} along a width that was to get "
            "another order, and a checkpoint does not hold it: leave that width out, or use symmetry.permute in Python"
        )
    return model.becomes(plan.extract(model.values), module, plan)


def _read(path: Path) -> Plan | dict[str, Any]:
    """A plan that permutes, or orders by width."""
    found = read_json(path)
    if not isinstance(found, dict):
        raise SurgeryError(f'{path} holds no permutations by width, such as {{"fc1.weight:0": [2, 0, 1]}}')
    if "format" not in found and "entries" not in found:
        return found
    plan = plan_of(path)
    if odd := [name for name in plan.shapes if not _is_permutation(plan, name)]:
        raise SurgeryError(f"{path} is a plan that does more to {odd[0]!r} than permute it: use extract or embed")
    if plan.edits:
        raise SurgeryError(
            f"{path} is a plan that also changes the model's attributes: use surgery.symmetry.permute in Python"
        )
    return plan


def _is_permutation(plan: Plan, name: str) -> bool:
    sources = plan.entries.get(name, ())
    if set(plan.entries) != set(plan.shapes) or [source.name for source in sources] != [name]:
        return False
    sizes = plan.shapes[name]
    return all(
        runs is None or sorted(positions(runs)) == list(range(size)) for runs, size in zip(sources[0].index, sizes)
    )


def _inverse(order: Any) -> Any:
    """The permutation that undoes another; what is none is left to `surgery.symmetry.permute`, which refuses it."""
    if not isinstance(order, list) or not all(type(one) is int for one in order):
        return order
    return sorted(range(len(order)), key=order.__getitem__) if sorted(order) == list(range(len(order))) else order

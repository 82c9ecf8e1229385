"""The commands that change the widths of a checkpoint, or the order along them."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from torch import nn
from tqdm import tqdm
from tyro.conf import arg

import surgery
from surgery.commands import flags
from surgery.commands.checkpoint import From, Model, ToPlanned, plan_of
from surgery.copying import clone
from surgery.errors import SurgeryError, about
from surgery.files.reading import read_json
from surgery.lazy import metas
from surgery.plan import Plan
from surgery.plan.positions import positions as positions_of
from surgery.pruning.criteria import OF_DATA

_log = logging.getLogger(__name__)
Importance = Literal["l1", "l2", "bn_scale"]
_CRITERION = f"{{{','.join(get_args(Importance))}}}|MODULE:FUNCTION"


def narrow(
    source: From,
    *,
    width: flags.Share,
    keep: flags.Patterns = (),
    heads: flags.Heads = "inside",
    rounding: int = 1,
    strict: flags.Switch = False,
    to: ToPlanned,
) -> None:
    """Keep the first positions of every hidden width.

    Args:
        width: share of every hidden width to keep, in (0, 1]
        keep: modules whose tensors keep their size, such as layer1 or '*.downsample'; may be given several times
        heads: what is done to attention: slice inside every head, or drop heads
        rounding: widths become multiples of this number, upwards
        strict: end with an error if a width that was to shrink keeps its size
    """
    flags.check_share("--width", width)
    model = source.open()
    how: dict[str, Any] = {"keep": keep, "heads": heads, "rounding": rounding, "strict": strict}
    small, plan = surgery.narrow(model.build(), width, **how, **model.run_arguments())
    record = {"do": "narrow", "width": width, **how}
    to.write(plan.extract(model.values), record, {"model": model}, like=model, module=small)
    to.write_plan(plan)


def prune(
    source: From,
    *,
    macs: flags.OptionalShare = None,
    parameters: flags.OptionalShare = None,
    positions: flags.OptionalShare = None,
    importance: Annotated[str, arg(metavar=_CRITERION)] = "l1",
    steps: int = 1,
    even: flags.Switch = False,
    heads: flags.Heads = "inside",
    rounding: int = 1,
    to: ToPlanned,
) -> None:
    """Keep the most important positions of all widths, down to a size.

    One of --macs, --parameters and --positions gives the size.

    Args:
        macs: the share of multiply-accumulates to keep, in (0, 1]
        parameters: the share of parameters to keep, in (0, 1]
        positions: the share of the positions of all widths to keep, in (0, 1]: 1 - torch-pruning's pruning_ratio
        importance: of a position: by the norm of its weights, by batch norms' scales, or by a function of yours
        steps: in how many steps, each of which scores again what is left
        even: keep the same share of all widths, so that layers stay alike, as a folder of transformers' model asks
        heads: what is done to attention: cut inside every head, or drop heads
        rounding: widths become multiples of this number, upwards, such as of how many heads there are
    """
    target: dict[str, Any] = {"macs": macs, "parameters": parameters, "positions": positions}
    target = {name: share for name, share in target.items() if share is not None}
    if len(target) != 1:
        raise SurgeryError("prune needs a size: give --macs, --parameters or --positions, one of them", code="argument")
    for name, share in target.items():
        flags.check_share(f"--{name}", share)
    if not 1 <= steps <= 1000:
        raise SurgeryError(f"--steps {steps}: give a whole number from 1 to 1000", code="argument")
    criterion = _criterion_of(importance, "--importance")
    model = source.open()
    how: dict[str, Any] = {"steps": steps, "heads": heads, "rounding": rounding}
    target["even"] = even
    size = surgery.pruning.Target(**target)
    small, plan, _ = surgery.pruning.prune(
        model.load(), target=size, importance=criterion, **how, **model.run_arguments()
    )
    record = {"do": "prune", **target, "importance": importance, **how}
    to.write(plan.extract(model.values), record, {"model": model}, like=model, module=small)
    to.write_plan(plan)


def widen(
    source: From,
    *,
    rate: Annotated[float, flags.optional(metavar="NUMBER", help_behavior_hint="(required)")],
    mode: Literal["copy", "zero"] = "copy",
    noise: float = 0.0,
    seed: int = 0,
    keep: flags.Patterns = (),
    heads: flags.Heads = "drop",
    strict: flags.Switch = False,
    to: ToPlanned,
) -> None:
    """Repeat the positions of every hidden width; the outputs stay the same.

    Args:
        rate: how many times as wide the model becomes, above 1; norms over a width allow whole numbers only
        mode: copies share the weight that reads them, or are read with weight 0, so that every old number stays
        noise: in the weights that make new positions, as a share of their deviation, so that copies learn apart
        seed: of the noise
        keep: modules whose tensors stay as they are, such as layer1 or '*.downsample'; may be given several times
        heads: what is done to attention: repeat heads (drop, the inverse of narrow's), or nothing (inside)
        strict: end with an error if a hidden width cannot grow
    """
    draws, model = flags.generator(seed), source.open()
    how: dict[str, Any] = {"rate": rate, "mode": mode, "noise": noise, "keep": keep, "heads": heads, "strict": strict}
    wide, plan = surgery.widening.widen(model.load(), generator=draws, **how, **model.run_arguments())
    dtypes = metas(model.values)
    values = {name: tensor.to(dtypes[name].dtype) for name, tensor in surgery.state(wide).items()}
    to.write(values, {"do": "widen", **how, "seed": seed}, {"model": model}, like=model, module=wide)
    to.write_plan(plan)


def permute(
    source: From,
    *,
    permutations: flags.OptionalFile = None,
    by: Annotated[str | None, flags.optional(metavar=_CRITERION)] = None,
    inverse: flags.Switch = False,
    to: ToPlanned,
) -> None:
    """Put the positions of hidden widths in another order; the outputs stay.

    What permute or align has done is undone by --inverse and the plan they wrote.

    Args:
        permutations: orders by width: {"fc1.weight:0": [2, 0, 1]} puts position 2 first; or a plan, without a --model
        by: put the most important positions first, by the norm of their weights, by batch norms' scales, or by a
            function of yours
        inverse: undo the --permutations
    """
    if (permutations is None) == (by is None):
        raise SurgeryError("permute needs an order: give --permutations FILE, or --by, one of the two", code="argument")
    if inverse and by is not None:
        raise SurgeryError("--inverse undoes --permutations: give the plan that --by has written", code="argument")
    criterion = by and _criterion_of(by, "--by")
    record = {"do": "permute", "permutations": permutations and str(permutations), "by": by, "inverse": inverse}
    model = source.open()
    if permutations is None:
        run = model.run_arguments()
        scores = surgery.pruning.importance(model.load(), by=criterion, **run)
        plan = _ordering(model, by=_in_checkpoints(model.build(), run, scores))
        values = plan.extract(model.values)
    elif isinstance(content := _read(permutations), Plan):
        if model.described:
            model.build()  # brings tied tensors under one name
        plan, values = content, content.embed(model.values)[0] if inverse else content.extract(model.values)
    else:
        with about(str(permutations)):
            plan = _ordering(model, {name: _inverse(order) if inverse else order for name, order in content.items()})
            values = plan.extract(model.values)
    to.write(values, record, {"model": model}, like=model, module=model.module)
    to.write_plan(plan)


def align(
    source: From,
    *,
    reference: Annotated[Path, flags.optional(name="to", metavar="FILE", help_behavior_hint="(required)")],
    by: Literal["weights", "activations"] = "weights",
    data: flags.FunctionPath = None,
    starts: int = 1,
    seed: int = 0,
    to: ToPlanned,
) -> None:
    """Order hidden widths so that they match another checkpoint's.

    The outputs stay. Undo it by `permute --inverse --permutations PLAN.json`.

    Args:
        reference: the checkpoint to match, of the same architecture
        by: what has to match: the weights, or what layers read on some --data
        data: a function of yours that gives batches of inputs, for --by activations
        starts: how many times to look for the best match, each but the first from a random order
        seed: of the random orders
    """
    if (by == "activations") != (data is not None):
        raise SurgeryError(f"--by {by} {'takes no' if data else 'needs'} --data, a function", code="argument")
    draws, model = flags.generator(seed), source.open()
    other = Model(reference)
    net, run, batches = model.load(), model.run_arguments(), flags.batches_of(data) if data else []
    with tqdm(desc="align", unit="width", delay=2, leave=False, disable=None) as bar:

        def progress(done: int, of: int) -> None:
            bar.total = of
            bar.update(done - bar.n)

        models = [other.load(clone(net)), net]
        _, (_, orders), _ = surgery.symmetry.align(
            models, by=by, batches=batches, starts=starts, generator=draws, progress=progress, **run
        )
    moved = {name: order for name, order in orders.items() if order.tolist() != list(range(len(order)))}
    plan = _ordering(model, _in_checkpoints(net, run, moved))
    record = {"do": "align", "by": by, "data": data, "starts": starts, "seed": seed}
    inputs = {"model": model, "to": other}
    to.write(plan.extract(model.values), record, inputs, like=model, module=model.module)
    to.write_plan(plan)


def _criterion_of(name: str, flag: str) -> Any:
    """Return a criterion's name, or the user's own function, module:function."""
    if ":" in name:
        return flags.import_object(name, flag)
    if name not in get_args(Importance):
        choice = ", ".join(get_args(Importance))
        reason = f" ({name} needs batches of data: use it from Python)" if name in OF_DATA else ""
        raise SurgeryError(
            f"{flag} {name}: choose {choice}, or give module:function of your own{reason}", code="argument"
        )
    return name


def _ordering(model: Model, orders: Mapping[str, Any] | None = None, **by: Any) -> Plan:
    """Return the plan of `permute`; SurgeryError if no checkpoint can hold the result."""
    _, plan = surgery.symmetry.permute(model.build(), orders, **by, **model.run_arguments())
    if plan.edits:  # the model's class would make these again, in the old order
        edit = plan.edits[0]
        raise SurgeryError(
            f"{edit['module'] or 'the model'} keeps a tensor {edit['attribute']!r} along a width that was to get "
            "another order, and a checkpoint does not hold it: leave that width out, or use symmetry.permute in Python",
            code="unsupported",
        )
    return plan


def _in_checkpoints(model: nn.Module, run: Mapping[str, Any], orders: Mapping[str, Any]) -> dict[str, Any]:
    """Return orders, or scores, of widths with all tensors stored; log the others."""
    held, outside = model.state_dict(), {}
    for width in surgery.widths(model, **run):
        if missing := [name for name, _ in width.members if name not in held]:
            outside[width.name] = missing[0]
    if left := [name for name in orders if name in outside]:
        more = f" (and {len(left) - 1} more widths)" if len(left) > 1 else ""
        why = "the model's class makes that tensor again, and no checkpoint holds it"
        _log.warning("the positions along %s%s keep their order: %s", outside[left[0]], more, why)
    return {name: value for name, value in orders.items() if name not in outside}


def _read(path: Path) -> Plan | dict[str, Any]:
    """Read a plan that permutes, or orders by width."""
    content = read_json(path)
    if not isinstance(content, dict):
        raise SurgeryError(f'{path} holds no permutations by width, such as {{"fc1.weight:0": [2, 0, 1]}}', code="file")
    if "format" not in content and "entries" not in content:
        return content
    plan = plan_of(path)
    if odd := [name for name in plan.shapes if not _is_permutation(plan, name)]:
        raise SurgeryError(f"{path} does more to {odd[0]!r} than permute it: use extract or embed", code="plan")
    if plan.edits:
        raise SurgeryError(f"{path} also changes the model: use surgery.symmetry.permute in Python", code="plan")
    return plan


def _is_permutation(plan: Plan, name: str) -> bool:
    sources = plan.entries.get(name, ())
    if set(plan.entries) != set(plan.shapes) or [source.name for source in sources] != [name]:
        return False
    axes = zip(sources[0].index, plan.shapes[name])
    return all(runs is None or sorted(positions_of(runs)) == list(range(size)) for runs, size in axes)


def _inverse(order: Any) -> Any:
    """Invert a permutation; leave anything else for `permute` to refuse."""
    try:
        return sorted(range(len(order)), key=order.__getitem__) if sorted(order) == list(range(len(order))) else order
    except TypeError:
        return order

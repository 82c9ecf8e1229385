"""Width slicing: a narrower network that keeps the first, or the best, positions of every hidden width."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from surgery.errors import SurgeryError
from surgery.submodel import Submodel
from surgery.width.demand import Demand, Heads, Rounding, checked
from surgery.width.scores import Scores
from surgery.width.search import Search
from surgery.width.target import Target
from surgery.width.whole import told

_log = logging.getLogger(__name__)


def narrow(
    model: nn.Module,
    *,
    rate: float | None = None,
    example: Any = None,
    rates: Mapping[str, float] | None = None,
    target: Target | None = None,
    keep_top: Scores | None = None,
    keep: Sequence[str] = (),
    output: Callable[[Any], Any] | None = None,
    heads: Heads = "inside",
    rounding: Rounding = math.ceil,
    strict: bool = False,
) -> tuple[nn.Module, Submodel]:
    """A narrower copy of any module: the first, or the best, ceil(rate * C) positions of every hidden width C.

    One forward pass in evaluation mode shows which axes of which tensors are one width, and another in training mode if
    the model does something else there. The narrow model's own passes are then compared, operation by operation, with
    what the algebra of axes predicts, so that no wrong model is returned. All run on the meta device if the model can,
    so that they cost little.

    Args:
        model: any module; it is not changed.
        rate: in (0, 1]; needed, unless `rates` (it is then 1) or a `target` are given.
        example: an input: a tensor, a tuple of arguments or a dict of keyword arguments; needed. Its axes, and those of
            the output (classes), stay whole; so does everything that the forward passes do not use.
        rates: other rates for the widths that modules of these names make: `{"layer1": 0.5, "*.mlp.fc1": 0.25}`. A
            pattern matches a module's name or that of one around it; `*`, `?` and `[...]` are as in file names. The
            first pattern that matches counts.
        target: how large the narrow model may be, `Target(macs=0.5)`, in place of rates. With `keep_top` the positions
            of all widths compete for staying.
        keep_top: scores by width, as `surgery.importance` gives them: those with the highest stay, in their order; of
            equal ones the first. A width whose order matters (`widths` says why) keeps its first positions even so.
        keep: such patterns of modules whose tensors stay whole.
        output: what of the output has to keep its shape: `lambda y: y.logits` for a model that also returns its hidden
            states.
        heads: `inside` keeps all heads of an attention and slices inside each of them; `drop` keeps the first heads,
            and is refused where constants and scales that the code makes for heads are others with fewer of them
            (BLOOM's).
        rounding: from rate * C to the number of positions kept, which is at least one and at most C. `zoo.divisor8`
            gives multiples of 8.
        strict: whether a hidden width that stays whole, although it was to shrink, is an error, and a tensor that no
            pass has used although it is as long as a width that shrinks, and a constant of the code along a width whose
            order matters that is not the first positions of the full model's. Otherwise such widths are logged as a
            warning with the reasons, and an error only if nothing shrinks; such tensors and constants are logged, too.

    Returns:
        The narrow module, and the plan that maps its state to the model's.

    Raises:
        SurgeryError: if no hidden width can shrink, or with `strict` not all of them (a model that has none is copied);
            if a pattern matches no module, or decides nothing; if modules that make one width are to have different
            rates; if the target cannot be reached, with `strict` also if whole positions miss it by more than 2 %,
            which otherwise is logged as a warning; for scores of another model, and if there are none for a width that
            is to shrink.

    >>> import torch
    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(32, 5))
    >>> small, plan = narrow(net, rate=0.5, example=torch.zeros(2, 3, 4, 4))
    >>> small[0], small[3]
    (Conv2d(3, 4, kernel_size=(3, 3), stride=(1, 1)), Linear(in_features=16, out_features=5, bias=True))
    >>> torch.equal(plan.extract(net)["0.weight"], net[0].weight[:4])
    True
    """
    if rate is None and not rates and target is None:
        raise SurgeryError("narrow takes a rate and an example; to copy the widths of a smaller model use corner")
    if target is not None and (rate is not None or rates):
        raise SurgeryError("a target says how large the model is, so it replaces rate and rates: give one of them")
    if target is not None and not isinstance(target, Target):
        raise SurgeryError(f"target is surgery.Target(macs=...) or surgery.Target(parameters=...), got {target!r}")
    if target is not None:
        rate = target.rate
    if example is None:
        raise SurgeryError("narrow runs one forward pass: give an input as `example`")
    demand = checked(model, Demand(1.0 if rate is None else rate, rates or {}, keep, heads, rounding))
    search = Search(model, example, demand, output, strict, target, keep_top)
    plan = search.plan()
    if missed := search.missed():
        if strict:
            raise SurgeryError(missed)
        _log.warning(missed)
    if whole := search.whole():
        if strict or not search.chosen.choice:
            raise SurgeryError(told(model, whole))
        _log.warning(told(model, whole))
    small = plan.build(model)
    if strict and (wide := search.too_wide(small)):
        raise SurgeryError(wide)
    if others := search.told_others():
        if strict:
            raise SurgeryError(others)
        _log.warning(others)
    if unused := search.untouched(small):
        if strict:
            raise SurgeryError(unused)
        _log.warning(unused)
    return small, plan

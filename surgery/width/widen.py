"""Wider networks that compute what they did: the inverse of `narrow`."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import nn

from surgery.errors import SurgeryError
from surgery.forward import named_tensors
from surgery.names import joined
from surgery.plan import Index, Runs, Source, Submodel, as_runs, structure
from surgery.plan.edits import attribute_of
from surgery.plan.positions import as_index, positions
from surgery.states import load, owners, state
from surgery.width import axes
from surgery.width.axes import Why, lost, role
from surgery.width.beside import Readers, changed, readers, shares, trial, trial_input
from surgery.width.check import Stuck, checked_plan, plan_of
from surgery.width.choose import Demand, Heads, checked, choose
from surgery.width.search import same_code
from surgery.width.shortfall import listed, stayed_whole
from surgery.width.solved import Atom, Choice, atoms, solve
from surgery.width.trace import one_by_one, traced_in_place

Mode = Literal["copy", "zero"]
_MOST_LEFT = 12  # operations around which widths are left as they are because they would compute something else

_log = logging.getLogger(__name__)


def widen(
    model: nn.Module,
    *,
    rate: float,
    example: Any,
    mode: Mode = "copy",
    keep: Sequence[str] = (),
    heads: Heads = "drop",
    noise: float = 0.0,
    generator: torch.Generator | None = None,
    output: Callable[[Any], Any] | None = None,
    strict: bool = False,
) -> tuple[nn.Module, Submodel]:
    """A wider copy of any module that computes the same outputs in evaluation mode: floor(rate * C) of every width C.

    The first C positions are the old ones; those behind repeat them in turn. What reads a width makes up for that:

    - `copy`: each of k copies is read with 1/k of the weight (Chen et al., "Net2Net", ICLR 2016, section 3.1);
    - `zero`: copies are read with weight 0, so that every old number stays: the plan cuts the model out again bit for
      bit, and so does `narrow` with 1/rate if every width has grown.

    The wide model runs once on the example in float64 beside the old one, and every operation is compared. A width
    stays as it is where an operation would compute something else. A norm over a width (layer norm, group norm) allows
    whole multiples only, since then its mean and variance stay.

    Args:
        model: any module with weights; it is not changed.
        rate: above 1.
        example: an input, as for `surgery.narrow`.
        mode: see above.
        keep: patterns of modules whose tensors stay as they are, as for `surgery.narrow`.
        heads: `drop` repeats heads of an attention, the inverse of `narrow(..., heads="drop")`. With `inside` they stay
            as they are, and so does their width: the products of queries and keys would grow.
        noise: this share of a tensor's standard deviation is added as normal noise to weights that make new positions,
            so that these learn something of their own. In mode `zero` outputs stay the same unless a norm runs over the
            width; in mode `copy` they change by that little.
        generator: of the noise, on the CPU.
        output: what of the output has to keep its shape, as for `surgery.narrow`.
        strict: whether a hidden width that stays as it is is an error; otherwise it is logged with the reason.

    Returns:
        The wide module, and the plan of the old model as a part of it: `plan.extract(state(wide))` are the first
        positions of each width, as with `graft`.

    Raises:
        SurgeryError: if no width can grow, or with `strict` not all of them, with the reasons.

    >>> net, x = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)), torch.randn(5, 2)
    >>> wide, plan = widen(net, rate=2, example=x)
    >>> wide[0], torch.allclose(wide(x), net(x), atol=1e-6)
    (Linear(in_features=2, out_features=6, bias=True), True)
    >>> wide, plan = widen(net, rate=1.5, example=x, mode="zero")
    >>> all(torch.equal(tensor, state(net)[name]) for name, tensor in plan.extract(state(wide)).items())
    True
    """
    _check(model, rate, mode, noise, example)
    demand = checked(model, Demand(1 / rate, keep=keep, heads=heads))
    with one_by_one():
        growth = _Growth(model, example, output, demand, rate, mode)
        plan = growth.plan()
    whole = stayed_whole(growth.solution, demand, growth.chosen)
    if whole or not growth.choice:
        if strict or not growth.choice:
            raise SurgeryError(listed(model, whole, "grow") if whole else f"{type(model).__name__} has no hidden width")
        _log.warning(listed(model, whole, "grow"))
    wide = growth.built(model, plan)
    if noise:
        _add_noise(wide, growth, noise, generator)
    return wide, _inverse(model, wide, plan)


def _check(model: Any, rate: Any, mode: Any, noise: Any, example: Any) -> None:
    number = isinstance(rate, int | float) and not isinstance(rate, bool) and math.isfinite(rate)
    if not number or rate <= 1:
        raise SurgeryError(f"rate says how many times as wide the model becomes, above 1, got {rate!r}")
    if mode not in get_args(Mode):
        raise SurgeryError(f"unknown mode={mode!r}: choose {' or '.join(get_args(Mode))}")
    if isinstance(noise, bool) or not isinstance(noise, int | float) or not 0 <= noise < math.inf:
        raise SurgeryError(f"noise is a share of the weights' standard deviation, 0 or more, got {noise!r}")
    if not isinstance(model, nn.Module):
        raise SurgeryError(f"widen runs the model: give a module, not a {type(model).__name__}")
    if any(tensor.is_meta for tensor in model.parameters()):
        raise SurgeryError(f"{type(model).__name__} has no weights to repeat (meta device): load some first")
    if example is None:
        raise SurgeryError("widen runs the model: give an input as `example`")


class _Growth:
    """The search for widths that can grow without a change of what the model computes."""

    def __init__(
        self,
        model: nn.Module,
        example: Any,
        output: Callable[[Any], Any] | None,
        demand: Demand,
        rate: float,
        mode: Mode,
    ):
        self.demand, self.rate, self.mode = demand, rate, mode
        self.values, self.model, self.example = state(model), trial(model), trial_input(example)
        self.trace = traced_in_place(self.model, self.example, output)
        self.solve()
        for number, atom in self.readers.computed:
            if atom in self.choice:
                self.leave(number, {atom}, role("two computed tensors are multiplied and summed along it"), alone=True)
        self.solve()

    def solve(self) -> None:
        """Choose what grows."""
        self.solution = solve(self.trace)
        self.chosen = choose(self.solution, self.demand)
        sizes = {atom: math.floor(round(atom.size * self.rate, 9)) for atom in self.chosen.sliced if not atom.order}
        self.choice: Choice = {a: [j % a.size for j in range(n)] for a, n in sizes.items() if n > a.size}
        self.readers: Readers = readers(self.solution)

    def leave(self, number: int, which: set[Atom], why: Why, alone: bool = False) -> None:
        """Leave these atoms as they are, or all that grow at this place of the code, in all modules of the class."""
        steps = self.trace.steps
        for step in [steps[number]] if alone else same_code(self.model, steps, number):
            for axis in step.axes():
                for raw in axes.atoms(axis):
                    if set(atoms(self.solution.axis_of(raw))) & (which if alone else self.choice.keys()):
                        axes.fix(raw, why)

    def plan(self) -> Submodel:
        """The plan of a wide model that computes the same, with what cannot grow left as it is."""
        for _ in range(_MOST_LEFT):
            plan = plan_of(self.model, self.values, self.solution, self.choice)
            if not self.choice:
                return plan
            outcome = checked_plan(self.model, plan, self.solution, self.choice, self.example)
            if isinstance(outcome, Stuck):
                self.leave(outcome.step, set(), lost(f"the code there does not run wider: {outcome.difference}"))
            else:
                wide = self.built(self.model, outcome)
                number = changed(self.model, wide, self.solution, self.choice, self.example)
                if number is None:
                    return outcome
                step = self.solution.steps[number]
                where = f"{step.name} in {step.module or 'the model itself'}"
                why = self.tied(step.module) or f"{where} would compute something else of repeated positions"
                whole = " (a whole number as rate keeps means and variances)" if self.rate % 1 else ""
                self.leave(number, set(), role(why + whole))
            self.solve()
        whole = stayed_whole(self.solution, self.demand, self.chosen)
        raise SurgeryError(
            f"{type(self.model).__name__} computes something else, or does not run, in more than {_MOST_LEFT} places "
            f"of its code. {listed(self.model, whole, 'grow')}\nLeave these modules, and those that "
            "share widths with them, as they are with keep=[...]"
        )

    def tied(self, module: str) -> str:
        """Why a tensor of a module cannot repeat positions, if another module reads the width with it; or ""."""
        places: dict[int, list[tuple[str, str]]] = {}
        for key, tensor in named_tensors(self.model):
            places.setdefault(id(tensor), []).append(key)
        for keys in places.values():
            read = any(
                (key, axis) in self.readers.of for key in keys for axis in range(len(self.solution.tensors[key]))
            )
            if len(keys) > 1 and read and any(key[0] == module for key in keys):
                names = " and ".join(joined(*key) for key in keys)
                return f"{names} are one tensor, which both makes the width and reads it: untie them to let it grow"
        return ""

    def built(self, model: nn.Module, plan: Submodel) -> nn.Module:
        """The wide model, whose readers make up for the copies."""
        wide = plan.build(model)
        held = {id(tensor): name for _, _, own in owners(self.model) for name, tensor in own.items()}
        values, done = state(wide), set()
        for key, tensor in named_tensors(self.model):
            name = held.get(id(tensor))
            for axis, along in enumerate(self.solution.tensors[key] if name else ()):
                which = self.readers.of.get((key, axis), set()) & self.choice.keys()
                if which and (name, axis) not in done:
                    done.add((name, axis))
                    share = shares(along, which, self.choice, self.mode)
                    shape = [-1 if i == axis else 1 for i in range(values[name].ndim)]
                    values[name] = values[name] * share.to(values[name]).view(shape)
        return load(wide, values)


def _add_noise(wide: nn.Module, growth: _Growth, noise: float, generator: torch.Generator | None) -> None:
    """Add noise where matrices and kernels make new positions."""
    old = {name: tensor.std().item() for name, tensor in growth.values.items() if tensor.is_floating_point()}
    values = state(wide)
    held = {id(tensor): name for _, _, own in owners(growth.model) for name, tensor in own.items()}
    for key, tensor in named_tensors(growth.model):
        name = held.pop(id(tensor), None)
        if name not in old or tensor.ndim < 2:
            continue
        new = torch.zeros(values[name].shape, dtype=torch.bool)
        for axis, along in enumerate(growth.solution.tensors[key]):
            made = growth.choice.keys() - growth.readers.of.get((key, axis), set())
            copies = shares(along, made, growth.choice, "zero") == 0
            new |= copies.view([-1 if i == axis else 1 for i in range(new.ndim)])
        drawn = torch.randn(values[name].shape, generator=generator) * noise * old[name]
        values[name].add_(torch.where(new, drawn, 0).to(values[name]))


def _inverse(model: nn.Module, wide: nn.Module, plan: Submodel) -> Submodel:
    """The plan of the model as the first positions of the wide one."""

    def first(index: Index, shape: tuple[int, ...]) -> Index:
        """For each old position the first one that repeats it."""
        result: list[Runs | None] = []
        for runs, size in zip(index, shape):
            places: dict[int, int] = {}
            for place, position in enumerate(positions(runs or ())):
                places.setdefault(position, place)
            result.append(None if runs is None else as_runs(places[position] for position in range(size)))
        return tuple(result)

    entries = {n: (Source(n, first(s[0].index, plan.shapes[n])),) for n, s in plan.entries.items()}
    edits: list[Mapping[str, Any]] = []
    for edit in reversed(plan.edits):
        old = attribute_of(model, edit["module"], edit["attribute"])
        if edit["do"] == "set":
            edits.append({**edit, "value": list(old) if isinstance(old, tuple) else old})
        else:
            edits.append({**edit, "index": first(as_index(edit["index"]), tuple(old.shape))})
    return Submodel(entries, plan.small_shapes, tuple(edits), structure(wide), plan.dtypes)

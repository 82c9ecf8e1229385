"""Time that is measured: how long operations take at other sizes, and the sizes that keep the most within a time."""

import itertools
import logging
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array
from torch import Tensor, nn

from surgery.copying import clone
from surgery.errors import InternalError, SurgeryError
from surgery.forward import Observed, call, copied, in_mode, named_tensors, tensors_in
from surgery.torch_private import Watch, tree_leaves, tree_map
from surgery.width.rules.registry import is_step, operation_name
from surgery.width.solve import Atom, Axis, Choice, Solution, atoms, named_widths, size_of
from surgery.width.steps import Step
from surgery.width.target import Target, comparable, floor_of
from surgery.width.trace import Trace

_LEAST, _MOST = 7, 200  # repetitions
_SECONDS = 0.005, 2.0  # that repetitions of an operation and of two whole models take, unless they soon agree
_SPREAD = 0.02  # of repetitions that agree
_FEWEST, _LEVELS = 8, 48  # sizes that are tried of a width, and of all of them, if each has more than the fewest
_TABLE = 600  # combinations of sizes at which an operation is timed at most
_COPIES = 32  # of a weight with which an operation is timed
_PROGRAM = 20.0  # seconds that the integer program may take
_log = logging.getLogger(__name__)

Clock: TypeAlias = Callable[..., Sequence[float]]
"""From functions without arguments to the seconds that each takes, run in turns."""


def seconds(*runs: Callable[[], Any]) -> list[float]:
    """The seconds that each of these takes: the lower quartile of repetitions in turns, after a warm-up.

    With one thread on the CPU they are the thread's own seconds, in which the turns of other processes do not count.
    What else these do only makes a run slower, so that the lower quartile says more than the median. On an accelerator
    each run ends with a synchronisation.

    >>> len(seconds(lambda: torch.ones(9), lambda: torch.ones(99)))
    2
    """
    wait = torch.accelerator.synchronize if torch.accelerator.is_available() else None
    now = time.thread_time if torch.get_num_threads() == 1 and not wait else time.perf_counter
    times: list[list[float]] = [[] for _ in runs]
    limit = time.perf_counter() + _SECONDS[len(runs) > 1]
    for repetition in range(_MOST):
        for run, mine in zip(runs, times):
            begin = now()
            run()
            if wait:
                wait()
            mine.append(now() - begin)
        if repetition == 1:
            times = [[] for _ in runs]  # of the warm-up
        elif repetition >= _LEAST:
            quartiles = np.quantile(times, (0.1, 0.25, 0.5), axis=1)
            agree = (quartiles[2] - quartiles[0] <= _SPREAD * quartiles[1]).all() and repetition >= 3 * _LEAST
            if agree or time.perf_counter() > limit:
                break
    return np.quantile(times, 0.25, axis=1).tolist()


@dataclass(frozen=True)
class Timing:
    """What was measured of a model, and how.

    Attributes:
        reference: the model of whose time all shares are.
        example: what it runs on, where that is.
        clock: see `Clock`.
        left: the share of the reference's time that the model takes which is cut.
        budget: the share of the reference's time that may be predicted.
        times: by operation and the sizes of what it takes the seconds; by None the reference's.
        measured: by the sizes of the widths the share of the reference's time that a narrow model took.
    """

    reference: nn.Module
    example: Any
    clock: Clock
    left: float = 1.0
    budget: float = 1.0
    times: dict[Any, float] = field(default_factory=dict)
    measured: dict[Any, float] = field(default_factory=dict)

    @property
    def full(self) -> float:
        """The reference's seconds."""
        if None not in self.times:
            self.times[None] = self.compared(self.reference)[1]
        return self.times[None]

    def compared(self, model: nn.Module) -> tuple[float, float]:
        """(share of the reference's time, the reference's seconds): one forward pass each of both in turns."""
        nets = [clone(net).eval() for net in (model, self.reference)]

        def run(net: nn.Module) -> Callable[[], Any]:
            given = copied(self.example)
            return lambda: call(net, given)

        with torch.no_grad():
            mine, whole = self.clock(*map(run, nets))
        if not whole > 0:
            raise SurgeryError(f"the clock says that the full model takes {whole} seconds: give another `clock`")
        return mine / whole, whole


class _Recorded(Watch):
    """Keeps the operations of a forward pass that are steps of its trace."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple, dict[str, Any]]] = []

    def before(self, operation: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        if is_step(operation):
            self.calls.append((operation, args, kwargs))


@dataclass(frozen=True)
class _Operation:
    """An operation of a forward pass, with its axes, that can run at other sizes.

    Attributes:
        widths: along which it computes something.
        weights: how many the model has.
    """

    function: Any
    args: tuple
    kwargs: dict[str, Any]
    step: Step[Axis]
    widths: tuple[Atom, ...]
    weights: int

    def seconds(self, choice: Choice, timing: Timing, device: torch.device) -> float:
        """How long it takes alone with these positions; each form is timed once."""
        given, leaves = self._given(choice)
        forms = [(leaf.shape, leaf.stride(), leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        if (key := (self.function, str(forms))) not in timing.times:
            made = itertools.cycle(self._inputs(tensors_in(given), device))

            def run() -> None:
                mine = iter(next(made))
                args, kwargs = tree_map(lambda leaf: next(mine) if isinstance(leaf, Tensor) else leaf, given)
                self.function(*args, **kwargs)

            with torch.no_grad():
                try:
                    run()
                    timing.times[key] = timing.clock(run)[0]
                except Exception:  # whatever torch raises where it wants other numbers: the memory that it moves
                    timing.times[key] = timing.clock(lambda: [tensor.clone() for tensor in next(made)])[0]
        return timing.times[key]

    def _given(self, choice: Choice) -> tuple[Any, list[Any]]:
        """(args, kwargs) with these positions, tensors on the meta device, and all leaves of these."""
        axes = iter(self.step.inputs)

        def smaller(leaf: Any) -> Any:
            return _resized(leaf, [size_of(a, choice) for a in next(axes)]) if isinstance(leaf, Tensor) else leaf

        args, kwargs = tree_map(smaller, (list(self.args), self.kwargs))
        for position, argument in enumerate(self.function._schema.arguments):
            if (axis := self.step.numbers.get(argument.name)) is not None:
                number = [size_of(a, choice) for a in axis] if isinstance(axis, list) else size_of(axis, choice)
                if position < len(args):
                    args[position] = number
                else:
                    kwargs[argument.name] = number
        return (args, kwargs), tree_leaves((args, kwargs))

    def _inputs(self, forms: Sequence[Tensor], device: torch.device) -> list[list[Tensor]]:
        """Tensors to run on, of weights in so many copies that caches hold them no more than in the whole model."""
        made = [_filled(form, device) for form in forms]
        held = [isinstance(source, tuple) and isinstance(source[0], str) for source in self.step.sources]
        full = max((math.prod(a.size for a in axes) for axes, mine in zip(self.step.inputs, held) if mine), default=0)
        copies = min(_COPIES, self.weights // full) if full else 1
        return [made, *([t.clone() if mine else t for t, mine in zip(made, held)] for _ in range(copies - 1))]


def _resized(tensor: Tensor, sizes: Sequence[int]) -> Tensor:
    """A tensor on the meta device whose axes lie in memory in the same order; what was expanded is."""
    strides, step = [0] * tensor.ndim, 1
    for i in sorted(range(tensor.ndim), key=lambda i: (tensor.stride(i), -i)):
        if tensor.stride(i):
            strides[i], step = step, step * sizes[i]
    return torch.empty_strided(sizes, strides, dtype=tensor.dtype, device="meta")


def _filled(form: Tensor, device: torch.device) -> Tensor:
    """A tensor of this form: of ones, which stay as they are when multiplied in place; indices are 0."""
    extent = 1 + sum((size - 1) * step for size, step in zip(form.shape, form.stride()))
    number = float(form.is_floating_point() or form.is_complex())
    return torch.full((extent,), number, dtype=form.dtype, device=device).as_strided(form.shape, form.stride())


class Latency:
    """The time of one forward pass on the example as a share of a reference's: measured, or predicted.

    What is predicted is the sum of what operations take alone, and what is left of the model's measured time besides:
    operations that no width shrinks, and what is between them.

    Args:
        seen: the model that is cut and the example, traced.
    """

    def __init__(self, seen: Observed[Trace], solution: Solution, timing: Timing, device: torch.device):
        self.timing, self._device = timing, device
        self._names = {atom: name for name, atom in named_widths(solution).items()}
        self._operations = list(_operations(seen, solution))
        self._alone = sum(one.seconds({}, timing, device) for one in self._operations)
        whole = timing.left * timing.full
        self._rest, self._scale = max(0.0, whole - self._alone), min(1.0, whole / max(self._alone, 1e-12))
        self.full = timing.full

    def __call__(self, choice: Choice) -> float:
        """The seconds with these positions."""
        return self.share(choice) * self.full

    def share(self, choice: Choice) -> float:
        """The share of the reference's time with these positions: measured if it was, otherwise predicted."""
        return self.timing.measured.get(self._sizes(choice), self.predicted(choice))

    def predicted(self, choice: Choice) -> float:
        """The share of the reference's time that is predicted."""
        alone = sum(one.seconds(choice, self.timing, self._device) for one in self._operations)
        return (self._rest + self._scale * alone) / self.full

    def measure(self, choice: Choice, small: nn.Module) -> float:
        """The share of the reference's time that the narrow model with these positions takes."""
        if not choice:
            return self.timing.left
        if (key := self._sizes(choice)) not in self.timing.measured:
            self.timing.measured[key] = self.timing.compared(small)[0]
            _log.info("predicted %.1f %%, measured %.1f %%", 100 * self.predicted(choice), 100 * self.share(choice))
        return self.timing.measured[key]

    def _sizes(self, choice: Choice) -> frozenset[tuple[str, int]]:
        return frozenset((self._names[atom], len(kept)) for atom, kept in choice.items() if len(kept) < atom.size)

    def numbers_kept(
        self,
        target: Target,
        widths: Collection[Atom],
        rounded: Callable[[int, float], int],
        scores: Callable[[Atom], Tensor] | None,
        sizes: Mapping[Atom, int],
    ) -> dict[Atom, int]:
        """How many positions of each width stay, as `target.numbers_kept` says: the best within the budget.

        Of some sizes of each width one is picked by an integer program. Where even the fastest are above the budget,
        it is these.
        """
        levels = {atom: _levels(atom, floor_of(target, atom, sizes), rounded, len(widths)) for atom in widths}
        tables = self._tables(levels)
        worth = {}
        for atom in widths if scores else ():
            values = comparable(scores(atom), target.normalise) if scores else torch.ones(0)
            values = values if atom.order else values.sort(descending=True).values
            worth[atom] = [float(values[:n].sum()) for n in levels[atom]]
        budget = (self.timing.budget * self.full - self._rest) / max(self._scale, 1e-12)
        return best_levels(levels, tables, worth if scores else None, budget)

    def _tables(self, levels: Mapping[Atom, Sequence[int]]) -> dict[tuple[Atom, ...], np.ndarray]:
        """By widths the seconds of the operations that have these, at all combinations of their levels."""
        tables: dict[tuple[Atom, ...], np.ndarray] = {}
        for one in self._operations:
            mine = tuple(atom for atom in one.widths if atom in levels)
            for part, table in self._table(one, mine, levels):
                tables[part] = tables.get(part, 0) + table
        return tables

    def _table(
        self, one: _Operation, widths: tuple[Atom, ...], levels: Mapping[Atom, Sequence[int]]
    ) -> Iterator[tuple[tuple[Atom, ...], np.ndarray]]:
        def at(numbers: Mapping[Atom, int]) -> float:
            choice = {atom: range(n) for atom, n in numbers.items() if n < atom.size}
            return one.seconds(choice, self.timing, self._device)

        shape = tuple(len(levels[atom]) for atom in widths)
        if math.prod(shape) <= _TABLE:
            every = itertools.product(*(levels[atom] for atom in widths))
            yield widths, np.array([at(dict(zip(widths, numbers))) for numbers in every]).reshape(shape)
            return
        # What each saves alone, by so much that it is right where all are at their lowest.
        full, least = at({}), at({atom: levels[atom][0] for atom in widths})
        saved = {atom: np.array([full - at({atom: n}) for n in levels[atom]]) for atom in widths}
        factor = (full - least) / (sum(one[0] for one in saved.values()) or 1)
        yield (), np.array(full)
        for atom in widths:
            yield (atom,), -factor * saved[atom]


def _operations(seen: Observed[Trace], solution: Solution) -> Iterator[_Operation]:
    """The operations of the first forward pass that compute something along widths."""
    recorded = _Recorded()
    twin = clone(seen.model)
    with in_mode(twin, training=False), recorded:
        call(twin, copied(seen.example))
    steps = solution.steps[: solution.lengths[0]]
    weights = sum(parameter.numel() for parameter in seen.model.parameters())
    if [operation_name(function) for function, *_ in recorded.calls] != [step.name for step in steps]:
        raise InternalError("a forward pass has other operations than its trace")
    for (function, args, kwargs), step in zip(recorded.calls, steps):
        found = dict.fromkeys(atom for axis in step.axes() for atom in atoms(axis) if atom.size > 1 and not atom.why)
        shows = any(value.alias_info and not value.alias_info.is_write for value in function._schema.returns)
        if found and not shows and tensors_in((args, kwargs)):
            yield _Operation(function, args, kwargs, step, tuple(found), weights)


def _levels(atom: Atom, floor: int, rounded: Callable[[int, float], int], several: int) -> list[int]:
    """The sizes of a width that are tried, ascending; multiples of 8, which machines prefer, if they are that far."""
    count = max(_FEWEST, _LEVELS // several)
    step = (atom.size - floor) / (count - 1)
    sizes = [floor + step * k for k in range(count)]
    sizes = [min(atom.size, 8 * math.ceil(n / 8 - 1e-9)) for n in sizes] if step >= 8 else sizes
    return sorted({rounded(atom.size, min(1.0, n / atom.size)) for n in sizes})


def best_levels(
    levels: Mapping[Atom, Sequence[int]],
    tables: Mapping[tuple[Atom, ...], np.ndarray],
    worth: Mapping[Atom, Sequence[float]] | None,
    budget: float,
) -> dict[Atom, int]:
    """Of each width the level with which they are worth the most in all, within a time; the fastest if none is.

    An integer program: x[w, l] is 1 at the level l of the width w. For an operation of several widths y has a number
    for each combination of levels, whose sums over all but one width are that width's x, so that it is 1 at the
    combination that x picks.

    Args:
        levels: sizes of each width, ascending.
        tables: by widths the time at all combinations of their levels.
        worth: of each level; None for shares that are as equal as levels allow, the least of them as large as possible.

    >>> a, b = Atom(2), Atom(2)
    >>> table = {(a, b): np.array([[1.0, 2.0], [2.0, 4.0]])}
    >>> best_levels({a: [1, 2], b: [1, 2]}, table, {a: [1, 2], b: [1, 3]}, 2.0)
    {2: 1, 2: 2}
    """
    columns = itertools.count()
    x = {atom: [next(columns) for _ in found] for atom, found in levels.items()}
    y = {several: np.array([next(columns) for _ in t.flat]) for several, t in tables.items() if len(several) > 1}
    least = next(columns)  # share of any width
    cost, value = np.zeros(least + 1), np.zeros(least + 1)
    rows: list[tuple[dict[int, float], float, float]] = [(dict.fromkeys(mine, 1.0), 1, 1) for mine in x.values()]
    fixed = 0.0
    for widths, table in tables.items():
        if not widths:
            fixed += float(table)
        elif len(widths) == 1:
            cost[x[widths[0]]] += table
        else:
            cost[y[widths]] += table.ravel()
            for axis, atom in enumerate(widths):
                for i, part in zip(x[atom], np.moveaxis(y[widths].reshape(table.shape), axis, 0)):
                    rows.append(({**{int(j): 1.0 for j in part.flat}, i: -1.0}, 0, 0))
    always = len(rows)
    shares = {atom: np.array(found) / atom.size for atom, found in levels.items() if len(found) > 1}
    if worth is None:
        gap = max((np.diff(found).max() for found in shares.values()), default=0) + 1e-9
        value[least] = 1
        for atom, found in shares.items():
            rows.append((dict(zip(x[atom], found)) | {least: -1.0}, 0, gap))
            value[x[atom]] = 0.01 / len(shares) * found
    else:
        for atom, mine in x.items():
            value[mine] = worth[atom]
    binary = np.zeros(least + 1)
    binary[[i for mine in x.values() for i in mine]] = 1
    entries = [(row, column, one) for row, (numbers, _, _) in enumerate(rows) for column, one in numbers.items()]
    row, column, data = zip(*entries) if entries else ((), (), ())
    matrix = coo_array((data, (row, column)), shape=(len(rows), least + 1)).tocsr()
    low, high = [low for _, low, _ in rows], [high for *_, high in rows]
    known = LinearConstraint(matrix, low, high)
    sound = LinearConstraint(matrix[:always], low[:always], high[:always])  # without what shares are asked to be
    unit = max(np.abs(cost).max(), 1e-30)
    within = LinearConstraint(cost[None] / unit, -np.inf, (budget - fixed) / unit)
    for goal, limits in ((-value, [known, within]), (cost / unit, sound)):
        options = {"time_limit": _PROGRAM, "mip_rel_gap": 1e-4}
        solved = milp(goal, integrality=binary, bounds=Bounds(0, 1), constraints=limits, options=options)
        if solved.x is not None:
            break
    return {atom: levels[atom][int(np.argmax(solved.x[mine]))] for atom, mine in x.items()}


def device_of(model: nn.Module, example: Any) -> torch.device:
    """Where a model runs."""
    found = [*tensors_in(example), *(tensor for _, tensor in named_tensors(model))]
    return found[0].device if found else torch.device("cpu")

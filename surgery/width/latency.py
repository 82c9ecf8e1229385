"""The time that a model takes, measured, and the sizes of its widths that lose the least within a time."""

import logging
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from statistics import median
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from surgery.copying import clone
from surgery.errors import SurgeryError, first_line
from surgery.forward import call, copied
from surgery.width.solve import Atom, Choice, Solution, named_widths
from surgery.width.target import CLOSE, Cost, Target, floor_of, worth

_SIZES = 4  # at which each width is measured, besides whole
_LEAST = 7  # repetitions of a measurement, in turns with the full model's; quick models have more of them
_SECONDS = 0.1  # of the full model, which a measurement has if that takes fewer than _MOST repetitions
_MOST = 30
_ROUNDS = 10  # of the bisection
_log = logging.getLogger(__name__)

Times: TypeAlias = dict[Any, float]
"""The full model's seconds by None; by (a width's axes, how many positions stay) the share of them that is saved."""
Option: TypeAlias = tuple[Atom, int, float, float]
"""A width, one of its sizes, the share of the time saved, and the importance lost."""


class Latency:
    """The seconds of one forward pass on the example, predicted, and measured where sizes are chosen by it.

    The model is measured with one width cut at a time. Where two shrink together, the operations that have both save
    less than the sum of what each saves. So the sum counts by as much as it does for multiply-accumulates, which are
    known for any sizes.

    Args:
        model: the full model, which may have any device and mode: copies of it are timed.
        build: from a choice to the narrow model.
        macs: counts multiply-accumulates.
        times: what is measured already; what is measured here is added.
    """

    def __init__(
        self,
        model: nn.Module,
        example: Any,
        build: Callable[[Choice], nn.Module],
        macs: Cost,
        solution: Solution,
        times: Times,
    ):
        self._full, self._example, self._build, self._macs, self._times = clone(model), example, build, macs, times
        self._members, self._names = solution.members, {a: name for name, a in named_widths(solution).items()}
        self._known: dict[tuple[tuple[Atom, int], ...], float] = {}  # shares of whole models that were measured
        if None not in times:
            times[None] = timed(self._full, self._full, example)[1]

    @property
    def full(self) -> float:
        """The full model's seconds."""
        return self._times[None]

    def share(self, choice: Choice) -> float:
        """The time with these positions as a share of the full model's: measured if it was, otherwise predicted."""
        return self._known.get(_sizes(choice)) or self.predicted(choice)

    def predicted(self, choice: Choice) -> float:
        """The share of the time that is predicted."""
        alone = sum(self._macs.full - self._macs({atom: kept}) for atom, kept in choice.items())
        together = self._macs.full - self._macs(choice)
        saved = sum(self._saved(atom, len(kept)) for atom, kept in choice.items())
        return 1 - saved * (together / alone if alone else 1)

    def measured(self, small: nn.Module) -> float:
        """The time that a model takes, as a share of the full one's."""
        return timed(small, self._full, self._example)[0]

    def numbers(
        self,
        target: Target,
        widths: Collection[Atom],
        rounded: Callable[[int, float], int],
        scores: Callable[[Atom], Tensor] | None,
        sizes: Mapping[Atom, int],
    ) -> dict[Atom, int]:
        """How many positions of each width stay, as `target.numbers_kept` says for another target.

        Of the measured sizes those that lose the least importance: an integer program (scipy's milp) with one choice
        for each width, which has to save some time in all. How much, as saved by each alone, is found by bisection, in
        which each model is measured whole.
        """
        if not scores:
            raise SurgeryError(f"{target} loses as little importance as it can: give keep_top=surgery.importance(...)")
        score, options = worth(scores, target.normalise), []
        for atom in widths:
            floor, values = floor_of(target, atom, sizes), score(atom)
            values = values if atom.order else values.sort(descending=True).values
            shares = [(floor + (atom.size - floor) * k / _SIZES) / atom.size for k in range(_SIZES + 1)]
            for n in sorted({rounded(atom.size, share) for share in shares}):
                options.append((atom, n, self._saved(atom, n), float(values[n:].sum())))
        best = {atom: n for atom, n, *_ in sorted(options, key=lambda one: one[2])}  # the fastest
        low, high = 0.0, sum(self._saved(atom, n) for atom, n in best.items())
        share = self._measured(best)
        for _ in range(_ROUNDS if share <= target.share else 0):
            if share > (1 - 2 * CLOSE) * target.share:
                break
            middle = (low + high) / 2
            found = _program(options, middle)
            if found and (now := self._measured(found)) <= target.share:
                high, best, share = middle, found, now
            else:
                low = middle
        return best

    def _measured(self, numbers: Mapping[Atom, int]) -> float:
        """The share of the time that a model of these sizes takes; as predicted if no such model can be built."""
        choice = {atom: range(n) for atom, n in numbers.items() if n < atom.size}
        key = _sizes(choice)
        if key not in self._known:
            with suppress(SurgeryError):  # which is what the next attempt is about
                self._known[key] = self.measured(self._build(choice))
        return self.share(choice)

    def _saved(self, atom: Atom, n: int) -> float:
        """The share of the time that is saved if n positions of one width stay, and all others whole."""
        if n >= atom.size:
            return 0.0
        axes = tuple(self._members[atom])
        key = (axes, n)
        if key not in self._times:
            try:
                self._times[key] = 1 - self.measured(self._build({atom: range(n)}))
            except Exception as error:
                name = self._names.get(atom, "a width")
                why = f"the model does not run with {n} of {atom.size} positions of {name!r} alone: {first_line(error)}"
                raise SurgeryError(f"no time can be measured: {why}; keep=[...] its module whole") from error
            _log.info("%s at %d of %d: %.1f %% saved", self._names.get(atom), n, atom.size, 100 * self._times[key])
        smaller = [saved for other, saved in self._times.items() if other and other[0] == axes and other[1] <= n]
        return min(smaller)  # fewer positions do not save less: what says so is chance


def _sizes(choice: Choice) -> tuple[tuple[Atom, int], ...]:
    return tuple(sorted(((atom, len(kept)) for atom, kept in choice.items()), key=lambda one: id(one[0])))


def _program(options: list[Option], least: float) -> dict[Atom, int] | None:
    """One option for each width: those that together save enough and lose the least; None if none save that much.

    >>> a, b = Atom(4), Atom(4)
    >>> found = _program([(a, 2, 0.3, 5.0), (a, 4, 0.0, 0.0), (b, 2, 0.2, 1.0), (b, 4, 0.0, 0.0)], least=0.2)
    >>> found[a], found[b]
    (4, 2)
    """
    from scipy.optimize import Bounds, LinearConstraint, milp  # takes a second to import

    atoms = list(dict.fromkeys(atom for atom, *_ in options))
    one = np.array([[float(option[0] is atom) for option in options] for atom in atoms])
    saved, lost = (np.array([option[i] for option in options]) for i in (2, 3))
    constraints = [LinearConstraint(one, 1, 1), LinearConstraint(saved[None], least, np.inf)]
    whole, gap = np.ones(len(options)), {"mip_rel_gap": 1e-3}
    found = milp(lost, integrality=whole, bounds=Bounds(0, 1), constraints=constraints, options=gap)
    if found.x is None:
        return None
    return {atom: n for (atom, n, *_), x in zip(options, found.x) if x > 0.5}


@torch.no_grad()
def timed(model: nn.Module, other: nn.Module, example: Any) -> tuple[float, float]:
    """(The time of a forward pass as a share of another model's, the other's seconds), of passes in turns.

    The share is that of the quickest passes, which other work on the machine disturbs least; the seconds are a median.
    Both are put into evaluation mode.
    """
    where = next((tensor.device for tensor in other.state_dict().values()), torch.device("cpu"))

    def now() -> float:
        if where.type == "cuda":
            torch.cuda.synchronize(where)
        return time.perf_counter()

    def seconds(net: nn.Module) -> float:
        given, begin = copied(example), now()
        call(net, given)
        return now() - begin

    seconds(model.eval()), seconds(other.eval())  # warm up
    repetitions = int(min(_MOST, max(_LEAST, _SECONDS / max(seconds(other), 1e-9))))
    turns = [
        (seconds(model), seconds(other)) if number % 2 else (seconds(other), seconds(model))[::-1]
        for number in range(repetitions)
    ]
    return min(mine for mine, _ in turns) / min(its for _, its in turns), median(its for _, its in turns)

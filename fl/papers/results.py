"""What the stored runs say of a cell."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from fl.base.errors import FLError
from fl.papers.cell import Arm, Cell, Comparison
from fl.papers.measures import measure
from fl.papers.stored import Stored, extendable, runs
from fl.papers.verdict import NOT_RUN, UNKNOWN, judge, whole


@dataclass(frozen=True)
class Result:
    """The stored runs of a cell, at the largest number of rounds that its own method and another one have done.

    Attributes:
        rounds: that number; 0 if there is none.
        asked: how many the cell has.
        values: for each comparison, from an arm's name to a value for each seed.
        verdicts: for each comparison.
        stored: the runs that the values are of.
        begun: whether anything was run at all.
    """

    cell: Cell
    rounds: int
    asked: int
    values: tuple[dict[str, list[float]], ...]
    verdicts: tuple[str, ...]
    stored: tuple[Stored, ...]
    begun: bool

    @property
    def short(self) -> bool:
        """Whether these are fewer rounds than the cell's, so that they decide nothing."""
        return self.rounds < self.asked

    @property
    def verdict(self) -> str:
        """That of the cell, which only whole runs decide."""
        if not self.cell.arms:
            return UNKNOWN
        return NOT_RUN if self.short else whole(self.verdicts)


def result(cell: Cell) -> Result:
    """What the stored runs say of a cell.

    Raises FLError for a stored run that is damaged or of other settings.
    """
    found = {arm.name: runs(arm) for arm in cell.arms}
    asked = max((arm.config.rounds for arm in cell.arms), default=0)
    best = None
    for rounds in sorted({n for arm in cell.arms for one in found[arm.name] for n in _ends(one, arm)}, reverse=True):
        chosen = {arm.name: _at(found[arm.name], arm, rounds) for arm in cell.arms}
        values = tuple(_values(one, chosen) for one in cell.comparisons)
        verdicts = tuple(judge(one, those) for one, those in zip(cell.comparisons, values))
        if whole(verdicts) != NOT_RUN:
            used = tuple(one for those in chosen.values() for one in those)
            best = Result(cell, rounds, asked, values, verdicts, used, True)
            break
    nothing = tuple({} for _ in cell.comparisons), (NOT_RUN,) * len(cell.comparisons)
    return best or Result(cell, 0, asked, *nothing, (), any(found.values()))


def _ends(one: Stored, arm: Arm) -> set[int]:
    """Numbers of rounds at which a run can be looked at."""
    if one.failed:
        return {one.rounds}
    if not extendable(arm.config):
        return {one.rounds} if one.over else set()
    return {one.done if one.over else int(one.rows[-1]["round"])}


def _at(stored: Sequence[Stored], arm: Arm, rounds: int) -> list[Stored]:
    """The runs of an arm at a number of rounds, one a seed; longer ones are cut where that makes shorter ones."""
    chosen: dict[int, Stored] = {}
    for one in stored:
        if rounds in _ends(one, arm):
            chosen[one.seed] = one
        elif extendable(arm.config) and one.done >= rounds and (cut := [r for r in one.rows if r["round"] <= rounds]):
            chosen.setdefault(one.seed, replace(one, rows=cut))
    return [chosen[seed] for seed in sorted(chosen)]


def _values(comparison: Comparison, chosen: dict[str, list[Stored]]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for name in comparison.arms:
        with suppress(FLError):  # an interrupted run may not have measured it yet
            if values := [measure(comparison.measure, one.rows) for one in chosen[name]]:
                found[name] = values
    return found

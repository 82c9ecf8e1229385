"""Cells: a paper's table or figure, and the runs that check it, as plain values."""

import re
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

from fl import FLError
from fl.settings import Config, Experiment

PAPERS = {
    "fedmr": "FedMR", "femam": "FeMAM", "fedfa": "FedFA", "heterofl": "HeteroFL", "depthfl": "DepthFL",
    "adapters": "Adapters of low rank",
}  # fmt: skip
"""From the first word of ids to a paper's title, or the title of our own comparisons."""
OWN, SMALLER = "not in the paper", "other settings"
"""Places of cells that no paper has: our own questions, and a paper's claims in smaller settings."""
Kind = Literal["numbers", "ratio", "drop", "first", "above"]
"""How values are compared; `benchmarks.papers.verdict` has the rules."""


class Published(NamedTuple):
    """A number of a paper: mean and standard deviation."""

    mean: float
    spread: float

    @classmethod
    def read(cls, text: str) -> "Published":
        """Read a number as the paper prints it.

        >>> Published.read("59.81±0.60")
        Published(mean=59.81, spread=0.6)
        """
        mean, spread = map(float, text.split("±"))
        return cls(mean, spread)

    def __str__(self) -> str:
        return f"{self.mean:.2f}±{self.spread:.2f}"


@dataclass(frozen=True)
class Arm:
    """The runs of one method in one setting.

    Attributes:
        run: where they are stored, FOLDER/NAME. Arms of several cells with the same `run` share their runs.
        experiment: the settings, of one method, with all seeds.
        tables: a pattern of older tables below benchmarks/results, made before there were cells, with a row per round.
            The seed is a column, or the number at the end of the file's name.
        where: the values by which this arm's rows are found in them.
    """

    run: str
    experiment: Experiment
    tables: str = ""
    where: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Return its name in a cell."""
        return self.run.rpartition("/")[2]

    @cached_property
    def config(self) -> Config:
        """Return the settings of its run with the first seed."""
        return self.experiment.runs()[0]


def arms(folder: str, experiment: Experiment, methods: tuple[str, ...], tables: str = "") -> tuple[Arm, ...]:
    """Return an arm for each method, with the method's name.

    >>> [arm.run for arm in arms("fedmr.figure5", Experiment(), ("fedavg", "indep"))]
    ['fedmr.figure5/fedavg', 'fedmr.figure5/indep']
    """
    return tuple(
        Arm(f"{folder}/{method}", experiment.replace(algorithms=(method,)), tables.format(method)) for method in methods
    )


@dataclass(frozen=True)
class Comparison:
    """One thing that a cell compares.

    Attributes:
        what: a description.
        measure: a name in `benchmarks.papers.verdict.MEASURES`.
        kind: how values are compared.
        arms: names of arms. For numbers and first: the paper's method, then its rivals. For ratio: numerator and
            denominator. For drop: the rival and the paper's method without an attack, then both attacked.
        published: for numbers, the paper's number of each arm.
        band: for ratio, drop and above, the smallest and the largest value in the paper's text.
        larger: whether larger values are better.
        chance: for drop, the accuracy of a guess in %.
    """

    what: str
    measure: str
    kind: Kind
    arms: tuple[str, ...]
    published: tuple[Published, ...] = ()
    band: tuple[float, float] | None = None
    larger: bool = True
    chance: float = 0.0


@dataclass(frozen=True)
class Cell:
    """A cell of a table, a figure, or one of its panels.

    Attributes:
        id: PAPER.PLACE and more, joined by dots.
        place: the table or figure.
        claim: what the paper says there.
        arms, comparisons: what is run, and how it is compared. A cell without arms cannot be compared: the paper has an
            image there, and no number in its text.
        pattern: the ids of the cells with which it shares a table on the page.
        settings: how the settings differ from the paper's text, or "".
        row: an id that cells share if they try to reproduce the same result in different settings.
        command: for cells without arms, the command that computes the same of a run.
    """

    id: str
    place: str
    claim: str
    arms: tuple[Arm, ...] = ()
    comparisons: tuple[Comparison, ...] = ()
    pattern: str = ""
    settings: str = ""
    row: str = ""
    command: str = ""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z]+(\.[a-z0-9-]+)+", self.id) or self.paper not in PAPERS:
            raise FLError(f"{self.id!r} is no id of a cell: begin with one of {', '.join(PAPERS)} and a dot")
        names = [arm.name for arm in self.arms]
        compared = {name for comparison in self.comparisons for name in comparison.arms}
        if len(set(names)) < len(names) or not compared <= set(names):
            raise FLError(f"{self.id}: arms need different names, and comparisons can only name arms of the cell")

    @property
    def paper(self) -> str:
        """Return its paper's name."""
        return self.id.split(".")[0]

    def arm(self, name: str) -> Arm:
        """Return the arm of this name. Raises FLError if there is none."""
        for arm in self.arms:
            if arm.name == name:
                return arm
        raise FLError(f"{self.id} has no {name!r}: it has {', '.join(arm.name for arm in self.arms)}", code="name")

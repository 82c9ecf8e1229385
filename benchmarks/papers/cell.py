"""What a paper's table or figure says, and the runs that check it: plain values."""

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
"""From how ids begin to a paper's title, or to that of a comparison of ours."""
OWN, SMALLER = "not in the paper", "other settings"
"""The places of cells that no paper has: ours, and a paper's claims in settings smaller than its own."""
Kind = Literal["numbers", "ratio", "drop", "first", "above"]
"""How values are compared, see `benchmarks.papers.verdict`."""


class Published(NamedTuple):
    """A number of a paper: mean and standard deviation."""

    mean: float
    spread: float

    @classmethod
    def read(cls, text: str) -> "Published":
        """From how it is printed.

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
        run: where they are stored, a folder and a name. Arms of several cells with one name are the same runs.
        experiment: their settings, of one method, with all seeds.
        tables: a pattern of tables below benchmarks/results that were made before there were cells, a row a round. The
            seed is a column, or the number at the end of the name.
        where: values that their rows of this arm have.
    """

    run: str
    experiment: Experiment
    tables: str = ""
    where: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """What it is called in its cell."""
        return self.run.rpartition("/")[2]

    @cached_property
    def config(self) -> Config:
        """The settings of its run with the first seed."""
        return self.experiment.runs()[0]


def arms(folder: str, experiment: Experiment, methods: tuple[str, ...], tables: str = "") -> tuple[Arm, ...]:
    """An arm for each method, called as the method is.

    >>> [arm.run for arm in arms("fedmr.figure5", Experiment(), ("fedavg", "indep"))]
    ['fedmr.figure5/fedavg', 'fedmr.figure5/indep']
    """
    made = []
    for method in methods:
        made.append(Arm(f"{folder}/{method}", experiment.replace(algorithms=(method,)), tables.format(method)))
    return tuple(made)


@dataclass(frozen=True)
class Comparison:
    """One thing that a cell compares.

    Attributes:
        what: in words.
        measure: the name of one of `benchmarks.papers.verdict.MEASURES`.
        kind: how values are compared.
        arms: names of arms. For numbers and first the paper's own method comes first; for ratio they are the numerator
            and the denominator; for drop the rival and the paper's method without an attack, then attacked.
        published: of numbers, the paper's for each arm.
        band: of ratio, drop and above, the smallest and the largest value that the paper's text gives.
        larger: whether larger values are better.
        chance: of drop, the accuracy in % of a guess.
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
        place: where it stands.
        claim: what the paper says there.
        arms, comparisons: what is run, and how it is compared. Without arms nothing can be compared: the paper has an
            image, and no number in its text.
        pattern: the ids of the cells that it shares a line with on the page while none of them has been run.
        settings: what differs from the paper's text; "" if nothing does.
        row: an id shared by cells that try to reproduce the same thing in different settings.
        command: for cells without arms, what computes the like of a run.
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
        if len(set(names)) < len(names) or not {n for one in self.comparisons for n in one.arms} <= set(names):
            raise FLError(f"{self.id}: arms need different names, and comparisons can only name arms of the cell")

    @property
    def paper(self) -> str:
        """Its paper's name."""
        return self.id.split(".")[0]

    def arm(self, name: str) -> Arm:
        """The arm of that name. Raises FLError if there is none."""
        for arm in self.arms:
            if arm.name == name:
                return arm
        raise FLError(f"{self.id} has no {name!r}: it has {', '.join(arm.name for arm in self.arms)}", code="name")

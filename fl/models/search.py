"""The architectures that the server announces (FedFA, Alg. 1, line 1), the search among them for the one with the best
score or the largest that a client can afford, and the global model of those that clients chose (line 3).

score = lambda spec: zico(create(rng.torch("zico", client), spec).to(device), batches)
chosen = search(Space(base, widths, depths), score, rng.torch("search", client))
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, TypeAlias, TypeVar

import torch

import surgery
from fl.base.errors import FLError
from fl.models.create import create
from fl.models.fleet import brief
from zoo import Spec, ZooError

FEW = 64
"""Up to this number, all candidates are tried."""
POPULATION, GENERATIONS, PARENTS = 16, 15, 6
"""Of the evolution among more: scores a generation, generations after the first, and candidates that have children."""

SpecScore: TypeAlias = Callable[[Spec], float]
CostUnit: TypeAlias = Literal["macs", "parameters", "bytes"]
T = TypeVar("T")


@dataclass(frozen=True)
class Space:
    """A grid of widths and depths of one model.

    Iteration gives all specs, once each, in the order of the candidates.

    Attributes:
        base: the model at full size.
        widths: rates relative to the base.
        depths: blocks, one number for all sections or one for each section; empty: the base's own.
        mixed: whether every section has its own rate and depth, which are then single numbers (in a model without
            sections each of the spec's widths has its own rate). Otherwise a model has one rate and one entry of
            `depths`. Layers after the sections have the rate of the last section, as in `zoo.Spec`.

    Raises:
        FLError: for candidates that the model cannot have.

    >>> space = Space(Spec("preresnet18"), widths=(0.5, 0.75, 1), depths=(1, 2, 3))
    >>> len(space), Spec("preresnet18", width=0.75, depth=2) in space
    (9, True)
    >>> len(Space(Spec("preresnet18"), (0.5, 0.75, 1), (1, 2, 3), mixed=True))
    6561
    """

    base: Spec
    widths: tuple[float, ...] = (1.0,)
    depths: tuple[int | tuple[int, ...], ...] = ()
    mixed: bool = False

    def __post_init__(self) -> None:
        if not self.widths:
            raise FLError(f"no width of {self.base.name} to choose from: announce at least one, 1 for the full width")
        if self.mixed and self.base.architecture.depth is None:
            raise FLError(
                f"{self.base.name} has one width for all sections: leave --architectures.mixed out", code="unsupported"
            )
        for value in (*self.widths, *self.depths) if self.mixed else self.widths:
            if isinstance(value, tuple | list):
                way = "each section chooses one" if self.mixed else "--architectures.mixed lets sections differ"
                raise FLError(f"a width or depth to choose from is one number here, got {brief(value)}; {way}")
        try:
            widths = {self.base.scale(width).width: width for width in self.widths}
            depths = {self.base.scale(depth=depth).depth: depth for depth in self.depths}  # 2 is (2, 2, 2)
        except ZooError as error:
            raise FLError(f"no such candidate: {error}", code=error.code) from None
        object.__setattr__(self, "widths", tuple(widths.values()))
        object.__setattr__(self, "depths", tuple(depths.values() if self.mixed else depths))

    @cached_property
    def counts(self) -> dict[tuple[Spec, CostUnit], int]:
        """The known counts of candidates, kept here since specs hold users' models."""
        return {}

    @property
    def _slots(self) -> int:
        """The number of widths that are chosen."""
        return len(self.base.depth) or len(self.base.width) if self.mixed else 1

    @cached_property
    def _choices(self) -> list[tuple[str, list[Any]]]:
        """The name and the values of every choice.

        Widths come first. The positions of a spec's values are its genes, which order the grid.
        """
        base = self.base
        if not self.mixed:
            widths = [base.scale(width).width for width in self.widths]
            return [("width", widths), ("depth", list(self.depths) or [base.depth])]
        names = base.architecture.rate_names[: self._slots]
        widths = [(f"width of {n}", [full * rate for rate in self.widths]) for n, full in zip(names, base.width)]
        return widths + [(f"depth of {n}", list(self.depths) or [full]) for n, full in zip(names, base.depth)]

    def _make(self, genes: Iterable[int]) -> Spec:
        genes = list(genes)
        widths = tuple(self.widths[gene] for gene in genes[: self._slots])
        depths = tuple(values[gene] for gene, (_, values) in list(zip(genes, self._choices))[self._slots :])
        return self.base.scale(widths, depths) if self.mixed else self.base.scale(widths[0], depths[0])

    def genes(self, spec: Spec) -> tuple[int, ...]:
        """Find the positions of a spec's widths and depths among the candidates.

        Raises:
            FLError: if the spec was not announced; it names the wrong values and the candidates.

        >>> Space(Spec("resnet20"), (0.5, 1)).genes(Spec("resnet20", width=0.25))
        Traceback (most recent call last):
        fl.base.errors.FLError: resnet20 was not announced like this: width 0.25 (announced: 0.5, 1)
        """
        wrong = [f"{n} {getattr(spec, n)!r} (announced: {getattr(self.base, n)!r})" for n in _apart(spec, self.base)]
        if not wrong:
            values = [*spec.width[: self._slots], *spec.depth] if self.mixed else [spec.width, spec.depth]
            wrong = [
                f"{name} {brief(value, '-')} (announced: {', '.join(brief(known, '-') for known in announced)})"
                for value, (name, announced) in zip(values, self._choices)
                if value not in announced
            ]
        if not wrong:
            genes = tuple(announced.index(value) for value, (_, announced) in zip(values, self._choices))
            if (expected := self._make(genes)) == spec:
                return genes
            wrong = [f"width {brief(spec.width, '-')} (announced with these sections: {brief(expected.width, '-')})"]
        scaled = any(text.startswith("width") for text in wrong) and any(rate != 1 for rate in self.base.width)
        units = ". These are rates of its full width: those that were announced, times --width" if scaled else ""
        raise FLError(f"{spec.name} was not announced like this: {'; '.join(wrong)}{units}")

    def __contains__(self, spec: Spec) -> bool:
        try:
            self.genes(spec)
        except FLError:
            return False
        return True

    @property
    def _sizes(self) -> list[int]:
        return [len(values) for _, values in self._choices]

    def __len__(self) -> int:
        return math.prod(self._sizes)

    def __iter__(self) -> Iterator[Spec]:
        return map(self._make, itertools.product(*map(range, self._sizes)))

    @property
    def smallest(self) -> Spec:
        """The candidate with the smallest widths and depths; FLError if there is none."""
        spec = self._corner(min)
        if spec not in self:
            raise FLError(f"no depth is the smallest in every section: announce {spec.depth}, too")
        return spec

    @property
    def largest(self) -> Spec:
        """The model with the largest width and depths, which contains all candidates.

        It is not a candidate itself if no depth is largest in every section.
        """
        return self._corner(max)

    def _corner(self, pick: Callable[..., Any]) -> Spec:
        sizes = self._sizes
        every = [self._make(min(k, size - 1) for size in sizes) for k in range(max(sizes))]  # each value of each gene
        return maximum(every, pick)

    def neighbours(self, spec: Spec) -> list[Spec]:
        """List the candidates that differ in one width or depth, as the grid's genes go."""
        genes = self.genes(spec)
        return [
            self._make((*genes[:i], other, *genes[i + 1 :]))
            for i, size in enumerate(self._sizes)
            for other in range(size)
            if other != genes[i]
        ]

    def random(self, generator: torch.Generator) -> Spec:
        """Draw a candidate uniformly."""
        return self._make(_draw(range(size), generator) for size in self._sizes)

    def mutate(self, spec: Spec, generator: torch.Generator) -> Spec:
        """Draw a candidate that differs in one width or depth; this one if none does."""
        others = self.neighbours(spec)
        return _draw(others, generator) if others else spec

    def crossover(self, a: Spec, b: Spec, generator: torch.Generator) -> Spec:
        """Draw a candidate that has each width and depth from one of the two."""
        return self._make(_draw(pair, generator) for pair in zip(self.genes(a), self.genes(b)))


def search(space: Space, score: SpecScore, generator: torch.Generator) -> Spec:
    """Find the best of up to 64 candidates, or the one that `evolve` finds among more.

    Among equal scores the first of the grid is the best; NaN is the lowest score.

    >>> space = Space(Spec("resnet20"), widths=(0.5, 1), depths=(1, 2, 3))
    >>> search(space, lambda spec: -abs(spec.width[0] * spec.depth[0] - 1.6), torch.Generator()).depth
    (3, 3, 3)
    """
    if len(space) > FEW:
        return evolve(space, score, generator)
    return _rank(space, {spec: score(spec) for spec in space})[0]


def evolve(space: Space, score: SpecScore, generator: torch.Generator) -> Spec:
    """Find the best candidate that evolution sees.

    It takes at most POPULATION x (1 + GENERATIONS) scores, none twice. The first population is random. Every later
    candidate is a random cross of two of the best so far, with one width or depth changed, or more until the candidate
    is new.

    Args:
        generator: the result depends only on it and on the scores.
    """
    scores: dict[Spec, float] = {}
    for _ in range(1 + GENERATIONS):
        best = _rank(space, scores)[:PARENTS]
        for _ in range(min(POPULATION, len(space) - len(scores))):
            child = space.random(generator)
            if best:
                a, b = _draw(best, generator), _draw(best, generator)
                child = space.mutate(space.crossover(a, b, generator), generator)
            while child in scores:
                child = space.mutate(child, generator)
            scores[child] = score(child)
    return _rank(space, scores)[0]


def _rank(space: Space, scores: dict[Spec, float]) -> list[Spec]:
    """Sort candidates by score, the highest first; equal ones as in the grid."""
    worth = {spec: -math.inf if math.isnan(value) else value for spec, value in scores.items()}
    return sorted(worth, key=lambda spec: (-worth[spec], space.genes(spec)))


def _draw(values: Sequence[T], generator: torch.Generator) -> T:
    return values[int(torch.randint(len(values), (), generator=generator))]


def largest_within(space: Space, limit: float, unit: CostUnit) -> Spec:
    """Find the candidate with the largest count that does not exceed the limit.

    Of equal ones it is the first of the grid. In mixed spaces of more than 64 candidates not all are counted: starting
    with the smallest candidate, the width or depth that adds most and still fits is raised, one at a time. In the
    result no single one can be raised further, but there may be a larger candidate that fits.

    Args:
        unit: "macs" of one sample at the base's own image size, "parameters", or "bytes": 4 for each element of the
            floating-point state, including buffers, which is what a model takes on the network.

    Raises:
        FLError: if no candidate fits; it names the smallest and its count.

    >>> space = Space(Spec("resnet20"), widths=(0.25, 0.5, 1), depths=(1, 2, 3))
    >>> spec = largest_within(space, 20e6, "macs")
    >>> spec.width[0], spec.depth[0], spec.count().macs
    (1.0, 1, 12239488)
    """

    def count(spec: Spec) -> int:
        if (spec, unit) not in space.counts:
            space.counts[spec, unit] = size(spec, unit)
        return space.counts[spec, unit]

    climbing = space.mixed and len(space) > FEW
    starts = [space.smallest] if climbing else list(space)
    fitting = [spec for spec in starts if count(spec) <= limit]
    if not fitting:
        least = min(starts, key=count)
        raise FLError(
            f"no candidate of {least.name} has at most {limit:,.0f} {unit}: the smallest, of width {least.width} and "
            f"depth {least.depth}, has {count(least):,}"
        )
    best = max(fitting, key=count)
    while climbing and (larger := [s for s in space.neighbours(best) if count(best) < count(s) <= limit]):
        best = max(larger, key=count)
    return best


def size(spec: Spec, unit: CostUnit) -> int:
    """Count the MACs of one sample, parameters, or bytes of a model.

    Only models of a library are built in memory.

    >>> size(Spec("cnn"), "parameters"), size(Spec("cnn"), "bytes")
    (1663370, 6653480)
    """
    try:
        library = spec.architecture.depth is None  # its narrow and shallow models come from surgery on a real one
        if not library and unit != "bytes":
            return getattr(spec.count(), unit)
        model = create(torch.Generator(), spec).to("meta") if library else spec.build(device="meta")
    except ZooError as error:
        raise FLError(str(error), code=error.code) from None
    if unit == "bytes":
        return sum(4 * tensor.numel() for tensor in surgery.state(model).values() if tensor.is_floating_point())
    if unit == "parameters":
        return sum(parameter.numel() for parameter in model.parameters())
    from torch.utils.flop_counter import FlopCounterMode  # imports triton

    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.eval().requires_grad_(False)(spec.example(device="meta"))
    return counter.get_total_flops() // 2


def maximum(specs: Iterable[Spec], pick: Callable[..., Any] = max) -> Spec:
    """Make the smallest model that contains all of these.

    It has the maximum of every width and of every section's depth.

    Args:
        pick: min gives the largest model that all of these contain.

    Raises:
        FLError: for no specs, and for specs that differ in anything else.

    >>> both = maximum([Spec("resnet20", width=0.5, depth=(3, 1, 1)), Spec("resnet20", width=(0.25, 0.25, 1), depth=2)])
    >>> both.width, both.depth
    ((0.5, 0.5, 1.0), (3, 2, 2))
    """
    specs = list(specs)
    if not specs:
        raise FLError("no models to find the largest of: give at least one")
    first = specs[0]
    for spec in specs:
        if names := _apart(spec, first):
            values = f"{getattr(first, names[0])!r} and {getattr(spec, names[0])!r}"
            raise FLError(
                f"models that differ in {names[0]} ({values}) have no common global model: only width and "
                "depth may differ",
                code="mismatch",
            )
    width = tuple(map(pick, zip(*(spec.width for spec in specs))))
    depths = list(dict.fromkeys(spec.depth for spec in specs))
    if len({depth and len(depth) for depth in depths}) > 1:
        listed = ", ".join(brief(depth, "-") for depth in depths)
        raise FLError(f"{first.name}: depths {listed} do not compare: give one for each section")
    return replace(first, width=width, depth=depths[0] and tuple(map(pick, zip(*depths))))


def _apart(a: Spec, b: Spec) -> list[str]:
    """Name the fields, other than width and depth, in which two specs differ."""
    names = [field.name for field in dataclasses.fields(Spec) if field.name not in ("width", "depth")]
    return [name for name in names if getattr(a, name) != getattr(b, name)]

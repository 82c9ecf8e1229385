"""As many positions of every width as a model of a given size has."""

import math
from bisect import bisect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from types import MappingProxyType
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor, nn

from surgery.errors import SurgeryError
from surgery.forward import Observed
from surgery.width.attempts import Numbers, Sizing, Unreachable
from surgery.width.choose import Demand, choose
from surgery.width.shortfall import find_whole, list_whole
from surgery.width.solve import Atom, Axes, Axis, Choice, Solution, named_widths, size_of
from surgery.width.steps import Step
from surgery.width.trace import Trace

Measure: TypeAlias = Literal["parameters", "macs", "positions"]


class Cost:
    """A count that is a sum of products of sizes of axes.

    Args:
        model: the full model, or a copy of it on the meta device.
        steps: how many of the solution's steps count; the steps of a second pass in training mode do not.
    """

    def __init__(self, model: nn.Module, solution: Solution, measure: Measure, steps: int):
        if measure == "parameters":
            split = [name.rpartition(".") for name, _ in model.named_parameters()]
            self._products: list[Axes] = [solution.tensors[module, attribute] for module, _, attribute in split]
        elif measure == "positions":
            self._products = [(atom,) for atom in solution.members if not atom.why]
        else:
            self._products = [axes for step in solution.steps[:steps] for axes in find_multiplied(step)]
        self.full = self({})

    def __call__(self, choice: Choice) -> int:
        """Return the count with these positions."""
        known: dict[Axis, int] = {}
        total = 0
        for axes in self._products:
            count = 1
            for axis in axes:
                if axis not in known:
                    known[axis] = size_of(axis, choice)
                count *= known[axis]
            total += count
        return total

    def share(self, choice: Choice) -> float:
        """Return the count with these positions, as a share of the full model's."""
        return self(choice) / max(self.full, 1)


def find_multiplied(step: Step[Axis]) -> Iterator[Axes]:
    """Yield axes whose sizes multiply to an operation's MACs, as torch counts them."""
    inputs = step.inputs
    if step.name in ("mm", "bmm", "addmm", "baddbmm"):
        left, right = inputs[-2:]
        yield *left, right[-1]
    elif step.name in ("convolution", "_convolution"):
        moved = inputs[0] if step.scalars.get("transposed") else step.outputs[0]
        yield *inputs[1], moved[0], *moved[2:]
    elif step.name == "scaled_dot_product_attention":
        query, key, value = inputs[:3]
        yield *query, key[-2]
        yield *query[:-1], value[-2], value[-1]


class Limits:
    """The limits of a `Target` of shares, and how much of them a model uses."""

    def __init__(self, target: "Target", model: nn.Module, solution: Solution, steps: int):
        self.target = target
        self.costs = {measure: Cost(model, solution, measure, steps) for measure in target.wanted}

    def share(self, choice: Choice) -> float:
        """Return the share left of the full model; with several limits, see `tightest`.

        It is then scaled to the first limit.
        """
        if len(self.costs) == 1:
            return self.costs[self.target.measure].share(choice)
        measure, share = self.tightest(choice)
        return share / self.target.wanted[measure] * self.target.share

    def tightest(self, choice: Choice) -> tuple[Measure, float]:
        """Return the measure that is largest for its limit, and the share left of it."""
        shares = {measure: cost.share(choice) for measure, cost in self.costs.items()}
        measure = max(shares, key=lambda measure: shares[measure] / self.target.wanted[measure])
        return measure, shares[measure]


CLOSE = 0.02  # a model is as large as was asked for if it misses by less than this share of it


@dataclass(frozen=True)
class Target:
    """The limits of the narrow model's size; the largest model within them is made.

    Every limit is a share of the full model's, up to 1, or a number: `Target(parameters=4_000_000)`. Of several,
    `Target(parameters=4_000_000, macs=300e6)`, all hold.

    Without scores, all widths keep about the same share of their positions. With scores, the positions of all widths
    compete, and those with the highest scores stay (except with `even`). First each width's scores are divided by their
    mean: otherwise widths that lie along more or larger tensors would win. If the next position exceeds a limit, a
    position with a lower score in another width may still fit.

    Attributes:
        macs: how many multiply-accumulates, as torch.utils.flop_counter counts them, on the example as it is given;
        parameters: how many parameters;
        positions: how many positions of all widths that may shrink. A share s is torch-pruning's `pruning_ratio` 1 - s.
        floor: the share of its positions that every width keeps whatever the scores say, so that no layer dies.
        normalise: whether scores are divided by their width's mean. Not where they are comparable over widths as they
            stand: LAMP's, whose highest is 1 in every width, and all that torch-pruning's classes have normalised.
        even: whether all widths keep one share, as with `narrow(model, share)`, and scores choose positions within each
            alone. Layers that were alike stay so, as the configurations of transformers' models ask.

    >>> Target(macs=0.5)
    Target(macs=0.5)
    """

    macs: float | None = None
    parameters: float | None = None
    positions: float | None = None
    floor: float = 0.1
    normalise: bool = True
    even: bool = False

    def __post_init__(self):
        if not self.wanted:
            raise SurgeryError(f"limit {', '.join(get_args(Measure))} or several: Target(macs=0.5)", code="argument")
        for measure, share in {**self.wanted, "floor": self.floor}.items():
            number = isinstance(share, Real) and not isinstance(share, bool) and math.isfinite(share)
            count = number and measure != "floor" and share > 1 and float(share).is_integer()
            if not number or not (0 < share <= 1 or count or (measure == "floor" and share == 0)):
                allowed = (
                    "a width in [0, 1]" if measure == "floor" else "the full model in (0, 1], or a whole number above"
                )
                raise SurgeryError(f"Target({measure}={share!r}): give a share of {allowed}", code="argument")

    def __repr__(self) -> str:
        floor = "" if self.floor == 0.1 else f", floor={self.floor}"
        normalise = "" if self.normalise else ", normalise=False"
        wanted = ", ".join(f"{measure}={share}" for measure, share in self.wanted.items())
        return f"Target({wanted}{floor}{normalise}{', even=True' if self.even else ''})"

    @property
    def wanted(self) -> dict[Measure, float]:
        """The limited quantities, and their limits."""
        return {measure: share for measure in get_args(Measure) if (share := getattr(self, measure)) is not None}

    @property
    def measure(self) -> Measure:
        """The limited quantity; the first, if it is several."""
        return next(iter(self.wanted))

    @property
    def share(self) -> float:
        """The share asked for; the first, if it is several."""
        return self.wanted[self.measure]

    def of(self, wanted: Mapping[Measure, float]) -> "Target":
        """Return the same with other limits."""
        arguments: dict[Any, Any] = {**dict.fromkeys(get_args(Measure)), **wanted}
        return replace(self, **arguments)

    def as_shares(self, full: Mapping[Measure, int]) -> "Target":
        """Return the same with shares of a full model of these sizes in place of numbers.

        >>> Target(macs=0.5, parameters=300).as_shares({"macs": 1000, "parameters": 400})
        Target(parameters=0.75, macs=0.5)
        """
        shares = {w: n if n <= 1 else min(1.0, n / max(full[w], 1)) for w, n in self.wanted.items()}
        return self.of(shares)

    @property
    def rate(self) -> float:
        """Estimate each width's share: a layer costs the product of two; 0.5 if unknown."""
        shares = {measure: share for measure, share in self.wanted.items() if share <= 1}
        return min((s if measure == "positions" else math.sqrt(s) for measure, s in shares.items()), default=0.5)


def sizing(request: Target, sizes: Mapping[str, int] = MappingProxyType({}), by: str = "importance") -> Sizing:
    """Return the function that decides how much each width keeps to meet the target.

    Args:
        request: the target, of shares or numbers.
        by: what errors call the criterion.
        sizes: by name how many positions widths had before the model was cut for the first time; the target's
            floor is a share of it.
    """

    def decide(
        seen: Observed[Trace], solution: Solution, demand: Demand, score: Callable[[Atom], Tensor] | None
    ) -> Numbers:
        costs = {w: Cost(seen.model, solution, w, seen.found.lengths[0]).full for w in request.wanted}
        target = request.as_shares(costs)
        cost = Limits(target, seen.model, solution, seen.found.lengths[0])
        names = {atom: name for name, atom in named_widths(solution).items()}
        before = {atom: sizes.get(name, atom.size) for atom, name in names.items()}

        def worth(atom: Atom) -> Tensor:
            return comparable(score(atom), target.normalise, f"{by} gives {names[atom]!r}")

        def numbers(widths: Collection[Atom]) -> Mapping[Atom, int]:
            counts = numbers_kept(target, cost, widths, demand.count_at, score and worth, before)
            choice = {atom: range(n) for atom, n in counts.items() if n < atom.size}
            if cost.share(choice) > target.share:
                measure, share = cost.tightest(choice)
                least = cost.costs[measure](choice)
                whole = find_whole(solution, demand, choose(solution, demand))
                percent = "".join(
                    f"; {number:g} counts {name}: for {number:g} % write {name}={number / 100:g}"
                    for name, number in request.wanted.items()
                    if 1 < number <= 100
                )
                reasons = f"; {list_whole(seen.model, whole)}" if whole else ""
                raise Unreachable(
                    f"{request} cannot be reached: {least:,} {measure} ({share:.1%}) are left where every width "
                    "that can shrink is at its floor: take a lower floor, another rounding or a larger target"
                    f"{percent}{reasons}",
                    code="target",
                )
            return counts

        return numbers

    return decide


def numbers_kept(
    target: Target,
    cost: Limits,
    widths: Collection[Atom],
    count_at: Callable[[int, float], int],
    scores: Callable[[Atom], Tensor] | None,
    sizes: Mapping[Atom, int],
) -> dict[Atom, int]:
    """Return how many positions of each width stay.

    Args:
        widths: those that may shrink.
        count_at: from a width's size and a share to a number of positions.
        scores: of a width, comparable over widths; None for one share of all widths.
        sizes: how many positions the widths had in the beginning; the target's floor is a share of it.
    """
    if target.even:
        return _even(target, cost, widths, count_at, sizes)
    floors = [floor_of(target, atom, sizes) for atom in widths]
    owner, value = _rank(floors, widths, scores)
    order = value.argsort(descending=True, stable=True)
    owner, widths = owner[order], list(widths)

    def best(count: int) -> list[int]:
        return torch.bincount(owner[:count], minlength=len(widths)).tolist()

    def kept(counts: list[int]) -> dict[Atom, int]:
        return {atom: count_at(atom.size, max(count, 1) / atom.size) for atom, count in zip(widths, counts)}

    def share(counts: list[int]) -> float:
        numbers = kept(counts)
        return cost.share({atom: range(n) for atom, n in numbers.items() if n < atom.size})

    low = int(value.isinf().sum())
    if share(best(low)) > target.share:
        return kept(best(low))  # the target cannot be reached
    # Without scores positions of equal worth go together, so that equal widths stay equal.
    changes = value[order][low:].diff().nonzero().flatten() + low + 1
    ends = range(low, len(value) + 1) if scores else [low, *changes.tolist(), len(value)]
    fitting = bisect(ends, target.share, key=lambda count: share(best(count)))
    low = ends[fitting - 1]
    counts, full = best(low), set()
    if scores is None:
        for size in sorted({atom.size for atom in widths}):  # one step more of all widths of one size may still fit
            more = [n + (atom.size == size and n < size) for n, atom in zip(counts, widths)]
            counts = more if share(more) <= target.share else counts
        return kept(counts)
    for number in owner[low:].tolist():  # the next position is too much: those after it may still fit
        if share(counts) >= (1 - CLOSE) * target.share:
            break
        if number not in full:
            counts[number] += 1
            if share(counts) > target.share:
                counts[number] -= 1
                full.add(number)
    return kept(counts)


_SHARES = 4  # with fewer a target is missed by too much


def _even(
    target: Target,
    cost: Limits,
    widths: Collection[Atom],
    count_at: Callable[[int, float], int],
    sizes: Mapping[Atom, int],
) -> dict[Atom, int]:
    """`numbers_kept` with the largest share of all widths that fits.

    If the greatest common divisor of the sizes is at least `_SHARES`, the share is a multiple of 1 / divisor, so that
    share * size is whole for every width. Then a width that is a product of others, such as heads times head size,
    stays the product of the narrow widths.
    """
    every = [atom.size for atom in widths]
    parts = common if (common := math.gcd(*every)) >= _SHARES else max(every, default=1)

    def kept(part: int) -> dict[Atom, int]:
        return {atom: max(floor_of(target, atom, sizes), count_at(atom.size, part / parts)) for atom in widths}

    def share(part: int) -> float:
        return cost.share({atom: range(n) for atom, n in kept(part).items() if n < atom.size})

    return kept(max(1, bisect(range(1, parts + 1), target.share, key=share)))


def floor_of(target: Target, atom: Atom, sizes: Mapping[Atom, int]) -> int:
    """Return how many positions a width's floor keeps; `sizes` as for `numbers_kept`."""
    return min(atom.size, max(1, math.ceil(round(target.floor * sizes.get(atom, atom.size), 9))))


def _rank(
    floors: Sequence[int], widths: Collection[Atom], scores: Callable[[Atom], Tensor] | None
) -> tuple[Tensor, Tensor]:
    """Return ([n] width of each position, [n] its worth), best positions first.

    Positions of the floor are worth infinitely much. Without scores the j-th of a width's n positions is worth -j / n,
    which gives all widths the same share.
    """
    owners, values = [], []
    for number, (atom, floor) in enumerate(zip(widths, floors)):
        value = -torch.arange(atom.size) / atom.size if scores is None else scores(atom)
        value = value.double().sort(descending=True).values
        value[:floor] = math.inf
        owners.append(torch.full((atom.size,), number))
        values.append(value)
    if not owners:
        return torch.empty(0, dtype=torch.long), torch.empty(0)
    return torch.cat(owners), torch.cat(values)


def comparable(scores: Tensor, normalise: bool, whose: str) -> Tensor:
    """Return scores that compete over all widths: over their mean, or unchanged."""
    if not normalise:
        return scores
    if (scores < 0).any():
        raise SurgeryError(
            f"{whose} negative scores, which cannot be divided by their mean: Target(..., normalise=False) compares "
            "them over all widths as they are, Target(..., even=True) only within each width",
            code="argument",
        )
    return scores / scores.mean() if scores.any() else scores


def describe_miss(asked: Target, target: Target, share: float) -> str:
    """Return how far a share missed its target, as `Limits` gives it; "" if it met it.

    Args:
        asked: the target as it was given. target: the same with shares in place of numbers.
    """
    if abs(share - target.share) <= CLOSE * target.share:
        return ""
    more = "one more position of a width, or one more step of `rounding`,"
    left, number = f"{share:.1%} of the {target.measure} are left", asked.wanted[target.measure]
    if number > 1:
        left = f"{share / target.share * number:,.0f} {target.measure} are left"
    if len(target.wanted) > 1:
        left = f"{share / target.share:.1%} of what the tightest limit allows are left"
    return (
        f"{asked} is missed by more than {CLOSE:.0%}: {left}, and "
        f"{'the next larger share of all widths' if target.even else more} would be too much"
    )

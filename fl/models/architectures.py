"""Which architecture each client has: the server announces some, and clients choose (FedFA, Alg. 1, lines 1-2)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated

import torch
import tyro
import yaml

from fl.base.errors import FLError
from fl.base.rng import Rng, draw
from fl.base.settings import Blocks, OnlyWith, Share, one_of, several
from fl.data import Dataset, fingerprint, is_custom
from fl.models.create import create
from fl.models.search import Space, largest_within, search
from fl.models.zico import Deviation, zico
from fl.partition import Splits
from zoo import Spec

_BATCHES = 2  # of a score
_KEPT = 64  # models that are kept for the next client; of so many candidates `search` tries all
_CHOSEN: dict[tuple, list[Spec | None]] = {}  # ZiCo's choices: every method with the same seed needs them again
_SEEDS = 32  # for which they are kept


@dataclass(frozen=True)
class ArchitectureOptions:
    """What the clients of methods with models of different architectures may choose among."""

    widths: Annotated[tuple[float, ...], several(float, "FLOAT,...", above=0)] = (1.0,)
    """rates of the width of the model that --width and --depth describe"""
    depths: Blocks = ()
    """numbers of blocks: one for all sections (1,2,3), or one for each with dashes between (1-1-2-2,2-2-3-3); own:
    the model's own"""
    mixed: bool = False
    """whether every section may have a width and a depth of its own"""
    choose: Annotated[str, one_of("zico", "cycle", "random", "budget", "given")] = "zico"
    """how clients choose: zico (the weak ones the smallest, the others what ZiCo scores best on their own data), cycle
    (in turn), random, budget (the largest that they can afford) or given (by --architectures.file)"""
    weak: Annotated[Share, OnlyWith("choose", "zico")] = 0.5
    """zico: share of the clients that take the smallest"""
    deviation: Annotated[str, one_of("signed", "absolute"), OnlyWith("choose", "zico")] = "signed"
    """zico: of what the score takes the standard deviation: signed (the gradients, as the released code does) or
    absolute (their absolute values, as ZiCo's paper does)"""
    budgets: Annotated[tuple[float, ...], several(float, "FLOAT,...", above=0), OnlyWith("choose", "budget")] = ()
    """budget: what clients can afford, in turn"""
    unit: Annotated[str, one_of("macs", "parameters", "bytes"), OnlyWith("choose", "budget")] = "macs"
    """budget: in what it is counted: macs (of one sample), parameters or bytes"""
    file: Annotated[str | None, OnlyWith("choose", "given"), tyro.conf.arg(metavar="FILE")] = None
    """given: a YAML list with the width and the depth of each client, as [{width: 0.5, depth: 2}, ...]"""

    def check(self) -> None:
        """Raise FLError for values out of range, and for options without an effect."""
        for flag, reader in (("budgets", "budget"), ("file", "given")):
            if self.choose == reader and not getattr(self, flag):
                raise FLError(f"--architectures.choose {reader} needs --architectures.{flag}")
        self.blocks()

    def blocks(self) -> tuple[int | tuple[int, ...], ...]:
        """The depths as numbers.

        >>> ArchitectureOptions(depths=("2", "1-2")).blocks()
        (2, (1, 2))
        """
        try:
            each = [tuple(map(int, str(text).split("-"))) for text in self.depths]
        except ValueError:
            raise FLError(
                f"--architectures.depths {','.join(self.depths)}: a depth is a number of blocks (2), or one for each "
                "section (1-2-2-1)"
            ) from None
        return tuple(numbers if len(numbers) > 1 else numbers[0] for numbers in each)

    def announce(self, base: Spec) -> Space:
        """The candidates."""
        return Space(base, self.widths, self.blocks(), self.mixed)


def choose(
    options: ArchitectureOptions,
    base: Spec,
    data: Dataset,
    clients: Splits,
    batch_size: int,
    rng: Rng,
    take_largest: frozenset[int] = frozenset(),
) -> list[Spec]:
    """The architecture of each client.

    Args:
        take_largest: clients that take the largest candidate instead of choosing, as malicious ones could
            (FedFA, section 3.1).

    Raises:
        FLError: for options that do not fit the model, and for given architectures that were not announced.
    """
    space = options.announce(base)
    n = len(clients)
    if options.choose == "zico":
        split = hash((clients.train.samples.numpy().tobytes(), clients.train.offsets.numpy().tobytes()))
        which = fingerprint(data)["sha256"] if is_custom(data.name) else data.name
        key = (space, options.weak, options.deviation, which, len(data.y), batch_size, rng, take_largest, split)
        if key not in _CHOSEN:
            while len(_CHOSEN) >= _SEEDS:
                del _CHOSEN[next(iter(_CHOSEN))]
            scorer = _Scorer(space, data, clients, batch_size, rng, options.deviation)
            _CHOSEN[key] = _by_score(space, options.weak, scorer, n, take_largest)
        chosen = _CHOSEN[key]
    elif options.choose == "random":
        chosen = [space.random(rng.torch("architecture", k)) for k in range(n)]
    elif options.choose == "budget":
        fitting = [largest_within(space, limit, options.unit) for limit in options.budgets]
        chosen = [fitting[k % len(fitting)] for k in range(n)]
    elif options.choose == "given":
        chosen = read_given(Path(options.file), space, n)
    else:
        if len(space) > n:
            raise FLError(
                f"--architectures.choose cycle: {len(space)} candidates are more than the {n} clients; use random"
            )
        every = list(space)
        chosen = [every[k % len(every)] for k in range(n)]
    if not take_largest:
        return list(chosen)
    largest = space.largest if space.largest in space else largest_within(space, math.inf, "parameters")
    return [largest if k in take_largest else spec for k, spec in enumerate(chosen)]


def _by_score(space: Space, weak: float, scorer: "_Scorer", n: int, take_largest: frozenset[int]) -> list[Spec | None]:
    """The smallest candidate for weak clients, the one with the best score for others; None for takers of the
    largest."""
    few = set(draw(n, round(weak * n), scorer.rng.torch("weak")))
    best = scorer.best if len(space) > 1 else lambda _: space.smallest
    return [space.smallest if k in few else None if k in take_largest else best(k) for k in range(n)]


class _Scorer:
    """ZiCo's scores of the candidates on clients' data, with initial weights drawn from the run's seed."""

    def __init__(
        self, space: Space, data: Dataset, clients: Splits, batch_size: int, rng: Rng, deviation: Deviation
    ) -> None:
        self.space, self.data, self.clients, self.batch_size, self.rng = space, data, clients, batch_size, rng
        self.deviation = deviation
        self.model = lru_cache(_KEPT)(lambda spec: create(rng.torch("weights"), spec).to(data.x.device))

    def best(self, client: int) -> Spec:
        """The candidate with the best score; the smallest for a client with too few samples for different batches."""
        if len(self.clients.train[client]) < 2 * _BATCHES:
            return self.space.smallest
        batches = self._batches(client)

        def score(spec: Spec) -> float:
            return zico(self.model(spec), batches, deviation=self.deviation)

        return search(self.space, score, self.rng.torch("architecture search", client))

    def _batches(self, client: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Two batches of the client's training samples that have none in common."""
        own = self.clients.train[client]
        order = torch.randperm(len(own), generator=self.rng.torch("zico", client)).tolist()
        size = min(self.batch_size, len(own) // _BATCHES)
        index = [own[order[b * size : (b + 1) * size]].to(self.data.x.device) for b in range(_BATCHES)]
        return [(self.data.normalise(self.data.x[some]), self.data.y[some]) for some in index]


def read_given(path: Path, space: Space, clients: int) -> list[Spec]:
    """The architectures that a file gives to the clients, in their order.

    Raises:
        FLError: for a file with other content or of another length, and for architectures that were not announced.
    """
    try:
        rows = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise FLError(f"--architectures.file {path} cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(rows, list) or not all(
        isinstance(row, dict) and row.keys() <= {"width", "depth"} for row in rows
    ):
        raise FLError(f"{path} is no list of architectures: write [{{width: 0.5, depth: 2}}, ...], one for each client")
    if len(rows) != clients:
        raise FLError(f"{path} has {len(rows)} architectures, and there are {clients} clients: give one each")
    return announced(space, rows, str(path))


def announced(space: Space, rows: Sequence[dict], where: str) -> list[Spec]:
    """The candidates of these widths and depths.

    Raises:
        FLError: naming the client, and the part of its architecture that the server has not announced.
    """
    specs = []
    for client, row in enumerate(rows):
        width, depth = (tuple(v) if isinstance(v, list) else v for v in (row.get("width", 1.0), row.get("depth")))
        try:
            spec = space.base.scaled(width, depth)
            space.check(spec)
        except (FLError, ValueError) as error:
            raise FLError(f"{where}: client {client} is refused: {error}") from None
        specs.append(spec)
    return specs

"""The architecture of each client: the server announces some, clients choose.

FedFA, Alg. 1, lines 1-2.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated

import torch
import tyro

from fl.base.errors import FLError
from fl.base.rng import Rng, draw
from fl.base.settings import Blocks, OnlyWith, Share, one_of, several
from fl.data import Dataset, fingerprint
from fl.models.create import create
from fl.models.custom_model import CustomSpec
from fl.models.search import FEW, Space, largest_within, search
from fl.models.zico import zico
from fl.partition import Splits
from zoo import Spec, ZooError
from zoo.plain_yaml import read_yaml

_BATCHES = 2  # of a score
_CHOSEN: dict[tuple, list[Spec | None]] = {}  # ZiCo's choices: every method with the same seed needs them again


@dataclass(frozen=True)
class ArchitectureOptions:
    """The architectures among which clients of some methods may choose."""

    widths: Annotated[tuple[float, ...], several(float, "FLOAT,...", above=0)] = (1.0,)
    """widths to choose among, as rates of the width of the model that --width and --depth describe"""
    depths: Blocks = ()
    """depths to choose among, as numbers of blocks: one for all sections (1,2,3), or one for each with dashes
    between (1-1-2-2,2-2-3-3); own: the model's own"""
    mixed: bool = False
    """let every section have a width and a depth of its own"""
    choose: Annotated[str, one_of("zico", "cycle", "paired", "random", "budget", "given")] = "zico"
    """how clients choose: zico (the weak ones the smallest, the others what ZiCo scores best on their own data), cycle
    (in turn), paired (in turn, the first width with the first depth, and so on), random, budget (the largest that they
    can afford) or given (by --architectures.file)"""
    weak: Annotated[Share, OnlyWith("choose", "zico")] = 0.5
    """zico: share of the clients that take the smallest architecture"""
    budgets: Annotated[tuple[float, ...], several(float, "FLOAT,...", above=0), OnlyWith("choose", "budget")] = ()
    """budget: largest sizes that clients can afford, given to them in turn"""
    unit: Annotated[str, one_of("macs", "parameters", "bytes"), OnlyWith("choose", "budget")] = "macs"
    """budget: unit of the budgets: macs (of one sample), parameters or bytes"""
    file: Annotated[str | None, OnlyWith("choose", "given"), tyro.conf.arg(metavar="FILE")] = None
    """given: a YAML list with the width and the depth of each client, as [{width: 0.5, depth: 2}, ...]"""

    def check(self) -> None:
        """Raise FLError for values out of range, and for options without an effect."""
        for flag, reader in (("budgets", "budget"), ("file", "given")):
            if self.choose == reader and not getattr(self, flag):
                raise FLError(f"--architectures.choose {reader} needs --architectures.{flag}")
        if self.choose == "paired" and len(self.widths) != len(self.depths):
            raise FLError(
                f"--architectures.choose paired needs a depth for each width, and there are {len(self.widths)} widths "
                f"and {len(self.depths)} depths: give as many, repeating some"
            )
        if self.choose == "paired" and self.mixed:
            raise FLError(
                "--architectures.choose paired has one width and one depth for all sections: leave "
                "--architectures.mixed out, or give depths such as 1-1-2-2"
            )
        self.blocks()

    def blocks(self) -> tuple[int | tuple[int, ...], ...]:
        """Parse the depths.

        >>> ArchitectureOptions(depths=("2", "1-2")).blocks()
        (2, (1, 2))
        """
        try:
            depths = [tuple(map(int, str(text).split("-"))) for text in self.depths]
        except ValueError:
            raise FLError(
                f"--architectures.depths {','.join(self.depths)}: a depth is a number of blocks (2), or one for each "
                "section (1-2-2-1)"
            ) from None
        return tuple(numbers if len(numbers) > 1 else numbers[0] for numbers in depths)

    def announce(self, base: Spec) -> Space:
        """Make the space of candidates."""
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
    """Choose the architecture of each client.

    Args:
        take_largest: clients that take the largest candidate instead of choosing, as malicious ones could
            (FedFA, section 3.1).

    Raises:
        FLError: for options that do not fit the model, and for given architectures that were not announced.
    """
    space = options.announce(base)
    n = len(clients)
    if options.choose == "zico":
        if data.task != "classification" and len(space) > 1:
            raise FLError(
                f"--architectures.choose zico scores models by their cross entropy, and the data are for {data.task}: "
                "choose cycle, random, budget or given",
                code="unsupported",
            )
        split = hash((clients.train.samples.numpy().tobytes(), clients.train.offsets.numpy().tobytes()))
        known_by = fingerprint(data)["sha256"], split, batch_size, rng, take_largest
        key = (space, options.weak, *known_by)
        known = {} if isinstance(base, CustomSpec) else _CHOSEN  # a user's spec would keep the model in memory
        if key not in known:
            if len(known) >= 32:  # a long comparison in one process
                known.clear()
            known[key] = _by_score(space, options, data, clients, batch_size, rng, take_largest)
        chosen = known[key]
    elif options.choose == "paired":
        pairs = [base.scale(width, depth) for width, depth in zip(options.widths, options.blocks())]
        chosen = [pairs[k % len(pairs)] for k in range(n)]
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


def _by_score(
    space: Space,
    options: ArchitectureOptions,
    data: Dataset,
    clients: Splits,
    batch_size: int,
    rng: Rng,
    take_largest: frozenset[int],
) -> list[Spec | None]:
    """Choose the smallest candidate for weak clients, and for each other client the one with the best ZiCo score on its
    own data; None for those that take the largest.

    The scored models have initial weights by the run's seed. A client with too few samples for two different
    batches takes the smallest candidate.
    """
    weak = set(draw(len(clients), round(options.weak * len(clients)), rng.torch("weak")))
    model = lru_cache(FEW)(lambda spec: create(rng.torch("weights"), spec).to(data.device))

    def best(client: int) -> Spec:
        samples = clients.train[client]
        if len(space) == 1 or len(samples) < 2 * _BATCHES:
            return space.smallest
        order = torch.randperm(len(samples), generator=rng.torch("zico", client)).tolist()
        size = min(batch_size, len(samples) // _BATCHES)
        pieces = [samples[order[b * size : (b + 1) * size]] for b in range(_BATCHES)]
        batches = [(data.normalise(x), y) for x, y in map(data.gather, pieces)]
        return search(space, lambda spec: zico(model(spec), batches), rng.torch("architecture search", client))

    return [space.smallest if k in weak else None if k in take_largest else best(k) for k in range(len(clients))]


def read_given(path: Path, space: Space, clients: int) -> list[Spec]:
    """Read the architectures that a file gives to the clients, in their order.

    Raises:
        FLError: for a file with other content or of another length, and for architectures that were not announced.
    """
    try:
        rows = read_yaml(path.read_text())
    except (OSError, UnicodeDecodeError, ZooError) as error:
        raise FLError(
            f"--architectures.file {path} cannot be read: {' '.join(str(error).split())}", code="file"
        ) from None
    if not isinstance(rows, list) or not all(
        isinstance(row, dict) and row.keys() <= {"width", "depth"} for row in rows
    ):
        raise FLError(
            f"{path} is no list of architectures: write [{{width: 0.5, depth: 2}}, ...], one for each client",
            code="file",
        )
    if len(rows) != clients:
        raise FLError(
            f"{path} has {len(rows)} architectures, and there are {clients} clients: give one each", code="file"
        )
    return make_announced(space, rows, str(path))


def make_announced(space: Space, rows: Sequence[dict], where: str) -> list[Spec]:
    """Make the specs of given widths and depths, which must be candidates.

    Raises:
        FLError: naming the client, and the part of its architecture that the server has not announced.
    """
    specs = []
    for client, row in enumerate(rows):
        width, depth = (tuple(v) if isinstance(v, list) else v for v in (row.get("width", 1.0), row.get("depth")))
        try:
            specs.append(space.base.scale(width, depth))
            space.genes(specs[-1])
        except (FLError, ValueError) as error:
            raise FLError(f"{where}: client {client} is refused: {error}") from None
    return specs

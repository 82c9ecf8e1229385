"""The loop over rounds, which every run is.

`Run` is the loop, `simulate` goes through it. What happens within a round is in `fl.runs.round`, and what is kept of
it in `fl.runs.state`.
"""

import atexit
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TypeAlias
from weakref import WeakSet

import numpy as np
from torch import nn

from fl import data
from fl.base.errors import FLError
from fl.distributed import current, is_joined, is_one_of_several, joined
from fl.federation.transport import IN_PROCESS, Transport
from fl.models.custom_model import Model
from fl.runs.assembly import build, resolve_inputs
from fl.runs.bar import Bar
from fl.runs.export import client_module, module_with
from fl.runs.folder import folded, load_initial_weights
from fl.runs.lock import SETTINGS
from fl.runs.lockstep import check_ranks_agree, sync_server, tell_end
from fl.runs.metrics import Row
from fl.runs.opened import opened
from fl.runs.round import one_round
from fl.runs.state import RunState
from fl.runs.summary import Summary
from fl.settings import Config

OnRound: TypeAlias = Callable[[Row], bool | None]
"""A row of metrics.csv -> whether the run is to stop after it."""


# Figures are imported where they are drawn: matplotlib takes 0.7 s, and a client elsewhere starts for each message.
def _draw_at_start(run: RunState) -> None:
    from fl.figures.coverage import leave_coverage

    leave_coverage(run)


def _draw_at_end(run: RunState) -> None:
    from fl.figures.clients import leave_structure
    from fl.figures.curves import leave_curves

    leave_structure(run)
    leave_curves(run)


AT_START = [_draw_at_start]
AT_END = [_draw_at_end]
"""What writes figures and tables into a run folder, where the run is one for them, before the first round, and when
training has ended or was interrupted. A line here is all that another one takes."""


_OPEN: WeakSet[Generator] = WeakSet()
"""The rounds of runs that a loop, or a variable, holds."""


@atexit.register
def _close_all() -> None:
    """Close what a program still holds when it ends, while there are modules to do that with."""
    for one in [*_OPEN]:
        one.close()


class Round:
    """A round of a `Run` that was just done; it stays as it is when the run goes on.

    Attributes:
        number: from 1.
        row: its row of metrics.csv.
        server: what the server keeps after it, by name; "global" is the state of the global model.
    """

    def __init__(self, run: RunState) -> None:
        self.number, self.row, self.server = run.done, dict(run.rows[-1]), run.server
        self._config, self._fed, self._algorithm = run.config, run.fed, run.algorithm

    def __repr__(self) -> str:
        return f"Round({self.number}, {self.row})"

    @property
    def model(self) -> nn.Module:
        """A copy of the global model, on the run's device, in evaluation mode."""
        return folded(self._config, module_with(self._fed, self.server["global"]))

    def client_model(self, client: int) -> nn.Module:
        """Copy the model that a client predicts with: its personal one, its cluster's, or its part of the global one.

        Raises FLError if it predicts with none, or with the sum of several.
        """
        return folded(self._config, client_module(self._fed, self._algorithm, self.server, client))


class Run:
    """One method with one seed, round by round: `for round in fl.Run(config, folder)` trains a round and yields it.

    It leaves the run folder that `simulate` leaves, which is a loop over this. The loop may be left at any moment, by
    `break`, an exception or Ctrl-C: the checkpoint, the summary and the figures are then written, and the folder is
    free. With `resume=True`, or by a second loop over the same object, it goes on with the next round, and ends exactly
    as it would have without the interruption.

    A run that is not the loop's alone, as in `rounds = iter(run)`, is closed when `rounds` is. In `with fl.Run(...) as
    run:` all loops are over the same rounds, and the run is closed at the end of the block, where errors of writing are
    raised as well: at a `break` Python can only print them.

    Args:
        config, folder, resume, dataset, model, transport: as `simulate` takes them.

    Raises:
        FLError: when the first round is asked for, as `simulate` does; also under torchrun.

    >>> import tempfile
    >>> config = Config.of(algorithm="fedavg", rounds=9, local_epochs=1, width=0.1)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for round in Run(config, folder):
    ...         if round.number == 2:
    ...             break
    ...     [round.number for round in Run(config, folder, resume=True)]
    [3, 4, 5, 6, 7, 8, 9]
    """

    def __init__(
        self,
        config: Config,
        folder: str | Path,
        resume: bool = False,
        dataset: data.Dataset | None = None,
        model: Model | None = None,
        transport: Transport = IN_PROCESS,
    ) -> None:
        self.config, self.folder, self._resume = config, Path(folder), resume
        self.dataset, self.model, self.transport = dataset, model, transport
        self._run: RunState | None = None
        self._kept: Generator[Round] | None = None
        self._is_ours = False  # the folder

    @property
    def resume(self) -> bool:
        """Whether the next loop goes on with the run in the folder: as asked, or because this object has begun it."""
        return self._resume or (self._is_ours and (self.folder / SETTINGS).exists())

    def _take(self) -> None:
        self._is_ours = True

    @property
    def summary(self) -> Summary | None:
        """That of summary.json, once the run was closed."""
        return self._run and self._run.summary

    def __enter__(self) -> "Run":
        self._kept = self._opened()
        return self

    def __exit__(self, *_: object) -> None:
        kept, self._kept = self._kept, None
        kept.close()
        if self._run:
            self._run.ending.look()  # for a SIGTERM that came while the run was left

    def __iter__(self) -> Iterator[Round]:
        return self._kept or self._opened()  # the latter closes when a loop drops it

    def _opened(self) -> Generator[Round]:
        opened = self._rounds()
        _OPEN.add(opened)
        return opened

    def _rounds(self) -> Generator[Round]:
        """Do the rounds that are left; the run is closed when this is, wherever it is then."""
        if is_one_of_several() and not is_joined():
            raise FLError("fl.Run is for one process: under torchrun use fl.simulate, with on_round to see each round")
        inputs = (self.config, self.folder, self.resume, self.dataset, self.model, self.transport)
        with opened(*inputs, AT_START, AT_END, self._take) as run, Bar(run) as bar:
            self._run = run
            for number in run.numbers_left():
                with bar.during_round():
                    sync_server(run)  # with other ranks
                    server, row, scores = one_round(run, number)
                    run.record(number, server, row, scores)
                bar.advance(row)
                yield Round(run)
                run.ending.look()


def simulate(
    config: Config,
    folder: str | Path,
    resume: bool = False,
    dataset: data.Dataset | None = None,
    model: Model | None = None,
    on_round: OnRound | None = None,
    transport: Transport = IN_PROCESS,
) -> Summary:
    """Run all rounds of one method with one seed and leave a run folder; return its summary.

    The folder holds config.yaml, metrics.csv (a row a round), curves.png, checkpoint.safetensors and summary.json.
    Where clients hold samples out it also holds clients.csv, a row a client and evaluated round with its scores;
    methods with models on levels leave structure.json and structure.png, those with clients of different architectures
    architectures.csv and (where these keep their places) coverage.png.

    A run that was interrupted at any moment is continued with `resume`, and ends as it would have without the
    interruption: bit for bit on a CPU with the same backend and as many threads, on a GPU as far as its kernels are
    deterministic.

    Under torchrun every process calls this with the same arguments: the first writes the folder, and all return the
    summary.

    Args:
        config: with one algorithm and one seed.
        folder: must be new or empty, unless the run in it is resumed.
        dataset: data of your own, such as `fl.Dataset.from_arrays(...)`, in the place of those of the settings;
            or these, as `config.load()` returns them, so that several runs load them once.
        model: a model of your own, in the place of that of the settings: an `nn.Module`, whose weights are the initial
            ones, or a function that makes one, or several of them, see `fl.build`. The checkpoint keeps which data and
            which model its run needs; give the same to resume it.
        on_round: called after each round with its row of metrics.csv, a dict of plain numbers. If it returns True, the
            run stops there; `resume` goes on with the next round.
        transport: how rounds reach clients, see `fl.federation.transport`; by default they are simulated.

    Raises:
        FLError: if the folder has something in it (or, resuming, holds no run of these data, model and method), another
            process works in it, it cannot be written to, or training diverges.
        KeyboardInterrupt: on Ctrl-C and on SIGTERM, after what is done was saved. A handler of SIGTERM of your own
            runs before.
    """
    if on_round is not None and not callable(on_round):
        raise FLError(f"on_round={on_round!r}: give a function of a row of metrics")
    with joined() as ranks:
        if not transport.has_data and ranks.size > 1:
            raise FLError("clients on other machines train there: start one process, without torchrun")
        if ranks.rank:
            return _follow(config, Path(folder), resume, dataset, model)
        with Run(config, folder, resume, dataset, model, transport) as run:
            for round in run:
                said = on_round(round.row) if on_round else False
                if isinstance(said, bool | np.bool_) and said:  # and not for whatever else it may return
                    break
        tell_end(run.summary)
        return run.summary


def _follow(config: Config, folder: Path, resume: bool, dataset: data.Dataset | None, model: Model | None) -> Summary:
    """Do the rounds of a rank other than 0, which writes no run folder, until rank 0 ends the run."""
    config = resolve_inputs(config, dataset, model)
    fed, algorithm = build(config, dataset, model, load_initial_weights(folder, config) if resume else None)
    run = RunState(config, fed, algorithm, folder, algorithm.init(), 0)
    check_ranks_agree(run)
    with current().together():
        while (summary := sync_server(run)) is None:
            run.done += 1
            run.server, *_ = one_round(run, run.done)
    return summary

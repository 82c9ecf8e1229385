"""The loop over the rounds of a run.

`Run` is the loop, and `simulate` runs it to its end. `fl.runs.round` does one round, `fl.runs.state` keeps its results.
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
from fl.distributed import current, is_joined, is_one_of_several, join_ranks
from fl.federation.transport import IN_PROCESS, Transport
from fl.models.custom_model import Model
from fl.runs.assembly import build, resolve_inputs
from fl.runs.bar import ProgressBar
from fl.runs.export import client_module, module_with
from fl.runs.folder import fold_model, load_initial_weights
from fl.runs.lock import SETTINGS
from fl.runs.lockstep import check_ranks_agree, sync_server, tell_end
from fl.runs.metrics import Row
from fl.runs.opened import open_run
from fl.runs.round import one_round
from fl.runs.state import RunState
from fl.runs.summary import Summary
from fl.settings import Config

OnRound: TypeAlias = Callable[[Row], bool | None]
"""Takes a row of metrics.csv, and returns True to stop the run after it."""


# Imported on use: matplotlib takes 0.7 s to import, and a client on another machine starts for each message.
def _draw_at_start(run: RunState) -> None:
    from fl.analysis.background import leave_partition
    from fl.figures.coverage import leave_coverage

    leave_partition(run)
    leave_coverage(run)


def _draw_at_end(run: RunState) -> None:
    from fl.figures.clients import leave_structure
    from fl.figures.curves import leave_curves

    leave_structure(run)
    leave_curves(run)


AT_START = [_draw_at_start]
"""Functions that write figures and tables into the run folder before the first round."""
AT_END = [_draw_at_end]
"""Functions that write figures and tables when training has ended or was interrupted.

A function in either list does nothing if its figure does not fit the run. To add a figure, add its function to a list.
"""


_OPEN: WeakSet[Generator] = WeakSet()
"""The generators of rounds that are still open: a loop or a variable of the program holds them."""


@atexit.register
def _close_all() -> None:
    """Close open runs when the program ends, before Python unloads the modules."""
    for rounds in [*_OPEN]:
        rounds.close()


class Round:
    """A finished round of a `Run`. Later rounds do not change it.

    Attributes:
        number: the round's number; the first round has number 1.
        row: the round's row of metrics.csv.
        server: what the server stores after the round, by name; "global" is the state of the global model.
    """

    def __init__(self, run: RunState) -> None:
        self.number, self.row, self.server = run.done, dict(run.rows[-1]), run.server
        self._config, self._fed, self._algorithm = run.config, run.fed, run.algorithm

    def __repr__(self) -> str:
        return f"Round({self.number}, {self.row})"

    @property
    def model(self) -> nn.Module:
        """A copy of the global model, on the run's device, in evaluation mode."""
        return fold_model(self._config, module_with(self._fed, self.server["global"]))

    def client_model(self, client: int) -> nn.Module:
        """Return a copy of the model that a client predicts with.

        This is its personal model, the model of its cluster, or its part of the global model.

        Raises:
            FLError: if the client predicts with no model, or with the sum of several models.
        """
        return fold_model(self._config, client_module(self._fed, self._algorithm, self.server, client))


class Run:
    """One method with one seed, round by round.

    `for round in fl.Run(config, folder)` trains a round and yields it. It writes the same run folder as `simulate`,
    which is a loop over a `Run`. The loop may end at any moment, by `break`, an exception or Ctrl-C. Then the
    checkpoint, the summary and the figures are written, and the folder is unlocked. With `resume=True`, or in a second
    loop over the same object, the run continues with the next round. The result is exactly the same as without the
    interruption.

    If the program itself calls `rounds = iter(run)`, closing `rounds` closes the run. In a block `with fl.Run(...) as
    run:` each loop continues the rounds of the loop before, and the end of the block closes the run. If writing fails,
    the end of the block raises the error. After a `break` without `with`, Python can only print the error.

    Args:
        config, folder, resume, dataset, model, transport: as `simulate` takes them.

    Raises:
        FLError: for the reasons of `simulate`, but only when the first round begins; also under torchrun.

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
        self._shared_rounds: Generator[Round] | None = None  # the rounds of all loops in a `with` block
        self._has_begun = False  # True once this object has begun a run in the folder

    @property
    def resume(self) -> bool:
        """True if the next loop resumes the run in the folder.

        The caller asked for it, or an earlier loop over this object began the run.
        """
        return self._resume or (self._has_begun and (self.folder / SETTINGS).exists())

    def _mark_begun(self) -> None:
        self._has_begun = True

    @property
    def summary(self) -> Summary | None:
        """The content of summary.json; None until the run is closed."""
        return self._run and self._run.summary

    def __enter__(self) -> "Run":
        self._shared_rounds = self._open_rounds()
        return self

    def __exit__(self, *_: object) -> None:
        rounds, self._shared_rounds = self._shared_rounds, None
        rounds.close()
        if self._run:
            self._run.ending.look()  # a SIGTERM may have come while the run was closed

    def __iter__(self) -> Iterator[Round]:
        # When a loop over new rounds ends, nothing holds their generator any more, so Python closes it.
        return self._shared_rounds or self._open_rounds()

    def _open_rounds(self) -> Generator[Round]:
        rounds = self._do_rounds()
        _OPEN.add(rounds)
        return rounds

    def _do_rounds(self) -> Generator[Round]:
        """Do and yield the remaining rounds; closing this generator closes the run."""
        if is_one_of_several() and not is_joined():
            raise FLError(
                "fl.Run is for one process: under torchrun use fl.simulate, with its argument on_round to see rounds",
                code="unsupported",
            )
        inputs = (self.config, self.folder, self.resume, self.dataset, self.model, self.transport)
        with open_run(*inputs, AT_START, AT_END, self._mark_begun) as run, ProgressBar(run) as bar:
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
    """Run all rounds of one method with one seed in a run folder; return its summary.

    The folder holds config.yaml, metrics.csv (one row per round), curves.png, checkpoint.safetensors and summary.json.
    If clients hold out samples, it also holds clients.csv: the scores, one row per client and evaluated round.
    Methods with models on levels add structure.json and structure.png. Clients of different architectures add
    architectures.csv and, if each always has the same part of the global model, coverage.png.

    `resume` continues a run that was interrupted at any moment. On a CPU, with the same backend and number of
    threads, the result is bit for bit the result without the interruption. On a GPU it is the same as far as the GPU's
    kernels are deterministic.

    Under torchrun every process calls this function with the same arguments. The first process writes the folder, and
    all return the summary.

    Args:
        config: with one algorithm and one seed.
        folder: must be new or empty, unless the run in it is resumed.
        dataset: your data, such as `fl.Dataset.from_arrays(...)`, instead of the data set in the settings. If several
            runs use the data set in the settings, `config.load()` loads it once: give its result here.
        model: your model, instead of the model in the settings: an `nn.Module` with the initial weights, a function
            that makes a module, or several of them, see `fl.build`. The checkpoint stores which data and which model
            its run needs. To resume the run, give the same data and model.
        on_round: called after each round with its row of metrics.csv, a dict of plain numbers. If it returns True, the
            run stops there; `resume` continues with the next round.
        transport: how rounds reach clients, see `fl.federation.transport`. By default clients are simulated.

    Raises:
        FLError: if the folder is not empty, if another process uses the folder, if it cannot be written to, or if
            training diverges. With `resume`, if the folder has no run with these data, this model and this method.
        KeyboardInterrupt: on Ctrl-C and on SIGTERM, after the finished rounds were saved. Your own handler of SIGTERM
            runs first.
    """
    if on_round is not None and not callable(on_round):
        raise FLError(f"on_round={on_round!r}: give a function of a row of metrics")
    with join_ranks() as ranks:
        if not transport.has_data and ranks.size > 1:
            raise FLError(
                "clients train on other machines: start one process here, without torchrun", code="unsupported"
            )
        if ranks.rank:
            return _follow(config, Path(folder), resume, dataset, model)
        with Run(config, folder, resume, dataset, model, transport) as run:
            for round in run:
                stop = on_round(round.row) if on_round else False
                if isinstance(stop, bool | np.bool_) and stop:  # any other value does not stop the run
                    break
        tell_end(run.summary)
        return run.summary


def _follow(config: Config, folder: Path, resume: bool, dataset: data.Dataset | None, model: Model | None) -> Summary:
    """Do the rounds of a rank other than 0 until rank 0 ends the run.

    Only rank 0 writes the run folder.
    """
    config = resolve_inputs(config, dataset, model)
    fed, algorithm = build(config, dataset, model, load_initial_weights(folder, config) if resume else None)
    run = RunState(config, fed, algorithm, folder, algorithm.init(), 0)
    check_ranks_agree(run)
    with current().together():
        while (summary := sync_server(run)) is None:
            run.done += 1
            run.server, *_ = one_round(run, run.done)
    return summary

"""The progress bar of a run."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from fl.engine import progress
from fl.runs.columns import columns, first_score
from fl.runs.metrics import Row
from fl.runs.state import RunState

_LONG = 10  # seconds of a round after which the bar also counts clients
_OFTEN = 0.5  # seconds between two such counts


class ProgressBar:
    """A progress bar over the rounds of a run, and over clients of a long round."""

    def __init__(self, run: RunState) -> None:
        config, self._terminal = run.config, sys.stderr.isatty()
        self._bar = tqdm(
            total=config.rounds,
            initial=run.done,
            desc=f"{config.method.name} seed {config.seed}",
            unit="round",
            mininterval=0.1 if self._terminal else 30,
            dynamic_ncols=True,
        )
        self._began, self._last, self._reached = 0.0, 0.0, ""

    def __enter__(self) -> "ProgressBar":
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    @contextmanager
    def during_round(self) -> Iterator[None]:
        """Count clients, and write logged lines above the bar.

        Others may write between two rounds.
        """
        self._began = time.monotonic()
        with logging_redirect_tqdm(), progress.listen(self._count) if self._terminal else nullcontext():
            yield

    def _count(self, done: float, clients: int) -> None:
        now = time.monotonic()
        if now - self._began >= _LONG and now - self._last >= _OFTEN:
            self._last = now
            shown = (self._reached, f"client {min(int(done), clients)}/{clients}")
            self._bar.set_postfix_str(", ".join(filter(None, shown)))

    def advance(self, row: Row) -> None:
        """Move on by a round."""
        if (score := first_score(row)) in row:
            self._reached = f"{score} {columns([score])[score].text(row[score])}"
        self._bar.set_postfix_str(self._reached, refresh=False)
        self._bar.update()

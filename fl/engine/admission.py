"""Choose the backend that `auto` takes on a device other than a CPU, by trials.

The choice is the fastest backend that was tried on the device and agrees with the loop. A backend that was never
compared on a device may be wrong or slow there, hang, or kill its process. So each candidate trains the first steps of
the round's clients in its own process, and is compared with the loop there. The result holds for this
device, these versions, this model and these shapes. A file stores the result for other runs:

    $XDG_CACHE_HOME/layer-surgery/backends.json     (in ~/.cache, if that is not set)

The choice is made before the first round, so that one backend trains the whole run, and repeated runs have the same
backend. If trials would take more than `SHARE` of the run, nothing is tried, and the loop trains the run.
"""

import json
import logging
import operator
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fl.base.errors import FLError, reason
from fl.base.files import write_json
from fl.distributed import current
from fl.engine.conditions import describe, name_device
from fl.engine.eager import loop
from fl.engine.job import Group
from fl.engine.progress import listen
from fl.engine.trial import Backend, Pickle, clock, first_steps, shorten

_log = logging.getLogger("fl")


SHARE = 0.02
"""The largest share of the run's time that trials may take; the run's time is estimated with the loop."""
LEAST = 15.0
"""No trial begins if it has fewer seconds: a process takes 4 to 8 to import torch and fl and to set up a device."""
LIMIT = 60.0
"""The most seconds for a candidate. A candidate that takes longer counts as hanging, and is not tried again."""
FASTER = 1.1
"""The least speed of a candidate that is chosen, relative to the loop."""
TOLERANCE = 1e-2
"""The largest distance between a client's weights and the loop's in float32, as a share of the way from the start.

On a CPU `loop` and `vmap` were at most 4e-4 apart after 8 steps of LeNet and ResNet-20. If one of 8 steps is missing or
wrong, the distance is about 1e-1.
"""
ROUNDING = 2.0
"""How far a candidate in TF32 or bfloat16 may be from the loop in float32.

The limit is this number times the distance of the loop in the same precision, plus `TOLERANCE`. Rounding alone moved
LeNet by 5e-2 to 3e-1 in bfloat16 on a CPU. So a candidate must agree in float32 as well, where mistakes are visible.
"""

_BUSY_ERRORS = "out of memory", "busy or unavailable"  # of a device that other processes use, perhaps only now
_spent = 0.0  # seconds that the trials of this process took
_known: dict[str, Any] = {}  # outcomes of this process, in case the file cannot be written


class TrialOutcome(NamedTuple):
    """The result of the trials.

    Attributes:
        backend: the backend that is chosen.
        gain: its speed relative to the loop.
        left_out: the reason why each other candidate is not chosen.
        late: above 0: the seconds that the trials had, when a candidate was not done in time, or other processes used
            the device. With twice as many seconds all candidates are tried again. 0: the outcome is final. Below 0:
            nothing was tried.
    """

    backend: str = "loop"
    gain: float = 1.0
    left_out: Mapping[str, str] = {}
    late: float = 0.0

    def __str__(self) -> str:
        choice = f"{self.backend} trains {self.gain:.1f} times as fast as loop" if self.backend != "loop" else "loop"
        return "; ".join((choice, *(f"{name} is left out: {why}" for name, why in self.left_out.items())))


def uses_trials(device: torch.device) -> bool:
    """Return whether `auto` tries backends on a device; elsewhere a rule chooses."""
    return device.type != "cpu"


def choose(groups: Sequence[Group], candidates: Mapping[str, Backend], chosen: dict[str, str], rounds: int) -> str:
    """Return the backend for groups of clients: an earlier choice, or a new one.

    Args:
        candidates: the backends, besides the loop, that may be able to train the groups.
        chosen: the run's earlier choices, by device and description of groups; a new choice is added.
        rounds: the number of rounds of the run.
    """
    device_name = name_device(groups[0][0].device)
    key = f"{device_name}: {describe(groups, candidates)}"
    if chosen.get(key) not in ("loop", *candidates):
        stored = outcome = _read(key, candidates)
        if stored is None or stored.late:
            outcome = _decide(groups, candidates, rounds, stored)
            if outcome is not stored and outcome.late >= 0:
                _write(key, outcome)
        _log.warning("--backend auto on %s: %s", device_name, outcome)
        chosen[key] = outcome.backend
    return chosen[key]


# The file


def _file() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "layer-surgery" / "backends.json"


def _stored_outcomes() -> dict[str, Any]:
    """Return the outcomes in the file, and the outcomes of this process."""
    with suppress(OSError, ValueError, RuntimeError):
        if isinstance(stored := json.loads(_file().read_text()), dict):
            return stored | _known
    return _known


def _read(key: str, candidates: Mapping[str, Backend]) -> TrialOutcome | None:
    """Return the stored outcome; None if there is none, or if it cannot be understood."""
    with suppress(TypeError, ValueError, AttributeError):
        outcome = TrialOutcome(**_stored_outcomes()[key]) if key in _stored_outcomes() else None
        if outcome and outcome.backend in ("loop", *candidates):
            return outcome._replace(gain=float(outcome.gain), left_out={**outcome.left_out}, late=float(outcome.late))
    return None


def _write(key: str, outcome: TrialOutcome) -> None:
    _known[key] = outcome._asdict()
    with suppress(OSError, FLError, RuntimeError):  # a run does not need the file
        _file().parent.mkdir(parents=True, exist_ok=True)
        write_json(_file(), _stored_outcomes())


# The trial


def _decide(
    groups: Sequence[Group], candidates: Mapping[str, Backend], rounds: int, earlier: TrialOutcome | None
) -> TrialOutcome:
    """Try the candidates, if the run is long enough.

    If an earlier trial was too short, the candidates are tried again only with at least twice its seconds.
    """
    global _spent
    names = " and ".join(candidates)
    if current().size > 1:
        return TrialOutcome(left_out={names: "no backend is tried in runs over several ranks"}, late=-1.0)
    start = time.monotonic()
    affordable_rounds = SHARE * rounds
    allowed = affordable_rounds * _estimate_round_seconds(groups, (LEAST + _spent) / affordable_rounds) - _spent
    if earlier and allowed < 2 * earlier.late:
        return earlier
    if allowed < LEAST:
        why = f"the run is too short to try it ({rounds} rounds; {SHARE:.0%} of them take {max(allowed, 0):.0f} s)"
        return TrialOutcome(left_out={names: why}, late=-1.0)
    try:
        with tempfile.TemporaryDirectory(prefix="fl-backends-", ignore_cleanup_errors=True) as folder:
            trial = Path(folder) / "trial"
            try:
                torch.save((first_steps(groups), dict(candidates)), trial, pickle_module=Pickle)
            except Exception as error:  # any part of a model or of an objective may raise one
                why = f"the model or the objective cannot be sent to another process: {reason(error)}"
                return TrialOutcome(left_out={names: why}, late=-1.0)
            job = groups[0][0]
            return _compare(trial, candidates, job.device, job.precision.deterministic, start + allowed)
    except OSError as error:
        return TrialOutcome(left_out={names: f"no process could be started: {reason(error)}"}, late=-1.0)
    finally:
        _spent += time.monotonic() - start


def _compare(
    trial: Path, candidates: Mapping[str, Backend], device: torch.device, deterministic: bool, end: float
) -> TrialOutcome:
    """Let candidates train in turn, each in its own process, until the time `end`.

    `end` is a value of `time.monotonic()`. All processes start at once; then each waits for its turn.
    """
    allowed = end - time.monotonic()
    gains, left_out, late = {"loop": 1.0}, {}, 0.0
    if device.type == "cuda":
        torch.cuda.empty_cache()  # for the processes of the candidates
    children = {name: _start(trial, name, device) for name in candidates}
    try:
        for remaining, (name, child) in zip(range(len(children), 0, -1), children.items()):
            limit = min(LIMIT, max(1.0, (end - time.monotonic()) / remaining))
            try:
                child.communicate(f"{limit}\n".encode(), limit)
                gains[name], why = _judge(trial.with_name(name), child.returncode, deterministic)
                late = allowed if any(words in why for words in _BUSY_ERRORS) else late
            except subprocess.TimeoutExpired:
                _kill(child)
                why = f"it was not done within {limit:.0f} s"
                late = late if limit == LIMIT else allowed
            if why:
                gains.pop(name, None)
                left_out[name] = why
    finally:
        for child in children.values():
            _kill(child)
    best = max(gains, key=gains.__getitem__)
    slower = {name: f"it trains {gains[name]:.1f} times as fast" for name in gains if name not in ("loop", best)}
    return TrialOutcome(best, gains[best], left_out | slower, late)


def _start(trial: Path, name: str, device: torch.device) -> subprocess.Popen:
    program = f"from fl.engine.trial import attend; attend({str(trial)!r}, {name!r}, {str(device)!r})"
    paths = {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    with trial.with_name(f"{name}.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable or "", "-c", program],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            env=os.environ | paths,
            start_new_session=True,
        )


def _kill(child: subprocess.Popen) -> None:
    """End a process, and all processes that it has started."""
    if child.poll() is None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL) if hasattr(os, "killpg") else child.kill()
        with suppress(subprocess.TimeoutExpired):  # a process that waits in a driver may not end
            child.wait(5)
    if child.stdin and not child.stdin.closed:
        with suppress(OSError):
            child.stdin.close()


def _judge(file: Path, code: int, deterministic: bool) -> tuple[float, str]:
    """Return (speed relative to the loop, reason to drop it or "") of a candidate."""
    if code < 0:
        return 0.0, f"its process was ended by a signal ({signal.strsignal(-code) or -code})"
    try:
        result = json.loads(file.with_name(f"{file.name}.json").read_text())
    except (OSError, ValueError):
        return 0.0, f"its process ended with exit code {code}, without a result"
    if "error" in result:
        return 0.0, result["error"]
    slow, fast = result["seconds"]
    if not result["distance"] <= TOLERANCE:
        return 0.0, f"it differs from the loop by {result['distance']:.1g} of what clients learn"
    if not result["rounding"] <= ROUNDING * result["own_rounding"] + TOLERANCE:
        share, loop_share = result["rounding"], result["own_rounding"]
        return 0.0, f"rounding moves it by {share:.1g} of what clients learn, but the loop by {loop_share:.1g}"
    if deterministic and result["repeats"] < result["loop_repeats"]:
        return 0.0, "it does not repeat itself (it may with --no-deterministic)"
    if slow < FASTER * fast:
        return 0.0, f"it trains {slow / fast:.1f} times as fast"
    return slow / fast, ""


def _estimate_round_seconds(groups: Sequence[Group], least: float) -> float:
    """Estimate the loop's seconds from a few steps of one client of each group.

    The first measurement takes longer, since libraries set themselves up. If even this is below `least`, it is
    returned.
    """
    short = [shorten(group, 1, group[0].batches.steps[0]) for group in groups]
    times = [sum(job.batches.steps) / few[0].batches.steps[0] for few, (job, _, _) in zip(short, groups)]

    def estimate() -> float:
        seconds = [clock(partial(loop, [group]), group[0].device)[1] for group in short]
        return sum(map(operator.mul, seconds, times))

    with listen(None):
        return first if (first := estimate()) < least else min(estimate(), estimate())

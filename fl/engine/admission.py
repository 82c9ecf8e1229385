"""Choose the backend that `auto` takes on a device other than a CPU, by trials.

The choice is the fastest backend that was tried on the device and agrees with the loop. A backend that was never
compared on a device may be wrong or slow there, hang, or kill its process. So each candidate trains the first steps of
the clients that are about to train, in its own process, and is compared with the loop there. The result holds for this
device, these versions, this model and these shapes. A file stores the result for other runs:

    $XDG_CACHE_HOME/layer-surgery/backends.json     (in ~/.cache, if that is not set)

The choice is made before the first round, so that one backend trains the whole run, and repeated runs have the same
backend. If trials would take more than `SHARE` of the run, nothing is tried, and the loop trains the run.
"""

import hashlib
import importlib
import json
import logging
import marshal
import operator
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import CellType, FunctionType
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from fl.base.errors import FLError, reason
from fl.base.files import write_json
from fl.base.torch_private import tree_map
from fl.data.inputs import map_inputs
from fl.distributed import current
from fl.engine.eager import loop
from fl.engine.job import Group, Results
from fl.engine.precision import arithmetic
from fl.engine.progress import shown
from surgery import Stack

_log = logging.getLogger("fl")

Backend: TypeAlias = Callable[[Sequence[Group]], list[Results]]

SHARE = 0.02
"""The largest share of the run's time that trials may take; the run's time is estimated with the loop."""
LEAST = 15.0
"""No trial begins if it has fewer seconds: a process takes 4 to 8 to import torch and fl and to set up a device."""
LIMIT = 60.0
"""The most seconds of a candidate. A candidate that takes longer hangs, and is not tried again."""
FASTER = 1.1
"""The least speed of a candidate, relative to the loop."""
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
_STEPS = 8  # steps in a trial of the client with the most steps; other clients make fewer, in proportion
_spent = 0.0  # seconds that the trials of this process took
_known: dict[str, Any] = {}  # outcomes of this process, in case the file cannot be written


class Outcome(NamedTuple):
    """The result of the trials.

    Attributes:
        backend: the backend that is chosen.
        gain: its speed relative to the loop.
        left_out: the reason why each other candidate is not chosen.
        late: the seconds that the trials had, if a candidate was not done in time, or if other processes used the
            device. With twice as many seconds all candidates are tried again. 0: there is no need to try again. Below
            0: nothing was tried.
    """

    backend: str = "loop"
    gain: float = 1.0
    left_out: Mapping[str, str] = {}
    late: float = 0.0

    def __str__(self) -> str:
        choice = f"{self.backend} trains {self.gain:.1f} times as fast as loop" if self.backend != "loop" else "loop"
        return "; ".join((choice, *(f"{name} is left out: {why}" for name, why in self.left_out.items())))


def is_asked(device: torch.device) -> bool:
    """Return whether `auto` tries backends on a device; on other devices a rule chooses."""
    return device.type != "cpu"


def choose(groups: Sequence[Group], candidates: Mapping[str, Backend], chosen: dict[str, str], rounds: int) -> str:
    """Return the backend for these groups and for similar ones: an earlier choice, or a new choice.

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


def name_device(device: torch.device) -> str:
    """Return the name of a device, with the versions of the libraries that compute on it."""
    name, versions = device.type, [f"torch {torch.__version__}"]
    with suppress(RuntimeError, AssertionError):
        if device.type == "cuda":
            name = torch.cuda.get_device_name(device)
            platform = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
            versions += [platform, f"cuDNN {torch.backends.cudnn.version()}"]
    return f"{name} ({', '.join(versions)})"


def describe(groups: Sequence[Group], candidates: Mapping[str, Backend]) -> str:
    """Return the models' classes, and a digest of all that a trial depends on, except the device.

    The digest rounds the number of clients up to a power of two, and the ratio of the mean to the largest number of
    steps down to a quarter.
    """
    steps = [n for job, _, _ in groups for n in job.batches.steps]
    clients, equality = 1 << (len(steps) - 1).bit_length(), 4 * sum(steps) // (len(steps) * max(steps))
    computations = sorted({_describe_step(group) for group in groups})
    content = json.dumps(
        [_own_code(), _environment(), sorted(candidates), clients, equality, len(computations), computations]
    )
    names = " and ".join(sorted({type(job.model).__name__ for job, _, _ in groups}))
    return f"{names} {hashlib.sha256(content.encode()).hexdigest()[:16]}"


def _describe_step(group: Group) -> str:
    """Describe what a step of these clients computes, without the values of weights and the learning rate."""
    job, starts, context = group
    per_sample = {} if job.per_sample is None else {"": job.per_sample}
    shapes = _shapes([context, per_sample])
    inputs = map_inputs(lambda t: str((tuple(t.shape[1:]), t.dtype)), job.data.x)
    step = job.batches.size, job.batches.augment, job.optimizer._replace(lr=0.0), job.precision, job.trainable()
    functions = (
        type(job.optimizer).__name__,
        _describe_function(job.objective, set()),
        _describe_function(job.ascent, set()),
    )
    return str((_describe_model(job.model, starts), shapes, inputs, step, functions))


_MODEL_DIGESTS: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()


def _describe_model(model: nn.Module, starts: Stack) -> str:
    """Return a digest of a model's layers, of its modules' code and of its shapes, computed once for each model."""
    if model not in _MODEL_DIGESTS:
        code = [type(module).forward.__code__.co_code for module in model.modules() if _has_code(type(module))]
        text = re.sub(r" at 0x[0-9a-f]+", "", str((model, code, _shapes(starts))))
        _MODEL_DIGESTS[model] = hashlib.sha256(text.encode()).hexdigest()
    return _MODEL_DIGESTS[model]


def _shapes(stacks: Any) -> Any:
    return tree_map(lambda t: (tuple(t.shape[1:]), t.dtype), stacks)


def _has_code(kind: type) -> bool:
    return isinstance(getattr(kind, "forward", None), FunctionType)


def _describe_function(value: Any, seen: set[int]) -> Any:
    """Return the name and the code of a function and of the functions in its closure; of another value its type."""
    if not isinstance(value, FunctionType) or id(value) in seen:
        return type(value).__qualname__
    seen.add(id(value))
    inner = [_describe_function(function, seen) for function in _closure(value) if isinstance(function, FunctionType)]
    return value.__module__, value.__qualname__, value.__code__.co_code, inner


def _closure(function: FunctionType) -> list[Any]:
    return [cell.cell_contents for cell in function.__closure__ or ()]


@cache
def _own_code() -> str:
    """Return a digest of the engine's files, since the package's version stays the same while code changes."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


_SWITCHES = ("CUDA_", "CUBLAS", "CUDNN_", "PYTORCH_", "NVIDIA_TF32")


def _environment() -> list[str]:
    """Return the driver's version, and the variables by which CUDA and torch choose kernels and memory."""
    settings = [
        f"{name}={value}"
        for name, value in sorted(os.environ.items())
        if name.startswith(_SWITCHES) and name != "CUDA_VISIBLE_DEVICES"
    ]
    with suppress(OSError):
        settings.append(Path("/proc/driver/nvidia/version").read_text())
    return settings


# The file


def _file() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "layer-surgery" / "backends.json"


def _stored_outcomes() -> dict[str, Any]:
    """Return the outcomes in the file, and the outcomes of this process."""
    with suppress(OSError, ValueError, RuntimeError):
        if isinstance(stored := json.loads(_file().read_text()), dict):
            return stored | _known
    return _known


def _read(key: str, candidates: Mapping[str, Backend]) -> Outcome | None:
    """Return the stored outcome; None if there is none, or if it cannot be understood."""
    with suppress(TypeError, ValueError, AttributeError):
        outcome = Outcome(**_stored_outcomes()[key]) if key in _stored_outcomes() else None
        if outcome and outcome.backend in ("loop", *candidates):
            return outcome._replace(gain=float(outcome.gain), left_out={**outcome.left_out}, late=float(outcome.late))
    return None


def _write(key: str, outcome: Outcome) -> None:
    _known[key] = outcome._asdict()
    with suppress(OSError, FLError, RuntimeError):  # a run does not need the file
        _file().parent.mkdir(parents=True, exist_ok=True)
        write_json(_file(), _stored_outcomes())


# The trial


def _decide(
    groups: Sequence[Group], candidates: Mapping[str, Backend], rounds: int, earlier: Outcome | None
) -> Outcome:
    """Try the candidates, if the run is long enough.

    If an earlier trial was too short, the candidates are tried again only with at least twice its seconds.
    """
    global _spent
    names = " and ".join(candidates)
    if current().size > 1:
        return Outcome(left_out={names: "no backend is tried in runs over several ranks"}, late=-1.0)
    start = time.monotonic()
    affordable_rounds = SHARE * rounds
    allowed = affordable_rounds * _seconds_of_round(groups, (LEAST + _spent) / affordable_rounds) - _spent
    if earlier and allowed < 2 * earlier.late:
        return earlier
    if allowed < LEAST:
        why = f"the run is too short to try it ({rounds} rounds; {SHARE:.0%} of them take {max(allowed, 0):.0f} s)"
        return Outcome(left_out={names: why}, late=-1.0)
    try:
        with tempfile.TemporaryDirectory(prefix="fl-backends-", ignore_cleanup_errors=True) as folder:
            trial = Path(folder) / "trial"
            try:
                torch.save((_first_steps(groups), dict(candidates)), trial, pickle_module=_Pickle)
            except Exception as error:  # any part of a model or of an objective may raise one
                why = f"the model or the objective cannot be sent to another process: {reason(error)}"
                return Outcome(left_out={names: why}, late=-1.0)
            job = groups[0][0]
            return _compare(trial, candidates, job.device, job.precision.deterministic, start + allowed)
    except OSError as error:
        return Outcome(left_out={names: f"no process could be started: {reason(error)}"}, late=-1.0)
    finally:
        _spent += time.monotonic() - start


def _compare(
    trial: Path, candidates: Mapping[str, Backend], device: torch.device, deterministic: bool, end: float
) -> Outcome:
    """Let the candidates train in turn, each in its own process, until `time.monotonic()` is `end`.

    All processes start at once. Then each waits for its turn.
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
    return Outcome(best, gains[best], left_out | slower, late)


def _start(trial: Path, name: str, device: torch.device) -> subprocess.Popen:
    program = f"from fl.engine.admission import attend; attend({str(trial)!r}, {name!r}, {str(device)!r})"
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
    """Return (speed relative to the loop, reason to leave it out or "") of a candidate after its process has ended."""
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


def _first_steps(groups: Sequence[Group]) -> list[Group]:
    """Return the same clients with few steps, only the samples of these steps, and the first client's start."""
    longest = max(max(job.batches.steps) for job, _, _ in groups)
    return [_shorten(group, len(group[0].batches.steps), longest) for group in groups]


def _shorten(group: Group, clients: int, longest: int) -> Group:
    job, starts, context = group
    batches, size = job.batches, job.batches.size
    steps = tuple(max(1, min(n, n * _STEPS // longest)) for n in batches.steps[:clients])
    rows = batches.rows[:clients, : max(steps)]
    samples, places = torch.unique(rows[..., :size], return_inverse=True)
    data = job.data.taken(samples)
    test = map_inputs(lambda t: t[:1].to(data.device), data.test_x), data.test_y[:1].to(data.device)
    data = replace(data, test_x=test[0], test_y=test[1], owners=None, test_owners=None, owner_names=())
    real = batches.real and tuple(counts[:n] for counts, n in zip(batches.real, steps))
    batches = batches._replace(rows=torch.cat([places, rows[..., size:]], -1), steps=steps, real=real)
    per_sample = None if job.per_sample is None else job.per_sample[samples]
    job = replace(job, data=data, batches=batches, per_sample=per_sample)
    # All clients have the first client's start, so that the file holds one model instead of K.
    return job, *tree_map(lambda t: t[:1].clone().expand(clients, *t.shape[1:]), (starts, context))


def _seconds_of_round(groups: Sequence[Group], least: float) -> float:
    """Estimate the seconds of the loop for these clients, from a few steps of one client of each group.

    The first measurement takes longer, since libraries set themselves up. If even this is below `least`, it is
    returned.
    """
    short = [_shorten(group, 1, group[0].batches.steps[0]) for group in groups]
    times = [sum(job.batches.steps) / few[0].batches.steps[0] for few, (job, _, _) in zip(short, groups)]

    def estimate() -> float:
        seconds = [_clock(partial(loop, [group]), group[0].device)[1] for group in short]
        return sum(map(operator.mul, seconds, times))

    with shown(None):
        return first if (first := estimate()) < least else min(estimate(), estimate())


class _Pickler(pickle.Pickler):
    """Pickles functions inside functions, too (most objectives are), for a process with the same Python version."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, (type, FunctionType)) and value.__module__ == "__main__":
            raise pickle.PicklingError(f"{value.__qualname__} is defined in the program itself, not in a module")
        if not isinstance(value, FunctionType) or "<locals>" not in value.__qualname__:
            return NotImplemented
        names = value.__name__, value.__qualname__, value.__module__
        return _make_function, (
            marshal.dumps(value.__code__),
            names,
            value.__defaults__,
            value.__kwdefaults__,
            _closure(value),
        )


class _Pickle:
    """Stands for the module `pickle` in `torch.save`."""

    Pickler = _Pickler


def _make_function(
    code: bytes, names: tuple[str, str, str], defaults: Any, keywords: Any, closure: list[Any]
) -> FunctionType:
    """Make a function from what `_Pickler` has written."""
    name, qualified, module = names
    namespace = importlib.import_module(module).__dict__
    function = FunctionType(marshal.loads(code), namespace, name, defaults, tuple(map(CellType, closure)))
    function.__kwdefaults__, function.__qualname__ = keywords, qualified
    return function


# In the process of a candidate


def attend(trial: str, name: str, device: str) -> None:
    """Wait for the line that starts the trial, try one candidate, and write the result beside the trial."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")  # if memory runs out, Linux ends this process
    limit = sys.stdin.readline()  # by now all is imported, but no device is in use
    if not limit:  # the run has ended
        return
    if hasattr(signal, "alarm"):
        signal.alarm(int(float(limit)) + 10)  # ends this process, whatever happens to the run
    try:
        groups, candidates = torch.load(trial, map_location=device, weights_only=False)
        result = measure(candidates[name], groups)
    except Exception as error:  # a candidate that raises any error is left out
        result = {"error": f"{type(error).__name__}: {reason(error)}"[:300]}
    write_json(Path(f"{trial}").with_name(f"{name}.json"), result)


def measure(backend: Backend, groups: Sequence[Group]) -> dict[str, Any]:
    """Train with a backend and with the loop, from the same starts. Return their distances and their seconds."""
    exact_groups = [(replace(job, precision=job.precision._replace(name="float32")), *rest) for job, *rest in groups]
    expected, loop_repeats, slow = _measure(loop, groups)
    results, repeats, fast = _measure(backend, groups)
    exact_expected, exact_results = expected, results
    if groups[0][0].precision.name != "float32":
        (exact_expected, *_), (exact_results, *_) = _measure(loop, exact_groups), _measure(backend, exact_groups)
    return {
        "distance": _distance(exact_results, exact_expected, groups),
        "rounding": _distance(results, exact_expected, groups),
        "own_rounding": _distance(expected, exact_expected, groups),
        "repeats": repeats,
        "loop_repeats": loop_repeats,
        "seconds": (slow, fast),
    }


def _measure(backend: Backend, groups: Sequence[Group]) -> tuple[list[Results], bool, float]:
    """Train three times. Return (results, whether they repeat, least seconds of the last two times)."""
    job = groups[0][0]
    with torch.inference_mode(False), torch.enable_grad(), arithmetic(job.precision, job.device):
        first = backend(groups)
        timed = [_clock(lambda: backend(groups), job.device) for _ in range(2)]
    same = all(torch.equal(a, b) for results, _ in timed for a, b in zip(_tensors(first), _tensors(results)))
    return first, same, min(seconds for _, seconds in timed)


def _clock(work: Callable[[], list[Results]], device: torch.device) -> tuple[list[Results], float]:
    """Do the work. Return (its results, the seconds until the device has finished it)."""
    if device.type == "cuda":
        stream = torch.cuda.current_stream(device)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record(stream)
        results = work()
        end.record(stream)
        end.synchronize()
        return results, begin.elapsed_time(end) / 1000
    start = time.perf_counter()
    results = work()
    results[-1].loss.tolist()  # waits for the device
    return results, time.perf_counter() - start


def _tensors(results: Sequence[Results]) -> list[Tensor]:
    return [tensor for result in results for tensor in (*result.states.values(), result.loss)]


def _distance(results: Sequence[Results], expected: Sequence[Results], groups: Sequence[Group]) -> float:
    """Return the largest error of a client: of its weights, as a share of their way from the start, or of its loss.

    The error of a loss is a share of the loss. The result is infinite if tensors of whole numbers differ, and nan if a
    number is not finite.
    """
    errors = [0.0]
    for result, target, (_, starts, _) in zip(results, expected, groups):
        errors.append(float(((result.loss - target.loss).abs() / target.loss.abs().clamp(min=1e-3)).max()))
        error, way = torch.zeros_like(target.loss), torch.zeros_like(target.loss)
        for name, expected_tensor in target.states.items():
            if not expected_tensor.is_floating_point():
                errors.append(0.0 if torch.equal(result.states[name], expected_tensor) else float("inf"))
                continue
            error += (result.states[name] - expected_tensor).to(error.dtype).square().reshape(len(way), -1).sum(1)
            way += (expected_tensor - starts[name]).to(way.dtype).square().reshape(len(way), -1).sum(1)
        errors.append(float((error / way.clamp(min=1e-20)).sqrt().max()))
    return max(errors, key=lambda share: (share != share, share))

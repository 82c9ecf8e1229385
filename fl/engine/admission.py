"""Which backend `auto` takes on a device other than a CPU: the fastest that was tried there and agrees with the loop.

A backend that nobody has compared on a device may be wrong there, slow, hang, or kill its process. So each candidate
trains the first steps of the clients that are about to train, in a process of its own and beside the loop. The result
holds for this device, these versions, this model and these shapes. A file keeps it for other runs:

    $XDG_CACHE_HOME/layer-surgery/backends.json     (in ~/.cache, if that is not set)

The choice is made before the first round, so that one backend trains the whole run, and repeated runs have the same
one. Where trying would take more than `SHARE` of the run, the loop trains it.
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
"""What trials may cost, of the time in which the loop would train the run."""
LEAST = 15.0
"""Seconds below which no trial begins: to import torch and fl and to set up a device takes a process 4 to 8."""
LIMIT = 60.0
"""Seconds that a candidate has at most. One that takes longer hangs, and is not tried again."""
FASTER = 1.1
"""How many times as fast as the loop a candidate has to be."""
TOLERANCE = 1e-2
"""How far from the loop a client may end in float32, as a share of its way from the start.

On a CPU `loop` and `vmap` were at most 4e-4 apart after 8 steps of LeNet and ResNet-20; a step of 8 that is missing or
wrong is about 1e-1 of the way.
"""
ROUNDING = 2.0
"""How far from the loop in float32 a candidate may end in TF32 or bfloat16: this many times as far as the loop in that
precision does, and `TOLERANCE` more. Rounding alone moved LeNet by 5e-2 to 3e-1 in bfloat16 on a CPU, so a candidate
has to agree in float32 as well, where a mistake stands out.
"""

_TAKEN = "out of memory", "busy or unavailable"  # errors of a device that other processes use, perhaps for now
_STEPS = 8  # of the client that makes most of them; the others make theirs in proportion
_spent = 0.0  # seconds that trials of this process took
_known: dict[str, Any] = {}  # what they have shown, where the file cannot be written


class Outcome(NamedTuple):
    """What trying has shown.

    Attributes:
        backend: the one that is admitted.
        gain: how many times as fast as the loop it trains.
        left_out: why others are not admitted.
        late: the seconds that were allowed, if one was not done in time, or others had taken the device: with twice as
            many all are tried again. 0 if all were done, or hung for `LIMIT`; below 0 if nothing was tried.
    """

    backend: str = "loop"
    gain: float = 1.0
    left_out: Mapping[str, str] = {}
    late: float = 0.0

    def __str__(self) -> str:
        admitted = f"{self.backend} trains {self.gain:.1f} times as fast as loop" if self.backend != "loop" else "loop"
        return "; ".join((admitted, *(f"{name} is left out: {why}" for name, why in self.left_out.items())))


def is_asked(device: torch.device) -> bool:
    """Return whether `auto` tries backends on a device; elsewhere it goes by a rule."""
    return device.type != "cpu"


def choose(groups: Sequence[Group], candidates: Mapping[str, Backend], chosen: dict[str, str], rounds: int) -> str:
    """Return the backend that trains these groups, and all that are like them: an earlier choice, or a new one.

    Args:
        candidates: the backends beside the loop that may be able to.
        chosen: the run's earlier choices, by what they hold for; a new one is added.
        rounds: of the run.
    """
    where = name_device(groups[0][0].device)
    key = f"{where}: {describe(groups, candidates)}"
    if chosen.get(key) not in ("loop", *candidates):
        known = outcome = _read(key, candidates)
        if known is None or known.late:
            outcome = _decide(groups, candidates, rounds, known)
            if outcome is not known and outcome.late >= 0:
                _write(key, outcome)
        _log.warning("--backend auto on %s: %s", where, outcome)
        chosen[key] = outcome.backend
    return chosen[key]


def name_device(device: torch.device) -> str:
    """Name a device and the versions that compute on it."""
    name, versions = device.type, [f"torch {torch.__version__}"]
    with suppress(RuntimeError, AssertionError):
        if device.type == "cuda":
            name = torch.cuda.get_device_name(device)
            platform = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
            versions += [platform, f"cuDNN {torch.backends.cudnn.version()}"]
    return f"{name} ({', '.join(versions)})"


def describe(groups: Sequence[Group], candidates: Mapping[str, Backend]) -> str:
    """Return the models' classes, with a digest of all that a trial of these groups depends on but for the device.

    Numbers of clients count alike up to the next power of two, and in quarters how equal the numbers of steps are.
    """
    steps = [n for job, _, _ in groups for n in job.batches.steps]
    clients, equality = 1 << (len(steps) - 1).bit_length(), 4 * sum(steps) // (len(steps) * max(steps))
    looks = sorted({_look(group) for group in groups})
    known = json.dumps([_own_code(), _surroundings(), sorted(candidates), clients, equality, len(looks), looks])
    names = " and ".join(sorted({type(job.model).__name__ for job, _, _ in groups}))
    return f"{names} {hashlib.sha256(known.encode()).hexdigest()[:16]}"


def _look(group: Group) -> str:
    """Return what a step of these clients computes; the values of weights and the learning rate do not matter."""
    job, starts, context = group
    values = {} if job.per_sample is None else {"": job.per_sample}
    shapes = _shapes([context, values])
    inputs = map_inputs(lambda t: str((tuple(t.shape[1:]), t.dtype)), job.data.x)
    step = job.batches.size, job.batches.augment, job.optimizer._replace(lr=0.0), job.precision, job.trainable()
    kinds = type(job.optimizer).__name__, _name(job.objective, set()), _name(job.ascent, set())
    return str((_form(job.model, starts), shapes, inputs, step, kinds))


_FORMS: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()


def _form(model: nn.Module, starts: Stack) -> str:
    """Return a model's layers, the code of its modules, and its tensors; a model is looked at in one round only."""
    if model not in _FORMS:
        code = [type(module).forward.__code__.co_code for module in model.modules() if _has_code(type(module))]
        text = re.sub(r" at 0x[0-9a-f]+", "", str((model, code, _shapes(starts))))
        _FORMS[model] = hashlib.sha256(text.encode()).hexdigest()
    return _FORMS[model]


def _shapes(stacks: Any) -> Any:
    return tree_map(lambda t: (tuple(t.shape[1:]), t.dtype), stacks)


def _has_code(kind: type) -> bool:
    return isinstance(getattr(kind, "forward", None), FunctionType)


def _name(value: Any, seen: set[int]) -> Any:
    """Return the name and the code of a function, and of those that it closes over."""
    if not isinstance(value, FunctionType) or id(value) in seen:
        return type(value).__qualname__
    seen.add(id(value))
    held = [_name(one, seen) for one in _held(value) if isinstance(one, FunctionType)]
    return value.__module__, value.__qualname__, value.__code__.co_code, held


def _held(function: FunctionType) -> list[Any]:
    return [cell.cell_contents for cell in function.__closure__ or ()]


@cache
def _own_code() -> str:
    """Return a digest of the engine's files; the package's version says too little while it is developed."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


_SWITCHES = ("CUDA_", "CUBLAS", "CUDNN_", "PYTORCH_", "NVIDIA_TF32")


def _surroundings() -> list[str]:
    """Return the driver, and the variables by which CUDA and torch choose kernels and memory."""
    chosen = [
        f"{name}={value}"
        for name, value in sorted(os.environ.items())
        if name.startswith(_SWITCHES) and name != "CUDA_VISIBLE_DEVICES"
    ]
    with suppress(OSError):
        chosen.append(Path("/proc/driver/nvidia/version").read_text())
    return chosen


# The file


def _file() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "layer-surgery" / "backends.json"


def _everything() -> dict[str, Any]:
    with suppress(OSError, ValueError, RuntimeError):
        if isinstance(found := json.loads(_file().read_text()), dict):
            return found | _known
    return _known


def _read(key: str, candidates: Mapping[str, Backend]) -> Outcome | None:
    """Return what the file says; None if it says nothing, or nothing that can be understood."""
    with suppress(TypeError, ValueError, AttributeError):
        found = Outcome(**_everything()[key]) if key in _everything() else None
        if found and found.backend in ("loop", *candidates):
            return found._replace(gain=float(found.gain), left_out={**found.left_out}, late=float(found.late))
    return None


def _write(key: str, outcome: Outcome) -> None:
    _known[key] = outcome._asdict()
    with suppress(OSError, FLError, RuntimeError):  # a run does not depend on it
        _file().parent.mkdir(parents=True, exist_ok=True)
        write_json(_file(), _everything())


# The trial


def _decide(groups: Sequence[Group], candidates: Mapping[str, Backend], rounds: int, known: Outcome | None) -> Outcome:
    """Try the candidates, unless that takes too long, or a known trial was too short and this is little longer."""
    global _spent
    names = " and ".join(candidates)
    if current().size > 1:
        return Outcome(left_out={names: "no backend is tried in runs over several ranks"}, late=-1.0)
    began = time.monotonic()
    part = SHARE * rounds
    allowed = part * _seconds_of_round(groups, (LEAST + _spent) / part) - _spent
    if known and allowed < 2 * known.late:
        return known
    if allowed < LEAST:
        why = f"the run is too short to try it ({rounds} rounds, {SHARE:.0%} of which are {max(allowed, 0):.0f} s)"
        return Outcome(left_out={names: why}, late=-1.0)
    try:
        with tempfile.TemporaryDirectory(prefix="fl-backends-", ignore_cleanup_errors=True) as folder:
            trial = Path(folder) / "trial"
            try:
                torch.save((_first_steps(groups), dict(candidates)), trial, pickle_module=_Pickle)
            except Exception as error:  # of anything that a model, or an objective, is made of
                why = f"what trains cannot be sent to another process: {reason(error)}"
                return Outcome(left_out={names: why}, late=-1.0)
            job = groups[0][0]
            return _compare(trial, candidates, job.device, job.precision.deterministic, began + allowed)
    except OSError as error:
        return Outcome(left_out={names: f"no process could be started: {reason(error)}"}, late=-1.0)
    finally:
        _spent += time.monotonic() - began


def _compare(
    trial: Path, candidates: Mapping[str, Backend], device: torch.device, deterministic: bool, end: float
) -> Outcome:
    """Let one candidate after another train, each in a process, until `end` of `time.monotonic`.

    All processes start at once, and wait for their turn.
    """
    allowed = end - time.monotonic()
    gains, left_out, late = {"loop": 1.0}, {}, 0.0
    if device.type == "cuda":
        torch.cuda.empty_cache()  # for the others
    children = {name: _start(trial, name, device) for name in candidates}
    try:
        for left, (name, child) in zip(range(len(children), 0, -1), children.items()):
            limit = min(LIMIT, max(1.0, (end - time.monotonic()) / left))
            try:
                child.communicate(f"{limit}\n".encode(), limit)
                gains[name], why = _judge(trial.with_name(name), child.returncode, deterministic)
                late = allowed if any(words in why for words in _TAKEN) else late
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
    others = {name: f"it trains {gains[name]:.1f} times as fast" for name in gains if name not in ("loop", best)}
    return Outcome(best, gains[best], left_out | others, late)


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
    """End a process and all that it has started."""
    if child.poll() is None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL) if hasattr(os, "killpg") else child.kill()
        with suppress(subprocess.TimeoutExpired):  # one that waits in a driver may not even die
            child.wait(5)
    if child.stdin and not child.stdin.closed:
        with suppress(OSError):
            child.stdin.close()


def _judge(file: Path, code: int, deterministic: bool) -> tuple[float, str]:
    """(how many times as fast as the loop, why it is left out or "") of a candidate whose process has ended."""
    if code < 0:
        return 0.0, f"its process was ended by a signal ({signal.strsignal(-code) or -code})"
    try:
        found = json.loads(file.with_name(f"{file.name}.json").read_text())
    except (OSError, ValueError):
        return 0.0, f"its process ended with exit code {code}, and no result"
    if "error" in found:
        return 0.0, found["error"]
    slow, fast = found["seconds"]
    if not found["distance"] <= TOLERANCE:
        return 0.0, f"it differs from the loop by {found['distance']:.1g} of what clients learn"
    if not found["rounding"] <= ROUNDING * found["own_rounding"] + TOLERANCE:
        share, own = found["rounding"], found["own_rounding"]
        return 0.0, f"rounding moves it by {share:.1g} of what clients learn, and the loop by {own:.1g}"
    if deterministic and found["repeats"] < found["loop_repeats"]:
        return 0.0, "it does not repeat itself (it may with --no-deterministic)"
    if slow < FASTER * fast:
        return 0.0, f"it trains {slow / fast:.1f} times as fast"
    return slow / fast, ""


def _first_steps(groups: Sequence[Group]) -> list[Group]:
    """Return the same clients, who make few of their steps from the start of the first, with the samples of these
    alone.
    """
    longest = max(max(job.batches.steps) for job, _, _ in groups)
    return [_few(group, len(group[0].batches.steps), longest) for group in groups]


def _few(group: Group, clients: int, longest: int) -> Group:
    job, starts, context = group
    batches, size = job.batches, job.batches.size
    steps = tuple(max(1, min(n, n * _STEPS // longest)) for n in batches.steps[:clients])
    rows = batches.rows[:clients, : max(steps)]
    samples, places = torch.unique(rows[..., :size], return_inverse=True)
    data = job.data.taken(samples)
    test = map_inputs(lambda t: t[:1].to(data.device), data.test_x), data.test_y[:1].to(data.device)
    data = replace(data, test_x=test[0], test_y=test[1], owners=None, test_owners=None, owner_names=())
    real = batches.real and tuple(own[:n] for own, n in zip(batches.real, steps))
    batches = batches._replace(rows=torch.cat([places, rows[..., size:]], -1), steps=steps, real=real)
    per_sample = None if job.per_sample is None else job.per_sample[samples]
    job = replace(job, data=data, batches=batches, per_sample=per_sample)
    # From one start, that of the first: what K models weigh need not be written.
    return job, *tree_map(lambda t: t[:1].clone().expand(clients, *t.shape[1:]), (starts, context))


def _seconds_of_round(groups: Sequence[Group], least: float) -> float:
    """About how long the loop takes for these clients, from a few steps of one of each group.

    The first time takes longer, since libraries set themselves up: if even that is below `least`, it is the last.
    """
    ones = [_few(group, 1, group[0].batches.steps[0]) for group in groups]
    times = [sum(job.batches.steps) / one[0].batches.steps[0] for one, (job, _, _) in zip(ones, groups)]

    def seconds() -> float:
        each = [_clock(partial(loop, [one]), one[0].device)[1] for one in ones]
        return sum(map(operator.mul, each, times))

    with shown(None):
        return first if (first := seconds()) < least else min(seconds(), seconds())


class _Pickler(pickle.Pickler):
    """Also of functions within functions, which objectives mostly are; for a process of the same Python."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, (type, FunctionType)) and value.__module__ == "__main__":
            raise pickle.PicklingError(f"{value.__qualname__} is defined in the program itself, not in a module")
        if not isinstance(value, FunctionType) or "<locals>" not in value.__qualname__:
            return NotImplemented
        names = value.__name__, value.__qualname__, value.__module__
        return _function, (marshal.dumps(value.__code__), names, value.__defaults__, value.__kwdefaults__, _held(value))


class _Pickle:
    """What `torch.save` takes for a module."""

    Pickler = _Pickler


def _function(code: bytes, names: tuple[str, str, str], defaults: Any, keywords: Any, held: list[Any]) -> FunctionType:
    """Make a function that `_Pickler` has written."""
    name, qualified, module = names
    space = importlib.import_module(module).__dict__
    made = FunctionType(marshal.loads(code), space, name, defaults, tuple(map(CellType, held)))
    made.__kwdefaults__, made.__qualname__ = keywords, qualified
    return made


# In the process of a candidate


def attend(trial: str, name: str, device: str) -> None:
    """Wait for the word to begin, try one candidate, and leave what was found beside the trial."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")  # if memory runs out, Linux ends this and not the run
    limit = sys.stdin.readline()  # all is imported, and no device is in use yet
    if not limit:  # the run has ended
        return
    if hasattr(signal, "alarm"):
        signal.alarm(int(float(limit)) + 10)  # whatever becomes of the run, this ends
    try:
        groups, candidates = torch.load(trial, map_location=device, weights_only=False)
        found = measure(candidates[name], groups)
    except Exception as error:  # of whatever kind: a candidate that raises is left out
        found = {"error": f"{type(error).__name__}: {reason(error)}"[:300]}
    write_json(Path(f"{trial}").with_name(f"{name}.json"), found)


def measure(backend: Backend, groups: Sequence[Group]) -> dict[str, Any]:
    """Train with a backend and with the loop, from the same starts: how far they are apart, and how long they take."""
    exact = [(replace(job, precision=job.precision._replace(name="float32")), *rest) for job, *rest in groups]
    expected, loop_repeats, slow = _measure(loop, groups)
    found, repeats, fast = _measure(backend, groups)
    best, agreeing = expected, found
    if groups[0][0].precision.name != "float32":
        (best, *_), (agreeing, *_) = _measure(loop, exact), _measure(backend, exact)
    return {
        "distance": _distance(agreeing, best, groups),
        "rounding": _distance(found, best, groups),
        "own_rounding": _distance(expected, best, groups),
        "repeats": repeats,
        "loop_repeats": loop_repeats,
        "seconds": (slow, fast),
    }


def _measure(backend: Backend, groups: Sequence[Group]) -> tuple[list[Results], bool, float]:
    """(results, whether they are the same each time, seconds) of a backend; the first training warms it up."""
    job = groups[0][0]
    with torch.inference_mode(False), torch.enable_grad(), arithmetic(job.precision, job.device):
        first = backend(groups)
        timed = [_clock(lambda: backend(groups), job.device) for _ in range(2)]
    same = all(torch.equal(a, b) for done, _ in timed for a, b in zip(_tensors(first), _tensors(done)))
    return first, same, min(seconds for _, seconds in timed)


def _clock(work: Callable[[], list[Results]], device: torch.device) -> tuple[list[Results], float]:
    """(what the work gives, the seconds until the device has done it)."""
    if device.type == "cuda":
        stream = torch.cuda.current_stream(device)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record(stream)
        done = work()
        end.record(stream)
        end.synchronize()
        return done, begin.elapsed_time(end) / 1000
    began = time.perf_counter()
    done = work()
    done[-1].loss.tolist()  # waits
    return done, time.perf_counter() - began


def _tensors(results: Sequence[Results]) -> list[Tensor]:
    return [tensor for result in results for tensor in (*result.states.values(), result.loss)]


def _distance(found: Sequence[Results], expected: Sequence[Results], groups: Sequence[Group]) -> float:
    """Return the largest distance of a client to where it should be, as a share of its way.

    Or of its loss, as a share of the loss, if that is larger. Infinite where tensors of whole numbers differ, and nan
    where a number is not finite.
    """
    most = [0.0]
    for mine, its, (_, starts, _) in zip(found, expected, groups):
        most.append(float(((mine.loss - its.loss).abs() / its.loss.abs().clamp(min=1e-3)).max()))
        apart, way = torch.zeros_like(its.loss), torch.zeros_like(its.loss)
        for name, there in its.states.items():
            if not there.is_floating_point():
                most.append(0.0 if torch.equal(mine.states[name], there) else float("inf"))
                continue
            apart += (mine.states[name] - there).to(apart.dtype).square().reshape(len(way), -1).sum(1)
            way += (there - starts[name]).to(way.dtype).square().reshape(len(way), -1).sum(1)
        most.append(float((apart / way.clamp(min=1e-20)).sqrt().max()))
    return max(most, key=lambda share: (share != share, share))

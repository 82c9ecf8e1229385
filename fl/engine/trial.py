"""A trial of a backend: a run's first steps in a process, beside the loop's.

`admission` writes the clients' first steps to a file, and starts a process for each candidate. The process calls
`attend`, and leaves what it measured beside the file.
"""

import importlib
import marshal
import pickle
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import CellType, FunctionType
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fl.base.errors import reason
from fl.base.files import write_json
from fl.base.torch_private import tree_map
from fl.data.inputs import map_inputs
from fl.engine.eager import loop
from fl.engine.job import Group, GroupResults
from fl.engine.precision import arithmetic

Backend: TypeAlias = Callable[[Sequence[Group]], list[GroupResults]]

_STEPS = 8  # steps in a trial of the client with the most steps; other clients make fewer, in proportion


def first_steps(groups: Sequence[Group]) -> list[Group]:
    """Return the clients with few steps, their samples and the first start only."""
    longest = max(max(job.batches.steps) for job, _, _ in groups)
    return [shorten(group, len(group[0].batches.steps), longest) for group in groups]


def shorten(group: Group, clients: int, longest: int) -> Group:
    """Return the first clients of a group, with steps in proportion.

    A client of `longest` steps would make eight.
    """
    job, starts, context = group
    batches, size = job.batches, job.batches.size
    steps = tuple(max(1, min(n, n * _STEPS // longest)) for n in batches.steps[:clients])
    rows = batches.rows[:clients, : max(steps)]
    samples, places = torch.unique(rows[..., :size], return_inverse=True)
    data = job.data.take(samples)
    test = map_inputs(lambda t: t[:1].to(data.device), data.test_x), data.test_y[:1].to(data.device)
    data = replace(data, test_x=test[0], test_y=test[1], owners=None, test_owners=None, owner_names=())
    real = batches.real and tuple(counts[:n] for counts, n in zip(batches.real, steps))
    batches = batches._replace(rows=torch.cat([places, rows[..., size:]], -1), steps=steps, real=real)
    per_sample = None if job.per_sample is None else job.per_sample[samples]
    job = replace(job, data=data, batches=batches, per_sample=per_sample)
    # All clients have the first client's start, so that the file holds one model instead of K.
    return job, *tree_map(lambda t: t[:1].clone().expand(clients, *t.shape[1:]), (starts, context))


def closure(function: FunctionType) -> list[Any]:
    """Return the values that a function closes over."""
    return [cell.cell_contents for cell in function.__closure__ or ()]


class _Pickler(pickle.Pickler):
    """A pickler that takes functions inside functions, too (most objectives are).

    It writes for a process with the same Python version.
    """

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
            closure(value),
        )


class Pickle:
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


def attend(trial: str, name: str, device: str) -> None:
    """Wait for the line that starts the trial, try a candidate, write the result."""
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
    """Train with a backend and with the loop; return their distances and seconds."""
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


def _measure(backend: Backend, groups: Sequence[Group]) -> tuple[list[GroupResults], bool, float]:
    """Train three times; return (results, whether they repeat, least seconds).

    The seconds are of the last two times.
    """
    job = groups[0][0]
    with torch.inference_mode(False), torch.enable_grad(), arithmetic(job.precision, job.device):
        first = backend(groups)
        timed = [clock(lambda: backend(groups), job.device) for _ in range(2)]
    same = all(torch.equal(a, b) for results, _ in timed for a, b in zip(_tensors(first), _tensors(results)))
    return first, same, min(seconds for _, seconds in timed)


def clock(work: Callable[[], list[GroupResults]], device: torch.device) -> tuple[list[GroupResults], float]:
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


def _tensors(results: Sequence[GroupResults]) -> list[Tensor]:
    return [tensor for result in results for tensor in (*result.states.values(), result.loss)]


def _distance(results: Sequence[GroupResults], expected: Sequence[GroupResults], groups: Sequence[Group]) -> float:
    """Return the largest error of a client, in its weights or its loss.

    The error of the weights is a share of their way from the start.

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

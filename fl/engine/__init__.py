"""Local training of K clients, each with its own start, data and number of steps.

Backends share one signature, `train(groups) -> results`, use the same batches and random numbers, and give the same
result up to float32 rounding:

    loop      one client after another: the reference
    workers   clients in threads side by side, for the CPU
    vmap      all clients of one architecture as one program over stacked tensors
    graphs    each client's step as a CUDA graph, several of them on streams side by side

On the CPU `auto` picks by a rule, see `rank_backends`. On other devices it takes the fastest backend that was tried
there and agrees with the loop, see `fl.engine.admission`. If a backend refuses a model, it takes the next one.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from fl.base.errors import FLError, Refused
from fl.engine import admission, graphs, vmap
from fl.engine.constants import constants
from fl.engine.eager import loop, workers
from fl.engine.job import Group, GroupResults, Job
from fl.engine.optimizers import SGD, Adam, Optimizer
from fl.engine.precision import Precision, arithmetic
from fl.engine.work import work_of
from surgery import broadcast
from surgery.errors import first_line, is_out_of_memory
from surgery.states import owners, stack_size

_log = logging.getLogger("fl")

__all__ = [
    "BACKENDS",
    "BACKEND_NAMES",
    "SGD",
    "Adam",
    "Group",
    "GroupResults",
    "Job",
    "Optimizer",
    "Precision",
    "check",
    "rank_backends",
    "train",
]

BACKENDS: dict[str, Callable[[Sequence[Group]], list[GroupResults]]] = {
    "loop": loop,
    "workers": workers,
    "vmap": vmap.train,
    "graphs": graphs.train,
}
BACKEND_NAMES = ("auto", *BACKENDS)


def check(backend: str, device: torch.device, precision: Precision, partial: bool = False) -> None:
    """Raise FLError for an unknown backend or precision, or one this device lacks.

    Args:
        partial: whether the last batch of an epoch may be smaller than the others.
    """
    if backend not in ("auto", *BACKENDS):
        raise FLError(f"unknown backend {backend!r}: there are auto, {', '.join(BACKENDS)}", code="name")
    if backend == "workers" and device.type != "cpu":
        raise FLError(
            f"--backend workers is for the CPU, and the data are on {device}: use vmap or graphs", code="unsupported"
        )
    if backend == "graphs" and device.type != "cuda":
        raise FLError(
            f"--backend graphs needs a CUDA device, and the data are on {device}: use workers or vmap",
            code="unsupported",
        )
    if backend == "vmap" and precision.channels_last:
        raise FLError(
            "--channels-last is a layout of one client's tensors: use --backend loop, workers or graphs",
            code="unsupported",
        )
    if backend in ("vmap", "graphs") and partial:
        others = "loop or workers" if device.type == "cpu" else "loop"
        raise FLError(
            f"--last-batch partial gives batches of several sizes, and --backend {backend} has one size for all: use "
            f"--backend {others}, or leave one of the two out",
            code="unsupported",
        )
    precision.check(device)


def train(
    groups: Sequence[Group],
    backend: str = "auto",
    chosen: dict[str, str] | None = None,
    rounds: int = 100,
    moving: bool = False,
) -> list[GroupResults]:
    """Train the clients of a round.

    Args:
        groups: clients of one architecture each, as (job, starts, context): what they have in common, see `Job`; the
            stack of their starting states; per-client inputs of the objective, tensors with a leading axis K in nested
            dicts, or None. None of it is changed.
        backend: one of `BACKEND_NAMES`.
        chosen: what `auto` has chosen before: on the CPU by the groups' numbers of clients and their work, elsewhere by
            device and versions as well. It keeps to that on any machine that can, and adds new choices.
        rounds: the number of such rounds; it limits the time that `auto` may take to try backends.
        moving: whether the samples lie elsewhere in memory in each round, so that graphs would be captured each time.

    Raises:
        FLError: if the backend is unknown or cannot train this model on this device, and if the model draws random
            numbers in a way that `fl.engine.draws.Drawing` does not know.
    """
    for job, starts, _ in groups:
        if stack_size(starts) != len(job.batches.steps):
            raise FLError(f"{stack_size(starts)} starting states for {len(job.batches.steps)} clients: give one each")
        check(backend, job.device, job.precision, job.batches.real is not None)
    chosen, device = {} if chosen is None else chosen, groups[0][0].device
    ruled = backend == "auto" and not admission.uses_trials(device)
    key = " ".join(f"{len(job.batches.steps)}x{work_of(job)}" for job, _, _ in groups) if ruled else ""
    whole = [(job, _with_passing(job, starts), context or {}) for job, starts, context in groups]
    refused: dict[str, str] = {}
    with _explain([job for job, _, _ in groups]), arithmetic(groups[0][0].precision, device):
        order = [backend]
        if backend == "auto":
            order = _order(chosen.get(key), groups) if ruled else _admit(whole, chosen, rounds, moving)
        for name in order:
            try:
                with _as_many_threads_as_pay(groups, name):
                    done = BACKENDS[name](whole)
                break
            except (Refused, RuntimeError) as error:
                # What the last one cannot do, no backend can. Full memory is no refusal (but of a backend that was
                # tried with fewer clients), and neither are other errors of the model or the objective: another backend
                # would hide them.
                if name == order[-1] or (is_out_of_memory(error) and (ruled or backend != "auto")):
                    raise
                refused[name] = first_line(error)
    if backend == "auto":
        if ruled:
            chosen[key] = name
        _remember([job.model for job, _, _ in groups], name, refused)
    return [
        result._replace(states={name: result.states[name] for name in starts})
        for result, (_, starts, _) in zip(done, groups)
    ]


_TINY = 500_000  # operations of all clients in a step for each layer, see `fl.engine.work.work_of`


@contextmanager
def _as_many_threads_as_pay(groups: Sequence[Group], backend: str) -> Iterator[None]:
    """Compute tiny steps in one thread.

    Several threads would wait for each other longer than they compute, and for milliseconds where other programs run.
    """
    threads, work = torch.get_num_threads(), 0
    if threads > 1 and backend != "workers" and groups[0][0].device.type == "cpu":
        work = sum(len(job.batches.steps) * work_of(job) for job, _, _ in groups)
    if not 0 < work <= _TINY:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def _explain(jobs: Sequence[Job]) -> Iterator[None]:
    """Enable gradients in the block, and explain two faults of models in plain words."""
    names = " or ".join(map(_name, (job.model for job in jobs)))
    before = _global_rng(jobs[0].device)
    try:
        with torch.inference_mode(False), torch.enable_grad():
            yield
    except ValueError as error:
        if _ONE_VALUE not in str(error):
            raise
        partial = ", or leave --last-batch partial out" * any(job.batches.real is not None for job in jobs)
        raise FLError(
            f"{names} normalises over a batch, and at --batch-size {min(job.batches.size for job in jobs)} one of its "
            "norms sees a single value: use a larger --batch-size, larger images (--pad), or a model without batch "
            f"norm{partial}"
        ) from error
    if not all(map(torch.equal, before, _global_rng(jobs[0].device))):
        raise FLError(
            f"{names} draws from torch's global generator in training, so that runs could not be repeated: leave the "
            "dropout inside of recurrent layers, AlphaDropout, RReLU and code of your own that draws "
            "out, and use nn.Dropout beside them",
            code="unsupported",
        )


def _name(model: nn.Module) -> str:
    """Return the class name of the user's model, also if a method's model holds it."""
    held = next(model.children(), model)
    return type(held if type(model).__module__.startswith("fl.algorithms") else model).__name__


_ONE_VALUE = "Expected more than 1 value per channel when training"  # torch's batch and instance norms

_REFUSED: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()
"""The backends that could not train a model."""


_SMALL = 2 * 10**6  # a client's work in a step for each layer, see `fl.engine.work.work_of`


def rank_backends(groups: Sequence[Group]) -> list[str]:
    """Return the backends that `auto` tries on the CPU, the fastest by a rule first.

    The loop is the last of them.

    Small steps of several clients train as one program, others in threads; two clients leave threads idle.
    (`docs/results/engine.md` says what this was measured to be worth.)
    """
    job, clients = groups[0][0], sum(len(job.batches.steps) for job, _, _ in groups)
    if clients < 3:
        return ["loop"]
    stackable = len(groups) == 1 and not job.precision.channels_last and job.batches.real is None
    threads = ["workers"] if torch.get_num_threads() > 1 else []
    if stackable and 0 < work_of(job) <= _SMALL:
        return ["vmap", *threads, "loop"]
    return [*threads, "loop"]


def _order(name: str | None, groups: Sequence[Group]) -> list[str]:
    """Return the backends to try, in order, without those that refused a model.

    An earlier choice comes first if it is possible here.
    """
    job, order = groups[0][0], rank_backends(groups)
    with suppress(FLError):
        check(name or "", job.device, job.precision, job.batches.real is not None)
        if name != "vmap" or len(groups) == 1:
            order = [name, *(other for other in order if other != name)]
    return [name for name in order if name not in _find_refusals(groups)]


def _admit(groups: Sequence[Group], chosen: dict[str, str], rounds: int, moving: bool) -> list[str]:
    """Return the admitted backend, unless it has refused a model, and the loop."""
    job, candidates = groups[0][0], {}
    for name, backend in BACKENDS.items():
        with suppress(FLError):
            check(name, job.device, job.precision, job.batches.real is not None)
            alone = name == "vmap" and len(groups) > 1
            in_doubt = name == "graphs" and (moving or any(map(graphs.may_starve, groups)))
            if name != "loop" and not alone and not in_doubt:
                candidates[name] = backend
    name = admission.choose(groups, candidates, chosen, rounds) if candidates else "loop"
    in_vain = name == "graphs" and graphs.is_in_vain(job.model for job, _, _ in groups)
    return ["loop"] if name in ("loop", *_find_refusals(groups)) or in_vain else [name, "loop"]


def _find_refusals(groups: Sequence[Group]) -> set[str]:
    return set().union(*(_REFUSED.get(job.model, ()) for job, _, _ in groups))


def _remember(models: Sequence[nn.Module], backend: str, refused: Mapping[str, str]) -> None:
    """Keep and say which backends have refused these models, and why."""
    for name, reason in refused.items():
        for model in models:
            _REFUSED.setdefault(model, set()).add(name)
        names = " and ".join(sorted(set(map(_name, models))))
        _log.warning("warning: %s trains with --backend %s, since %s refuses: %s", names, backend, name, reason)


def _with_passing(job: Job, starts: dict[str, Tensor]) -> dict[str, Tensor]:
    """Add the model's non-persistent buffers to the starts; its state lacks them.

    Each client begins with the model's own, and they are dropped after the round.
    """
    known = {id(tensor) for _, _, buffers in owners(job.model) for tensor in buffers.values()}
    known |= constants(job.model).keys()
    passing = {name: b.detach() for name, b in job.model.named_buffers() if name not in starts and id(b) not in known}
    return {**starts, **broadcast(passing, stack_size(starts))}


def _global_rng(device: torch.device) -> list[Tensor]:
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]

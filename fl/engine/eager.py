"""Plain eager steps, one client at a time or several side by side.

`loop` trains in this thread, and is the reference that the other backends are compared with; `workers`, for the CPU,
trains several clients side by side. One small step cannot keep several cores busy, but several steps can. Torch
releases Python's lock while it computes.
"""

import copy
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from fl.base.errors import Refused
from fl.base.torch_private import foreach_add_, foreach_copy_, foreach_zero_, tree_map
from fl.engine.batches import StepInput
from fl.engine.constants import constants
from fl.engine.draws import Draws, NoDraws
from fl.engine.job import Group, GroupResults, longest_first
from fl.engine.objectives import Batch
from fl.engine.progress import count
from surgery import State
from surgery.errors import first_line


class Replica:
    """The model, its gradients and the optimizer's memory for one client at a time.

    Args:
        group: the clients that will train here; it is not changed.
    """

    def __init__(self, group: Group) -> None:
        self.job, self.starts, self.context = group
        try:
            self.model = copy.deepcopy(self.job.model, constants(self.job.model)).train()
        except RuntimeError as error:
            raise Refused(
                f"{type(self.job.model).__name__} cannot be copied: {first_line(error)}; use --backend vmap, or "
                "torch.nn.utils.parametrizations instead of the older weight_norm"
            ) from error
        if self.job.precision.channels_last:
            self.model.to(memory_format=torch.channels_last)
        named = dict(self.model.named_parameters())
        self.params: State = {name: named[name] for name in self.job.trainable()}
        self.values = list(self.params.values())
        self.dtype = self.values[0].dtype
        self.memory = self.job.optimizer.memory(self.values)
        self.total = torch.zeros((), dtype=self.job.loss_dtype, device=self.job.device)
        self.random: bool | None = None  # whether the model draws random numbers; None: not known yet
        self.positions: dict = {}  # see `Draws`

    def steps(self, k: int) -> Iterator[tuple[StepInput, Any]]:
        """Put the k-th client's start in place, and yield the arguments of each `step`."""
        context = self.load(k)
        for s in range(self.job.batches.steps[k]):
            yield self.job.batches.client_step(k, s), context

    @torch.no_grad()
    def load(self, k: int) -> Any:
        """Put the k-th client's start in place, clear the memory, return its context."""
        place = self._state()
        copy_all(place.values(), [self.starts[name][k] for name in place])
        foreach_zero_([self.total, *(t for tensors in self.memory.values() for t in tensors)])
        return tree_map(lambda tensor: tensor[k], self.context)

    def step(self, step: StepInput, context: Any) -> None:
        """Make a step of the client that is in place."""
        batch = self.job.fetch(step, self.dtype)
        loss = self.differentiate(batch, step.key, context)
        if self.job.ascent:
            self.look_ahead(batch, step.key, context)
        with torch.no_grad():
            self.job.optimizer.step(self.values, self.memory, [p.grad for p in self.values])
            self.total += loss

    def differentiate(self, batch: Batch, key: Tensor, context: Any) -> Tensor:
        """Leave the gradients in the parameters; returns the loss."""
        for p in self.values:
            p.grad = None
        draws = Draws(key, positions=self.positions) if self.random is not False else None
        loss = self.job.loss(self.call, self.params, context, batch, draws)
        with NoDraws() if self.random is None else nullcontext():
            loss.backward(inputs=self.values)
        # A model that did not draw in its first step is spared the detour; if it draws later, `train` notices.
        self.random = draws is not None and draws.drawn > 0
        return loss.detach()

    def look_ahead(self, batch: Batch, key: Tensor, context: Any) -> None:
        """Replace the gradients by the ones where the ascent leads; buffers stay."""
        used = {name: p for name, p in self.params.items() if p.grad is not None}
        with torch.no_grad():
            tensors = dict((*used.items(), *self.model.named_buffers()))
            before = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
            copy_all(before.values(), tensors.values())
            step = self.job.ascent({n: p.detach() for n, p in used.items()}, {n: p.grad for n, p in used.items()})
            foreach_add_(list(used.values()), [step[name] for name in used])
        self.differentiate(batch, key, context)
        with torch.no_grad():
            copy_all(dict((*used.items(), *self.model.named_buffers())).values(), before.values())

    def call(self, params: State, x: Tensor) -> Tensor:
        """Return the output of the model at `params`; its own parameters need no detour."""
        return self.model(x) if params is self.params else functional_call(self.model, params, (x,))

    @torch.no_grad()
    def save(self, k: int, results: GroupResults) -> None:
        """Write the k-th client's results."""
        state = self._state()
        copy_all([results.states[name][k] for name in state], state.values())
        torch.div(self.total, self.job.batches.steps[k], out=results.loss[k])

    def _state(self) -> State:
        """Return the tensors that are in place now.

        A model may put new buffers in place of old ones.
        """
        tensors = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        return {name: tensors[name] for name in self.starts}


def copy_all(places: Iterable[Tensor], values: Iterable[Tensor]) -> None:
    """Copy values to their places, with one launch for all tensors of a dtype."""
    alike: dict[tuple, tuple[list[Tensor], list[Tensor]]] = {}
    for place, value in zip(places, values):
        pair = alike.setdefault((place.dtype, value.dtype), ([], []))
        pair[0].append(place)
        pair[1].append(value)
    for targets, sources in alike.values():
        foreach_copy_(targets, sources)


def loop(groups: Sequence[Group]) -> list[GroupResults]:
    """Train the clients of every group one after another. See `fl.engine.train`."""
    done = []
    for group in groups:
        replica, results = Replica(group), GroupResults.empty(group)
        for k in range(len(replica.job.batches.steps)):
            for step in replica.steps(k):
                replica.step(*step)
            replica.save(k, results)
            count(1)
        done.append(results)
    return done


def workers(groups: Sequence[Group]) -> list[GroupResults]:
    """Train all groups in as many threads as torch may use. See `fl.engine.train`."""
    results = [GroupResults.empty(group) for group in groups]
    clients = longest_first(groups)
    allowed = torch.get_num_threads()
    threads = min(allowed, len(clients))
    queue, lock, failed = iter(clients), threading.Lock(), threading.Event()

    def work() -> None:
        torch.set_num_threads(allowed // threads)
        replicas: dict[int, Replica] = {}
        try:
            while not failed.is_set():
                with lock:
                    g, k = next(queue, (None, None))
                if g is None:
                    return
                if g not in replicas:
                    replicas[g] = Replica(groups[g])
                for step in replicas[g].steps(k):
                    replicas[g].step(*step)
                    if failed.is_set():
                        return
                replicas[g].save(k, results[g])
                count(1)
        except BaseException:
            failed.set()  # the other threads stop after their step
            raise

    try:
        with ThreadPoolExecutor(threads, thread_name_prefix="fl-client") as pool:
            futures = [pool.submit(work) for _ in range(threads)]
            try:
                for future in futures:
                    future.result()
            except BaseException:  # also Ctrl-C
                failed.set()
                raise
    finally:
        torch.set_num_threads(allowed)  # it is a setting of the process as well as of the thread
    return results

"""Steps captured once as CUDA graphs and replayed, clients on parallel streams.

Eager steps of small models wait for the launches of their many small kernels; a graph is one launch. Clients of
different architectures also run side by side. Captures are kept for the next rounds.
"""

import inspect
import logging
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn

from fl.base.errors import Refused
from fl.base.torch_private import tree_flatten, tree_leaves, tree_map, version_of
from fl.engine.eager import Replica, copy_all
from fl.engine.job import Group, GroupResults, longest_first
from fl.engine.progress import count
from surgery.errors import first_line

_log = logging.getLogger("fl")

_STREAMS = 16  # clients side by side at most
_WARM_UP = 3  # eager steps before a program's first capture, in which libraries choose kernels and make workspaces
_WINDOW = 256  # steps whose rows a slot holds at a time; more than a warm-up takes
_PROGRAMS = 4  # of one model: two objectives in turn (Ditto) on two sets of data in turn
_TOO_MANY = 4 * _PROGRAMS  # made of one model; hardly any of them can have been used again

Capture = Callable[[Callable[[], None], int], Callable[[], None]]
"""(step, eager steps before) -> a function that repeats the step."""


class Slot(Replica):
    """A replica whose step reads its inputs from fixed places, to be replayed.

    The step itself counts which step comes next, so replaying it is all there is to do.
    """

    def __init__(self, group: Group, capture: Capture, warm_up: int) -> None:
        super().__init__(group)
        self.read = self.job.data, self.job.per_sample  # the graph reads their memory
        self.mine = tree_map(lambda tensor: tensor[0].clone(), self.context)
        self.rows = self.job.batches.rows.new_zeros(_WINDOW, self.job.batches.rows.shape[-1])
        self.next = torch.zeros(1, dtype=torch.int64, device=self.job.device)
        self.lr = torch.zeros((), device=self.job.device)  # in float32, as fused optimizers read it from a tensor
        self.attach(group)
        self.job = replace(self.job, optimizer=self.job.optimizer._replace(lr=self.lr))
        self.load(0)
        self.window(0, 0)
        before = list(map(id, self._state().values()))
        self.replay = capture(self.following, warm_up)
        if before != list(map(id, self._state().values())):
            raise Refused(
                f"{type(self.model).__name__} puts new tensors in the place of its buffers, which a graph cannot: "
                "change them in place, or use --backend loop"
            )

    def attach(self, group: Group) -> None:
        """Take the clients of another round."""
        self.job, self.starts, self.context = group
        self.lr.fill_(self.job.optimizer.lr)

    @torch.no_grad()
    def load(self, k: int) -> Any:
        """Put the k-th client's start and context in place."""
        copy_all(tree_leaves(self.mine), tree_leaves(super().load(k)))
        return self.mine

    def window(self, k: int, s: int) -> None:
        """Put the k-th client's steps from the s-th on in place, as many as fit."""
        rows = self.job.batches.rows[k, s : min(s + _WINDOW, self.job.batches.steps[k])]
        self.rows[: len(rows)].copy_(rows)
        self.next.zero_()

    def following(self) -> None:
        """Make the next of the steps that are in place."""
        row = self.rows.index_select(0, self.next)[0]
        self.step(self.job.batches.step(row), self.mine)
        self.next += 1

    def advance(self, k: int, s: int) -> None:
        """Make the s-th step of the k-th client; steps come in order."""
        if s % _WINDOW == 0:
            self.window(k, s)
        self.replay()


class Program:
    """The captures of one architecture: the same step, in a slot for each stream."""

    def __init__(self) -> None:
        self.slots: dict[int, Slot] = {}
        self.full = False  # whether memory has no room for another slot

    def slot(self, place: int, group: Group, capture: Capture) -> Slot:
        """Return the slot of a place, with the clients of this round."""
        if place in self.slots:
            self.slots[place].attach(group)
        else:
            self.slots[place] = Slot(group, capture, warm_up=1 if self.slots else _WARM_UP)
        return self.slots[place]

    def close(self, group: Group) -> None:
        """Make no more slots, since memory is full: those that exist do all the work."""
        self.full = True
        name, count = type(group[0].model).__name__, len(self.slots)
        _log.warning("warning: memory holds %d graphs of %s: so many clients train side by side", count, name)


class KeptPrograms:
    """The programs of one model that were used last."""

    def __init__(self) -> None:
        self.programs: OrderedDict[tuple, Program] = OrderedDict()
        self.made = 0

    def program(self, group: Group) -> Program:
        """Return the program for exactly what this group does.

        A new one, without captures, if there was none lately.
        """
        key = _meaning(group)
        if key not in self.programs:
            stale = [other for other in self.programs if other[1] not in (key[1], id(None))]  # see `_meaning`
            if stale and group[0].per_sample is not None:
                _wait(group[0].device)  # such values can be large, and earlier ones are not used again
                for other in stale:
                    del self.programs[other]
            self.programs[key] = Program()
            self.made += 1
            if len(self.programs) > _PROGRAMS:
                _wait(group[0].device)  # a graph must not be freed while it runs
                self.programs.popitem(last=False)
            if self.made == _TOO_MANY:
                _log.warning(
                    "warning: %s is captured as a graph over and over, which takes longer than what it spares: make "
                    "objectives, ascents and data once, not again in each round, or use another --backend",
                    type(group[0].model).__name__,
                )
        self.programs.move_to_end(key)
        return self.programs[key]


_KEPT: WeakKeyDictionary[nn.Module, KeptPrograms] = WeakKeyDictionary()


def is_in_vain(models: Iterable[nn.Module]) -> bool:
    """Return whether a model was captured so often that graphs spare nothing."""
    return any(_KEPT[model].made >= _TOO_MANY for model in models if model in _KEPT)


def may_starve(group: Group) -> bool:
    """Return whether kernels of several streams may wait for each other for ever.

    A short trial need not show it. The kernels of cuDNN's batch norm for channels last keep the whole device busy until
    all their blocks have met.
    """
    job, _, _ = group
    norms = nn.modules.batchnorm._BatchNorm
    return job.precision.channels_last and any(isinstance(module, norms) for module in job.model.modules())


def _meaning(group: Group) -> tuple:
    """Return all that a capture contains: groups with the same share their graphs."""
    job, starts, context = group
    leaves, structure = tree_flatten(context)
    shapes = [(t.shape[1:], t.dtype) for t in (*starts.values(), *leaves)]
    settings = job.optimizer._replace(lr=0.0), job.precision, job.batches.size, job.batches.augment
    looks = _looks(job.model, {}), tuple(job.trainable()), tuple(starts), str(structure), tuple(shapes)
    return (id(job.data), id(job.per_sample), ref(job.objective), job.ascent and ref(job.ascent), settings, *looks)


class _Same:
    """An object by its identity, without keeping it.

    Once it is gone, no other object is taken for it.
    """

    def __init__(self, value: Any) -> None:
        self.id = id(value)
        try:
            self.get: Callable[[], Any] = ref(value)
        except TypeError:  # it has no weak references
            self.get = lambda: value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and (value := self.get()) is not None and value is other.get()

    def __hash__(self) -> int:
        return hash(self.id)


def _looks(value: Any, seen: dict[int, tuple[int, Any]]) -> Any:
    """Return what a step may read of a model, apart from the values of its tensors.

    It is hashable, and equal as long as none of this changes. The value may also be an object within the model.

    Args:
        seen: the number of each object so far, by identity, since they may contain one another; and the object, so that
            no later one gets its identity.
    """
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, torch.dtype, torch.device)):
        return type(value), repr(value)  # as text, nan is itself, and 1 is not True
    if isinstance(value, (dict, list, tuple, set)) and not value:
        return type(value)  # as most of what a module holds: the looks below take longer
    if id(value) in seen:
        return seen[id(value)][0]
    seen[id(value)] = len(seen), value
    if isinstance(value, torch.Tensor):
        return _Same(value), version_of(value)
    if isinstance(value, Mapping):
        return type(value), tuple((_looks(key, seen), _looks(item, seen)) for key, item in value.items())
    if isinstance(value, (list, tuple, set, frozenset, deque)):
        return type(value), tuple(_looks(item, seen) for item in value)
    if isinstance(value, nn.Module):  # its replicas are always in training mode
        attributes = {
            name: item for name, item in vars(value).items() if name not in ("training", "_parameters", "_buffers")
        }
        tensors = [*value._parameters.items(), *value._buffers.items()]
        shapes = [(name, t if t is None else (t.shape, t.dtype, t.requires_grad)) for name, t in tensors]
        return _Same(value), tuple(shapes), _looks(attributes, seen)
    if inspect.isroutine(value) or inspect.isclass(value) or inspect.ismodule(value):
        return _Same(value)
    if hasattr(value, "tobytes"):  # an array
        return _Same(value), value.tobytes()
    return _Same(value), _looks(object.__getstate__(value), seen)  # attributes and slots


def train(groups: Sequence[Group]) -> list[GroupResults]:
    """Train all groups, a client on each stream at a time. See `fl.engine.train`."""
    device = groups[0][0].device
    current = torch.cuda.current_stream(device)
    clients = sum(len(job.batches.steps) for job, _, _ in groups)
    streams = _streams(device, min(clients, _STREAMS))
    for stream in streams:
        stream.wait_stream(current)
    try:
        return _side_by_side(groups, [torch.cuda.stream(stream) for stream in streams], _capture)
    except BaseException:  # the next training of these models may need the memory
        _wait(device)
        for job, _, _ in groups:
            _KEPT.pop(job.model, None)
        raise
    finally:
        for stream in streams:
            current.wait_stream(stream)  # so that the round's memory can be reused, and its results be read


def _side_by_side(
    groups: Sequence[Group], places: Sequence[AbstractContextManager], capture: Capture
) -> list[GroupResults]:
    """Give every place the next client when one has finished; steps take turns."""
    results = [GroupResults.empty(group) for group in groups]
    programs = [_KEPT.setdefault(group[0].model, KeptPrograms()).program(group) for group in groups]
    queue = longest_first(groups)

    def work(place: int):
        while ready := [(g, k) for g, k in queue if place in programs[g].slots or not programs[g].full]:
            # Clients whose architecture this place has captured come first: so there are as few captures as possible.
            g, k = next((pair for pair in ready if place in programs[pair[0]].slots), ready[0])
            queue.remove((g, k))
            with places[place]:
                try:
                    slot = programs[g].slot(place, groups[g], capture)
                except torch.OutOfMemoryError:
                    if not programs[g].slots:
                        raise
                    programs[g].close(groups[g])
                    queue.insert(0, (g, k))
                    continue
                slot.load(k)
            for s in range(slot.job.batches.steps[k]):
                with places[place]:
                    slot.advance(k, s)
                yield
            with places[place]:
                slot.save(k, results[g])
            count(1)

    running = [work(place) for place in range(len(places))]
    try:
        while running:
            running = [worker for worker in running if next(worker, worker) is not worker]
    finally:
        for slot in (slot for program in programs for slot in program.slots.values()):
            slot.job = slot.starts = slot.context = None  # so that the round's tensors can be freed
    return results


_POOL: dict[torch.device, list[torch.cuda.Stream]] = {}


def _streams(device: torch.device, count: int) -> list[torch.cuda.Stream]:
    """Return the device's first streams, always the same: slots stay on theirs."""
    streams = _POOL.setdefault(device, [])
    streams += [torch.cuda.Stream(device) for _ in range(count - len(streams))]
    return streams[:count]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def _never_waiting() -> Iterator[None]:
    """Raise Refused for an operation that waits for the device."""
    before = torch.cuda.get_sync_debug_mode()
    try:
        with warnings.catch_warnings(action="ignore"):  # torch warns that it does not find every wait
            torch.cuda.set_sync_debug_mode("error")
        yield
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        raise Refused(f"a graph cannot wait for the device: {first_line(error)}; use --backend loop") from error
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _capture(step: Callable[[], None], warm_up: int) -> Callable[[], None]:
    """Return a function that replays the step; its inputs and outputs stay in place."""
    for _ in range(warm_up - 1):
        step()
    # After a failed capture torch 2.11 never gives some memory back. Most captures fail because the step waits for the
    # device, so this is tried before.
    with _never_waiting():
        step()
    torch.cuda.current_stream().synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            step()
    except RuntimeError as error:
        cause = error.__context__ or error  # torch raises once more when it leaves the capture
        if isinstance(cause, torch.OutOfMemoryError):
            raise cause from None
        if "captur" not in f"{error} {cause}":
            raise
        raise Refused(
            f"a step cannot be captured as a graph: {first_line(cause)}; use --backend loop or vmap"
        ) from error
    return graph.replay

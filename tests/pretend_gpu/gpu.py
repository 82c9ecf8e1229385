"""The device itself: patches that make torch believe in it, and the modes that see every operation."""

import sys
import time
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import torch
import torch.utils._device
from torch import Tensor, UntypedStorage
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from pretend_gpu import rules
from pretend_gpu.graphs import Recording
from pretend_gpu.rules import Forbidden, aten, tensors_of

DEVICE, HOST = torch.device("cuda", 0), torch.device("cpu")
ROOT = Path(__file__).parents[2]
_PACKAGES = tuple(str(ROOT / name) for name in ("fl", "surgery", "zoo"))
_CARRIER = "surgery/transfer.py"  # who asks for a transfer is meant, not who makes it
_Base = torch._C.TensorBase


@dataclass
class Seen:
    """What happened while somebody watched.

    Attributes:
        waits: where the host waited for the device: "fl/federation/divergence.py:30 drop_failed (item)".
        launches: kernels, copies and graphs that the host launched.
        inside: kernels within the graphs that it launched.
        captures: of graphs.
    """

    waits: list[str] = field(default_factory=list)
    launches: int = 0
    inside: int = 0
    captures: int = 0
    operations: dict[str, int] = field(default_factory=dict)


class PretendGPU:
    """A context in which there is a CUDA device, see `pretend_gpu`.

    Args:
        without: a number type that the device refuses, as Apple's refuse float64.
    """

    def __init__(self, without: torch.dtype | None = None) -> None:
        self.without = without
        self._memory: dict[int, weakref.ref] = {}  # the device's storages, by the address of their record
        self.total = Seen()
        self.recording: Recording | None = None
        self.waiting_is_an_error = False
        self._context: list[bool] = []  # whether the torch functions under way were given something on the device
        self._moving: tuple[bool, bool] | None = None  # a transfer's target and whether it waits
        self._unseen = False  # whether what is under way waits on the CPU alone
        self._watching: list[Seen] = [self.total]
        self._stack = ExitStack()

    def __enter__(self) -> "PretendGPU":
        enter = self._stack.enter_context
        torch.utils._device._device_constructors()  # which it caches: before torch.tensor is another for a while
        for name, value in self._tensor_methods().items():
            setattr(torch.Tensor, name, value)
            self._stack.callback(delattr, torch.Tensor, name)
        for target, name, value in self._patches():
            enter(patch.object(target, name, value))
        enter(_Functions(self))
        enter(_Operations(self))
        return self

    def __exit__(self, *error) -> None:
        self._stack.close()

    @contextmanager
    def watch(self) -> Iterator[Seen]:
        """Count what happens within."""
        self._watching.append(seen := Seen())
        try:
            yield seen
        finally:
            self._watching.remove(seen)

    # what torch asks

    def __contains__(self, tensor: Tensor) -> bool:
        return storage_of(tensor)._cdata in self._memory

    def add(self, storage: UntypedStorage) -> None:
        """Count a storage as the device's from now on."""
        key = storage._cdata
        self._memory.setdefault(key, weakref.ref(storage, lambda _: self._memory.pop(key, None)))

    def where(self, tensor: Tensor) -> torch.device:
        """The device of a tensor."""
        with torch._C.DisableTorchFunction():
            real = _Base.device.__get__(tensor)
        return DEVICE if real.type == "cpu" and tensor in self else real

    def _tensor_methods(self) -> dict:
        """What is put over torch.Tensor's own attributes."""
        to, tolist = _Base.to, _Base.tolist

        def move(tensor: Tensor, *args, **kwargs) -> Tensor:
            copy = kwargs.pop("copy", False)
            if args and isinstance(args[0], Tensor):
                device, dtype, waits, form = args[0].device, args[0].dtype, True, None
            else:
                device, dtype, non_blocking, form = torch._C._nn._parse_to(*args, **kwargs)
                waits = not non_blocking
            here, there = self.where(tensor), tensor.device if device is None else device
            more = {} if form is None else {"memory_format": form}
            if here.type == there.type:
                return to(tensor, dtype=dtype or tensor.dtype, copy=copy, **more)
            if there.type not in ("cpu", "cuda"):
                return to(tensor, there, dtype or tensor.dtype, **more)
            self._moving = there.type == "cuda", waits
            try:
                return to(tensor, dtype=dtype or tensor.dtype, copy=True, **more)
            finally:
                self._moving = None

        def listed(tensor: Tensor):
            if tensor in self:
                self.waited("tolist")
            with torch._C.DisableTorchFunction():
                return tolist(tensor)

        def array(tensor: Tensor, *args, **kwargs):
            if tensor in self:
                raise Forbidden("can't convert a cuda tensor to numpy: use Tensor.cpu() first")
            return _Base.numpy(tensor, *args, **kwargs)

        return {
            "device": property(self.where),
            "is_cuda": property(lambda tensor: self.where(tensor).type == "cuda"),
            "is_cpu": property(lambda tensor: self.where(tensor).type == "cpu"),
            "get_device": lambda tensor: 0 if self.where(tensor).type == "cuda" else -1,
            "to": move,
            "cpu": lambda tensor: move(tensor, "cpu"),
            "tolist": listed,
            "pin_memory": lambda tensor, *_: tensor,  # which has effects on speed alone
            "numpy": array,
        }

    def _patches(self) -> Iterator[tuple]:
        """(object, name, what stands in its place) of what else is asked about devices."""
        cuda, autocast, deepcopy = torch.cuda, torch.autocast, UntypedStorage.__deepcopy__
        hot = torch.nn.functional.one_hot

        def copied(storage: UntypedStorage, memo: dict) -> UntypedStorage:
            with torch.utils._python_dispatch._disable_current_modes():
                new = deepcopy(storage, memo)
            if storage._cdata in self._memory:
                self.add(new)
            return new

        class Cast(autocast):
            def __init__(self, device_type, *args, **kwargs) -> None:
                super().__init__("cpu", *args, **kwargs)

        gpu = self

        class Stream:
            """As torch.cuda.Stream; what is on it is done at once."""

            def __init__(self, device=None) -> None:
                pass

            def wait_stream(self, other: "Stream") -> None:
                pass

            def synchronize(self) -> None:
                gpu.waited("Stream.synchronize")

        class Event:
            """As torch.cuda.Event, which measures time."""

            def __init__(self, enable_timing=False) -> None:
                pass

            def record(self, stream=None) -> None:
                self.seconds = time.perf_counter()

            def synchronize(self) -> None:
                gpu.waited("Event.synchronize")

            def elapsed_time(self, end: "Event") -> float:
                return 1000 * (end.seconds - self.seconds)

        class CUDAGraph:
            """As torch.cuda.CUDAGraph."""

            def __init__(self) -> None:
                self.recording = Recording()

            def replay(self) -> None:
                gpu.replay(self.recording)

        @contextmanager
        def graph(captured: CUDAGraph, pool=None, stream=None, **_):
            gpu.recording = captured.recording
            for seen in gpu._watching:
                seen.captures += 1
            try:
                yield
            finally:
                gpu.recording = None

        def then_moved(make):
            def made(data, *, device=None, **kwargs) -> Tensor:
                values = make(data, **kwargs)
                return values if device is None else values.to(device)

            return made

        def one_hot(labels: Tensor, num_classes: int = -1) -> Tensor:
            self._unseen = num_classes != -1  # only on the CPU the range of the labels is looked at
            try:
                return hot(labels, num_classes)
            finally:
                self._unseen = False

        def debug(mode: int | str) -> None:
            self.waiting_is_an_error = mode in (2, "error")

        yield UntypedStorage, "__deepcopy__", copied
        yield torch, "tensor", then_moved(torch.tensor)
        yield torch, "as_tensor", then_moved(torch.as_tensor)
        yield torch.nn.functional, "one_hot", one_hot
        yield torch, "autocast", Cast
        yield cuda, "Stream", Stream
        yield cuda, "stream", lambda stream: nullcontext()
        yield cuda, "current_stream", Stream
        yield cuda, "Event", Event
        yield cuda, "CUDAGraph", CUDAGraph
        yield cuda, "graph", graph
        yield cuda, "synchronize", lambda device=None: self.waited("synchronize")
        yield cuda, "is_available", lambda: True
        yield cuda, "device_count", lambda: 1
        yield cuda, "is_initialized", lambda: True
        yield cuda, "_lazy_init", lambda: None
        yield cuda, "is_current_stream_capturing", lambda: self.recording is not None
        yield cuda, "set_sync_debug_mode", debug
        yield cuda, "get_sync_debug_mode", lambda: 2 * self.waiting_is_an_error
        properties = SimpleNamespace(name="pretended", major=9, minor=0, total_memory=80 * 2**30)
        yield cuda, "get_device_properties", lambda device=None: properties
        yield cuda, "get_rng_state", lambda device=None: torch.zeros(1, dtype=torch.uint8)

    # what happens

    def waited(self, what: str) -> None:
        """The host waits for the device."""
        if self.waiting_is_an_error:
            raise Forbidden(f"called a synchronizing CUDA operation: {what}, {_caller()}")
        if self.recording is not None:
            raise Forbidden(f"{what} while a graph is captured, which only records: {_caller()}")
        for seen in self._watching:
            seen.waits.append(f"{_caller()} ({what})")

    def operate(self, func, args, kwargs):
        """An operation of torch, on whichever device."""
        kwargs = dict(kwargs)
        asked = kwargs.get("device")
        if asked is not None and asked.type == "cuda":
            kwargs["device"] = HOST
        inputs = tensors_of((args, kwargs))
        here = [t in self for t in inputs]
        around = bool(self._context and self._context[-1]) or torch._C._current_graph_task_id() != -1  # in backward
        target = any(here) if inputs and asked is None else around
        if asked is not None and asked.type != "cpu":
            target = asked.type == "cuda"
        if func.overloadpacket is aten._to_copy and self._moving is not None:
            (target, waits), self._moving = self._moving, None
            if self.recording is not None:
                raise Forbidden(f"a transfer while a graph is captured: {_caller()}")
            if waits or not target:
                self.waited(f"copy to the {'device' if target else 'host'}")
        elif func.overloadpacket is aten.copy_ and here[0] != here[-1]:
            target = here[0]
            if not (kwargs.get("non_blocking") or (len(args) > 2 and args[2])) or not target:
                self.waited(f"copy to the {'device' if target else 'host'}")
        elif rules.check_devices(func, args, kwargs, inputs, here):
            self.waited(f"indices on the host for {func.overloadpacket.__name__}")
        elif target and not self._unseen and rules.waits(func, args, kwargs):
            self.waited(func.overloadpacket.__name__)
        written = _written(func, args, kwargs)
        result = func(*args, **kwargs)
        if target or any(here):
            self._account(func, args, kwargs, inputs, written, result, target)
        return result

    def _account(self, func, args, kwargs, inputs, written, result, target: bool) -> None:
        """Count it and mark its results."""
        results = tensors_of(result)
        known = {storage_of(t)._cdata for t in inputs}
        own = [t for t in results if storage_of(t)._cdata not in known and _Base.device.__get__(t).type == "cpu"]
        if target:
            if any(tensor.dtype is self.without for tensor in own):
                raise Forbidden(f"{func}: the device has no {self.without}, {_caller()}")
            for tensor in own:
                self.add(tensor.untyped_storage())
        count = rules.launches(func, args, kwargs, bool(own or written))
        if self.recording is not None:
            self.recording.launches += count
            if count or func._schema.is_mutable or own:
                numbers = [tensor for tensor in inputs if tensor not in self]
                self.recording.add(func, args, kwargs, results, own, numbers)
            return
        for seen in self._watching:
            seen.launches += count
            if count:
                seen.operations[str(func)] = seen.operations.get(str(func), 0) + count

    def replay(self, recording: Recording) -> None:
        """A graph is launched."""
        if self.recording is not None:
            raise Forbidden("a graph is replayed while another is captured")
        for seen in self._watching:
            seen.launches += 1
            seen.inside += recording.launches
        with torch.utils._python_dispatch._disable_current_modes(), torch._C.DisableTorchFunction():
            recording.replay()


class _Functions(TorchFunctionMode):
    """Notes whether what is under way works on the device: C++ makes new tensors where its arguments are."""

    def __init__(self, gpu: PretendGPU) -> None:
        super().__init__()
        self.gpu = gpu

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        asked = kwargs.get("device")
        here = any(t in self.gpu for t in tensors_of((args, kwargs)))
        self.gpu._context.append(here if asked is None else torch.device(asked).type == "cuda")
        try:
            return func(*args, **kwargs)
        finally:
            self.gpu._context.pop()


class _Operations(TorchDispatchMode):
    """Shows the device every operation."""

    def __init__(self, gpu: PretendGPU) -> None:
        super().__init__()
        self.gpu = gpu

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunction():
            return self.gpu.operate(func, args, kwargs or {})


def storage_of(tensor: Tensor) -> UntypedStorage:
    """The memory of a tensor, also of one that vmap has wrapped."""
    with torch._C.DisableTorchFunction():
        while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            tensor = torch._C._functorch.get_unwrapped(tensor)
        return tensor.untyped_storage()


def _written(func, args, kwargs) -> list[Tensor]:
    """The tensors that an operation writes into."""
    if not func._schema.is_mutable:
        return []
    found = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            found += tensors_of(value)
    return found


def _caller() -> str:
    """The innermost line of the packages under way."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.startswith(_PACKAGES) and not frame.f_code.co_filename.endswith(_CARRIER):
            path = Path(frame.f_code.co_filename).relative_to(ROOT)
            return f"{path}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return "a test"

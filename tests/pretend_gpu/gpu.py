"""The device itself: patches that make torch believe in it, and the modes that see every operation."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
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
from pretend_gpu.memory import Block, Memory, Streams, span, storage_of
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
    """A context in which there is a CUDA device, see `pretend_gpu`."""

    def __init__(self) -> None:
        self.streams, self.hazards = Streams(), []
        self.memory = Memory(self._freed)
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
        if self.hazards and error[0] is None:
            raise Forbidden(self.hazards[0])

    @contextmanager
    def watch(self) -> Iterator[Seen]:
        """Count what happens within."""
        self._watching.append(seen := Seen())
        try:
            yield seen
        finally:
            self._watching.remove(seen)

    # what torch asks

    def where(self, tensor: Tensor) -> torch.device:
        """The device of a tensor."""
        with torch._C.DisableTorchFunction():
            real = _Base.device.__get__(tensor)
        return DEVICE if real.type == "cpu" and tensor in self.memory else real

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
            if tensor in self.memory:
                self.waited("tolist")
            with torch._C.DisableTorchFunction():
                return tolist(tensor)

        def array(tensor: Tensor, *args, **kwargs):
            if tensor in self.memory:
                raise Forbidden("can't convert a cuda tensor to numpy: use Tensor.cpu() first")
            return _Base.numpy(tensor, *args, **kwargs)

        return {
            "device": property(self.where),
            "is_cuda": property(lambda tensor: self.where(tensor).type == "cuda"),
            "is_cpu": property(lambda tensor: self.where(tensor).type == "cpu"),
            "get_device": lambda tensor: 0 if self.where(tensor).type == "cuda" else -1,
            "to": move,
            "cpu": lambda tensor: move(tensor, "cpu"),
            "cuda": lambda tensor, *_, **__: move(tensor, "cuda"),
            "tolist": listed,
            "pin_memory": lambda tensor, *_: tensor,  # which has effects on speed alone
            "numpy": array,
        }

    def _patches(self) -> Iterator[tuple]:
        """(object, name, what stands in its place) of what else is asked about devices."""
        cuda, autocast, deepcopy = torch.cuda, torch.autocast, UntypedStorage.__deepcopy__
        tensor, as_tensor, hot = torch.tensor, torch.as_tensor, torch.nn.functional.one_hot

        def copied(storage: UntypedStorage, memo: dict) -> UntypedStorage:
            with torch.utils._python_dispatch._disable_current_modes():
                new = deepcopy(storage, memo)
            if storage._cdata in self.memory._blocks:
                self.memory.add(new, self.streams.current, False)
            return new

        class Cast(autocast):
            def __init__(self, device_type, *args, **kwargs) -> None:
                super().__init__("cpu", *args, **kwargs)

        gpu = self

        class Stream:
            """As torch.cuda.Stream."""

            def __init__(self, device=None, number: int | None = None) -> None:
                self.number = gpu.streams.new() if number is None else number

            def wait_stream(self, other: "Stream") -> None:
                gpu.streams.wait(self.number, other.number)

            def synchronize(self) -> None:
                gpu.waited("Stream.synchronize")
                gpu.streams.finish(self.number)

        class StreamContext:
            """As torch.cuda.StreamContext, which can be entered many times."""

            def __init__(self, chosen: Stream) -> None:
                self.number, self.before = chosen.number, []

            def __enter__(self) -> None:
                self.before.append(gpu.streams.current)
                gpu.streams.current = self.number

            def __exit__(self, *_) -> None:
                gpu.streams.current = self.before.pop()

        class CUDAGraph:
            """As torch.cuda.CUDAGraph."""

            def __init__(self) -> None:
                self.recording = Recording(gpu.memory)

            def replay(self) -> None:
                gpu.replay(self.recording)

            def pool(self):
                return id(self)

        @contextmanager
        def graph(captured: CUDAGraph, pool=None, stream=None, **_):
            before = gpu.streams.current
            gpu.streams.current = before if stream is None else stream.number
            gpu.recording = captured.recording
            for seen in gpu._watching:
                seen.captures += 1
            try:
                yield
            finally:
                gpu.recording, gpu.streams.current = None, before
                with torch.utils._python_dispatch._disable_current_modes():
                    captured.recording.close()

        def synchronize(device=None) -> None:
            self.waited("synchronize")
            self.streams.finish_all()

        def made(data, *, device=None, **kwargs) -> Tensor:
            values = tensor(data, **kwargs)
            return values if device is None else values.to(device)

        def made_as(data, *, device=None, **kwargs) -> Tensor:
            values = as_tensor(data, **kwargs)
            return values if device is None else values.to(device)

        def one_hot(labels: Tensor, num_classes: int = -1) -> Tensor:
            self._unseen = num_classes != -1  # only on the CPU the range of the labels is looked at
            try:
                return hot(labels, num_classes)
            finally:
                self._unseen = False

        def debug(mode: int | str) -> None:
            self.waiting_is_an_error = mode in (2, "error")

        yield UntypedStorage, "__deepcopy__", copied
        yield torch, "tensor", made
        yield torch, "as_tensor", made_as
        yield torch.nn.functional, "one_hot", one_hot
        yield torch, "autocast", Cast
        yield cuda, "Stream", Stream
        yield cuda, "stream", StreamContext
        yield cuda, "current_stream", lambda device=None: Stream(number=self.streams.current)
        yield cuda, "default_stream", lambda device=None: Stream(number=0)
        yield cuda, "CUDAGraph", CUDAGraph
        yield cuda, "graph", graph
        yield cuda, "synchronize", synchronize
        yield cuda, "is_available", lambda: True
        yield cuda, "device_count", lambda: 1
        yield cuda, "is_initialized", lambda: True
        yield cuda, "_lazy_init", lambda: None
        yield cuda, "is_current_stream_capturing", lambda: self.recording is not None
        yield cuda, "set_sync_debug_mode", debug
        yield cuda, "get_sync_debug_mode", lambda: 2 * self.waiting_is_an_error
        yield cuda, "get_device_name", lambda device=None: "a GPU that is not there"
        yield cuda, "get_device_properties", lambda device=None: SimpleNamespace(total_memory=80 * 2**30)
        yield cuda, "get_rng_state", lambda device=None: torch.zeros(1, dtype=torch.uint8)

    # what happens

    def waited(self, what: str) -> None:
        """The host waits until the current stream is done."""
        if self.waiting_is_an_error:
            raise Forbidden(f"called a synchronizing CUDA operation: {what}, {_caller()}")
        if self.recording is not None:
            raise Forbidden(f"{what} while a graph is captured, which only records: {_caller()}")
        for seen in self._watching:
            seen.waits.append(f"{_caller()} ({what})")
        self.streams.finish(self.streams.current)

    def operate(self, func, args, kwargs):
        """An operation of torch, on whichever device."""
        kwargs = dict(kwargs)
        asked = kwargs.get("device")
        if asked is not None and asked.type == "cuda":
            kwargs["device"] = HOST
        inputs = tensors_of((args, kwargs))
        here = [t in self.memory for t in inputs]
        around = bool(self._context and self._context[-1]) or self._in_backward()
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
        if self.recording is not None:
            for tensor in written:
                self.recording.protect(tensor.untyped_storage())
        result = func(*args, **kwargs)
        if target or any(here):
            self._account(func, args, kwargs, inputs, written, result, target)
        return result

    def _account(self, func, args, kwargs, inputs, written, result, target: bool) -> None:
        """Count it, mark its results, and see to the order of streams."""
        results = tensors_of(result)
        known = {storage_of(t)._cdata for t in inputs}
        own = [t for t in results if storage_of(t)._cdata not in known and _Base.device.__get__(t).type == "cpu"]
        if target:
            for tensor in own:
                self.memory.add(tensor.untyped_storage(), self.streams.current, self.recording is not None)
        count = rules.launches(func, args, kwargs, bool(own or written))
        if self.recording is not None:
            self.recording.launches += count
            if count or func._schema.is_mutable or own:
                self.recording.add(func, args, kwargs, results, own, {t.untyped_storage()._cdata for t in written})
            return
        for seen in self._watching:
            seen.launches += count
            if count:
                seen.operations[str(func)] = seen.operations.get(str(func), 0) + count
        if count and len(self.streams.made) > 1:
            changed = {id(t) for t in (*written, *own)}
            uses = ((self.memory.block(t), span(t), id(t) in changed) for t in (*inputs, *own))
            self.streams.use((use for use in uses if use[0] is not None), str(func))

    def replay(self, recording: Recording) -> None:
        """A graph is launched on the current stream."""
        if self.recording is not None:
            raise Forbidden("a graph is replayed while another is captured")
        for seen in self._watching:
            seen.launches += 1
            seen.inside += recording.launches
        uses = []
        for key, (storage, writes) in recording.outside.items():
            if storage() is None:
                raise Forbidden("a graph is replayed that reads or writes memory which is gone")
            if block := self.memory._blocks.get(key):
                uses.append((block, (0, storage().nbytes()), writes))
        self.streams.use(iter(uses), "replay")
        with torch.utils._python_dispatch._disable_current_modes(), torch._C.DisableTorchFunction():
            recording.replay()

    def _freed(self, block: Block) -> None:
        if (wrong := self.streams.check_free(block)) and wrong not in self.hazards:
            self.hazards.append(f"{wrong}: {_caller()}")

    @staticmethod
    def _in_backward() -> bool:
        return torch._C._current_graph_task_id() != -1


class _Functions(TorchFunctionMode):
    """Notes whether what is under way works on the device: C++ makes new tensors where its arguments are."""

    def __init__(self, gpu: PretendGPU) -> None:
        super().__init__()
        self.gpu = gpu

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        asked = kwargs.get("device")
        here = any(t in self.gpu.memory for t in tensors_of((args, kwargs)))
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

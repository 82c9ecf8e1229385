"""Facts about a model and a smaller (or deeper) version of it, as plain data."""

import math
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TextIO, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from surgery.decomposition import Layer, layers
from surgery.depth.graft import graft, ungraft
from surgery.depth.sections import sections
from surgery.errors import SurgeryError, first_line
from surgery.forward import in_mode, observed
from surgery.libraries import example_input
from surgery.memory import shortage
from surgery.names import is_inside
from surgery.plan import fingerprint
from surgery.states import shapes_of, state
from surgery.width.choose import Heads
from surgery.width.narrow import Width, narrow, widths

T = TypeVar("T")

_AGAIN = 0.5  # seconds until a step is told again to stop: Python drops what is raised in a destructor or a callback

Shapes = dict[str, tuple[int, ...]]  # by the tensor's own name: weight, bias


@dataclass(frozen=True)
class Size:
    """How large a model is. Plans of which it is the full model have this fingerprint."""

    parameters: int
    macs: int | None
    state_bytes: int
    fingerprint: str


@dataclass(frozen=True)
class Place:
    """A layer of one model: the name of its module and the shapes of its tensors."""

    name: str
    shapes: Shapes


@dataclass(frozen=True)
class Row:
    """A layer and its places: before, and after. It has none after if it was dropped, several if it was repeated."""

    kind: str
    section: str | None
    block: str | None
    before: Place
    after: tuple[Place, ...]

    def blocks_after(self) -> list[str]:
        """The names that its block, and copies of that block, have in the new model."""
        inside = len(self.before.name) - len(self.block)
        return [place.name[: len(place.name) - inside] for place in self.after]


@dataclass(frozen=True)
class Depth:
    """A section and its depth, before and after."""

    name: str
    kind: str
    blocks: tuple[str, ...]
    after: int


@dataclass(frozen=True)
class Report:
    """All facts about a model before and after.

    Attributes:
        after: None if nothing was changed.
        widths: those of the model after its depth was changed.
        problem: why widths or MACs are not known, or "".
        stopped: the steps that took too long, so that what they find is not in the report.
    """

    model: str
    kind: str
    input: tuple[int, ...]
    width: float | None
    heads: str | None
    before: Size
    after: Size | None
    sections: tuple[Depth, ...]
    layers: tuple[Row, ...]
    widths: tuple[Width, ...]
    problem: str
    stopped: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """The facts as plain data for JSON."""
        return {**asdict(self), "widths": [width._asdict() for width in self.widths]}


class Steps:
    """Runs steps, shows each on a stream, and stops those that take longer than a limit.

    On a terminal the step that runs is a line that the next one overwrites; elsewhere nothing is shown.

    Args:
        seconds: the limit of each step; None for no limit. It holds in the main thread of systems that have SIGALRM
            (not on Windows), and between operations: a single matrix product is not stopped.
        stream: where steps are shown; None for nowhere.

    Attributes:
        stopped: the names of the steps that took too long.

    >>> import time
    >>> steps = Steps(seconds=0.1)
    >>> steps("add", lambda: 1 + 1), steps("sleep", lambda: time.sleep(1)), steps.stopped
    (2, None, ['sleep'])
    """

    def __init__(self, seconds: float | None = None, stream: TextIO | None = None) -> None:
        self.seconds = seconds
        self.stopped: list[str] = []
        self._stream = stream if stream is not None and stream.isatty() else None

    def __call__(self, name: str, step: Callable[[], T]) -> T | None:
        """The result of the step; None if it is stopped for taking too long."""
        self._show(f"{name} ...")
        try:
            return _within(self.seconds, step)
        except _TooSlow:
            self.stopped.append(name)
            return None
        finally:
            self._show("")

    def _show(self, text: str) -> None:
        if self._stream:
            self._stream.write(f"\r\x1b[K{text}")
            self._stream.flush()


class _TooSlow(BaseException):
    """The step has taken too long. Like KeyboardInterrupt it is no Exception, so that no handler takes it for one."""


def _within(seconds: float | None, step: Callable[[], T]) -> T:
    """The result of the step; raises _TooSlow after so many seconds."""
    if seconds is None or not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        return step()

    def stop(number: int, frame: Any) -> None:
        raise _TooSlow

    before = signal.signal(signal.SIGALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds, _AGAIN)
        return step()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def inspect(
    model: nn.Module,
    width: float | None = None,
    depth: Sequence[int] | None = None,
    *,
    heads: Heads = "inside",
    shape: Sequence[int] | None = None,
    name: str = "",
    steps: Steps | None = None,
) -> Report:
    """Describe a model, and with a width or depths also what surgery makes of it.

    Args:
        width: a share for `surgery.narrow`, which is applied after the depths.
        depth: the number of blocks for each of the report's sections, which `graft` and `ungraft` bring about.
        heads: as for `surgery.narrow`.
        shape: of one input, without the batch; by default the one that the model was made for.
        steps: shows the steps and limits their time; by default they are not shown and take as long as they need.

    Raises:
        SurgeryError: for a width or depth that is not possible for the model.

    >>> block = lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    >>> net = nn.Sequential(nn.Linear(2, 4), block(), block(), nn.Linear(4, 2))
    >>> report = inspect(net, width=0.5, depth=[1], shape=[2])
    >>> report.before.parameters, report.after.parameters, report.before.macs, report.after.macs
    (102, 24, 80, 16)
    """
    example = example_input(model) if shape is None else _example(shape)
    steps = steps or Steps()
    problem, before = _measured(model, example, steps)
    if problem and width is not None:
        raise SurgeryError(f"{name or type(model).__name__} {problem}")
    found = sections(model, example=None if problem else example)
    places = {key: [key] for key in state(model)}
    changed = model
    if depth is not None:
        have, check = [len(section.blocks) for section in found], None if problem else example
        deep = steps("changing the depth", lambda: _at_depth(model, depth, have, check))
        changed, places = deep or (model, places)
    coupled: list[Width] | None = None
    as_asked = "changing the depth" not in steps.stopped
    if as_asked and not problem:
        try:
            coupled = steps("following the widths", lambda: widths(changed, example, width, heads=heads))
        except SurgeryError as error:
            problem = f"has widths that cannot be followed: {error}"
        if width is not None:
            small = steps("narrowing", lambda: narrow(changed, width, example, heads=heads))
            changed = small[0] if small else changed
    after = None
    if changed is not model:
        failed, after = _measured(changed, example, steps)
        problem = problem or failed
    depths = [len(section.blocks) for section in found] if depth is None or not as_asked else depth
    return Report(
        name or type(model).__name__,
        type(model).__name__,
        tuple(example.shape[1:]),
        width,
        None if width is None else heads,
        before,
        after,
        tuple(
            Depth(section.name, type(model.get_submodule(section.blocks[0])).__name__, section.blocks, depth)
            for section, depth in zip(found, depths)
        ),
        tuple(_rows(model, changed, found, places)),
        tuple(coupled or ()),
        problem,
        tuple(steps.stopped),
    )


def _example(shape: Sequence[int]) -> Tensor:
    """Two inputs of zeros. SurgeryError if they do not fit into memory, or torch cannot count their elements."""
    said = ",".join(map(str, shape))
    if reason := shortage(8 * math.prod(shape)):
        raise SurgeryError(f"an input of {said} {reason}: give a smaller one (--input)")
    try:
        return torch.zeros(2, *shape)
    except (RuntimeError, TypeError) as error:
        raise SurgeryError(f"there is no input of {said}: {first_line(error)}") from None


def count_macs(model: nn.Module, example: Tensor) -> int:
    """Multiply-accumulate operations of one forward pass in evaluation mode (torch.utils.flop_counter / 2).

    >>> count_macs(nn.Linear(3, 5), torch.zeros(1, 3))
    15
    """
    # Fused attention kernels would not be counted; with gradients enabled torch's own layers do not use them.
    counter = FlopCounterMode(display=False)
    with in_mode(model, training=False), sdpa_kernel(SDPBackend.MATH), torch.enable_grad(), counter:
        model(example)
    return counter.get_total_flops() // 2


def _measured(model: nn.Module, example: Tensor, steps: Steps) -> tuple[str, Size]:
    """(why the model does not run, or ""; its size)."""
    values = state(model)
    problem, macs = "", None
    try:  # on the meta device if possible, where nothing is computed
        seen = steps("counting operations", lambda: observed(model, example[:1], count_macs))
        macs = seen.found if seen else None
    except Exception as error:  # a forward pass may raise anything
        size, reason = "x".join(map(str, example.shape[1:])), first_line(error.__cause__ or error)
        problem = f"does not run on {size}: {reason}; give the shape of one input, without the batch (--input)"
    total = sum(tensor.numel() * tensor.element_size() for tensor in values.values())
    return problem, Size(sum(p.numel() for p in model.parameters()), macs, total, fingerprint(shapes_of(values)))


def _at_depth(
    model: nn.Module, depth: Sequence[int], have: Sequence[int], example: Tensor | None
) -> tuple[nn.Module, dict[str, list[str]]]:
    """The model with sections of these depths, and by its tensors' names what they are called there."""
    places: dict[str, list[str]] = {key: [key] for key in state(model)}
    changed: Any = model
    if len(depth) == len(have) and any(d > h for d, h in zip(depth, have)):
        changed, plan = graft(changed, depths=[max(d, h) for d, h in zip(depth, have)], example=example)
        places = {key: [s.name for name in names for s in plan.entries[name]] for key, names in places.items()}
    changed, plan = ungraft(changed, keep=depth, example=example)
    kept = {sources[0].name: name for name, sources in plan.entries.items()}
    return changed, {key: [kept[name] for name in names if name in kept] for key, names in places.items()}


def _rows(model: nn.Module, changed: nn.Module, found, places: Mapping[str, list[str]]):
    old, new = shapes_of(model), shapes_of(changed)
    home = {block: section.name for section in found for block in section.blocks}
    for layer in layers(model):
        block = next((b for b in home if is_inside(layer.name, b)), None)
        copies = zip(*(places[tensor] for tensor in layer.tensors))
        after = tuple(_place(layer, copy, new) for copy in copies)
        yield Row(layer.kind, home.get(block), block, _place(layer, layer.tensors, old), after)


def _place(layer: Layer, tensors: Sequence[str], shapes: Mapping[str, tuple[int, ...]]) -> Place:
    prefix = len(layer.name) + 1 if layer.name else 0
    suffix = len(layer.tensors[0]) - len(layer.name) if layer.name else None
    name = tensors[0][: len(tensors[0]) - suffix] if suffix is not None else ""
    return Place(name, {own[prefix:]: shapes[tensor] for own, tensor in zip(layer.tensors, tensors)})

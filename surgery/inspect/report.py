"""Facts about a model and a smaller (or deeper) version of it, as plain data."""

import math
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TextIO, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from surgery.attention import plain_attention
from surgery.decomposition import Layer, layers
from surgery.depth.graft import graft, ungraft
from surgery.depth.sections import Section, sections
from surgery.errors import SurgeryError, first_line
from surgery.forward import in_mode, observe
from surgery.libraries import example_input
from surgery.memory import shortage
from surgery.names import is_inside
from surgery.plan import fingerprint
from surgery.states import shapes_of, state
from surgery.width.choose import Heads
from surgery.width.narrow import Width, narrow, widths

T = TypeVar("T")
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class ModelSize:
    """The size of a model. Plans with it as the full model have this fingerprint."""

    parameters: int
    macs: int | None
    state_bytes: int
    fingerprint: str


@dataclass(frozen=True)
class LayerPlace:
    """A layer of one model: its module's name, and its tensors' shapes by own names."""

    name: str
    shapes: Shapes


@dataclass(frozen=True)
class LayerRow:
    """A layer and its places before and after: none if dropped, several if repeated."""

    kind: str
    section: str | None
    block: str | None
    before: LayerPlace
    after: tuple[LayerPlace, ...]

    @property
    def weight(self) -> str | None:
        """The tensor that shows what the layer is; None if it has none."""
        return next((name for name in ("weight", "in_proj_weight") if name in self.before.shapes), None)


@dataclass(frozen=True)
class Depth:
    """A section and its depth, before and after."""

    name: str
    kind: str
    blocks: tuple[str, ...]
    after: int

    def __str__(self) -> str:
        """Say the depth: `3 -> 2 blocks`, or `3 blocks` if it does not change."""
        old = len(self.blocks)
        return f"{old}{f' -> {self.after}' if self.after != old else ''} block{'s' * (not self.after == old == 1)}"


@dataclass(frozen=True)
class Report:
    """All facts about a model before and after.

    Attributes:
        after: None if nothing was changed.
        widths: the widths of the model after its depth was changed.
        problem: why widths or MACs are not known, or "".
        stopped: the steps that took too long, so that what they find is not in the report.
    """

    model: str
    kind: str
    input: tuple[int, ...]
    width: float | None
    heads: str | None
    before: ModelSize
    after: ModelSize | None
    sections: tuple[Depth, ...]
    layers: tuple[LayerRow, ...]
    widths: tuple[Width, ...]
    problem: str
    stopped: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return the facts as plain data for JSON."""
        return {**asdict(self), "widths": [width._asdict() for width in self.widths]}


class _TooSlow(BaseException):
    """A step that took too long; no Exception, so that no handler catches it."""


_AGAIN = 0.2
"""Seconds until a step is stopped again: Python drops what is raised where it deletes an object."""


class Steps:
    """Runs steps, shows each on a terminal, and stops those that exceed a limit.

    Args:
        seconds: the limit of each step, between operations; None for no limit, as on Windows and in other threads.
        stream: where steps are shown; None for nowhere.

    Attributes:
        stopped: the names of the steps that took too long.

    >>> import time
    >>> steps = Steps(seconds=0.1)
    >>> steps("add", lambda: 1 + 1), steps("sleep", lambda: time.sleep(1)), steps.stopped
    (2, None, ['sleep'])
    """

    def __init__(self, seconds: float | None = None, stream: TextIO | None = None) -> None:
        if seconds is not None and not 0 < seconds <= 10**6:
            raise SurgeryError(f"--seconds {seconds:g}: give more than 0, and at most 1,000,000", code="argument")
        alone = threading.current_thread() is threading.main_thread()  # no other one gets signals
        self.seconds = seconds if hasattr(signal, "setitimer") and alone else None
        self.stopped: list[str] = []
        self._stream = stream if stream is not None and stream.isatty() else None
        self._running = False

    def __call__(self, name: str, step: Callable[[], T]) -> T | None:
        """Return the result of the step; None if it is stopped for taking too long."""
        if self._stream:
            print(f"\r\x1b[K{name} ...", end="", file=self._stream, flush=True)
        try:
            if self.seconds is None:
                return step()
            signal.signal(signal.SIGALRM, self._stop)
            self._running = True
            signal.setitimer(signal.ITIMER_REAL, self.seconds, _AGAIN)
            try:
                return step()
            finally:
                self._running = False
        except _TooSlow:
            self.stopped.append(name)
            return None
        finally:
            if self.seconds is not None:
                signal.setitimer(signal.ITIMER_REAL, 0)
            if self._stream:
                print("\r\x1b[K", end="", file=self._stream, flush=True)

    def _stop(self, number: int, frame: Any) -> None:
        if self._running:
            raise _TooSlow


def report_of(
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
    >>> report = report_of(net, width=0.5, depth=[1], shape=[2])
    >>> report.before.parameters, report.after.parameters, report.before.macs, report.after.macs
    (102, 24, 80, 16)
    """
    example = example_input(model) if shape is None else _example(shape)
    steps = steps or Steps()
    problem, before = _measure(model, example, steps)
    if problem and width is not None:
        raise SurgeryError(f"{name or type(model).__name__} {problem}", code="run")
    runs_on = None if problem else example
    stacks = sections(model, example=runs_on)
    places = {key: [key] for key in state(model)}
    changed, depths = model, [len(s.blocks) for s in stacks]
    if depth is not None:
        deep = steps("changing the depth", lambda: _at_depth(model, depth, depths, runs_on))
        changed, places = deep or (model, places)
        depths = depths if deep is None else list(depth)
    coupled: list[Width] | None = None
    if not problem and not (depth is not None and changed is model):
        try:
            coupled = steps("following the widths", lambda: widths(changed, example, width, heads=heads))
        except SurgeryError as error:
            problem = f"has widths that cannot be followed: {error}"
        if width is not None:
            small = steps("narrowing", lambda: narrow(changed, width, example, heads=heads))
            changed = small[0] if small else changed
    failed, after = _measure(changed, example, steps) if changed is not model else ("", None)
    kinds = [type(model.get_submodule(s.blocks[0])).__name__ for s in stacks]
    return Report(
        name or type(model).__name__,
        type(model).__name__,
        tuple(example.shape[1:]),
        width,
        None if width is None else heads,
        before,
        after,
        tuple(Depth(s.name, kind, s.blocks, now) for s, kind, now in zip(stacks, kinds, depths)),
        tuple(_rows(model, changed, stacks, places)),
        tuple(coupled or ()),
        problem or failed,
        tuple(steps.stopped),
    )


def _example(shape: Sequence[int]) -> Tensor:
    """Make two inputs of zeros; SurgeryError if they do not fit into memory."""
    shape_text = ",".join(map(str, shape))
    if reason := shortage(8 * math.prod(shape)):
        raise SurgeryError(f"an input of {shape_text} {reason}: give a smaller one (--input)", code="argument")
    try:
        return torch.zeros(2, *shape)
    except (RuntimeError, TypeError) as error:
        raise SurgeryError(f"there is no input of {shape_text}: {first_line(error)}", code="argument") from None


def count_macs(model: nn.Module, example: Tensor) -> int:
    """Count multiply-accumulates of one forward pass in evaluation mode (FLOPs / 2).

    >>> count_macs(nn.Linear(3, 5), torch.zeros(1, 3))
    15
    """
    # Fused attention kernels would not be counted; with gradients enabled torch's own layers do not use them.
    counter = FlopCounterMode(display=False)
    with in_mode(model, training=False), plain_attention, torch.enable_grad(), counter:
        model(example)
    return counter.get_total_flops() // 2


def _measure(model: nn.Module, example: Tensor, steps: Steps) -> tuple[str, ModelSize]:
    """Return why the model does not run, or "", and its size."""
    values, problem, macs = state(model), "", None
    try:  # on the meta device if possible, where nothing is computed
        seen = steps("counting operations", lambda: observe(model, example[:1], count_macs))
        macs = seen.found if seen else None
    except Exception as error:  # a forward pass may raise anything
        size, reason = "x".join(map(str, example.shape[1:])), first_line(error.__cause__ or error)
        problem = f"does not run on {size}: {reason}; give the shape of one input, without the batch (--input)"
    total = sum(tensor.numel() * tensor.element_size() for tensor in values.values())
    return problem, ModelSize(sum(p.numel() for p in model.parameters()), macs, total, fingerprint(shapes_of(values)))


def _at_depth(
    model: nn.Module, depth: Sequence[int], have: Sequence[int], example: Tensor | None
) -> tuple[nn.Module, dict[str, list[str]]]:
    """Return the model with these depths, and the new names of its tensors."""
    places: dict[str, list[str]] = {key: [key] for key in state(model)}
    changed: Any = model
    if len(depth) == len(have) and any(d > h for d, h in zip(depth, have)):
        changed, plan = graft(changed, depths=[max(d, h) for d, h in zip(depth, have)], example=example)
        places = {key: [s.name for name in names for s in plan.entries[name]] for key, names in places.items()}
    changed, plan = ungraft(changed, keep=depth, example=example)
    small_names = {sources[0].name: name for name, sources in plan.entries.items()}
    return changed, {key: [small_names[name] for name in names if name in small_names] for key, names in places.items()}


def _rows(
    model: nn.Module, changed: nn.Module, all_sections: Sequence[Section], places: Mapping[str, Sequence[str]]
) -> Iterator[LayerRow]:
    old, new = shapes_of(model), shapes_of(changed)
    home = {block: section.name for section in all_sections for block in section.blocks}
    for layer in layers(model):
        block = next((b for b in home if is_inside(layer.name, b)), None)
        after = tuple(_place(layer, copy, new) for copy in zip(*(places[tensor] for tensor in layer.tensors)))
        yield LayerRow(
            layer.kind, None if block is None else home[block], block, _place(layer, layer.tensors, old), after
        )


def _place(layer: Layer, tensors: Sequence[str], shapes: Shapes) -> LayerPlace:
    suffixes = [tensor[len(layer.name) :].removeprefix(".") for tensor in layer.tensors]
    name = tensors[0].removesuffix(suffixes[0]).removesuffix(".")
    return LayerPlace(name, {suffix: shapes[tensor] for suffix, tensor in zip(suffixes, tensors)})

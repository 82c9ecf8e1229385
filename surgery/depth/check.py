"""Check that a model of another depth runs as its sections say, also with a cache."""

import inspect
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from surgery.copying import clone
from surgery.depth.sections import Section
from surgery.errors import SurgeryError, first_line
from surgery.forward import arguments, in_mode, observe, tensors_in
from surgery.names import is_inside


class Pass(NamedTuple):
    """A record of a forward pass.

    Attributes:
        shapes: of the outputs.
        calls: how often each module with tensors of its own ran, by name.
        skips: of each use of a block's output after a later block of its section has run (skip connections, as of a
            U-Net), the block and how many blocks of each section had run.
        computed: whether numbers were computed: these may decide how many of something (boxes) there are.
    """

    shapes: list[tuple[int, ...]]
    calls: Counter
    skips: set[tuple[str, tuple[int, ...]]]
    computed: bool


class _Skips(TorchFunctionMode):
    """Notes `Pass.skips`."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[tuple[str, tuple[int, ...]]] = set()
        self._runs: Counter[Section] = Counter()
        self._outputs: dict[int, tuple[Tensor, Section, str, int]] = {}  # by id, with block and number of its run

    def note(self, section: Section, block: str, output: Any) -> None:
        self._runs[section] += 1
        self._outputs |= {id(tensor): (tensor, section, block, self._runs[section]) for tensor in tensors_in(output)}

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        results = tensors_in(result) if self._outputs else []  # a shape or a device is no use
        for tensor in tensors_in((args, kwargs)) if results else ():
            if held := self._outputs.get(id(tensor)):
                _, section, block, run = held
                if self._runs[section] > run:  # the first use is by the next block, or by what follows
                    self.found.add((block, tuple(self._runs.values())))
                if function.__name__ in _SAME:
                    self._outputs |= {id(part): (part, section, block, run) for part in results}
        return result


_SAME = ("clone", "contiguous", "detach", "reshape", "view")  # functions whose results stand for what they take


def watch_run(model: nn.Module, example: Any, skipping: Iterable[Section] = ()) -> Pass:
    """Run a model once in evaluation mode without a cache, on the meta device if able.

    Args:
        skipping: the sections whose skip connections are noted.
    """
    place = {block: section for section in skipping for block in section.blocks}

    def watch(copy: nn.Module, inputs: Any) -> Pass:
        calls, skips = Counter(), _Skips()

        for name, module in copy.named_modules():
            # Activations are left out: blocks may share one, which then has the name of the first.
            if (module._parameters or module._buffers) and not any(module.children()):
                module.register_forward_hook(lambda *_, name=name: calls.update([name]))
            if name in place:
                module.register_forward_hook(lambda _, args, out, name=name: skips.note(place[name], name, out))
        args, kwargs = without_cache(copy, inputs)
        with in_mode(copy, training=False), skips:
            outputs = tensors_in(copy(*args, **kwargs))
        computed = not all(tensor.is_meta for tensor in outputs)
        return Pass([tuple(tensor.shape) for tensor in outputs], calls, skips.found, computed)

    return observe(model, example, watch).found


def check_depth(before: Pass, after: Pass, origins: Mapping[Section, Sequence[int]]) -> None:
    """Check that the forward pass calls the new blocks and no dropped ones.

    Args:
        before, after: how the model, and the deeper or shallower one, ran.
        origins: by section that changes, the block that each of its new blocks is or repeats, by position.

    Raises:
        SurgeryError: if another number of modules is called than the changes imply, or if the output changes its shape.
    """
    expected = before.calls.total()
    for section, places in origins.items():
        for position, block in enumerate(section.blocks):
            more = list(places).count(position) - 1
            expected += more * sum(n for name, n in before.calls.items() if is_inside(name, block))
    if after.calls.total() != expected:
        raise SurgeryError(
            f"{after.calls.total()} modules run where {expected} were expected: the forward pass depends on the number "
            f"of blocks of {', '.join(repr(section.name) for section in origins)}; leave them as they are",
            code="depth",
        )
    free = 1 if before.computed else 0  # the first axis of a detector's outputs is a number of boxes
    if [shape[free:] for shape in after.shapes] != [shape[free:] for shape in before.shapes]:
        raise SurgeryError(f"the output would be {after.shapes}, not {before.shapes}: keep the depths", code="depth")


def check_skips(before: Pass, after: Pass) -> None:
    """Raise SurgeryError if skip connections lead to other blocks, as through a list."""
    if before.skips != after.skips:
        block = min(before.skips ^ after.skips)[0]
        raise SurgeryError(f"a skip connection from {block!r} would lead elsewhere: keep the depths", code="depth")


_TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-4}  # half precision: 0.05
_TOKENS = ("decoder_input_ids", "decoder_inputs_embeds", "input_ids", "inputs_embeds")


def without_cache(model: nn.Module, example: Any) -> tuple[tuple, dict[str, Any]]:
    """Return a call's arguments for an example such that the model keeps no cache."""
    args, kwargs = arguments(example)
    return args, {**kwargs, "use_cache": False} if "use_cache" in _parameters(model)[len(args) :] else kwargs


def check_cached(before: nn.Module, after: nn.Module, example: Any) -> None:
    """Check that `after` gives equal outputs with and without cache, if `before` does.

    The outputs of one pass are compared with a pass with `use_cache=True`, and with a pass over all tokens but the last
    and another that continues from its cache. Nothing is done for models whose forward does not take
    `use_cache`, nor on the meta device, where nothing has a value.

    Raises:
        SurgeryError: if outputs differ: two blocks share a slot of the cache, or a block has none.
    """
    tensors = (*after.parameters(), *tensors_in(arguments(example)))
    if "use_cache" not in _parameters(after) or any(tensor.is_meta for tensor in tensors):
        return
    why = _difference(after, example)
    if why and not _difference(before, example):
        raise SurgeryError(
            f"{type(after).__name__} would {why}: its blocks have to find their slots in the cache; give each "
            "block its number as an integer attribute (layer_idx), or leave the sections as they are",
            code="depth",
        )


def _difference(model: nn.Module, example: Any) -> str:
    """Return how outputs with and without the cache differ; "" if they do not."""
    try:
        model = clone(model)
        with in_mode(model, training=False):
            args, kwargs = arguments(example)
            takes = _parameters(model)
            named = {**dict(zip(takes, args)), **kwargs}
            expected = _outputs(model(**{**named, "use_cache": False}))
            if far := _distance(_outputs(model(**{**named, "use_cache": True})), expected):
                return f"give other outputs with use_cache=True, by {far:.2g}"
            begin, rest = _split(named)
            first = _outputs(model(**{**begin, "use_cache": True})) if begin else {}
            carried = {key: value for key, value in first.items() if key in takes and key not in named}
            if carried and (far := _distance(_outputs(model(**{**rest, **carried, "use_cache": True})), expected)):
                return f"give other outputs when it goes on from its cache, by {far:.2g}"
    except SurgeryError:
        raise
    except Exception as error:  # a forward pass may raise anything
        return f"not run with its cache ({first_line(error)})"
    return ""


def _parameters(model: nn.Module) -> list[str]:
    """Return the parameters' names of a model's forward; none if they cannot be read."""
    try:
        return list(inspect.signature(model.forward).parameters)
    except (TypeError, ValueError):
        return []


def _split(named: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return arguments for all tokens but the last, and for the last; {} if not known."""
    tokens = next((name for name in _TOKENS if isinstance(named.get(name), Tensor)), None)
    if tokens is None or named[tokens].ndim < 2 or named[tokens].shape[1] < 2:
        return {}, {}
    shape, decoder = named[tokens].shape[:2], tokens.startswith("decoder_")
    along = {
        key: value
        for key, value in named.items()
        if isinstance(value, Tensor) and value.shape[:2] == shape and key.startswith("decoder_") == decoder
    }
    rest = {key: value[:, -1:] for key, value in along.items() if not key.endswith("mask")}
    return {**named, **{key: value[:, :-1] for key, value in along.items()}}, {**named, **rest}


def _outputs(output: Any) -> dict[str, Any]:
    """Return outputs by name: fields of a mapping or an object, otherwise by position."""
    if isinstance(output, Mapping):
        return dict(output)
    if isinstance(output, tuple):
        return output._asdict() if hasattr(output, "_asdict") else {str(i): value for i, value in enumerate(output)}
    return {"0": output} if isinstance(output, Tensor) else dict(vars(output))


def _distance(outputs: Mapping[str, Any], expected: Mapping[str, Any]) -> float:
    """Return the largest difference of outputs of one name, or 0 within rounding."""
    largest = 0.0
    for key, value in outputs.items():
        other = expected.get(key)
        if not isinstance(value, Tensor) or not isinstance(other, Tensor) or not value.is_floating_point():
            continue
        if value.ndim > 1 and value.shape[1] == 1:
            other = other[:, -1:]
        if value.shape == other.shape:
            far = float((value - other).abs().max())
            close = _TOLERANCE.get(value.dtype, 0.05) * (1 + float(other.abs().max()))
            largest = max(largest, 0.0 if far <= close else far if far == far else float("inf"))
    return largest

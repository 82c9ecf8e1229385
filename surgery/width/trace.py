"""Follow the axes of every tensor through every operation of a forward pass.

`Trace` watches aten operations. There are few of them, so a small number of rules (in `surgery.width.rules`) covers
attention, windows, channel shuffles, grouped convolutions and the like. If an operation has no rule, nothing is assumed
about it: all axes that it touches must keep their sizes.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from surgery.attention import plain_attention
from surgery.copying import clone
from surgery.errors import InternalError, SurgeryError, explain, first_line
from surgery.forward import (
    Observed,
    call,
    copy_tensors,
    ghost_of,
    in_mode,
    named_tensors,
    observe,
    tensors_in,
    watching,
)
from surgery.torch_private import Operations, Watch, tree_leaves, tree_map
from surgery.width import axes
from surgery.width.axes import Axes, Axis, ReasonKind, Why, lost
from surgery.width.by_tensor import ByTensor
from surgery.width.provenance import Tracked, Tracking, find_tracked, plain, remember
from surgery.width.reads import Read, read
from surgery.width.rules.registry import (
    Rule,
    RuleError,
    RuleResult,
    View,
    is_step,
    operation_name,
    rule_for,
    way_to_teach,
)
from surgery.width.steps import Step, bind, scalars_of
from surgery.width.wrapped import Wrapped

_FOREIGN = "a tensor that the model does not hold lies along it: register this tensor as a buffer of its module"
_LEAVES = {"numpy", "tolist", "__array__", "__dlpack__", "storage", "untyped_storage", "apply_", "map_"}
_log = logging.getLogger(__name__)


class Trace:
    """The axes of a model's tensors, as forward passes show them.

    Attributes:
        modes: for each forward pass, whether it was in training mode.
        tensors: the axes of each tensor by (module name, attribute name): parameters, buffers and plain attributes.
        parameters: the keys in `tensors` of the parameters.
        steps: the operations, in order.
        lengths: the number of steps of each forward pass.
        outputs, returned: for each forward pass, the axes of the output's tensors, and where these tensors came from.
        unused: the keys in `tensors` of tensors that no operation used, if they have more than one element.
        untrained: why training mode was not traced although the model computes something else there; or "".
        summed: for each result of a matrix product the axis that the product sums over.
        made: (module, axis) for each axis along which a layer with weights makes features.
        ordered: (axis, why) for each axis whose kept positions must be 0, 1, 2, ... without a gap.
        foreign: (axis, why) for each axis of a tensor that the model does not hold; its positions keep their order.
        constants: (copy, its axes, the results' axes) for each tensor that was computed from neither parameters nor the
            input, each time that an operation combined it with parameters or with data.
        written: axes of the results of reshapes that leave one size open (-1): the axes with a size in the call.
        reads: the operations that used numbers of the model's attributes.
        tracking: numbers that remember their attributes, and what the code compared these numbers with.
        wrapped: the numbers that the code puts into tensors.
        filled: the modules that computed elements from the example.
        empty: the axes of results without elements, by module.
    """

    untrained = ""

    def __init__(
        self,
        model: nn.Module,
        example: Any,
        modes: tuple[bool, ...] = (False,),
        output: Callable[[Any], Any] | None = None,
        track: bool = False,
    ):
        self.output = output
        self.tracking = Tracking()
        if track:
            remember(model, self.tracking)
        self.reads: list[Read[Axis]] = []
        self.wrapped = Wrapped()
        self._axes = ByTensor[Axes]()
        self._is_learned = ByTensor[bool]()  # parameters, and tensors computed only from parameters and constants
        self._is_data = ByTensor[bool]()  # the example, and tensors computed from it
        self.summed = ByTensor[Axis]()
        self.made: list[tuple[str, Axis]] = []
        self.ordered: list[tuple[Axis, str]] = []
        self.foreign: list[tuple[Axis, str]] = []
        self.constants: list[tuple[Tensor, Axes, list[Axes]]] = []
        self._is_constant = ByTensor[bool]()  # tensors computed from neither parameters nor the example
        self._is_foreign = ByTensor[bool]()  # constants of the code, and tensors computed only from such
        self.written: list[Axis] = []
        self.filled: set[str] = set()
        self.empty: dict[str, list[Axis]] = {}
        # for each tensor the axes that keep their size if an operation uses the tensor, and why
        self._fixed_if_used = ByTensor[Sequence[tuple[Axis, Why]]]()
        self.modes: tuple[bool, ...] = ()
        self.tensors: dict[tuple[str, str], Axes] = {}
        self.parameters: set[tuple[str, str]] = set()
        self.steps: list[Step[Axis]] = []
        named = list(named_tensors(model))
        for key, tensor in named:
            self.tensors[key] = self.axes_of(tensor)
            if isinstance(tensor, nn.Parameter):
                self.parameters.add(key)
                self.mark_learned([tensor])
        self.mark_data(tensors_in(example))
        for tensor in tensors_in(example):
            for axis in self.axes_of(tensor):
                axes.fix(axis, Why(ReasonKind.INPUT, "it is an axis of the input"))
        self.outputs: list[list[Axes]] = []
        self.returned: list[list[Any]] = []
        self.lengths: list[int] = []
        self._origins = Origins(named)
        self.touched: set[int] = set()
        for training in modes:
            self.follow(model, example, training)

    def follow(self, model: nn.Module, example: Any, training: bool) -> None:
        """Follow one more forward pass of the model on the example."""
        self.tracking.is_open = True
        with (
            in_mode(model, training),
            watching(model) as where,
            _Calls(self),
            _Follow(self, where, self._origins),
        ):
            result = call(model, example)
        fixed = self._fixed_outputs(model, result)
        self.modes += (training,)
        self.lengths.append(len(self.steps) - sum(self.lengths))
        self.mark_used([*tensors_in(result), *fixed])
        self.outputs.append([self.axes_of(tensor) for tensor in tensors_in(result)])
        self.returned.append(self._origins.of(tensors_in(result)))
        for axis in (axis for tensor in fixed for axis in self.axes_of(tensor)):
            axes.fix(axis, Why(ReasonKind.OUTPUT, "it is an axis of the output"))
        self.tracking.is_open = False
        candidates = {key: tensor for key, tensor in named_tensors(model) if tensor.numel() > 1}
        self.unused = [key for key, tensor in candidates.items() if id(tensor) not in self.touched]

    def _fixed_outputs(self, model: nn.Module, result: Any) -> list[Tensor]:
        """Return the tensors of a model's result that must keep their shapes.

        All of them, or the tensors that `output` returns or computes with.
        """
        if self.output:
            with _Dependencies(self._axes, tensors_in(result)) as computed:
                with explain("`output` fails on what the model returns"):
                    picked = self.output(result)
                tensors = computed.sources(tensors_in(picked))
        else:
            tensors = tensors_in(result)
        if not tensors:
            source = "`output` gives" if self.output else f"{type(model).__name__} returned"
            raise SurgeryError(f"{source} no tensor, so the shape of its output is not known", code="argument")
        return tensors

    def axes_of(self, tensor: Tensor) -> Axes:
        """Return the axes of a tensor; new axes if the tensor was not seen before."""
        known = self._axes.get(tensor)
        if known is None:
            known = self._axes[tensor] = tuple(map(Axis, tensor.shape))
        return known

    def mark_inputs(self, tensors: Iterable[Tensor]) -> None:
        """Note that an operation takes these tensors.

        Tensors without known axes are constants of the code.
        """
        tensors = list(tensors)
        self.mark_used(tensors)
        for tensor in tensors:
            if tensor not in self._axes:
                self._is_constant[tensor] = self._is_foreign[tensor] = True
                self.foreign += [(axis, _FOREIGN) for axis in self.axes_of(tensor)]

    def keep_order(self, tensors: Iterable[Tensor], why: str) -> None:
        """Note that the order of positions matters along all axes of these tensors."""
        self.ordered += [(axis, why) for tensor in tensors for axis in self.axes_of(tensor)]

    def mark_used(self, tensors: Iterable[Tensor]) -> None:
        """Note that an operation uses the numbers in these tensors."""
        for tensor in tensors if self._fixed_if_used else ():
            for axis, why in self._fixed_if_used.pop(tensor, ()):
                axes.fix(axis, why)

    def fix_if_used(self, tensors: Iterable[Tensor], reasons: Sequence[tuple[Axis, Why]]) -> None:
        """Note which axes keep their size if an operation uses these tensors' numbers."""
        if reasons:
            self._fixed_if_used.update(dict.fromkeys(tensors, reasons))

    def is_learned(self, tensor: Tensor) -> bool:
        """Return whether a tensor is a parameter, or computed from these and constants."""
        return tensor in self._is_learned

    def mark_learned(self, tensors: Iterable[Tensor]) -> None:
        """Note that tensors are parameters, or computed from these and constants."""
        for tensor in tensors:
            self._is_learned[tensor] = True

    def mark_data(self, tensors: Iterable[Tensor]) -> None:
        """Note that these tensors are the example, or were computed from it."""
        for tensor in tensors:
            self._is_data[tensor] = True

    def mark_results(self, outputs: Iterable[Tensor], inputs: Sequence[Tensor]) -> None:
        """Note that the outputs were computed from the inputs."""
        foreign = [tensor for tensor in inputs if tensor in self._is_foreign] if self._is_foreign else []
        data, learned = (any(tensor in of for tensor in inputs) for of in (self._is_data, self._is_learned))
        if data or learned:
            self._unmark_constants(outputs, inputs)
            result_axes = [self.axes_of(tensor) for tensor in outputs]
            constants = [tensor for tensor in inputs if tensor in self._is_constant] if self._is_constant else []
            self.constants += [(tensor.detach().clone(), self.axes_of(tensor), result_axes) for tensor in constants]
            for tensor in foreign:  # along an expanded axis (stride 0) all positions are equal
                strides = tensor.stride() if tensor.layout is torch.strided else [1] * tensor.ndim
                self.ordered += [(axis, _FOREIGN) for axis, stride in zip(self.axes_of(tensor), strides) if stride]
            self.mark_data(outputs) if data else self.mark_learned(outputs)
        else:
            self._is_foreign.update(dict.fromkeys(outputs, True) if foreign else {})
            self._is_constant.update(dict.fromkeys(outputs, True))

    def mark_filled(self, module: str, outputs: Iterable[Tensor]) -> None:
        """Note whether a module's results from the example have elements."""
        for tensor in outputs:
            if tensor in self._is_data and tensor.numel():
                self.filled.add(module)
            elif tensor in self._is_data:
                self.empty.setdefault(module, []).extend(self.axes_of(tensor))

    def _unmark_constants(self, outputs: Iterable[Tensor], inputs: Sequence[Tensor]) -> None:
        """Note that tensors in memory that was changed in place are no constants any more."""
        changed = {_memory(tensor) for tensor in outputs if any(tensor is old for old in inputs)}
        for tensor in [constant for constant in self._is_constant if _memory(constant) in changed] if changed else ():
            del self._is_constant[tensor]

    def assign(self, tensor: Tensor, new_axes: Sequence[Axis], replace: bool = False) -> None:
        """Set the axes of a result.

        A result that has axes already was changed in place: its old axes and the new ones are the same, unless the
        operation replaces them.

        Raises:
            InternalError: if the sizes of the new axes are not the tensor's shape.
        """
        if tuple(axis.size for axis in new_axes) != tuple(tensor.shape):
            raise InternalError(f"a result of shape {tuple(tensor.shape)} gets axes {list(new_axes)}")
        if tensor in self._axes and not replace:
            for old, new in zip(self._axes[tensor], new_axes):
                axes.unify(old, new)
        else:
            self._axes[tensor] = tuple(new_axes)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)


class Origins:
    """The origin of each tensor: (module, attribute), or (step, number of the output)."""

    def __init__(self, named: Iterable[tuple[tuple[str, str], Tensor]]):
        self._of = ByTensor[Any]()
        for key, tensor in named:
            self._of.setdefault(tensor, key)

    def of(self, tensors: list[Tensor]) -> list[Any]:
        """Return the origin of each tensor; None for inputs of the model."""
        return [self._of.get(tensor) for tensor in tensors]

    def note_passed(self, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        """Note that outputs hold the first input's values, perhaps in another layout."""
        for tensor in outputs if inputs else ():
            self._of[tensor] = self._of.get(inputs[0])

    def note_made(self, step: int, outputs: list[Tensor]) -> None:
        """Note that the outputs were computed by this step."""
        for position, tensor in enumerate(outputs):
            self._of[tensor] = (step, position)


class _Dependencies(TorchFunctionMode):
    """Notes from which tensors of the forward pass other tensors are computed."""

    def __init__(self, known: Mapping[Tensor, Any], returned: Iterable[Tensor]):
        super().__init__()
        self._known, self._of = known, ByTensor[list[Tensor]]()
        self._of.update({tensor: [tensor] for tensor in returned})

    def __torch_function__(self, func, types, args=(), kwargs=None):
        sources = self._sources(tensors_in((args, kwargs)))
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_in(result):
            self._of[tensor] = sources
        return result

    def _sources(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        sources = (source for t in tensors for source in self._of.get(t, [t] if t in self._known else []))
        return list({id(source): source for source in sources}.values())

    def sources(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return the tensors of the forward pass from which these tensors were computed.

        Raises:
            SurgeryError: if a tensor was computed from no tensor of the forward pass.
        """
        if not all(self._sources([tensor]) for tensor in tensors):
            raise SurgeryError(
                "`output` gives a tensor that torch did not compute from the model's result, so it is not known "
                "which tensors must keep their shapes: let it pick tensors only, as `lambda result: result.logits`",
                code="argument",
            )
        return self._sources(tensors)


class _Calls(TorchFunctionMode):
    """Notes tensors that code reads as numbers, and numbers of attributes in calls."""

    def __init__(self, trace: Trace):
        super().__init__()
        self.trace = trace

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        if name in _LEAVES and (leaving := tensors_in(args)):
            self.trace.keep_order(leaving, f"its numbers leave torch ({name}), and their order may matter there")
            self.trace.mark_used(leaving)
        first = len(self.trace.steps)
        result = func(*args, **(kwargs or {}))
        wrapped = self.trace.wrapped.create(func, args, kwargs or {}, result)
        for number in find_tracked((args, kwargs or {}), self.trace.tracking):
            if number is wrapped:  # an operation that takes the tensor reads the number
                continue
            steps = dict(enumerate(self.trace.steps[first:], first))
            self.trace.reads.append(
                read(number, (*args, *(kwargs or {}).values()), tensors_in(result), steps, self.trace.axes_of)
            )
        return result


class _Follow(Operations):
    """Notes what each operation does to axes."""

    def __init__(self, trace: Trace, where: list[str], origins: Origins):
        super().__init__()
        self.trace, self.where, self.origins = trace, where, origins
        self.random, self.seeded = torch.get_rng_state(), False  # the state after the last random operation

    def draws_from_seed(self, generator: torch.Generator | None) -> bool:
        """Return whether a call samples from the code's generator or a seeded default."""
        self.seeded |= not torch.equal(torch.get_rng_state(), self.random)
        return self.seeded or generator is not None

    def run(self, func, args, kwargs):
        trace = self.trace
        inputs = tensors_in((args, kwargs))
        trace.mark_inputs(inputs)
        axes_before = [trace.axes_of(tensor) for tensor in inputs]
        bound, rule = bind(func, args, kwargs), rule_for(func)
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        is_seeded = is_random and self.draws_from_seed(bound.get("generator"))
        result = self.result(func, args, kwargs)
        if is_random:
            self.random = torch.get_rng_state()
        outputs = tensors_in(result)
        trace.touched.update(map(id, inputs))
        try:
            rule_result = (
                _apply_rule(trace, rule, bound, result, outputs) if rule else _fix_all(func, axes_before, outputs)
            )
            for tensor, result_axes in zip(outputs, rule_result.axes):
                trace.assign(tensor, result_axes, replace=torch.Tag.inplace_view in func.tags)
        except RuleError:
            raise
        except (InternalError, LookupError, TypeError, ValueError, AttributeError) as error:
            raise InternalError(f"{_describe_rule(func, rule)} is wrong: {first_line(error)}") from error
        trace.made += [(self.where[-1], axis) for axis in rule_result.features]
        trace.ordered += [(axis, rule_result.order) for axis in rule_result.prefix_only]
        if is_seeded:
            trace.keep_order(outputs, "random numbers of a seed lie along it, in their order")
        trace.written += rule_result.explicit
        trace.fix_if_used(outputs[-1:], rule_result.fixed_when_read)
        if rule_result.is_weight:
            trace.mark_learned(outputs)
        else:
            trace.mark_results(outputs, inputs)
        trace.mark_filled(self.where[-1], outputs)
        summed = [trace.summed[tensor] for tensor in inputs if tensor in trace.summed]
        if rule_result.summed:
            trace.summed.update(dict.fromkeys(outputs, rule_result.summed))
        if summed and rule and rule.carries:
            trace.summed.update(dict.fromkeys(outputs, summed[0]))
        trace.wrapped.follow(func, bound, inputs, outputs)
        if not is_step(func):
            self.origins.note_passed(inputs, outputs)
            return result
        name, axes_after = operation_name(func), [trace.axes_of(tensor) for tensor in outputs]
        sources, wrapped = self.origins.of(inputs), trace.wrapped.scales(func, bound, inputs)
        scalars = scalars_of(func, bound) | {key: plain(number) for key, number in wrapped.items()}
        tracked = [number for number in wrapped.values() if isinstance(number, Tracked)]
        trace.reads += [Read(number.expression, (), (len(trace.steps),)) for number in tracked]
        self.origins.note_made(len(trace.steps), outputs)
        decided = decisions(func, inputs, result)
        trace.steps.append(
            Step(
                name,
                self.where[-1],
                axes_before,
                axes_after,
                sources,
                dict(rule_result.sizes),
                scalars,
                summed,
                decided,
            )
        )
        return result


def decisions(func: Any, inputs: list[Tensor], result: Any) -> Any:
    """Return the parts of a result that floats decide, such as indices and masks."""

    def has_numbers(tensor: Tensor) -> bool:
        return tensor.is_floating_point() or tensor.is_complex()

    if func._schema.is_mutable or not any(has_numbers(tensor) and not tensor.is_meta for tensor in inputs):
        return None
    parts = tree_map(lambda part: None if isinstance(part, Tensor) and has_numbers(part) else part, result)
    return parts if any(part is not None for part in tree_leaves(parts)) else None


def _apply_rule(trace: Trace, rule: Rule, bound: dict[str, Any], result: Any, outputs: Sequence[Tensor]) -> RuleResult:
    """Apply a rule; return its result, with axes for each tensor of the output."""
    answer = rule.function(View(trace.axes_of, trace.is_learned), bound, result)
    rule_result = answer if isinstance(answer, RuleResult) else RuleResult(answer)
    if all(isinstance(axis, Axis) for axis in rule_result.axes):
        repeated: Any = [rule_result.axes] * len(outputs)
        rule_result = rule_result._replace(axes=repeated)
    if len(rule_result.axes) != len(outputs):
        raise InternalError(f"it gives the axes of {len(rule_result.axes)} results, but there are {len(outputs)}")
    return rule_result


def _fix_all(func: Any, inputs: list[Axes], outputs: list[Tensor]) -> RuleResult:
    """Fix all axes of an operation that has no rule."""
    name = operation_name(func)
    why = lost(f"cannot be followed through {name} ({way_to_teach(name)})")
    for axis in (axis for input_axes in inputs for axis in input_axes):
        axes.fix(axis, why)
    return RuleResult([[Axis(size, lost(f"a result of {name}")) for size in tensor.shape] for tensor in outputs])


def _describe_rule(func: Any, rule: Rule | None) -> str:
    where = f" ({rule.function.__module__}.{rule.function.__qualname__})" if rule else ""
    return f"the rule for {func._schema.name}{where}"


@plain_attention
def trace_model(model: nn.Module, example: Any, output: Callable[[Any], Any] | None = None) -> Observed[Trace]:
    """Trace a forward pass in evaluation mode, on the meta device if possible.

    If the model computes something else in training mode (auxiliary classifiers, moving averages), a second pass
    follows. If this pass cannot run on the meta device, both passes run on the model's device.

    Args:
        output: picks the part of the model's output that must keep its shape. None: all of it.
    """
    runs: list[tuple[nn.Module, Any]] = []

    def trace(copy: nn.Module, inputs: Any) -> Trace:
        result, *run = _trace_with_numbers(model, copy, inputs, output)
        runs.append(tuple(run))
        return result

    seen = observe(model, example, trace)
    ways = [seen]
    if seen.on_meta and not any(t.is_meta for t in (*tensors_in(example), *(t for _, t in named_tensors(model)))):
        ways.append(
            seen._replace(model=model, example=copy_tensors(example), on_meta=False)
        )  # its code may look at numbers
    for way in ways:
        copy_of = ghost_of if way.on_meta else clone
        try:
            if _trains_otherwise(copy_of(model), copy_tensors(way.example), seen.found):
                if way.on_meta == seen.on_meta:
                    seen.found.follow(*runs[-1], training=True)
                else:
                    track = bool(seen.found.reads)
                    full_trace = Trace(copy_of(model), copy_tensors(way.example), (False, True), output, track)
                    seen = way._replace(found=full_trace)
            seen.found.untrained = ""
            break
        except (InternalError, RuleError):
            raise
        except Exception as error:  # it cannot train on this example: the pass in evaluation mode must be enough
            if len(seen.found.steps) > sum(seen.found.lengths):  # trace again without the steps of the pass that failed
                twin = ghost_of(model) if seen.on_meta else clone(model)
                seen = seen._replace(found=_trace_with_numbers(model, twin, copy_tensors(seen.example), output)[0])
            seen.found.untrained = first_line(error)
            name = type(model).__name__
            _log.info("%s does not run on the example in training mode: %s", name, seen.found.untrained)
    _follow_copies(model, seen.found)
    _fix_without_rows(seen.found)
    return seen


def trace_in_place(model: nn.Module, example: Any, output: Callable[[Any], Any] | None = None) -> Trace:
    """Trace a pass in evaluation mode on the model's device.

    Other operations might run on the meta device.
    """
    with explain(f"{type(model).__name__} does not run on the example"):
        return _trace_with_numbers(model, clone(model), copy_tensors(example), output)[0]


def _trace_with_numbers(
    model: nn.Module, twin: nn.Module, example: Any, output: Callable[[Any], Any] | None
) -> tuple[Trace, nn.Module, Any]:
    """Trace a copy of the model; return the trace, the copy and the example.

    This copy ran on this example. The numbers in the copy remember their attributes; if its code does not run with such
    numbers, they are plain.
    """
    try:
        inputs = copy_tensors(example)
        return Trace(twin, inputs, output=output, track=True), twin, inputs
    except (SurgeryError, InternalError):
        raise
    except Exception as error:
        on_meta = all(tensor.is_meta for tensor in tensors_in(example))
        twin = ghost_of(model) if on_meta else clone(model)
        trace = Trace(twin, example, output=output)
        _log.info("%s runs with plain numbers alone: %s", type(model).__name__, first_line(error))
        return trace, twin, example


def _follow_copies(model: nn.Module, trace: Trace) -> None:
    """Unify an unused tensor's axes with a tensor of its module that it copies.

    The two have the same values.
    """
    tensors = dict(named_tensors(model)) if trace.unused else {}
    for key in list(trace.unused):
        unused = tensors[key]
        for other, tensor in tensors.items():
            if other[0] != key[0] or other in trace.unused or tensor.shape != unused.shape or unused.is_meta:
                continue
            if torch.equal(tensor, unused) and bool((unused != unused.flatten()[0]).any()):
                for a, b in zip(trace.tensors[key], trace.tensors[other]):
                    axes.unify(a, b)
                trace.unused.remove(key)
                break


def _fix_without_rows(trace: Trace) -> None:
    """Fix the axes of a module without rows of the example, if a use is not known.

    Such a tensor has an axis as long as an axis of the module's results, but it was not seen to lie along them. With an
    empty batch, code may leave out steps: torch's batch norms read no statistics, and only one weight.
    """
    for module, result_axes in trace.empty.items():
        if module in trace.filled:
            continue
        known = {atom for axis in result_axes for atom in axes.atoms(axis)}
        for key, tensor_axes in trace.tensors.items():
            if key[0] != module or not known.isdisjoint(atom for axis in tensor_axes for atom in axes.atoms(axis)):
                continue
            why = lost(
                f"{module or 'the model'} gets no rows of the example, so the use of its {key[1]} is not known: give "
                "an example with rows for it (where boxes are found, say), or lower the thresholds that drop rows"
            )
            if as_long := [
                axis for axis in result_axes if axis.size > 1 and axis.size in {other.size for other in tensor_axes}
            ]:
                for axis in (*as_long, *tensor_axes):
                    axes.fix(axis, why)
                if key in trace.unused:
                    trace.unused.remove(key)


def _trains_otherwise(model: nn.Module, example: Any, trace: Trace) -> bool:
    """Return whether a pass in training mode has operations that the trace lacks."""
    known = Counter((step.module, step.name) for step in trace.steps)
    with in_mode(model, training=True), watching(model) as where, _Surplus(where, known) as surplus:
        try:
            call(model, example)
        except Exception:  # perhaps an error of the code, raised because of `_Enough`
            if not surplus.found:
                raise
    return surplus.found


class _Enough(Exception):
    """Raised to end a forward pass that has shown enough."""


class _Surplus(Watch):
    """Ends the pass at the first operation beyond a trace's, by module and name."""

    def __init__(self, where: list[str], known: Counter[tuple[str, str]]):
        super().__init__()
        self.where, self.left, self.found = where, known, False

    def before(self, operation: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        if is_step(operation):
            key = self.where[-1], operation_name(operation)
            self.left[key] -= 1
            if self.left[key] < 0:
                self.found = True
                raise _Enough


@contextmanager
def unfuse() -> Iterator[None]:
    """Run recurrent layers by single operations, so that a trace sees their reads."""
    mkldnn: Any = torch.backends.mkldnn
    before, mkldnn.enabled = mkldnn.enabled, False
    try:
        yield
    finally:
        mkldnn.enabled = before


@contextmanager
def run_one_by_one() -> Iterator[None]:
    """Run attention and recurrent layers as the same operations at all sizes."""
    with unfuse(), plain_attention:
        yield

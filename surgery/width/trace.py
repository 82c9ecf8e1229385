"""One forward pass that follows the axes of every tensor through every operation.

`Trace` watches aten operations, of which there are few: a handful of rules (in `surgery.width.rules`) covers attention,
windows, channel shuffles, grouped convolutions and the like. An operation without a rule fixes all axes that it
touches, so that nothing is assumed about it.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from surgery.copying import clone
from surgery.errors import InternalError, SurgeryError, explained, first_line
from surgery.forward import (
    Observed,
    call,
    copied,
    ghost_of,
    in_mode,
    named_tensors,
    observed,
    tensors_in,
    watching,
)
from surgery.torch_private import Operations, Watch, tree_leaves, tree_map
from surgery.width import axes
from surgery.width.axes import Axes, Axis, Kind, Why, lost
from surgery.width.by_tensor import ByTensor
from surgery.width.provenance import Tracked, Tracking, plain, remember, tracked_in
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

_FOREIGN = "a tensor lies along it that the model does not hold: register it as a buffer of its module"
_LEAVES = {"numpy", "tolist", "__array__", "__dlpack__", "storage", "untyped_storage", "apply_", "map_"}
_log = logging.getLogger(__name__)


class Trace:
    """What forward passes show about the axes of a model's tensors.

    Attributes:
        modes: for each forward pass whether it was in training mode.
        tensors: the axes of each tensor by (module name, attribute name): parameters, buffers and plain attributes.
        parameters: the keys of those that are parameters.
        steps: the operations, in order.
        lengths: for each forward pass how many of the steps it has.
        outputs, returned: for each forward pass the axes of the output's tensors, and where these came from.
        unused: the tensors, of more than one element, that no operation used, by (module name, attribute name).
        untrained: why no pass was in training mode though it does something else there, or "".
        summed: by matrix product the axis that was summed to compute it.
        made: (module, axis) for each axis along which a layer with weights makes features.
        ordered: (axis, why) for each axis whose kept positions must be 0, 1, 2, ... without a gap.
        foreign: (axis, why) for each axis of a tensor that the model does not hold; positions of it keep their order.
        constants: what is made of neither parameters nor the input, where an operation took it with some of these: a
            copy, its axes, and those of the results.
        written: axes whose sizes a reshape says where it leaves another one open.
        reads: what operations took of the numbers that the model's attributes hold.
        tracking: numbers that remember, and what the code compared them with.
        wrapped: the numbers that the code puts into tensors.
        filled, empty: the modules that made numbers of the example, and by module the axes of results without any.
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
        self._learned = ByTensor[bool]()  # parameters, and what was computed from them and from constants alone
        self._data = ByTensor[bool]()  # the example, and what was computed from it
        self.summed = ByTensor[Axis]()
        self.made: list[tuple[str, Axis]] = []
        self.ordered: list[tuple[Axis, str]] = []
        self.foreign: list[tuple[Axis, str]] = []
        self.constants: list[tuple[Tensor, Axes, list[Axes]]] = []
        self._made = ByTensor[bool]()  # what is made of neither parameters nor the input
        self._foreign = ByTensor[bool]()  # constants of the code, and what was computed from them alone
        self.written: list[Axis] = []
        self.filled: set[str] = set()
        self.empty: dict[str, list[Axis]] = {}
        self._fixed_if_used = ByTensor[
            Sequence[tuple[Axis, Why]]
        ]()  # by tensor the axes that keep their size if it is used, and why
        self.modes: tuple[bool, ...] = ()
        self.tensors: dict[tuple[str, str], Axes] = {}
        self.parameters: set[tuple[str, str]] = set()
        self.steps: list[Step[Axis]] = []
        held = list(named_tensors(model))
        for key, tensor in held:
            self.tensors[key] = self.axes_of(tensor)
            if isinstance(tensor, nn.Parameter):
                self.parameters.add(key)
                self.learn([tensor])
        self.give(tensors_in(example))
        for tensor in tensors_in(example):
            for axis in self.axes_of(tensor):
                axes.fix(axis, Why(Kind.INPUT, "it is an axis of the input"))
        self.outputs: list[list[Axes]] = []
        self.returned: list[list[Any]] = []
        self.lengths: list[int] = []
        self._origins = Origins(held)
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
        kept = self._kept(model, result)
        self.modes += (training,)
        self.lengths.append(len(self.steps) - sum(self.lengths))
        self.use([*tensors_in(result), *kept])
        self.outputs.append([self.axes_of(tensor) for tensor in tensors_in(result)])
        self.returned.append(self._origins.of(tensors_in(result)))
        for axis in (axis for tensor in kept for axis in self.axes_of(tensor)):
            axes.fix(axis, Why(Kind.OUTPUT, "it is an axis of the output"))
        self.tracking.is_open = False
        several = {key: tensor for key, tensor in named_tensors(model) if tensor.numel() > 1}
        self.unused = [key for key, tensor in several.items() if id(tensor) not in self.touched]

    def _kept(self, model: nn.Module, result: Any) -> list[Tensor]:
        """Return the tensors of a model's result that keep their shapes: what `output` picks, or computes with."""
        if self.output:
            with _Computed(self._axes, tensors_in(result)) as computed:
                kept = computed.sources(tensors_in(self.output(result)))
        else:
            kept = tensors_in(result)
        if not kept:
            what = "`output` gives" if self.output else f"{type(model).__name__} returned"
            raise SurgeryError(f"{what} no tensor, so the shape of its output is not known", code="argument")
        return kept

    def axes_of(self, tensor: Tensor) -> Axes:
        """Return the axes of a tensor; new ones if it was not seen before."""
        found = self._axes.get(tensor)
        if found is None:
            found = self._axes[tensor] = tuple(map(Axis, tensor.shape))
        return found

    def meet(self, tensors: Iterable[Tensor]) -> None:
        """Note that an operation takes these; those that nothing is known of are constants."""
        tensors = list(tensors)
        self.use(tensors)
        for tensor in tensors:
            if tensor not in self._axes:
                self._made[tensor] = self._foreign[tensor] = True
                self.foreign += [(axis, _FOREIGN) for axis in self.axes_of(tensor)]

    def keep_order(self, tensors: Iterable[Tensor], why: str) -> None:
        """Note that the order of positions matters along all axes of these."""
        self.ordered += [(axis, why) for tensor in tensors for axis in self.axes_of(tensor)]

    def use(self, tensors: Iterable[Tensor]) -> None:
        """Note that the numbers in these are used."""
        for tensor in tensors if self._fixed_if_used else ():
            for axis, why in self._fixed_if_used.pop(tensor, ()):
                axes.fix(axis, why)

    def fix_if_used(self, tensors: Iterable[Tensor], found: Sequence[tuple[Axis, Why]]) -> None:
        """Note which axes keep their size if the numbers in these are used."""
        if found:
            self._fixed_if_used.update(dict.fromkeys(tensors, found))

    def learned(self, tensor: Tensor) -> bool:
        """Return whether this is a parameter, or was computed from parameters and constants (a mask) alone."""
        return tensor in self._learned

    def learn(self, tensors: Iterable[Tensor]) -> None:
        """Note that these are parameters."""
        for tensor in tensors:
            self._learned[tensor] = True

    def give(self, tensors: Iterable[Tensor]) -> None:
        """Note that these are data."""
        for tensor in tensors:
            self._data[tensor] = True

    def derive(self, outputs: Iterable[Tensor], inputs: Sequence[Tensor]) -> None:
        """Note that the outputs were computed from the inputs."""
        foreign = [tensor for tensor in inputs if tensor in self._foreign] if self._foreign else []
        data, learned = (any(tensor in of for tensor in inputs) for of in (self._data, self._learned))
        if data or learned:
            self._fill(outputs, inputs)
            found = [self.axes_of(tensor) for tensor in outputs]
            made = [tensor for tensor in inputs if tensor in self._made] if self._made else []
            self.constants += [(tensor.detach().clone(), self.axes_of(tensor), found) for tensor in made]
            for tensor in foreign:  # along an axis that was expanded all positions are the same
                steps = tensor.stride() if tensor.layout is torch.strided else [1] * tensor.ndim
                self.ordered += [(axis, _FOREIGN) for axis, step in zip(self.axes_of(tensor), steps) if step]
            self.give(outputs) if data else self.learn(outputs)
        else:
            self._foreign.update(dict.fromkeys(outputs, True) if foreign else {})
            self._made.update(dict.fromkeys(outputs, True))

    def count(self, module: str, outputs: Iterable[Tensor]) -> None:
        """Note whether what a module made of the example has elements."""
        for tensor in outputs:
            if tensor in self._data and tensor.numel():
                self.filled.add(module)
            elif tensor in self._data:
                self.empty.setdefault(module, []).extend(self.axes_of(tensor))

    def _fill(self, outputs: Iterable[Tensor], inputs: Sequence[Tensor]) -> None:
        """Note that what shares memory with tensors changed in place is no constant any more."""
        changed = {_memory(tensor) for tensor in outputs if any(tensor is one for one in inputs)}
        for tensor in [one for one in self._made if _memory(one) in changed] if changed else ():
            del self._made[tensor]

    def assign(self, tensor: Tensor, found: Sequence[Axis], replace: bool = False) -> None:
        """Set the axes of a result.

        A result that has axes already was changed in place: its old axes and the new ones are the same, unless the
        operation replaces them.

        Raises:
            InternalError: if they have other sizes than the tensor.
        """
        if tuple(axis.size for axis in found) != tuple(tensor.shape):
            raise InternalError(f"a result of shape {tuple(tensor.shape)} gets axes {list(found)}")
        if tensor in self._axes and not replace:
            for old, new in zip(self._axes[tensor], found):
                axes.unify(old, new)
        else:
            self._axes[tensor] = tuple(found)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)


class Origins:
    """Where each tensor came from: (module, attribute) of the model, or (step, position among its outputs)."""

    def __init__(self, held: Iterable[tuple[tuple[str, str], Tensor]]):
        self._of = ByTensor[Any]()
        for key, tensor in held:
            self._of.setdefault(tensor, key)

    def of(self, tensors: list[Tensor]) -> list[Any]:
        """Return the origin of each; None for inputs of the model."""
        return [self._of.get(tensor) for tensor in tensors]

    def passed(self, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        """Note that the outputs hold the values of the first input, perhaps in another layout."""
        for tensor in outputs if inputs else ():
            self._of[tensor] = self._of.get(inputs[0])

    def made(self, step: int, outputs: list[Tensor]) -> None:
        """Note that the outputs were computed by this step."""
        for position, tensor in enumerate(outputs):
            self._of[tensor] = (step, position)


class _Computed(TorchFunctionMode):
    """Notes from which tensors of the forward pass other tensors are computed."""

    def __init__(self, known: Mapping[Tensor, Any], returned: Iterable[Tensor]):
        super().__init__()
        self._known, self._of = known, ByTensor[list[Tensor]]()
        self._of.update({tensor: [tensor] for tensor in returned})

    def __torch_function__(self, func, types, args=(), kwargs=None):
        given = self._sources(tensors_in((args, kwargs)))
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_in(result):
            self._of[tensor] = given
        return result

    def _sources(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        found = (one for t in tensors for one in self._of.get(t, [t] if t in self._known else []))
        return list({id(one): one for one in found}.values())

    def sources(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return the tensors of the forward pass from which these were computed.

        SurgeryError if one was computed of none.
        """
        if not all(self._sources([tensor]) for tensor in tensors):
            raise SurgeryError(
                "`output` gives a tensor that is not computed, by torch, of what the model returned, so what has to "
                "keep its shape is not known: let it pick tensors alone, as `lambda result: result.logits`",
                code="argument",
            )
        return self._sources(tensors)


class _Calls(TorchFunctionMode):
    """Notes which tensors give their numbers to code that no operation shows, and which numbers calls take."""

    def __init__(self, trace: Trace):
        super().__init__()
        self.trace = trace

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        if name in _LEAVES and (given := tensors_in(args)):
            self.trace.keep_order(given, f"its numbers leave torch ({name}), and their order may matter there")
            self.trace.use(given)
        first = len(self.trace.steps)
        result = func(*args, **(kwargs or {}))
        wrapped = self.trace.wrapped.create(func, args, kwargs or {}, result)
        for number in tracked_in((args, kwargs or {}), self.trace.tracking):
            if number is wrapped:  # what takes the tensor reads it
                continue
            steps = dict(enumerate(self.trace.steps[first:], first))
            self.trace.reads.append(
                read(number, (*args, *(kwargs or {}).values()), tensors_in(result), steps, self.trace.axes_of)
            )
        return result


class _Follow(Operations):
    def __init__(self, trace: Trace, where: list[str], origins: Origins):
        super().__init__()
        self.trace, self.where, self.origins = trace, where, origins
        self.random, self.seeded = torch.get_rng_state(), False  # the state that the last draw has left

    def draws_from_seed(self, generator: torch.Generator | None) -> bool:
        """Return whether a call draws from a generator of the code's own, or from torch's after the code has set it."""
        self.seeded |= not torch.equal(torch.get_rng_state(), self.random)
        return self.seeded or generator is not None

    def run(self, func, args, kwargs):
        trace = self.trace
        given = tensors_in((args, kwargs))
        trace.meet(given)
        before = [trace.axes_of(tensor) for tensor in given]
        bound, rule = bind(func, args, kwargs), rule_for(func)
        draws = torch.Tag.nondeterministic_seeded in func.tags
        seeded = draws and self.draws_from_seed(bound.get("generator"))
        result = self.result(func, args, kwargs)
        if draws:
            self.random = torch.get_rng_state()
        outputs = tensors_in(result)
        trace.touched.update(map(id, given))
        try:
            learnt = _learnt(trace, rule, bound, result, outputs) if rule else _not_followed(func, before, outputs)
            for tensor, found in zip(outputs, learnt.axes):
                trace.assign(tensor, found, replace=torch.Tag.inplace_view in func.tags)
        except RuleError:
            raise
        except (InternalError, LookupError, TypeError, ValueError, AttributeError) as error:
            raise InternalError(f"{_described(func, rule)} is wrong: {first_line(error)}") from error
        trace.made += [(self.where[-1], axis) for axis in learnt.features]
        trace.ordered += [(axis, learnt.order) for axis in learnt.prefix_only]
        if seeded:
            trace.keep_order(outputs, "random numbers of a seed lie along it, in their order")
        trace.written += learnt.explicit
        trace.fix_if_used(outputs[-1:], learnt.fixed_when_read)
        if learnt.is_weight:
            trace.learn(outputs)
        else:
            trace.derive(outputs, given)
        trace.count(self.where[-1], outputs)
        summed = [trace.summed[tensor] for tensor in given if tensor in trace.summed]
        if learnt.summed:
            trace.summed.update(dict.fromkeys(outputs, learnt.summed))
        if summed and rule and rule.carries:
            trace.summed.update(dict.fromkeys(outputs, summed[0]))
        trace.wrapped.follow(func, bound, given, outputs)
        if not is_step(func):
            self.origins.passed(given, outputs)
            return result
        name, after = operation_name(func), [trace.axes_of(tensor) for tensor in outputs]
        sources, wrapped = self.origins.of(given), trace.wrapped.scales(func, bound, given)
        scalars = scalars_of(func, bound) | {key: plain(number) for key, number in wrapped.items()}
        remembered = [number for number in wrapped.values() if isinstance(number, Tracked)]
        trace.reads += [Read(number.expression, (), (len(trace.steps),)) for number in remembered]
        self.origins.made(len(trace.steps), outputs)
        decided = decisions(func, given, result)
        trace.steps.append(
            Step(name, self.where[-1], before, after, sources, dict(learnt.sizes), scalars, summed, decided)
        )
        return result


def decisions(func: Any, given: list[Tensor], result: Any) -> Any:
    """Return the parts of a result that numbers decided, which are no floating-point tensors though inputs are."""

    def has_numbers(tensor: Tensor) -> bool:
        return tensor.is_floating_point() or tensor.is_complex()

    if func._schema.is_mutable or not any(has_numbers(tensor) and not tensor.is_meta for tensor in given):
        return None
    parts = tree_map(lambda part: None if isinstance(part, Tensor) and has_numbers(part) else part, result)
    return parts if any(part is not None for part in tree_leaves(parts)) else None


def _learnt(trace: Trace, rule: Rule, bound: dict[str, Any], result: Any, outputs: Sequence[Tensor]) -> RuleResult:
    """Return what a rule says, with axes for each of a result's tensors."""
    found = rule.function(View(trace.axes_of, trace.learned), bound, result)
    learnt = found if isinstance(found, RuleResult) else RuleResult(found)
    if all(isinstance(axis, Axis) for axis in learnt.axes):
        alike: Any = [learnt.axes] * len(outputs)
        learnt = learnt._replace(axes=alike)
    if len(learnt.axes) != len(outputs):
        raise InternalError(f"it gives the axes of {len(learnt.axes)} results where there are {len(outputs)}")
    return learnt


def _not_followed(func: Any, inputs: list[Axes], outputs: list[Tensor]) -> RuleResult:
    """Leave everything whole of an operation without a rule."""
    name = operation_name(func)
    why = lost(f"cannot be followed through {name} ({way_to_teach(name)})")
    for axis in (axis for found in inputs for axis in found):
        axes.fix(axis, why)
    return RuleResult([[Axis(size, lost(f"a result of {name}")) for size in tensor.shape] for tensor in outputs])


def _described(func: Any, rule: Rule | None) -> str:
    where = f" ({rule.function.__module__}.{rule.function.__qualname__})" if rule else ""
    return f"the rule for {func._schema.name}{where}"


def traced(model: nn.Module, example: Any, output: Callable[[Any], Any] | None = None) -> Observed[Trace]:
    """Trace a forward pass in evaluation mode, on the meta device if the model can run there.

    If the model does something else in training mode (auxiliary classifiers, moving averages), a second pass follows;
    where it cannot run on the meta device, both run where the model is.

    Args:
        output: what of the model's output has to keep its shape; all of it if it is not given.
    """
    ran: list[tuple[nn.Module, Any]] = []

    def trace(copy: nn.Module, given: Any) -> Trace:
        found, *with_it = _traced_with_numbers(model, copy, given, output)
        ran.append(tuple(with_it))
        return found

    seen = observed(model, example, trace)
    ways = [seen]
    if seen.on_meta and not any(t.is_meta for t in (*tensors_in(example), *(t for _, t in named_tensors(model)))):
        ways.append(seen._replace(model=model, example=copied(example), on_meta=False))  # it may look at numbers
    for one in ways:
        copy_of = ghost_of if one.on_meta else clone
        try:
            if _trains_otherwise(copy_of(model), copied(one.example), seen.found):
                if one.on_meta == seen.on_meta:
                    seen.found.follow(*ran[-1], training=True)
                else:
                    track = bool(seen.found.reads)
                    found = Trace(copy_of(model), copied(one.example), (False, True), output, track)
                    seen = one._replace(found=found)
            seen.found.untrained = ""
            break
        except (InternalError, RuleError):
            raise
        except Exception as error:  # if it cannot train on this example the pass in evaluation mode has to do
            if len(seen.found.steps) > sum(seen.found.lengths):  # without the steps up to where it fails
                again = ghost_of(model) if seen.on_meta else clone(model)
                seen = seen._replace(found=_traced_with_numbers(model, again, copied(seen.example), output)[0])
            seen.found.untrained = first_line(error)
            name = type(model).__name__
            _log.info("%s does not run on the example in training mode: %s", name, seen.found.untrained)
    _follow_copies(model, seen.found)
    _fix_without_rows(seen.found)
    return seen


def traced_in_place(model: nn.Module, example: Any, output: Callable[[Any], Any] | None = None) -> Trace:
    """Trace a forward pass in evaluation mode where the model is: on the meta device other operations might run."""
    with explained(f"{type(model).__name__} does not run on the example"):
        return _traced_with_numbers(model, clone(model), copied(example), output)[0]


def _traced_with_numbers(
    model: nn.Module, twin: nn.Module, example: Any, output: Callable[[Any], Any] | None
) -> tuple[Trace, nn.Module, Any]:
    """Trace a copy of the model with numbers that remember their attributes, or with plain ones if its code asks.

    The copy that ran and the example that it was given are returned, too.
    """
    try:
        given = copied(example)
        return Trace(twin, given, output=output, track=True), twin, given
    except (SurgeryError, InternalError):
        raise
    except Exception as error:
        on_meta = all(tensor.is_meta for tensor in tensors_in(example))
        twin = ghost_of(model) if on_meta else clone(model)
        found = Trace(twin, example, output=output)
        _log.info("%s runs with plain numbers alone: %s", type(model).__name__, first_line(error))
        return found, twin, example


def _follow_copies(model: nn.Module, trace: Trace) -> None:
    """Lay an unused tensor along the axes of another tensor of its module with the same values: it is a copy."""
    tensors = dict(named_tensors(model)) if trace.unused else {}
    for key in list(trace.unused):
        mine = tensors[key]
        for other, tensor in tensors.items():
            if other[0] != key[0] or other in trace.unused or tensor.shape != mine.shape or mine.is_meta:
                continue
            if torch.equal(tensor, mine) and bool((mine != mine.flatten()[0]).any()):
                for a, b in zip(trace.tensors[key], trace.tensors[other]):
                    axes.unify(a, b)
                trace.unused.remove(key)
                break


def _fix_without_rows(trace: Trace) -> None:
    """Fix the axes of a module that got no rows if one of its tensors is as long, but lies along none of them.

    On an empty batch code may leave steps out: torch's batch norms read no statistics, and one weight.
    """
    for module, found in trace.empty.items():
        if module in trace.filled:
            continue
        known = {atom for axis in found for atom in axes.atoms(axis)}
        for key, its_axes in trace.tensors.items():
            if key[0] != module or not known.isdisjoint(atom for axis in its_axes for atom in axes.atoms(axis)):
                continue
            why = lost(
                f"{module or 'the model'} gets no rows of the example, so what its {key[1]} does with it is not known: "
                "give an example on which it gets some (boxes are found, say), or lower the thresholds that drop them"
            )
            if alike := [axis for axis in found if axis.size > 1 and axis.size in {one.size for one in its_axes}]:
                for axis in (*alike, *its_axes):
                    axes.fix(axis, why)
                if key in trace.unused:
                    trace.unused.remove(key)


def _trains_otherwise(model: nn.Module, example: Any, trace: Trace) -> bool:
    """Return whether a pass in training mode has operations that the traced one in evaluation mode has not."""
    known = Counter((step.module, step.name) for step in trace.steps)
    with in_mode(model, training=True), watching(model) as where, _Surplus(where, known) as surplus:
        try:
            call(model, example)
        except Exception:  # perhaps the code's own, raised from the one that ends the pass
            if not surplus.found:
                raise
    return surplus.found


class _Enough(Exception):
    """Raised to end a forward pass that has shown enough."""


class _Surplus(Watch):
    """Looks for an operation more than are known, by module and name, and ends the pass there."""

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
def unfused() -> Iterator[None]:
    """Recurrent layers run operation by operation, so that what they read is seen."""
    mkldnn: Any = torch.backends.mkldnn
    before, mkldnn.enabled = mkldnn.enabled, False
    try:
        yield
    finally:
        mkldnn.enabled = before


@contextmanager
def one_by_one() -> Iterator[None]:
    """Attention and recurrent layers run as the same operations, whatever their sizes."""
    with unfused(), sdpa_kernel(SDPBackend.MATH):
        yield

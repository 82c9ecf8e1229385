"""The orthogonal symmetry of a network: a residual stream in another basis, and the model's outputs as before.

What writes a stream and what reads it may be turned by one orthogonal matrix if nothing between them looks at single
positions. RMS norm commutes with every orthogonal matrix, layer norm with those that keep the vector of ones, once
their weights are folded into what reads them (Ashkboos et al., "SliceGPT", ICLR 2024, section 3; Theus et al.,
"Generalized Linear Mode Connectivity for Transformers", 2025, section 3). Which widths these are is read off the steps
of a trace, by a list of operations that are known to be linear along a width; any other one makes it "only permuted".
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from surgery.copying import clone
from surgery.errors import SurgeryError, explained
from surgery.forward import call, copied, in_mode, named_tensors, tensors_in, varied
from surgery.states import State, load, names_by_id, state
from surgery.width.permute import solved_for
from surgery.width.replay import same
from surgery.width.solve import SUMS, Atom, Axes, Solution, atoms, named_widths
from surgery.width.steps import Step

_MOVES = {
    *("view", "permute", "t", "transpose", "unsqueeze", "squeeze", "expand", "repeat"),
    *("slice", "select", "split", "split_with_sizes", "unbind"),
}
_LINEAR = _MOVES | {"neg", "sum", "mean", "embedding", "index", "index_select"}
_NORMS = {"native_layer_norm", "_fused_rms_norm"}


@dataclass(frozen=True)
class Rotatable:
    """A width that orthogonal matrices may turn.

    Attributes:
        size: its positions.
        turned: by tensor's name the axes along which it lies.
        folded: by norm's weight that is not constant the norm's bias, "" if it has none, and what reads the result.
        keeps_ones: whether the matrices have to keep the vector of ones, since a layer norm subtracts a mean along it.
    """

    size: int
    turned: Mapping[str, tuple[int, ...]]
    folded: Mapping[str, tuple[str, tuple[str, ...]]]
    keeps_ones: bool


def rotate(
    model: nn.Module,
    rotations: Mapping[str, Tensor],
    *,
    example: Any,
    output: Callable[[Any], Any] | None = None,
) -> nn.Module:
    """A copy of a module whose residual streams are in another basis; it computes the same outputs when it evaluates.

    Weights of norms along these widths are folded into what reads them, and are 1 afterwards. (Dropout on the stream
    drops coordinates of the new basis, so that training goes another way.)

    Args:
        model: any module; it is not changed.
        rotations: by width, named as for `surgery.permute`, an orthogonal matrix [n, n]: a stream x becomes x @ matrix.
            Along a layer norm it has to keep the vector of ones.
        example, output: as for `surgery.permute`.

    Raises:
        SurgeryError: for a width that cannot be rotated, with the operation that forbids it, and for a matrix that is
            not orthogonal, or moves the ones under a layer norm.

    >>> net = nn.Sequential(nn.Linear(2, 4), nn.RMSNorm(4), nn.Linear(4, 1))
    >>> x, matrix = torch.randn(5, 2), torch.linalg.qr(torch.randn(4, 4)).Q
    >>> other = rotate(net, {"0.weight:0": matrix}, example=x)
    >>> torch.allclose(other(x), net(x), atol=1e-5), torch.allclose(other[0].bias, net[0].bias @ matrix, atol=1e-5)
    (True, True)
    """
    twin, solution = solved_for(model, example, output, "rotate")
    values = state(model)
    widths, why = rotatable(twin, solution, [values])
    for name, matrix in rotations.items():
        if name not in widths:
            reason = why.get(name, "the model has no such width")
            raise SurgeryError(f"{name!r} cannot be rotated: {reason}; surgery.widths lists all by name")
        _check_orthogonal(name, widths[name], matrix)
    chosen = {name: widths[name] for name in rotations}
    result = rotated(folded(values, chosen), chosen, rotations)
    check_same_outputs(model, chosen, rotations, example, output)
    return load(clone(model), result)


def rotatable(
    model: nn.Module, solution: Solution, states: Sequence[State]
) -> tuple[dict[str, Rotatable], dict[str, str]]:
    """The widths that may be rotated in models of these states, and by name of each other one why it may not.

    A norm's weight that is constant in all states commutes with every matrix, and is left as it is; so tied embeddings
    may be rotated where the last norm has such a weight.
    """
    held = names_by_id(model)
    names = {key: held[id(tensor)] for key, tensor in named_tensors(model) if id(tensor) in held}
    constant = {
        name
        for name in states[0]
        if all(not values[name].numel() or bool((values[name] == values[name].flatten()[0]).all()) for values in states)
        and states[0][name].is_floating_point()
    }
    found, why = {}, {}
    for name, atom in named_widths(solution).items():
        try:
            found[name] = _Follower(atom, solution, names, constant).run(solution.steps[: solution.lengths[0]])
        except _Forbidden as reason:
            why[name] = str(reason)
    return found, why


class _Forbidden(Exception):
    """Why a width cannot be rotated."""


class _Value(NamedTuple):
    """A tensor along the width: Q turns it along each of its axes that is the width, unless it is a square."""

    param: str = ""  # the tensor of the model that it is, in another layout perhaps
    scale: str = ""  # the norm's weight that it was multiplied by, to be folded into what reads it
    square: bool = False


@dataclass
class _Follower:
    """Follows one width through the steps."""

    atom: Atom
    solution: Solution
    names: Mapping[tuple[str, str], str]
    constant: set[str]
    values: dict[tuple[int, int], _Value] = field(default_factory=dict)
    uses: dict[str, set[str]] = field(default_factory=dict)  # by turned tensor the scales of what it is multiplied with
    scales: dict[str, str] = field(default_factory=dict)  # by norm's weight its bias or ""
    keeps_ones: bool = False

    def run(self, steps: Sequence[Step]) -> Rotatable:
        if self.atom.order:
            raise _Forbidden(self.atom.order)
        for number, step in enumerate(steps):
            if any(map(self.times, (*step.inputs, *step.outputs))):
                where = f"{step.name} in {step.module or 'the model'}"
                for axis in step.axes():
                    if axis is not self.atom and self.atom in atoms(axis):
                        raise _Forbidden(f"it is a part of an axis of {where}")
                try:
                    results = self.step(step)
                except _Forbidden as reason:
                    raise _Forbidden(f"{where}{reason}") from None
                self.values.update({(number, i): value for i, value in enumerate(results)})
        return self.result()

    def result(self) -> Rotatable:
        turned: dict[str, tuple[int, ...]] = {}
        for key, _ in self.solution.members[self.atom]:
            name = self.names.get(key, "")
            if name not in self.uses and name not in self.scales:
                raise _Forbidden(f"{'.'.join(filter(None, key))} lies along it, and no operation in evaluation uses it")
            if name in self.uses:
                turned[name] = tuple(d for d, axis in enumerate(self.solution.tensors[key]) if axis is self.atom)
        if both := self.uses.keys() & self.scales.keys():
            raise _Forbidden(f"{min(both)} is multiplied with it and added to it")
        folding = {}
        for scale in (name for name in self.scales if name not in self.constant):
            readers = tuple(name for name, read in self.uses.items() if scale in read)
            for name in readers:
                if self.uses[name] != {scale} or len(turned[name]) > 1:
                    raise _Forbidden(
                        f"{scale} cannot be folded into {name}, which is used without it too; untie the weights, "
                        "or fill the norm's weight with one number"
                    )
            folding[scale] = self.scales[scale], readers
        return Rotatable(self.atom.size, turned, folding, self.keeps_ones)

    def times(self, axes: Axes) -> int:
        return sum(axis is self.atom or self.atom in atoms(axis) for axis in axes)

    def of(self, source: Any) -> _Value:
        if source is not None and isinstance(source[0], str):
            if source not in self.names:
                raise _Forbidden(f" takes {'.'.join(source)}, which is not in the state")
            return _Value(self.names[source])
        if source not in self.values:
            raise _Forbidden(" takes numbers that the code makes along it")
        return self.values[source]

    def use(self, value: _Value, scale: str = "") -> None:
        if value.param:
            self.uses.setdefault(value.param, set()).add(scale)

    def step(self, step: Step) -> list[_Value]:
        """What its results are."""
        given = [self.of(source) if self.times(axes) else None for axes, source in zip(step.inputs, step.sources)]
        ins, outs = [*map(self.times, step.inputs)], [*map(self.times, step.outputs)]
        along = [value for value in given if value]
        name, one, rounds = step.name, along[0] if along else None, step.scalars.get("rounding_mode")
        if one is None:
            raise _Forbidden(" makes numbers along it")
        if any(value.square for value in along):
            if name in {"mean", "sum"} and outs == [0]:
                return [_Value()]
        elif name in _LINEAR and given[0] and len(along) == 1 and all(times == ins[0] for times in outs):
            if name in _MOVES:
                return [one] * len(outs)
            self.use(one)
            return [_Value(scale=one.scale)] * len(outs)
        elif name in {"add", "sub", "cat"} and len(given) > 1 and all(times == outs[0] for times in ins):
            if not any(value.scale for value in along):
                for value in along:
                    self.use(value)
                return [_Value()]
            raise _Forbidden(" adds a norm's output, which its weight has scaled, to it")
        elif name in {"mul", "div"} and len(along) == 1 and (name == "mul" or given[0]) and not rounds:
            self.use(one)
            return [_Value(scale=one.scale)]
        elif name == "mul" and len(along) == 2 and outs == [1]:
            if step.sources[0] == step.sources[1] and not one.scale:
                self.use(one)
                return [_Value(square=True)]
            weights = [
                i for i, v in enumerate(along) if v.param and step.inputs[i][-1] is self.atom and self.flat(step, i)
            ]
            if len(weights) == 1:
                return [self.scaled(along[1 - weights[0]], along[weights[0]].param)]
        elif name == "pow" and step.scalars.get("exponent") == 2 and not one.scale:
            self.use(one)
            return [_Value(square=True)]
        elif name in _NORMS and given[0] and step.numbers["normalized_shape"] == [self.atom] and not one.scale:
            self.use(one)
            self.keeps_ones |= "layer" in name
            _, weight, bias, *_ = [*(value.param if value else "" for value in given), "", "", ""]
            if all(value.param for value in along[1:]):
                result = self.scaled(_Value(), weight, bias) if weight else _Value()
                return [result] + [_Value()] * (len(outs) - 1)
        elif name in SUMS and name != "_grouped_mm":  # which has a matrix for each group of rows
            return self.product(step, given, ins, outs)
        raise _Forbidden(" is not known to be linear along it")

    def flat(self, step: Step, which: int) -> bool:
        return all(axis is self.atom or axis.size == 1 for axis in step.inputs[which])

    def scaled(self, value: _Value, weight: str, bias: str = "") -> _Value:
        if value.scale or self.scales.get(weight, bias) != bias:
            raise _Forbidden(" scales it twice")
        self.use(value)
        self.scales[weight] = bias
        if bias:
            self.use(_Value(bias))
        return _Value(scale="" if weight in self.constant else weight)

    def product(self, step: Step, given: list[_Value | None], ins: list[int], outs: list[int]) -> list[_Value]:
        """A sum over this width, of what is on it and what reads it, or over another one."""
        added = 0 if len(given) > 2 and step.name in {"addmm", "baddbmm", "addmv"} else 2
        pair = [i for i in range(len(given)) if i != added]
        if len(pair) != 2 or (added < len(given) and ins[added] != outs[0]):
            raise _Forbidden(" adds something to it that is the same at all positions")
        if added < len(given) and (bias := given[added]):
            if bias.scale:
                raise _Forbidden(" adds a norm's output, which its weight has scaled, to it")
            self.use(bias)
        left, right = (given[i] for i in pair)
        if left and right and sum(ins[i] for i in pair) == outs[0] + 2:
            for one, other in ((left, right), (right, left)):
                if one.scale and (not other.param or other.scale):
                    raise _Forbidden(f" multiplies it with no weight, so that {one.scale} cannot be folded")
                self.use(other, one.scale)
            return [_Value()]
        if sum(ins[i] for i in pair) != outs[0] or (left and right):
            raise _Forbidden(" is not known to be linear along it")
        value = left or right or _Value()
        self.use(value)
        return [_Value(scale=value.scale)]


def folded(values: State, widths: Mapping[str, Rotatable]) -> dict[str, Tensor]:
    """A state whose norms along these widths have weight 1; the model computes what it did.

    A norm gives n g + b, of which a layer reads W (n g + b) = W diag(g) (n + b / g).

    Raises:
        SurgeryError: if a weight is 0 where the bias is not.
    """
    result = dict(values)
    for width in widths.values():
        for scale, (bias, readers) in width.folded.items():
            g = values[scale].double().flatten()
            for name in readers:
                (dim,) = width.turned[name]
                shape = [-1 if d == dim else 1 for d in range(values[name].ndim)]
                result[name] = (values[name].double() * g.view(shape)).to(values[name].dtype)
            if bias:
                b = values[bias].double()
                if bool(((g == 0) & (b != 0)).any()):
                    raise SurgeryError(
                        f"{scale!r} is 0 where {bias!r} is not, so that it cannot be folded into {', '.join(readers)}: "
                        "align with maps='permutations'"
                    )
                result[bias] = torch.where(g == 0, 0, b / g).to(values[bias].dtype)
            result[scale] = torch.ones_like(values[scale])
    return result


def rotated(values: State, widths: Mapping[str, Rotatable], matrices: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A folded state with each width turned by its matrix."""
    result = dict(values)
    for name, width in widths.items():
        for tensor, dims in width.turned.items():
            result[tensor] = _turned(result[tensor], dims, matrices[name]).to(result[tensor].dtype)
    return result


def _turned(tensor: Tensor, dims: Iterable[int], matrix: Tensor) -> Tensor:
    tensor = tensor.detach().double()
    for dim in dims:
        tensor = torch.tensordot(tensor, matrix.to(tensor), ([dim], [0])).movedim(-1, dim)
    return tensor


def procrustes(reference: State, other: State, width: Rotatable, present: Tensor, names: Iterable[str]) -> Tensor:
    """The matrix that turns the other model's tensors nearest to the reference's (Schönemann, 1966).

    A tensor along which the width lies twice is turned by the present matrix along its other axis.

    >>> width = Rotatable(3, {"w": (1,)}, {}, keeps_ones=False)
    >>> w, matrix = torch.randn(5, 3, dtype=torch.float64), torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64)).Q
    >>> torch.allclose(procrustes({"w": w @ matrix}, {"w": w}, width, torch.eye(3), ["w"]), matrix)
    True
    """
    cross = torch.zeros(width.size, width.size, dtype=torch.float64)
    for name in names:
        for dim in width.turned[name]:
            theirs = _turned(other[name], (d for d in width.turned[name] if d != dim), present)
            one, two = (
                t.double().cpu().movedim(dim, 0).reshape(width.size, -1) for t in (reference[name].detach(), theirs)
            )
            cross += two @ one.T
    if not width.keeps_ones:
        return _polar(cross)
    ones = torch.full((width.size, 1), width.size**-0.5, dtype=torch.float64)
    rest = torch.linalg.qr(torch.cat([ones, torch.eye(width.size, dtype=torch.float64)[:, 1:]], 1)).Q[:, 1:]
    return ones @ ones.T + rest @ _polar(rest.T @ cross @ rest) @ rest.T


def _polar(matrix: Tensor) -> Tensor:
    left, _, right = torch.linalg.svd(matrix)
    return left @ right


def check_same_outputs(
    model: nn.Module,
    widths: Mapping[str, Rotatable],
    matrices: Mapping[str, Tensor],
    example: Any,
    output: Callable[[Any], Any] | None,
) -> None:
    """Run a model and its rotated copy in float64: a last look at what a trace cannot show, as memory that is shared.

    Raises:
        SurgeryError: if they compute something else.
    """
    before = clone(model).double()
    after = load(clone(before), rotated(folded(state(before), widths), widths, matrices))
    given, results = varied(example, torch.float64), []
    for one in (before, after):
        with explained(f"{type(model).__name__} does not run in float64"), in_mode(one, training=False):
            found = call(one, copied(given))
        results.append(tensors_in(output(found) if output else found))
    if not all(one.dtype == two.dtype and same(one, two, near=1e-5) for one, two in zip(*results)):
        raise SurgeryError(
            f"{type(model).__name__} computes something else after {', '.join(map(repr, matrices))} was rotated: "
            "align with maps='permutations'"
        )


def _check_orthogonal(name: str, width: Rotatable, matrix: Any) -> None:
    size = width.size
    if not isinstance(matrix, Tensor) or matrix.shape != (size, size) or not matrix.is_floating_point():
        raise SurgeryError(f"the rotation of {name!r} is a matrix [{size}, {size}] of floating-point numbers")
    m = matrix.detach().double().cpu()
    near = 1e-9 if matrix.dtype == torch.float64 else 1e-4
    if not torch.allclose(m.T @ m, torch.eye(size, dtype=torch.float64), rtol=0, atol=near):
        raise SurgeryError(f"the rotation of {name!r} is not orthogonal: torch.linalg.qr(matrix).Q is")
    if width.keeps_ones and not torch.allclose(m.sum(0), torch.ones(size, dtype=torch.float64), rtol=0, atol=near):
        raise SurgeryError(
            f"the rotation of {name!r} has to keep the vector of ones (each row and column sums to 1), since a layer "
            "norm subtracts the mean along it"
        )

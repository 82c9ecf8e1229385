"""Which axes each tensor has: what rules may ask and what they answer while a forward pass is traced."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from surgery.errors import InternalError
from surgery.width import axes
from surgery.width.axes import Axis
from surgery.width.why import Why

Axes = tuple[Axis, ...]

_FOREIGN = "a tensor lies along it that the model does not hold: register it as a buffer of its module"


class View(NamedTuple):
    """What a rule may ask about a tensor.

    Attributes:
        axes_of: the axes of a tensor; new ones if it was not seen before.
        learned: whether it is a parameter, or was computed from parameters and constants (a mask) alone.
    """

    axes_of: Callable[[Tensor], Axes]
    learned: Callable[[Tensor], bool]


class Learnt(NamedTuple):
    """What a rule has learnt about a call.

    Attributes:
        axes: the axes of the result; of each result if there are several: one entry for each, or one for all.
        sizes: arguments of the call, or attributes of torch's own modules, that are sizes of these axes.
        made: axes along which a layer with weights makes features.
        ordered: axes whose kept positions must be 0, 1, 2, ... without a gap.
        summed: the axis that was summed to compute the result.
        learned: whether the result consists of weights, although data picked them.
        written: axes of the result whose sizes the call says, where it leaves another one open (-1).
        told: axes whose positions are told apart, and why, should a later operation use the result: code may want no
            more than its shape.
    """

    axes: Sequence[Axis] | Sequence[Sequence[Axis]]
    sizes: Mapping[str, Axis | list[Axis]] = {}
    made: Sequence[Axis] = ()
    ordered: Sequence[Axis] = ()
    summed: Axis | None = None
    learned: bool = False
    written: Sequence[Axis] = ()
    told: Sequence[tuple[Axis, Why]] = ()


class Ledger:
    """The axes of tensors, and what the tensors were made of.

    Attributes:
        summed: by matrix product the axis that was summed to compute it.
        made: (module, axis) for each axis along which a layer with weights makes features.
        ordered: (axis, why) for each axis whose kept positions must be 0, 1, 2, ... without a gap.
        foreign: (axis, why) for each axis of a tensor that the model does not hold; positions of it keep their order.
        constants: what is made of neither parameters nor the input, where an operation took it with some of these: a
            copy, its axes, and those of the results.
        written: axes whose sizes a reshape says where it leaves another one open.
    """

    def __init__(self) -> None:
        self._axes = WeakIdKeyDictionary()
        self._learned = WeakIdKeyDictionary()  # parameters, and what was computed from them and from constants alone
        self._data = WeakIdKeyDictionary()  # the example, and what was computed from it
        self.summed = WeakIdKeyDictionary()
        self.made: list[tuple[str, Axis]] = []
        self.ordered: list[tuple[Axis, str]] = []
        self.foreign: list[tuple[Axis, str]] = []
        self.constants: list[tuple[Tensor, Axes, list[Axes]]] = []
        self._made = WeakIdKeyDictionary()  # what is made of neither parameters nor the input
        self._foreign = WeakIdKeyDictionary()  # constants of the code, and what was computed from them alone
        self.written: list[Axis] = []
        self._told = WeakIdKeyDictionary()  # by tensor the axes that stay whole if it is used, and why

    def axes_of(self, tensor: Tensor) -> Axes:
        """The axes of a tensor; new ones if it was not seen before."""
        if tensor not in self._axes:
            self._axes[tensor] = tuple(Axis(size) for size in tensor.shape)
        return self._axes[tensor]

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
        for tensor in tensors:
            for axis, why in self._told.pop(tensor, ()):
                axes.fix(axis, why)

    def tell(self, tensors: Iterable[Tensor], told: Sequence[tuple[Axis, Why]]) -> None:
        """Note which axes stay whole if the numbers in these are used."""
        self._told.update(dict.fromkeys(tensors, told) if told else {})

    def learned(self, tensor: Tensor) -> bool:
        """Whether this is a parameter, or was computed from parameters and constants (a mask) alone."""
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
        foreign = [tensor for tensor in inputs if tensor in self._foreign]
        data, learned = (any(tensor in of for tensor in inputs) for of in (self._data, self._learned))
        if data or learned:
            self._fill(outputs, inputs)
            found = [self.axes_of(tensor) for tensor in outputs]
            self.constants += [(t.detach().clone(), self.axes_of(t), found) for t in inputs if t in self._made]
            for tensor in foreign:  # along an axis that was expanded all positions are the same
                steps = tensor.stride() if tensor.layout is torch.strided else [1] * tensor.ndim
                self.ordered += [(axis, _FOREIGN) for axis, step in zip(self.axes_of(tensor), steps) if step]
            self.give(outputs) if data else self.learn(outputs)
        else:
            self._foreign.update(dict.fromkeys(outputs, True) if foreign else {})
            self._made.update(dict.fromkeys(outputs, True))

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

"""Which axes each tensor has: what rules read and write while a forward pass is traced."""

from collections.abc import Iterable, Sequence

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from surgery.errors import InternalError
from surgery.width import axes
from surgery.width.axes import Axis

Axes = tuple[Axis, ...]


class Ledger:
    """The axes of tensors, and what the tensors were made of.

    Attributes:
        summed: by matrix product the axis that was summed to compute it.
        made: (module, axis) for each axis along which a layer with weights makes features.
        ordered: axes whose kept positions must be 0, 1, 2, ... without a gap.
        replacing: whether the current operation gives a tensor new axes in place.
    """

    def __init__(self) -> None:
        self._axes = WeakIdKeyDictionary()
        self._learned = WeakIdKeyDictionary()  # parameters, and what was computed from them and from constants alone
        self._data = WeakIdKeyDictionary()  # the example, and what was computed from it
        self.summed = WeakIdKeyDictionary()
        self.made: list[tuple[str, Axis]] = []
        self.ordered: list[Axis] = []
        self.replacing = False

    def axes_of(self, tensor: Tensor) -> Axes:
        """The axes of a tensor; new ones if it was not seen before."""
        if tensor not in self._axes:
            self._axes[tensor] = tuple(Axis(size) for size in tensor.shape)
        return self._axes[tensor]

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
        if any(tensor in self._data for tensor in inputs):
            self.give(outputs)
        elif any(tensor in self._learned for tensor in inputs):
            self.learn(outputs)

    def assign(self, tensor: Tensor, found: list[Axis] | Axes) -> None:
        """Set the axes of a result. If it has axes already (an operation in place), these and the new are the same.

        Raises InternalError if they have other sizes than the tensor.
        """
        if tuple(axis.size for axis in found) != tuple(tensor.shape):
            raise InternalError(
                f"a rule in surgery.width.rules is wrong: a tensor of shape {tuple(tensor.shape)} gets axes {found}"
            )
        if tensor in self._axes and not self.replacing:
            for old, new in zip(self._axes[tensor], found):
                axes.unify(old, new)
        else:
            self._axes[tensor] = tuple(found)

"""Which axes each tensor has: what rules read and write while a forward pass is traced."""

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from surgery.errors import InternalError
from surgery.width import axes
from surgery.width.axes import Axis

Axes = tuple[Axis, ...]


class Ledger:
    """The axes of tensors, and how the tensors were made.

    Attributes:
        summed: by matrix product the axis that was summed to compute it.
        made: axes along which a layer with weights makes features.
        ordered: axes whose kept positions must be 0, 1, 2, ... without a gap.
        replacing: whether the current operation gives a tensor new axes in place.
    """

    def __init__(self) -> None:
        self._axes = WeakIdKeyDictionary()
        self._learned = WeakIdKeyDictionary()  # parameters, and tensors computed from parameters alone
        self.summed = WeakIdKeyDictionary()
        self.made: list[Axis] = []
        self.ordered: list[Axis] = []
        self.replacing = False

    def axes_of(self, tensor: Tensor) -> Axes:
        """The axes of a tensor; new ones if it was not seen before."""
        if tensor not in self._axes:
            self._axes[tensor] = tuple(Axis(size) for size in tensor.shape)
        return self._axes[tensor]

    def learned(self, *tensors: Tensor) -> bool:
        """Whether all of these are parameters or computed from parameters alone."""
        return bool(tensors) and all(tensor in self._learned for tensor in tensors)

    def learn(self, tensors: list[Tensor]) -> None:
        """Note that these are parameters or computed from parameters alone."""
        for tensor in tensors:
            self._learned[tensor] = True

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

"""Which axes tensors have: what rules read and write while a pass is followed."""

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from surgery.errors import SurgeryError
from surgery.width import axes
from surgery.width.axes import Axis

Axes = tuple[Axis, ...]


class Ledger:
    """The axes of tensors, and what is known of how they came about.

    Attributes:
        summed: products, and the axis that was summed to make them.
        made: axes along which a learned layer makes features.
        ordered: axes whose kept positions must be neighbours: 0, 1, 2, ...
        replacing: whether the operation under way changes the axes of a tensor in place.
    """

    def __init__(self) -> None:
        self._axes = WeakIdKeyDictionary()
        self._learned = WeakIdKeyDictionary()  # parameters and what was computed from nothing but them
        self.summed = WeakIdKeyDictionary()
        self.made: list[Axis] = []
        self.ordered: list[Axis] = []
        self.replacing = False

    def axes_of(self, tensor: Tensor) -> Axes:
        """The axes of a tensor; new ones for a tensor not seen before."""
        if tensor not in self._axes:
            self._axes[tensor] = tuple(Axis(size) for size in tensor.shape)
        return self._axes[tensor]

    def learned(self, *tensors: Tensor) -> bool:
        """Whether these are parameters or computed from nothing else."""
        return bool(tensors) and all(tensor in self._learned for tensor in tensors)

    def learn(self, tensors: list[Tensor]) -> None:
        """These were computed from nothing but parameters."""
        for tensor in tensors:
            self._learned[tensor] = True

    def assign(self, tensor: Tensor, found: list[Axis] | Axes) -> None:
        """These are the axes of a result (of an operation in place: they are those it had, too)."""
        if tuple(axis.size for axis in found) != tuple(tensor.shape):
            raise SurgeryError(f"a rule of surgery.width.rules gives axes {found} to a {tuple(tensor.shape)} tensor")
        if tensor in self._axes and not self.replacing:
            for old, new in zip(self._axes[tensor], found):
                axes.unify(old, new)
        else:
            self._axes[tensor] = tuple(found)

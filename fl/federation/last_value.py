"""One value, remembered while the tensors that it was computed from are the same."""

from typing import Any

from torch import Tensor

from fl.base.torch_private import tree_flatten, version_of


class LastValue:
    """The value that was computed last, and its source.

    The source stays in memory with it. A source is a tensor, or dicts, lists and tuples of tensors and other objects.
    It is still the same if each of its tensors is the same object, and nothing was written to it since, which PyTorch
    counts; other objects have to be equal. Contents are not compared, which would read every weight, and wait for a
    GPU: a copy of a tensor, or a new view, is another source. Tensors made in inference mode have no such count;
    nothing is remembered of them.

    >>> import torch
    >>> last, weights = LastValue(), {"w": torch.zeros(2)}
    >>> last.keep(weights, "a value")
    'a value'
    >>> last.of(weights)
    'a value'
    >>> weights["w"] += 1
    >>> last.of(weights) is None
    True
    """

    def __init__(self) -> None:
        # Not just ids: the id of a tensor that is gone is used again.
        self._source: tuple[list, list, Any] | None = None
        self._value: Any = None

    def of(self, source: Any) -> Any:
        """Return the value of this source, None if another one was kept, or none at all."""
        if self._source is None:
            return None
        leaves, versions, structure = self._source
        new, same = tree_flatten(source)
        unchanged = structure == same and all(map(_same, leaves, new)) and versions == _versions(new)
        return self._value if unchanged else None

    def keep(self, source: Any, value: Any) -> Any:
        """Remember the value, and return it."""
        leaves, structure = tree_flatten(source)
        fixed = any(isinstance(leaf, Tensor) and leaf.is_inference() for leaf in leaves)
        self._source, self._value = (None, None) if fixed else ((leaves, _versions(leaves), structure), value)
        return value


def _same(a: Any, b: Any) -> bool:
    return a is b if isinstance(a, Tensor) or isinstance(b, Tensor) else a == b


def _versions(leaves: list) -> list[int]:
    return [version_of(leaf) for leaf in leaves if isinstance(leaf, Tensor)]

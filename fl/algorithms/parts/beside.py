"""States of modules that hold several models side by side, as attributes."""

from collections.abc import Mapping

from torch import Tensor

from surgery import State


def beside(**parts: Mapping[str, Tensor]) -> State:
    """Return the state, or stack, of a module from the states of its attributes.

    >>> beside(model={"w": 1}, last={"w": 2})
    {'model.w': 1, 'last.w': 2}
    """
    return {f"{part}.{name}": tensor for part, state in parts.items() for name, tensor in state.items()}


def part_of(state: Mapping[str, Tensor], part: str) -> State:
    """Return the state of one attribute, the inverse.

    >>> part_of({"model.w": 1, "last.w": 2}, "last")
    {'w': 2}
    """
    return {name.removeprefix(f"{part}."): t for name, t in state.items() if name.startswith(f"{part}.")}

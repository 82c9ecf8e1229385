"""Positions that the caller gives by the names of widths, on the axes of a trace."""

import difflib
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from surgery.errors import SurgeryError, first_line
from surgery.plan import as_runs
from surgery.width import axes
from surgery.width.choose import traced_widths
from surgery.width.plan import runs_of
from surgery.width.solve import Atom, Choice, Solution, onto_atoms
from surgery.width.trace import Trace

Positions: TypeAlias = Mapping[str, Sequence[int] | Tensor]
"""By width the positions that stay, ascending."""


class TracedPositions:
    """The caller's positions by axes of a trace.

    They stay valid if widths turn out to be one.

    Args:
        trace: before anything is unified that the forward pass did not show.
        positions: by the names of widths.

    Raises:
        SurgeryError: for a width that the model does not have or that must keep its size, and for what are no positions
            that may stay of it.
    """

    def __init__(self, trace: Trace, positions: Any):
        if not isinstance(positions, Mapping):
            raise SurgeryError(
                f"positions takes lists by width, {{'fc1.weight:0': [0, 2]}}, got {positions!r:.60}: surgery.widths "
                "lists the widths by name",
                code="argument",
            )
        widths, traced_axis = traced_widths(trace)
        self._found: list[tuple[str, axes.Axis, list[int]]] = []
        for name, numbers in positions.items():
            if name not in widths:
                raise SurgeryError(
                    f"positions names {name!r}, and the model has no such width: {_near(name, widths)}surgery.widths "
                    "lists all by name",
                    code="name",
                )
            self._found.append((name, traced_axis[widths[name]], _check_positions(name, widths[name], numbers)))

    def __call__(self, solution: Solution) -> Choice:
        """Return the positions of each atom of a solution of the trace."""
        choice: dict[Atom, list[int]] = {}
        named: dict[Atom, str] = {}
        for name, traced_axis, where in self._found:
            axis = solution.axis_of(traced_axis)
            held = torch.zeros(axis.size, dtype=torch.long).index_fill(0, torch.tensor(where), 1)
            axis_choice = {atom: counts.nonzero().flatten().tolist() for atom, counts in onto_atoms(axis, held).items()}
            for atom, numbers in axis_choice.items():
                if atom.why and len(numbers) < atom.size:
                    raise SurgeryError(
                        f"positions of {name!r} are fewer than its {axis.size}, and all stay: {atom.why.text}",
                        code="width",
                    )
                if choice.setdefault(atom, numbers) != numbers:
                    raise SurgeryError(
                        f"{named[atom]!r} and {name!r} are one width for the code of the model, and keep other "
                        "positions: give them the same",
                        code="argument",
                    )
                named.setdefault(atom, name)
            if runs_of(axis, axis_choice) != as_runs(where):
                raise SurgeryError(
                    f"positions of {name!r} are not the same in each of its parts, {axis!r}, as they must be",
                    code="width",
                )
        return {atom: numbers for atom, numbers in choice.items() if len(numbers) < atom.size}


def as_positions(name: str, size: int, value: Any) -> list[int]:
    """Return positions as numbers; SurgeryError unless distinct and of this width."""
    text = f"{value!r}"
    text = text if len(text) <= 60 else f"{text[:60]} ..."
    try:
        tensor = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise SurgeryError(
            f"positions of {name!r} are no list of numbers: {first_line(error)}", code="argument"
        ) from error
    if tensor.dtype == torch.bool:
        raise SurgeryError(
            f"positions of {name!r} are numbers, and this is a mask: give mask.nonzero().flatten()", code="argument"
        )
    if tensor.ndim != 1 or not len(tensor) or tensor.is_floating_point():
        raise SurgeryError(
            f"positions of {name!r} are a list of at least one whole number, got {text}", code="argument"
        )
    where = tensor.tolist()
    if len({*where}) != len(where) or not all(0 <= i < size for i in where):
        raise SurgeryError(f"positions of {name!r} are distinct and from 0 to {size - 1}, got {text}", code="argument")
    return where


def _check_positions(name: str, atom: Atom, value: Any) -> list[int]:
    """Return positions as numbers; SurgeryError unless ascending and free to stay."""
    where = as_positions(name, atom.size, value)
    if where != sorted(where):
        raise SurgeryError(
            f"positions of {name!r} are ascending, got {value!r:.60}: surgery.symmetry.permute puts them in another "
            "order",
            code="argument",
        )
    if atom.why and len(where) < atom.size:
        raise SurgeryError(
            f"positions of {name!r} are fewer than its {atom.size}, and all stay: {atom.why.text}", code="width"
        )
    if atom.order and where[-1] >= len(where):
        raise SurgeryError(
            f"positions of {name!r} are its first ones, 0 to {len(where) - 1} here: {atom.order}", code="width"
        )
    return where


def _near(name: Any, widths: Collection[str]) -> str:
    near = difflib.get_close_matches(str(name), widths, n=2)
    return f"did you mean {' or '.join(map(repr, near))}? " if near else ""

"""Messages between server and nodes: plain numbers and tensors, never unpickled."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fl.base.errors import Code, FLError
from fl.data import Dataset
from surgery.transfer import as_bytes

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    )
}
"""Those that travel, by name."""
_LONGEST = 300
"""Characters of a text of another machine that are printed."""


class InvalidMessage(FLError):
    """A request or answer that cannot be used; the text follows "client 3: ".

    The text may quote what another machine sent: it is `printable`.
    """

    def __init__(self, text: object, *, code: Code = "peers") -> None:
        super().__init__(printable(text), code=code)


def printable(text: object) -> str:
    """Return another machine's text as a line without control characters.

    It has 300 characters at most.

    >>> printable("a\\x1b[31m b\\nerror: c")
    'a\\\\x1b[31m b error: c'
    """
    line = " ".join(str(text)[:_LONGEST].split())
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in line)[:_LONGEST]


class NodeMessage(NamedTuple):
    """A request of the server, or a node's answer.

    Attributes:
        header: strings, numbers, lists and dicts, as in JSON.
        tensors: by name; on the CPU once they have arrived.
    """

    header: dict[str, Any]
    tensors: dict[str, Tensor]

    @property
    def size(self) -> int:
        """The bytes of its tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


def flat(tree: Any, prefix: str) -> dict[str, Tensor]:
    """Flatten nested dicts of tensors to one dict with paths for names.

    >>> list(flat({"anchor": {"w": torch.zeros(1)}, "share": torch.ones(())}, "context"))
    ['context/anchor/w', 'context/share']
    """
    if isinstance(tree, Tensor):
        return {prefix: tree}
    if not isinstance(tree, Mapping):
        raise FLError(f"an objective's input holds a {type(tree).__name__}: give tensors in dicts")
    return {name: tensor for key, part in tree.items() for name, tensor in flat(part, f"{prefix}/{key}").items()}


def nest(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Any]:
    """Return the inverse of `flat`: what lies below a prefix.

    >>> nest({"context/anchor/w": 1, "context/share": 2, "state/w": 3}, "context")
    {'anchor': {'w': 1}, 'share': 2}
    """
    tree: dict[str, Any] = {}
    for name, tensor in tensors.items():
        first, *path, last = name.split("/")
        if first == prefix:
            place = tree
            for key in path:
                place = place.setdefault(key, {})
            place[last] = tensor
    return tree


def check_tensors(tensors: Mapping[str, Tensor], start: Mapping[str, Tensor]) -> None:
    """Raise InvalidMessage unless tensors have the names and shapes of the start.

    They also have its dtypes, and are finite where it is.

    >>> check_tensors({"w": torch.tensor([1.0, torch.nan])}, {"w": torch.zeros(2)})
    Traceback (most recent call last):
    fl.extensions.flower.messages.InvalidMessage: w holds a number that is infinite or not a number
    """
    if missing := [name for name in start if name not in tensors]:
        raise InvalidMessage(f"{missing[0]} is missing: another architecture, or another method's state")
    if strange := [name for name in tensors if name not in start]:
        raise InvalidMessage(f"{strange[0]} was not asked for: another architecture, or another method's state")
    for name, before in start.items():
        tensor = tensors[name]
        if tensor.shape != before.shape:
            raise InvalidMessage(f"{name} has the shape {list(tensor.shape)}, and {list(before.shape)} was sent")
        if tensor.dtype != before.dtype:
            raise InvalidMessage(f"{name} is {tensor.dtype}, and {before.dtype} was sent")
        # where the start is not finite, the answer need not be: a mask of -inf, for example
        if tensor.is_floating_point() and not (tensor.isfinite() | ~before.isfinite().cpu()).all():
            raise InvalidMessage(f"{name} holds a number that is infinite or not a number")


def fields(header: Any, wanted: Mapping[str, type | tuple[type, ...]]) -> dict[str, Any]:
    """Return the header; InvalidMessage unless it has entries of these types."""
    if not isinstance(header, dict):
        raise InvalidMessage("its header is no table of names and values")
    for name, kind in wanted.items():
        if name not in header:
            raise InvalidMessage(f"its header lacks {name}")
        if not isinstance(header[name], kind) or (isinstance(header[name], bool) and kind is int):
            raise InvalidMessage(f"its header's {name} is a {type(header[name]).__name__}")
    return header


def form_of(data: Dataset) -> dict[str, Any]:
    """Return what server and node have to agree on: shapes, and largest numbers.

    They are of a sample and its label.
    """
    if isinstance(data.x, dict):
        raise FLError(
            f"nodes have samples with one input, and those of {data.name} have {', '.join(data.x)}: join them",
            code="unsupported",
        )
    sample = [str(data.x.dtype).removeprefix("torch."), *data.x.shape[1:]]
    return {"sample": sample, "target": list(data.y.shape[1:]), "classes": data.classes, "top": data.top}


def are_counts(values: Any) -> bool:
    """Return whether this is a list of whole numbers, none below 0."""
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def raw(tensor: Tensor) -> bytes:
    """Return a tensor's numbers, as they lie in memory."""
    if (name := str(tensor.dtype).removeprefix("torch.")) not in DTYPES:
        raise FLError(
            f"a tensor of {name} cannot be sent to other machines: there are {', '.join(DTYPES)}", code="unsupported"
        )
    return as_bytes(tensor.cpu()).numpy().tobytes()


def from_raw(data: bytes, dtype: str, shape: Sequence[int]) -> Tensor:
    """Return the inverse of `raw`.

    Raises InvalidMessage for a dtype that does not travel, and bytes of another number.

    >>> from_raw(raw(torch.tensor([1.0, 2.0])), "float32", [2])
    tensor([1., 2.])
    """
    shape = list(shape)
    if dtype not in DTYPES or not are_counts(shape):
        raise InvalidMessage(f"a tensor of dtype {dtype!r} and shape {shape!r} is none")
    if len(data) != math.prod(shape) * DTYPES[dtype].itemsize:
        raise InvalidMessage(f"a tensor of {dtype} {shape} came in {len(data)} bytes")
    if not data:
        return torch.empty(shape, dtype=DTYPES[dtype])
    return torch.frombuffer(bytearray(data), dtype=DTYPES[dtype]).view(shape)

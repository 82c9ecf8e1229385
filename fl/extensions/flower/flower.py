"""Requests and answers as Flower's messages; it needs the extra `flower`.

Only this file knows them.
"""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

from fl.base.errors import FLError
from fl.extensions.flower.messages import InvalidMessage, NodeMessage, from_raw, printable, raw

FlowerMessage: TypeAlias = Any
"""`flwr.app.Message`. Flower is imported where it is used, so that everything else works without it."""
RecordDict: TypeAlias = Any
Grid: TypeAlias = Any

_KIND = "layer-surgery"
"""How tensors are written (`Array.stype`): their bytes as they lie in memory, which nothing has to unpickle."""
_PAUSE = 0.05  # seconds between two looks for answers, at first
_LONGEST = 0.5
_NAMES = 1 << 20  # bytes of the names of an answer's pieces
_LATE = 64  # unanswered requests that are remembered, to report late answers


def pack(message: NodeMessage) -> RecordDict:
    """Pack a request or an answer for Flower: an ArrayRecord of tensors, and JSON."""
    from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

    arrays = {
        name: Array(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), _KIND, raw(tensor))
        for name, tensor in message.tensors.items()
    }
    record = ConfigRecord({"header": json.dumps(message.header)})
    return RecordDict({"tensors": ArrayRecord(arrays), "message": record})


def unpack(content: RecordDict, limit: int | None = None) -> NodeMessage:
    """Return the inverse of `pack`.

    Raises InvalidMessage for other content, or one that has more bytes than the limit.
    """
    from flwr.app import ArrayRecord, ConfigRecord

    tensors, record = content.get("tensors"), content.get("message")
    if not isinstance(tensors, ArrayRecord) or not isinstance(record, ConfigRecord) or len(content) != 2:
        raise InvalidMessage("it is no message of this project: other records came")
    text = record.get("header")
    if not isinstance(text, str):
        raise InvalidMessage("it has no header")
    size = len(text) + sum(len(array.data) for array in tensors.values())
    if limit is not None and size > limit:
        raise InvalidMessage(_too_long(size, limit))
    try:
        header = json.loads(text)
    except (ValueError, RecursionError):
        raise InvalidMessage("its header is not JSON") from None
    if strange := next((name for name, array in tensors.items() if array.stype != _KIND), None):
        raise InvalidMessage(f"{strange} is written as {tensors[strange].stype!r}, which is not read")
    return NodeMessage(header, {name: from_raw(a.data, a.dtype, a.shape) for name, a in tensors.items()})


class GridLink:
    """Requests over a Flower grid, see `fl.extensions.flower.nodes.Link`.

    Nodes are Flower's random node ids.
    """

    def __init__(self, grid: Grid) -> None:
        self.grid = grid
        self._open: dict[str, tuple[int, str]] = {}  # requests without an answer: the node, and what it was asked

    def nodes(self) -> list[int]:
        """Return the ids of the nodes that are connected."""
        return list(self.grid.get_node_ids())

    def ask(
        self, requests: Sequence[tuple[int, NodeMessage]], timeout: float, limit: int
    ) -> tuple[list[NodeMessage | str], list[tuple[int, str]]]:
        """See `fl.extensions.flower.nodes.Link`."""
        from flwr.app import Message

        answers: list[NodeMessage | str] = [f"no answer within {timeout:g} s"] * len(requests)
        waiting: dict[str, int] = {}  # by Flower's name of a message: the position of its request
        for k, (node, request) in enumerate(requests):
            kind = "query" if request.header["kind"] == "hello" else "train"
            # Flower throws answers away that come after their time; until then a late one is still seen, and named
            message = Message(
                pack(request), node, kind, ttl=2 * timeout + 60, group_id=str(request.header.get("round"))
            )
            (name,) = list(self.grid.push_messages([message])) or [None]
            if name is None:
                answers[k] = "Flower did not take the request to it"
            else:
                waiting[name] = k
        notes, end, pause = [], time.monotonic() + timeout, _PAUSE
        while waiting:
            for name, k in list(waiting.items()):
                if replies := self._pull(name, limit):
                    del waiting[name]
                    answers[k] = _read(replies[0], limit)
                    if len(replies) > 1:
                        notes.append((requests[k][0], "answered twice, and the first answer counts"))
            if not waiting or time.monotonic() >= end:
                break
            time.sleep(min(pause, max(0.0, end - time.monotonic())))
            pause = min(_LONGEST, pause * 1.2)
        notes += self._late()
        for name, k in waiting.items():
            node, request = requests[k]
            self._open[name] = (node, f"round {request.header.get('round', 0)}")
        for name in list(self._open)[:-_LATE]:
            del self._open[name]
        return answers, notes

    def _late(self) -> list[tuple[int, str]]:
        """Return which answers to earlier requests came since."""
        notes = []
        for name, (node, kind) in list(self._open.items()):
            if self._pull(name, 0):
                del self._open[name]
                notes.append((node, f"its answer of {kind} came late and is not used"))
        return notes

    def _pull(self, name: str, limit: int) -> list[FlowerMessage | str]:
        """Return the answers to one request, up to a number of bytes."""
        try:
            with _bound(self.grid, limit):
                return list(self.grid.pull_messages([name]))
        except _TooLong as error:
            return [str(error)]


class _TooLong(Exception):
    """An answer that is longer than what may be read of it."""


@contextmanager
def _bound(grid: Grid, limit: int) -> Iterator[None]:
    """Raise _TooLong in the block if a grid reads answers of more bytes than a limit.

    Flower takes a message apart into pieces of 5 MiB, which its grid fetches from the SuperLink one by one: this counts
    them. A grid within one process has them already, and `unpack` refuses them.
    """
    client = getattr(grid, "_runtime_client", None)
    if client is None:
        yield
        return
    fetch, read = client.PullObject, 0

    def count(request: Any) -> Any:
        nonlocal read
        if read > limit + _NAMES:
            raise _TooLong(_too_long(read, limit, "more than "))
        response = fetch(request)
        read += len(response.object_content)
        return response

    client.PullObject = count
    try:
        yield
    finally:
        del client.PullObject  # the class has it


def _reason(reply: FlowerMessage) -> str:
    """Return why a message has no answer, in one line."""
    return printable(f"Flower has no answer of it: {reply.error.reason or f'code {reply.error.code}'}")


def _read(reply: FlowerMessage | str, limit: int) -> NodeMessage | str:
    if isinstance(reply, str):
        return reply
    if reply.has_error():
        return _reason(reply)
    try:
        answer = unpack(reply.content, limit)
    except InvalidMessage as error:
        return str(error)
    if isinstance(answer.header, dict) and set(answer.header) == {"kind", "refused"}:
        return printable(answer.header["refused"])
    return answer


def reply_to(message: FlowerMessage, answer: Callable[[NodeMessage], NodeMessage]) -> FlowerMessage:
    """Return a node's reply to a message: its answer, or why there is none."""
    from flwr.app import Message

    try:
        content = pack(answer(unpack(message.content)))
    except FLError as error:
        content = pack(NodeMessage({"kind": "refused", "refused": str(error)}, {}))
    return Message(content, reply_to=message)


def _too_long(size: int, limit: int, more: str = "") -> str:
    return f"its answer has {more}{size:,} bytes, and at most {limit:,} were asked for"

"""The nodes of a run: who they are and what they have, and the exchange of requests with them."""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

from fl.base.errors import FLError
from fl.data import Dataset
from fl.deploy.messages import InvalidMessage, NodeMessage, fields, whole

_log = logging.getLogger("fl")

Address: TypeAlias = Any
"""Where a node is, as the link knows it."""

HEADER = 1 << 20  # bytes that an answer may have beside its tensors


class Link(Protocol):
    """Who carries requests, see `fl.deploy.flower`."""

    def nodes(self) -> Sequence[Address]:
        """The nodes that are connected."""

    def ask(
        self, requests: Sequence[tuple[Address, NodeMessage]], timeout: float, limits: Sequence[int]
    ) -> tuple[list[NodeMessage | str], list[tuple[Address, str]]]:
        """Send the requests and wait for the answers; an answer that cannot be used is the reason.

        Args:
            timeout: seconds.
            limits: bytes of each answer that may be read.

        Returns:
            An answer for each request, and what else came from which node: a second answer, or one to an earlier
            request.
        """


class Waiting(NamedTuple):
    """How long the server waits for whom.

    Attributes:
        round: seconds for the answers of a round.
        quorum: how many of a round's clients have to answer.
        nodes: how many nodes there have to be before the first round.
        start: seconds to wait for these.
    """

    round: float = 600.0
    quorum: int = 1
    nodes: int = 1
    start: float = 120.0


class Nodes:
    """The nodes behind a link.

    Args:
        test: the server's test set, which their data have to fit.
        labels: whether they are asked how many samples of each class they have.

    Attributes:
        reported: what each client's node said of itself when it registered.
        bytes_down, bytes_up: what the tensors of all requests and answers took so far.
    """

    def __init__(self, link: Link, waiting: Waiting, test: Dataset, labels: bool) -> None:
        """Wait for the nodes, and learn what they have."""
        self._link, self._waiting, self._test, self._labels = link, waiting, test, labels
        self._places: dict[int, Address] = {}
        self._strange: dict[Address, str] = {}
        self._closed = False
        self.reported: dict[int, dict[str, Any]] = {}
        self.bytes_down = self.bytes_up = 0
        self._wait()
        self._closed = True

    def exchange(
        self,
        clients: Sequence[int],
        requests: Sequence[NodeMessage],
        limits: Sequence[int],
        read: Callable[[int, NodeMessage], Any],
        round: int | None,
        what: str = "evaluation",
    ) -> dict[int, Any]:
        """Send each client its request and read the answers, by the clients' positions; those that could not be used
        are missing, and named in one line.

        Args:
            limits: bytes of each answer.
            read: (position, answer) -> what it says. Raises InvalidMessage for one that cannot be used.
            round: of the training, which needs a quorum; None: anything else, which does not.
            what: what else.

        Raises:
            FLError: if fewer than the quorum are left.
        """
        self._look_around(clients)
        known = [k for k, client in enumerate(clients) if client in self._places]
        sendable = [(self._places[clients[k]], requests[k]) for k in known]
        answers, notes = ([], [])
        if known:
            answers, notes = self._link.ask(sendable, self._waiting.round, [limits[k] for k in known])
        came, lost = {}, {k: "its node is not connected" for k in range(len(clients)) if k not in known}
        for k, answer in zip(known, answers):
            try:
                if isinstance(answer, str):
                    raise InvalidMessage(answer)
                came[k] = read(k, answer)
            except InvalidMessage as error:
                lost[k] = str(error)
        self.bytes_down += sum(request.size for _, request in sendable)
        self.bytes_up += sum(answer.size for answer in answers if isinstance(answer, NodeMessage))
        self._report(clients, lost, notes, round, what)
        return came

    def quorum(self, clients: Sequence[int]) -> int:
        """How many of these have to answer."""
        return max(1, min(self._waiting.quorum, len(clients)))

    def _report(
        self,
        clients: Sequence[int],
        lost: dict[int, str],
        notes: Sequence[tuple[Address, str]],
        round: int | None,
        what: str = "evaluation",
    ) -> None:
        """Log the outcome of a round in one line if anything went wrong; raise FLError if too few clients are left."""
        what = what if round is None else f"round {round}"
        names = {place: client for client, place in self._places.items()}
        reasons = [f"client {clients[k]} is left out ({reason})" for k, reason in sorted(lost.items())]
        reasons += [f"client {names.get(place, '?')}: {note}" for place, note in notes]
        left = len(clients) - len(lost)
        quorum = self.quorum(clients)
        if left < quorum and round is not None:
            raise FLError(
                f"round {round}: {left} of {len(clients)} clients answered, fewer than --quorum {quorum}: "
                f"{'; '.join(reasons)}. What came before is saved: see to these nodes and go on with --resume"
            )
        if reasons:
            _log.warning("warning: %s: %d of %d clients answered: %s", what, left, len(clients), "; ".join(reasons))

    def _wait(self) -> None:
        """Until enough nodes have said what they have."""
        wanted, end = self._waiting.nodes, time.monotonic() + self._waiting.start
        while True:
            self._greet(min(self._waiting.start, self._waiting.round))
            if len(self.reported) >= wanted and set(self.reported) == set(range(len(self.reported))):
                return
            if time.monotonic() > end:
                strange = "".join(f"; a node was refused: {reason}" for reason in self._strange.values())
                there = ", ".join(map(str, sorted(self.reported))) or "(none)"
                raise FLError(
                    f"after {self._waiting.start:g} s there are the nodes of clients {there}, and {wanted} are needed, "
                    f"numbered from 0 on{strange}: start the others, or give fewer --nodes"
                )
            time.sleep(0.2)

    def _look_around(self, clients: Sequence[int]) -> None:
        """Greet nodes that were started since, if some clients' nodes are gone."""
        there = set(self._link.nodes())
        self._places = {client: place for client, place in self._places.items() if place in there}
        if any(client not in self._places for client in clients):
            self._greet(min(30.0, self._waiting.round))

    def _greet(self, timeout: float) -> None:
        """Ask the nodes that are not known yet what they have."""
        known = set(self._places.values()) | set(self._strange)
        new = [place for place in self._link.nodes() if place not in known]
        if not new:
            return
        hello = NodeMessage({"kind": "hello", "labels": self._labels}, {})
        answers, _ = self._link.ask([(place, hello) for place in new], timeout, [HEADER] * len(new))
        for place, answer in zip(new, answers):
            try:
                said = self._introduced(answer)
            except InvalidMessage as error:
                if isinstance(answer, NodeMessage):  # silence may pass
                    self._strange[place] = str(error)
                    _log.warning("warning: a node is refused: %s", error)
                continue
            self._places[said["client"]], self.reported[said["client"]] = place, said

    def _introduced(self, answer: NodeMessage | str) -> dict[str, Any]:
        """What a node says of itself. Raises InvalidMessage if it does not fit the test set, or what it said before."""
        if isinstance(answer, str):
            raise InvalidMessage(answer)
        wanted = {"kind": str, "client": int, "sizes": list, "sample": list, "target": list, "classes": int, "top": int}
        said = fields(answer.header, {**wanted, "budget": dict})
        client, data = said["client"], self._test
        if said["kind"] != "here" or client < 0 or not whole(said["sizes"]) or len(said["sizes"]) != 3:
            raise InvalidMessage("it did not say which client it is and what it has")
        if not said["sizes"][0]:
            raise InvalidMessage(f"client {client} has no training samples")
        if client in self._places:
            raise InvalidMessage(f"two nodes say that they are client {client}: give each a partition-id of its own")
        ours = [str(data.test_x.dtype).removeprefix("torch."), *data.test_x.shape[1:]]
        for name, here in (
            ("sample", ours),
            ("target", list(data.test_y.shape[1:])),
            ("classes", data.classes),
            ("top", data.top),
        ):
            if said[name] != here:
                raise InvalidMessage(
                    f"client {client}'s data have {name} {said[name]}, and the server's test set {here}"
                )
        if self._labels and not (
            whole(said.get("labels"))
            and len(said["labels"]) == data.classes
            and sum(said["labels"]) == said["sizes"][0]
        ):
            raise InvalidMessage(f"client {client} did not say how many samples of each class it has")
        if self._closed and (client not in self.reported or said["sizes"] != self.reported[client]["sizes"]):
            raise InvalidMessage(f"client {client} is no client of this run, or has other data than at the start")
        if not all(isinstance(said["budget"].get(key, 1), int | float | list) for key in said["budget"]):
            raise InvalidMessage(f"client {client}'s budget is {said['budget']}")
        return said

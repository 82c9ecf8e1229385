"""The nodes of a run, what data they have, and the exchange of requests."""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

from fl.base.errors import FLError
from fl.data import Dataset
from fl.extensions.flower.messages import InvalidMessage, NodeMessage, are_counts, fields, form_of
from surgery.memory import shortage

_log = logging.getLogger("fl")

Address: TypeAlias = Any
"""Where a node is, as the link knows it."""

HEADER = 1 << 20  # bytes that an answer may have beside its tensors
MOST_SAMPLES = 10**8
"""Samples that a client may say it has, for each of training, validation and test: the server numbers all of them."""
_SAMPLE_BYTES = 24  # a sample's number, and copies of it while samples are partitioned


class Link(Protocol):
    """Carrier of requests, see `fl.extensions.flower.flower`."""

    def nodes(self) -> Sequence[Address]:
        """Return the nodes that are connected."""

    def ask(
        self, requests: Sequence[tuple[Address, NodeMessage]], timeout: float, limit: int
    ) -> tuple[list[NodeMessage | str], list[tuple[Address, str]]]:
        """Send the requests and wait for the answers, or the reasons why there are none.

        Args:
            timeout: seconds.
            limit: bytes of an answer that are read at most.

        Returns:
            An answer for each request, and what else came from which node: a second answer, or one to an earlier
            request.
        """


class Timeouts(NamedTuple):
    """The times that the server waits for nodes.

    Attributes:
        round: seconds for the answers of a round.
        quorum: how many of a round's clients have to answer.
        nodes: how many nodes the run has, numbered from 0. The first round waits for all of them.
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
    """

    def __init__(self, link: Link, timeouts: Timeouts, test: Dataset, labels: bool) -> None:
        """Wait for the nodes, and learn what they have."""
        self._link, self._timeouts, self._labels = link, timeouts, labels
        self._places: dict[int, Address] = {}
        self._refused: dict[Address, str] = {}
        self._complete = False
        self._data = form_of(test)
        self.reported: dict[int, dict[str, Any]] = {}
        self._wait()
        self._complete = True

    def exchange(
        self,
        clients: Sequence[int],
        requests: Sequence[NodeMessage],
        limit: int,
        read: Callable[[int, NodeMessage], Any],
        label: str,
        round: int | None = None,
        every: bool = False,
    ) -> dict[int, Any]:
        """Send each client its request and return the answers, by the clients' positions.

        Those that could not be used are missing, and named in one line.

        Args:
            limit: bytes of an answer's tensors.
            read: (position, answer) -> what it says. Raises InvalidMessage for one that cannot be used.
            label: names the exchange in that line.
            round: of the training, which needs a quorum; None: anything else.
            every: whether all have to answer.

        Raises:
            FLError: if fewer than the quorum are left, or than all where all have to answer.
        """
        known, sendable = self._address(clients, requests)
        answers, notes = self._link.ask(sendable, self._timeouts.round, HEADER + limit) if known else ([], [])
        came, lost = {}, {k: "its node is not connected" for k in range(len(clients)) if k not in known}
        for k, answer in zip(known, answers):
            try:
                self._check(answer, requests[k])
                came[k] = read(k, answer)
            except InvalidMessage as error:
                lost[k] = str(error)
        if every and lost:
            same: dict[str, list[str]] = {}
            for k, why in sorted(lost.items()):
                same.setdefault(why, []).append(f"client {clients[k]}")
            raise FLError(
                f"{label}: " + "; ".join(f"{', '.join(who)}: {why}" for why, who in same.items()), code="peers"
            )
        names = {place: client for client, place in self._places.items()}
        reasons = [f"client {clients[k]} is left out ({reason})" for k, reason in sorted(lost.items())]
        reasons += [f"client {names.get(place, '?')}: {note}" for place, note in notes]
        if round is not None:
            self.require_quorum(len(came), len(clients), "answered", round, reasons)
        _warn(label, len(came), len(clients), reasons)
        return came

    def require_quorum(self, left: int, of: int, did: str, round: int, reasons: Sequence[str]) -> None:
        """Raise FLError if fewer clients of a round are left than are needed.

        Args:
            did: what those that are left did, for the message.
            reasons: why the others are not left.
        """
        quorum = max(1, min(self._timeouts.quorum, of))
        if left < quorum:
            raise FLError(
                f"round {round}: {left} of {of} clients {did}, fewer than --quorum {quorum}: {'; '.join(reasons)}. "
                "What came before is saved: see to these nodes and continue with --resume",
                code="peers",
            )

    def _check(self, answer: NodeMessage | str, request: NodeMessage) -> None:
        """Raise InvalidMessage unless this answers the request, on the reported data."""
        if isinstance(answer, str):
            raise InvalidMessage(answer)
        header = fields(answer.header, {"kind": str, "round": int, "ticket": str, "client": int, "samples": int})
        for name in ("kind", "round", "client", "ticket"):
            if header[name] != request.header[name]:
                raise InvalidMessage(f"it answers for {name} {header[name]}, and {request.header[name]} was asked")
        samples = self.reported[header["client"]]["sizes"][0]
        if header["samples"] != samples:
            raise InvalidMessage(f"it trained on {header['samples']} samples, and reported {samples} at the start")

    def _wait(self) -> None:
        """Until enough nodes have said what they have."""
        wanted, end = self._timeouts.nodes, time.monotonic() + self._timeouts.start
        while True:
            self._greet(min(self._timeouts.start, self._timeouts.round))
            if len(self.reported) == wanted:  # numbered from 0 on
                return
            if time.monotonic() > end:
                refused = "".join(f"; a node was refused: {reason}" for reason in self._refused.values())
                there = ", ".join(map(str, sorted(self.reported))) or "(none)"
                raise FLError(
                    f"after {self._timeouts.start:g} s there are nodes of clients {there}, and {wanted} are needed, "
                    f"numbered from 0 on{refused}: start the others, or give fewer --nodes",
                    code="peers",
                )
            time.sleep(0.2)

    def _address(
        self, clients: Sequence[int], requests: Sequence[NodeMessage]
    ) -> tuple[list[int], list[tuple[Address, NodeMessage]]]:
        """Return positions of connected clients, and their requests with places.

        If some are gone, nodes that were started since are greeted first.
        """
        there = set(self._link.nodes())
        self._places = {client: place for client, place in self._places.items() if place in there}
        if any(client not in self._places for client in clients):
            self._greet(min(30.0, self._timeouts.round))
        known = [k for k, client in enumerate(clients) if client in self._places]
        return known, [(self._places[clients[k]], requests[k]) for k in known]

    def _greet(self, timeout: float) -> None:
        """Ask the nodes that are not known yet what they have."""
        known = {*self._places.values(), *self._refused}
        new = [place for place in self._link.nodes() if place not in known]
        if not new:
            return
        hello = NodeMessage({"kind": "hello", "labels": self._labels}, {})
        answers, _ = self._link.ask([(place, hello) for place in new], timeout, HEADER)
        for place, answer in zip(new, answers):
            if isinstance(answer, str):  # silence may pass
                continue
            try:
                record = self._introduce(answer.header)
            except InvalidMessage as error:
                self._refused[place] = str(error)
                _log.warning("warning: a node is refused: %s", error)
            else:
                self._places[record["client"]], self.reported[record["client"]] = place, record

    def _introduce(self, header: Any) -> dict[str, Any]:
        """Return what a node says of itself.

        Raises InvalidMessage if it does not fit the test set, or what it said before.
        """
        wanted = {"kind": str, "client": int, "sizes": list, "sample": list, "target": list, "classes": int, "top": int}
        record = fields(header, {**wanted, "budget": dict})
        client = record["client"]
        if record["kind"] != "hello" or client < 0 or not are_counts(record["sizes"]) or len(record["sizes"]) != 3:
            raise InvalidMessage("it did not say which client it is and what it has")
        if client >= (count := self._timeouts.nodes):
            raise InvalidMessage(
                f"a node says that it is client {client}, and with --nodes {count} they are numbered up to {count - 1}"
            )
        if (most := max(record["sizes"])) > MOST_SAMPLES:
            raise InvalidMessage(f"client {client} says that it has {most:,} samples, and {MOST_SAMPLES:,} is the most")
        if not record["sizes"][0]:
            raise InvalidMessage(f"client {client} has no training samples")
        if client in self._places:
            raise InvalidMessage(f"two nodes say that they are client {client}: give each a partition-id of its own")
        for name, expected in self._data.items():
            if record[name] != expected:
                raise InvalidMessage(
                    f"client {client}'s data have {name} {record[name]}, and the server's test set {expected}"
                )
        if self._labels:
            labels = record.get("labels")
            fits = are_counts(labels) and len(labels) == record["classes"] and sum(labels) == record["sizes"][0]
            if not fits:
                raise InvalidMessage(f"client {client} did not say how many samples of each class it has")
        if self._complete and (client not in self.reported or record["sizes"] != self.reported[client]["sizes"]):
            raise InvalidMessage(f"client {client} is no client of this run, or has other data than at the start")
        flat = [
            number for value in record["budget"].values() for number in (value if isinstance(value, list) else [value])
        ]
        if (
            record["budget"].keys() - {"width", "depth", "budget"}
            or isinstance(record["budget"].get("budget"), list)
            or not all(type(number) in (int, float) and abs(number) < 1 << 63 for number in flat)
        ):
            raise InvalidMessage(f"client {client}'s budget is {record['budget']}")
        total = sum(sum(sizes) for sizes in (record["sizes"], *(known["sizes"] for known in self.reported.values())))
        if not self._complete and (lack := shortage(_SAMPLE_BYTES * total)):
            raise InvalidMessage(
                f"client {client} says that it has {sum(record['sizes']):,} samples, and the numbers of {total:,} "
                f"{lack}"
            )
        return record


def _warn(label: str, came: int, of: int, reasons: Sequence[str]) -> None:
    if reasons:
        _log.warning("warning: %s: %d of %d clients answered: %s", label, came, of, "; ".join(reasons))

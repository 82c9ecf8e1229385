"""The carrier of the frames: here a queue within one process."""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping

from fl.secure.party import Envelope, Party
from fl.secure.server import Server


class Network:
    """Carries frames between a server and its clients, in the order in which they were sent, and counts them.

    Over sockets the same three are enough: `receive` for incoming frames, `tick` after a while without any, and
    `finished` to stop.

    Args:
        tap: what happens on the way: envelope -> the envelopes that are delivered instead. Tests lose, repeat and
            change frames here; by default all frames arrive.

    Attributes:
        sent: bytes by (sender, recipient).
    """

    def __init__(self, tap: Callable[[Envelope], Iterable[Envelope]] = lambda envelope: (envelope,)) -> None:
        self.tap = tap
        self.sent: Counter[tuple[int, int]] = Counter()

    def run(self, server: Server, clients: Mapping[int, Party]) -> None:
        """Run the protocol until the server has finished and no frame is on its way."""
        parties = {server.address: server, **clients}
        on_the_way = deque(server.start({address: client.public for address, client in clients.items()}))
        while on_the_way or not server.finished:
            if not on_the_way:
                on_the_way.extend(server.tick())
                continue
            envelope = on_the_way.popleft()
            self.sent[envelope.sender, envelope.recipient] += len(envelope.frame)
            for arrived in self.tap(envelope):
                if arrived.recipient in parties:
                    on_the_way.extend(parties[arrived.recipient].receive(arrived.frame))

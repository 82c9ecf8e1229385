"""One client after another, plain and eager: the reference that the other backends are compared with."""

from collections.abc import Sequence

from fl.engine.job import Group, Results
from fl.engine.progress import count
from fl.engine.replica import Replica


def train(groups: Sequence[Group]) -> list[Results]:
    """Train the clients of every group sequentially. See `fl.engine.train`."""
    done = []
    for group in groups:
        replica, results = Replica(group), Results.empty(group)
        for k in range(len(replica.job.batches.steps)):
            for _ in replica.train(k, results):
                pass
            count(1)
        done.append(results)
    return done

"""How much the processes of a simulation send each other."""

from fl.base.columns import Column
from fl.parallel import current
from fl.runs.columns.moment import Moment


def bytes_ranks(moment: Moment) -> float | None:
    """Bytes of tensors that all ranks together have sent in the round; None for a run in one process."""
    return current().read_moved() if current().size > 1 else None


COLUMN = Column(measure=bytes_ranks)

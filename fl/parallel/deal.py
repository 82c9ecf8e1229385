"""Which rank trains which clients."""

from collections.abc import Sequence


def deal(work: Sequence[int], ranks: int) -> list[list[int]]:
    """The rows of a cohort that each rank trains: the largest first, each to the rank with the least work so far.

    The result is the same on all ranks. No rank has more than 4/3 of the work that the best way to deal would give it
    (Graham, "Bounds on multiprocessing timing anomalies", 1969). With fewer rows than ranks, some ranks have none.

    Args:
        work: of each row, in any unit; those of no work count as 1.

    >>> deal([3, 1, 1, 1], ranks=2)
    [[0], [1, 2, 3]]
    """
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for row in sorted(range(len(work)), key=lambda row: (-work[row], row)):
        rank = min(range(ranks), key=lambda rank: (loads[rank], rank))
        dealt[rank].append(row)
        loads[rank] += max(work[row], 1)
    return [sorted(rows) for rows in dealt]

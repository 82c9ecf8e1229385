"""Several processes of one simulation; each trains its share of every cohort.

torchrun starts them. All of them, called ranks, run the same program with the same settings and seeds, so that only the
results of training have to move: after each training every rank has the whole cohort's. Rank 0 also prints and writes
the run folder. A process that is not one of several is rank 0 of one. If a rank dies, torchrun ends the others.
"""

from fl.distributed.ranks import Ranks, current, deal, is_joined, is_one_of_several, join_ranks

__all__ = ["Ranks", "current", "deal", "is_joined", "is_one_of_several", "join_ranks"]

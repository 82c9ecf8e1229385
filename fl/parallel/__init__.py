"""Several processes that carry out one simulation, started by torchrun: each trains its share of every cohort.

All of them, called ranks, run the same program with the same settings and seeds, so that only the results of training
have to move. Rank 0 also measures, prints and writes the run folder. A process that is not one of several is `alone`.
"""

from fl.parallel.deal import deal
from fl.parallel.join import joined
from fl.parallel.ranks import Ranks, Stopped, current

__all__ = ["Ranks", "Stopped", "current", "deal", "joined"]

"""What a column can be measured from."""

from typing import NamedTuple

from fl.algorithms.algorithm import Algorithm, Server
from fl.config import Config
from fl.federation import Federation
from fl.federation.cohort import Cohort


class Moment(NamedTuple):
    """A run right after a round.

    Attributes:
        server: what the server keeps, after the round.
        cohort: the participants' models after local training, before they were averaged.
    """

    config: Config
    fed: Federation
    algorithm: Algorithm
    server: Server
    cohort: Cohort

"""FeSEM+: FeSEM whose clients fine-tune their cluster's model, as in the comparison of FeMAM (section C.1)."""

from dataclasses import dataclass

from fl.algorithms.algorithm import Algorithm
from fl.algorithms.fesem import FeSEMOptions, fesem
from fl.algorithms.method import Method
from fl.algorithms.parts.personal import fine_tuned
from fl.base.settings import Natural
from fl.federation import Federation


@dataclass(frozen=True)
class FeSEMPlusOptions(FeSEMOptions):
    """FeSEM+."""

    epochs: Natural = 2
    """epochs for which every client fine-tunes its cluster's model before it predicts (FeMAM's paper: 2); 0 is FeSEM"""


def fesem_plus(fed: Federation, options: FeSEMPlusOptions = FeSEMPlusOptions()) -> Algorithm:
    """FeSEM; a client predicts with its cluster's model fine-tuned on its own data, see `fine_tuned`.

    A client that never took part fine-tunes the mean of the cluster models.
    """
    return fine_tuned(fed, fesem(fed, options, "fesem-plus"), options.epochs)


METHOD = Method(fesem_plus, FeSEMPlusOptions(), clients="personalized", lacks={"whole_average", "same_model"})

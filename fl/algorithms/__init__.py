"""Federated methods, one file each, read next to its paper."""

from fl.algorithms.clusamp import clusamp
from fl.algorithms.fedasam import FedASAMOptions, fedasam
from fl.algorithms.fedavg import fedavg
from fl.algorithms.fedexp import FedExPOptions, fedexp
from fl.algorithms.fedgen import FedGenOptions, fedgen
from fl.algorithms.fedmr import FedMROptions, fedmr
from fl.algorithms.fedmut import FedMutOptions, fedmut
from fl.algorithms.fedprox import FedProxOptions, fedprox
from fl.algorithms.femam import FeMAMOptions, femam
from fl.algorithms.fesem import FeSEMOptions, fesem
from fl.algorithms.indep import indep

ALGORITHMS = {
    "fedavg": lambda fed, config: fedavg(fed),
    "fedprox": lambda fed, config: fedprox(fed, config.fedprox),
    "fedgen": lambda fed, config: fedgen(fed, config.fedgen),
    "clusamp": lambda fed, config: clusamp(fed),
    "fedexp": lambda fed, config: fedexp(fed, config.fedexp),
    "fedasam": lambda fed, config: fedasam(fed, config.fedasam),
    "fedmut": lambda fed, config: fedmut(fed, config.fedmut),
    "fedmr": lambda fed, config: fedmr(fed, config.fedmr),
    "indep": lambda fed, config: indep(fed),
    "fesem": lambda fed, config: fesem(fed, config.fesem),
    "femam": lambda fed, config: femam(fed, config.femam),
}
"""From a method's name to a function of (federation, config) that makes it."""

__all__ = [
    "ALGORITHMS",
    "FeMAMOptions",
    "FeSEMOptions",
    "FedASAMOptions",
    "FedExPOptions",
    "FedGenOptions",
    "FedMROptions",
    "FedMutOptions",
    "FedProxOptions",
    "clusamp",
    "fedasam",
    "fedavg",
    "fedexp",
    "fedgen",
    "fedmr",
    "fedmut",
    "fedprox",
    "femam",
    "fesem",
    "indep",
]

"""Federated methods, one file each, read next to its paper."""

from fl.algorithms.clusamp import clusamp
from fl.algorithms.ditto import DittoOptions, ditto
from fl.algorithms.fedasam import FedASAMOptions, fedasam
from fl.algorithms.fedavg import fedavg
from fl.algorithms.fedavg_plus import FedAvgPlusOptions, fedavg_plus
from fl.algorithms.fedexp import FedExPOptions, fedexp
from fl.algorithms.fedfa import FedFAOptions, fedfa
from fl.algorithms.fedgen import FedGenOptions, fedgen
from fl.algorithms.fedmr import FedMROptions, fedmr
from fl.algorithms.fedmut import FedMutOptions, fedmut
from fl.algorithms.fedprox import FedProxOptions, fedprox
from fl.algorithms.fedrep import FedRepOptions, fedrep
from fl.algorithms.fedrolex import fedrolex
from fl.algorithms.femam import FeMAMOptions, femam
from fl.algorithms.fesem import FeSEMOptions, fesem
from fl.algorithms.fesem_plus import FeSEMPlusOptions, fesem_plus
from fl.algorithms.flexifed import FlexiFedOptions, flexifed
from fl.algorithms.heterofl import HeteroFLOptions, heterofl
from fl.algorithms.indep import indep
from fl.algorithms.local import local
from fl.algorithms.nefl import NeFLOptions, nefl
from fl.algorithms.pfedme import PFedMeOptions, pfedme

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
    "local": lambda fed, config: local(fed),
    "fedavg_plus": lambda fed, config: fedavg_plus(fed, config.fedavg_plus),
    "pfedme": lambda fed, config: pfedme(fed, config.pfedme),
    "fedrep": lambda fed, config: fedrep(fed, config.fedrep),
    "ditto": lambda fed, config: ditto(fed, config.ditto),
    "fesem": lambda fed, config: fesem(fed, config.fesem),
    "fesem_plus": lambda fed, config: fesem_plus(fed, config.fesem_plus),
    "femam": lambda fed, config: femam(fed, config.femam),
    "fedfa": lambda fed, config: fedfa(fed, config.fedfa),
    "heterofl": lambda fed, config: heterofl(fed, config.heterofl),
    "fedrolex": lambda fed, config: fedrolex(fed, config.fedrolex),
    "nefl": lambda fed, config: nefl(fed, config.nefl),
    "flexifed": lambda fed, config: flexifed(fed, config.flexifed),
}
"""From a method's name to a function of (federation, config) that makes it."""

MIXED = ["fedfa", "heterofl", "fedrolex", "nefl", "flexifed"]
"""Those whose clients may have different architectures; a new one is appended."""

__all__ = [
    "ALGORITHMS",
    "MIXED",
    "DittoOptions",
    "FeMAMOptions",
    "FeSEMOptions",
    "FeSEMPlusOptions",
    "FedASAMOptions",
    "FedAvgPlusOptions",
    "FedExPOptions",
    "FedFAOptions",
    "FedGenOptions",
    "FedMROptions",
    "FedMutOptions",
    "FedProxOptions",
    "FedRepOptions",
    "FlexiFedOptions",
    "HeteroFLOptions",
    "NeFLOptions",
    "PFedMeOptions",
    "clusamp",
    "ditto",
    "fedasam",
    "fedavg",
    "fedavg_plus",
    "fedexp",
    "fedfa",
    "fedgen",
    "fedmr",
    "fedmut",
    "fedprox",
    "fedrep",
    "fedrolex",
    "femam",
    "fesem",
    "fesem_plus",
    "flexifed",
    "heterofl",
    "indep",
    "local",
    "nefl",
    "pfedme",
]

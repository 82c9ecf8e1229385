"""Federated methods composed from `surgery` and `zoo`: `python -m fl.run`, or from Python as below.

>>> config = Config(algorithm=("fedmr",), rounds=1)
>>> fed, algorithm = build(config)
>>> server = algorithm.init()
>>> rng = Rng(seed=0, round=1)
>>> server, trained = algorithm.round(server, algorithm.choose(fed, server, rng), rng)
>>> algorithm.predict(server, fed.data.test_x, None).shape
torch.Size([360, 10])
"""

from fl.algorithm import Algorithm, Server
from fl.architectures import ArchitectureOptions
from fl.assembly import build
from fl.attack import AttackOptions
from fl.config import Config
from fl.defence import Defence
from fl.errors import FLError
from fl.federation import Federation
from fl.pathways import Pathways
from fl.rng import Rng
from fl.simulation import load_model, simulate

__all__ = [
    "Algorithm",
    "ArchitectureOptions",
    "AttackOptions",
    "Config",
    "Defence",
    "FLError",
    "Federation",
    "Pathways",
    "Rng",
    "Server",
    "build",
    "load_model",
    "simulate",
]

"""Federated methods composed from `surgery` and `zoo`: `python -m fl.run`, or from Python as below.

>>> from fl import Config, Rng, build
>>> config = Config.of(algorithm="fedmr", rounds=1)
>>> fed, algorithm = build(config)
>>> server = algorithm.init()
>>> rng = Rng(seed=0, round=1)
>>> server, update = algorithm.round(server, algorithm.choose(server, rng), rng)
>>> algorithm.predict(server, fed.data.test_x, None).shape
torch.Size([360, 10])
"""

from fl.base.console import refuse_import as _refuse_import
from fl.base.errors import FLError

try:
    from fl.algorithms.algorithm import Algorithm, Server
    from fl.analysis.several import Results, results, simulate_all
    from fl.base.rng import Rng
    from fl.data import Dataset
    from fl.federation import Federation, LocalTraining
    from fl.models.architectures import ArchitectureOptions
    from fl.runs.assembly import build
    from fl.runs.export import export_model
    from fl.runs.folder import load_model
    from fl.runs.pathways import Pathways
    from fl.runs.personalize import personalize
    from fl.runs.simulation import Round, Run, simulate
    from fl.settings import Config, Experiment
    from fl.settings.extensions import EXTENSIONS as _EXTENSIONS
except FLError as error:  # one of the files that extend this project is broken
    _refuse_import(error)
    raise
from surgery import __version__ as __version__

__all__ = [
    "Algorithm",
    "ArchitectureOptions",
    "Config",
    "Dataset",
    "Experiment",
    "FLError",
    "Federation",
    "LocalTraining",
    "Pathways",
    "Results",
    "Rng",
    "Round",
    "Run",
    "Server",
    "build",
    "export_model",
    "load_model",
    "personalize",
    "results",
    "simulate",
    "simulate_all",
]


def __getattr__(name: str) -> type:
    """Find the options of an extension, such as `fl.Compression`."""
    for extension in _EXTENSIONS.values():
        if type(extension.options).__name__ == name:
            return type(extension.options)
    raise AttributeError(f"module 'fl' has no attribute {name!r}")

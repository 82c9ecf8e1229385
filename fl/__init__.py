"""Federated methods composed from `surgery` and `zoo`: `python -m fl.run`, or from Python as below.

>>> from fl import Config, Rng, build
>>> config = Config(algorithm=("fedmr",), rounds=1)
>>> fed, algorithm = build(config)
>>> server = algorithm.init()
>>> rng = Rng(seed=0, round=1)
>>> server, trained = algorithm.round(server, algorithm.choose(fed, server, rng), rng)
>>> algorithm.predict(server, fed.data.test_x, None).shape
torch.Size([360, 10])
"""

import sys
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fl.algorithms.algorithm import Algorithm, Server
    from fl.base.errors import FLError
    from fl.base.rng import Rng
    from fl.config import Config
    from fl.data import Dataset
    from fl.federation import Federation, LocalTraining
    from fl.federation.attack import AttackOptions
    from fl.federation.defence import Defence
    from fl.models.architectures import ArchitectureOptions
    from fl.runs.assembly import build
    from fl.runs.export import export
    from fl.runs.folder import load_model
    from fl.runs.one_run import simulate
    from fl.runs.pathways import Pathways

__all__ = [
    "Algorithm",
    "ArchitectureOptions",
    "AttackOptions",
    "Config",
    "Dataset",
    "Defence",
    "FLError",
    "Federation",
    "LocalTraining",
    "Pathways",
    "Rng",
    "Server",
    "build",
    "export",
    "load_model",
    "simulate",
]

_WHERE = {
    "Algorithm": "fl.algorithms.algorithm",
    "ArchitectureOptions": "fl.models.architectures",
    "AttackOptions": "fl.federation.attack",
    "Config": "fl.config",
    "Dataset": "fl.data",
    "Defence": "fl.federation.defence",
    "FLError": "fl.base.errors",
    "Federation": "fl.federation",
    "LocalTraining": "fl.federation",
    "Pathways": "fl.runs.pathways",
    "Rng": "fl.base.rng",
    "Server": "fl.algorithms.algorithm",
    "build": "fl.runs.assembly",
    "export": "fl.runs.export",
    "load_model": "fl.runs.folder",
    "simulate": "fl.runs.one_run",
}
"""Names are imported when they are first used, so that commands which need no PyTorch do not wait for it."""

_MOVED = {"algorithm": "fl.algorithms.algorithm", "submodels": "fl.algorithms.parts.submodels"}
"""Modules that had other names in version 0.1."""


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        value = getattr(import_module(_WHERE[name]), name)
    elif name == "__version__":
        value = import_module("surgery").__version__
    elif name in _MOVED:
        value = import_module(_MOVED[name])
    elif not name.startswith("_") and find_spec(f"{__name__}.{name}"):  # `import fl` is enough for `fl.data.load`
        value = import_module(f"{__name__}.{name}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Moved(ModuleType):
    """`from fl.algorithm import Server`, without importing anything before that."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # the import system asks for these
            raise AttributeError(name)
        return getattr(import_module(_MOVED[self.__name__.rpartition(".")[2]]), name)


sys.modules.update({f"{__name__}.{name}": _Moved(f"{__name__}.{name}") for name in _MOVED})

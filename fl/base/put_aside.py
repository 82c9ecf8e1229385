"""Slow packages put aside while help is printed: help needs the settings alone, and PyTorch takes seconds to import."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

SLOW = ("torch", "torchvision", "timm", "scipy", "sklearn", "matplotlib", "safetensors")
_OURS = ("fl", "surgery", "zoo")


@contextmanager
def put_aside(packages: tuple[str, ...] = SLOW) -> Iterator[None]:
    """Within it, modules that import these packages are imported without them: what they name is a class that does
    nothing, enough to derive from, to decorate with and to annotate. Afterwards these packages are forgotten, and so
    are the modules of this project that were imported without them, with the names that its packages took from them.

    For code that reads declarations; nothing can be computed. Packages that are imported already are left alone.

    >>> with put_aside(("antigravity",)):
    ...     import antigravity.planes as planes
    ...     class Glider(planes.Plane): pass
    >>> "antigravity" in sys.modules
    False
    """
    finder, before = _Finder([name for name in packages if name not in sys.modules]), set(sys.modules)
    ours = {module: dict(vars(module)) for name, module in sys.modules.items() if _is_package_of_ours(name, module)}
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in set(sys.modules) - before:
            if name.split(".")[0] in (*finder.packages, *_OURS):
                del sys.modules[name]
        for package, names in ours.items():
            for name in vars(package).keys() - names:
                delattr(package, name)
            vars(package).update(names)


def _is_package_of_ours(name: str, module: ModuleType) -> bool:
    return name.split(".")[0] in _OURS and hasattr(module, "__path__")


class _Nothing(type):
    """Classes whose attributes, items and results are such classes."""

    def __getattr__(cls, name: str) -> Any:
        return _named(cls, name)

    def __call__(cls, *_: Any, **__: Any) -> Any:
        return _Nothing(cls.__name__, (), {})

    def __iter__(cls) -> Iterator[Any]:
        return iter(())

    def _itself(cls, *_: Any) -> Any:
        return cls

    __getitem__ = __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _itself
    __pow__ = __rpow__ = __neg__ = _itself


class _Module(ModuleType):
    """A module in which everything can be found."""

    __path__: tuple[str, ...] = ()

    def __getattr__(self, name: str) -> Any:
        return _named(self, name)


def _named(owner: Any, name: str) -> Any:
    """The same class each time that an attribute is asked for; no special methods, which would have to do something."""
    if name.startswith("__"):
        raise AttributeError(name)
    setattr(owner, name, found := _Nothing(name, (), {}))
    return found


class _Finder(MetaPathFinder, Loader):
    def __init__(self, packages: list[str]) -> None:
        self.packages = packages

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.split(".")[0] in self.packages else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass

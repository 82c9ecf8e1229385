"""What the files of a package declare. A new file is found here, so nothing else has to name it."""

from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from fl.base.errors import FLError


def declared(package: str, name: str, kind: type) -> dict[str, Any]:
    """The value called `name` of every file of a package that has one: file name -> value, in alphabetical order.

    All files of the package are imported, but not its subpackages and not `__main__`.

    Raises:
        FLError: for a value that is not of this kind; it names the file.

    >>> list(declared("fl.partition", "KIND", object))
    ['clusters', 'contiguous', 'dirichlet', 'iid', 'natural', 'shards']
    """
    result = {}
    for file in iter_modules(import_module(package).__path__):
        if file.ispkg or file.name == "__main__":
            continue
        value = vars(import_module(f"{package}.{file.name}")).get(name)
        if value is None:
            continue
        if not isinstance(value, kind):
            raise FLError(f"{package}.{file.name}: {name} must be a {kind.__name__}, got {value!r}")
        result[file.name] = value
    return result

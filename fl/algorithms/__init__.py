"""Federated methods, one file each, to be read next to its paper.

To add one, add a file with a `METHOD`, or name a `Method` as an entry point of the group `layer_surgery.algorithms` in
a package of your own; `--algorithm module:METHOD` takes one from any module.
"""

from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

from fl.algorithms.method import KINDS, Method
from fl.base.errors import FLError
from fl.base.plugins import files_of, find, import_file, kind, list_installed, load_entry_points


class Methods(MutableMapping[str, Method]):
    """Methods by name, of files and of packages; files are imported on request.

    They are listed in the order of `KINDS`; then come those that were added.
    """

    def __init__(self) -> None:
        self._files = {file.rpartition(".")[2]: file for file in files_of(__name__)}  # that were not imported
        self._packages = True  # whether there may be more in packages
        self._methods: dict[str, Method] = {}
        self._ours: set[str] = set()  # names of methods of files and packages

    @property
    def added(self) -> list[str]:
        """The names of methods that a program has added."""
        return [name for name in self._methods if name not in self._ours]

    def __getitem__(self, name: str) -> Method:
        """Return a method; KeyError for an unknown name.

        FLError for a file that cannot be imported.
        """
        if name in self._files:
            self._load(name)
        elif name not in self._methods and self._packages and name in list_installed("algorithms"):
            self._load_packages()
        return self._methods[name]

    def _load(self, name: str) -> None:
        method = vars(import_file(file := self._files[name])).get("METHOD")
        if not isinstance(method, Method | None):
            raise FLError(f"{file}: METHOD must be a Method, got {method!r}")
        if method is not None and method.name != name:
            raise FLError(f"{file}: METHOD has to be Method({name}, ...), with the function of that name")
        self._files.pop(name, None)
        if method is not None:  # and not what methods share
            self._ours.add(name)
            self._methods[name] = method

    def _load_packages(self) -> None:
        self._packages = False
        methods = load_entry_points("algorithms", self, _check)
        self._ours.update(methods)
        self._methods |= methods

    def __setitem__(self, name: str, method: Method) -> None:
        if self._files.pop(name, None):
            self._ours.add(name)
        self._methods[name] = method

    def __delitem__(self, name: str) -> None:
        self[name]
        del self._methods[name]

    def __iter__(self) -> Iterator[str]:
        for name in [*self._files]:
            if name in self._files:  # which another file may have asked for
                self._load(name)
        if self._packages:
            self._load_packages()
        clients = {name: getattr(self._methods[name], "clients", KINDS[0]) for name in self._ours & {*self._methods}}
        return iter([*sorted(clients, key=lambda name: (KINDS.index(clients[name]), name)), *self.added])

    def __len__(self) -> int:
        return len([*iter(self)])


class _Options(Mapping[str, Any]):
    """The defaults of methods' options, by name; None for a method without options."""

    def __getitem__(self, name: str) -> Any:
        return getattr(ALGORITHMS[name], "options", None)

    def __iter__(self) -> Iterator[str]:
        return iter(ALGORITHMS)

    def __len__(self) -> int:
        return len(ALGORITHMS)


def _check(value: Any, name: str = "") -> Method:
    """Return the value if it is a method, of this name if one is given."""
    if not isinstance(value, Method):
        raise FLError(f"is {kind(value)}, not a Method")
    if name not in ("", value.name):
        raise FLError(f"is the method {value.name}: name it so", code="name")
    return value


ALGORITHMS = Methods()
"""From a method's name to its `Method`, which makes its algorithm from (federation, options). Users may add others."""

OPTIONS: Mapping[str, Any] = _Options()
"""From a method's name to the defaults of its options, None for a method without."""

SOURCES: dict[str, str] = {}
"""From the name of a method that was given by its import path to this path, which run folders keep."""


def import_method(path: str) -> Method:
    """Import a method by its path, `module:METHOD`, without adding it to `ALGORITHMS`.

    Raises:
        FLError: for a path of no method, or of one with the name of another method.

    >>> import_method("fl.algorithms.fedprox:METHOD").name
    'fedprox'
    """
    value = find("algorithms", path)
    try:
        method = _check(value)
        known = ALGORITHMS.get(method.name, method)
        if any(getattr(known.make, name) != getattr(method.make, name) for name in ("__module__", "__qualname__")):
            raise FLError(f"has the name of another method, {method.name}: rename its function", code="name")
    except FLError as wrong:
        raise FLError(f"--algorithm {path} {wrong}", code=wrong.code) from None
    return method


def register(path: str, method: Method) -> None:
    """Add a method with its import path, unless a file or a package has it."""
    if method.name in ALGORITHMS.added or method.name not in ALGORITHMS:
        ALGORITHMS[method.name], SOURCES[method.name] = method, path


def plain_name(name: str) -> str:
    """Return the name of a method that is written as in papers.

    >>> plain_name("fedavg+")
    'fedavg_plus'
    """
    return f"{name[:-1]}_plus" if name.endswith("+") else name


def methods_of(kind: str) -> list[str]:
    """Name the methods whose clients are of a kind, see `Method.clients`.

    >>> methods_of("heterogeneous")[:4]
    ['depthfl', 'fedfa', 'fedrolex', 'fjord']
    """
    return [name for name, method in ALGORITHMS.items() if method.clients == kind]

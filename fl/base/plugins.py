"""Find extensions of this project: files, entry points, objects by import path."""

import difflib
import logging
import sys
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.metadata import EntryPoint, EntryPoints, PackageNotFoundError, entry_points, version
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType
from typing import Any

from fl.base.errors import FLError
from surgery.errors import first_line

GROUPS = {what: f"layer_surgery.{what}" for what in ("datasets", "models", "algorithms", "partitions", "extensions")}
_log = logging.getLogger("fl")


def collect(package: str, name: str, kind: type) -> dict[str, Any]:
    """Collect what the files of a package declare under a name, in alphabetical order.

    A file has one value, called as the file, or a dictionary of several by their names. Subpackages are left out.
    A folder of `fl.extensions` adds what its own package or file of the same name declares: see `files_of`.

    Raises:
        FLError: for a file that cannot be imported, a value that is not of this kind, and a name that occurs twice; it
            names the file.

    >>> list(collect("fl.partition", "KIND", object))
    ['clusters', 'contiguous', 'dirichlet', 'dirichlet_mixture', 'dirichlet_sizes', 'iid', 'natural', 'shards']
    """
    result: dict[str, Any] = {}
    for file in files_of(package):
        value = vars(import_file(file)).get(name)
        several = isinstance(value, dict)
        for key, entry in value.items() if several else [(file.rpartition(".")[2], value)] * (value is not None):
            where = f"{file}: {name}" + f"[{key!r}]" * several
            if not isinstance(entry, kind):
                raise FLError(f"{where} must be a {kind.__name__}, got {entry!r}")
            if key in result:
                raise FLError(f"{where}: there is another one of this name", code="name")
            result[key] = entry
    return dict(sorted(result.items()))


def files_of(package: str) -> list[str]:
    """List the files of a package, with additions, without importing them.

    Folders of `fl.extensions` may add to it. A folder `fl.extensions.language` adds to `fl.algorithms` the files of
    `fl.extensions.language.algorithms`, or this one file.

    >>> files_of("fl.partition")[:2]
    ['fl.partition.classes', 'fl.partition.dirichlet']
    """
    place = find_spec(package)
    names = [] if place is None else _inside(package, place)
    extensions = find_spec("fl.extensions") if package.partition(".")[0] == "fl" else None
    for folder in iter_modules(extensions.submodule_search_locations if extensions else ()):
        adds = f"fl.extensions.{folder.name}.{package.rpartition('.')[2]}"
        if folder.ispkg and (place := find_spec(adds)):
            names += _inside(adds, place)
    return names


def _inside(package: str, place: ModuleSpec) -> list[str]:
    if place.submodule_search_locations is None:
        return [package]
    inside = iter_modules(place.submodule_search_locations)
    return [f"{package}.{file.name}" for file in inside if not file.ispkg and file.name != "__main__"]


def import_file(name: str) -> ModuleType:
    """Import a file of a package.

    Raises FLError for one that cannot be imported; it names the file.
    """
    try:
        return import_module(name)
    except (Exception, SystemExit) as error:  # of whoever has put the file there
        raise FLError(f"{name} cannot be imported: {describe_failure(error)}", code="run") from error


@cache
def list_installed(group: str) -> dict[str, EntryPoint]:
    """List the entry points of one of `GROUPS` by their names, without loading them."""
    return {point.name: point for point in sorted(_entry_points().select(group=GROUPS[group]))}


def load_entry_points(group: str, taken: Container[str], check: Callable[[Any, str], Any]) -> dict[str, Any]:
    """Load the entry points of one of `GROUPS`, by their names.

    One that cannot be had is left out with a warning, so that a broken package does not keep the others from use.

    Args:
        taken: names that are ours.
        check: (what an entry point stands for, its name) -> what to take for it; FLError with what is wrong.
    """
    result = {}
    for name, point in list_installed(group).items():
        try:
            if name in taken:
                raise FLError("has the name of another one", code="name")
            result[name] = check(point.load(), name)
        except Exception as error:  # another package's code
            why = str(error) if isinstance(error, FLError) else f"cannot be loaded: {describe_failure(error)}"
            _log.warning(
                "warning: %s of an installed package (%s) is left out of the %s: it %s", name, point.value, group, why
            )
    return result


@cache
def _entry_points() -> EntryPoints:
    """Read the entry points of all installed packages: milliseconds for each package."""
    return entry_points()  # type: ignore[return-value]


def version_of(package: str) -> str:
    """Return the version of an installed package.

    >>> version_of("no-such-package")
    'not installed'
    """
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def is_path(name: str, known: tuple[str, ...] = ()) -> bool:
    """Return whether a name is an import path, `module:attribute`.

    Args:
        known: what may stand before a colon and means something else.

    >>> is_path("my_package.nets:Small"), is_path("timm:resnet18", ("timm",)), is_path("digits")
    (True, False, False)
    """
    module, _, attribute = name.partition(":")
    return module not in known and all(part.isidentifier() for part in f"{module}.{attribute}".split("."))


def find(group: str, name: str) -> Callable[..., Any]:
    """Import what an import path or the name of an entry point stands for.

    The working directory is searched last.

    Args:
        group: one of `GROUPS`, or the flag that takes an import path.

    Raises:
        FLError: for a module that is not there or fails, an attribute that it does not have, and what cannot be called.

    >>> find("models", "torch.nn:Identity")
    <class 'torch.nn.modules.linear.Identity'>
    """
    flag = f"--{group.removesuffix('s') if group in GROUPS else group} {name}"
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.append(folder)
    point = list_installed(group).get(name) if group in GROUPS else None
    path, _, attribute = (point.value if point else name).partition(":")
    try:
        target: Any = import_module(path)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{path}.".startswith(f"{error.name}."):
            raise FLError(f"{flag}: {path} needs {error.name}, which is not installed", code="missing") from None
        raise FLError(
            f"{flag}: there is no module {path}, neither in {folder} nor among the installed packages", code="name"
        ) from None
    except (Exception, SystemExit) as error:
        raise FLError(f"{flag}: {path} cannot be imported: {describe_failure(error)}", code="run") from None
    for part in attribute.split(".") if attribute else ():
        if not hasattr(target, part):
            near = difflib.get_close_matches(part, vars(target), n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise FLError(f"{flag}: {getattr(target, '__name__', path)} has no {part}{hint}", code="name")
        target = getattr(target, part)
    return target


def needed(feature: str, extra: str, *modules: str) -> ModuleType:
    """Import modules of a package that an extra installs; return the first.

    Without it, FLError says what needs it.
    """
    try:
        first, *_ = map(import_module, modules)
    except ImportError:
        raise FLError(
            f"{feature} needs a package that is missing: pip install 'layer-surgery[{extra}]'", code="missing"
        ) from None
    return first


def path_of(flag: str, function: Callable[..., Any]) -> str:
    """Write the import path of a function, by which a run folder names it.

    Raises:
        FLError: for one that has no such path, as a lambda or a function inside of another one.

    >>> path_of("loss", difflib.get_close_matches)
    'difflib:get_close_matches'
    """
    name = getattr(function, "__qualname__", "")
    path = f"{getattr(function, '__module__', '')}:{name}"
    if not is_path(path) or find(flag, path) is not function:
        raise FLError(
            f"--{flag} {name or kind(function)}: a run folder names a function by its place in a file, and this one "
            "has none: define it with `def` at the top level of a module"
        )
    return path


def check_takes(label: str, function: Callable[..., Any], arguments: str) -> None:
    """Raise FLError for a function that cannot be called with these arguments.

    Args:
        label: the function, for the message; "" if the caller puts it there.
        arguments: names, separated by commas.

    >>> check_takes("aggregate", lambda server, update: server, "server, clients, update")
    Traceback (most recent call last):
    fl.base.errors.FLError: aggregate takes (server, update): let it take (server, clients, update)
    """
    try:
        takes = signature(function, follow_wrapped=False)
    except ValueError:  # some built-in functions do not say
        return
    try:
        takes.bind(*filter(None, arguments.split(", ")))
    except TypeError:
        raise FLError(f"{label} takes {takes}: let it take ({arguments})".lstrip(), code="run") from None


def describe_failure(error: BaseException) -> str:
    """Say in one line what a user's own code raised, and where."""
    trace, where = error.__traceback__ and error.__traceback__.tb_next, ""  # the first is the call's
    while trace is not None and not isinstance(error, SyntaxError):  # which says itself where it is
        if not (file := trace.tb_frame.f_code.co_filename).startswith("<frozen"):  # Python's own import
            where = f" ({Path(file).name}, line {trace.tb_lineno})"
        trace = trace.tb_next
    return f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(": ") + where


def kind(value: Any) -> str:
    """Name the type of a value, for messages.

    >>> kind(3), kind({})
    ('an int', 'a dict')
    """
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeioAEIO' else 'a'} {name}"


@contextmanager
def transformers(flag: str, path: Path) -> Iterator[ModuleType]:
    """Give HuggingFace's transformers for what a flag names on this machine.

    Within the block it prints nothing.

    Raises:
        FLError: if it is not installed, if there is no such folder or file, and for whatever it raises in the block.
    """
    if not path.exists():
        raise FLError(
            f"{flag}: {path} is no folder here, and nothing is fetched: give one that save_pretrained wrote",
            code="file",
        )
    library = needed(flag, "hf", "transformers")
    log = library.utils.logging
    verbosity, bar = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield library
    except FLError:
        raise
    except Exception as error:  # of all kinds
        raise FLError(f"{flag}: transformers cannot do this with {path}: {first_line(error)}", code="file") from None
    finally:
        log.set_verbosity(verbosity)
        if bar:
            log.enable_progress_bar()

"""Data sets that a user wrote: a function by its import path, or an entry point of an installed package."""

from collections.abc import Callable
from dataclasses import replace

from fl.base.errors import FLError
from fl.base.plugins import failed, find, installed, is_path, kind
from fl.data.dataset import GIVEN, Dataset


def is_own(name: str) -> bool:
    """Whether a data set of this name is a user's: given from Python, by import path or by entry point.

    >>> is_own("given"), is_own("my_module:load"), is_own("text:FILE.txt"), is_own("digits")
    (True, True, False, False)
    """
    return name == GIVEN or name in installed("datasets") or is_path(name, ("text",))


def function(name: str) -> Callable[[], Dataset]:
    """The function that loads it. FLError for one that is not there or cannot be called."""
    found = find("datasets", name)
    if not callable(found):
        raise FLError(f"--dataset {name} is {kind(found)}: name a function that returns an fl.Dataset")
    return found


def load(name: str) -> Dataset:
    """Call the function of an own data set.

    Raises:
        FLError: for one that was given from Python, which has no name to load it by; and for functions that fail, or
            return something else.
    """
    if name == GIVEN:
        raise FLError(
            "these are the settings of a run on data that were given from Python: give them again, as in "
            "fl.simulate(config, folder, resume=True, dataset=...) or fl.export(folder, file, dataset=...)"
        )
    call = function(name)
    try:
        found = call()
    except FLError:
        raise
    except (Exception, SystemExit) as error:
        raise FLError(f"--dataset {name}, called without arguments, fails: {failed(error)}") from None
    if not isinstance(found, Dataset):
        raise FLError(
            f"--dataset {name} returns {kind(found)}: let it return an fl.Dataset, such as "
            "fl.Dataset.from_arrays(x, y, test_x, test_y)"
        )
    return replace(found, name=name)

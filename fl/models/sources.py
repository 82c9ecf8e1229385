"""Models that a prefix stands for, such as `hf:FOLDER`, by the class of the data."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NoReturn

from torch import nn

from fl.base.errors import FLError
from fl.base.plugins import collect
from fl.data import Dataset


class ModelSource(ABC):
    """The model that a name with a prefix stands for, before the data are known.

    A file `sources.py` of a folder in `fl.extensions` names such classes in `SOURCES`, by their prefixes.

    Attributes:
        name: as --model has it. drawn: whether its weights are initialised at random.
    """

    drawn = False

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self) -> NoReturn:
        raise FLError(f"--model {self.name} cannot be built before the data are known")

    @abstractmethod
    def check(self) -> None:
        """Raise FLError if there is no such model."""

    @abstractmethod
    def check_takes(self, data: Dataset) -> None:
        """Raise FLError for data whose samples or targets no such model can have."""

    @abstractmethod
    def maker(self, tokens: bool, outputs: Sequence[int]) -> Callable[[], nn.Module]:
        """Return what makes the model for tokens or numbers, and outputs of this shape."""

    def fit_to(self, data: Dataset, config: Any) -> Dataset:
        """Return the data as the model is trained on them, or raise FLError."""
        return data

    def hint(self, data: Dataset) -> str:
        """Say what to do if the model does not take such samples."""
        return ""


@cache
def _sources() -> dict[str, type[ModelSource]]:
    return collect("fl.models.sources", "SOURCES", type)


def find_source(name: str) -> ModelSource | None:
    """Return what a model's name stands for if it begins with the prefix of a source.

    >>> find_source("timm:resnet18") is None
    True
    """
    kind = _sources().get(name.partition(":")[0]) if ":" in name else None
    return kind and kind(name)

"""Where the files of a data set are expected, and the errors about missing and damaged ones."""

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from fl.base.errors import FLError


@dataclass(frozen=True)
class Source:
    """The files of one data set.

    Attributes:
        title: the data set's name in messages.
        root: the folder that files are relative to.
        files: every file that is needed, or a pattern such as `femnist/train/*.json` for at least one file.
        origin: a sentence about where the data comes from, if it needs one.
    """

    title: str
    root: Path
    files: tuple[str, ...]
    origin: str = ""

    def missing(self) -> list[str]:
        """Which of `files` are not there."""
        return [file for file in self.files if next(self.root.glob(file), None) is None]

    def error(self, what: str) -> FLError:
        """The exception that says what is wrong, in which folder, and which files are expected there.

        >>> print(Source("MNIST", Path("data"), ("a", "b")).error("missing a; download is off"))  # doctest: +ELLIPSIS
        MNIST cannot be read from data: missing a; download is off. Expected there: a, b. Name the folder that ...
        """
        return FLError(
            f"{self.title} cannot be read from {self.root}: {what}. Expected there: {', '.join(self.files)}. "
            "Name the folder that holds them with --data-root or FL_DATA_ROOT" + (self.origin and f". {self.origin}")
        )

    def damaged(self, file: str | Path, why: str | Exception) -> FLError:
        """The exception for a file that is there but is damaged.

        >>> print(Source("MNIST", Path("data"), ("a", "b")).damaged("a", "empty"))  # doctest: +ELLIPSIS
        MNIST cannot be read from data: files are damaged (a: empty). Expected there: a, b. ...
        """
        file = file.relative_to(self.root).as_posix() if isinstance(file, Path) else file
        return self.error(f"files are damaged ({file}: {reason(why)})")

    def check_labels(self, labels: Tensor, valid: range, images: int, file: str | Path) -> None:
        """Raise FLError unless `file`, from which labels were read, has one valid label for each image."""
        if len(labels) != images:
            raise self.damaged(file, f"{len(labels)} labels for {images} images")
        if images == 0:
            raise self.damaged(file, "no samples")
        if labels.min() < valid.start or labels.max() >= valid.stop:
            found = f"{labels.min()} to {labels.max()}"
            raise self.damaged(file, f"labels from {found} where {valid.start} to {valid.stop - 1} are valid")


def reason(error: str | Exception) -> str:
    """The text of an exception in one line.

    >>> reason(KeyError("users"))
    "KeyError: 'users'"
    >>> reason(AssertionError())
    'AssertionError'
    """
    if isinstance(error, KeyError):  # whose text is the bare key
        return f"KeyError: {error}"
    return " ".join(str(error).split()) or type(error).__name__

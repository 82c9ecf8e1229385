"""Parts of a data set's file: `Loader` says how to load it, `DataFiles` its files."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.error import URLError

from torch import Tensor

from fl.base.errors import FLError, reason
from fl.data.dataset import Dataset

_log = logging.getLogger("fl")


@dataclass(frozen=True)
class Loader:
    """The loader of a data set: all that is known of it outside its own file.

    A file of this folder that has data sets names them in `LOADERS`, a dictionary from the name on the command line to
    the loader. Nothing else is needed to add a data set. In a name with a colon, such as `text:FILE`, users write a
    path after the colon.

    Attributes:
        load: (root, download) -> the data set, from the folder `root`; it may download missing files if `download` is
            true, and raises the errors of `DataFiles` for missing and damaged files. For text it is (root, download,
            TextOptions). Names with a colon add the path.
        text: whether it is text. All others are images.
        bundled: whether it comes with an installed package, so that it needs neither a folder nor a network.
        own: whether its files are a user's, who may change them: a run then resumes with the same samples only.
    """

    load: Callable[..., Dataset]
    text: bool = False
    bundled: bool = False
    own: bool = False


def options_of(name: str, path: str, known: tuple[str, ...]) -> tuple[str, dict[str, str]]:
    """Split a path from the options after a question mark.

    The name is such as `csv:notes.csv?target=ill&owner=hospital`.
    """
    path, _, words = path.partition("?")
    options: dict[str, str] = {}
    for word in words.split("&") if words else ():
        key, equals, value = word.partition("=")
        if key not in known or not equals or not value or key in options:
            raise FLError(
                f"--dataset {name}: behind the question mark is {word!r}; give {'=..., '.join(known)}=...", code="name"
            )
        options[key] = value
    return path, options


def file_of(name: str, path: str, root: Path, folder: bool = False) -> Path:
    """Find a file or a folder by its path.

    It is absolute, or relative to the working directory, or else to root.
    """
    expanded = Path(path).expanduser()
    for place in (expanded, root / expanded):
        if place.is_dir() if folder else place.is_file():
            return place
    also = "" if expanded.is_absolute() else f", nor in {root}"
    raise FLError(f"--dataset {name}: there is no {'folder' if folder else 'file'} {path}{also}", code="file")


@dataclass(frozen=True)
class DataFiles:
    """The files of one data set, and the errors about missing and damaged ones.

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

    def require(self, download: bool = False, fetch: Callable[[], object] | None = None, hint: str = "") -> None:
        """Raise FLError unless all files are there, or `fetch` brings missing ones.

        Args:
            download: whether `fetch` may be called.
            fetch: downloads the files, or raises; None: there is no download.
            hint: ends the message.
        """
        missing = [file for file in self.files if next(self.root.glob(file), None) is None]
        if not missing:
            return
        failure, cause = "; download is off" if fetch else "", None
        if fetch and download:
            _log.warning("downloading %s into %s", self.title, self.root)
            try:
                fetch()
                return
            except Exception as error:  # no network, no space, a cut archive: torchvision raises many kinds
                why = f"no connection: {error.reason}" if isinstance(error, URLError) else reason(error)
                failure, cause = f"; download failed ({why})", error
        raise self.error(f"missing {_some(missing)}{failure}{hint}", all_missing=missing == [*self.files]) from cause

    def error(self, problem: str, all_missing: bool = False) -> FLError:
        """Make the exception that says what is wrong where, and which files are expected.

        Args:
            all_missing: whether `problem` has named these files.
        """
        files = "" if all_missing else f"Expected there: {', '.join(self.files)}. "
        return FLError(
            f"{self.title} cannot be read from {self.root}: {problem}. {files}"
            "Name the folder that holds them with --data-root or FL_DATA_ROOT" + (self.origin and f". {self.origin}"),
            code="file",
        )

    def damage_error(self, file: str | Path, why: str | Exception) -> FLError:
        """Make the exception for a file that is there but is damaged.

        >>> print(DataFiles("MNIST", Path("data"), ("a", "b")).damage_error("a", "empty"))  # doctest: +ELLIPSIS
        MNIST cannot be read from data: files are damaged (a: empty). Expected there: a, b. ...
        """
        file = file.relative_to(self.root).as_posix() if isinstance(file, Path) else file
        return self.error(f"files are damaged ({file}: {reason(why)})")

    def check_labels(self, labels: Tensor, valid: range, images: int, file: str | Path) -> None:
        """Raise FLError unless labels, read from `file`, are valid, one for each image."""
        if len(labels) != images:
            raise self.damage_error(file, f"{len(labels)} labels for {images} images")
        if images == 0:
            raise self.damage_error(file, "no samples")
        if labels.min() < valid.start or labels.max() >= valid.stop:
            actual = f"{labels.min()} to {labels.max()}"
            raise self.damage_error(file, f"labels from {actual} where {valid.start} to {valid.stop - 1} are valid")


def _some(files: list[str]) -> str:
    """Name files, the first two of many.

    >>> _some(["a", "b", "c"]), _some([*"abcdef"])
    ('a, b, c', 'a, b and 4 more')
    """
    return ", ".join(files) if len(files) < 4 else f"{', '.join(files[:2])} and {len(files) - 2} more"

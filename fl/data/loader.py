"""How one data set is found and loaded."""

from collections.abc import Callable
from dataclasses import dataclass

from fl.data.dataset import Dataset


@dataclass(frozen=True)
class Loader:
    """What everything outside a data set's own file knows of it.

    A file of this folder that has data sets names them in `LOADERS`, a dictionary from the name on the command line to
    the loader. That is all it takes to add one. A name that ends in `:FILE`, such as `text:FILE`, is followed by the
    path of a file in place of FILE.

    Attributes:
        load: (root, download) -> the data set, from the folder `root`; it may download missing files if `download` is
            true, and raises the errors of `fl.data.source.Source` for missing and damaged files. For text it is (root,
            download, TextOptions), and for names with a file (root, download, TextOptions, path).
        text: whether it is text. All others are images.
        bundled: whether it comes with an installed package, so that it needs neither a folder nor a network.
    """

    load: Callable[..., Dataset]
    text: bool = False
    bundled: bool = False

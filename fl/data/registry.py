"""All data sets by name."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from fl.base.errors import FLError
from fl.base.plugins import declared, installed
from fl.data import own
from fl.data.dataset import Dataset, Origin
from fl.data.loader import Loader
from fl.data.text import TextOptions


def _loaders() -> dict[str, Loader]:
    """Those of this folder's files: bundled ones first, names with a file last, else in alphabetical order."""
    found: dict[str, Loader] = {}
    for file, loaders in declared("fl.data", "LOADERS", dict).items():
        for name, loader in loaders.items():
            if not isinstance(loader, Loader) or name in found:
                wrong = "there is another data set of this name" if name in found else f"not a Loader: {loader!r}"
                raise FLError(f"fl.data.{file}: LOADERS[{name!r}]: {wrong}")
            found[name] = loader
    return dict(sorted(found.items(), key=lambda item: (not item[1].bundled, ":" in item[0], item[0])))


LOADERS = _loaders()
"""Name -> loader of every data set that has a file here."""

DATASETS: dict[str, Callable[[Path, bool], Dataset]] = {
    name: loader.load for name, loader in LOADERS.items() if not loader.text
}
"""Name -> function of (root, download) that loads images. You can add a data set of your own."""

TEXTS: dict[str, Callable[..., Dataset]] = {name: loader.load for name, loader in LOADERS.items() if loader.text}
"""The same for text: name -> function of (root, download, options)."""


def load(
    name: str, root: str | Path | None = None, download: bool = True, text: TextOptions = TextOptions()
) -> Dataset:
    """Load a data set by name.

    Args:
        name: one of DATASETS or TEXTS, an entry point of an installed package, or module:function, which is called
            without arguments; text:FILE stands for a file of text, relative to the root if it is not absolute.
        root: the folder that torchvision's class gets, or that holds femnist/, tiny-imagenet-200/, wikitext-2/ or
            tinyshakespeare/. None stands for $FL_DATA_ROOT, or ~/.cache/layer-surgery if that is not set. Bundled data
            sets do not need one.
        download: fetch missing files (femnist has no download).
        text: how text becomes sequences of tokens.

    Raises:
        FLError: for an unknown name, and for missing or damaged files; it says which files are expected where.

    >>> load("digits").x.shape
    torch.Size([1437, 1, 8, 8])
    >>> load("pydoc", text=TextOptions("byte", length=100)).x.shape[1]
    100
    """
    check_name(name)
    folder = Path(root).expanduser() if root else default_root()
    if name in DATASETS:
        found, origin = DATASETS[name](folder, download), Origin(name)
    elif is_text(name):
        key, file = _key_and_file(name)
        found, origin = TEXTS[key](folder, download, text, *file), Origin(name, text)
    else:
        found, origin = own.load(name), Origin(name)
    return (found if found.name == name else replace(found, name=name)).marked(origin)


def check_name(name: str) -> None:
    """Raise FLError if there is no data set of this name."""
    if name in DATASETS or is_text(name) or name == own.GIVEN:
        return
    if not own.is_own(name):
        every = ", ".join([*DATASETS, *TEXTS, *installed("datasets")])
        raise FLError(f"unknown data set {name!r}: there are {every}, and module:function for one of your own")
    own.function(name)


def is_text(name: str) -> bool:
    """Whether the data set of this name is text.

    >>> is_text("pydoc"), is_text("text:notes/a.txt"), is_text("digits")
    (True, True, False)
    """
    return _key_and_file(name)[0] in TEXTS


def _key_and_file(name: str) -> tuple[str, tuple[str, ...]]:
    """
    >>> _key_and_file("pydoc"), _key_and_file("text:notes/a.txt"), _key_and_file("text:")
    (('pydoc', ()), ('text:FILE', ('notes/a.txt',)), ('text:', ()))
    """
    kind, _, file = name.partition(":")
    return (f"{kind}:FILE", (file,)) if file else (name, ())


def default_root() -> Path:
    """The folder of data sets when none is given: $FL_DATA_ROOT, or ~/.cache/layer-surgery if that is not set."""
    return Path(os.environ.get("FL_DATA_ROOT") or "~/.cache/layer-surgery").expanduser()


def overview() -> str:
    """The names of all data sets in one line, for --help.

    >>> overview()[:27]
    'digits (bundled), cifar10, '
    """
    names = {name: f"{name} (bundled)" if loader.bundled else name for name, loader in LOADERS.items()}
    images, texts = (
        ", ".join(names[name] for name, loader in LOADERS.items() if loader.text == text) for text in (False, True)
    )
    return f"{', '.join([images, *installed('datasets')])}; text: {texts}; your own: module:function"

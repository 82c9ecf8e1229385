"""Data sets, images, tables and text, as tensors; and all of them by name.

`digits` comes with scikit-learn and `pydoc` with Python. The others are read from a folder (`--data-root`). Each file
that has a `LOADERS` is found; nothing else names the data sets.

    dataset.py         Dataset, the form of all of them
    inputs.py          one tensor, or several by name; `pad`, for sequences of unequal length
    arrays.py          a user's arrays, checked
    items.py           data sets of torch, torchvision and Hugging Face, sample by sample
    mapped.py          tensors in memory-mapped files
    loader.py          Loader and DataFiles, what a data set's file says of it
    images.py          digits, mnist, fashion-mnist, emnist-*, cifar10, cifar100, cifar100-coarse
    folder.py          folder:PATH, arrays in memory-mapped files, which need not fit in memory
    table.py           tables, frames of pandas among them
    csv_file.py        csv:FILE
    parts.py           which samples are for training, validation and testing
    image_folder.py    images:FOLDER, a folder of pictures for each class, or each site and class
    femnist.py         LEAF's FEMNIST, whose writers are natural owners
    tiny_imagenet.py   tiny-imagenet
    text.py            pydoc, wikitext-2 (-valid), shakespeare, text:FILE; tokens and sequences of them
    __main__.py        `python -m fl.data` shows which client holds what
"""

import os
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path

from fl.base.errors import FLError
from fl.base.plugins import collect, describe_failure, find, is_path, kind, list_installed
from fl.data.dataset import GIVEN, Dataset, Origin, fingerprint
from fl.data.inputs import pad
from fl.data.loader import Loader
from fl.data.text import TextOptions

__all__ = [
    "GIVEN",
    "LOADERS",
    "Dataset",
    "Loader",
    "Origin",
    "TextOptions",
    "check_name",
    "default_root",
    "fingerprint",
    "is_custom",
    "is_text",
    "load",
    "may_change",
    "overview",
    "pad",
]

LOADERS: dict[str, Loader] = dict(  # bundled ones first, names with a file last, else in alphabetical order
    sorted(
        collect("fl.data", "LOADERS", Loader).items(),
        key=lambda item: (not item[1].bundled, ":" in item[0], item[0]),
    )
)
"""Name -> loader of every data set that has a file here. You can add one of your own."""


def load(
    name: str, root: str | Path | None = None, download: bool = True, text: TextOptions = TextOptions()
) -> Dataset:
    """Load a data set by name.

    Args:
        name: one of LOADERS, an entry point of an installed package, or module:function, which is called
            without arguments; text:FILE stands for a file of text, csv:FILE for a table, images:FOLDER for a folder of
            pictures, and folder:PATH for a folder of arrays, relative to the root if it is not absolute.
        root: the folder that torchvision's class gets, or that holds femnist/, tiny-imagenet-200/, wikitext-2/ or
            tinyshakespeare/. None stands for $FL_DATA_ROOT, or ~/.cache/layer-surgery if that is not set. Bundled data
            sets do not need one.
        download: fetch missing files (femnist has no download).
        text: how text becomes sequences of tokens.

    Raises:
        FLError: for an unknown name, and for missing or damaged files; it says which files are expected where. For
            data that were given from Python, which have no name to load them by; and for a user's function that fails
            or returns something else.

    >>> load("digits").x.shape
    torch.Size([1437, 1, 8, 8])
    >>> load("pydoc", text=TextOptions("byte", length=100)).x.shape[1]
    100
    """
    check_name(name)
    folder = Path(root).expanduser() if root else default_root()
    key, file = _key_and_file(name)
    if key not in LOADERS:
        dataset = _load_custom(name)
    elif is_text(name):
        dataset = LOADERS[key].load(folder, download, text, *file)
    else:
        dataset = LOADERS[key].load(folder, download, *file)
    return replace(dataset, name=name).with_origin(Origin(name, text if is_text(name) else None))


def _load_custom(name: str) -> Dataset:
    """Call a user's function that makes a data set."""
    if name == GIVEN:
        raise FLError(
            "these are the settings of a run on data that were given from Python: give them again, as in "
            "fl.simulate(config, folder, resume=True, dataset=...) or fl.export_model(folder, file, dataset=...)"
        )
    try:
        dataset = find("datasets", name)()
    except FLError:
        raise
    except (Exception, SystemExit) as error:
        raise FLError(
            f"--dataset {name}, called without arguments, fails: {describe_failure(error)}", code="run"
        ) from None
    if not isinstance(dataset, Dataset):
        raise FLError(
            f"--dataset {name} returns {kind(dataset)}: let it return an fl.Dataset, such as "
            "fl.Dataset.from_arrays(x, y, test_x, test_y)",
            code="run",
        )
    return dataset


def check_name(name: str) -> None:
    """Raise FLError if no data set has this name, or a user's cannot be called."""
    if _key_and_file(name)[0] in LOADERS or name == GIVEN:
        return
    if not is_custom(name):
        every = [*LOADERS, *list_installed("datasets")]
        hint = "".join(f"did you mean {match}? " for match in get_close_matches(name, every, n=1))
        raise FLError(
            f"unknown data set {name!r}: {hint}there are {', '.join(every)}, and module:function for one of your own",
            code="name",
        )
    if not callable(loader := find("datasets", name)):
        raise FLError(f"--dataset {name} is {kind(loader)}: name a function that returns an fl.Dataset")


def is_custom(name: str) -> bool:
    """Return whether a name is a user's: given, by import path or by entry point.

    >>> is_custom("given"), is_custom("my_module:load"), is_custom("text:FILE.txt"), is_custom("digits")
    (True, True, False, False)
    """
    return (
        name == GIVEN
        or name in list_installed("datasets")
        or is_path(name, tuple(key.partition(":")[0] for key in LOADERS))
    )


def may_change(name: str) -> bool:
    """Return whether the samples of a name may change, in a user's files or function.

    >>> may_change("csv:a.csv"), may_change("my_module:load"), may_change("digits")
    (True, True, False)
    """
    key, _ = _key_and_file(name)
    return is_custom(name) or (key in LOADERS and LOADERS[key].own)


def is_text(name: str) -> bool:
    """Return whether the data set of this name is text."""
    key, _ = _key_and_file(name)
    return key in LOADERS and LOADERS[key].text


def _key_and_file(name: str) -> tuple[str, tuple[str, ...]]:
    """Split a name into its key in LOADERS and the path of its file, if it has one.

    >>> _key_and_file("pydoc"), _key_and_file("text:notes/a.txt"), _key_and_file("text:")
    (('pydoc', ()), ('text:FILE', ('notes/a.txt',)), ('text:', ()))
    """
    kind, _, file = name.partition(":")
    key = next((key for key in LOADERS if key.startswith(f"{kind}:")), "")
    return (key, (file,)) if file and key else (name, ())


def default_root() -> Path:
    """Name the default folder of data sets.

    It is $FL_DATA_ROOT, or ~/.cache/layer-surgery if that is not set.
    """
    return Path(os.environ.get("FL_DATA_ROOT") or "~/.cache/layer-surgery").expanduser()


def overview() -> str:
    """List the names of all data sets in one line, for --help.

    >>> overview()[:27]
    'digits (bundled), cifar10, '
    """
    names = {name: name + " (bundled)" * loader.bundled for name, loader in LOADERS.items()}
    images = [name for key, name in names.items() if not LOADERS[key].text]
    texts = [name for key, name in names.items() if LOADERS[key].text]
    return f"{', '.join([*images, *list_installed('datasets')])}; text: {', '.join(texts)}; your own: module:function"

"""Real data sets, resident on one device as tensors of integers: images, and text.

`digits` comes with scikit-learn and `pydoc` with Python; the others read a folder (`--data-root`): torchvision's own
classes, LEAF's FEMNIST with its writers as natural owners, Tiny-ImageNet, WikiText-2, Shakespeare, files of text.

    dataset.py            Dataset, the form of all of them
    digits.py             digits
    torchvision_sets.py   mnist, fashion-mnist, emnist-*, cifar10, cifar100, cifar100-coarse
    femnist.py            femnist
    tiny_imagenet.py      tiny-imagenet
    corpora.py            pydoc, wikitext-2 (-valid), shakespeare, text:FILE
    text.py               from documents to sequences for training and testing
    tokens.py             words of a vocabulary, or bytes
    source.py             where files are expected; errors about missing and damaged ones
    __main__.py           `python -m fl.data`: who holds what
"""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

from fl.base.errors import FLError
from fl.data import corpora, digits, femnist, tiny_imagenet, torchvision_sets
from fl.data.dataset import Dataset
from fl.data.text import TextOptions

__all__ = ["DATASETS", "TEXTS", "Dataset", "TextOptions", "check_name", "default_root", "is_text", "load"]

DATASETS: dict[str, Callable[[Path, bool], Dataset]] = {
    "digits": digits.load,
    "mnist": torchvision_sets.mnist,
    "fashion-mnist": torchvision_sets.fashion_mnist,
    **{f"emnist-{split}": partial(torchvision_sets.emnist, split=split) for split in torchvision_sets.EMNIST_LABELS},
    "cifar10": torchvision_sets.cifar10,
    "cifar100": torchvision_sets.cifar100,
    "cifar100-coarse": torchvision_sets.cifar100_coarse,
    "femnist": femnist.load,
    "tiny-imagenet": tiny_imagenet.load,
}
"""Name -> function of (root, download) that loads images; a data set of your own can be added."""

TEXTS: dict[str, Callable[[Path, bool, TextOptions], Dataset]] = {
    "pydoc": corpora.pydoc,
    "wikitext-2": corpora.wikitext2,
    "wikitext-2-valid": partial(corpora.wikitext2, training="valid"),
    "shakespeare": corpora.shakespeare,
}
"""The same for text: name -> function of (root, download, options)."""

_FILE = "text:"


def load(
    name: str, root: str | Path | None = None, download: bool = True, text: TextOptions = TextOptions()
) -> Dataset:
    """Load a data set by name.

    Args:
        name: one of DATASETS or TEXTS, or text:FILE for a file of text, relative to the root if it is not absolute.
        root: the folder that torchvision's class gets, or that holds femnist/, tiny-imagenet-200/, wikitext-2/ or
            tinyshakespeare/; None is $FL_DATA_ROOT, else ~/.cache/layer-surgery. digits and pydoc need none.
        download: fetch what is missing, if there is a network (femnist has no download).
        text: how text becomes sequences of tokens.

    Raises:
        FLError: for an unknown name, or files that are missing or damaged; it says which are expected where.

    >>> load("digits").x.shape
    torch.Size([1437, 1, 8, 8])
    >>> load("pydoc", text=TextOptions("byte", length=100)).x.shape[1]
    100
    """
    check_name(name)
    folder = Path(root).expanduser() if root else default_root()
    if name in DATASETS:
        return DATASETS[name](folder, download)
    if name in TEXTS:
        return TEXTS[name](folder, download, text)
    return corpora.plain(folder, name.removeprefix(_FILE), text)


def check_name(name: str) -> None:
    """Raise FLError for a data set that there is not."""
    if not (name in DATASETS or is_text(name)):
        raise FLError(f"unknown data set {name!r}: there are {', '.join([*DATASETS, *TEXTS, _FILE + 'FILE'])}")


def is_text(name: str) -> bool:
    """Whether the data set of this name is text.

    >>> is_text("pydoc"), is_text("text:notes/a.txt"), is_text("digits")
    (True, True, False)
    """
    return name in TEXTS or (name.startswith(_FILE) and name != _FILE)


def default_root() -> Path:
    """Where data sets are looked for when no folder is given: $FL_DATA_ROOT, else ~/.cache/layer-surgery."""
    return Path(os.environ.get("FL_DATA_ROOT") or "~/.cache/layer-surgery").expanduser()

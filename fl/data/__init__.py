"""Data sets, images, tables and text, held on one device as tensors.

`digits` comes with scikit-learn and `pydoc` with Python. The others are read from a folder (`--data-root`). Each file
that has a `LOADERS` is found; nothing else names the data sets.

    dataset.py            Dataset, the form of all of them
    arrays.py             the arrays that a user gives, checked
    items.py              arrays of torch's, torchvision's and Hugging Face's data sets
    own.py                data sets by import path or entry point
    identity.py           what tells one data set from another
    loader.py             Loader, what a data set's file says of it
    digits.py             digits
    torchvision_sets.py   mnist, fashion-mnist, emnist-*, cifar10, cifar100, cifar100-coarse
    femnist.py            LEAF's FEMNIST, whose writers are natural owners
    tiny_imagenet.py      tiny-imagenet
    corpora.py            pydoc, wikitext-2 (-valid), shakespeare, text:FILE
    text.py               from documents to sequences for training and testing
    tokens.py             words of a vocabulary, or bytes
    source.py             where files are expected; errors about missing and damaged ones
    registry.py           the data sets by name
    __main__.py           `python -m fl.data` shows which client holds what
"""

from fl.data.dataset import GIVEN, Dataset
from fl.data.identity import fingerprint
from fl.data.own import is_own
from fl.data.registry import DATASETS, TEXTS, check_name, default_root, is_text, load
from fl.data.text import TextOptions

__all__ = [
    "DATASETS",
    "GIVEN",
    "TEXTS",
    "Dataset",
    "TextOptions",
    "check_name",
    "default_root",
    "fingerprint",
    "is_own",
    "is_text",
    "load",
]

"""Folders of pictures, `images:FOLDER`: one for each class, or site and class."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fl.base.errors import FLError, reason
from fl.data.arrays import form
from fl.data.dataset import Dataset
from fl.data.items import pixels
from fl.data.loader import Loader, file_of, options_of
from fl.data.parts import PARTS, assign_parts, check_classes

_LAYOUT = "a picture lies in CLASS/ or SITE/CLASS/, in which train/, valid/ and test/ may come first, or after SITE/"


def load(root: Path, path: str) -> Dataset:
    """Load a folder of pictures, as in `images:scans` or `images:scans?size=64`.

    A picture lies in CLASS/, or in SITE/CLASS/ where several sites have their own. Folders train, valid and test may
    stand above or below the sites' folders; without them the last tenth of the pictures of each site and class, by
    name, is for testing, one at least. Classes go by their names over all sites, in alphabetical order. Files and
    folders whose names begin with a dot are left out; anything else that is no picture is an error.

    Args:
        path: of the folder, absolute, or relative to the working directory or, if it is not there, to root. With
            `?size=N` every picture is resized to N x N pixels; else all need one size.
    """
    name = f"images:{path}"
    path, options = options_of(name, path, ("size",))
    size = options.get("size", "0")
    if not size.isdigit() or (options and not int(size)):
        raise FLError(f"--dataset {name}: size is {size!r}, and it is a number of pixels, such as ?size=64")
    folder = file_of(name, path, root, folder=True)
    files = _files(folder)
    places = [file.relative_to(folder).parts[:-1] for file in files]
    level = _level_of_parts(folder, places)
    words = None if level is None else np.array([place[level] for place in places])
    owned = [place if level is None else (*place[:level], *place[level + 1 :]) for place in places]
    for file, place in zip(files, owned):
        if len(place) != len(owned[0]) or len(place) not in (1, 2):
            raise FLError(f"{file} lies at another level than others, such as {files[0]}: {_LAYOUT}", code="data")
    classes = np.array([place[-1] for place in owned])
    sites = np.array([place[0] for place in owned]) if len(owned[0]) == 2 else None
    if {name.lower() for name in classes.tolist()} <= PARTS.keys():
        raise FLError(f"{files[0]} is in no folder of a class: {_LAYOUT}", code="data")
    _, groups = np.unique(np.array(["/".join(place) for place in owned]), return_inverse=True)

    def row(k: int) -> str:
        return str(files[k])

    parts = assign_parts(words, groups, row)
    check_classes(classes, parts, row)
    x = _pictures(files, int(size))
    shared, test = parts != 2, parts == 2
    return Dataset.from_arrays(
        x[shared], classes[shared], x[test], classes[test],
        None if sites is None else sites[shared], test_owners=None if sites is None else sites[test],
        valid=parts[shared] == 1 if (parts == 1).any() else None,
    )  # fmt: skip


def _files(folder: Path) -> list[Path]:
    """List all files of a folder, sorted by path. FLError for a class that has none."""

    def fail(error: OSError) -> None:
        raise FLError(f"{error.filename} cannot be read: {reason(error)}", code="file")

    pictures, empty = [], set()
    for directory, inside, files in os.walk(folder, onerror=fail, followlinks=True):
        inside[:] = sorted(name for name in inside if not name.startswith("."))
        shown = [Path(directory, name) for name in sorted(files) if not name.startswith(".")]
        if shown and Path(directory) == folder:
            raise FLError(f"{shown[0]} is in no folder of a class: {_LAYOUT}", code="data")
        if not shown and not inside:
            empty.add(Path(directory))
        pictures += shown
    if not pictures:
        raise FLError(f"{folder} has no pictures: {_LAYOUT}", code="data")
    classes = {file.parent.name for file in pictures}
    if lost := sorted(path for path in empty if path.name not in classes):  # a site may lack a class
        raise FLError(f"{lost[0]} has no pictures: leave the folder out", code="data")
    return pictures


def _level_of_parts(folder: Path, places: list[tuple[str, ...]]) -> int | None:
    """Return at which level folders are called train, valid and test; None if at none."""
    for level in (0, 1):
        named = [len(place) > level + 1 and place[level].lower() in PARTS for place in places]
        if all(named):
            return level
        if any(named):
            other = folder.joinpath(*places[named.index(False)])
            part = folder.joinpath(*places[named.index(True)][: level + 1])
            raise FLError(f"{other} is in no folder train, valid or test, as {part} is one: {_LAYOUT}", code="data")
    return None


def _pictures(files: list[Path], size: int) -> Tensor:
    """Read pictures, uint8 [N, C, H, W]."""
    from PIL import Image

    x = torch.empty(0)
    for k, file in enumerate(files):
        try:
            with Image.open(file) as image:
                sized = image.resize((size, size), Image.Resampling.BILINEAR) if size else image
                picture: Any = pixels(str(file), sized)
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            why = "it is no picture" if isinstance(error, Image.UnidentifiedImageError) else reason(error)
            raise FLError(f"{file} cannot be read: {why}; move it out of the folder", code="file") from None
        picture = torch.from_numpy(np.array(picture))
        if k == 0:
            x = torch.empty(len(files), *picture.shape, dtype=torch.uint8)
        if picture.shape != x.shape[1:]:
            colours_agree = len(picture) == len(x[0])
            way = "give the size of all, as in ?size=64" if colours_agree else "save all grey, or all in colour"
            raise FLError(f"{file} is {form(picture)} and {files[0]} is {form(x[0])}: {way}", code="data")
        x[k] = picture
    return x


LOADERS = {"images:FOLDER": Loader(lambda root, _, path: load(root, path), own=True)}

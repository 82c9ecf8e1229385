"""Tiny-ImageNet: 200 classes of ImageNet, 64x64 pixels, in its unpacked folder."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fl.data.dataset import Dataset
from fl.data.loader import DataFiles, Loader

FOLDER = "tiny-imagenet-200"
CLASSES, SIDE = 200, 64
URL = "https://cs231n.stanford.edu/tiny-imagenet-200.zip"
MD5 = "90528d7ca1a48142e341f4ef8d21d0de"
FILES = ("wnids.txt", "train/*/images/*.JPEG", "val/images/*.JPEG", "val/val_annotations.txt")


def load(root: Path, download: bool) -> Dataset:
    """Load Tiny-ImageNet; val is the test set, since its test part has no labels.

    Source: cs231n.stanford.edu/tiny-imagenet-200.zip (248 MB), unpacked into root/tiny-imagenet-200.

    Returns:
        x uint8 [100000, 3, 64, 64] in the order of classes, then file names; test_x [10000, 3, 64, 64]; grey JPEGs
        become RGB; 200 classes, numbered in the order of their sorted WordNet ids.
    """
    from torchvision.datasets.utils import download_and_extract_archive

    origin = f"The data comes from {URL.removeprefix('https://')}"
    source = DataFiles("Tiny-ImageNet", root, tuple(f"{FOLDER}/{file}" for file in FILES), origin)
    source.require(download, lambda: download_and_extract_archive(URL, str(root), md5=MD5))
    folder = root / FOLDER
    wnids = sorted(set(_lines(source, folder / "wnids.txt")))
    if len(wnids) != CLASSES:
        raise source.damage_error(folder / "wnids.txt", f"{len(wnids)} different classes, not {CLASSES}")
    number = {wnid: i for i, wnid in enumerate(wnids)}
    files = {wnid: _class_files(source, folder / "train" / wnid) for wnid in number}
    x = _decode(source, [file for wnid in files for file in files[wnid]])
    y = torch.tensor([number[wnid] for wnid in files for _ in files[wnid]])
    annotated = _annotations(source, folder / "val", number)
    test_x = _decode(source, [folder / "val" / "images" / file for file in annotated])
    return Dataset("tiny-imagenet", x, y, test_x, torch.tensor(list(annotated.values())), CLASSES)


def _lines(source: DataFiles, file: Path) -> list[str]:
    """Read the lines of a text file that are not empty."""
    try:
        return [line.strip() for line in file.read_text("utf-8").splitlines() if line.strip()]
    except (OSError, ValueError) as error:  # text that is not UTF-8 raises a ValueError
        raise source.damage_error(file, error) from error


def _class_files(source: DataFiles, folder: Path) -> list[Path]:
    """List a class's training images, checked against its list of boxes, if any."""
    files = sorted((folder / "images").glob("*.JPEG"))
    if not files:
        raise source.damage_error(folder / "images", "no images")
    boxes = folder / f"{folder.name}_boxes.txt"
    if boxes.exists():
        listed = {line.split("\t")[0] for line in _lines(source, boxes)}
        if absent := listed - {file.name for file in files}:
            raise source.damage_error(folder / "images" / min(absent), "the image is missing")
    return files


def _annotations(source: DataFiles, folder: Path, number: dict[str, int]) -> dict[str, int]:
    """Read the labels of the images of the val part by file name, sorted."""
    file = folder / "val_annotations.txt"
    labels = {}
    for name, *rest in (line.split("\t") for line in _lines(source, file)):
        if not rest or rest[0] not in number:
            raise source.damage_error(file, f"{name} has no class, or one that is not in wnids.txt")
        labels[name] = number[rest[0]]
    present = {image.name for image in (folder / "images").glob("*.JPEG")}
    if absent := labels.keys() - present:
        raise source.damage_error(folder / "images" / min(absent), "the image is missing")
    if unlabelled := present - labels.keys():
        raise source.damage_error(file, f"it has no line for {min(unlabelled)}")
    return dict(sorted(labels.items()))


def _decode(source: DataFiles, files: list[Path]) -> Tensor:
    """Decode JPEG files to uint8 [N, 3, 64, 64]; a core decodes about 6,000 a second."""
    from PIL import Image

    images = np.empty((len(files), 3, SIDE, SIDE), np.uint8)
    for file, pixels in zip(files, images):
        try:
            with Image.open(file) as image:
                if image.size != (SIDE, SIDE):
                    raise ValueError(f"{image.width}x{image.height} pixels, not {SIDE}x{SIDE}")
                pixels[:] = np.asarray(image.convert("RGB")).transpose(2, 0, 1)
        except Exception as error:  # Pillow raises OSError, SyntaxError and more for files that it cannot read
            raise source.damage_error(file, error) from error
    return torch.from_numpy(images)


LOADERS = {"tiny-imagenet": Loader(load)}

"""Images: on small files of the same form, and on the real ones where there are some."""

import struct

import numpy as np
import pytest
import torch
from data_files import complaint, pixels, write_cifar100
from refusals import fl_refused
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from fl import data
from fl.base.errors import FLError


def write_idx(path, array):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(struct.pack(f">{1 + array.ndim}I", 0x800 + array.ndim, *array.shape) + array.tobytes())


def write_idx_set(folder, train, test, labels):
    """Six training and three test images of the MNIST family, whose labels run through `labels`."""
    for part, count in ((train, 6), (test, 3)):
        write_idx(folder / f"{part}-images-idx3-ubyte", pixels(count, 28, 28))
        write_idx(folder / f"{part}-labels-idx1-ubyte", np.resize(np.array(labels, dtype=np.uint8), count))
    return pixels(6, 28, 28), pixels(3, 28, 28)


# MNIST, EMNIST


@pytest.mark.parametrize(("name", "folder"), [("mnist", "MNIST"), ("fashion-mnist", "FashionMNIST")])
def test_data_sets__the_mnist_family_reads_idx_files(tmp_path, name, folder):
    images, test_images = write_idx_set(tmp_path / folder / "raw", "train", "t10k", [9, 0, 3])
    loaded = data.load(name, tmp_path, download=False)
    assert (loaded.name, loaded.classes, loaded.top, loaded.owners) == (name, 10, 255, None)
    assert torch.equal(loaded.x, torch.from_numpy(images)[:, None])
    assert torch.equal(loaded.test_x, torch.from_numpy(test_images)[:, None])
    assert loaded.y.tolist() == [9, 0, 3, 9, 0, 3]
    assert (loaded.x.dtype, loaded.y.dtype, loaded.test_y.dtype) == (torch.uint8, torch.int64, torch.int64)


@pytest.mark.parametrize(
    ("split", "classes", "first"), [("balanced", 47, 0), ("byclass", 62, 0), ("letters", 26, 1), ("digits", 10, 0)]
)
def test_data_sets__emnist_stands_upright_and_its_labels_start_at_0(tmp_path, split, classes, first):
    folder, name = tmp_path / "EMNIST" / "raw", f"emnist-{split}"
    write_idx_set(folder, f"{name}-train", f"{name}-test", [first, first + classes - 1])
    marked = np.zeros((6, 28, 28), np.uint8)
    marked[:, 27, 0] = 255  # the file's lower left corner is the upper right one of an image that stands upright
    marked[:, 5, 2] = 99
    write_idx(folder / f"{name}-train-images-idx3-ubyte", marked)
    loaded = data.load(name, tmp_path, download=False)
    assert loaded.x.shape == (6, 1, 28, 28)
    assert loaded.x.is_contiguous()
    assert (loaded.x[:, 0, 0, 27] == 255).all()
    assert (loaded.x[:, 0, 2, 5] == 99).all()
    assert loaded.x.count_nonzero() == 12
    assert (loaded.classes, loaded.name) == (classes, name)
    assert loaded.y.tolist() == [0, classes - 1] * 3
    assert torch.equal(loaded.test_x[:, 0], torch.from_numpy(pixels(3, 28, 28)).mT)


def test_data_sets__bad_idx_files_are_named(tmp_path):
    folder = tmp_path / "EMNIST" / "raw"
    labels = folder / "emnist-letters-test-labels-idx1-ubyte"
    images = folder / "emnist-letters-train-images-idx3-ubyte"

    def damage(path, content):
        write_idx_set(folder, "emnist-letters-train", "emnist-letters-test", [1, 26])
        path.write_bytes(content) if isinstance(content, bytes) else write_idx(path, content)
        message = complaint("emnist-letters", tmp_path)
        assert f"files are damaged ({path.relative_to(tmp_path)}: " in message
        return message

    assert "2 labels for 3 images" in damage(labels, np.ones(2, np.uint8))
    assert "labels from 0 to 26 where 1 to 26 are valid" in damage(labels, np.array([0, 1, 26], np.uint8))
    assert "labels from 1 to 27" in damage(labels, np.array([1, 1, 27], np.uint8))
    assert "images of 28x27 pixels" in damage(images, pixels(6, 28, 27))
    damage(images, b"\0\0\x08\x03\0\0\0\x06\0\0\0\x1c\0\0\0\x1c" + b"\0" * 1000)  # cut short
    for content in (b"", b"\0" * 100, b"junkjunkjunk", b"\0\0\x08\x01\0\0"):
        damage(labels, content)
    images.unlink()
    assert "missing EMNIST/raw/emnist-letters-train-images-idx3-ubyte" in complaint("emnist-letters", tmp_path)


# CIFAR-100


@pytest.fixture
def cifar100(tmp_path, monkeypatch):
    """A function that writes small files in the form of CIFAR-100 and makes torchvision accept their md5s."""

    def write(**parts):
        fine = torch.arange(100).tolist()
        coarse = [label // 5 for label in fine]
        contents = {
            "train": {"data": pixels(100, 3072), "fine_labels": fine, "coarse_labels": coarse},
            "test": {"data": pixels(2, 3072), "fine_labels": [99, 1], "coarse_labels": [19, 0]},
            "meta": {"fine_label_names": [str(label) for label in fine]},
        }
        whole = {part: content | parts.get(part, {}) for part, content in contents.items()}
        write_cifar100(tmp_path, monkeypatch, whole)
        return tmp_path

    return write


def test_data_sets__cifar100_has_fine_and_coarse_labels(cifar100):
    root = cifar100()
    fine, coarse = (data.load(name, root, download=False) for name in ("cifar100", "cifar100-coarse"))
    assert torch.equal(fine.x, torch.from_numpy(pixels(100, 3072)).view(100, 3, 32, 32))
    assert torch.equal(fine.x, coarse.x)
    assert torch.equal(fine.test_x, coarse.test_x)
    assert (fine.classes, coarse.classes, coarse.name) == (100, 20, "cifar100-coarse")
    assert fine.y.tolist() == list(range(100))
    assert torch.equal(coarse.y, fine.y // 5)
    assert (fine.test_y.tolist(), coarse.test_y.tolist()) == ([99, 1], [19, 0])
    assert fine.y.dtype is coarse.y.dtype is torch.int64


@pytest.mark.parametrize(
    ("name", "key", "labels", "what"),
    [
        ("cifar100", "fine_labels", [0, 100], "labels from 0 to 100 where 0 to 99 are valid"),
        ("cifar100", "fine_labels", [0], "1 labels for 2 images"),
        ("cifar100-coarse", "coarse_labels", [0, 20], "labels from 0 to 20 where 0 to 19 are valid"),
        ("cifar100-coarse", "coarse_labels", [0], "1 labels for 2 images"),
    ],
)
def test_data_sets__bad_labels_of_cifar100_are_told(cifar100, name, key, labels, what):
    assert f"files are damaged (cifar-100-python/test: {what}" in complaint(name, cifar100(test={key: labels}))


def test_data_sets__the_damaged_file_of_cifar100_is_named(cifar100):
    root = cifar100()
    with open(root / "cifar-100-python" / "test", "ab") as file:
        file.write(b"x")
    assert "files are damaged (cifar-100-python/test: its md5" in complaint("cifar100", root)
    (root / "cifar-100-python" / "meta").unlink()
    assert "missing cifar-100-python/meta; download is off" in complaint("cifar100-coarse", root)


# all of them


BY_PATH_OR_BUNDLED = ("digits", "pydoc", "text:FILE", "prompts:FILE", "folder:PATH", "csv:FILE", "images:FOLDER")


@pytest.mark.parametrize("name", [name for name in data.LOADERS if name not in BY_PATH_OR_BUNDLED])
def test_data_sets__every_set_says_what_is_missing(tmp_path, name):
    message = complaint(name, tmp_path)
    assert "missing" in message


def test_data_sets__digits_are_scikit_learn_s_in_the_order_of_its_split():
    digits = data.load("digits")
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(images.reshape(-1, 1, 8, 8), labels, test_size=0.2, stratify=labels, random_state=0)
    expected = [torch.from_numpy(part) for part in parts]
    assert digits.x.dtype is digits.test_x.dtype is torch.uint8
    assert digits.y.dtype is digits.test_y.dtype is torch.int64
    for part, like in zip((digits.x, digits.test_x, digits.y, digits.test_y), expected):
        assert part.shape == like.shape
        assert torch.equal(part.double(), like.double())
    floats = digits.normalise(digits.x)
    assert (floats.min().item(), floats.max().item()) == (-1.0, 1.0)


def test_data_sets__unknown_names_and_the_folder_of_the_environment(monkeypatch, tmp_path):
    rest = "femnist, mnist, shakespeare, tiny-imagenet, wikitext-2, wikitext-2-valid, csv:FILE, folder:PATH, "
    rest += "images:FOLDER, prompts:FILE, text:FILE, and module"
    with pytest.raises(FLError, match=rf"there are digits, pydoc, cifar10, .*, {rest}"):  # the first need no files
        data.load("imagenet")
    monkeypatch.setenv("FL_DATA_ROOT", str(tmp_path))
    with fl_refused("file", str(tmp_path)):
        data.load("cifar10", download=False)

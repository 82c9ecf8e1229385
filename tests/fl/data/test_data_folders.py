"""Data sets that are folders of their own form: FEMNIST as LEAF has it, Tiny-ImageNet."""

import hashlib
import json
import zipfile

import pytest
import torch
from data_files import complaint
from PIL import Image
from refusals import fl_refused

from fl import data

# FEMNIST


def write_leaf(path, writers, **changes):
    """A file in LEAF's form of {writer: labels}; the first pixel of a sample tells its label."""
    user_data = {
        writer: {"x": [[label / 255] + [1.0] * 783 for label in labels], "y": list(labels)}
        for writer, labels in writers.items()
    }
    document = {"users": list(writers), "num_samples": [len(y) for y in writers.values()], "user_data": user_data}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document | changes))


def test_data_folders__femnist_numbers_the_writers_of_both_parts_together(tmp_path):
    write_leaf(tmp_path / "femnist" / "train" / "b.json", {"f01": [61, 5], "f00": [7]})
    write_leaf(tmp_path / "femnist" / "train" / "a.json", {"f03": [0, 1, 2]})
    write_leaf(tmp_path / "femnist" / "test" / "c.json", {"f03": [4], "f02": [9, 8], "f00": []})
    loaded = data.load("femnist", tmp_path)
    assert loaded.x.shape == (6, 1, 28, 28)
    assert (loaded.x.dtype, loaded.y.dtype, loaded.owners.dtype) == (torch.uint8, torch.int64, torch.int64)
    assert loaded.y.tolist() == [7, 61, 5, 0, 1, 2]
    assert loaded.owners.tolist() == [0, 1, 1, 3, 3, 3]
    assert loaded.test_y.tolist() == [9, 8, 4]
    assert torch.equal(loaded.x[:, 0, 0, 0], loaded.y.byte())
    assert (loaded.x.flatten(1)[:, 1:] == 255).all()  # paper stays white
    assert (loaded.classes, loaded.top) == (62, 255)
    moved = loaded.to("meta")
    assert (moved.x.device.type, moved.test_y.device.type) == ("meta", "meta")
    assert moved.owners.device.type == "cpu"


def test_data_folders__pixels_of_femnist_are_rounded_to_the_nearest_of_256(tmp_path):
    for part in ("train", "test"):
        write_leaf(
            tmp_path / "femnist" / part / "a.json",
            {"w": [1]},
            user_data={"w": {"x": [[0.0, 0.4 / 255, 0.6 / 255, 254.9 / 255] * 196], "y": [1]}},
        )
    assert data.load("femnist", tmp_path).x.flatten()[:4].tolist() == [0, 0, 1, 255]


def test_data_folders__bad_leaf_files_are_named(tmp_path):
    train, test = (tmp_path / "femnist" / part for part in ("train", "test"))
    assert "github.com/TalwalkarLab/leaf" in complaint("femnist", tmp_path)
    write_leaf(train / "a.json", {"w": [1]})
    message = complaint("femnist", tmp_path)
    assert "missing femnist/test/*.json." in message
    assert "preprocess.sh" in message
    write_leaf(test / "a.json", {"w": [1]})
    assert data.load("femnist", tmp_path).owners.tolist() == [0]

    def damage(writers=None, **changes):
        write_leaf(test / "a.json", writers or {"w": [1]}, **changes)
        message = complaint("femnist", tmp_path)
        assert "files are damaged (femnist/test/a.json: " in message
        return message

    def sample(x, y):
        return damage(user_data={"w": {"x": x, "y": y}})

    white = [1.0] * 784
    assert "does not have 784 pixels" in sample([white[1:]], [1])
    assert "0 images and 1 labels" in sample([], [1])
    assert "2 labels" in sample([white], [1, 1])
    assert "not in [0, 1]" in sample([[1.5, *white[1:]]], [1])
    assert "not in [0, 1]" in sample([[float("nan"), *white[1:]]], [1])
    assert "not an integer from 0 to 61" in sample([white], [62])
    assert "not an integer from 0 to 61" in sample([white], [1.0])
    assert "disagree" in damage(users=["v"])
    assert "disagree" in damage(num_samples=[])
    assert "KeyError: 'y'" in damage(user_data={"w": {"x": []}})
    damage(user_data=None)
    sample([[None] * 784], [1])
    sample([[10**400] * 784], [1])
    write_leaf(test / "a.json", {"w": []})
    assert "files are damaged (femnist/test: no samples)" in complaint("femnist", tmp_path)
    write_leaf(test / "a.json", {"w": [1]})
    write_leaf(test / "b.json", {"w": [1]})
    assert "femnist/test/b.json: writer w is in another file too" in complaint("femnist", tmp_path)
    (test / "b.json").write_bytes((test / "a.json").read_bytes()[:-100])
    assert "files are damaged (femnist/test/b.json: " in complaint("femnist", tmp_path)


# Tiny-ImageNet


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Tiny-ImageNet with two training and one val image of each class; the training images' colour tells the class."""
    root = tmp_path_factory.mktemp("tiny")
    folder = root / "tiny-imagenet-200"
    wnids = [f"n{7919 * i % 1000:08}" for i in range(200)]
    (folder / "val" / "images").mkdir(parents=True)
    (folder / "wnids.txt").write_text("".join(f"{wnid}\n" for wnid in wnids))
    lines = []
    for i, wnid in enumerate(wnids):
        images = folder / "train" / wnid / "images"
        images.mkdir(parents=True)
        shade = sorted(wnids).index(wnid)
        Image.new("RGB", (64, 64), (shade, 255 - shade, 0)).save(images / f"{wnid}_0.JPEG", quality=100)
        Image.new("L", (64, 64), shade).save(images / f"{wnid}_1.JPEG", quality=100)
        (images.parent / f"{wnid}_boxes.txt").write_text("".join(f"{wnid}_{j}.JPEG\t0\t0\t63\t63\n" for j in (0, 1)))
        Image.new("RGB", (64, 64), (shade, 0, 0)).save(folder / "val" / "images" / f"val_{i}.JPEG", quality=100)
        lines.append(f"val_{i}.JPEG\t{wnid}\t0\t0\t63\t63\n")
    (folder / "val" / "val_annotations.txt").write_text("".join(lines))
    return root


@pytest.mark.slow
def test_data_folders__tiny_imagenet_numbers_sorted_wnids(tiny):
    loaded = data.load("tiny-imagenet", tiny, download=False)
    assert loaded.x.shape == (400, 3, 64, 64)
    assert loaded.test_x.shape == (200, 3, 64, 64)
    assert (loaded.x.dtype, loaded.y.dtype, loaded.test_y.dtype) == (torch.uint8, torch.int64, torch.int64)
    assert loaded.classes == 200
    assert loaded.y.tolist() == [i // 2 for i in range(400)]
    assert sorted(loaded.test_y.tolist()) == list(range(200))
    colours = loaded.x[:, :, 32, 32].int()
    shade = torch.arange(200, dtype=torch.int32)
    expected = torch.stack([shade, 255 - shade, torch.zeros_like(shade)], 1)
    assert (colours[::2] - expected).abs().max() <= 3  # JPEG
    assert torch.equal(colours[1::2], shade[:, None].expand(200, 3))  # grey ones became RGB
    assert (loaded.test_x[:, 0, 32, 32] - loaded.test_y).abs().max() <= 3


@pytest.mark.slow
def test_data_folders__bad_files_of_tiny_imagenet_are_named(tiny):
    folder = tiny / "tiny-imagenet-200"
    train = sorted((folder / "train").glob("*/images/*.JPEG"))

    def damage(path, content, named=None):
        kept = path.read_bytes()
        path.unlink() if content is None else path.write_bytes(content)
        try:
            message = complaint("tiny-imagenet", tiny)
        finally:
            path.write_bytes(kept)
        assert f"files are damaged ({(named or path).relative_to(tiny).as_posix()}: " in message
        return message

    wnids, annotations = folder / "wnids.txt", folder / "val" / "val_annotations.txt"
    absent = folder / "train" / f"{wnids.read_text().split()[-1][:-1]}x" / "images"
    lines = annotations.read_bytes().splitlines(keepends=True)
    assert "199 different classes, not 200" in damage(wnids, wnids.read_bytes()[:-10])
    assert "no images" in damage(wnids, wnids.read_bytes()[:-2] + b"x\n", named=absent)
    damage(wnids, b"\xff\xfe\xff")
    damage(train[5], train[5].read_bytes()[:300])
    damage(train[5], b"")
    Image.new("RGB", (64, 32)).save(folder / "wide.png")
    assert "64x32 pixels" in damage(train[5], (folder / "wide.png").read_bytes())
    assert "the image is missing" in damage(train[5], None)
    assert "the image is missing" in damage(folder / "val" / "images" / "val_7.JPEG", None)
    assert "it has no line for val_0.JPEG" in damage(annotations, b"".join(lines[1:]))
    assert "is not in wnids.txt" in damage(annotations, b"".join([*lines[1:], b"val_0.JPEG\tn1\t0\n"]))
    assert "no class" in damage(annotations, b"".join(lines)[:-25])
    assert "no class" in damage(annotations, b"val_0.JPEG")


@pytest.mark.slow
def test_data_folders__tiny_imagenet_is_unpacked_from_its_archive(tiny, tmp_path, monkeypatch):
    from fl.data import tiny_imagenet

    (tmp_path / "archive").mkdir()
    archive = tmp_path / "archive" / "tiny-imagenet-200.zip"
    with zipfile.ZipFile(archive, "w") as packed:
        for file in sorted(tiny.rglob("*")):
            packed.write(file, file.relative_to(tiny))
    monkeypatch.setattr(tiny_imagenet, "MD5", hashlib.md5(archive.read_bytes()).hexdigest())
    loaded = data.load("tiny-imagenet", tmp_path / "archive")  # there already: no network is needed
    assert torch.equal(loaded.x, data.load("tiny-imagenet", tiny).x)

    monkeypatch.setattr(tiny_imagenet, "URL", (tmp_path / "nowhere.zip").as_uri())
    with fl_refused("file", "wnids.txt"):
        data.load("tiny-imagenet", tmp_path / "empty")

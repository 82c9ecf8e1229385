"""Folders of pictures: layouts, labels by name over all sites, and what is said of anything else."""

import shutil

import numpy as np
import pytest
from PIL import Image
from refusals import fl_refused

import fl
from fl.data import load

SHADE = {"cat": 0, "dog": 100, "fox": 200}


def fill(root, places, count=3, size=6):
    """Write grey pictures; the brightness of each says its class, and its row which one it is."""
    for place in places:
        (root / place).mkdir(parents=True)
        for k in range(count):
            shade = SHADE[place.rpartition("/")[2]] + k
            Image.fromarray(np.full((size, size), shade, np.uint8)).save(root / place / f"{k}.png")
    return root


def shades(x):
    return x[:, 0, 0, 0].tolist()


LAYOUTS = {
    "classes": (["cat", "dog"], None),
    "sites": (["A/cat", "A/dog", "A/fox", "B/dog", "B/fox"], ("A", "B")),
    "parts": (["train/cat", "train/dog", "test/dog"], None),
    "parts of sites": (["A/train/cat", "A/test/cat", "B/Training/dog", "B/val/dog", "B/test/dog"], ("A", "B")),
    "sites of parts": (["train/A/cat", "train/B/dog", "test/A/dog", "test/B/dog"], ("A", "B")),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_image_folder__layouts(tmp_path, layout):
    places, sites = LAYOUTS[layout]
    data = load(f"images:{fill(tmp_path, places)}")
    every = [SHADE[place.rpartition("/")[2]] + k for place in places for k in range(3)]
    assert sorted([*shades(data.x), *shades(data.test_x)]) == sorted(every)
    names = sorted({place.rpartition("/")[2] for place in places})
    for x, y in ((data.x, data.y), (data.test_x, data.test_y)):
        assert [names[k] for k in y] == [max(name for name in SHADE if SHADE[name] <= shade) for shade in shades(x)]
    assert data.names == tuple(names)
    assert data.owner_names == (sites or ())
    test = [place for place in places if "test/" in place]
    assert len(data.test_y) == (3 * len(test) or len(places))  # without such folders a third picture of each
    assert (data.valid is None) == (layout != "parts of sites")


def test_image_folder__pictures_of_several_sizes_are_resized(tmp_path):
    fill(tmp_path, ["A/cat"], size=6), fill(tmp_path, ["B/cat", "B/dog"], size=9)
    with fl_refused("data", "[1, 9, 9]"):
        load(f"images:{tmp_path}")
    data = load(f"images:{tmp_path}?size=4")
    assert data.shape == (1, 4, 4)
    assert sorted(shades(data.test_x)) == [2, 2, 102]


def spoil(root, what):
    if what == "text":
        (root / "A" / "cat" / "notes.txt").write_text("no picture")
    elif what == "at the top":
        shutil.copy(root / "A" / "cat" / "0.png", root / "0.png")
    elif what == "level":
        fill(root, ["fox"])
    elif what == "empty":
        (root / "A" / "fox").mkdir()
    elif what == "colour":
        Image.fromarray(np.zeros((6, 6, 3), np.uint8)).save(root / "B" / "dog" / "0.png")
    elif what == "part":
        fill(root, ["train/A/cat"])
    elif what == "cut":
        file = root / "A" / "cat" / "1.png"
        file.write_bytes(file.read_bytes()[:40])


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("text", "A/cat/notes.txt cannot be read: it is no picture"),
        ("cut", "A/cat/1.png cannot be read"),
        ("at the top", "0.png is in no folder of a class"),
        ("level", "fox/0.png lies at another level"),
        ("empty", "A/fox has no pictures"),
        ("colour", r"\[3, 6, 6\]"),
        ("part", "A/cat is in no folder train, valid or test"),
    ],
)
def test_image_folder__what_is_out_of_place_is_named(tmp_path, what, said):
    spoil(fill(tmp_path, ["A/cat", "A/dog", "B/dog"]), what)
    with pytest.raises(fl.FLError, match=said):
        load(f"images:{tmp_path}")


def test_image_folder__a_class_that_only_the_test_part_has_is_named_and_hidden_files_are_left_out(tmp_path):
    fill(tmp_path, ["train/cat", "train/dog", "test/fox"])
    (tmp_path / "train" / "cat" / ".DS_Store").write_text("x")
    with fl_refused("data", "'fox'"):
        load(f"images:{tmp_path}")
    shutil.rmtree(tmp_path / "test")
    with fl_refused("data"):
        load(f"images:{tmp_path}")
    fill(tmp_path, ["test/cat"])
    assert len(load(f"images:{tmp_path}").y) == 6


def test_image_folder__a_site_may_lack_a_class_that_it_has_a_folder_of(tmp_path):
    fill(tmp_path, ["A/cat", "A/dog", "B/dog"])
    (tmp_path / "B" / "cat").mkdir()
    assert load(f"images:{tmp_path}").names == ("cat", "dog")


@pytest.mark.parametrize(("name", "said"), [("gone", "no folder gone"), (".?size=big", "'big'"), (".?s=3", "'s=3'")])
def test_image_folder__wrong_names_are_told(tmp_path, name, said):
    with pytest.raises(fl.FLError, match=said):
        load(f"images:{name}", tmp_path)

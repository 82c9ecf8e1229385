"""`python -m surgery inspect FILE`: what a checkpoint holds, with and without its model."""

import json
import re

import pytest
from command_files import in_folder_with, refused
from safetensors.torch import save_file

from surgery.__main__ import main

MODULE = """
from torch import nn


def net():
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4)) for _ in range(3)))
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    in_folder_with(monkeypatch, tmp_path, "their_nets", MODULE)
    import their_nets

    save_file({**their_nets.net().state_dict()}, "net.safetensors")
    return "net.safetensors"


def test_inspect_file__what_names_and_shapes_show(file, capsys):
    assert main(["inspect", file]) == 0
    assert capsys.readouterr().out == (
        "net.safetensors\n"
        "12 tensors (12 float32), 174 numbers, 696 B\n"
        "\n"
        "layers\n"
        "  (the model itself)  section of 3 blocks\n"
        "    blocks 0-2  3 alike\n"
        "      0  bias 6, weight 6x4\n"
        "      2  bias 4, weight 4x6\n"
    )


def test_inspect_file__how_it_was_made_and_its_widths(file, capsys):
    given = ("--model", "their_nets:net", "--input", "4")
    assert main(["permute", file, *given, "--by", "l1", "--out", "sorted.safetensors"]) == 0
    capsys.readouterr()
    assert main(["inspect", "sorted.safetensors", *given]) == 0
    text = capsys.readouterr().out
    assert "made by permute (by=l1)\n  model: net.safetensors\n" in text
    assert re.search(r"^ +6 +3 x +3  \*\.0\.weight:0$", text, re.MULTILINE)
    assert main(["inspect", "sorted.safetensors", *given, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["made"]["do"] == "permute"
    assert found["tensors"]["0.0.weight"] == {"shape": [6, 4], "dtype": "float32", "bytes": 96}
    assert found["sections"] == {"": ["0", "1", "2"]}
    assert {one["name"] for one in found["widths"]} > {"0.0.weight:0", "1.0.weight:0", "2.0.weight:0"}


def test_inspect_file__what_cannot_be_shown_is_one_line(file, capsys):
    for arguments, text in [
        ((file, "--width", "0.5"), "--width"),
        ((file, "--model", "their_nets:none"), "their_nets:none"),
        (("none.pt",), "none.pt"),
        (("timm:resnet18", "--model", "timm:resnet18"), "--model"),
    ]:
        said = refused(capsys, "inspect", *arguments)
        assert text in said


def test_inspect_file__too_little_memory_is_one_line(file, monkeypatch, capsys):
    def full(*args):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 TB")

    monkeypatch.setattr("surgery.__main__.run", full)
    assert main(["inspect", file]) == 2
    assert capsys.readouterr().err.startswith("error: out of memory: give a smaller model")

"""Commands of surgery on files: what they leave, and what they refuse."""

import sys

import torch
from safetensors.torch import load_file

from surgery.__main__ import main

NETS = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.a, self.b = nn.Linear(width, 12), nn.Linear(12, width)

    def forward(self, x):
        return x + self.b(torch.relu(self.a(x)))


def net(width=8, classes=3, blocks=3):
    every = nn.Sequential(*(Block(width) for _ in range(blocks)))
    return nn.Sequential(nn.Linear(5, width), every, nn.Linear(width, classes))
"""
"""The source of a module with residual nets of the user's own, which take inputs of 5 numbers."""


def run(*arguments):
    assert main([*map(str, arguments)]) == 0


def refused(capsys, *arguments):
    """The one line of an error."""
    assert main([*map(str, arguments)]) == 2, arguments
    text = capsys.readouterr().err
    assert text.startswith("error: "), text
    assert text.count("\n") == 1, text
    return text


def same(file, expected):
    found = load_file(file)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def in_folder_with(monkeypatch, folder, module, text):
    """Make a folder the working directory, with a module of the user's own."""
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, module, raising=False)
    (folder / f"{module}.py").write_text(text)

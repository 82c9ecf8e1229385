"""What is taken from torch without its promise."""

import runpy

import torch
from refusals import fl_refused

from fl.base import torch_private


def test_torch_private__a_torch_without_it_is_named(monkeypatch):
    monkeypatch.delattr(torch, "_fused_sgd_")
    with fl_refused("missing", "_fused_sgd_"):
        runpy.run_path(torch_private.__file__)

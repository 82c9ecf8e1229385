"""What is taken from torch without its promise."""

import runpy

import pytest
import torch

from fl.base import torch_private
from fl.base.errors import FLError


def test_torch_private__a_torch_without_it_is_named(monkeypatch):
    monkeypatch.delattr(torch, "_fused_sgd_")
    with pytest.raises(FLError, match=r"torch 2\.\d+.* does not have what fl takes from .*_fused_sgd_.*: install"):
        runpy.run_path(torch_private.__file__)

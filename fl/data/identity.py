"""What tells one data set from another: shapes, types and a hash of all bytes."""

import hashlib
from typing import Any

import torch

from fl.data.dataset import Dataset

PARTS = ("x", "y", "test_x", "test_y", "owners", "test_owners")


def fingerprint(data: Dataset) -> dict[str, Any]:
    """A data set in a few numbers and words, as JSON takes them; the same on every device.

    >>> from fl.data import load
    >>> print(fingerprint(load("digits"))["x"])
    uint8 [1437, 1, 8, 8]
    """
    digest, said = hashlib.sha256(), {}
    for part in PARTS:
        if (values := getattr(data, part)) is not None:
            said[part] = f"{str(values.dtype).removeprefix('torch.')} {list(values.shape)}"
            digest.update(f"{part} {said[part]}".encode())
            digest.update(values.detach().cpu().contiguous().view(torch.uint8).numpy())
    return {**said, "classes": data.classes, "top": data.top, "sha256": digest.hexdigest()}

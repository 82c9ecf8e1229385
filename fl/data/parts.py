"""Divide the samples of a table or folder into training, validation and test."""

from collections.abc import Callable, Sequence

import numpy as np

from fl.base.errors import FLError

PARTS = {"train": 0, "training": 0, "valid": 1, "validation": 1, "val": 1, "test": 2, "testing": 2}
"""What the parts of a data set are called, in small letters -> 0 for training, 1 for validation, 2 for testing."""


def assign_parts(words: Sequence[str] | np.ndarray | None, groups: np.ndarray, row: Callable[[int], str]) -> np.ndarray:
    """Return the part of each sample, see `PARTS`.

    Args:
        words: what each sample is said to be for. None: the last tenth of each group is for testing, one sample at
            least; a group of one sample has none.
        groups: the group of each sample, [N].
        row: the number of a sample -> what messages call it.

    >>> assign_parts(None, np.array([0, 0, 1, 0]), str), assign_parts(["train", "Val", "test"], np.zeros(3), str)
    (array([0, 0, 0, 2]), array([0, 1, 2]))
    """
    if words is None:
        parts = np.zeros(len(groups), int)
        for group in np.unique(groups):
            indices = np.flatnonzero(groups == group)
            parts[indices[len(indices) - (-(-len(indices) // 10) if len(indices) > 1 else 0) :]] = 2
    else:
        small = [str(word).strip().lower() for word in words]
        if strange := [k for k, word in enumerate(small) if word not in PARTS]:
            raise FLError(
                f"{row(strange[0])} is for {str(words[strange[0]])!r}: it is for train, valid or test", code="data"
            )
        parts = np.array([PARTS[word] for word in small])
    for part, purpose in ((0, "train"), (2, "test")):
        if not (parts == part).any():
            raise FLError(
                f"no sample is for {purpose}: say so of some" if words is not None else f"too few to {purpose} on",
                code="data",
            )
    return parts


def check_classes(classes: np.ndarray, parts: np.ndarray, row: Callable[[int], str]) -> None:
    """Raise FLError for a class that is in the test part, but not in training."""
    if only := {*classes[parts == 2].tolist()} - {*classes[parts == 0].tolist()}:
        k = int(np.flatnonzero((classes == min(only)) & (parts == 2))[0])
        raise FLError(
            f"{row(k)} is for testing and of the class {min(only)!r}, of which nothing is for training: leave its "
            "samples out, or train on some",
            code="data",
        )

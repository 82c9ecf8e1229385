"""What tests of data sets share."""

import numpy as np
import pytest

from fl import data
from fl.errors import FLError


def pixels(*shape):
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


def complaint(name, root):
    with pytest.raises(FLError) as error:
        data.load(name, root, download=False)
    message = str(error.value)
    assert str(root) in message
    assert "--data-root" in message
    assert "\n" not in message
    return message

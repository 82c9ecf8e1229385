"""Random numbers are the same in each run of a test, also of a doctest: what has passed passes again."""

import random

import pytest


@pytest.hookimpl(tryfirst=True)  # before the fixtures, which other tests may share
def pytest_runtest_setup():
    import numpy as np  # tests/conftest.py has to set the threads before torch is imported
    import torch

    random.seed(0)
    np.random.seed(0)  # noqa: NPY002  # the generator that users may use
    torch.manual_seed(0)

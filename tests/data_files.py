"""What tests of data sets share."""

import hashlib
import pickle

import numpy as np
import pytest
import torchvision

from fl import data
from fl.base.errors import FLError


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


def write_cifar100(root, monkeypatch, contents):
    """Files in the form of CIFAR-100's (train, test and meta: what each holds), which torchvision's class takes."""
    folder, md5 = root / "cifar-100-python", {}
    folder.mkdir(exist_ok=True)
    for part, content in contents.items():
        packed = pickle.dumps(content, protocol=2)  # as Krizhevsky's are
        (folder / part).write_bytes(packed)
        md5[part] = hashlib.md5(packed).hexdigest()
    cls = torchvision.datasets.CIFAR100
    monkeypatch.setattr(cls, "train_list", [["train", md5["train"]]])
    monkeypatch.setattr(cls, "test_list", [["test", md5["test"]]])
    monkeypatch.setattr(cls, "meta", cls.meta | {"md5": md5["meta"]})

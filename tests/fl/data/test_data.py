import pytest
import torch
from sklearn.datasets import load_digits

from fl import data
from fl.base.errors import FLError


def test_digits_are_scikit_learn_s_each_once():
    digits = data.load("digits")
    everything = torch.cat([digits.x, digits.test_x]).flatten(1)
    assert digits.x.dtype is torch.uint8
    assert digits.test_x.shape == (360, 1, 8, 8)
    expected = torch.from_numpy(load_digits().data).byte()
    assert sorted(everything.tolist()) == sorted(expected.tolist())
    assert torch.bincount(digits.test_y).tolist() == pytest.approx([36] * 10, abs=2)  # stratified
    floats = digits.normalise(digits.x)
    assert (floats.min().item(), floats.max().item()) == (-1.0, 1.0)


@pytest.mark.slow
def test_cifar10_is_torchvision_s(data_root):
    from torchvision.datasets import CIFAR10
    from torchvision.transforms.functional import normalize, to_tensor

    cifar = data.load("cifar10", data_root, download=False)
    assert cifar.x.shape == (50000, 3, 32, 32)
    assert cifar.test_x.shape == (10000, 3, 32, 32)
    original = CIFAR10(data_root, train=True)
    for i in (0, 777, 49999):
        image, label = original[i]
        expected = normalize(to_tensor(image), [0.5] * 3, [0.5] * 3)
        torch.testing.assert_close(cifar.normalise(cifar.x[i]), expected, rtol=1e-5, atol=1e-6)
        assert cifar.y[i] == label


def test_fashion_mnist_is_torchvision_s(data_root):
    from torchvision.datasets import FashionMNIST

    fashion = data.load("fashion-mnist", data_root, download=False)
    assert fashion.x.shape == (60000, 1, 28, 28)
    assert torch.bincount(fashion.test_y).tolist() == [1000] * 10
    original = FashionMNIST(data_root, train=False)
    assert torch.equal(fashion.test_x[5, 0], original.data[5])


def test_a_damaged_file_is_told_from_a_missing_one(tmp_path):
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    for file in [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch", "batches.meta"]:
        (folder / file).write_bytes(b"not a batch")
    with pytest.raises(FLError, match="files are damaged"):
        data.load("cifar10", tmp_path, download=False)


def test_unknown_names_list_the_valid_ones():
    with pytest.raises(
        FLError, match=r"there are digits, pydoc, cifar10, .*, mnist, .*, text:FILE, and module:function"
    ):
        data.load("imagenet")


def test_the_folder_comes_from_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("FL_DATA_ROOT", str(tmp_path))
    assert data.default_root() == tmp_path
    with pytest.raises(FLError, match=str(tmp_path)):
        data.load("cifar10", download=False)

"""Data of one's own: what is accepted, and what is refused by name."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from refusals import fl_refused
from torch import nn

import fl
import surgery.files
from fl.base.errors import FLError
from fl.base.tensors import read, sha256_of, write
from fl.data import Dataset, fingerprint, load
from fl.extensions.flower.messages import raw
from fl.federation import Federation, LocalTraining
from fl.partition import Split

LABELS = np.array([0, 1, 2, 0])
TABLE = np.linspace(-3, 3, 20).reshape(4, 5)
IMAGES = np.arange(4 * 3 * 6 * 8, dtype=np.uint8).reshape(4, 3, 6, 8)
TOKENS = np.arange(12).reshape(4, 3)


@pytest.mark.parametrize(
    ("given", "dtype"),
    [
        (TABLE, torch.float32),
        (torch.tensor(TABLE).bfloat16(), torch.float32),
        (TABLE.astype(">f4"), torch.float32),
        (TABLE.astype(np.float16)[:, ::-1], torch.float32),
        (IMAGES, torch.uint8),
        (IMAGES / 255, torch.float32),
        (TOKENS.astype(np.uint16), torch.int32),
        (TOKENS, torch.int32),
        (torch.tensor(TOKENS).int(), torch.int32),
    ],
)
def test_arrays__become_tensors_with_their_values(given, dtype):
    data = Dataset.from_arrays(given, LABELS, given, LABELS.astype(np.uint8))
    assert (data.x.dtype, data.y.dtype, data.classes) == (dtype, torch.int64, 3)
    plain = given.double().numpy() if isinstance(given, torch.Tensor) else np.asarray(given, np.float64)
    assert np.allclose(data.x.double().numpy(), plain, rtol=1e-6)
    assert data.test_y.tolist() == LABELS.tolist()


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"x": TABLE[:0]}, "x has no samples"),
        ({"x": TABLE[:3]}, "y has 4 labels and x 3 samples"),
        ({"test_x": TABLE[:, :2]}, r"test_x.*\[4, 2\].*\[4, 5\]"),
        ({"x": TABLE[:, 0]}, r"\[4\]"),
        ({"x": np.where(TABLE > 2.9, np.nan, TABLE)}, r"x\[3\]"),
        ({"x": TABLE * 1e300}, r"x\[0\]"),
        ({"test_x": np.where(TABLE > 2.9, np.inf, TABLE)}, r"test_x.*\[3\]"),
        ({"x": TABLE > 0}, r"\[4, 5\]"),
        ({"x": TABLE + 1j}, "x holds complex128"),
        ({"x": [[1.0], [1.0, 2.0]]}, "x is no array"),
        ({"x": torch.eye(4).to_sparse()}, "sparse_coo"),
        ({"x": IMAGES[:, 0]}, r"\[4, 6, 8\]"),
        ({"x": IMAGES[:, 0, 0]}, r"\[4, 8\]"),
        ({"x": IMAGES.transpose(0, 2, 3, 1)}, r"channels come first, as in x.transpose\(0, 3, 1, 2\)"),
        ({"x": IMAGES.astype(int)}, "images are uint8 or floats"),
        ({"x": IMAGES.astype(np.uint16) + 300}, "65535.*'float32'"),
        ({"x": torch.tensor(IMAGES).to(torch.uint16)}, r"\[4, 3, 6, 8\]"),
        ({"x": IMAGES.astype(np.int16) - 9}, "'float32'"),
        ({"x": IMAGES[:, None]}, r"\[4, 1, 3, 6, 8\].*255"),
        ({"x": IMAGES[:, None] > 9}, "'float32'"),
        ({"x": IMAGES[:, 0, 0, 0]}, r"\[4\]"),
        ({"x": np.ma.masked_less(TABLE, 0)}, r"x\[0\]"),
        ({"x": [*TABLE[:3], np.ma.masked_greater(TABLE[3], 2)]}, r"x\[3\]"),
        ({"test_y": np.ma.masked_equal(LABELS, 2)}, r"test_y.*\[2\]"),
        ({"owners": np.ma.array(list("abca"), mask=[0, 1, 0, 0])}, r"owners\[1\]"),
        ({"owners": np.array([1, 2, 3, 2**63], np.uint64)}, "owners has the number 9223372036854775808.*: give names"),
        ({"y": np.zeros((4, 6, 8), int)}, r"\[4, 6, 8\].*'segmentation'"),
        ({"y": np.full((4, 6, 8), 2.0)}, r"\[4, 6, 8\].*'segmentation'"),
        ({"y": np.full((4, 7), 2)}, r"\[4, 7\].*'segmentation'"),
        ({"y": np.zeros((4, 2, 3)), "task": "multilabel"}, r"give \[4, D\] for multilabel, as in y.reshape\(4, -1\)"),
        ({"x": -TOKENS}, "x goes from -11 to 0: tokens go from 0"),
        ({"x": [[1.0, 2.0], [3.0], [4.0], [5.0]]}, "x is no array: .*fl.data.pad"),
        ({"y": LABELS / 1}, r"\[4\]"),
        ({"y": torch.tensor(LABELS).float()[:, None]}, r"labels are whole numbers, as in y.ravel\(\).astype\(int\)"),
        ({"y": LABELS / 2}, r"\[4\]"),
        ({"y": [151.0, 75.0, 141.0, 206.0]}, r"To predict numbers.* kinds, y = np.unique.*searchsorted\(kinds, t"),
        ({"y": np.eye(3)[LABELS]}, r"a label is one class, y.argmax\(1\), if this is one-hot"),
        ({"y": ["a", "b", "c", "a"]}, r"y holds <U1 .*: number the names, as in names, y = np.unique"),
        ({"y": 2 * (LABELS > 0) - 1, "test_y": [1, 1, 1, -1]}, r"labels are -1 and 1.*: give \(y > 0\).astype\(int\)"),
        ({"x": -TABLE.astype(int)}, "'float32'"),
        ({"y": LABELS[:, None]}, r"\[4, 1\]"),
        ({"y": np.eye(4, dtype=int)}, r"give y.argmax\(1\), if this is one-hot"),
        ({"y": LABELS - 1}, "test_y"),
        ({"y": LABELS - 1, "test_y": LABELS - 3}, "test_y"),
        ({"x": TOKENS, "test_x": TOKENS, "y": TOKENS - 2, "test_y": TOKENS}, "test_x.*test_y"),
        ({"y": np.where(LABELS == 1, np.nan, LABELS)}, r"y\[1\].*NaN"),
        ({"classes": 2}, "labels go from 0 to 2, and with 2 classes they go from 0 to 1"),
        ({"y": 0 * LABELS, "test_y": 0 * LABELS}, "classes must be a whole number from 2 on, got 1"),
        ({"top": 300}, "top must lie between 1 and 255"),
        ({"x": IMAGES, "test_x": IMAGES, "top": 16}, "a pixel has the value 255, above top=16"),
        ({"owners": [1, 2]}, r"\[2\]"),
        ({"test_owners": LABELS}, "test_owners"),
        ({"owners": LABELS, "test_owners": list("abca")}, "give numbers for both, or names for both"),
    ],
)
def test_arrays__what_is_no_data_set_is_refused_in_one_line(changed, said):
    arrays = {"x": TABLE, "y": LABELS, "test_x": TABLE, "test_y": LABELS, **changed}
    with pytest.raises(FLError, match=said) as error:
        Dataset.from_arrays(**arrays)
    assert "\n" not in str(error.value)


STRIDES = {  # each is contiguous to torch, which still cannot view its numbers as bytes
    "column": torch.from_numpy(np.arange(4.0)[:, None]),
    "series": torch.from_numpy(np.arange(8.0).reshape(4, 2)[..., None]),
    "single": torch.from_numpy(np.array(3.0)[None]),
    "expanded": torch.tensor(3.0, dtype=torch.bfloat16).expand(1, 1),
    "strided": torch.arange(4.0).as_strided((1,), (3,)),
    "empty": torch.empty(6, 6)[:0, ::2],
    "scalar": torch.tensor(7),
}


@pytest.mark.parametrize("tensor", STRIDES.values(), ids=STRIDES)
def test_arrays__bytes_of_tensors_whose_last_stride_is_not_1(tensor, tmp_path):
    plain = tensor.clone(memory_format=torch.contiguous_format)
    data = Dataset("a", tensor, tensor, tensor, tensor, 2)
    assert fingerprint(data) == fingerprint(Dataset("a", plain, plain, plain, plain, 2))
    assert raw(tensor) == raw(plain)
    assert sha256_of({"a": tensor}) == sha256_of({"a": plain})
    write(tmp_path / "a.safetensors", "test-1", {"a": tensor}, {})
    assert torch.equal(read(tmp_path / "a.safetensors", "test-1")[0]["a"], tensor)
    surgery.files.write(tmp_path / "b.safetensors", {"a": tensor})
    assert torch.equal(surgery.files.open_state(tmp_path / "b.safetensors")["a"], tensor)


@pytest.mark.parametrize(
    ("x", "y", "task", "net"),
    [
        (TABLE, TABLE.sum(1)[:, None], "regression", nn.Linear(5, 1)),
        (TABLE[..., None], LABELS, "classification", nn.Sequential(nn.Flatten(), nn.Linear(5, 3))),
        (TABLE[:, 0].copy()[:, None], LABELS, "classification", nn.Linear(1, 3)),
        (torch.tensor(TABLE).unsqueeze(-1), LABELS, "classification", nn.Sequential(nn.Flatten(), nn.Linear(5, 3))),
    ],
)
def test_simulate__a_run_on_arrays_with_a_new_last_axis(x, y, task, net, tmp_path, monkeypatch):
    monkeypatch.setattr("fl.figures.curves.run_figure", lambda *_: None)
    data = Dataset.from_arrays(x, y, x, y, owners=[0, 0, 1, 1], task=task)
    config = fl.Config.of(algorithm="fedavg", partition="natural", clients=2, participants=2, rounds=1, min_samples=1)
    assert fl.simulate(config, tmp_path / "run", dataset=data, model=net)["final"]["round"] == 1


@pytest.mark.parametrize(
    ("x", "last", "said"),
    [
        (TOKENS, (), "'float32'"),
        (TABLE[:, :3], (nn.Softmax(1),), "gives probabilities .*: leave the Softmax at its end out"),
        (
            TABLE[:, :3],
            (nn.Sigmoid(),),
            "ends in a Sigmoid in training, and the loss takes logits: leave the Sigmoid out",
        ),
    ],
)
def test_arrays__a_model_and_data_that_do_not_fit_each_other(x, last, said):
    data = Dataset.from_arrays(x, LABELS, x, LABELS, classes=13 if x is TOKENS else 3)
    config = fl.Config.of(clients=2, participants=1, partition="iid", min_samples=1)
    with pytest.raises(FLError, match=said):
        fl.build(config, data, nn.Sequential(nn.Linear(3, data.classes), *last))
    if x is not TOKENS:
        fl.build(config, data, nn.Sequential(nn.Linear(3, 4), *last, nn.Linear(4, 3)))  # within a model it is no end


def test_arrays__masked_arrays_without_a_masked_value_are_taken():
    data = Dataset.from_arrays(np.ma.array(TABLE), np.ma.array(LABELS, mask=False), TABLE, LABELS)
    assert np.allclose(data.x, TABLE)


def test_arrays__types_of_torch_without_arithmetic_are_taken():
    data = Dataset.from_arrays(
        torch.tensor(TOKENS).to(torch.uint16), torch.tensor(LABELS).to(torch.uint32), TOKENS, LABELS
    )
    assert (data.x.tolist(), data.y.tolist()) == (TOKENS.tolist(), LABELS.tolist())


def test_arrays__floats_that_are_pixels_are_told(caplog):
    bright = IMAGES.astype(np.float32)
    for x in (IMAGES / 255, IMAGES - 128.0, IMAGES, TABLE * 50 + 150, bright.reshape(4, -1) * 2, bright[:, 0] / 2):
        Dataset.from_arrays(x, LABELS, x, LABELS)
    assert not caplog.text
    for x in (bright, bright / 2, bright.reshape(4, -1), bright[:, 0]):
        Dataset.from_arrays(x, LABELS, x, LABELS)
        assert "divide x and test_x by 255, or give images as uint8 [N, C, H, W]" in caplog.text
        caplog.clear()


def test_arrays__owners_may_have_names_and_a_data_set_prints_as_a_few_lines():
    data = Dataset.from_arrays(TABLE, LABELS, TABLE[:2], LABELS[:2], list("bacb"), test_owners=list("db"))
    assert data.owners.tolist() == [1, 0, 2, 1]
    assert data.test_owners.tolist() == [3, 1]
    assert str(data) == (
        "given: 4 training and 2 test samples of 5, 3 classes\n"
        "owned by nature: 3 owners have the training samples, and 2 the test samples"
    )


@pytest.mark.parametrize(
    ("owners", "names", "said"),
    [
        (list("bacb"), ("a", "b", "c"), ["a", "b", "c"]),
        (np.array([b"\xc3\xa9", b"a", b"z", b"\xc3\xa9"]), ("a", "z", "é"), ["a", "z", "é"]),
        ([7, -3, 10**15, 7], (), ["-3", "7", "1000000000000000"]),
    ],
)
def test_arrays__clients_are_named_by_their_owners(owners, names, said):
    data = Dataset.from_arrays(TABLE, LABELS, TABLE, LABELS, owners)
    config = fl.Config.of(algorithm="fedavg", partition="natural", clients=3, participants=1, min_samples=1)
    fed, _ = fl.build(config, dataset=data, model=nn.Linear(5, 3))
    assert (data.owner_names, fed.client_names) == (names, said)
    pooled = data.subsample(3)
    assert pooled.owner_names == names
    merged = [Split(torch.tensor(part), torch.empty(0).long(), torch.empty(0).long()) for part in ([0, 3, 1], [2])]
    both = Federation(nn.Linear(5, 3), data, merged, 1).client_names
    first = [str(owners[k]) if not names else names[int(data.owners[k])] for k in (0, 1, 2)]
    assert both == [" + ".join(sorted(first[:2], key=lambda one: int(one) if not names else one)), first[2]]
    torn = [Split(torch.tensor(part), torch.empty(0).long(), torch.empty(0).long()) for part in ([0, 1], [2, 3])]
    assert Federation(nn.Linear(5, 3), data, torn, 1).client_names == []


def test_arrays__classes_that_no_sample_has_are_told(caplog):
    Dataset.from_arrays(TABLE, 5 * LABELS, TABLE, 5 * LABELS)
    assert "8 of these 11 classes have no training sample" in caplog.text
    caplog.clear()
    Dataset.from_arrays(TABLE, 5 * LABELS, TABLE, 5 * LABELS, classes=11)
    assert not caplog.text


def test_arrays__labels_of_tokens_are_one_each_or_one_a_sample():
    text = Dataset.from_arrays(TOKENS, TOKENS + 1, TOKENS[:1], TOKENS[:1])
    assert (text.text, text.classes) == (True, 13)
    whole = Dataset.from_arrays(TOKENS, LABELS, TOKENS[:2], LABELS[:2])
    assert (whole.text, whole.tokens, whole.classes) == (False, True, 3)
    with fl_refused("data", "int64"):
        Dataset.from_arrays(TOKENS, TOKENS, TOKENS, LABELS)


class InPlace(nn.Module):
    """It changes what it is given, as a model that begins with ReLU(inplace=True) does."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(8, 3)

    def forward(self, x):
        x.mul_(2).add_(1)
        return self.last(x.flatten(1)[:, :8].to(self.last.weight.dtype))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.float32, torch.float64, torch.int32, torch.int64])
@pytest.mark.parametrize("backend", ["loop", "vmap"])
def test_arrays__no_model_and_no_normalisation_changes_given_data(dtype, backend):
    shape = (12, 8) if dtype in (torch.int32, torch.int64) else (12, 1, 2, 4)
    x = (torch.rand(shape) * 9).to(dtype)
    y = torch.arange(12) % 3
    data = Dataset("direct", x.clone(), y, x.clone(), y, classes=3)
    nobody = torch.tensor([], dtype=torch.int64)
    parts = [Split(part, nobody, nobody) for part in torch.arange(12).split(6)]
    fed = Federation(InPlace(), data, parts, 2, LocalTraining(1, 3, backend=backend))
    state = fed.initial()
    assert torch.equal(fed.predict(state, data.test_x), fed.predict(state, data.test_x))
    stack = {name: tensor.expand(2, *tensor.shape).clone() for name, tensor in state.items()}
    fed.train(stack, [0, 1], fl.Rng(0, 1))
    fed.predict_each(stack, data.test_x[None].expand(2, *data.test_x.shape))
    assert torch.equal(data.x, x)
    assert torch.equal(data.test_x, x)


def test_arrays__tables_are_not_padded_and_not_cropped():
    table = Dataset.from_arrays(TABLE, LABELS, TABLE, LABELS)
    with fl_refused("unsupported", "--pad", "[5]"):
        table.pad(2)
    for settings in ({"crop": 1}, {"flip": True}):
        config = fl.Config.of(clients=2, participants=1, partition="iid", min_samples=1, **settings)
        with fl_refused("unsupported", "--crop", "--flip", "[5]"):
            fl.build(config, table, nn.Linear(5, 3))


def test_arrays__a_fingerprint_tells_data_apart():
    digits = load("digits")
    same = Dataset.from_arrays(digits.x.numpy(), digits.y, digits.test_x, digits.test_y.tolist(), top=16)
    assert fingerprint(same) == fingerprint(digits)
    other = Dataset.from_arrays(digits.x, digits.y.flip(0), digits.test_x, digits.test_y, top=16)
    assert fingerprint(other)["sha256"] != fingerprint(digits)["sha256"]
    valid = torch.arange(len(digits.y)) < 9
    other = Dataset.from_arrays(digits.x, digits.y, digits.test_x, digits.test_y, valid=valid, top=16)
    moved = Dataset.from_arrays(digits.x, digits.y, digits.test_x, digits.test_y, valid=valid.flip(0), top=16)
    assert len({fingerprint(one)["sha256"] for one in (digits, other, moved)}) == 3


def test_arrays__some_of_the_samples_are_kept_in_their_order():
    digits = load("digits")
    numbered = replace(digits, owners=torch.arange(len(digits.y)))
    kept = numbered.subsample(50).owners
    assert (kept.diff() > 0).all()
    assert kept[-1] > 50


def folder(tmp_path, sizes=((8, 6),) * 4, modes=("RGB",) * 4, classes="ab"):
    for k, (size, mode) in enumerate(zip(sizes, modes)):
        where = tmp_path / classes[k % 2]
        where.mkdir(parents=True, exist_ok=True)
        Image.new(mode, size, k * 20 if mode in "LI1" else (k * 20,) * len(mode)).save(where / f"{k}.png")
    return tmp_path


def test_arrays__an_image_folder(tmp_path):
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import Resize, ToTensor

    train = ImageFolder(folder(tmp_path / "train"))
    data = Dataset.from_torch(train, train, owners=[0, 0, 1, 1])
    halves = torch.utils.data.random_split(train, [2, 2])
    assert Dataset.from_torch(*halves).names == data.names != ()
    assert data.owners.tolist() == [0, 0, 1, 1]
    assert (data.x.dtype, data.x.shape[1:], data.y.tolist()) == (torch.uint8, (3, 6, 8), [0, 0, 1, 1])
    assert data.x[:, 0, 0, 0].tolist() == [0, 40, 20, 60]
    floats = Dataset.from_torch(*[ImageFolder(tmp_path / "train", ToTensor())] * 2)
    assert torch.allclose(floats.x, data.x / 255)

    sizes = folder(tmp_path / "sizes", sizes=((8, 8), (8, 8), (9, 8), (8, 8)))
    with fl_refused("data", "train[1]", "[3, 8, 9]"):
        Dataset.from_torch(ImageFolder(sizes), train)
    assert Dataset.from_torch(*[ImageFolder(sizes, Resize((5, 5)))] * 2).x.shape[1:] == (3, 5, 5)

    (tmp_path / "train/a/0.png").write_bytes(b"no image")
    with fl_refused("run", "train[0]", "UnidentifiedImageError"):
        Dataset.from_torch(train, train)


def image_folders(root, **classes):
    """Of each name an ImageFolder with three pictures a class; the letter of the class is their brightness."""
    from torchvision.datasets import ImageFolder

    for name, letters in classes.items():
        for letter in letters:
            (root / name / letter).mkdir(parents=True)
            for k in range(3):
                Image.new("L", (4, 4), ord(letter)).save(root / name / letter / f"{k}.png")
    return [ImageFolder(root / name) for name in classes]


def brightness(x):
    return "".join(sorted({chr(pixel) for pixel in x[:, 0, 0, 0].tolist()}))


NESTED = {
    "alone": lambda a, b: b,
    "concat": lambda a, b: torch.utils.data.ConcatDataset([a, b]),
    "sum": lambda a, b: a + b,
    "subset of concat": lambda a, b: torch.utils.data.Subset(a + b, range(len(a), len(a) + len(b))),
    "concat of subsets": lambda a, b: torch.utils.data.ConcatDataset(
        [torch.utils.data.Subset(a, [0]), torch.utils.data.Subset(b, range(len(b)))]
    ),
    "random split": lambda a, b: torch.utils.data.random_split(torch.utils.data.ConcatDataset([a, b]), [0.5, 0.5])[0],
    "nested": lambda a, b: a + (a + torch.utils.data.Subset(b, [0, 3])),
}


@pytest.mark.parametrize("join", NESTED.values(), ids=NESTED)
@pytest.mark.parametrize("letters", ["ce", "ae", "xyz"])
def test_arrays__folders_that_number_classes_differently(join, letters, tmp_path):
    """The refusal names class and folder, and what it says makes them agree."""
    a, b = folders = image_folders(tmp_path, a="ace", b=letters)
    with pytest.raises(FLError, match=rf"{tmp_path}/[ab].*, and for each d of folders d.target_transform = lambda"):
        Dataset.from_torch(join(a, b), a)
    with pytest.raises(FLError, match=rf"{tmp_path}/[ab]"):
        Dataset.from_torch(a, join(a, b))
    names = sorted({c for d in folders for c in d.classes})
    for d in folders:
        d.target_transform = lambda k, own=d.classes: names.index(own[k])
    data = Dataset.from_torch(join(a, b), a)
    assert data.names == tuple(names)
    for x, y in ((data.x, data.y), (data.test_x, data.test_y)):
        assert all(brightness(x[y == k]) == names[k] for k in y.unique().tolist())


def test_arrays__folders_that_agree(tmp_path):
    a, same, first = image_folders(tmp_path, a="ace", same="ace", first="ac")
    assert Dataset.from_torch(a + same, a).names == ("a", "c", "e")
    assert Dataset.from_torch(a, first).names == ("a", "c", "e")
    few = Dataset.from_torch(torch.utils.data.Subset(a, [0, 3]), first)  # no sample of the last class
    assert (few.names, few.classes) == (("a", "c", "e"), 3)
    a.target_transform = same.target_transform = [0, 1, 0].__getitem__  # two classes become one
    merged = Dataset.from_torch(a, same)
    assert (merged.names, merged.classes) == ((), 2)
    a.target_transform = torch.tensor([2, 1, 0]).__getitem__
    with fl_refused("data", "'a'"):
        Dataset.from_torch(a, same)
    same.target_transform = a.target_transform
    assert Dataset.from_torch(a, same).names == ("e", "c", "a")
    synonyms = [(torch.zeros(3), 0), (torch.zeros(3), 1)]
    part = torch.utils.data.Subset(synonyms, [0, 1])
    part.dataset = type("Kinds", (list,), {"class_to_idx": {"crane": 0, "bird": 0, "car": 1}})(synonyms)
    assert Dataset.from_torch(part, part).names == ("crane", "car")


@pytest.mark.parametrize(
    ("items", "said"),
    [
        ([], "train has no samples"),
        (iter([]), "list_iterator"),
        ([torch.zeros(3)] * 2, r"train\[0\]"),
        ([(torch.zeros(3), "cat")] * 2, r"train\[0\].*'cat'"),
        ([(torch.zeros(3), torch.zeros(2))] * 2, r"train\[0\]"),
        ([("a", 0)] * 2, r"train\[0\]"),
    ],
)
def test_arrays__what_is_no_torch_data_set_is_refused(items, said):
    with pytest.raises(FLError, match=said):
        Dataset.from_torch(items, items)
    with fl_refused("argument", "datasets.Dataset"):
        Dataset.from_huggingface(items, items)


@pytest.mark.slow  # the import of the package
def test_arrays__hugging_face_data_sets():
    datasets = pytest.importorskip("datasets")
    columns = {"pixels": TABLE.tolist(), "label": LABELS.tolist(), "who": list("abca"), "note": list("wxyz")}
    train = datasets.Dataset.from_dict(columns)
    data = Dataset.from_huggingface(train, train, image="pixels", owner="who")
    assert np.allclose(data.x, TABLE)
    assert data.owners.tolist() == [0, 1, 2, 0]
    with fl_refused("name", "'image'"):
        Dataset.from_huggingface(train, train)
    with fl_refused("data", "train[0]", "'w'"):
        Dataset.from_huggingface(train, train, image="pixels", label="note")
    with fl_refused("argument", "DatasetDict"):
        Dataset.from_huggingface(datasets.DatasetDict(train=train), train)
    both = datasets.DatasetDict(train=train, test=train.select([2, 0]))
    data = Dataset.from_huggingface(both, image="pixels")
    assert (data.y.tolist(), data.test_y.tolist()) == ([0, 1, 2, 0], [2, 0])
    halves = Dataset.from_huggingface(train.train_test_split(0.5), image="pixels", owner="who")  # what a message says
    assert len(halves.y) == len(halves.test_owners) == 2
    streamed = train.to_iterable_dataset()
    for wrong, said in (
        ((datasets.DatasetDict(train=train, validation=train),), "'train'.*'validation'"),
        ((both, both), "DatasetDict.*'train'.*'test'"),
        ((train,), "test is missing"),
        ((datasets.DatasetDict(),), "without a split"),
        ((train, "test"), "'test'.*'test'"),
        ((streamed, train), "from_list"),
    ):
        with pytest.raises(FLError, match=said):
            Dataset.from_huggingface(*wrong, image="pixels")
    kept = datasets.Dataset.from_list(list(streamed), features=streamed.features)
    assert torch.equal(Dataset.from_huggingface(kept, kept, image="pixels").x, data.x)
    images = {"image": [Image.new("L", (4, 3), k) for k in (3, 5)], "label": [0, 1]}
    kinds = [{"image": datasets.Image(), "label": datasets.ClassLabel(names=names)} for names in ("ab", "ba")]
    parts = [datasets.Dataset.from_dict(images, features=datasets.Features(kind)) for kind in kinds]
    assert Dataset.from_huggingface(parts[0], parts[0]).x[:, 0, 0, 0].tolist() == [3, 5]
    with fl_refused("data", "'b'"):
        Dataset.from_huggingface(*parts)
    numbers = {name: k for k, name in enumerate("ab")}
    data = Dataset.from_huggingface(parts[0], parts[1].align_labels_with_mapping(numbers, "label"))
    assert (data.names, data.test_y.tolist()) == (("a", "b"), [1, 0])
    kind = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=list("abc"))})
    more = datasets.Dataset.from_dict(images, features=kind)
    assert Dataset.from_huggingface(more, parts[0], owner="label").names == ("a", "b", "c")
    assert Dataset.from_huggingface(more, parts[0], owner="label").owner_names == ("a", "b")
    hidden = datasets.Dataset.from_dict(images | {"label": [-1, 0]}, features=kind)
    with fl_refused("data", "'label'"):
        Dataset.from_huggingface(more, hidden)


@pytest.mark.parametrize("kind", ["str", "object", "category"])
def test_arrays__names_may_be_columns_of_pandas(kind):
    pd = pytest.importorskip("pandas")
    x, kinds = np.zeros((4, 2)), pd.Series(["dog", "cat", "cat", "dog"], index=[3, 5, 7, 9]).astype(kind)
    data = Dataset.from_arrays(x, kinds, x, kinds, owners=kinds)
    assert (data.names, data.y.tolist(), data.owners.tolist()) == (("cat", "dog"), [1, 0, 0, 1], [1, 0, 0, 1])


@pytest.mark.parametrize("name", ["y", "owners"])
@pytest.mark.parametrize("missing", [float("nan"), None])
def test_arrays__a_missing_name_does_not_become_one(name, missing):
    x, names = np.zeros((4, 2)), ["a", "b", "a", "b"]
    for kind in (list, lambda values: np.array(values, dtype=object)):
        given = {"y": names, "owners": names} | {name: kind(["a", "b", missing, "b"])}
        with pytest.raises(FLError, match=rf"{name}\[2\] is (nan|None) among names: give a name, or leave"):
            Dataset.from_arrays(x, given["y"], x, names, owners=given["owners"])


def test_arrays__test_samples_of_unknown_owners_are_not_pooled():
    data = Dataset.from_arrays(TABLE, LABELS, TABLE[:2], LABELS[:2], list("bacb"))
    with fl_refused("unsupported", "--pool-test-set"):
        data.pool()


def test_arrays__padding_repeats_the_edge():
    x = torch.arange(2 * 8 * 8, dtype=torch.uint8).reshape(2, 1, 8, 8)
    padded = Dataset("x", x, torch.tensor([0, 1]), x, torch.tensor([0, 1]), 2).pad(3)
    at = torch.arange(14).sub(3).clamp(0, 7)
    assert torch.equal(padded.x, x[..., at, :][..., at])
    assert torch.equal(padded.test_x, padded.x)

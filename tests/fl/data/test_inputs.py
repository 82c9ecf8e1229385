"""Samples with several inputs, which a model gets by keyword: the same results as with all of them in one tensor."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from refusals import fl_refused
from rounds import results
from torch import nn
from torch.utils.data import TensorDataset

import fl
from fl.algorithms.fedmr import FedMROptions
from fl.base.errors import FLError
from fl.data import fingerprint, load, pad
from fl.data.inputs import map_inputs
from fl.extensions.flower import folders
from fl.models.custom_model import by_keyword
from fl.partition import Split
from surgery import state

FEW = {"rounds": 2, "clients": 4, "participants": 3, "local_epochs": 1, "batch_size": 20, "samples": 120}
FEW |= {"partition": "iid", "device": "cpu"}
MIXED = fl.ArchitectureOptions(choose="cycle", widths=(0.5, 1.0), depths=())
CASES = {
    "loop": {"backend": "loop"},
    "workers": {"backend": "workers", "last_batch": "partial"},
    "vmap": {"backend": "vmap", "local_test": 0.2},
    "host": {"data_on": "host", "local_test": 0.2},
    "pooled": {"pool_test_set": True, "local_test": 0.2},
    "recombined": {"algorithm": "fedmr"},
    "aligned": {"algorithm": "fedmr", "fedmr": FedMROptions(align=True)},
    "narrow": {"algorithm": "heterofl", "architectures": MIXED},
    "ordered dropout": {"algorithm": "fjord"},
    "levels": {"algorithm": "femam", "local_test": 0.2},
    "representations": {"algorithm": "moon"},
    "prototypes": {"algorithm": "fedproto", "local_test": 0.2},
    "two models": {"algorithm": "apfl", "local_test": 0.2},
    "generated": {"algorithm": "fedgen"},
}
FAST = ("loop", "vmap", "narrow")


class TwoInputs(nn.Module):
    """Features of an image and of a table, side by side."""

    def __init__(self):
        super().__init__()
        self.conv, self.body, self.last = nn.Conv2d(1, 4, 3, padding=1), nn.Linear(12, 8), nn.Linear(8, 10)

    def forward(self, image, table):
        seen = self.conv(image).relu().mean((2, 3))
        return self.last(self.body(torch.cat([seen, table], 1)).relu())


class OneInput(TwoInputs):
    """The same model of images that have the table as a last row."""

    def forward(self, x):
        return super().forward(x[:, :, :8], x[:, 0, 8])


def inputs(images):
    return {"image": images, "table": images[:, 0].float().mean(1) / 8}


@pytest.fixture(scope="module")
def both():
    """The digits with uint8 images and a table, and as one array of floats."""
    digits = load("digits").subsample(240)
    y, test_y = digits.y, digits.test_y[:60]
    parts = digits.x, digits.test_x[:60]
    two = [inputs(images) for images in parts]
    one = [
        torch.cat([digits.normalise(x), named["table"][:, None, None]], 2) for x, named in zip(parts, two, strict=True)
    ]
    made = fl.Dataset.from_arrays
    return made(two[0], y, two[1], test_y, top=16), made(one[0], y, one[1], test_y)


@pytest.mark.parametrize(
    "case", [case if case in FAST else pytest.param(case, marks=pytest.mark.slow) for case in CASES]
)
def test_simulate__results_are_those_of_one_tensor(both, tmp_path, case):
    """Bit for bit: weights, scores and losses."""
    config, found = fl.Config.of(**{"algorithm": "fedavg", **FEW, **CASES[case]}), []
    for data, model in zip(both, (TwoInputs, OneInput), strict=True):
        folder = tmp_path / model.__name__
        fl.simulate(config, folder, dataset=data, model=model)
        trained = state(fl.load_model(folder, model=model))
        found.append((results(folder), {name: tensor.tolist() for name, tensor in trained.items()}))
    assert found[0] == found[1]


def test_inputs__rows_are_gathered_wherever_they_lie(both):
    data, index = both[0], torch.tensor([[3, 0], [7, 3]])
    for kept in (data, data.to("cpu", "host")):
        x, y = kept.gather(index)
        assert torch.equal(x["image"], data.x["image"][index])
        assert torch.equal(x["table"], data.x["table"][index])
        assert torch.equal(y, data.y[index])
    ready = data.normalise(x)
    assert ready["image"].dtype == ready["table"].dtype == torch.float32
    assert torch.equal(ready["image"], x["image"] / 8 - 1)
    assert torch.equal(ready["table"], x["table"])
    assert repr(data).startswith("given: 240 training and 60 test samples of image 1x8x8 and table 8, 10 classes")


def test_simulate__tokens_are_an_input(tmp_path):
    class Reader(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.last = nn.Embedding(5, 4), nn.Linear(7, 2)

        def forward(self, words, table):
            return self.last(torch.cat([self.words(words).mean(1), table], 1))

    rng = np.random.default_rng(0)
    x = {"table": rng.normal(size=(40, 3)), "words": rng.integers(0, 5, size=(40, 6))}
    data = fl.Dataset.from_arrays(x, np.arange(40) % 2, x, np.arange(40) % 2)
    config = fl.Config.of(algorithm="fedavg", **{**FEW, "samples": 0})
    summary = fl.simulate(config, tmp_path / "run", dataset=data, model=Reader)
    assert 0 <= summary["final"]["accuracy"] <= 1
    trained = fl.load_model(tmp_path / "run", model=Reader)
    ready = data.normalise(data.test_x)
    assert torch.equal(trained(**ready), trained(ready))


def test_simulate__an_input_in_a_file_stays_there(both, tmp_path):
    data, found = both[0], []
    np.save(tmp_path / "image.npy", data.x["image"].numpy())
    mapped = np.load(tmp_path / "image.npy", mmap_mode="r")
    kept = fl.Dataset.from_arrays({**data.x, "image": mapped}, data.y, data.test_x, data.test_y, top=16)
    assert kept.on_host
    assert fingerprint(kept) == fingerprint(data)
    for name, one in (("memory", data), ("file", kept)):
        fl.simulate(
            fl.Config.of(algorithm="fedavg", **{**FEW, "samples": 0}), tmp_path / name, dataset=one, model=TwoInputs
        )
        found.append(results(tmp_path / name))
    assert found[0] == found[1]


def test_simulate__a_run_goes_on_with_the_same_inputs_alone(both, tmp_path):
    data, config = both[0], fl.Config.of(algorithm="fedavg", **{**FEW, "rounds": 1})

    def resume(data=None, model=TwoInputs):
        return fl.simulate(replace(config, rounds=2), tmp_path / "run", resume=True, dataset=data, model=model)

    fl.simulate(config, tmp_path / "run", dataset=data, model=TwoInputs)
    for other in (
        replace(data, x={**data.x, "table": data.x["table"] + 1}),
        replace(data, test_x={**data.test_x, "image": data.test_x["image"].flip(-1)}),
    ):
        with fl_refused("folder"):
            resume(other)
    with fl_refused("folder", "'image'"):
        resume(both[1], OneInput)
    with fl_refused("run", "'table'"):
        resume()
    turned = replace(data, x=dict(reversed(data.x.items())))
    assert resume(turned)["rounds"] == 2


X = {"a": np.zeros((4, 3), "f4"), "b": np.zeros((4, 2), "f4")}
TOKENS = {"a": np.zeros((4, 3), "i4")}
STRANGE = {
    "other names": (X, {"a": X["a"]}, r"test_x a: give b to both"),
    "one array": (X, X["a"], "test_x is .* give a dict for both"),
    "one array first": (X["a"], X, "x is .* give a dict for both"),
    "another length": ({**X, "b": X["b"][:3]}, X, "x has 4 of a, 3 of b"),
    "no input": ({}, {}, "x is a dict of empty"),
    "no name": ({1: X["a"]}, {1: X["a"]}, "x is a dict of 1"),
    "another type": ({**X, "b": X["b"].astype("i4")}, X, r"test_x\['b'\] is float32 .* x\['b'\] is int32"),
    "another shape": ({**X, "b": X["b"][:, :1]}, X, r"test_x\['b'\] is .*\[4, 2\] and x\['b'\]"),
    "not finite": (X, {**X, "a": X["a"] * np.nan}, r"test_x\['a'\]\[0\] has a value that is not finite"),
    "nested": ({"a": X}, {"a": X}, r"x\['a'\] holds object"),
}


@pytest.mark.parametrize("case", STRANGE)
def test_inputs__that_do_not_fit_are_refused(case):
    x, test_x, message = STRANGE[case]
    with pytest.raises(FLError, match=message):
        fl.Dataset.from_arrays(x, [0, 1, 0, 1], test_x, [0, 1, 0, 1])


def test_inputs__no_token_of_several_inputs_has_a_label():
    with fl_refused("data", "[4, 3]"):
        fl.Dataset.from_arrays(TOKENS, TOKENS["a"], TOKENS, TOKENS["a"])


REFUSED = {
    "crop": ({"crop": 2}, TwoInputs, "--crop and --flip are for images"),
    "pad": ({"pad": 1}, TwoInputs, "--pad is for images"),
    "layout": ({"channels_last": True}, TwoInputs, "--channels-last is a layout of images"),
    "zoo": ({"model": "cnn"}, None, "--model cnn takes images"),
    "text": ({"model": "transformer"}, None, "transformer"),
    "transformers": ({"model": "hf-config:nowhere.json"}, None, "hf-config"),
    "other names": ({}, nn.Linear(64, 10), "does not take samples of image 1x8x8 and table 8"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_inputs__what_takes_one_tensor_says_so(both, case):
    settings, model, message = REFUSED[case]
    with pytest.raises(FLError, match=message):
        fl.build(fl.Config.of(algorithm="fedavg", **{**FEW, **settings}), both[0], model)


def test_inputs__nodes_and_items_have_one_input(both, tmp_path):
    with fl_refused("unsupported"):
        folders.save_node(tmp_path / "node", both[0], Split(*torch.arange(6).split(2)))
    with fl_refused("unsupported"):
        folders.save_server(tmp_path / "server", both[0])
    assert not [*tmp_path.iterdir()]
    pairs = [(inputs(both[0].x["image"][:1]), 0)] * 2
    with fl_refused("data", "train[0]", "from_arrays"):
        fl.Dataset.from_torch(pairs, TensorDataset(torch.zeros(2, 3), torch.zeros(2)))


def test_inputs__a_federation_by_hand_takes_a_model_by_keyword(both):
    data = both[0]
    clients = [Split(part, part[:0], part[:0]) for part in torch.arange(120).split(40)]
    local = fl.LocalTraining(epochs=1)
    fed = fl.Federation(by_keyword(TwoInputs()), data, clients, participants=2, local=local)
    ready = data.normalise(map_inputs(lambda values: values[:5], data.x))
    expected = fed.model(**ready)
    assert torch.equal(fed.predict(fed.initial(), map_inputs(lambda values: values[:5], data.x)), expected)


@pytest.mark.parametrize("kind", [torch.int64, torch.float32])
def test_inputs__rows_go_with_targets_of_any_shape(kind):
    """Whatever reorders samples takes inputs and targets along."""
    y = torch.arange(10)[:, None, None].expand(10, 2, 3).to(kind)
    x = {"a": torch.arange(10.0)[:, None], "b": torch.arange(10, dtype=torch.int32)[:, None]}
    data = fl.Dataset("masks", x, y, map_inputs(lambda values: values[:3], x), y[:3], 10)
    assert not data.text
    for made, rows in ((data.pool(), 13), (data.subsample(4), 4), (data.take(torch.tensor([5, 5, 1])), 3)):
        assert len(made.y) == rows
        assert made.y.shape[1:] == (2, 3)
        assert made.x["a"].flatten().tolist() == made.x["b"].flatten().tolist() == made.y[:, 0, 0].tolist()
    tested = data.test_on(torch.tensor([7, 2]))
    assert tested.test_x["b"].flatten().tolist() == tested.test_y[:, 1, 1].tolist() == [7, 2]
    assert fingerprint(data)["y"].endswith("[10, 2, 3]")
    assert fingerprint(data) != fingerprint(replace(data, y=y.transpose(1, 2)))


@given(st.lists(st.lists(st.integers(-9, 9), min_size=1, max_size=6), min_size=1, max_size=5), st.integers(-3, 3))
def test_pad__padding_keeps_what_is_there(sequences, value):
    made = pad(sequences, value)
    assert [row[there].tolist() for row, there in zip(made["x"], made["mask"])] == sequences
    assert (made["x"][~made["mask"]] == value).all()
    assert made["x"].shape == made["mask"].shape == (len(sequences), max(map(len, sequences)))


def test_pad__padding_keeps_types_and_further_axes():
    matrices = [torch.eye(n) for n in (1, 3, 2)]
    made = pad(matrices)
    assert made["x"].shape == (3, 3, 3)
    assert made["x"].dtype == np.float32
    assert made["x"].sum((1, 2)).tolist() == made["mask"].sum(1).tolist() == [1, 3, 2]
    assert pad([np.ones((2, 5), np.int32), np.ones((1, 5), np.int32)])["x"].dtype == np.int32
    assert pad([[True, False], [True]])["x"].tolist() == [[True, False], [True, False]]


@pytest.mark.parametrize("sequences", [[], [[1], []], [[1], [[1]]], [1, 2], [["a"]], [np.ones(2), np.ones((0, 3))]])
def test_pad__what_is_no_sequence_is_not_padded(sequences):
    with fl_refused("data"):
        pad(sequences)


class MeanOfSequence(nn.Module):
    """The mean over what is there."""

    def __init__(self):
        super().__init__()
        self.body, self.last = nn.Linear(2, 8), nn.Linear(8, 2)

    def forward(self, x, mask):
        assert mask.dtype == torch.bool
        seen = self.body(x).relu() * mask[..., None]
        return self.last(seen.sum(1) / mask.sum(1, keepdim=True).clamp(min=1))


@pytest.mark.parametrize("more", [{"backend": "loop"}, {"backend": "vmap"}, {"data_on": "host"}], ids=str)
def test_pad__what_is_behind_a_sequence_changes_nothing(more, tmp_path):
    rng = np.random.default_rng(0)
    sequences, y = [rng.normal(2 * (k % 2), 1, (rng.integers(1, 7), 2)) for k in range(100)], np.arange(100) % 2
    config = fl.Config.of(
        **{
            **FEW,
            "algorithm": "fedavg",
            "samples": 0,
            "rounds": 4,
            "local_epochs": 4,
            "local_test": 0.2,
            "lr": 0.1,
            **more,
        }
    )
    found = []
    for value in (0, 7):
        made = pad(sequences, value)
        first, last = ({name: one[rows] for name, one in made.items()} for rows in (slice(80), slice(80, None)))
        data = fl.Dataset.from_arrays(first, y[:80], last, y[80:])
        summary = fl.simulate(config, tmp_path / str(value), dataset=data, model=MeanOfSequence)
        found.append(summary["final"]["loss"])
        fl.load_model(tmp_path / str(value), model=MeanOfSequence)(**data.example())
    assert found[0] == pytest.approx(found[1], rel=1e-5)
    assert summary["final"]["accuracy"] > 0.7


def test_pad__graphs_are_padded_on_both_axes_and_a_sequence_with_a_feature_missing_is_none():
    assert fl.data.pad([np.ones((2, 2)), np.ones((5, 5))])["x"].shape == (2, 5, 5)
    assert fl.data.pad([np.ones((2, 3)), np.ones((5, 3))])["x"].shape == (2, 5, 3)
    with fl_refused("data", "[2, 3]"):
        fl.data.pad([np.ones((2, 3)), np.ones((5, 5))])

"""Sites with rows of their own: who trains and is tested on what, results by name, and sites left out."""

import csv
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fl
from fl.data import Dataset
from fl.settings.data import DataSettings

SITES = ("oslo", "lima", "bern")
NET = nn.Linear(3, 2)


def sites(train=(24, 16, 12), test=(6, 4, 2), valid=0, names=SITES, task="classification"):
    """Rows whose second number is their place among all: those for training first."""
    owners, tested = (np.repeat(names[: len(sizes)], sizes) for sizes in (train, test))
    n = len(owners) + len(tested)
    x = np.random.default_rng(0).normal(size=(n, 3))
    x[:, 1] = np.arange(n)
    y = (x[:, 0] > 0).astype(int) if task == "classification" else x[:, :1]
    marks = None
    if valid:
        marks = np.zeros(len(owners), bool)
        for name in set(owners):
            marks[np.flatnonzero(owners == name)[-valid:]] = True
    m = len(owners)
    return Dataset.from_arrays(x[:m], y[:m], x[m:], y[m:], owners, test_owners=tested, valid=marks, task=task)


def config(**more):
    usual = {"algorithm": "fedavg", "partition": "natural", "clients": 3, "participants": 2, "rounds": 2, "lr": 1e-3}
    return fl.Config.of(**(usual | {"min_samples": 1, "batch_size": 8} | more))


def places(fed, index):
    """The places of a client's rows among all."""
    return fed.data.x[index][:, 1].long().tolist()


@settings(max_examples=25, deadline=None)
@given(
    train=st.lists(st.integers(4, 12), min_size=2, max_size=5),
    test=st.lists(st.integers(1, 5), min_size=5, max_size=5),
    valid=st.integers(0, 2),
    left=st.booleans(),
    shuffle=st.integers(0, 9),
)
def test_sites__every_row_is_in_one_part_of_one_client(train, test, valid, left, shuffle):
    names = [f"site {k}" for k in range(len(train))]
    data = sites(train, test[: len(train)], valid, names)
    order, test_order = (np.random.default_rng(shuffle).permutation(n) for n in (len(data.y), len(data.test_y)))
    marks = None if data.valid is None else data.valid[order]
    data = replace(
        data, x=data.x[order], y=data.y[order], owners=data.owners[order], valid=marks,
        test_x=data.test_x[test_order], test_y=data.test_y[test_order], test_owners=data.test_owners[test_order],
    )  # fmt: skip
    out = (names[-1],) if left else ()
    fed, _ = fl.build(config(clients=len(train) - left, participants=1, test_sites=out), dataset=data, model=NET)
    n = len(data.y)
    found = [place for split in fed.clients for part in split for place in places(fed, part)]
    expected = set(range(n + len(data.test_y)))
    if left:
        away = fed.data.test_x[:, 1].long().tolist()
        owner = np.concatenate([np.repeat(names, train), np.repeat(names, test[: len(train)])])
        assert sorted(away) == np.flatnonzero(owner == names[-1]).tolist()
        expected -= set(away)
    assert sorted(found) == sorted(expected)
    for name, split in zip(fed.client_names, fed.clients):
        k = names.index(name)
        assert (len(split.valid), len(split.test)) == (valid, test[k])
        assert all(place >= n for place in places(fed, split.test))
        assert all(place < n for place in places(fed, torch.cat([split.train, split.valid])))


@pytest.mark.parametrize("method", ["fedavg", "ditto", "femam", "fedmr"])
def test_simulate__no_row_that_is_held_out_is_ever_trained_on(tmp_path, monkeypatch, method):
    data, seen, original = sites(valid=2), set(), Dataset.gather

    def gather(self, indices):
        seen.update(self.x[indices.cpu()][..., 1].long().flatten().tolist())
        return original(self, indices)

    monkeypatch.setattr(Dataset, "gather", gather)
    run = config(algorithm=method, participants=3, backend="loop")
    summary = fl.simulate(run, tmp_path / "run", dataset=data, model=lambda: nn.Linear(3, 2))
    marked = data.x[data.valid][:, 1].long().tolist()
    assert seen == set(range(52)) - set(marked)
    assert {"local_test_accuracy", "local_valid_loss", "test_accuracy_lima"} <= summary["final"].keys()


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_simulate__scores_are_those_of_each_site_by_name(tmp_path, task):
    data = sites(task=task)
    net = nn.Linear(3, 1 if task == "regression" else 2)
    fl.simulate(config(), tmp_path / "run", dataset=data, model=net)
    model = fl.load_model(tmp_path / "run", model=net)
    with torch.no_grad():
        said = model(data.test_x)
    right = (said - data.test_y).abs().mean(1) if task == "regression" else said.argmax(1) == data.test_y
    score = "mae" if task == "regression" else "accuracy"
    with open(tmp_path / "run" / "clients.csv") as file:
        last = {row["owner"]: row for row in csv.DictReader(file) if row["round"] == "2"}
    final = json.loads((tmp_path / "run" / "summary.json").read_text())["final"]
    for k, name in enumerate(data.owner_names):
        expected = right[data.test_owners == k].double().mean().item()
        assert final[f"test_{score}_{name}"] == pytest.approx(expected, rel=1e-5)
        assert float(last[name][f"test_{score}"]) == pytest.approx(expected, rel=1e-5)
        assert int(last[name]["test"]) == (data.test_owners == k).sum()
    assert final[score] == pytest.approx(right.double().mean().item(), rel=1e-5)


def test_simulate__a_run_with_a_site_left_out_resumes_to_the_same(tmp_path):
    data, best = sites(valid=1), {"test_sites": ("bern",), "clients": 2, "best_by": "test_accuracy_bern"}
    for name, rounds in (("whole", (4,)), ("parts", (2, 4))):
        for number in rounds:
            folder = tmp_path / name
            fl.simulate(config(rounds=number, **best), folder, resume=folder.exists(), dataset=data, model=NET)
    tables = [(tmp_path / name / "clients.csv").read_text() for name in ("whole", "parts")]
    assert tables[0] == tables[1]
    assert "oslo" in tables[0]
    assert "bern" not in tables[0]
    final = json.loads((tmp_path / "parts" / "summary.json").read_text())["final"]
    assert final["test_accuracy_bern"] == final["accuracy"]
    assert "test_accuracy_oslo" not in final
    weights = [fl.load_model(tmp_path / name, model=NET).weight for name in ("whole", "parts")]
    assert torch.equal(*weights)


@pytest.mark.parametrize(
    ("data", "more", "said"),
    [
        (sites(test=(6, 4)), {}, "bern has no test samples, and other clients have"),
        (sites(), {"test_sites": ("rome",)}, "'rome'"),
        (sites(), {"test_sites": SITES}, "no one else has samples to train on"),
        (replace(sites(), test_owners=None), {"test_sites": ("oslo",)}, "does not say who owns its test samples"),
        (replace(sites(), owners=None, test_owners=None), {"test_sites": ("oslo",), "partition": "iid"}, "oslo"),
        (sites(), {"test_sites": ("oslo",), "pool_test_set": True, "local_test": 0.2}, "leave one of them out"),
        (replace(sites(), valid=torch.arange(52) < 24), {}, "oslo has no training samples"),
        (replace(sites(), valid=torch.arange(52) < 5), {}, "bern, lima have no validation samples"),
    ],
)
def test_sites__what_a_site_lacks_is_named(data, more, said):
    with pytest.raises(fl.FLError, match=said):
        fl.build(config(**more), dataset=data, model=NET)


def test_sites__data_that_say_which_samples_validate_leave_no_share_to_hold_out(caplog):
    """... and a share that is asked for is said to be unused."""
    data = replace(sites(), valid=torch.arange(52) % 4 == 0)
    for share in (0.0, 0.5):
        fed, _ = fl.build(config(local_valid=share), dataset=data, model=NET)
        assert fed.clients.valid.sizes.sum() == 13
        assert ("--local-valid 0.5" in caplog.text) == bool(share)


def test_sites__a_share_that_is_asked_for_takes_the_place_of_own_test_rows():
    fed, _ = fl.build(config(local_test=0.25), dataset=sites(), model=NET)
    assert fed.clients.test.sizes.tolist() == [3, 4, 6]  # bern, lima, oslo
    assert len(fed.data.y) == 52


def test_sites__marks_hold_for_every_partition_and_for_a_method_that_validates(caplog):
    data = sites(valid=4)
    fed, _ = fl.build(config(algorithm="femam", partition="iid", clients=2), dataset=data, model=lambda: NET)
    assert not data.valid[fed.clients.train.samples].any()
    assert data.valid[fed.clients.valid.samples].all()
    assert len(fed.clients.valid.samples) == 12
    assert "--local-valid 0.1 is taken" not in caplog.text


def test_sites__who_is_left_out_is_no_client_by_default():
    fed, _ = fl.build(fl.Config.of(partition="natural", test_sites=("lima",)), dataset=sites(), model=NET)
    assert fed.client_names == ["bern", "oslo"]
    assert DataSettings(test_sites=("lima",)).prepare(sites()).test_owners.tolist().count(1) == 20


def test_sites__many_owners_of_a_test_set_have_no_columns():
    names = [f"writer {k}" for k in range(21)]
    fed, _ = fl.build(config(clients=21), dataset=sites([2] * 21, [1] * 21, names=names), model=NET)
    assert not fed.data.test_sites
    assert fed.clients.test.sizes.tolist() == [1] * 21

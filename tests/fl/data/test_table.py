"""Tables: what becomes of their columns, and what is said of those that cannot be learned from."""

import numpy as np
import pandas
import pytest
import torch
from refusals import fl_refused

import fl
from fl.data import load

FRAME = pandas.DataFrame(
    {
        "age": [31, 74, 50, 42, 66],
        "ward": ["icu", "er", "icu", "lab", "er"],
        "smokes": [True, False, False, True, True],
        "ill": ["no", "yes", "yes", "no", "yes"],
        "site": ["oslo", "lima", "oslo", "lima", "oslo"],
        "part": ["train", "train", "test", "train", "valid"],
        "weight": [60.5, 71.25, 80.0, 55.5, 64.0],
    }
)
SPECIAL = ["ill", "site", "part"]
QUERY = "?target=ill&owner=site&split=part"


def from_frame(frame=FRAME, **more):
    return fl.Dataset.from_pandas(frame, **({"target": "ill", "owner": "site", "split": "part"} | more))


def written(path, frame=FRAME):
    frame.to_csv(path, index=False)
    return path


@pytest.mark.parametrize("of_file", [False, True])
def test_table__columns_are_those_of_get_dummies(tmp_path, of_file):
    data = load(f"csv:{written(tmp_path / 'a.csv')}{QUERY}") if of_file else from_frame()
    expected = pandas.get_dummies(FRAME.drop(columns=SPECIAL), columns=["ward"]).to_numpy(np.float32)
    if of_file:  # truth values are words in a file
        words = FRAME.astype({"smokes": str}).drop(columns=SPECIAL)
        expected = pandas.get_dummies(words, columns=["ward", "smokes"]).to_numpy(np.float32)
    shared = (FRAME.part != "test").to_numpy()
    assert torch.equal(data.x, torch.from_numpy(expected[shared]))
    assert torch.equal(data.test_x, torch.from_numpy(expected[~shared]))
    assert (data.y.tolist(), data.test_y.tolist(), data.names) == ([0, 1, 0, 1], [1], ("no", "yes"))
    assert [data.owner_names[k] for k in data.owners] == ["oslo", "lima", "lima", "oslo"]
    assert (data.test_owners.tolist(), data.valid.tolist()) == ([1], [False, False, False, True])


def test_table__without_a_split_the_last_tenth_of_each_owner_is_for_testing():
    frame = pandas.DataFrame({"x": np.arange(25.0), "y": [0, 1] * 12 + [0], "site": ["a"] * 11 + ["b"] * 13 + ["c"]})
    data = from_frame(frame, target="y", owner="site", split=None)
    assert data.test_x.ravel().tolist() == [9, 10, 22, 23]
    assert sorted([*data.x.ravel().tolist(), *data.test_x.ravel().tolist()]) == [*range(25)]


def test_table__numbers_to_predict_and_owners_by_number(tmp_path):
    frame = FRAME.assign(site=[7, 3, 7, 3, 7])
    data = load(f"csv:{written(tmp_path / 'a.csv', frame)}?target=weight&owner=site&split=part&task=regression")
    assert (data.task, data.names, data.y.ravel().tolist()) == ("regression", ("weight",), [60.5, 71.25, 55.5, 64.0])
    assert (data.owners.tolist(), data.owner_names) == ([7, 3, 3, 7], ())


@pytest.mark.parametrize("kind", ["Int64", "boolean", "category", "object"])
def test_table__labels_of_every_kind_of_pandas(kind):
    labels = pandas.Series([0, 1, 1, 0, 1]).astype(kind)
    assert from_frame(FRAME.assign(ill=labels)).y.tolist() == [0, 1, 0, 1]


def test_table__names_that_look_like_numbers_stay_names(tmp_path):
    (tmp_path / "t.csv").write_text("a,owner,target,split\n1,007,none at all,train\n2,12,3,train\n3,007,3,test\n")
    data = load("csv:t.csv", tmp_path)
    assert (data.owner_names, data.owners.tolist(), data.names) == (("007", "12"), [0, 1], ("3", "none at all"))
    assert load("csv:t.csv?owner=a", tmp_path, download=False).owner_names == ()


@pytest.mark.parametrize(
    ("frame", "more", "said"),
    [
        (FRAME.assign(age=[1, 2, None, 3, 4]), {}, "'age'"),
        (FRAME.assign(ward=["er", None, "er", "er", "er"]), {}, "'ward'"),
        (FRAME.assign(site=["a", "b", "c", "d", None]), {}, "'site'"),
        (FRAME.assign(age=[1, 2, "old", 3, 4]), {}, "'old'.*'age'"),
        (FRAME.assign(age=[1, 2, np.inf, 3, 4]), {}, "'age'"),
        (FRAME.assign(age=[[1]] * 5), {}, "'age'"),
        (FRAME.assign(part=["train", "tset", "test", "train", "valid"]), {}, "'part'.*'tset'"),
        (FRAME.assign(part="train"), {}, "no sample is for test"),
        (FRAME.assign(ill=["no", "yes", "dead", "no", "yes"]), {}, "'dead'"),
        (FRAME, {"target": "sick"}, "'sick'"),
        (FRAME, {"split": "site"}, "target, owner and split are ill, site, site"),
        (FRAME, {"categorical": "refuse"}, "'ward'.*'icu'"),
        (FRAME, {"categorical": "ordinal"}, "one-hot, refuse"),
        (FRAME, {"task": "segmentation"}, "'segmentation'"),
        (FRAME, {"task": "regression"}, "'no'"),
        (FRAME[SPECIAL], {}, "no columns to learn from"),
        (FRAME.iloc[:0], {}, "no rows"),
        (FRAME.rename(columns={"age": "ward"}), {}, "'ward'"),
        ([[1, 2]], {}, "frame is a list"),
        (FRAME.rename(columns={"part": "split"}), {"split": None}, "'split'"),
        (FRAME.rename(columns={"site": "owner"}), {"owner": None}, "'owner'"),
    ],
)
def test_table__what_cannot_be_learned_from_is_named(frame, more, said):
    with pytest.raises(fl.FLError, match=said):
        from_frame(frame, **more)


@pytest.mark.parametrize(
    ("text", "query", "said"),
    [
        ("a,target\n1,0\n,1\n", "", "'a'"),
        ("a,target\n1,0\nNaN,1\n", "", "'a'"),
        ("a,target\n1,0\n2\n", "", r"t.csv, line 3 has 1 values, and there are 2 columns"),
        ('a,target\n1,0\n"2\n3",1\n4,x\n', "", "' in the column '"),
        ("a,target\n", "", "has no rows"),
        ("a,a,target\n1,1,0\n", "", "'a'"),
        ("a,,target\n1,1,0\n", "", "a column without a name"),
        ("a,b\n1,0\n", "", "'target'"),
        ("a,target\n1,0\n", "?goal=a", "'goal=a'"),
        ("a,target,split\n1,0,train\n2,1,exam\n", "", "'split'.*'exam'"),
        ("a,target,owner\n1,0,x\n2,1,x\n3,1,\n", "", "'owner'"),
    ],
)
def test_table__what_is_wrong_with_a_file_is_named_by_line_and_column(tmp_path, text, query, said):
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(fl.FLError, match=said):
        load(f"csv:t.csv{query}", tmp_path)


def test_table__a_file_that_is_not_there_is_named(tmp_path):
    with fl_refused("file", "gone.csv"):
        load("csv:gone.csv", tmp_path)

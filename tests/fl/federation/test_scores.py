"""Scorers on samples that do not define them: scikit-learn returns 0, which is no score of such a client."""

import math

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score
from torch import nn

import fl
from fl.federation.scores import macro_f1, metric, r2
from fl.runs.evaluate import summarise_clients


def data_of(task, outputs):
    x = torch.rand(24, 4)
    y = torch.arange(24) % outputs if task == "classification" else (torch.arange(24 * outputs) % 2).view(24, outputs)
    return fl.Dataset.from_arrays(x, y.float() if task == "multilabel" else y, x, y, task=task)


def score(name, predicted, targets, outputs=2):
    several = np.ndim(targets) > 1
    logits = np.asarray(predicted) - 0.5 if several else np.eye(outputs)[predicted]
    data = data_of("multilabel" if several else "classification", np.shape(targets)[1] if several else outputs)
    return metric(name, data)(logits, np.asarray(targets))[name]


@pytest.mark.parametrize(
    ("name", "predicted", "targets", "expected"),
    [
        ("recall", [0, 1], [0, 0], math.nan),
        ("precision", [0, 0], [0, 1], math.nan),
        ("precision", [0, 1], [0, 0], 0),
        ("f1", [0, 0], [0, 0], math.nan),
        ("f1", [0, 1], [0, 0], 0),
        ("jaccard", [0, 0], [0, 0], math.nan),
        ("jaccard", [0, 1], [1, 1], 0.5),
        ("average_precision", [0, 1], [0, 0], math.nan),
        ("matthews_corrcoef", [0, 1], [1, 1], math.nan),
        ("positive_likelihood_ratio", [0, 1], [1, 1], math.nan),
        ("neg_negative_likelihood_ratio", [0, 1], [1, 1], math.nan),
        ("d2_brier_score", [0, 1], [1, 1], math.nan),
        ("balanced_accuracy", [1, 1], [1, 1], 1),
    ],
)
def test_scores__a_score_that_samples_do_not_define_is_nan(name, predicted, targets, expected):
    assert score(name, predicted, targets) == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize(
    ("name", "predicted", "targets", "expected"),
    [
        ("recall_macro", [0, 1, 2, 0], [0, 1, 0, 0], 5 / 6),  # no sample has class 2
        ("precision_macro", [0, 0, 0, 0], [0, 1, 2, 0], 1 / 6),  # classes 1 and 2 are there, and never predicted
        ("f1_macro", [0, 1, 2, 0], [0, 1, 0, 0], (0.8 + 1 + 0) / 3),
        ("recall_macro", [[1, 0, 0], [0, 0, 1]], [[1, 0, 0], [1, 0, 0]], 1 / 2),
        ("precision_macro", [[1, 0, 0], [0, 0, 1]], [[1, 0, 0], [1, 0, 0]], 1 / 2),
        ("precision_macro", [[1, 0, 0], [1, 0, 0]], [[1, 0, 1], [1, 0, 0]], 1 / 2),
        ("f1_macro", [[1, 0, 0], [1, 0, 0]], [[1, 0, 0], [1, 0, 0]], 1),
        ("jaccard_samples", [[1, 0, 0], [0, 0, 0]], [[1, 1, 0], [0, 0, 0]], 1 / 2),
        ("recall_weighted", [[1, 0], [0, 1]], [[0, 0], [0, 0]], math.nan),
        ("precision_micro", [[0, 0], [0, 0]], [[0, 1], [0, 0]], math.nan),
        ("average_precision", [[1, 0, 0], [0, 1, 0]], [[1, 0, 0], [0, 1, 0]], 1),
        ("average_precision", [[1, 0], [0, 1]], [[0, 0], [0, 0]], math.nan),
        ("average_precision", [0, 1, 0], [0, 1, 0], 1),  # no sample has class 2
        ("average_precision", [0, 0, 1], [0, 1, 1], (1 / 2 + 5 / 6) / 2),
        ("roc_auc_ovr_weighted", [[1, 0, 0], [0, 1, 0]], [[0, 0, 0], [0, 0, 0]], math.nan),
    ],
)
def test_scores__an_average_is_over_the_classes_that_samples_have(name, predicted, targets, expected):
    assert score(name, predicted, targets, outputs=3) == pytest.approx(expected, nan_ok=True)


def test_scores__average_precision_ranks_samples_by_their_shares_and_not_by_logits():
    """A number that is added to all logits of a sample says nothing."""
    logits, targets = np.random.default_rng(0).normal(size=(20, 3)), np.arange(20) % 3
    measured, moved = metric("average_precision", data_of("classification", 3)), logits + 10 * np.arange(20)[:, None]
    shares = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    expected = average_precision_score(np.eye(3)[targets], shares)
    for outputs in (logits, moved):
        assert measured(outputs, targets)["average_precision"] == pytest.approx(expected)


@pytest.mark.parametrize("name", ["neg_log_loss", "top_k_accuracy"])
def test_scores__a_score_that_needs_no_class_is_of_samples_of_one_class_too(name):
    expected = {"neg_log_loss": math.log(math.e / (math.e + 2)), "top_k_accuracy": 1.0}
    assert score(name, [1, 1], [1, 1], outputs=3) == pytest.approx(expected[name])


def test_scores__numbers_that_are_always_the_same_define_no_share_of_their_spread():
    targets = np.array([[1.0, 0.1], [2.0, 0.1], [3.0, 0.1]])
    outputs = np.array([[1.0, 0.0], [2.0, 0.0], [2.0, 0.0]])
    data = fl.Dataset.from_arrays(targets, targets, targets, targets, task="regression")
    for name, one in (("explained_variance", 2 / 3), ("d2_absolute_error_score", 1 / 2)):
        measured = metric(name, data)
        assert measured(outputs, targets)[name] == pytest.approx(one)
        assert math.isnan(measured(outputs[:, 1:], targets[:, 1:])[name])
    owners = np.array([0, 0, 0, 1, 1, 1])
    found = r2(np.concatenate([outputs, outputs]), np.concatenate([targets, 0 * targets + 0.1]), owners)
    assert found.tolist() == pytest.approx([1 / 2, math.nan], nan_ok=True)


def test_scores__macro_f1_leaves_out_labels_that_nobody_has_or_predicts():
    labels = np.array([[1, 0, 0], [0, 0, 0]])
    predicted = np.array([[1, 0, 1], [0, 0, 0]])
    assert macro_f1(predicted, labels, np.array([0, 1])).tolist() == pytest.approx([1 / 2, math.nan], nan_ok=True)
    rows = [{"accuracy": 1.0, "loss": 0.0, "f1": value} for value in (0.5, math.nan, 1.0)]
    summary = summarise_clients({"test": rows})
    assert (summary["local_test_f1"], summary["local_test_f1_std"]) == (0.75, 0.25)


def test_scores__clients_without_positives_do_not_count_in_the_mean(tmp_path):
    """Four clients are always right, two of them have class 0 alone."""
    y = np.repeat([0, 1], 40)
    x = np.stack([2.0 * y - 1, np.ones(80)], 1).astype("f")
    data = fl.Dataset.from_arrays(x, y, x, y, owners=np.repeat([0, 1, 2, 3], 20))
    net = nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        net.weight.copy_(torch.tensor([[-1.0, 0.0], [1.0, 0.0]]))
    names = ["recall", "precision", "jaccard", "average_precision"]
    settings = {"partition": "natural", "clients": 4, "participants": 4, "rounds": 1, "lr": 1e-9, "local_test": 0.25}
    config = fl.Config.of(algorithm="fedavg", metrics=names, **settings)
    final = fl.simulate(config, tmp_path / "run", dataset=data, model=net)["final"]
    assert {final[f"{part}test_{name}"] for part in ("", "local_") for name in names} == {1.0}

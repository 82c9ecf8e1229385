"""Which backend `auto` takes: that of the nearest row of the measurements."""

import json
from importlib import resources

import pytest
import torch
from torch import nn

import surgery
from fl.base.rng import Rng
from fl.data import Dataset
from fl.engine import SGD, Job, auto
from fl.engine.batches import make_batches
from fl.engine.objectives import cross_entropy
from fl.engine.work import flops, share_of_products

CONVOLVING = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(144, 3))
MULTIPLYING = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))


def group(model):
    """Three clients with images of 8x8 pixels."""
    data = Dataset("x", torch.zeros(8, 1, 8, 8).byte(), torch.zeros(8).long(), None, None, 3)
    batches = make_batches([torch.arange(8)] * 3, [0, 1, 2], 1, 4, Rng(0), "cpu")
    starts = surgery.broadcast(surgery.state(model), 3)
    return Job(model, data, batches, SGD(0.1), cross_entropy), starts, {}


def test_the_share_of_matrix_products():
    job, _, _ = group(CONVOLVING)
    assert flops(CONVOLVING, job.data) == 2 * (36 * 4 * 9 + 144 * 3)
    assert share_of_products(CONVOLVING, job.data) == pytest.approx(144 * 3 / (36 * 4 * 9 + 144 * 3))
    assert share_of_products(MULTIPLYING, job.data) == 1.0


def test_a_row_of_the_same_kind_decides(monkeypatch):
    """Two rows of equal work, one of convolutions and one of matrix products."""
    for model, expected in ((CONVOLVING, "vmap"), (MULTIPLYING, "workers")):
        job, starts, context = group(model)
        here = {"threads": torch.get_num_threads(), "k": 3, "work": auto.work(job)}
        rows = [
            {**here, "products": 0.2, "ms": {"loop": 3.0, "vmap": 1.0, "workers": 2.0}},
            {**here, "products": 0.9, "ms": {"loop": 3.0, "vmap": 2.0, "workers": 1.0}},
        ]
        monkeypatch.setattr(auto, "_rows", lambda device, rows=rows: rows)
        assert auto.ranked([(job, starts, context)])[0] == expected


def test_rows_without_the_share_decide_as_before(monkeypatch):
    """Where no row says it, it is nowhere a reason."""
    table = json.loads((resources.files("fl.engine") / "engine-cpu.json").read_text())["rows"]
    rows = [{name: value for name, value in row.items() if name != "products"} for row in table]
    monkeypatch.setattr(auto, "_rows", lambda device: rows)
    found = auto.ranked([group(MULTIPLYING)])
    monkeypatch.setattr(auto, "share_of_products", lambda model, data: 0.0)
    assert auto.ranked([group(MULTIPLYING)]) == found

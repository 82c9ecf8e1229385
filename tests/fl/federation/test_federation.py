"""How a federation is made, and what its training returns."""

import re
import traceback
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from torch import nn

import surgery
from fl.algorithms import fedavg
from fl.base.errors import FLError
from fl.base.rng import Rng
from fl.engine import SGD
from fl.engine.augment import Augment
from fl.federation import Federation, LocalTraining
from fl.federation.attack import Attack
from fl.federation.defence import Defence


def test_a_federation_varied_keeps_all_else(make_federation):
    fed = make_federation(defence=Defence("median"), truth=torch.zeros(1, 4))
    other = fed.with_local(epochs=9)
    for setting in fields(Federation):
        if setting.init and setting.name != "local":
            assert getattr(other, setting.name) is getattr(fed, setting.name), setting.name
    assert other.local == replace(fed.local, epochs=9)
    assert other.local.chosen is fed.local.chosen  # a run keeps all that `auto` has chosen
    attacked = replace(fed, attack=Attack(frozenset({0}), fed.data, 1.0))
    assert attacked.attack
    assert attacked.defence == fed.defence
    assert Federation(fed.model, fed.data, fed.clients, 2).local.chosen is not LocalTraining().chosen


def test_settings_in_the_place_of_local_training_are_refused_with_what_to_write(make_federation):
    fed = make_federation()
    known = (fed.model, fed.data, fed.clients, fed.participants)
    with pytest.raises(FLError, match=r"local=1\): give LocalTraining\(epochs=1, "):
        Federation(*known, 1)


def test_what_data_cannot_be_trained_like_is_refused(make_federation):
    with pytest.raises(FLError, match="--crop 8 is as large as the images"):
        make_federation(augment=Augment(crop=8))
    with pytest.raises(FLError, match="unknown backend 'lop'"):
        make_federation(backend="lop")


def test_what_is_trained_says_so(make_federation):
    fed = make_federation()
    fed.model.requires_grad_(True)
    name, parameter = next(iter(fed.model.named_parameters()))
    assert fed.trainable[name] is parameter
    parameter.requires_grad_(False)
    assert list(fed.trainable) == [n for n, _ in fed.model.named_parameters()][1:]


def test_the_server_receives_what_was_trained_unless_somebody_changed_it(make_federation):
    fed = make_federation(epochs=1, optimizer=SGD(0.1))
    starts, clients = surgery.broadcast(fed.initial(), 3), [0, 1, 2]
    trained = fed.train(starts, clients, Rng(0, 1))
    assert trained.received is trained.states
    assert repr(trained).startswith("ClientUpdate: 3 clients, 8 tensors, ")
    assert "3 arrived\n  mean loss " in repr(trained)
    spoilt = replace(fed.data, y=fed.data.y.flip(0))
    attacked = replace(fed, attack=Attack(frozenset({1}), spoilt, 2.0)).train(starts, clients, Rng(0, 1))
    for name, tensor in trained.states.items():
        assert torch.equal(attacked.states[name], tensor)
        assert torch.equal(attacked.received[name][[0, 2]], tensor[[0, 2]])
    assert any(not torch.equal(attacked.received[n][1], t[1]) for n, t in trained.states.items())
    assert "3 arrived; the server received other models\n" in repr(attacked)


def test_the_way_of_a_batch_is_short_and_as_the_page_says(make_federation):
    """From a method's round to the backward pass of a step."""
    ways = []

    class Recording(nn.Linear):
        def forward(self, x):
            logits = super().forward(x.flatten(1))
            logits.register_hook(lambda _: ways.append(traceback.extract_stack()))
            return logits

    fed = make_federation(Recording(64, 3), backend="loop")
    algorithm, root = fedavg(fed), Path(__file__).parents[3]
    algorithm.round(algorithm.init(), [0, 1, 2], Rng(0, 1))
    way = [(frame.filename.removeprefix(f"{root}/"), frame.name) for frame in ways[0]]
    way = [(file, name) for file, name in way if file.startswith("fl/")]
    assert len(way) <= 8, way
    assert len({file for file, _ in way}) <= 6, way
    page = (root / "docs/explanation/engine.md").read_text().split("## The way of a batch")[1].split("\n## ")[0]
    assert re.findall(r"^\d\. `(.*?)`, `(.*?)`", page, re.MULTILINE) == way

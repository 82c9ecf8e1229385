"""How a federation is made, and what its training returns."""

from dataclasses import fields, replace

import pytest
import torch

import surgery
from fl.base.errors import FLError
from fl.base.rng import Rng
from fl.engine import SGD
from fl.engine.augment import Augment
from fl.federation import Federation, LocalTraining
from fl.federation.attack import Attack
from fl.federation.defence import Defence
from fl.federation.population import Population
from fl.federation.traffic import count

CHANGED = {
    "epochs": 3, "batch_size": 7, "optimizer": SGD(0.5), "schedule": lambda number: 0.5, "repeats": 2,
    "augment": Augment(flip=True), "masked": True, "backend": "loop", "chunk": 2,
    "precision": LocalTraining().precision._replace(deterministic=False), "last_batch": "partial",
}  # fmt: skip


def test_settings_of_local_training_come_together_or_one_by_one(make_federation):
    fed = make_federation()
    known = (fed.model, fed.data, fed.clients, fed.participants)
    assert CHANGED.keys() == {setting.name for setting in fields(LocalTraining)}
    for name, value in CHANGED.items():
        expected = replace(LocalTraining(), **{name: value})
        assert expected != LocalTraining()
        assert Federation(*known, LocalTraining(**{name: value})).local == expected
        assert Federation(*known, **{name: value}).local == expected
        assert replace(Federation(*known), **{name: value}).local == expected
    assert Federation(*known, LocalTraining(epochs=3), chunk=2).local == LocalTraining(epochs=3, chunk=2)


def test_a_federation_varied_keeps_all_else(make_federation):
    fed = make_federation(defence=Defence("median"), truth=torch.zeros(1, 4))
    other = replace(fed, epochs=9)
    for setting in fields(Population):
        assert getattr(other, setting.name) is getattr(fed, setting.name), setting.name
    assert (other.defence, other.meter, other.local) == (fed.defence, fed.meter, replace(fed.local, epochs=9))
    attacked = replace(fed, attack=Attack(frozenset({0}), fed.data, 1.0))
    assert attacked.attack
    assert attacked.defence == fed.defence


def test_local_training_by_position_is_refused_with_what_to_write(make_federation):
    fed = make_federation()
    known = (fed.model, fed.data, fed.clients, fed.participants)
    for more in ((1,), (1, 2), (1, 2, SGD(0.1))):
        with pytest.raises(FLError, match=r"by their names, as epochs=1, .* or as LocalTraining\(\.\.\.\)"):
            Federation(*known, *more)
    with pytest.raises(TypeError, match="epoch"):
        Federation(*known, epoch=1)


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
    assert trained.sent is trained.received
    assert trained.metrics == count(starts, trained.sizes)
    assert repr(trained).startswith("Trained: 3 clients, 8 tensors, ")
    assert "3 arrived\n  mean loss " in repr(trained)
    spoilt = replace(fed.data, y=fed.data.y.flip(0))
    attacked = replace(fed, attack=Attack(frozenset({1}), spoilt, 2.0)).train(starts, clients, Rng(0, 1))
    for name, tensor in trained.states.items():
        assert torch.equal(attacked.states[name], tensor)
        assert torch.equal(attacked.received[name][[0, 2]], tensor[[0, 2]])
    assert any(not torch.equal(attacked.received[n][1], t[1]) for n, t in trained.states.items())
    assert "3 arrived; the server received other models\n" in repr(attacked)

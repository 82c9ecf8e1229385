"""FedMR whose models are brought into one order before they are recombined."""

import pytest
import torch
from fleets import assert_close, spoil
from refusals import fl_refused
from rounds import assert_same, play

import surgery
from fl.algorithms.fedmr import METHOD as fedmr
from fl.algorithms.fedmr import FedMROptions
from fl.base.rng import Rng
from fl.engine import SGD

ALIGNED = FedMROptions(align=True)


def permuted(fed, state, seed):
    """The same model with its channels in another order."""
    net = surgery.load(fed.model, state)
    example = fed.data.normalise(fed.data.x[:2])
    generator = torch.Generator().manual_seed(seed)
    found = [width for width in surgery.widths(net, example) if not width.order]
    orders = {width.name: torch.randperm(width.size, generator=generator) for width in found}
    return surgery.state(surgery.symmetry.permute(net, orders, example=example)[0])


@pytest.mark.parametrize("dropped", [False, True])
def test_fedmr_align__permuted_models_come_back_before_they_are_averaged_and_recombined(
    make_federation, monkeypatch, dropped
):
    """Into the order of the first, or of the second if that is the first that arrived."""
    fed = make_federation("cnn", participants=3, optimizer=SGD(1e-9, 0.0))
    algorithm, start = fedmr(fed, ALIGNED), fed.initial()
    models = [start, permuted(fed, start, 1), permuted(fed, start, 2)]
    assert not torch.equal(models[0]["conv2.weight"], models[1]["conv2.weight"])
    if dropped:
        spoil(monkeypatch, {0})
    server = {**algorithm.init(), "slots": surgery.stack(models)}
    after, trained = algorithm.round(server, [0, 1, 2], Rng(0, 1))
    order = models[1] if dropped else start
    expected = surgery.stack([start, order, order])
    assert_close(trained.received, expected, atol=1e-6)
    assert_close(trained.states, surgery.stack(models), atol=1e-6)  # a client has what it trained
    assert_close(after["global"], order, atol=1e-6)


def test_fedmr_align__equal_models_stay_and_those_that_have_not_drifted_are_recombined_as_without(make_federation):
    """After a round of few steps the order as it is matches best; a mean of aligned models is a mean of the models."""
    fed = make_federation("cnn", participants=3)
    for (a, _), (b, _) in zip(play(fedmr(fed), fed), play(fedmr(fed, ALIGNED), fed), strict=True):
        assert_same(a["global"], b["global"])
        assert_same(a["slots"], b["slots"])


def test_fedmr_align__it_cannot_be_hidden_from_the_server(make_federation):
    with fl_refused("argument", "--fedmr.align"):
        fedmr(make_federation("cnn", participants=3), FedMROptions(align=True, secure=1))

"""FedMR whose models are brought into one order before they are recombined."""

import pytest
import torch
from rounds import assert_same, play

import surgery
from fl.algorithms import FedMROptions, fedmr
from fl.algorithms.parts.alignment import aligned
from fl.base.errors import FLError
from surgery.width.align import Aligner


def permuted(fed, state, seed):
    net = surgery.load(fed.model, state)
    example = fed.data.normalise(fed.data.x[:2])
    generator = torch.Generator().manual_seed(seed)
    found = [width for width in surgery.widths(net, example=example) if not width.order]
    orders = {width.name: torch.randperm(width.size, generator=generator) for width in found}
    return surgery.state(surgery.permute(net, orders, example=example)[0])


def test_equal_models_stay_and_permuted_ones_come_back(make_federation):
    fed = make_federation("cnn", participants=3)
    aligner, start = (
        Aligner(fed.model, example=fed.data.normalise(fed.data.x[:2])),
        {name: tensor.clone() for name, tensor in fed.initial().items()},
    )
    same = surgery.broadcast(start, 3)
    assert_same(aligned(same, (5, 5, 5), aligner), same)
    mixed = surgery.stack([start, permuted(fed, start, 1), permuted(fed, start, 2)])
    assert not torch.equal(mixed["conv2.weight"][0], mixed["conv2.weight"][1])
    assert_same(aligned(mixed, (5, 5, 5), aligner), same)
    dropped = aligned(mixed, (0, 5, 5), aligner)  # the second is the reference, and the first is left as it is
    assert all(torch.equal(dropped[name][0], start[name]) for name in start)
    assert all(torch.equal(dropped[name][2], mixed[name][1]) for name in start)


def test_models_that_have_not_drifted_are_recombined_as_without(make_federation):
    """After a round of few steps the order as it is matches best; a mean of aligned models is a mean of the models."""
    fed = make_federation("cnn", participants=3)
    for (a, _), (b, _) in zip(play(fedmr(fed), fed), play(fedmr(fed, FedMROptions(align=True)), fed), strict=True):
        assert_same(a["global"], b["global"])
        assert_same(a["slots"], b["slots"])


def test_a_round_recombines_aligned_models(make_federation, monkeypatch):
    fed = make_federation("cnn", participants=2)
    algorithm = fedmr(fed, FedMROptions(align=True))
    server = algorithm.init()
    start = surgery.unstack(server["slots"])[0]
    server["slots"] = surgery.stack([start, permuted(fed, start, 1)])
    from fl.base.rng import Rng

    rng = Rng(0, 1)
    clients = fed.sample(rng)
    after, trained = algorithm.round(server, clients, rng)
    aligner = Aligner(fed.model, example=fed.data.normalise(fed.data.x[:2]))
    expected = aligned(trained.states, trained.sizes, aligner)
    assert_same(trained.received, expected)
    assert not torch.equal(expected["conv2.weight"], trained.states["conv2.weight"])
    mean = surgery.average(expected)
    for name, tensor in after["global"].items():
        torch.testing.assert_close(tensor, mean[name], rtol=1e-5, atol=1e-6)


def test_it_cannot_be_hidden_from_the_server(make_federation):
    with pytest.raises(FLError, match=r"--fedmr.align needs the clients' models"):
        fedmr(make_federation("cnn", participants=3), FedMROptions(align=True, secure=1))

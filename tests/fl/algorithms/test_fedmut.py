import pytest
import torch
from rounds import assert_same, play

import surgery
from fl.algorithms.fedmut import FedMutOptions, fedmut, signs
from fl.federation import Federation


@pytest.fixture
def watched(monkeypatch):
    """The starts of each round's local training, as it goes on."""
    honest, seen = Federation.train, []

    def train(fed, starts, *how):
        seen.append({name: tensor.clone() for name, tensor in starts.items()})
        return honest(fed, starts, *how)

    monkeypatch.setattr(Federation, "train", train)
    return seen


@pytest.mark.parametrize("unit", ["layer", "tensor", "block"])
def test_fedmut__mutants_lie_on_both_sides_and_cancel(make_federation, watched, unit):
    """Each piece of a mutant is off by + or - r times the last step; all else is the global model's."""
    fed = make_federation("resnet20", participants=4, epochs=1)
    next(fed.model.parameters()).requires_grad_(False)
    (server, _) = play(fedmut(fed, FedMutOptions(radius=2.0, unit=unit, beta=0.0)), fed, 2)[0]
    first, second = watched
    assert_same(first, surgery.broadcast(fed.initial(), 4))  # no step yet
    patterns = []
    for piece in surgery.layers(fed.model, unit=unit):
        moves = set()
        for name in piece.tensors:
            here = server["global"][name]
            if name not in fed.trainable:
                assert torch.equal(second[name], here.expand_as(second[name]))
                continue
            step = 2 * (here - server["previous"][name])
            torch.testing.assert_close(second[name].mean(0), here)
            if step.abs().max() > 1e-6:
                scale = (second[name] - here).flatten(1) @ step.flatten() / step.square().sum()
                moves.add(tuple(scale.round().int().tolist()))
                expected = here + scale.round().view(-1, *[1] * step.ndim) * step
                torch.testing.assert_close(second[name], expected)
        assert len(moves) <= 1  # a piece moves as one
        patterns += moves
    assert all(sorted(pattern) == [-1, -1, 1, 1] for pattern in patterns)
    assert len(set(patterns)) > 2


def test_fedmut__backward_mutations_are_shorter_at_first(make_federation, watched):
    """beta falls from its value in the second round, the first with mutants, to zero; the odd mutant is none."""
    fed = make_federation("cnn", epochs=1)
    history = play(fedmut(fed, FedMutOptions(radius=1.0, beta=0.4, beta_rounds=2)), fed, 5)
    for number, beta in ((2, 0.4), (3, 0.2), (4, 0.0), (5, 0.0)):
        server = history[number - 2][0]
        name = next(iter(server["global"]))
        step = (server["global"][name] - server["previous"][name]).flatten()
        scale = (watched[number - 1][name] - server["global"][name]).flatten(1) @ step / (step @ step)
        torch.testing.assert_close(scale.sort().values, torch.tensor([beta - 1, 0.0, 1.0]), atol=1e-3, rtol=0)
        assert scale[2] == 0


def test_fedmut__signs_are_paired_and_every_order_comes():
    rows = signs(600, 4, 0.0, torch.Generator().manual_seed(0))
    assert rows.sum(1).abs().max() == 0
    _, counts = rows.unique(dim=0, return_counts=True)
    assert len(counts) == 6
    assert (counts - 100).abs().max() < 46  # five standard deviations of a binomial
    assert signs(3, 1, 0.3, torch.Generator()).tolist() == [[0], [0], [0]]


def test_fedmut__mutants_are_averaged_alike_or_by_their_samples(make_federation):
    fed = make_federation("cnn")
    (_, (server, trained)) = play(fedmut(fed), fed, 2)
    assert len(set(trained.sizes)) > 1
    assert_same(server["global"], surgery.average(trained.states))
    (_, (server, trained)) = play(fedmut(fed, FedMutOptions(weighted=True)), fed, 2)
    assert_same(server["global"], surgery.average(trained.states, weights=trained.sizes))

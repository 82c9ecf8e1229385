"""Batches of more samples than clients have: they hold what the largest client has, and no more is computed."""

import pytest
import torch
from torch import nn

from fl.base.rng import Rng
from surgery import broadcast, state

RNG = Rng(0, 1)


class Counting(nn.Linear):
    """A linear model of 64 pixels that counts the samples it is called with."""

    seen = 0

    def __init__(self):
        super().__init__(64, 3)

    def forward(self, x):
        Counting.seen += 0 if x.is_meta else len(x)  # the meter counts on the meta device
        return super().forward(x.flatten(1))


def train(fed, clients=(0, 1, 2, 3), size=4):
    """The trained states with batches of this size, the samples that the model saw, and what the meter says of them."""
    fed = fed.with_local(batch_size=size)
    Counting.seen, _ = 0, fed.meter.read()
    trained = fed.train(broadcast(state(fed.model), len(clients)), list(clients), RNG)
    return trained.states, Counting.seen, fed.meter.read() / (2 * 64 * 3)


@pytest.fixture
def fed(make_federation):
    torch.manual_seed(0)
    return make_federation(Counting(), sizes=(50, 50, 50, 50), backend="loop", epochs=1)


@pytest.mark.parametrize("size", [51, 5000, 100_000, 10**30])
def test_a_batch_larger_than_the_clients_costs_what_their_samples_cost(fed, size):
    whole, large = train(fed, size=50), train(fed, size=size)
    assert large[1:] == whole[1:] == (200, 200)
    for name, tensor in whole[0].items():
        assert torch.equal(large[0][name], tensor)


def test_what_is_counted_is_what_the_model_saw(make_federation):
    fed = make_federation(Counting(), backend="loop", epochs=1)  # clients of 3, 7, 12 and 5 samples
    for size, expected in ((4, 4 + 8 + 12 + 8), (5, 5 + 10 + 15 + 5), (12, 4 * 12), (100, 4 * 12)):
        assert train(fed, size=size)[1:] == (expected, expected)


@pytest.mark.parametrize("chunk", [0, 1, 2])
def test_a_client_learns_the_same_whoever_trains_beside_it(make_federation, chunk):
    """The size depends on the largest client of all, not on the largest of those who train together."""
    fed = make_federation(Counting(), backend="loop", max_parallel_clients=chunk)
    together, *_ = train(fed, size=100)
    for client in range(4):
        alone, *_ = train(fed, [client], size=100)
        for name, tensor in alone.items():
            assert torch.equal(tensor[0], together[name][client])

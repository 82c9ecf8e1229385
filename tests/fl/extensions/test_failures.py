"""Clients that fail at random: their updates do not arrive, always in the same rounds."""

import pytest
import torch
from refusals import fl_refused

import fl
from fl.base.rng import Rng
from fl.extensions.failures import FailureOptions, Failures
from surgery import average, broadcast

FEW = {"clients": 8, "participants": 4, "width": 0.125, "partition": "iid", "local_epochs": 1, "samples": 200}
CLIENTS = [0, 1, 2, 3]


def built(share, algorithm="fedavg", **more):
    failing = {"failures": FailureOptions(share)} if share else {}
    return fl.build(fl.Config.of(algorithm=algorithm, **{**FEW, **failing, **more}))


def round_with(some_fail, share):
    """The first round in which some, but not all, of `CLIENTS` fail, or all do; and who does."""
    for number in range(1, 100):
        failed = [Failures(share, 0).fails(number, client) for client in CLIENTS]
        if (any(failed) and not all(failed)) if some_fail else all(failed):
            return number, failed
    raise AssertionError


def test_failures__updates_of_clients_that_fail_do_not_arrive():
    _, method = built(0.5)
    _, plain = built(0.0)
    number, failed = round_with(True, 0.5)
    server = method.init()
    after, update = method.round(server, CLIENTS, Rng(0, number))
    _, whole = plain.round(server, CLIENTS, Rng(0, number))
    assert [size == 0 for size in update.sizes] == failed
    sizes = [0 if gone else size for gone, size in zip(failed, whole.sizes)]
    torch.testing.assert_close(after["global"], average(whole.received, weights=sizes))
    for name, start in server["global"].items():
        for row, gone in enumerate(failed):
            assert torch.equal(update.received[name][row], start if gone else whole.received[name][row])


def test_failures__a_round_in_which_all_fail_changes_nothing():
    _, method = built(0.9)
    number, _ = round_with(False, 0.9)
    server = method.init()
    after, update = method.round(server, CLIENTS, Rng(0, number))
    assert after is server
    assert not any(update.sizes)


def test_failures__who_fails_depends_on_seed_round_and_client_alone():
    draws = {
        (seed, number): [Failures(0.3, seed).fails(number, client) for client in range(1000)]
        for seed in (0, 1)
        for number in (1, 2)
    }
    for failed in draws.values():
        assert 0.25 < sum(failed) / 1000 < 0.35
    assert len({tuple(failed) for failed in draws.values()}) == 4
    assert not any(Failures(0.0, 0).fails(1, client) for client in range(100))


@pytest.mark.parametrize("algorithm", ["fedrep", "ditto"])
def test_failures__a_client_that_fails_keeps_its_own_model(algorithm):
    """Both of its trainings in the round are lost."""
    _, method = built(0.5, algorithm)
    number, failed = round_with(True, 0.5)
    server = method.init()
    after, update = method.round(server, CLIENTS, Rng(0, number))
    assert [size == 0 for size in update.sizes] == failed
    for client, gone in zip(CLIENTS, failed):
        same = all(torch.equal(t[client], server["clients"][n][client]) for n, t in after["clients"].items())
        assert same == gone


def test_failures__what_clients_predict_with_does_not_fail():
    """FedAvg+ fine-tunes for every client after the round, those that failed in it too."""
    _, method = built(0.9, "fedavg_plus")
    server, _ = method.round(method.init(), CLIENTS, Rng(0, 3))
    models = method.client_models(server).levels[0].models
    assert all(not torch.equal(one, server["global"][name]) for name, t in models.items() if t.ndim > 2 for one in t)


def test_failures__training_apart_from_a_round_does_not_fail():
    fed, _ = built(0.9)
    start = broadcast(fed.initial(), 4)
    assert all(fed.train(start, CLIENTS, Rng(0, 1).apart("something")).sizes)
    assert not all(fed.train(start, CLIENTS, Rng(0, 1)).sizes)


@pytest.mark.parametrize("share", [1.0, -0.1])
def test_failures__a_share_out_of_its_limits_is_refused(share):
    with fl_refused("argument", "--failures"):
        built(share)

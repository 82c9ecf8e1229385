"""Compression of what clients send, beside slow versions with plain loops."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from ranks import tiny
from refusals import fl_refused
from rounds import assert_same, play, played, poison, results
from wrapped import within, wrapped

import fl
from fl import Compression, Rng
from fl.algorithms.apfl import METHOD as apfl
from fl.algorithms.ditto import METHOD as ditto
from fl.algorithms.fedavg import METHOD as fedavg
from fl.algorithms.fedmr import METHOD as fedmr
from fl.algorithms.fedmr import FedMROptions
from fl.algorithms.fedrep import METHOD as fedrep
from fl.algorithms.heterofl import METHOD as heterofl
from fl.extensions.attack import Attack
from fl.extensions.compression import largest, quantise
from fl.extensions.defence import Defence
from fl.models.architectures import ArchitectureOptions

TOPK, QUANTISE = Compression("topk", share=0.1), Compression("quantise", bits=4)
KINDS = [TOPK, QUANTISE, replace(TOPK, feedback=True), replace(QUANTISE, feedback=True)]


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).double()


def steps_of(fed, update, start):
    """How far each client's received model lies from the start, as vectors [K, n]."""
    return torch.cat([(update.received[name] - start[name]).flatten(1) for name in fed.trainable], 1)


# The two compressors.


@pytest.mark.parametrize("share", [0.001, 0.03, 0.5, 1.0])
def test_compression__topk_sends_the_largest_entries_of_the_whole_update(share):
    start = {"w": draw(3, 6, 7, seed=1), "b": draw(3, 5, seed=2), "mean": draw(3, 4, seed=3)}
    step = {"w": draw(3, 6, 7, seed=4), "b": 10 * draw(3, 5, seed=5), "mean": draw(3, 4, seed=6)}
    end = {name: start[name] + step[name] for name in start}
    result = Compression("topk", share=share).compress(end, start, {}, [0, 1, 2], Rng(0), {"w", "b"})
    k = max(1, round(share * 47))
    for row in range(3):
        vector = np.concatenate([step[name][row].numpy().ravel() for name in ("w", "b")])
        expected = np.zeros(47)
        for place in sorted(range(47), key=lambda i: -abs(vector[i]))[:k]:
            expected[place] = vector[place]
        found = torch.cat([(result.received[n][row] - start[n][row]).flatten() for n in ("w", "b")]).numpy()
        np.testing.assert_allclose(found, expected, atol=1e-12)
        left = np.sort(np.abs(vector))[: 47 - k]
        assert np.linalg.norm(vector - found) == pytest.approx(math.sqrt((left**2).sum()), abs=1e-12)
    assert torch.equal(result.received["mean"], end["mean"])


def test_compression__topk_sends_exactly_k_entries_also_of_equal_ones():
    assert (largest(torch.ones(2, 9), 4) != 0).sum(1).tolist() == [4, 4]


@pytest.mark.parametrize("bits", [2, 3, 8, 16])
def test_compression__quantisation_line_by_line(bits):
    steps, chance = draw(2, 3, 4), draw(2, 3, 4, seed=1).abs() % 1
    found, most = quantise(steps, bits, chance), 2 ** (bits - 1) - 1
    for row in range(2):
        scale = max(abs(x) for x in steps[row].flatten().tolist())
        for x, u, y in zip(*(t[row].flatten().tolist() for t in (steps, chance, found))):
            below = math.floor(abs(x) / scale * most + 1e-9)
            level = below + (abs(x) / scale * most - below > u)
            assert y == pytest.approx(math.copysign(level * scale / most, x), abs=1e-12)
    assert len(found[0].unique()) <= 2**bits - 1


def test_compression__quantisation_at_random_has_the_right_mean_and_no_entry_moves_by_more_than_a_level():
    """Of 4,000 clients, each of whom rounds the same update with its own random numbers."""
    step = draw(1, 20).float()
    start = {"w": torch.zeros(4000, 20)}
    many = QUANTISE.compress({"w": step.expand(4000, 20)}, start, {}, range(4000), Rng(0), {"w"}).received["w"]
    level = step.abs().max().item() / 7
    assert (many - step).abs().max() <= level * (1 + 1e-5)
    error = (many.double().mean(0) - step[0].double()).abs()
    assert error.max() < 5 * level / 2 / math.sqrt(4000)  # the deviation of one entry is half a level at most
    assert len(many.unique(dim=0)) > 1000


def test_compression__what_is_rounded_depends_on_the_client_and_the_round_not_on_who_is_beside_it():
    end, start = {"w": draw(3, 50)}, {"w": torch.zeros(3, 50).double()}

    def sent(rows, clients, number=1):
        part = ({name: tensor[rows] for name, tensor in one.items()} for one in (end, start))
        return QUANTISE.compress(*part, {}, clients, Rng(0, number), {"w"}).received["w"]

    every = sent([0, 1, 2], [4, 7, 9])
    assert torch.equal(sent([2, 0], [9, 4]), every[[2, 0]])
    assert not torch.equal(sent([0], [5]), every[:1])
    assert not torch.equal(sent([0], [4], number=2), every[:1])


def test_compression__what_did_not_move_is_not_a_number_nowhere():
    start = {"w": draw(2, 5), "none": torch.zeros(2, 0)}
    for compression in KINDS:
        result = compression.compress(start, start, {}, [0, 1], Rng(0), {"w", "none"})
        assert_same(result.received, start)


def test_compression__quantisation_with_feedback_leaves_less_than_it_was_given():
    """Rounded at random, one large entry among many small ones would leave some of these with more."""
    step, left = {"w": torch.cat([torch.ones(1, 1), torch.full((1, 999), 0.01)], 1)}, {"w": torch.zeros(1, 1000)}
    compression, start = Compression("quantise", bits=2, feedback=True), {"w": torch.zeros(1, 1000)}
    for number in range(50):
        before, left = left, compression.compress(step, start, left, [0], Rng(0, number), {"w"}).unsent
        assert (left["w"].abs() <= (before["w"] + step["w"]).abs() * (1 + 1e-5)).all()


# In rounds.


@pytest.mark.parametrize("compression", KINDS[2:])
def test_compression__with_feedback_all_that_was_learnt_is_sent_or_kept(compression, make_federation):
    """Of each client: its true updates are what it sent and what is left, in sum over the rounds."""
    fed = make_federation(dtype=torch.float64, participants=2)
    algorithm, server = within(fedavg(fed), compression=compression), None
    cohorts = [[0, 2], [1, 2], [3, 1], [2, 0], [0, 1]]
    learnt, sent = (torch.zeros(4, sum(p.numel() for p in fed.trainable.values())).double() for _ in range(2))
    server = algorithm.init()
    for number, clients in enumerate(cohorts, 1):
        start = {name: tensor[None] for name, tensor in server["global"].items()}
        true = fed.train({n: t.expand(2, *t.shape[1:]) for n, t in start.items()}, clients, Rng(0, number))
        server, update = algorithm.round(server, clients, Rng(0, number))
        assert_same(update.states, true.states)
        learnt[clients] += steps_of(fed, true, start)
        sent[clients] += steps_of(fed, update, start)
    left = torch.cat([server["clients"][f"unsent.{name}"].flatten(1) for name in fed.trainable], 1)
    assert left.abs().sum(1).min() > 0
    torch.testing.assert_close(sent + left, learnt, rtol=0, atol=1e-12)


def test_compression__the_server_averages_what_it_receives(make_federation):
    fed = make_federation(dtype=torch.float64)
    ((server, update),) = play(within(fedavg(fed), compression=TOPK), fed, rounds=1)
    assert_same(server["global"], fed.average(update.received, update.sizes))
    assert (steps_of(fed, update, {n: t[None] for n, t in fed.initial().items()}) != 0).float().mean() < 0.11


@pytest.mark.parametrize("make", [fedavg, fedrep])
def test_compression__with_share_1_and_16_bits_little_is_lost(make, make_federation):
    fed = make_federation(dtype=torch.float64)
    expected = play(make(fed), fed)[-1][0]["global"]
    for compression, atol in ((Compression("topk", share=1.0), 1e-12), (Compression("quantise", bits=16), 1e-4)):
        found = play(within(make(fed), compression=compression), fed)[-1][0]["global"]
        for name in expected:
            torch.testing.assert_close(found[name], expected[name], rtol=0, atol=atol)


def test_compression__a_client_that_is_dropped_keeps_what_it_has_not_sent(make_federation, monkeypatch):
    algorithm = within(fedavg(make_federation()), compression=KINDS[2])
    ((before, _),) = played(algorithm, [[0, 1, 2]])
    poison(monkeypatch, {1}, [1])
    ((after, update),) = played(algorithm, [[0, 1, 2]], before, first=2)
    assert update.sizes[1] == 0
    for name, tensor in after["clients"].items():
        assert torch.equal(tensor[[1, 3]], before["clients"][name][[1, 3]])
    name = "unsent.conv1.weight"
    assert not torch.equal(after["clients"][name][0], before["clients"][name][0])
    start = {name: tensor[None] for name, tensor in before["global"].items()}
    assert [bool(one) for one in steps_of(algorithm.fed, update, start).any(1)] == [True, False, True]


@pytest.mark.parametrize("compression", [replace(TOPK, feedback=True), Compression("quantise", bits=16)])
def test_compression__backends_agree(compression, make_federation):
    fed = make_federation(dtype=torch.float64)
    expected, *others = (
        play(within(fedavg(fed.with_local(**how)), compression=compression), fed)[-1][0]
        for how in ({"backend": "loop"}, {"backend": "vmap", "max_parallel_clients": 2}, {"backend": "workers"})
    )
    for server in others:
        for part, state in expected.items():
            for name, tensor in state.items():
                torch.testing.assert_close(server[part][name], tensor, rtol=1e-6, atol=1e-9)


def test_compression__attackers_compress_as_well(make_federation):
    fed = make_federation()
    fed = wrapped(fed, attack=Attack(frozenset({0, 1, 2, 3}), fed.data, 5.0))
    ((_, update),) = play(within(fedavg(fed), compression=TOPK), fed, rounds=1)
    shares = (steps_of(fed, update, {n: t[None] for n, t in fed.initial().items()}) != 0).float().mean(1)
    assert 0.09 < shares.min() <= shares.max() < 0.11


def test_compression__what_is_small_but_common_to_all_is_learnt_with_feedback_alone():
    """Two clients disagree about the first entry, and agree about the second, of which top-1 never sends anything."""
    step, start, moved = {"w": torch.tensor([[5.0, 1.0], [-5.0, 1.0]])}, {"w": torch.zeros(2, 2)}, {}
    for feedback in (False, True):
        left, moved[feedback] = start if feedback else {}, torch.zeros(2)
        for number in range(100):
            compression = Compression("topk", share=0.5, feedback=feedback)
            received, left, _ = compression.compress(step, start, left, [0, 1], Rng(0, number), {"w"})
            moved[feedback] += received["w"].mean(0)
    assert moved[False].tolist() == [0.0, 0.0]
    assert moved[True][1] > 90


# Traffic.


def config(name="fedavg", **changes):
    return tiny(name).replace(**{"rounds": 3, **changes})


def test_compression__traffic_by_hand():
    """A linear model of 64 x 10 + 10 float32 numbers."""
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    for compression, expected in (
        (Compression(), 650 * 4),
        (Compression("topk", share=0.02), math.ceil(13 * (32 + 10) / 8)),  # 1024 positions need 10 bits
        (Compression("topk", share=1.0), 650 * 4),  # without positions
        (Compression("quantise", bits=3), 4 + 240 + 4 + 4),  # 30 bits are 4 bytes
    ):
        settings = config(compression=compression, model="given", width=(1.0,))
        fed, algorithm = fl.build(settings, fl.data.load("digits"), net)
        ((_, update),) = play(algorithm, fed, rounds=1)
        assert update.metrics["bytes_down"] == 650 * 4
        assert update.metrics["bytes_up"] == expected
        assert update.metrics["models_up"] == expected / 2600


def test_compression__buffers_and_frozen_parameters_travel_as_they_are():
    start = {"w": torch.zeros(2, 100), "frozen": torch.ones(2, 7), "steps": torch.zeros(2, dtype=torch.int64)}
    end = {"w": draw(2, 100).float(), "frozen": torch.ones(2, 7), "steps": torch.tensor([3, 4])}
    result = QUANTISE.compress(end, start, {}, [0, 1], Rng(0), {"w"})
    assert result.sent == [4 + 50 + 28 + 8] * 2
    assert torch.equal(result.received["steps"], end["steps"])


def test_compression__clients_of_several_architectures_send_a_share_of_their_own_models():
    kinds = ArchitectureOptions(widths=(0.25, 0.5))
    _, algorithm = fl.build(config("heterofl", architectures=kinds, compression=TOPK, participants=4))
    server = algorithm.init()
    clients = list(range(4))
    message = algorithm.send(server, clients, Rng(0, 1))["model"]
    _, update = algorithm.round(server, clients, Rng(0, 1))
    for before, after in zip(message, update.received):
        steps = torch.cat([(after[name] - before[name]).flatten() for name in after])
        assert 0 < (steps != 0).sum() <= round(0.1 * len(steps))
    assert len({sum(t.numel() for t in state.values()) for state in update.received}) == 2


# Runs.


@pytest.mark.slow
@pytest.mark.parametrize("compression", KINDS[1:3])
def test_simulate__a_run_goes_on_exactly(compression, tmp_path):
    settings = config(compression=compression)
    fl.simulate(settings, tmp_path / "whole")
    fl.simulate(settings, tmp_path / "halves", on_round=lambda row: row["round"] == 2)
    fl.simulate(settings, tmp_path / "halves", resume=True)
    assert results(tmp_path / "whole") == results(tmp_path / "halves")
    assert any(name.startswith("clients/unsent.") for name in results(tmp_path / "whole")[1]) == compression.feedback


def test_compression__what_does_not_go_together_is_refused(make_federation):
    fed = make_federation()
    secure = FedMROptions(secure=1)
    pytest.importorskip("nacl", reason="secure recombination needs pip install 'layer-surgery[secure]'")
    with fl_refused("unsupported", "--compression.kind"):
        within(fedmr(fed, secure), compression=TOPK)
    with fl_refused("unsupported", "--compression.feedback"):
        within(heterofl(fed), compression=KINDS[2])
    with fl_refused("argument", "compression.bits"):
        within(fedavg(fed), compression=Compression("quantise", bits=1))


@pytest.mark.parametrize("compression", KINDS[:3])
def test_compression__updates_that_were_compressed_are_clipped_as_they_arrive(compression, make_federation):
    fed = make_federation(dtype=torch.float64)
    algorithm = within(fedavg(fed), compression=compression, defence=Defence(clip=0.5))
    ((_, update),) = play(algorithm, fed, rounds=1)
    ((_, whole),) = play(within(fedavg(fed), compression=compression), fed, rounds=1)
    start = {n: t[None] for n, t in fed.initial().items()}
    lengths = steps_of(fed, update, start).norm(dim=1)
    assert lengths.max() <= 0.5 * steps_of(fed, whole, start).norm(dim=1).median() * (1 + 1e-9)


@pytest.mark.parametrize("method", [ditto, apfl])
def test_compression__no_method_sees_what_its_clients_have_not_sent(method, make_federation):
    """The models that clients predict with have the names of the model, and personal ones are as without feedback."""
    fed = make_federation(dtype=torch.float64)
    algorithm = within(method(fed), compression=replace(TOPK, share=1.0, feedback=True))
    (server, _) = play(algorithm, fed, rounds=2)[-1]
    expected = play(method(fed), fed, rounds=2)[-1][0]
    for level, other in zip(algorithm.client_models(server).levels, method(fed).client_models(expected).levels):
        for name, tensor in level.models.items():
            torch.testing.assert_close(tensor, other.models[name], rtol=0, atol=1e-12)

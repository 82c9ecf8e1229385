"""Secure recombination without faults: what comes out, what nobody sees, what it costs."""

import logging
import random
import re
import sys
from collections import defaultdict
from itertools import combinations, pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import surgery
from fl.algorithms import FedMROptions, fedmr, indep
from fl.algorithms.parts.secure_round import recombine
from fl.base.errors import FLError
from fl.base.rng import Rng
from fl.engine.objectives import cross_entropy
from fl.federation import traffic
from fl.federation.trained import Trained
from fl.secure.client import Client
from fl.secure.network import Network
from fl.secure.pieces import from_bytes, to_bytes
from fl.secure.server import Server
from fl.secure.session import exchange
from fl.secure.wire import SERVER, Kind

pytest.importorskip("nacl")


def labels(clients, pieces):
    """Models whose pieces say whose and which they are, all of different lengths."""
    return {c: [f"{c}/{p};".encode().ljust(10 + 3 * p, b".") for p in range(pieces)] for c in clients}


def sources(seed, clients):
    return {c: random.Random(seed * 1000 + c) for c in clients}


def oracle(models, repeats, choices):
    """Appendix B with plain lists."""
    clients = list(models)
    models = {c: dict(enumerate(pieces)) for c, pieces in models.items()}
    n = len(models[clients[0]])
    for _ in range(repeats):
        buffers = {c: [[] for _ in range(n)] for c in clients}  # of (giver, piece); the giver of one's own is None
        for c in clients:
            chosen = choices[c].randrange(1, 2**n - 1)
            others = [other for other in clients if other != c]
            for p in range(n):
                to = choices[c].choice(others) if chosen >> p & 1 else None
                buffers[c if to is None else to][p].append((None if to is None else c, models[c][p]))
        for c in clients:
            for p, buffer in enumerate(buffers[c]):
                buffer.sort(key=lambda entry: clients.index(entry[0]) if entry[0] is not None else n * 1000)
                givers = [giver for giver, _ in buffer if giver is not None]
                held = [piece for _, piece in buffer]
                choices[c].shuffle(held)
                for giver in givers:
                    models[giver][p] = held.pop()
                if held:
                    models[c][p] = held.pop()
                assert not held
    return {c: [pieces[p] for p in range(n)] for c, pieces in models.items()}


def assert_permuted(before, after):
    """Each piece of each of these clients is there once, in its place."""
    assert before.keys() == after.keys()
    for p in range(len(next(iter(before.values())))):
        assert sorted(m[p] for m in before.values()) == sorted(m[p] for m in after.values())


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 6), st.integers(2, 8), st.integers(1, 3), st.integers(0, 999))
def test_messages_do_what_the_lists_of_the_appendix_do(k, pieces, repeats, seed):
    clients = [5 * c + 3 for c in range(k)]
    models = labels(clients, pieces)
    outcome = exchange(models, repeats, sources(seed, clients))
    assert_permuted(models, outcome.models)
    assert outcome.models == oracle(models, repeats, sources(seed, clients))
    assert (outcome.faults, outcome.excluded, outcome.attempts) == ([], {}, 1)


def test_twenty_clients_and_choices_of_the_operating_system():
    models = labels(range(20), 3)
    outcome = exchange(models)
    assert_permuted(models, outcome.models)
    assert outcome.models != models


def test_no_uploaded_model_is_a_trained_one():
    """Enough pieces and repeats: none stays whole; nearly all clients contribute to each model; a piece may be
    anywhere."""
    home, owners = 0, 0
    for seed in range(30):
        models = labels(range(5), 12)
        uploaded = exchange(models, 3, sources(seed, range(5))).models
        assert not any(model == trained for model in uploaded.values() for trained in models.values())
        home += sum(a == b for c in models for a, b in zip(models[c], uploaded[c]))
        owners += sum(len({piece.split(b"/")[0] for piece in model}) for model in uploaded.values())
    assert 0.35 < home / (30 * 5 * 12) < 0.46  # 0.2 + 0.8 * (0.5 / 0.8) ** 3, see fl.secure
    assert owners / (30 * 5) > 4


def spy(models, repeats=2):
    """(server, clients, all envelopes, network, what each client held before it uploaded) of a run."""
    seen, held = [], {}

    def tap(envelope):
        seen.append(envelope)
        if envelope.sender == SERVER:
            held[envelope.recipient] = dict(clients[envelope.recipient]._model)
        return (envelope,)

    server = Server([len(piece) for piece in next(iter(models.values()))], repeats)
    clients = {c: Client(c, pieces, server.public) for c, pieces in models.items()}
    network = Network(tap)
    network.run(server, clients)
    assert server.models
    return server, clients, seen, network, held


def test_sizes_tell_nothing_and_only_the_two_ends_read_a_message():
    models = {c: [piece.ljust(300 + 50 * p) for p, piece in enumerate(m)] for c, m in labels(range(4), 5).items()}
    server, clients, seen, network, _ = spy(models)
    heavy = [e for e in seen if len(e.frame) > 300]
    assert len({len(e.frame) for e in heavy}) == 1  # all pieces: given, returned and uploaded
    assert sum(e.recipient == SERVER for e in heavy) == 4 * 5
    assert len({e.frame for e in seen}) == len(seen)
    for envelope in seen:
        assert not any(piece in envelope.frame for model in models.values() for piece in model)
        if SERVER not in envelope[:2]:  # neither the server, with either end's public key, nor another client
            assert all(server._keys.box(clients[c].public).open(envelope.frame[4:]) is None for c in envelope[:2])
            other = next(c for c in clients if c not in envelope[:2])
            assert clients[other]._channels[envelope.sender].lock.open(envelope.frame[4:]) is None
    assert sum(network.sent.values()) == sum(len(e.frame) for e in seen)


class Logged(Client):
    """Remembers which pieces it sent to other clients, by phase, in that order."""

    def __init__(self, *args):
        super().__init__(*args)
        self.orders = defaultdict(list)

    def _send(self, recipient, kind, piece=0, body=b""):
        if kind == Kind.PIECE and recipient != SERVER:
            self.orders[self.phase].append(piece)
        super()._send(recipient, kind, piece, body)


@pytest.mark.parametrize("phase", [1, 2, 3, 4])
def test_the_order_of_messages_does_not_tell_which_pieces_travel(phase):
    up = down = near = expected = 0
    for _ in range(60):
        server = Server([1] * 8, 2)
        clients = {c: Logged(c, [b"."] * 8, server.public) for c in range(4)}
        Network().run(server, clients)
        for order in (client.orders[phase] for client in clients.values()):
            up += sum(a < b for a, b in pairwise(order))
            down += sum(a > b for a, b in pairwise(order))
            near += sum(a == b for a, b in pairwise(order))
            expected += sum(a == b for a, b in combinations(order, 2)) * 2 / max(len(order), 1)
    assert 0.42 < up / (up + down) < 0.58  # by chance; 1 in ascending order
    assert near <= 1.7 * expected  # nor do those of the same place come one after another


def test_clients_hold_only_what_the_server_alone_opens():
    models = labels(range(3), 4)
    server, clients, _, _, held = spy(models)
    for client in clients.values():
        assert not client._model  # what was uploaded is not kept twice
        assert len(held[client.address]) == 4
        for number, blob in held[client.address].items():
            assert client._keys.unseal(blob) is None
            assert not client._channels[client._peers[0]].frames  # and nothing of what it passed on
            assert server._keys.unseal(blob).rstrip(b"\0").endswith(server.models[client.address][number])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool])
def test_tensors_become_bytes_and_tensors_again(dtype, device):
    generator = torch.Generator().manual_seed(0)
    stack = {
        "a": (torch.randn(3, 2, 5, generator=generator) * 9).to(dtype).transpose(1, 2),  # not contiguous
        "count": torch.tensor([1, 2, 3]),
        "odd": torch.randn(3, 3, generator=generator).half(),  # 6 bytes: what follows is not aligned
        "b": torch.full((1, 4), torch.nan).expand(3, 4),
        "none": torch.empty(3, 0),
    }
    stack = {name: tensor.to(device) for name, tensor in stack.items()}
    pieces = [("odd", "a"), ("none",), ("b", "count")]
    models = to_bytes(stack, pieces)
    assert [len(piece) for piece in models[0]] == [6 + 10 * stack["a"].itemsize, 0, 24]
    back = from_bytes([models[2], models[0]], pieces, stack)
    assert list(back) == list(stack)
    alone = from_bytes([models[1]], pieces, stack)
    for name, tensor in stack.items():
        torch.testing.assert_close(back[name], tensor[[2, 0]], rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(alone[name], tensor[[1]], rtol=0, atol=0, equal_nan=True)


def play(algorithm, fed, rounds=3):
    """The (server, trained) after each round."""
    server, history = algorithm.init(), []
    for number in range(1, rounds + 1):
        server, trained = algorithm.round(server, fed.sample(Rng(0, number)), Rng(0, number))
        history.append((server, trained))
    return history


@pytest.mark.parametrize("stage1", [0, 2])
def test_fedmr_has_the_same_global_model_and_layers(make_federation, stage1):
    """Of one round: afterwards other slots train on other clients."""
    fed = make_federation("resnet20", participants=4)
    options = FedMROptions(stage1_rounds=stage1)
    (plain, trained), *_ = play(fedmr(fed, options), fed, 1)
    (secure, hidden), *_ = play(fedmr(fed, FedMROptions(stage1_rounds=stage1, secure=2)), fed, 1)
    for name in plain["global"]:
        torch.testing.assert_close(secure["global"][name], plain["global"][name])
        a, b = (t.states[name].flatten(1).sort(0).values for t in (trained, hidden))
        assert torch.equal(a, b)
        assert hidden.states[name].dtype == trained.states[name].dtype
    assert (surgery.distance(hidden.states, trained.states) > 0).all()  # and no two of them are the same model
    first, second, *_ = surgery.unstack(secure["slots"])
    assert all(torch.equal(first[name], second[name]) for name in first) == bool(stage1)


def test_a_secure_round_is_a_function_of_its_arguments(make_federation):
    fed = make_federation("cnn")
    algorithm = fedmr(fed, FedMROptions(secure=2))
    (server, _), _ = play(algorithm, fed, 2)
    (a, _), (b, _), (c, _) = (algorithm.round(server, [0, 2, 1], Rng(0, number)) for number in (5, 5, 6))
    for name in a["slots"]:
        assert torch.equal(a["slots"][name], b["slots"][name])
        assert torch.equal(a["global"][name], b["global"][name])
    assert any(not torch.equal(a["slots"][name], c["slots"][name]) for name in a["slots"])


def test_choices_are_the_rounds_and_the_clients_own():
    """Two clients of the same choices would get everything back."""
    stack = {str(p): torch.arange(2.0)[:, None] for p in range(20)}
    trained = Trained(stack, torch.zeros(2), (1, 1), traffic.count(stack, (1, 1)), stack)
    owners = []
    for rng in (Rng(0, 1), Rng(0, 1), Rng(0, 2), Rng(1, 1)):
        states = recombine(trained, stack, [3, 5], [(name,) for name in stack], 1, rng).states
        owners.append([int(tensor[0]) for tensor in states.values()])
    assert owners[0] == owners[1]
    assert len(set(map(tuple, owners))) == 3
    assert all(0 < sum(own) < 20 for own in owners)


def test_what_it_costs_is_in_the_metrics(make_federation, caplog):
    fed = make_federation("cnn")
    with caplog.at_level(logging.WARNING, "fl"):
        ((_, plain),) = play(fedmr(fed), fed, 1)
        ((_, trained),) = play(fedmr(fed, FedMROptions(secure=1)), fed, 1)
    assert not caplog.records
    pieces = to_bytes(trained.states, surgery.segments(surgery.layers(fed.model)))[0]
    sealed = max(map(len, pieces)) + 84 + 81  # the longest layer, sealed, in a locked message
    assert trained.metrics["bytes_up"] == len(pieces) * sealed + 3 * 81  # ready: to begin, then after stages 2 and 4
    assert trained.metrics["models_up"] == pytest.approx(trained.metrics["bytes_up"] / plain.metrics["bytes_up"])
    assert plain.metrics["bytes_down"] < trained.metrics["bytes_down"] < plain.metrics["bytes_down"] + 1000
    whole, rest = divmod(3 * trained.metrics["bytes_peers"] - 3 * 2 * 2 * 81, sealed)
    assert rest == 0
    assert 3 * 2 <= whole <= 3 * 2 * (len(pieces) - 1)
    assert trained.metrics["secure_seconds"] > 0


def test_clients_that_diverged_take_no_part_and_one_alone_uploads_nothing(make_federation, monkeypatch, caplog):
    fed = make_federation("cnn", participants=3)
    algorithm = fedmr(fed, FedMROptions(secure=1))
    honest, spoilt = type(fed).train, {1}

    def train(self, starts, clients, rng, objective=None, context=None):
        scale = torch.tensor([torch.inf if k in spoilt else 1.0 for k in range(len(clients))])
        return honest(self, starts, clients, rng, lambda *a: cross_entropy(*a) * a[2]["scale"], {"scale": scale})

    monkeypatch.setattr(type(fed), "train", train)
    before = algorithm.init()
    server, trained = algorithm.round(before, [2, 0, 3], Rng(0, 1))
    assert trained.sizes == (12, 0, 5)
    for name, start in before["global"].items():
        assert torch.equal(trained.states[name][1], start)
        torch.testing.assert_close(server["global"][name], trained.states[name][[0, 2]].mean(0))
    caplog.clear()
    spoilt.add(2)
    with caplog.at_level(logging.WARNING, "fl"):
        server, trained = algorithm.round(before, [2, 0, 3], Rng(0, 1))
    assert trained.sizes == (0, 0, 0)
    assert server is before
    assert "client 2 is left out (alone: its model could not be hidden among others)" in caplog.text


def test_absurd_settings_are_refused_and_so_is_a_missing_library(make_federation, monkeypatch):
    fed = make_federation("cnn")
    with pytest.raises(FLError, match=r"--fedmr.secure must be between 0 and 100, got -1"):
        fedmr(fed, FedMROptions(secure=-1))
    with pytest.raises(FLError, match=r"--fedmr.secure needs two or more --participants"):
        fedmr(make_federation("cnn", participants=1), FedMROptions(secure=1))
    with pytest.raises(FLError, match=r"--fedmr.secure needs models of two or more pieces.*--fedmr.fraction than 1.0"):
        fedmr(fed, FedMROptions(fraction=1.0, secure=1))
    with pytest.raises(FLError, match="two or more pieces"):
        exchange(labels(range(2), 1))
    with pytest.raises(FLError, match="1 repeat or more, got 0"):
        exchange(labels(range(2), 2), 0)
    with pytest.raises(FLError, match="2 different sets"):
        exchange({0: [b"a", b"b"], 1: [b"a", b"bb"]})
    with pytest.raises(FLError, match="there is no model to exchange"):
        exchange({})
    for address in (-1, SERVER, 2**32):
        with pytest.raises(FLError, match=rf"addresses are numbers from 0 to {SERVER - 1}, got {address}"):
            exchange(labels([0, address], 2))
    monkeypatch.setitem(sys.modules, "nacl.public", None)
    indep(fed)
    fedmr(fed)
    with pytest.raises(FLError, match=r"pip install -e '\.\[secure\]'"):
        fedmr(fed, FedMROptions(secure=1))


def test_nothing_but_secure_recombination_asks_for_the_library():
    root = Path(__file__).parents[3] / "fl"
    imports = {f.name for f in root.rglob("*.py") if re.search(r"(import|from) nacl", f.read_text())}
    assert imports == {"crypto.py"}
    assert not re.search(r"^(import|from) nacl", (root / "secure" / "crypto.py").read_text(), re.M)

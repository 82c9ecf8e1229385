"""Secure recombination: what comes out, what nobody sees, what it costs, and what is refused."""

import logging
import random
import sys
from dataclasses import replace
from itertools import combinations, pairwise, product
from types import SimpleNamespace

import pytest
import torch
from fleets import spoil
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import fl_refused
from rounds import assert_same, play, played, row

import surgery
from fl.algorithms.fedmr import METHOD as fedmr
from fl.algorithms.fedmr import FedMROptions
from fl.algorithms.parts.secure_round import SecureRecombination, from_bytes, to_bytes
from fl.base.errors import FLError
from fl.base.rng import Rng
from fl.federation import traffic
from fl.federation.transport import IN_PROCESS
from fl.federation.update import ClientUpdate
from fl.secure import SERVER, Client, Server, exchange
from fl.secure.boxes import LOCKED_EXTRA, SEALED_EXTRA, Keys

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


@settings(max_examples=30)
@given(st.integers(2, 6), st.integers(2, 8), st.integers(1, 3), st.integers(0, 999))
def test_exchange__messages_do_what_the_lists_of_the_appendix_do(k, pieces, repeats, seed):
    clients = [5 * c + 3 for c in range(k)]
    models = labels(clients, pieces)
    outcome = exchange(models, repeats, sources(seed, clients))
    assert_permuted(models, outcome.models)
    assert outcome.models == oracle(models, repeats, sources(seed, clients))
    assert not outcome.excluded


def test_exchange__no_uploaded_model_is_a_trained_one():
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


class Run:
    """A run whose frames pass through a tap; clients are made anew of what they dumped before every step.

    Args:
        tap: (phase, sender, envelopes) -> what is delivered instead; None: the client is lost.
    """

    def __init__(self, models, repeats=2, tap=None, liars=None, seed=0):
        self.tap, self.seen = tap or (lambda phase, sender, envelopes: envelopes), []
        self.server = Server([len(piece) for piece in next(iter(models.values()))], repeats)
        self.choices = sources(seed, models)
        kinds = {c: (liars or {}).get(c, Client) for c in models}
        self.clients = {c: kinds[c](c, pieces, self.server.public, repeats) for c, pieces in models.items()}
        self.outcome = self.server.run({c: client.public for c, client in self.clients.items()}, self.carry)

    def carry(self, phase, waiting):
        answers = {}
        for c, frames in waiting.items():
            client = self.clients[c] = type(self.clients[c]).load(self.clients[c].dump(), self.choices[c])
            sent = self.tap(phase, c, client.step(phase, frames))
            self.seen += [(c, envelope) for envelope in sent or ()]
            if sent is not None:
                answers[c] = sent
        return answers


def test_secure__sizes_tell_nothing_and_only_the_two_ends_read_a_message():
    models = {c: [piece.ljust(300 + 50 * p) for p, piece in enumerate(m)] for c, m in labels(range(4), 5).items()}
    run = Run(models)
    assert_permuted(models, run.outcome.models)
    assert {len(e.frame) for _, e in run.seen} == {500 + SEALED_EXTRA + LOCKED_EXTRA}  # given, returned and uploaded
    assert sum(e.recipient == SERVER for _, e in run.seen) == 4 * 5
    assert len({e.frame for _, e in run.seen}) == len(run.seen)
    for sender, (recipient, frame) in run.seen:
        assert not any(piece in frame for model in models.values() for piece in model)
        if recipient != SERVER:  # neither the server, with either end's public key, nor another client
            ends = [run.clients[c].public for c in (sender, recipient)]
            other = next(client for c, client in run.clients.items() if c not in (sender, recipient))
            for keys, public in product([run.server._keys, other._keys], ends):
                with fl_refused("peers"):
                    keys.unlock(frame, {sender: public}, recipient)
    for c, client in run.clients.items():  # nor can a client read what it has
        for number, blob in client._model.items():
            assert client._keys.unseal(blob) is None
            assert run.server._keys.unseal(blob).payload.startswith(run.outcome.models[c][number])
    counted = sum(size for (sender, _), size in run.outcome.sent.items() if sender != SERVER)
    assert counted == sum(len(e.frame) for _, e in run.seen)


@pytest.mark.slow
@pytest.mark.parametrize("phase", [1, 2, 3, 4])
def test_secure__the_order_of_messages_does_not_tell_which_pieces_travel(phase):
    up = down = near = expected = 0
    for _ in range(60):
        orders = []

        class Logged(Client):
            def _send(self, parcels, orders=orders):
                envelopes = super()._send(parcels)  # which shuffles the parcels
                if self.phase == phase:
                    orders.append([number for _, number, _ in parcels])
                return envelopes

        Run(labels(range(4), 8), liars=dict.fromkeys(range(4), Logged))
        for order in orders:
            up += sum(a < b for a, b in pairwise(order))
            down += sum(a > b for a, b in pairwise(order))
            near += sum(a == b for a, b in pairwise(order))
            expected += sum(a == b for a, b in combinations(order, 2)) * 2 / max(len(order), 1)
    assert 0.42 < up / (up + down) < 0.58  # by chance; 1 in ascending order
    assert near <= 1.7 * expected  # nor do those of the same place come one after another


def flipped(frame, at):
    frame = bytearray(frame)
    frame[at] ^= 1
    return bytes(frame)


def named(frame, sender):
    return bytes([0, 0, 0, sender]) + frame[4:]


SPOILT = {
    "altered": (lambda e: [e._replace(frame=flipped(e.frame, -1))], r"from client 1 to .* was forged or altered"),
    "cut short": (lambda e: [e._replace(frame=e.frame[:9])], r"from client 1 to .* was forged or altered"),
    "forged": (lambda e: [e._replace(frame=e.frame[:4] + bytes(96))], r"from client 1 to .* was forged or altered"),
    "another's name": (
        lambda e: [e._replace(frame=named(e.frame, 2))],
        r"in the name of client 2|from client 2 to .* was forged or altered",
    ),
    "foreign": (lambda e: [e._replace(frame=named(e.frame, 99))], "client 99, who takes no part"),
    "twice": (lambda e: [e, e], r"from client 1 to .* was sent before"),
    "missing": (
        lambda e: [],
        r"client 1 uploaded 9 of 10 pieces|client \d did not return to client \d what it was given",
    ),
}
"""What happens to the first frame of client 1 in a phase, and who is named."""


@pytest.mark.parametrize("fault", SPOILT)
@pytest.mark.parametrize("phase", [1, 2, 3, 4, 5])
def test_secure__a_message_that_is_tampered_with_is_an_error_that_names_its_ends(fault, phase):
    new, reason = SPOILT[fault]
    tap = lambda now, sender, es: [*new(es[0]), *es[1:]] if (now, sender) == (phase, 1) else es  # noqa: E731
    with pytest.raises(FLError, match=reason):
        Run(labels([1, 2, 7], 10), tap=tap)


@pytest.mark.parametrize("phase", [1, 2, 3, 4])
def test_secure__a_message_that_is_sent_later_again_or_back_is_an_error(phase):
    old = {}

    def later(now, sender, es):
        old.setdefault((now, sender), es[0])
        return [*es, old[phase, 1]] if (now, sender) == (phase + 1, 1) else es

    def back(now, sender, es):  # a party's own message, handed back to it as if it came from the other side
        old[now, sender] = es[0]
        if (now, sender) == (phase, 2):
            return [*es, type(es[0])(1, named(old[phase, 1].frame, 2))]
        return es

    with fl_refused("peers", "client 1"):
        Run(labels([1, 2, 7], 10), tap=later)
    with fl_refused("peers", "client 2"):
        Run(labels([1, 2], 10), tap=back)


def test_secure__messages_of_an_earlier_attempt_or_another_order_of_phases_are_refused():
    server = Server([3, 3], 1)
    client, other = (Client(c, [b"abc", b"def"], server.public) for c in (1, 2))
    begun, answered = [], []

    def carry(phase, waiting):
        begun.append(waiting[1])
        answered.append(other.step(phase, waiting[2]))
        return {1: client.step(phase, waiting[1])}  # client 2 is lost

    server.run({1: client.public, 2: other.public}, carry)
    with fl_refused("peers", "client 1"):
        client.step(1, begun[0])
    for phase in (0, 3):
        with fl_refused("peers", f"client 1 was asked for phase {phase} after phase 1"):
            client.step(phase, [])
    with fl_refused("peers", "client 1"):
        client.step(1, [])


@pytest.mark.parametrize("phase", [1, 2, 3, 4, 5])
def test_secure__the_others_begin_again_without_who_is_lost_and_nothing_is_used_in_the_upload(phase):
    models, lost = labels([1, 2, 4, 7], 3), {4: f"lost in phase {phase} of 5"}
    outcome = Run(models, tap=lambda now, sender, es: None if (now, sender) == (phase, 4) else es).outcome
    if phase == 5:
        assert not outcome.models
        assert outcome.excluded == {**lost, **dict.fromkeys((1, 2, 7), "a client was lost while they uploaded")}
    else:
        assert outcome.excluded == lost
        assert_permuted({c: model for c, model in models.items() if c != 4}, outcome.models)
        alone = Run(labels([1, 4], 3), tap=lambda now, sender, es: None if (now, sender) == (phase, 4) else es).outcome
        assert not alone.models
        assert alone.excluded == {**lost, 1: "alone: its model could not be hidden among others"}


def test_secure__a_client_that_gives_no_key_or_locks_too_little_is_named():
    server = Server([3, 3], 1)
    with fl_refused("peers", "client 1"):
        server.run({1: bytes(32), 2: Client(2, [b"abc", b"def"], server.public).public}, None)
    mine, yours = Keys(), Keys()
    box = mine._box(yours.public).encrypt(b"short")
    with fl_refused("peers", "client 1"):
        yours.unlock(bytes([0, 0, 0, 1]) + box, {1: mine.public}, 2)


def in_the_upload(change):
    """A client that uploads something else in the place of its pieces."""

    class Liar(Client):
        def _send(self, parcels):
            return super()._send(change(parcels) if self.finished else parcels)

    return Liar


def keeps_what_it_gave(self):
    mine = dict(self._model)
    parcels = Client._give(self)
    self._given, self._model = {}, mine
    return parcels


def doubles_its_own(self, got):
    """In the last repeat, the givers get copies of its own pieces, which it uploads as well."""
    mine = dict(self._model)
    returned = Client._give_back(self, got)
    if self.phase < 4:
        return returned
    self._model |= mine
    return [(to, number, mine.get(number, blob)) for to, number, blob in returned]


@pytest.mark.parametrize(
    "liar",
    [
        in_the_upload(lambda parcels: [(to, n, parcels[0][2]) for to, n, _ in parcels]),  # one piece twice
        in_the_upload(lambda parcels: [(to, n, parcels[n - 1][2]) for to, n, _ in parcels]),  # another place
        in_the_upload(lambda parcels: [(to, n, bytes(len(blob))) for to, n, blob in parcels]),  # noise
        in_the_upload(lambda parcels: [(to, n, blob[1:]) for to, n, blob in parcels]),
        in_the_upload(lambda parcels: [(to, n + 9, blob) for to, n, blob in parcels]),
        in_the_upload(lambda parcels: parcels[1:]),
        in_the_upload(lambda parcels: [(1, n, blob) for _, n, blob in parcels]),
        type("Doubler", (Client,), {"_give_back": doubles_its_own}),
        type("Keeper", (Client,), {"_give": keeps_what_it_gave}),
        type("Silent", (Client,), {"_give_back": lambda self, got: []}),
    ],
)
def test_secure__what_is_no_permutation_is_found_wherever_it_ends(liar):
    with fl_refused("peers", "client 7"):
        Run(labels([1, 2, 7], 4), liars={7: liar})


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool])
def test_secure__tensors_become_bytes_and_tensors_again(dtype, device):
    generator = torch.Generator().manual_seed(0)
    stack = {
        "a": (torch.randn(3, 2, 5, generator=generator) * 9).to(dtype).transpose(1, 2),  # not contiguous
        "count": torch.tensor([1, 2, 3]),
        "odd": torch.randn(3, 3, generator=generator).half(),  # 6 bytes: what follows is not aligned
        "b": torch.full((1, 4), torch.nan).expand(3, 4),
        "none": torch.empty(3, 0),
        "column": torch.arange(3.0).as_strided((3, 1), (1, 0)),  # contiguous, with a last stride that is not 1
    }
    stack = {name: tensor.to(device) for name, tensor in stack.items()}
    pieces = [("odd", "a"), ("none",), ("b", "count", "column")]
    models = to_bytes(stack, pieces)
    assert [len(piece) for piece in models[0]] == [6 + 10 * stack["a"].itemsize, 0, 28]
    back = from_bytes([models[2], models[0]], pieces, stack)
    assert list(back) == list(stack)
    alone = from_bytes([models[1]], pieces, stack)
    for name, tensor in stack.items():
        torch.testing.assert_close(back[name], tensor[[2, 0]], rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(alone[name], tensor[[1]], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("stage1", [0, 2])
def test_fedmr__has_the_same_global_model_and_layers(make_federation, stage1):
    """Of one round: afterwards other slots train on other clients."""
    fed, options = make_federation("resnet20", participants=4), FedMROptions(stage1_rounds=stage1)
    algorithms = fedmr(fed, options), fedmr(fed, replace(options, secure=2))
    ((plain, trained),), ((secure, hidden),) = (play(algorithm, fed, 1) for algorithm in algorithms)
    torch.testing.assert_close(secure["global"], plain["global"])
    for name, tensor in trained.states.items():
        assert torch.equal(hidden.states[name].flatten(1).sort(0).values, tensor.flatten(1).sort(0).values)
        assert hidden.states[name].dtype == tensor.dtype
    assert (surgery.distance(hidden.states, trained.states) > 0).all()  # and no two of them are the same model
    first, second, *_ = surgery.unstack(secure["slots"])
    assert all(torch.equal(first[name], second[name]) for name in first) == bool(stage1)


def test_secure__choices_are_the_rounds_and_the_clients_own():
    """Two clients of the same choices would get everything back."""
    stack = {str(p): torch.arange(2.0)[:, None] for p in range(20)}
    trained = ClientUpdate(stack, torch.zeros(2), (1, 1), stack, metrics=traffic.count((1, 1), 1, 2, (1, 1)))
    owners = []
    for rng in (Rng(0, 1), Rng(0, 1), Rng(0, 2), Rng(1, 1)):
        step = SecureRecombination(SimpleNamespace(transport=IN_PROCESS), [(name,) for name in stack], 1)
        states = step(trained, {"model": stack}, [3, 5], rng).states
        owners.append([int(tensor[0]) for tensor in states.values()])
    assert owners[0] == owners[1]
    assert len(set(map(tuple, owners))) == 3
    assert all(0 < sum(own) < 20 for own in owners)


def test_secure__what_it_costs_is_in_the_metrics(make_federation, caplog):
    fed = make_federation("cnn")
    with caplog.at_level(logging.WARNING, "fl"):
        ((_, plain),) = play(fedmr(fed), fed, 1)
        ((_, trained),) = play(fedmr(fed, FedMROptions(secure=1)), fed, 1)
    assert not caplog.records
    pieces = to_bytes(trained.states, surgery.segments(surgery.layers(fed.model)))[0]
    sealed = max(map(len, pieces)) + SEALED_EXTRA + LOCKED_EXTRA  # the longest layer, sealed, in a locked message
    assert trained.metrics["bytes_up"] == len(pieces) * sealed
    assert trained.metrics["models_up"] == pytest.approx(trained.metrics["bytes_up"] / plain.metrics["bytes_up"])
    assert trained.metrics["bytes_down"] == plain.metrics["bytes_down"] + LOCKED_EXTRA + 3 * 36  # everybody's keys
    whole, rest = divmod(3 * trained.metrics["bytes_peers"], sealed)
    assert rest == 0
    assert 3 * 2 <= whole <= 3 * 2 * (len(pieces) - 1)
    assert trained.metrics["secure_seconds"] > 0


def test_secure__clients_that_diverged_take_no_part_and_one_alone_uploads_nothing(make_federation, monkeypatch, caplog):
    algorithm = fedmr(make_federation("cnn", participants=3), FedMROptions(secure=1))
    before = algorithm.init()
    spoil(monkeypatch, {0})
    ((server, trained),) = played(algorithm, [[2, 0, 3]], before)
    assert trained.sizes == (12, 0, 5)
    assert_same(row(trained.states, 1), before["global"])
    torch.testing.assert_close(server["global"], surgery.average(trained.states, weights=[1, 0, 1]))
    spoil(monkeypatch, {3})
    with caplog.at_level(logging.WARNING, "fl"):
        ((server, trained),) = played(algorithm, [[2, 0, 3]], before)
    assert trained.sizes == (0, 0, 0)
    assert server is before
    assert "client 2 is left out (alone: its model could not be hidden among others)" in caplog.text


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda fed: fedmr(fed(), FedMROptions(secure=-1)), "--fedmr.secure.*100"),
        (lambda fed: fedmr(fed(participants=1), FedMROptions(secure=1)), "--fedmr.secure"),
        (
            lambda fed: fedmr(fed(), FedMROptions(segment_fraction=1.0, secure=1)),
            "--fedmr.secure.*--fedmr.segment-fraction",
        ),
        (lambda fed: exchange(labels(range(2), 1)), "two or more pieces"),
        (lambda fed: exchange(labels(range(2), 2), 0), "1 repeat or more, got 0"),
        (lambda fed: exchange({0: [b"a", b"b"], 1: [b"a", b"bb"]}), "2 different sets"),
        (lambda fed: exchange({}), "there is no model to exchange"),
        (lambda fed: exchange(labels([0, -1], 2)), f"addresses are numbers from 0 to {SERVER - 1}, got -1"),
        (lambda fed: exchange(labels([0, SERVER], 2)), f"addresses are numbers from 0 to {SERVER - 1}, got {SERVER}"),
    ],
)
def test_exchange__absurd_settings_are_refused(call, reason, make_federation):
    with pytest.raises(FLError, match=reason):
        call(lambda **changes: make_federation("cnn", **changes))


def test_secure__a_missing_library_is_named_where_it_is_needed(make_federation, monkeypatch):
    monkeypatch.setitem(sys.modules, "nacl.public", None)
    fedmr(make_federation("cnn"))
    with fl_refused("missing", "'layer-surgery[secure]'"):
        fedmr(make_federation("cnn"), FedMROptions(secure=1))

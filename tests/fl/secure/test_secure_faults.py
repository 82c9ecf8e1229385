"""Secure recombination when things go wrong: every message lost, repeated, changed; every moment to drop out."""

import logging
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fl.algorithms import FedMROptions, fedmr
from fl.base.rng import Rng
from fl.secure import session
from fl.secure.client import Client
from fl.secure.faults import Cause, Fault
from fl.secure.network import Network
from fl.secure.party import Envelope
from fl.secure.server import Server
from fl.secure.wire import SEALED_EXTRA, SERVER, UPLOAD, Kind

pytest.importorskip("nacl")

PIECES = 3


def run(clients, tap=None, repeats=2, pieces=PIECES, liars=None, seed=0):
    """(server, trained models) of a run whose messages pass through the tap; liars: client -> its class."""
    models = {c: [f"{c}/{p};".encode() * (p + 1) for p in range(pieces)] for c in clients}
    server = Server([len(piece) for piece in models[clients[0]]], repeats)
    kinds = {c: (liars or {}).get(c, Client) for c in clients}
    parties = {c: kinds[c](c, m, server.public, random.Random(seed * 100 + c)) for c, m in models.items()}
    (Network(tap) if tap else Network()).run(server, parties)
    return server, models


def assert_accounted(server, models, excluded=()):
    """The clients but for the excluded ones have swapped pieces; nothing of anybody else is there."""
    assert server.excluded.keys() == set(excluded)
    assert server.models.keys() == models.keys() - set(excluded)
    for p in range(PIECES):
        trained = sorted(model[p] for c, model in models.items() if c not in excluded)
        assert sorted(model[p] for model in server.models.values()) == trained


class Recorder:
    """A tap that keeps what passes."""

    def __init__(self):
        self.seen = []

    def __call__(self, envelope):
        self.seen.append(envelope)
        return self.change(envelope, len(self.seen) - 1)

    def change(self, envelope, n):
        return (envelope,)


class At(Recorder):
    """Does something to the n-th message."""

    def __init__(self, n, what):
        super().__init__()
        self.n, self.what = n, what

    def change(self, envelope, n):
        return self.what(envelope) if n == self.n else (envelope,)


def flipped(envelope, at):
    frame = bytearray(envelope.frame)
    frame[at] ^= 1
    return envelope._replace(frame=bytes(frame))


def mirrored(envelope):
    """A party's own message, handed back to it as if it came from the other side."""
    frame = envelope.recipient.to_bytes(4, "big") + envelope.frame[4:]
    return Envelope(envelope.recipient, envelope.sender, frame)


STRANGER = (99).to_bytes(4, "big") + bytes(60)

FAULTS = {
    "lost": (lambda e: (), lambda e: (Cause.LOST, e.sender, e.recipient)),
    "repeated": (lambda e: (e, e), lambda e: (Cause.REPEATED, e.sender, e.recipient)),
    "tampered": (lambda e: (flipped(e, -1),), lambda e: (Cause.TAMPERED, e.sender, e.recipient)),
    "cut short": (lambda e: (e._replace(frame=e.frame[:9]),), lambda e: (Cause.TAMPERED, e.sender, e.recipient)),
    "sent back": (lambda e: (e, mirrored(e)), lambda e: (Cause.TAMPERED, e.recipient, e.sender)),
    "foreign": (lambda e: (e, e._replace(frame=STRANGER)), lambda e: (Cause.FOREIGN, 99, e.recipient)),
    "wrong name": (lambda e: (flipped(e, 0),), lambda e: (Cause.FOREIGN, e.sender ^ 1 << 24, e.recipient)),
    "misled": (
        lambda e: (e._replace(recipient=3 - e.recipient if e.recipient in (1, 2) else 1),),
        lambda e: (None, e.sender, 3 - e.recipient if e.recipient in (1, 2) else 1),
    ),
}

PLAIN = Recorder()
run([1, 2, 7], PLAIN)
MESSAGES = len(PLAIN.seen)


PHASES = [0, 1, 2, 3, 4, UPLOAD]


def phase_of(n):
    """The how-manieth phase began last when the n-th message of an undisturbed run of the three clients arrives."""
    return sum(e.sender == SERVER and e.recipient == 1 for e in PLAIN.seen[: n + 1]) - 1


@pytest.mark.parametrize("fault", FAULTS)
def test_any_single_message(fault):
    """Each message of a run in turn: the fault is named with its place and both ends, and costs nobody the round."""
    what, expected = FAULTS[fault]
    undisturbed, _ = run([1, 2, 7])
    assert len({phase_of(n) for n in range(MESSAGES)}) == 6
    for n in range(MESSAGES):
        tap = At(n, what)
        server, models = run([1, 2, 7], tap)
        assert_accounted(server, models)
        assert server.models == undisturbed.models  # whatever the order in which messages came
        assert server.attempts == 1
        cause, *ends = expected(tap.seen[n])
        named = [f for f in server.faults if cause in (None, f.cause) and [f.sender, f.recipient] == ends]
        assert named, (n, tap.seen[n][:2], server.faults)
        assert any(abs(PHASES.index(f.phase) - phase_of(n)) <= 1 for f in named)  # the receiver's may differ by one
        assert {f.cause for f in server.faults} <= {Cause.LOST, *(f.cause for f in named)}


class LostThenRepeated(Recorder):
    """Loses one message, and repeats another of those that follow from it."""

    def __init__(self, n=-1):
        super().__init__()
        self.n = n

    def change(self, envelope, n):
        return () if n == 20 else (envelope,) * (1 + (n == self.n))


def test_what_asks_for_lost_messages_may_be_repeated_too():
    run([1, 2, 7], undisturbed := LostThenRepeated())
    for n in range(21, len(undisturbed.seen)):
        server, models = run([1, 2, 7], tap := LostThenRepeated(n))
        assert_accounted(server, models)
        ends = tap.seen[n][:2]
        assert ends in [(f.sender, f.recipient) for f in server.faults if f.cause == Cause.REPEATED]


def test_faults_have_names():
    server, _ = run([1, 2, 7], At(next(n for n in range(MESSAGES) if phase_of(n) == 3), lambda e: ()))
    assert [str(fault) for fault in server.faults] == [
        "repeat 2, stages 1-2: a message from the server to client 1 was lost or late, and was sent again"
    ]


class DropOut(Recorder):
    """Clients that say nothing any more after so many messages of theirs, and hear nothing."""

    def __init__(self, after):
        super().__init__()
        self.after, self.said = after, dict.fromkeys(after, 0)

    def change(self, envelope, n):
        if envelope.sender in self.said:
            self.said[envelope.sender] += 1
        gone = {c for c, limit in self.after.items() if self.said[c] > limit}
        return () if gone & set(envelope[:2]) else (envelope,)


def test_a_client_drops_out_at_any_moment():
    """After each number of messages: the others swap theirs, from the start, without it."""
    clients = [1, 2, 4, 7]
    undisturbed = Recorder()
    run(clients, undisturbed)
    total = sum(e.sender == 4 for e in undisturbed.seen)
    stages = set()
    for after in range(total):
        server, models = run(clients, DropOut({4: after}))
        assert_accounted(server, models, excluded=[4])
        assert server.attempts == 2
        place, _, reason = server.excluded[4].partition(": ")
        assert reason == "did not answer"
        stages.add(place)
    assert stages == {
        "opening", "repeat 1, stages 1-2", "repeat 1, stages 3-4", "repeat 2, stages 1-2", "repeat 2, stages 3-4",
        "upload",
    }  # fmt: skip
    server, models = run(clients, DropOut({4: total}))
    assert_accounted(server, models)


@pytest.mark.parametrize("after", [0, 4, 9])
def test_the_last_two_clients_cannot_be_hidden_without_each_other(after):
    server, models = run([1, 2], DropOut({2: after}))
    assert_accounted(server, models, excluded=[1, 2])
    assert "did not answer" in server.excluded[2]
    assert server.excluded[1] == "alone: its model could not be hidden among others"


def test_those_who_are_lost_together_cost_one_attempt():
    server, models = run([1, 2, 4, 7, 8], DropOut({2: 3, 7: 4}))
    assert_accounted(server, models, excluded=[2, 7])
    assert server.attempts == 2


@settings(max_examples=25, deadline=None)
@given(st.dictionaries(st.sampled_from([1, 2, 4, 7, 8]), st.integers(0, 45), max_size=5))
def test_several_clients_drop_out(after):
    server, models = run([1, 2, 4, 7, 8], DropOut(after))
    assert server.excluded.keys() >= {c for c, n in after.items() if n < 20}
    assert_accounted(server, models, server.excluded)
    assert server.excluded.keys() <= after.keys() or not server.models


class Bad(Recorder):
    """A network that loses, repeats, changes, delays messages at random."""

    def __init__(self, seed, rate):
        super().__init__()
        self.random, self.rate, self.held = random.Random(seed), rate, []

    def change(self, envelope, n):
        out = [envelope]
        if self.random.random() < self.rate:
            out = self.random.choice([[], [envelope] * 2, [flipped(envelope, -3)], [mirrored(envelope)], None])
            if out is None:
                self.held, out = [*self.held, envelope], []
        if self.held and self.random.random() < 0.2:
            out.append(self.held.pop(self.random.randrange(len(self.held))))
        return out


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([0.02, 0.1, 0.3, 0.6, 0.95]))
def test_on_a_bad_network_all_is_accounted_for(seed, rate):
    """However bad: it ends, and what comes out is whole. Up to some loss, nobody is given up and nothing changes."""
    server, models = run([1, 2, 7, 8], Bad(seed, rate), repeats=1)
    assert_accounted(server, models, server.excluded)
    if rate == 0.02:
        assert server.models == run([1, 2, 7, 8], repeats=1)[0].models


def test_a_way_that_stays_broken_costs_the_client_behind_it():
    """Between two clients: the one from which nothing comes. From or to everybody: the one that is cut off."""
    broken = {
        (1, 2): {1: "repeat 1, stages 1-2: client 2 waited for it"},
        (None, 2): {2: "repeat 1, stages 1-2: it waited for client 1, client 7, client 8"},
        (7, None): {7: "repeat 1, stages 1-2: client 1, client 2, client 8 waited for it"},
    }
    for spoil in (lambda e: (), lambda e: (flipped(e, -1),)):
        for (sender, recipient), excluded in broken.items():

            def tap(e, sender=sender, recipient=recipient, spoil=spoil):
                on_it = sender in (None, e.sender) and recipient in (None, e.recipient) and SERVER not in e[:2]
                return spoil(e) if on_it else (e,)

            server, models = run([1, 2, 7, 8], tap)
            assert_accounted(server, models, excluded)
            assert server.excluded == excluded
    server, models = run([1, 2, 7], lambda e: () if e.sender == 7 and len(e.frame) > 150 else (e,))
    assert_accounted(server, models, [7])  # its short messages arrive, its pieces do not


def test_messages_of_an_earlier_attempt_do_not_count():
    """A client is lost; what was sent before is sent again afterwards, and named."""

    class Replay(DropOut):
        def change(self, envelope, n):
            out = super().change(envelope, n)
            old = [e for e in self.seen[:20] if e.recipient == envelope.recipient and e.sender != 7]
            return (*out, *old) if out and n > 120 else out

    server, models = run([1, 2, 7, 8], Replay({7: 9}))
    assert_accounted(server, models, [7])
    stale = {(f.sender, f.recipient) for f in server.faults if f.cause == Cause.STALE}
    assert stale >= {(1, SERVER), (8, SERVER), (SERVER, 2)}


def lie(**methods):
    return {7: type("Liar", (Client,), methods)}


def uploads_one_piece_twice(self, recipient, kind, piece=0, body=b""):
    if self.phase == UPLOAD and kind == Kind.PIECE:
        body = self._model[0]
    Client._send(self, recipient, kind, piece, body)


def uploads_another_place(self, recipient, kind, piece=0, body=b""):
    if self.phase == UPLOAD and kind == Kind.PIECE:
        body = self._model[(piece + 1) % PIECES]
    Client._send(self, recipient, kind, piece, body)


def uploads_noise(self, recipient, kind, piece=0, body=b""):
    if self.phase == UPLOAD and kind == Kind.PIECE:
        body = bytes(len(body))
    Client._send(self, recipient, kind, piece, body)


def keeps_what_it_gave(self):
    mine = dict(self._model)
    Client._give(self)
    self._model = mine


@pytest.mark.parametrize(
    "liar",
    [
        lie(_send=uploads_one_piece_twice),
        lie(_send=uploads_another_place),
        lie(_send=uploads_noise),
    ],
)
def test_uploads_that_are_not_whole_end_the_round_with_nothing_used(liar):
    server, models = run([1, 2, 7], liars=liar)
    assert_accounted(server, models, excluded=[1, 2, 7])
    assert set(server.excluded.values()) == {"the uploads were not usable as a whole"}
    assert server.faults == [Fault(UPLOAD, Cause.UNUSABLE, 7, SERVER)]


def test_a_doubled_piece_is_found_wherever_it_ends():
    for seed in range(5):
        server, models = run([1, 2, 7], liars=lie(_give=keeps_what_it_gave), seed=seed)
        assert_accounted(server, models, excluded=server.excluded)
        assert server.faults
        assert 7 in server.excluded


def sends_twice(self, recipient, kind, piece=0, body=b""):
    Client._send(self, recipient, kind, piece, body)
    if kind == Kind.PIECE:
        Client._send(self, recipient, kind, piece, body)


def sends_short(self, recipient, kind, piece=0, body=b""):
    Client._send(self, recipient, kind, piece, body[:-1])


def sends_unknown_pieces(self, recipient, kind, piece=0, body=b""):
    Client._send(self, recipient, kind, piece + 5 * (kind == Kind.PIECE), body)


def plays_server(self, recipient, kind, piece=0, body=b""):
    Client._send(self, recipient, Kind.BEGIN if kind == Kind.PIECE else kind, piece, body)


def never_sends_done(self, recipient, kind, piece=0, body=b""):
    if kind != Kind.DONE:
        Client._send(self, recipient, kind, piece, body)


def claims_to_be_ready(self, recipient, lacks):
    assert self._channels[SERVER].sent < 100, "asked for ever"
    self._send(SERVER, Kind.READY)


def adds_a_piece_after_done(self, recipient, kind, piece=0, body=b""):
    """In stage 3, one in the place of a piece that the recipient kept."""
    Client._send(self, recipient, kind, piece, body)
    if kind == Kind.DONE and self.phase % 2 == 0:
        kept = next(n for n in range(PIECES) if n not in self._got[self.phase - 1][recipient])
        Client._send(self, recipient, Kind.PIECE, kept, bytes(self._length + SEALED_EXTRA))


@pytest.mark.parametrize(
    "liar",
    [
        lie(_send=sends_twice),
        lie(_send=sends_short),
        lie(_send=sends_unknown_pieces),
        lie(_send=plays_server),
        lie(_give_back=lambda self: None),
        lie(_send=never_sends_done, _send_again=claims_to_be_ready),
        lie(_send=adds_a_piece_after_done),
    ],
)
def test_who_does_not_keep_to_the_protocol_is_named_and_left_out(liar):
    server, models = run([1, 2, 7, 8], liars=liar)
    assert_accounted(server, models, excluded=[7])
    assert {(f.cause, f.sender) for f in server.faults} == {(Cause.WRONG, 7)}


def test_fedmr_goes_on_without_who_was_lost(make_federation, monkeypatch, caplog):
    fed = make_federation("cnn", participants=3)
    algorithm = fedmr(fed, FedMROptions(secure=1))
    server = algorithm.init()
    clients = [3, 0, 2]
    _, full = algorithm.round(server, clients, Rng(0, 1))
    monkeypatch.setattr(session, "Network", lambda: Network(DropOut({0: 3})))
    with caplog.at_level(logging.WARNING, "fl"):
        after, trained = algorithm.round(server, clients, Rng(0, 1))
    (record,) = caplog.records
    assert record.getMessage() == (
        "warning: round 1: secure recombination: client 0 is left out (repeat 1, stages 1-2: did not answer)"
    )
    assert trained.sizes == (5, 0, 12)
    honest = fed.train(server["slots"], clients, Rng(0, 1)).states
    for name, start in server["global"].items():
        assert torch.equal(trained.states[name][1], start)
        pairs = [s[name][[0, 2]].flatten(1).sort(0).values for s in (trained.states, honest)]
        assert torch.equal(*pairs)
        torch.testing.assert_close(after["global"][name], honest[name][[0, 2]].mean(0))
        slots = torch.stack([*honest[name][[0, 2]], start])  # the start that was kept is shuffled with the others
        assert torch.equal(*[s.flatten(1).sort(0).values for s in (after["slots"][name], slots)])
    assert full.sizes == (5, 3, 12)

"""Secure recombination among nodes, over the letters that would travel."""

import logging

import pytest
from fl_nodes import Direct, dealt, deployed, same, settings, simulated

pytest.importorskip("nacl", reason="needs the extra `secure`")

from fl.algorithms.fedmr import FedMROptions
from fl.algorithms.parts import secure_round
from fl.base.errors import FLError
from fl.deploy import node, secret
from fl.deploy.letters import raw
from fl.deploy.node import Node
from fl.deploy.remote import Waiting
from fl.deploy.serve import serve
from fl.secure import SERVER, Server

CONFIG = settings("fedmr", fedmr=FedMROptions(secure=2), clients=3)

ENVELOPE = secret.Envelope


@pytest.mark.slow
def test_with_the_choices_of_the_simulator_it_has_its_result(tmp_path, monkeypatch):
    monkeypatch.setattr(Node, "_choices", lambda self, rng: secure_round.choices(rng, self.number))
    assert same(deployed(CONFIG, tmp_path)[0], simulated(CONFIG, tmp_path))


def test_the_server_cannot_read_what_nodes_send_each_other(tmp_path, monkeypatch):
    """It has all letters and its own keys, and opens none of the frames between nodes; no letter has a piece bare."""
    servers, passed, models = [], [], []

    class Watched(Server):
        def __init__(self, *words):
            super().__init__(*words)
            servers.append(self)

    monkeypatch.setattr(secret, "Server", Watched)
    monkeypatch.setattr(secret, "Envelope", lambda *one: passed.append(ENVELOPE(*one)) or passed[-1])
    taken = node.to_bytes
    monkeypatch.setattr(node, "to_bytes", lambda *words: models.append(taken(*words)[0]) or [models[-1]])
    _, link = deployed(CONFIG, tmp_path, lambda client, round, answer: answer)
    between = [one for one in passed if one.recipient != SERVER]
    assert len(between) > 20
    locks = [channel.lock for server in servers for channel in server._channels.values()]
    assert not any(lock.open(one.frame[4:]) for one in between for lock in locks)
    assert not any(server._keys.unseal(one.frame[4:]) for one in between for server in servers)
    down = [
        raw(tensor)
        for letter in link.letters
        if letter.header["kind"] == "frames"
        for tensor in letter.tensors.values()
    ]
    bare = [piece for model in models for piece in model]
    assert bare
    assert not any(piece in frame for piece in bare for frame in [*down, *(one.frame for one in passed)])


def test_a_node_that_falls_silent_is_left_out_and_named(tmp_path, caplog):
    nodes, test = dealt(CONFIG, tmp_path / "data")
    mute = lambda client, round, answer: "gone" if client == 1 and answer.header["kind"] == "frames" else answer  # noqa: E731
    with caplog.at_level(logging.WARNING, "fl"):
        summary = serve(Direct(nodes, mute), CONFIG, tmp_path / "run", test, Waiting(start=0, nodes=3))
    assert "secure recombination: client 1 is left out" in caplog.text
    assert summary["final"]["dropped"] == 1


def test_it_is_refused_where_nodes_would_forget_their_keys(tmp_path):
    class Forgetful(Direct):
        steady = False

    nodes, test = dealt(CONFIG, tmp_path / "data")
    with pytest.raises(FLError, match="needs clients that remember their keys"):
        serve(Forgetful(nodes), CONFIG, tmp_path / "run", test, Waiting(start=0, nodes=3))

"""Secure recombination among nodes, over the requests that would travel."""

from collections import defaultdict
from itertools import product

import pytest
from fl_nodes import Direct, dealt, same, settings, simulated, tensors
from refusals import fl_refused

pytest.importorskip("nacl", reason="needs the extra `secure`")

from fl.algorithms.fedmr import FedMROptions
from fl.algorithms.parts import secure_round
from fl.base.rng import Rng
from fl.extensions.flower import node, secret
from fl.extensions.flower.messages import NodeMessage, raw
from fl.extensions.flower.node import Node
from fl.extensions.flower.nodes import Timeouts
from fl.extensions.flower.remote import serve
from fl.secure import SERVER, Client, Server

CONFIG = settings("fedmr", fedmr=FedMROptions(secure=2), clients=3)

ENVELOPE = secret.Envelope


class Processes(Direct):
    """Each message is answered by a node that was just made, as in Flower's processes; what a node keeps is looked at
    after it."""

    def ask(self, requests, timeout, limit):
        Processes.round = requests[0][1].header.get("round")
        self.clients = [Node(n.number, n.data, n.split, n.budget, n.folder) for n in self.clients]
        answered = super().ask(requests, timeout, limit)
        self.files = {n.number: n.folder / "exchange" for n in self.clients if (n.folder / "exchange").exists()}
        assert {path.stat().st_mode & 0o777 for path in self.files.values()} <= {0o600}
        self.most = max(len(self.files), getattr(self, "most", 0))
        return answered


def run(root, spoil=lambda client, round, answer: answer, config=CONFIG):
    nodes, test = dealt(config, root / "data")
    link = Processes(nodes, spoil)
    return serve(link, config, root / "run", test, Timeouts(start=0, nodes=3)), link


@pytest.mark.slow
def test_secret__with_the_choices_of_the_simulator_it_has_its_result(tmp_path, monkeypatch):
    """Choices are drawn one after another: the sources outlive the nodes, which a node's own source has not to."""
    load, sources = Client.load, {}

    def seeded(content):
        client = load(content)
        rng = Rng(0, Processes.round)
        if (Processes.round, client.address) not in sources:
            sources[Processes.round, client.address] = secure_round.choices(rng, client.address)
        client._choices = sources[Processes.round, client.address]
        return client

    monkeypatch.setattr(Client, "load", seeded)
    _, link = run(tmp_path)
    assert same(tensors(tmp_path / "run"), simulated(CONFIG, tmp_path))
    assert (link.most, link.files) == (3, {})  # nothing is kept when all have uploaded


@pytest.mark.slow
def test_secret__the_server_cannot_read_what_nodes_send_each_other(tmp_path, monkeypatch):
    """It has all requests and its own keys, and opens none of the frames between nodes; no request has a piece bare."""
    servers, passed, models = [], [], []

    class Watched(Server):
        def __init__(self, *words):
            super().__init__(*words)
            servers.append(self)

    monkeypatch.setattr(secret, "Server", Watched)
    monkeypatch.setattr(secret, "Envelope", lambda *one: passed.append(ENVELOPE(*one)) or passed[-1])
    taken = node.to_bytes
    monkeypatch.setattr(node, "to_bytes", lambda *words: models.append(taken(*words)[0]) or [models[-1]])
    keys = defaultdict(list)

    def look(client, round, answer):
        if "public" in answer.tensors:
            keys[client].append(answer)
        return answer

    _, link = run(tmp_path, look)
    between = [one for one in passed if one.recipient != SERVER]
    assert len(between) > 20
    for one, server, client in product(between, servers, range(3)):
        key = next(request.tensors["public"] for request in keys[client])
        with fl_refused("peers"):
            server._keys.unlock(one.frame, dict.fromkeys(range(3), bytes(key.tolist())), one.recipient)
        assert server._keys.unseal(one.frame[4:]) is None
    down = [
        raw(tensor)
        for request in link.requests
        if request.header["kind"] == "exchange"
        for tensor in request.tensors.values()
    ]
    bare = [piece for model in models for piece in model]
    assert bare
    assert not any(piece in frame for piece in bare for frame in [*down, *(one.frame for one in passed)])


def silent(phase, who=(1,), rounds=(1, 2)):
    """Nodes that do not answer from a phase on."""
    asked = {}

    def spoil(client, round, answer):
        if "public" not in answer.tensors and answer.header["kind"] != "exchange":
            return answer
        asked[client, round] = asked.get((client, round), -1) + 1
        return "gone" if client in who and round in rounds and asked[client, round] >= phase else answer

    return spoil


@pytest.mark.slow
def test_secret__a_node_that_falls_silent_is_left_out_and_the_others_begin_again(tmp_path, caplog):
    summary, link = run(tmp_path, silent(2))
    assert "secure recombination: client 1 is left out (lost in phase 2 of 5)" in caplog.text
    assert summary["final"]["dropped"] == 1
    assert set(link.files) == {1}  # until it is asked again, or greeted by the next run


@pytest.mark.slow
def test_secret__a_round_in_which_an_upload_is_lost_changes_nothing_and_the_next_goes_on(tmp_path, caplog):
    summary, link = run(tmp_path, silent(5, rounds=(1,)))
    assert "client 0 is left out (a client was lost while they uploaded)" in caplog.text
    assert "dropped" not in summary["final"]  # in round 2 all took part
    assert not link.files


def test_secret__what_is_altered_on_the_way_is_refused_and_named(tmp_path, caplog):
    def spoil(client, round, answer):
        if client == 1 and answer.header["kind"] == "exchange":
            return answer._replace(tensors={name: 255 - tensor for name, tensor in answer.tensors.items()})
        return answer

    with fl_refused("peers", "--quorum"):
        run(tmp_path, spoil)
    assert "takes no part" in caplog.text


def test_secret__a_node_whose_state_is_gone_or_damaged_says_so(tmp_path):
    nodes, _ = dealt(CONFIG, tmp_path / "data")
    request = NodeMessage({"kind": "exchange", "client": 0, "seed": 0, "round": 1, "ticket": "", "phase": 1}, {})
    with fl_refused("peers"):
        nodes[0].answer(request)
    nodes[0]._store.keep_exchange(b"\0" * 8 + b"{}")
    with fl_refused("peers"):
        nodes[0].answer(request)

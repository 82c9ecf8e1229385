"""What clients keep stays on their nodes, with the bits that it has in the simulator, through faults and restarts."""

from dataclasses import replace

import pytest
import torch
from fl_nodes import Direct, dealt, deployed, same, settings, simulated
from safetensors.torch import load_file

from fl.algorithms.fesem_plus import FeSEMPlusOptions
from fl.base.errors import FLError
from fl.extensions.defence import Defence
from fl.extensions.flower.folders import SERVER, node_folder, read_node, read_server
from fl.extensions.flower.nodes import Timeouts
from fl.extensions.flower.remote import serve
from fl.extensions.flower.store import Store

slow = pytest.mark.slow
HELD_OUT = {"local_valid": 0.1, "local_test": 0.1}


def scores(folder):
    header, *_, last = [line.split(",") for line in (folder / "metrics.csv").read_text().splitlines()]
    return {name: float(value) for name, value in zip(header, last) if name.startswith("local_") and value}


def test_kept__what_a_disk_has_altered_is_not_taken(tmp_path):
    dealt(settings("ditto", clients=2, participants=1), tmp_path)
    store, level = Store(tmp_path / "kept"), {"w": torch.arange(4.0)}
    store.write(7, 1, 11, level, needed=[])
    assert store.level("a" * 64, level) == level
    paths = [*tmp_path.rglob("*.safetensors")]
    assert len(paths) == 5  # the data of the server and two nodes, a state, a level
    for path in paths:
        content = path.read_bytes()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    for call in (
        lambda: store.read(7, 11),
        lambda: Store(tmp_path / "kept").level("a" * 64, {}),
        lambda: read_node(node_folder(tmp_path, 1)),
        lambda: read_server(tmp_path / SERVER),
    ):
        with pytest.raises(FLError, match=r"is damaged|is gone from its disk"):
            call()


@pytest.mark.slow
@pytest.mark.parametrize(
    "algorithm", ["ditto", "fedrep", *(pytest.param(name, marks=slow) for name in ("local", "pfedme"))]
)
def test_kept__a_node_keeps_what_its_client_has_in_the_simulator_and_sends_none_of_it(algorithm, tmp_path):
    config, sent = settings(algorithm, **HELD_OUT), []

    def look(client, round, answer):
        sent.extend(tensor for name, tensor in answer.tensors.items() if name.startswith("state/"))
        return answer

    there, _ = deployed(config, tmp_path, look)
    here = simulated(config, tmp_path)
    for client in range(config.clients.number):
        files = sorted((tmp_path / "data" / f"kept-{client}").glob("*/*.safetensors"))
        mine = load_file(files[-1]) if files else {}
        assert bool(mine) == (there["clients/version"][client] != 0)
        assert all(torch.equal(mine[name], here[f"clients/{name}"][client]) for name in mine)
        assert not any(a.shape == b.shape and torch.equal(a, b) for a in mine.values() for b in sent)
    shared = [name for name in there if name.startswith("global/")]
    withheld = {"local": shared, "fedrep": [f"global/{n.removeprefix('clients/')}" for n in here if "clients/" in n]}
    assert all(torch.equal(there[n], here[n]) for n in shared if n not in withheld.get(algorithm, []))
    assert scores(tmp_path / "remote") == pytest.approx(scores(tmp_path / "here"))


@slow
@pytest.mark.parametrize(
    ("algorithm", "changes"), [("fedavg_plus", {}), ("fesem_plus", {"fesem_plus": FeSEMPlusOptions(clusters=2)})]
)
def test_kept__clients_fine_tune_where_their_data_are(algorithm, changes, tmp_path):
    config = settings(algorithm, **HELD_OUT, **changes)
    there, _ = deployed(config, tmp_path)
    here = simulated(config, tmp_path)
    assert all(torch.equal(there[name], here[name]) for name in here)
    assert scores(tmp_path / "remote") == pytest.approx(scores(tmp_path / "here"))
    assert scores(tmp_path / "remote")


@pytest.fixture
def prepared(tmp_path):
    config = settings("ditto", clients=3, rounds=3, checkpoint_every=2, **HELD_OUT)
    nodes, test = dealt(config, tmp_path / "data")
    return config, nodes, test, Timeouts(start=0, nodes=3)


def newest(nodes):
    """The state of its own that each node has; none for one that never took part."""
    return [load_file(files[-1]) if (files := sorted(node.folder.glob("*/*.safetensors"))) else {} for node in nodes]


@pytest.mark.slow
def test_kept__a_round_that_is_done_again_begins_with_the_same_states(prepared, tmp_path):
    """After an interruption in round 2, which no checkpoint knows of, and a restart of the nodes, the result is the
    same: a node takes the version that the server names, not its newest."""
    config, nodes, test, waiting = prepared

    def interrupt(round):
        if round == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        serve(Direct(nodes, after=interrupt), config, tmp_path / "run", test, waiting)
    again = [replace(node) for node in nodes]
    serve(Direct(again), config, tmp_path / "run", test, waiting)
    resumed = newest(nodes)
    whole = [replace(node, folder=tmp_path / f"whole-{node.number}") for node in nodes]
    serve(Direct(whole), config, tmp_path / "whole", test, waiting)
    assert all(map(same, resumed, newest(whole)))
    assert scores(tmp_path / "run") == scores(tmp_path / "whole")


@slow
def test_kept__an_answer_that_is_not_used_changes_nothing(prepared, tmp_path):
    """A node whose answer of round 1 was lost goes on as if it had not been drawn."""
    config, nodes, test, waiting = prepared
    lost = lambda client, round, answer: "no answer" if (client, round) == (1, 1) else answer  # noqa: E731
    serve(Direct(nodes, lost), config, tmp_path / "run", test, waiting)

    absent = [replace(node, folder=tmp_path / f"absent-{node.number}") for node in nodes]
    answer = absent[1].answer

    def deaf(request):
        if request.header.get("round") == 1:
            raise FLError("no answer", code="peers")
        return answer(request)

    absent[1].answer = deaf
    serve(Direct(absent), config, tmp_path / "absent", test, waiting)
    assert all(map(same, newest(nodes), newest(absent)))


@pytest.mark.slow
def test_kept__a_node_that_lost_its_state_is_left_out_and_named(prepared, tmp_path, caplog):
    config, nodes, test, waiting = prepared

    def burgle(round):
        for path in nodes[1].folder.glob("*/*") if round == 2 else ():
            path.unlink()

    serve(Direct(nodes, before=burgle), config, tmp_path / "run", test, waiting)
    assert (
        "round 2: 2 of 3 clients answered: client 1 is left out (its client's state of this run is gone" in caplog.text
    )
    assert "evaluation: 2 of 3 clients answered" in caplog.text  # and the others' scores count
    assert scores(tmp_path / "run")


@pytest.mark.slow
def test_kept__what_nodes_send_is_clipped_and_not_what_they_keep(tmp_path):
    config = settings("ditto", defence=Defence(clip=0.5))
    there, here = deployed(config, tmp_path)[0], simulated(config, tmp_path)
    shared = [name for name in there if name.startswith("global/")]
    assert shared
    assert all(torch.equal(there[name], here[name]) for name in shared)
    plain = simulated(config.replace(defence=Defence()), tmp_path / "plain")
    assert not all(torch.equal(plain[name], here[name]) for name in shared)

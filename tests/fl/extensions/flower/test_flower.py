"""Requests and answers as Flower's messages: the apps of `flwr run`, called directly and as processes of their own."""

import json
import os
import re
import signal
import subprocess
import time
from types import SimpleNamespace

import pytest
import torch
from fl_nodes import same, settings, simulated, tensors

pytest.importorskip("flwr", reason="needs the extra `flower`")

import fl
from fl.base.errors import FLError
from fl.extensions.flower.folders import deal_out
from fl.extensions.flower.messages import InvalidMessage, NodeMessage
from fl.models.create import make_spec

FLAGS = "--participants 3 --rounds {rounds} --local-epochs 1 --width 0.1 --backend loop --checkpoint-every 1"


@pytest.fixture
def messages(monkeypatch):
    from flwr.supercore.task_identity import TaskIdentity

    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, 1, raising=False)


class Grid:
    """A grid whose nodes answer at once, with ids that are in no order."""

    def __init__(self, app, config, ids=(77, 5, 99), spoil=lambda reply: [reply]):
        from flwr.app import Context, RecordDict

        self.contexts = {
            node: Context(1, node, {"partition-id": k}, RecordDict(), config) for k, node in enumerate(ids)
        }
        self.app, self.spoil, self.replies = app, spoil, {}

    def get_node_ids(self):
        return sorted(self.contexts)

    def push_messages(self, messages):
        names = []
        for message in messages:
            names.append(name := str(len(self.replies)))
            message.metadata.__dict__["_message_id"] = name
            reply = self.app(message, self.contexts[message.metadata.dst_node_id])
            self.replies[name] = self.spoil(reply) if message.metadata.message_type == "train" else [reply]
        return names

    def pull_messages(self, names):
        found = [reply for name in names for reply in self.replies[name]]
        self.replies |= {name: [] for name in names}
        return found


def run_config(folder, algorithm="fedavg", rounds=2, **more):
    flags = f"--algorithm {algorithm} {FLAGS.format(rounds=rounds)}"
    return {"flags": flags, "folder": str(folder / "run"), "data": str(folder / "data"), "nodes": 3, **more}


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["fedavg", pytest.param("fedmr", marks=pytest.mark.slow)])
def test_flower__apps_give_the_result_of_the_simulator_and_name_who_answers_twice(
    algorithm, tmp_path, messages, caplog
):
    from flwr.app import Context, RecordDict

    from fl.extensions.flower.app import client_app, server_app

    config = settings(algorithm, clients=3)
    deal_out(config, tmp_path / "data")
    values = run_config(tmp_path, algorithm)
    grid = Grid(client_app(), values, spoil=lambda reply: [reply] * (1 + (reply.metadata.src_node_id == 99)))
    server_app()(grid, Context(1, 0, {}, RecordDict(), values))
    assert same(tensors(tmp_path / "run"), simulated(config, tmp_path))
    assert "client 2: answered twice, and the first answer counts" in caplog.text


def write_base(path, seed=41):
    torch.save(make_spec("cnn", 10, 1, 8, width=0.1).build(torch.Generator().manual_seed(seed)).state_dict(), path)
    return str(path)


@pytest.mark.slow
def test_flower__a_nodes_configuration_names_its_copy_of_the_base(tmp_path, messages):
    from flwr.app import Context, RecordDict

    from fl.extensions.flower.app import client_app, server_app

    init, copy, other = (write_base(tmp_path / f"{k}.pt", seed) for k, seed in enumerate((41, 41, 42)))
    config = settings("fedavg", clients=3, init=init, adapters=fl.AdapterOptions("lora"))
    deal_out(config, tmp_path / "data")
    values = run_config(tmp_path, f"fedavg --init {init} --adapters.kind lora")
    grid = Grid(client_app(), values)
    grid.contexts[5].node_config["init"], grid.contexts[99].node_config["init"] = copy, other
    with pytest.raises(FLError, match=rf"before the first round: client 2: the base of its adapters \({other}\)"):
        server_app()(grid, Context(1, 0, {}, RecordDict(), values))
    grid.contexts[99].node_config["init"] = copy
    server_app()(grid, Context(1, 0, {}, RecordDict(), values))
    assert same(tensors(tmp_path / "run"), simulated(config, tmp_path))


def test_flower__what_comes_late_or_cannot_be_read_is_named(messages):
    from fl.extensions.flower.flower import GridLink, reply_to

    def app(message, context):
        return reply_to(message, lambda request: NodeMessage({"kind": "update"}, {"w": torch.zeros(8)}))

    def ask(grid_link, timeout=5.0, limit=2**20):
        (answer,), notes = grid_link.ask([(5, NodeMessage({"kind": "update", "round": 3}, {}))], timeout, limit)
        return answer, notes

    grid = Grid(app, {}, spoil=lambda reply: late.append(reply) or [])
    link, late = GridLink(grid), []
    assert ask(link, 0.1) == ("no answer within 0.1 s", [])
    grid.replies["0"], grid.spoil = late, lambda reply: [reply]
    answer, notes = ask(link)
    assert torch.equal(answer.tensors["w"], torch.zeros(8))
    assert notes == [(5, "its answer of round 3 came late and is not used")]
    assert "has 50 bytes, and at most 20" in ask(link, limit=20)[0]
    grid.push_messages = lambda messages: []
    assert ask(link)[0] == "Flower did not take the request to it"


def test_flower__of_two_answers_the_first_counts_and_its_node_is_named(messages):
    from fl.extensions.flower.flower import GridLink, reply_to

    values = iter([1.0, 2.0])

    def app(message, context):
        tensors = {"w": torch.full((2,), next(values))}
        return reply_to(message, lambda request: NodeMessage({"kind": "update"}, tensors))

    grid = Grid(app, {})
    push = grid.push_messages

    def twice(messages):
        first, second = push([*messages, *messages])
        grid.replies[first] += grid.replies[second]
        return [first]

    grid.push_messages = twice
    (answer,), notes = GridLink(grid).ask([(5, NodeMessage({"kind": "update", "round": 3}, {}))], 5.0, 2**20)
    assert torch.equal(answer.tensors["w"], torch.ones(2))
    assert notes == [(5, "answered twice, and the first answer counts")]


def test_flower__a_letter_comes_back_as_it_was_and_nothing_else_is_read():
    from flwr.app import ArrayRecord, RecordDict

    from fl.extensions.flower.flower import pack, unpack

    request = NodeMessage(
        {"kind": "update", "n": 1}, {"w": torch.randn(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}
    )
    back = unpack(pack(request))
    assert back.header == request.header
    assert all(torch.equal(back.tensors[name], tensor) for name, tensor in request.tensors.items())
    with pytest.raises(InvalidMessage, match="has 122 bytes, and at most 10"):
        unpack(pack(request._replace(tensors={"w": torch.zeros(24)})), limit=10)
    content = pack(request)
    content["tensors"] = ArrayRecord({"w": torch.zeros(2)})  # as NumPy writes them, perhaps with objects
    with pytest.raises(InvalidMessage, match=r"written as 'numpy\.ndarray', which is not read"):
        unpack(content)
    with pytest.raises(InvalidMessage, match="other records"):
        unpack(RecordDict())


def test_flower__an_answer_that_is_too_long_is_not_read_to_its_end(messages):
    from fl.extensions.flower.flower import GridLink

    class Client:
        fetched = 0

        def PullObject(self, request):
            self.fetched += 1
            return SimpleNamespace(object_content=bytes(2**20))

    client = Client()
    grid = SimpleNamespace(
        _runtime_client=client,
        push_messages=lambda messages: ["a"],
        pull_messages=lambda names: [client.PullObject(None) for _ in range(10_000)],
    )
    (answer,), _ = GridLink(grid).ask([(1, NodeMessage({"kind": "update"}, {}))], 1.0, 2**20)
    assert "more than" in answer
    assert client.fetched < 5


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    """A SuperLink and three SuperNodes with TLS, node authentication and a data folder each."""
    from fl.extensions.flower.local import deployment

    root = tmp_path_factory.mktemp("deployed")
    deal_out(settings("fedavg", clients=3), root / "data")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        with deployment(root, 3) as one:
            yield one


def start(running, name, **more):
    from fl.extensions.flower.local import write_app

    folder = running.root / name
    values = run_config(running.root, **more) | {"folder": str(folder / "run"), "threads": 1, "start-timeout": 200}
    write_app(folder, values)
    return folder, running.run(folder)


def until(condition, seconds=400):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return
        time.sleep(0.2)
    raise AssertionError("it did not happen in time")


def rows(folder):
    path = folder / "run" / "metrics.csv"
    return len(path.read_text().splitlines()) - 1 if path.exists() else 0


@pytest.mark.slow
def test_flower__processes_with_tls_and_authentication_give_the_result_of_the_simulator(running, tmp_path):
    folder, run = start(running, "whole")
    assert running.wait(run, 900) == "finished:completed"
    assert same(tensors(folder / "run"), simulated(settings("fedavg", clients=3), tmp_path))


@pytest.mark.nightly
def test_flower__adapters_of_several_ranks_go_to_processes_that_read_the_base(running, tmp_path):
    init, options = write_base(tmp_path / "base.pt"), fl.AdapterOptions("lora", ranks=(1, 2, 4))
    folder, run = start(
        running, "ranks", algorithm=f"flexlora --init {init} --adapters.kind lora --adapters.ranks 1,2,4"
    )
    assert running.wait(run, 900) == "finished:completed", running.log(run)
    config = settings("flexlora", clients=3, init=init, adapters=options)
    assert same(tensors(folder / "run"), simulated(config, tmp_path))


@pytest.mark.nightly
def test_flower__nodes_recombine_in_secret_though_each_message_has_a_process_of_its_own(running):
    pytest.importorskip("nacl", reason="needs the extra `secure`")
    folder, run = start(running, "secret", algorithm="fedmr --fedmr.secure 1", rounds=1)
    status, said = running.wait(run, 900), running.log(run)
    assert status == "finished:completed", said
    assert "is left out" not in said
    header, row = (line.split(",") for line in (folder / "run" / "metrics.csv").read_text().splitlines())
    assert float(row[header.index("bytes_peers")]) > 0
    assert not list((running.root / "data").rglob("*exchange*"))  # keys are gone with the round


@pytest.mark.nightly
def test_flower__a_node_that_hangs_and_one_that_dies_are_left_out_and_named(running):
    """One SuperNode is stopped as by SIGSTOP, another is killed; the third goes on, and both are named in one line."""
    folder, run = start(running, "faults", rounds=3, **{"round-timeout": 90.0})
    until(lambda: rows(folder) >= 1)
    hanging = running.processes["node-1"]
    for pid in group(hanging.pid):
        os.kill(pid, signal.SIGSTOP)
    running.stop("node-2", kill=True)
    try:
        status, said = running.wait(run, 900), running.log(run)
    finally:
        for pid in group(hanging.pid):
            os.kill(pid, signal.SIGCONT)
    assert status == "finished:completed", said
    (line,) = [line for line in said.splitlines() if "round 2: " in line]
    assert re.search(r"1 of 3 clients answered: client 1 is left out \(.+\); client 2 is left out \(", line), line
    running.start_node(2)


@pytest.mark.nightly
def test_flower__a_run_goes_on_after_its_superlink_was_killed(running):
    folder, _ = start(running, "killed", rounds=3)
    until(lambda: rows(folder) >= 1)
    running.stop("superlink", kill=True)
    done = rows(folder)
    running.start_superlink()
    until(lambda: running.flwr("supernode", "ls", "here").count("online") >= 1)
    run = running.run(folder)
    assert running.wait(run, 900) == "finished:completed"
    table = (folder / "run" / "metrics.csv").read_text().splitlines()[1:]
    assert [int(line.split(",")[0]) for line in table] == [1, 2, 3]
    assert json.loads((folder / "run" / "summary.json").read_text())["complete"]
    assert done >= 1


def group(leader):
    """The processes that a process has started, and itself."""
    listed = subprocess.run(["ps", "-o", "pid=", "-g", str(leader)], capture_output=True, text=True, check=True)
    return [int(word) for word in listed.stdout.split()]

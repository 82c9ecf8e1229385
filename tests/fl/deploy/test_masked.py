"""Secure aggregation: flwr's own mod and workflow, over a grid whose nodes answer at once."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fl_nodes import dealt, deployed, settings, simulated, tensors

pytest.importorskip("flwr", reason="needs the extra `flower`")

from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS as CONFIGS

import fl
from fl.algorithms import ALGORITHMS
from fl.algorithms.method import Method
from fl.base.errors import FLError
from fl.deploy.flower import answered, packed, unpacked
from fl.deploy.masked import MaskedLink, answered_masked, is_masked, levels
from fl.deploy.node import Node
from fl.deploy.nodes import Waiting
from fl.deploy.remote import Remote, check_settings, serve
from fl.federation.defence import Defence
from fl.federation.privacy import Privacy

CONFIG = settings("fedavg", clients=4, participants=4, rounds=1, secure_aggregation=8.0)
SLOW = pytest.mark.slow
ABLE = [name for name, method in ALGORITHMS.items() if method.sees == "mean"]


def plain(config):
    return replace(config, secure_aggregation=0.0)


@pytest.fixture(autouse=True)
def identity(monkeypatch):
    from flwr.supercore.task_identity import TaskIdentity

    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(TaskIdentity, name, 1, raising=False)


class Grid:
    """A grid of nodes with ids that are in no order.

    Args:
        spoil: (client, stage, reply) -> what arrives in its place, None for nothing; the stage is "" outside of
            secure aggregation.
    """

    def __init__(self, nodes, spoil=lambda client, stage, reply: reply):
        from flwr.app import Context, RecordDict

        self.nodes = dict(zip((77, 5, 99, 23, 41, 1), nodes))
        self.contexts = {name: Context(1, name, {}, RecordDict(), {}) for name in self.nodes}
        self.spoil, self.answers, self.sent, self.stages = spoil, {}, [], []

    def get_node_ids(self):
        return sorted(self.nodes)

    def reply(self, message):
        name, stage = message.metadata.dst_node_id, ""
        message.metadata.__dict__["_message_id"] = f"{len(self.sent)}"
        self.sent.append(message)
        node, context = self.nodes[name], self.contexts[name]
        if is_masked(message.content):
            stage = message.content[CONFIGS]["stage"]
            given = type(message.content)(dict(message.content))
            given[CONFIGS] = type(message.content[CONFIGS])(message.content[CONFIGS])
            message.__dict__["_content"] = given  # the mod takes things out of it, which no network would notice
            reply = answered_masked(message, context, node.answer)
        else:
            reply = answered(message, node.answer)
        self.stages.append(stage)
        return self.spoil(node.number, stage, reply)

    def push_messages(self, messages):
        names = [f"{len(self.answers) + k}" for k, _ in enumerate(messages)]
        self.answers |= {name: [self.reply(message)] for name, message in zip(names, messages)}
        return names

    def pull_messages(self, names):
        return [reply for name in names for reply in self.answers.pop(name)]

    def send_and_receive(self, messages, timeout=None):
        return [reply for message in messages if (reply := self.reply(message)) is not None]


def run(config, root, spoil=lambda client, stage, reply: reply, quorum=1, change=lambda nodes: None):
    nodes, test = dealt(config, root / "data")
    change(nodes)
    grid = Grid(nodes, spoil)
    summary = serve(MaskedLink(grid), config, root / "run", test, Waiting(5.0, quorum, config.clients, 0))
    return tensors(root / "run"), grid, summary


def step_of(config, scale=1):
    """How far the mean may be off: each client rounds to a step, and the largest has at most four times the mean
    number of samples. What float32 rounds is of the same order."""
    return scale * 4 * 2 * config.secure_aggregation / {3: 2**30, 4: 2**29}[config.cohort()]


def near(a, b, tolerance):
    """Whether the global models of two runs are the same but for this; integers are equal."""
    ours, theirs = ({n: t for n, t in one.items() if n.startswith("global/")} for one in (a, b))
    assert ours.keys() == theirs.keys() != set()
    for name, tensor in ours.items():
        atol = tolerance if tensor.is_floating_point() else 0
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-6 if atol else 0, atol=atol, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize(
    "algorithm", [name if name in ("fedadam", "ditto") else pytest.param(name, marks=SLOW) for name in ABLE]
)
def test_the_result_is_that_without_masks_up_to_their_step(algorithm, tmp_path):
    config = replace(CONFIG, algorithm=(algorithm,))
    masked, _, summary = run(config, tmp_path)
    scale = 100 if algorithm in ("fedadagrad", "fedadam", "fedyogi") else 1  # which divide by small numbers
    near(masked, simulated(plain(config), tmp_path), step_of(config, scale))
    assert not {"dropped", "models_cosine"} & summary["final"].keys()


@pytest.mark.slow
def test_rounds_follow_each_other_and_batch_norms_are_averaged(tmp_path):
    config = replace(CONFIG, rounds=2, norm="batch", participants=3)
    masked, _, summary = run(config, tmp_path)
    near(masked, simulated(plain(config), tmp_path), step_of(config, 10))  # the second round trains from the first
    numbers = sum(t.numel() for n, t in masked.items() if n.startswith("global/") and t.is_floating_point())
    assert summary["final"]["bytes_up"] == 8 * (numbers + 2)


@pytest.mark.slow
@pytest.mark.parametrize("learn", ["b", pytest.param("both", marks=SLOW)])
def test_of_adapters_their_mean_alone_is_seen(learn, tmp_path):
    config = replace(CONFIG, rounds=2, adapters=fl.AdapterOptions("lora", rank=2, train=("fc2",), learn=learn))
    masked, _, summary = run(config, tmp_path)
    near(masked, simulated(plain(config), tmp_path), step_of(config, 10))
    assert any("lora_B" in name for name in masked)
    numbers = sum(tensor.numel() for name, tensor in masked.items() if name.startswith("global/"))
    assert summary["final"]["bytes_up"] == 8 * (numbers + 2)


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["setup", "share_keys", "collect_masked_vectors"])
def test_who_falls_silent_is_left_out(stage, tmp_path, caplog):
    masked, grid, summary = run(CONFIG, tmp_path, lambda c, s, reply: None if (c, s) == (1, stage) else reply)
    assert "3 of 4 clients answered: client 1 is left out (no answer within 5 s)" in caplog.text
    assert summary["final"]["dropped"] == 1
    begun = sum(stage == "setup" for stage in grid.stages)
    assert begun == (4 if stage == "collect_masked_vectors" else 7)

    def silent(client, round, answer):
        return "gone" if client == 1 and round else answer

    near(masked, deployed(plain(CONFIG), tmp_path / "bare", silent)[0], step_of(CONFIG))


@pytest.mark.slow
def test_who_falls_silent_after_the_upload_is_in_the_mean(tmp_path):
    masked, _, summary = run(CONFIG, tmp_path, lambda c, s, reply: None if (c, s) == (1, "unmask") else reply)
    assert "dropped" not in summary["final"]
    near(masked, simulated(plain(CONFIG), tmp_path), step_of(CONFIG))


@pytest.mark.parametrize("stage", ["share_keys", "collect_masked_vectors", "unmask"])
def test_too_few_end_the_run_and_nothing_is_told_of_their_mean(stage, tmp_path):
    with pytest.raises(FLError, match=r"0 of 4 clients took part in secure aggregation to its end.*--resume"):
        run(CONFIG, tmp_path, lambda c, s, reply: None if c in (1, 2) and s == stage else reply)


def edited(key, value):
    """A reply with something else in a table of it."""

    def change(reply):
        record, name = key
        reply.content[record][name] = value
        return reply

    return change


BAD = {
    "another round": (edited(("fitres.metrics", "header"), '{"kind": "update", "round": 9}'), "lacks ticket"),
    "no numbers": (edited((CONFIGS, "masked_params"), []), "other numbers than were asked for"),
    "pickles": (edited((CONFIGS, "masked_params"), [b"\x80\x04."] * 2), "left out"),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", BAD)
def test_an_answer_that_cannot_be_used_is_left_out(what, tmp_path, caplog):
    change, why = BAD[what]
    _, _, summary = run(
        CONFIG, tmp_path, lambda c, s, reply: change(reply) if (c, s) == (1, "collect_masked_vectors") else reply
    )
    assert summary["final"]["dropped"] == 1
    assert "client 1 is left out (" in caplog.text
    assert why in caplog.text


def test_an_update_beyond_the_range_is_not_cut(tmp_path):
    with pytest.raises(FLError, match=r"client 3 is left out \(.*beyond --secure-aggregation 1e-06: give a larger one"):
        run(replace(CONFIG, secure_aggregation=1e-6), tmp_path)


@pytest.mark.slow
def test_a_node_sends_nothing_bare(tmp_path):
    _, grid, _ = run(CONFIG, tmp_path)
    (message, *_) = [m for m in grid.sent if CONFIGS in m.content and "message" in m.content]
    request = unpacked(type(message.content)({n: message.content[n] for n in ("tensors", "message")}))
    node = grid.nodes[message.metadata.dst_node_id]
    message.__dict__["_content"] = packed(request)
    reply = unpacked(answered(message, node.answer).content)
    assert "not by its messages" in reply.header["refused"]
    assert not reply.tensors
    bare = request._replace(header={**request.header, "masked": None})
    with pytest.raises(FLError, match="differ in whether what is sent is masked"):
        node.answer(bare)


REFUSED = [
    *(
        (name, {}, f"{name} .*: leave --secure-aggregation out")
        for name in sorted(set(ALGORITHMS) - set(ABLE))
        if not ALGORITHMS[name].base_changes  # refused on nodes anyway
    ),
    ("fedavg", {"defence": Defence("median")}, "--defence looks at each client's update"),
    ("fedavg", {"privacy": Privacy(clip=1.0)}, "--privacy.clip cuts each client's update"),
    ("fedavg", {"participants": 2}, "of 2 participants hides nothing: take 3"),
]


@pytest.mark.parametrize(("algorithm", "changes", "why"), REFUSED)
def test_what_needs_single_updates_is_refused(algorithm, changes, why):
    with pytest.raises(FLError, match=why):
        check_settings(replace(CONFIG, algorithm=(algorithm,), **changes))


def test_a_method_that_does_not_say_that_the_mean_is_enough_is_refused(monkeypatch):
    def mine(fed):
        return ALGORITHMS["fedavg"](fed)

    monkeypatch.setitem(ALGORITHMS, "mine", Method(mine))
    with pytest.raises(FLError, match=r"mine may look at single updates \(Method\(\.\.\., sees='mean'\)"):
        check_settings(replace(CONFIG, algorithm=("mine",)))


def test_what_a_node_adds_to_the_sum():
    """Updates alone, without what is infinite at the start, and a loss within the range; the frozen stay at home."""
    starts = {"w": torch.tensor([[1.0, -torch.inf]]), "b": torch.tensor([[5.0]])}
    received = {"w": torch.tensor([[1.5, -torch.inf]]), "b": torch.tensor([[3.0]])}
    vector = Node._vector(None, {"names": ["w", "b"]}, starts, received, torch.tensor(50.0), 8.0)
    assert vector.tolist() == [0.5, 0.0, -2.0, 8.0]
    message = {"model": starts | {"steps": torch.tensor([3])}}
    asked = SimpleNamespace(federation=SimpleNamespace(frozen={"b"}))
    assert Remote._names(asked, message) == ["w"]


def test_one_process_refuses_and_so_do_steps_between_clients_and_server(tmp_path, monkeypatch):
    with pytest.raises(FLError, match=r"all is in one process: train with python -m fl\.deploy"):
        fl.simulate(CONFIG, tmp_path / "here")

    def stepping(fed):
        return replace(ALGORITHMS["fedavg"](fed), steps=[lambda update, *words: update])

    monkeypatch.setitem(ALGORITHMS, "stepping", Method(stepping, sees="mean"))
    with pytest.raises(FLError, match="only average whole models"):
        run(replace(CONFIG, algorithm=("stepping",)), tmp_path)


@pytest.mark.slow
def test_what_the_server_sees_of_one_client_has_nothing_of_its_update(tmp_path, monkeypatch):
    from flwr.common import bytes_to_ndarray

    vectors, seen, bare = {}, {}, []

    def change(nodes):
        for node in nodes:
            make = node._vector

            def keep(*words, make=make, number=node.number):
                vectors[number] = make(*words)
                return vectors[number]

            node._vector = keep

    def look(client, stage, reply):
        if stage == "collect_masked_vectors":
            seen[client] = bytes_to_ndarray(reply.content[CONFIGS]["masked_params"][1])
            bare.extend(record for record in reply.content.array_records.values() if len(record))
        return reply

    run(CONFIG, tmp_path, look, change=change)
    assert set(seen) == set(vectors) == {0, 1, 2, 3}
    assert not bare
    for client, masked in seen.items():
        update = vectors[client].numpy()
        assert masked.shape == update.shape
        scaled = (update + 8) / 16 * levels(4)
        assert (np.abs(masked - scaled) < 1000).mean() < 0.01
        size = len(update)
        assert abs(np.corrcoef(masked, update)[0, 1]) < 5 / size**0.5
        assert masked.std() == pytest.approx(2**32 / 12**0.5, rel=0.05)  # uniform on 32 bits

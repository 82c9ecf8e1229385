"""Adapters on other machines: only they travel, each node has the base itself, and the result is the simulator's."""

from dataclasses import replace

import pytest
import torch
from fl_nodes import Direct, dealt, deployed, same, settings, simulated
from refusals import fl_refused
from safetensors.torch import load_file, save_file

import fl
from fl.extensions.flower.nodes import Timeouts
from fl.extensions.flower.remote import check_settings, serve
from fl.extensions.privacy import Privacy
from fl.models.create import make_spec

slow = pytest.mark.slow
HEAD = ("fc2",)
LORA = fl.AdapterOptions("lora", rank=2, train=HEAD)
RANKS = fl.AdapterOptions("lora", ranks=(1, 2, 4))


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A file of weights that no seed draws."""
    path = tmp_path_factory.mktemp("base") / "base.safetensors"
    net = make_spec("cnn", 10, 1, 8, width=0.1).build(torch.Generator().manual_seed(41))
    save_file(net.state_dict(), path)
    return path


def adapted(algorithm, base, adapters=LORA, **changes):
    return settings(algorithm, init=str(base), adapters=adapters, **changes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "changes"),
    [
        ("fedavg", {}),
        ("fedavg", {"adapters": replace(LORA, learn="b")}),
        ("flexlora", {"adapters": RANKS}),
        ("hetlora", {"adapters": RANKS}),
        pytest.param("heterofl", {"adapters": RANKS}, marks=slow),
        pytest.param("fedfa", {"adapters": RANKS}, marks=slow),
        pytest.param("flora_na", {}, marks=slow),
        pytest.param("fedmr", {}, marks=slow),
        pytest.param("fedavg", {"adapters": replace(LORA, dropout=0.5)}, marks=slow),
        pytest.param("fedavg", {"privacy": Privacy(clip=0.01, noise=0.0)}, marks=slow),
    ],
)
def test_adapters__the_result_is_that_of_the_simulator(algorithm, changes, base, tmp_path):
    config = adapted(algorithm, base, **changes)
    assert same(deployed(config, tmp_path)[0], simulated(config, tmp_path))


@pytest.mark.slow
def test_adapters__clients_keep_their_b_on_their_nodes(base, tmp_path):
    config, sent = adapted("fedsa_lora", base), set()

    def look(client, round, answer):
        sent.update(name for name in answer.tensors if name.startswith("state/"))
        return answer

    there, _ = deployed(config, tmp_path, look)
    here = simulated(config, tmp_path)
    assert sent
    assert not any("lora_B" in name for name in sent)
    for client in range(config.clients.number):
        files = sorted((tmp_path / "data" / f"kept-{client}").glob("*/*.safetensors"))
        mine = load_file(files[-1]) if files else {}
        assert bool(mine) == (there["clients/version"][client] != 0)
        assert all("lora_B" in name and torch.equal(mine[name], here[f"clients/{name}"][client]) for name in mine)
    shared = [name for name in here if name.startswith("global/") and "lora_B" not in name]
    assert all(torch.equal(there[name], here[name]) for name in shared)


@pytest.mark.slow
@pytest.mark.parametrize("options", [LORA, replace(LORA, learn="b"), RANKS], ids=["both", "b", "ranks"])
def test_adapters__messages_have_the_bytes_of_what_is_trained(options, base, tmp_path):
    """By hand: r (in + out) numbers of float32 for each weight, of B alone r out; and what is trained whole."""
    weights = {name.removesuffix(".weight"): w for name, w in load_file(base).items() if name.endswith(".weight")}
    whole = sum(4 * (weights[name].numel() + len(weights[name])) for name in options.train)
    sums = [
        w.shape[0] + (w[0].numel() if options.learn == "both" else 0)
        for n, w in weights.items()
        if n not in options.train
    ]
    answers = {}

    def look(client, round, answer):
        if answer.header["kind"] == "update":
            answers[client] = answer.size
        return answer

    _, link = deployed(adapted("flexlora" if options.ranks else "fedavg", base, options), tmp_path, look)
    asked = {request.header["client"]: request for request in link.requests if request.header["kind"] == "update"}
    for client, request in asked.items():
        rank = options.ranks[client % 3] if options.ranks else options.rank
        assert request.size == 4 * rank * sum(sums) + whole
        assert answers[client] == request.size + 4  # the loss
    assert len(asked) >= 3
    most = max(request.size for request in asked.values())
    assert all(request.size <= most for request in link.requests)  # and nothing comes before the first round


def prepared(config, tmp_path, **inits):
    nodes, test = dealt(config, tmp_path / "data")
    nodes = [replace(node, init=inits.get(f"node{node.number}")) for node in nodes]
    return Direct(nodes), test, Timeouts(start=0, nodes=config.clients.number)


@pytest.mark.slow
def test_adapters__a_node_names_its_own_copy_of_the_base(base, tmp_path, caplog):
    here, there = tmp_path / "here.safetensors", tmp_path / "there.safetensors"
    for copy in (here, there):
        copy.write_bytes(base.read_bytes())
    config = adapted("fedavg", here, participants=4)
    link, test, waiting = prepared(config, tmp_path, **{f"node{k}": str(there) for k in range(4)})

    def hide(round):  # the server's file, which it has read when it asks for more than what nodes have
        if link.requests[-1].header["kind"] != "hello":
            here.unlink(missing_ok=True)

    link.before = hide
    assert serve(link, config, tmp_path / "run", test, waiting)["complete"]
    assert not here.exists()
    assert "left out" not in caplog.text


def test_adapters__a_node_with_another_base_is_refused_before_the_first_round(base, tmp_path):
    other, gone = tmp_path / "other.safetensors", str(tmp_path / "gone.safetensors")
    changed = load_file(base)
    changed["fc1.bias"][0] += 1e-3
    save_file(changed, other)
    config = adapted("fedavg", base)
    link, test, waiting = prepared(config, tmp_path, node1=str(other), node3=gone)
    with fl_refused("peers", "--node-config") as raised:
        serve(link, config, tmp_path / "run", test, waiting)
    mine, absent = str(raised.value).split("; client 3: ")
    assert f"client 1: the base of its adapters ({other}) has other numbers than the server's" in mine
    assert gone in absent
    assert "--node-config 'init=" in mine
    assert "--node-config 'init=" in absent
    assert {request.header["kind"] for request in link.requests} == {"hello", "base"}


@pytest.mark.slow
def test_adapters__a_base_that_changes_in_a_run_leaves_its_node_out(base, tmp_path, caplog):
    config, other = adapted("fedavg", base, participants=4), tmp_path / "other.safetensors"
    save_file({name: tensor + 1 for name, tensor in load_file(base).items()}, other)
    link, test, waiting = prepared(config, tmp_path)

    def swap(round):
        if round == 2:
            link.clients[1] = replace(link.clients[1], init=str(other))

    link.before = swap
    serve(link, config, tmp_path / "run", test, waiting)
    assert "round 2: 3 of 4 clients answered: client 1 is left out (the base of its adapters" in caplog.text


def test_adapters__a_dense_base_does_not_travel(base):
    with fl_refused("unsupported", "--algorithm"):
        check_settings(adapted("flora", base))

"""Clients on other machines train as those here, and what they send is checked before it is used."""

import json
from dataclasses import replace

import pytest
import torch
from fl_nodes import FAULTS, Direct, dealt, deployed, said, same, settings, simulated, tensors
from refusals import fl_refused
from selection import some

import fl
from fl.algorithms.fesem import FeSEMOptions
from fl.base.errors import Diverged, FLError
from fl.extensions.flower.messages import NodeMessage
from fl.extensions.flower.nodes import Timeouts
from fl.extensions.flower.remote import serve
from fl.models.architectures import ArchitectureOptions
from surgery import memory

slow = pytest.mark.slow
DEEP = {"model": "resnet20", "width": 0.25, "depth": 2}
WIDTHS = ArchitectureOptions(widths=(0.5, 1.0), choose="cycle")
DEPTHS = ArchitectureOptions(depths=("1", "2"), choose="cycle")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "changes"),
    [
        ("fedmr", {}),
        ("fedprox", {}),
        ("fedrolex", {"architectures": WIDTHS}),
        *(
            pytest.param(name, {}, marks=slow)
            for name in ("fedavg", "indep", "fedgen", "fedexp", "fedasam", "fedmut", "clusamp")
        ),
        pytest.param("fesem", {"fesem": FeSEMOptions(clusters=2)}, marks=slow),
        pytest.param("fedavg", {"masked_loss": True}, marks=slow),
        pytest.param("fedavg", {"defence": fl.Defence(clip=0.5)}, marks=slow),
        pytest.param("heterofl", {**DEEP, "architectures": WIDTHS}, marks=slow),
        pytest.param("fedfa", {**DEEP, "architectures": WIDTHS}, marks=slow),
        pytest.param("fjord", {**DEEP, "architectures": WIDTHS}, marks=slow),
        pytest.param("nefl", {**DEEP, "architectures": DEPTHS}, marks=slow),
        pytest.param("flexifed", {**DEEP, "architectures": DEPTHS}, marks=slow),
        pytest.param("inclusivefl", {**DEEP, "architectures": DEPTHS}, marks=slow),
    ],
)
def test_remote__the_same_seed_gives_the_same_result_as_the_simulator(algorithm, changes, tmp_path):
    config = settings(algorithm, **changes)
    assert same(deployed(config, tmp_path)[0], simulated(config, tmp_path))


def test_remote__a_model_that_is_its_own_anchor_travels_once(tmp_path):
    _, link = deployed(settings("fedprox", rounds=1), tmp_path)
    assert all(name.startswith("message/model/") for name in link.requests[-1].tensors)


@pytest.mark.slow
def test_remote__nodes_report_what_they_can_afford(tmp_path):
    config = settings("fedfa", **DEEP, architectures=replace(WIDTHS, choose="zico"), rounds=1)
    after, link = deployed(config, tmp_path, budgets=[{"width": w} for w in (0.5, 1.0, 0.5, 0.5)])
    fleet = link.requests[-1].header["fleet"]
    assert [fleet["specs"][k]["width"][0] for k in fleet["owned"]] == [0.125, 0.25, 0.125, 0.125]
    assert after
    with fl_refused("peers", "client 1"):
        deployed(config, tmp_path / "few", budgets=[{"width": 0.5}, {}, {}, {}])


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    config = settings("fedavg", rounds=1, clients=3, local_epochs=1, samples=100)
    return config, *dealt(config, tmp_path_factory.mktemp("nodes") / "data")


@pytest.mark.parametrize("fault", some(FAULTS, ["no answer", "NaN", "shape", "dtype"]))
def test_remote__a_client_whose_answer_cannot_be_used_is_left_out_and_named(fault, prepared, tmp_path, caplog):
    """The round is that of the others: as if the client had not been drawn."""
    (config, nodes, test), (spoil, reason) = prepared, FAULTS[fault]
    link = Direct(nodes, lambda client, round, answer: spoil(answer) if client == 1 and round else answer)
    summary = serve(link, config, tmp_path / "run", test, Timeouts(start=0, nodes=3))
    (line,) = [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]
    assert "round 1: 2 of 3 clients answered: client 1 is left out" in line
    assert reason in line
    assert summary["final"]["dropped"] == 1
    assert summary["final"]["models_up"] == pytest.approx(2 / 3)


@pytest.mark.slow
def test_remote__with_too_few_clients_the_run_stops_and_goes_on_later(prepared, tmp_path):
    config, nodes, test = prepared
    config = config.replace(rounds=3)
    waiting = Timeouts(start=0, nodes=3, quorum=2)
    deaf = Direct(nodes, lambda client, round, answer: "no answer within 5 s" if client and round == 2 else answer)
    with fl_refused("peers", "--quorum"):
        serve(deaf, config, tmp_path / "run", test, waiting)
    serve(Direct(nodes), config, tmp_path / "run", test, waiting)
    serve(Direct(nodes), config, tmp_path / "whole", test, waiting)
    assert same(tensors(tmp_path / "run"), tensors(tmp_path / "whole"))


def test_remote__nodes_that_do_not_fit_are_refused(prepared, tmp_path):
    config, nodes, test = prepared
    for wrong, reason in (
        (replace(nodes[2], number=1), "two nodes say that they are client"),
        (replace(nodes[2], data=replace(nodes[2].data, classes=12)), "client 2's data have classes 12"),
        (replace(nodes[2], number=7), "numbered from 0"),
    ):
        with fl_refused("peers", reason):
            serve(Direct([*nodes[:2], wrong]), config, tmp_path / "run", test, Timeouts(start=0, nodes=3))


def test_remote__a_node_refuses_letters_that_it_does_not_understand(prepared):
    _, (node, *_), _ = prepared
    for header, reason in (({"kind": "open"}, "'open'"), ({}, "lacks kind"), ({"kind": "update"}, "lacks client")):
        with fl_refused("peers", reason):
            node.answer(NodeMessage(header, {}))


@pytest.mark.slow
def test_remote__a_node_that_never_answers_is_not_waited_for_while_all_clients_are_there(tmp_path):
    class WithStranger(Direct):
        asked = 0

        def nodes(self):
            return [*super().nodes(), "stranger"]

        def ask(self, requests, timeout, limit):
            known = [request for request in requests if request[0] != "stranger"]
            self.asked += len(known) < len(requests)
            answers = iter(super().ask(known, timeout, limit)[0] if known else ())
            return ["no answer" if place == "stranger" else next(answers) for place, _ in requests], []

    config = settings("fedavg", participants=4)
    nodes, test = dealt(config, tmp_path / "data")
    link = WithStranger(nodes)
    serve(link, config, tmp_path / "remote", test, Timeouts(start=0, nodes=4))
    assert link.asked == 1  # when the server met its nodes


@pytest.mark.parametrize(
    "algorithm", ["fedadam", *(pytest.param(one, marks=slow) for one in ("fedyogi", "fedadagrad"))]
)
def test_remote__an_update_whose_square_is_infinite_ends_the_run_as_diverged(algorithm, tmp_path):
    def huge(client, round, answer):
        if (client, round) != (1, 2):
            return answer
        large = {k: torch.full_like(t, 3e38) for k, t in answer.tensors.items() if k != "loss"}
        return answer._replace(tensors={**answer.tensors, **large})

    with pytest.raises(Diverged, match=r"in round 2 the server's \w+/conv1.weight became infinite .* is saved"):
        deployed(settings(algorithm, participants=4), tmp_path, huge)
    after = tensors(tmp_path / "remote")
    assert all(t.isfinite().all() for t in after.values())
    assert json.loads((tmp_path / "remote" / "summary.json").read_text())["rounds"] == 1


def greeted(tmp_path, **header):
    """The text of the error where the node of client 1 says something else of itself."""
    config = settings("fedavg", clients=3)
    nodes, test = dealt(config, tmp_path / "data")
    link = Direct(nodes, lambda client, round, answer: said(**header)(answer) if client == 1 else answer)
    with pytest.raises(FLError) as error:
        serve(link, config, tmp_path / "run", test, Timeouts(start=0, nodes=3))
    return str(error.value)


@pytest.mark.parametrize(
    ("header", "why"),
    [
        ({"sizes": [10**13, 0, 0]}, "client 1 says that it has"),
        ({"sizes": [1, 1 << 63, 0]}, "client 1 says that it has"),
        ({"sizes": [10**400, 0, 0]}, "client 1 says that it has"),
        ({"sizes": [1, 0, 10**8 + 1]}, "client 1 says that it has 100,000,001 samples"),
        *(({"client": client}, f"says that it is client {client}") for client in (3, 10**6, 2**70)),
        *(({"budget": {"width": width}}, "client 1's budget") for width in ("1", [[1]], float("nan"), 10**400, True)),
        *(({"budget": budget}, "client 1's budget") for budget in ({"budget": [1]}, {"\x1b[2J": 1})),
        ({"sample": ["\x1b[2J\nerror: x"]}, "client 1's data have sample"),
    ],
)  # fmt: skip
def test_remote__a_node_that_says_what_cannot_be_is_refused_and_named(header, why, tmp_path, caplog):
    text = greeted(tmp_path, **header)
    assert "nodes of clients 0, 2, and 3 are needed" in text
    assert "a node was refused: " in text
    assert why in text
    assert text.isprintable()
    assert len(text) < 600
    assert caplog.messages[0].isprintable()


def test_remote__a_node_with_more_samples_than_can_be_numbered_here_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "free_memory", lambda: 10**9)
    assert "client 1 says that it has 100,000,000 samples" in greeted(tmp_path, sizes=[10**8, 0, 0])


def test_remote__a_node_with_too_high_a_number_keeps_nobody_from_starting(tmp_path, caplog):
    config = settings("fedavg", clients=4, rounds=1)
    nodes, test = dealt(config, tmp_path / "data")
    serve(Direct(nodes), config.replace(clients=3), tmp_path / "run", test, Timeouts(start=0, nodes=3))
    assert "a node is refused: a node says that it is client 3" in caplog.text


def test_remote__many_samples_elsewhere_take_no_memory_here():
    count = 10**7
    x, y = torch.zeros(1, 3, 32, 32, dtype=torch.uint8).expand(count, 3, 32, 32), torch.zeros(1).long().expand(count)
    some = fl.data.Dataset("given", x, y, x[:2].clone(), y[:2].clone(), 10, 255)
    assert fl.data.fingerprint(some)["x"] == "uint8 [10000000, 3, 32, 32]"
    assert fl.data.fingerprint(some) != fl.data.fingerprint(replace(some, x=x[1:], y=y[1:]))


@pytest.mark.parametrize(
    "text", ["\x1b[2J\x1b[31mline1\nerror: fine\n", "a\r\u202eb\x00\x9b31m\ud800", 10**400, "x" * 9999]
)
def test_remote__what_a_node_writes_reaches_the_log_in_one_plain_line(text, tmp_path, caplog):
    config = settings("fedavg", rounds=1, participants=4)
    nodes, test = dealt(config, tmp_path / "data")

    def spoil(client, round, answer):
        faults = {1: str(text), 2: lambda: said(ticket=str(text))(answer)}
        fault = faults.get(client) if round else None
        return answer if fault is None else fault if isinstance(fault, str) else fault()

    def odd(client, round, answer):
        if client == 3 and round:
            return answer._replace(tensors={**answer.tensors, str(text): torch.zeros(1)})
        return spoil(client, round, answer)

    serve(Direct(nodes, odd), config, tmp_path / "run", test, Timeouts(start=0, nodes=4))
    (line,) = [message for message in caplog.messages if "1 of 4 clients answered" in message]
    assert line.isprintable()
    assert len(line) < 1200

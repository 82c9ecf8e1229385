"""Nodes that are called directly, by requests that were written as bytes and read again."""

import json
from pathlib import Path

import torch

import fl
from fl.base.errors import FLError
from fl.extensions.flower.folders import SERVER, deal_out, node_folder, read_node, read_server
from fl.extensions.flower.messages import NodeMessage, from_raw, raw
from fl.extensions.flower.node import Node
from fl.extensions.flower.nodes import Timeouts
from fl.extensions.flower.remote import serve
from fl.runs import checkpoint

SMALL = {"clients": 4, "participants": 3, "rounds": 2, "local_epochs": 1, "samples": 80, "width": 0.1}
SMALL |= {"backend": "loop", "eval_client_models_every": 0}


def settings(algorithm, **changes):
    return fl.Config.of(algorithm=algorithm, **{**SMALL, **changes})


def travelled(message):
    """A message after its way over a network."""
    name = lambda tensor: str(tensor.dtype).removeprefix("torch.")  # noqa: E731
    tensors = {key: from_raw(raw(tensor), name(tensor), tensor.shape) for key, tensor in message.tensors.items()}
    return NodeMessage(json.loads(json.dumps(message.header)), tensors)


class Direct:
    """A link to nodes in this process, in reverse order, as Flower's random ids would have them.

    Args:
        spoil: (client, round, answer) -> what arrives in its place: an answer, or why there is none.
        before, after: (round) -> None, called when requests are sent and when all nodes have answered.
    """

    def __init__(self, nodes, spoil=lambda c, r, a: a, before=lambda r: None, after=lambda r: None):
        self.clients, self.spoil, self.requests = nodes, spoil, []
        self.before, self.after = before, after

    def nodes(self):
        return [f"node-{number}" for number in reversed(range(len(self.clients)))]

    def ask(self, requests, timeout, limit):
        round = requests[0][1].header.get("round", 0)
        self.requests += [request for _, request in requests]
        self.before(round)
        answers = []
        for place, request in requests:
            node = self.clients[int(place.removeprefix("node-"))]
            try:
                answer = travelled(node.answer(travelled(request)))
            except FLError as error:
                answer = str(error)
            answers.append(self.spoil(node.number, round, answer))
        self.after(round)
        return answers, []


def dealt(config, root: Path, budgets=None):
    """The nodes of these settings, and the server's test set."""
    deal_out(config, root)
    budgets = budgets or [{}] * config.clients.number
    nodes = [
        Node(k, *read_node(node_folder(root, k)), budgets[k], root / f"kept-{k}") for k in range(config.clients.number)
    ]
    return nodes, read_server(root / SERVER)


def deployed(config, root: Path, spoil=lambda c, r, a: a, budgets=None):
    """The server's tensors after a run with nodes."""
    nodes, test = dealt(config, root / "data", budgets)
    link = Direct(nodes, spoil)
    serve(link, config, root / "remote", test, Timeouts(start=0, nodes=config.clients.number))
    return tensors(root / "remote"), link


def simulated(config, root: Path):
    fl.simulate(config, root / "here")
    return tensors(root / "here")


def tensors(folder: Path):
    return checkpoint.flatten(checkpoint._read(folder)[0])


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def first(change):
    """A fault of the first tensor of an answer; None: it is missing."""

    def spoil(answer):
        (name, tensor), *others = answer.tensors.items()
        return answer._replace(tensors={**({name: change(tensor)} if change else {}), **dict(others)})

    return spoil


def said(**header):
    return lambda answer: answer._replace(header={**answer.header, **header})


FAULTS = {
    "no answer": (lambda answer: "no answer within 5 s", "no answer within 5 s"),
    "NaN": (first(lambda tensor: torch.full_like(tensor, torch.nan)), "infinite or not a number"),
    "shape": (first(lambda tensor: tensor[None]), "has the shape"),
    "dtype": (first(lambda tensor: tensor.double()), "is torch.float64, and"),
    "architecture": (first(None), "is missing: another architecture"),
    "method": (lambda a: a._replace(tensors={**a.tensors, "state/extra": torch.zeros(1)}), "was not asked for"),
    "an old round": (said(round=0), "answers for round 0"),
    "another client": (lambda a: said(client=a.header["client"] + 1)(a), "answers for client 2"),  # of client 1
    "another request": (said(ticket="00"), "answers for ticket 00"),
    "another kind": (said(kind="here"), "answers for kind here"),
    "samples": (said(samples=10**9), "trained on 1000000000 samples"),
    "no header": (lambda a: a._replace(header=[]), "no table of names"),
    "a header of other types": (said(round="1"), "round is a str"),
    "no loss": (lambda a: a._replace(tensors={k: t for k, t in a.tensors.items() if k != "loss"}), "loss is"),
    "too many operations": (said(flops=1 << 63), "computed 9223372036854775808 operations"),
}

"""What a node does: it says what it has, and trains the model that it is sent on its own data."""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fl.algorithms.algorithm import Algorithm
from fl.algorithms.parts.additive import Cache, Validation
from fl.algorithms.parts.secure_round import to_bytes
from fl.base.errors import Diverged, FLError
from fl.base.rng import Rng
from fl.base.torch_private import tree_map
from fl.data import Dataset
from fl.deploy.messages import InvalidMessage, NodeMessage, fields, flat, nested
from fl.deploy.messages import whole as whole_numbers
from fl.deploy.secret import frames, packed
from fl.deploy.store import Store
from fl.federation import Federation
from fl.federation.client_models import ClientModels, Level
from fl.federation.clients import check_names
from fl.federation.cohort import per_client
from fl.models import custom_model
from fl.models.create import create
from fl.models.fleet import make_fleet
from fl.partition import Parts, Split, Splits
from fl.runs.assembly import make_algorithm, model_spec, pick_device, training
from fl.runs.evaluate import score_clients
from fl.secure import Client
from fl.settings import Config
from surgery import Stack, State
from zoo import Spec, ZooError


@dataclass
class Node:
    """A client with its data.

    Attributes:
        number: which client it is, from 0 on: it selects the random numbers of its batches.
        data: its samples; the test part is not used.
        split: which of them it trains on, validates on and tests on.
        budget: what it says of the model that it can afford: some of "width", "depth" and "budget".
        folder: where it keeps what is its own from round to round; None: nowhere, for methods that keep nothing.
    """

    number: int
    data: Dataset
    split: Split
    budget: Mapping[str, Any] = field(default_factory=dict)
    folder: Path | None = None
    _made: tuple[Any, Any] = (None, None)
    _algorithm: Algorithm | None = None
    _validation: Validation | None = None

    def __post_init__(self) -> None:
        self._store = Store(self.folder)

    def answer(self, request: NodeMessage) -> NodeMessage:
        """What it sends back.

        Raises FLError, which says why, for what it cannot do.
        """
        kind = fields(request.header, {"kind": str})["kind"]
        if kind not in _KINDS:
            raise InvalidMessage(
                f"a node does not know what to do with {kind!r}: server and nodes need the same version"
            )
        return _KINDS[kind](self, request)

    def _hello(self, request: NodeMessage) -> NodeMessage:
        self._store.hold(None)  # of a run that was killed
        data, (train, valid, test) = self.data, self.split
        header = {
            "kind": "here",
            "client": self.number,
            "sizes": [len(train), len(valid), len(test)],
            "sample": [str(data.x.dtype).removeprefix("torch."), *data.x.shape[1:]],
            "target": list(data.y.shape[1:]),
            "classes": data.classes,
            "top": data.top,
            "budget": dict(self.budget),
        }
        if request.header.get("labels"):  # only methods whose server has to know them ask
            if data.text:
                raise InvalidMessage("a method asks for the labels of text, which it has not")
            header["labels"] = torch.bincount(data.y[train], minlength=data.classes).tolist()
        return NodeMessage(header, {})

    def _update(self, request: NodeMessage) -> NodeMessage:
        """Run the method's client function, keep the client's own state, and send the rest."""
        wanted = {"keeps": (dict, type(None)), "levels": list, "list": bool}
        asked, fed, tensors = self._opened(request, wanted)
        algorithm, rng, keeps = self._method(asked, fed), Rng(asked["seed"], asked["round"]), asked["keeps"]
        message, own = _row(nested(tensors, "message")), self._own(tensors, keeps, fed)
        if asked["list"]:
            message["model"] = [nested(tensors, "message")["model"]]
        message["levels"] = self._levels(tensors, asked["levels"], fed)
        self._store.forget([digest for digest in asked["levels"] if digest])
        fed.meter.read()
        try:
            update = algorithm.client(message, own, [self.number], rng)
        except Diverged:
            raise InvalidMessage("training diverged: loss or weights became infinite or not a number") from None
        if not update.sizes[0]:
            raise InvalidMessage("training diverged: loss or weights became infinite or not a number")
        if keeps is not None:
            new = update.own or own
            check_names(own, new)
            kept = {name: tensor[0] for name, tensor in new.items()}
            self._store.write(keeps["run"], asked["round"], keeps["as"], kept, keeps["needed"])
        if "secure" in request.header:
            sent = self._join(request, update.received)
        else:
            sent = flat(per_client(update.received)[0] if update.received else {}, "state")
        return self._answer("updated", asked, {**sent, "loss": update.loss[0]}, flops=int(fed.meter.read()))

    def _join(self, request: NodeMessage, states: Stack) -> dict[str, torch.Tensor]:
        """Keep the trained model for an exchange in secret; returns a public key."""
        wanted = {"pieces": list, "server": str, "repeats": int}
        secure = fields(fields(request.header, {"secure": dict})["secure"], wanted)
        names = sorted(name for piece in secure["pieces"] for name in piece)
        if names != sorted(states) or len(secure["server"]) != 64 or secure["repeats"] < 1:
            raise InvalidMessage("the pieces of the request are not those of the model")
        (pieces,) = to_bytes(states, secure["pieces"])
        client = Client(self.number, pieces, bytes.fromhex(secure["server"]), secure["repeats"])
        self._store.hold(client.dump())
        return {"public": torch.tensor(list(client.public), dtype=torch.uint8)}

    def _exchange(self, request: NodeMessage) -> NodeMessage:
        """Take part in a phase of an exchange in secret."""
        asked = fields(request.header, {"client": int, "seed": int, "round": int, "ticket": str, "phase": int})
        if asked["client"] != self.number:
            raise InvalidMessage(f"it is client {self.number}, and was asked for client {asked['client']}")
        kept = self._store.held()
        try:
            client = Client.load(kept, self._choices(Rng(asked["seed"], asked["round"])))
        except (ValueError, KeyError, TypeError):
            raise InvalidMessage("what it kept for this exchange is damaged") from None
        self._store.hold(None)  # whoever cannot go on is left out, and needs it no more
        envelopes = client.step(asked["phase"], frames(request.tensors))
        if not client.finished:
            self._store.hold(client.dump())
        to, tensors = packed(envelopes)
        return self._answer("exchanged", asked, tensors, to=to)

    def _choices(self, rng: Rng) -> random.Random | None:
        """The source of the client's choices in an exchange: the operating system, which no server can know."""
        return None

    def _score(self, request: NodeMessage) -> NodeMessage:
        """Say how well the models that this client predicts with do on its own held-out samples."""
        wanted = {"parts": list, "mean": bool, "keeps": (dict, type(None)), "levels": list}
        asked, fed, tensors = self._opened(request, wanted)
        states = [level.state(0) for level in self._levels(tensors, asked["levels"], fed)]
        algorithm, own = self._method(asked, fed), self._own(tensors, asked["keeps"], fed)
        if algorithm.personalize:
            rng = Rng(asked["seed"], asked["round"])
            made = algorithm.personalize(_row(states[0]) if states else own, own, [self.number], rng)
            states = [{name: tensor[0] for name, tensor in made.items()}]
        elif own:
            states.append({name: tensor[0] for name, tensor in own.items()})
        model = fed.fleet[self.number].model if fed.fleet else fed.model
        alone = Federation(model, fed.data, [self.split], 1, fed.local)
        levels = [Level([state], torch.zeros(1, dtype=torch.int64)) for state in states]
        scores = score_clients(alone, lambda: ClientModels(levels, asked["mean"]))
        return self._answer("scored", asked, {}, scores={part: scores[part][0] for part in asked["parts"]})

    def _judge(self, request: NodeMessage) -> NodeMessage:
        """Say what this client's validation samples say of levels."""
        wanted = {"what": str, "mean": bool, "levels": list, "more": list, "keeps": (dict, type(None))}
        asked, fed, tensors = self._opened(request, wanted)
        if asked["what"] not in ("losses", "accuracies"):
            raise InvalidMessage(f"a node does not judge {asked['what']!r}: server and nodes need the same version")
        levels, more = self._levels(tensors, asked["levels"], fed), []
        for number, kind in enumerate(asked["more"]):
            state = nested(tensors, f"more{number}")
            if kind == "own":
                state = {name: tensor[0] for name, tensor in self._own(tensors, asked["keeps"], fed).items()}
            more.append(self._level(state, fed) if kind else None)
        if self._validation is None:
            self._validation = Validation(fed, Cache(fed), asked["mean"])
        values = getattr(self._validation, asked["what"])(levels, more)[:, self.number]
        return self._answer("judged", asked, {}, values=values.tolist())

    def _levels(self, tensors: dict[str, torch.Tensor], digests: list, fed: Federation) -> list[Level]:
        """The models of this client on some levels; those with a digest stay here, and may have come before."""
        found = []
        for number, digest in enumerate(digests):
            state = nested(tensors, f"level{number}")
            if digest:
                state = self._store.level(str(digest), state)
            found.append(self._level(state, fed))
        return found

    def _level(self, state: State, fed: Federation) -> Level:
        """A level on which only this client has a model, or (for an empty state) nobody."""
        used = torch.full((len(fed.clients),), -1)
        if state:
            used[self.number] = 0
        device = fed.data.x.device
        return Level([{name: tensor.to(device) for name, tensor in state.items()}], used)

    def _opened(
        self, request: NodeMessage, more: Mapping[str, Any]
    ) -> tuple[dict[str, Any], Federation, dict[str, torch.Tensor]]:
        """The header of a request about models, this node's part of the federation, and the tensors."""
        wanted = {"config": str, "method": str, "model": dict, "fleet": (dict, type(None)), "clients": int}
        wanted |= {"participants": int, "client": int, "batch": int, "seed": int, "round": int}
        asked = fields(request.header, {**wanted, "ticket": str, **more})
        if asked["client"] != self.number:
            raise InvalidMessage(f"the request is for client {asked['client']}, and this is client {self.number}")
        key = {name: asked[name] for name in ("config", "model", "fleet", "clients", "participants", "batch")}
        if self._made[0] != key:
            self._made, self._algorithm, self._validation = (key, self._federation(**key)), None, None
        fed = self._made[1]
        device = fed.data.x.device
        tensors = {name: tensor.to(device) for name, tensor in request.tensors.items()}
        return asked, fed, tensors

    def _method(self, asked: dict[str, Any], fed: Federation) -> Algorithm:
        if self._algorithm is None:
            self._algorithm = make_algorithm(Config.from_yaml(asked["config"]), fed)
        return self._algorithm

    def _own(self, tensors: dict[str, torch.Tensor], keeps: dict[str, Any] | None, fed: Federation) -> Stack:
        """What this client has kept [1, ...]: the version that the request names, or the start that came with it; empty
        for methods whose clients keep nothing.
        """
        if keeps is None:
            return {}
        fields(keeps, {"run": int, "from": int, "as": int, "needed": list})
        if not whole_numbers(keeps["needed"]):
            raise InvalidMessage("the versions that are still needed are no numbers")
        found = self._store.read(keeps["run"], keeps["from"]) if keeps["from"] else nested(tensors, "own")
        return _row({name: tensor.to(fed.data.x.device) for name, tensor in found.items()})

    def _answer(self, kind: str, asked: dict[str, Any], tensors: dict[str, torch.Tensor], **more: Any) -> NodeMessage:
        header = {"kind": kind, "client": self.number, "samples": len(self.split.train), **more}
        return NodeMessage(header | {name: asked[name] for name in ("round", "seed", "ticket")}, tensors)

    def _federation(
        self, config: str, model: dict, fleet: dict | None, clients: int, participants: int, batch: int
    ) -> Federation:
        """This node's part of the federation.

        The other clients are there only as numbers: each has as many samples as a step, so that steps are as large as
        where all clients are, and none of them is ever read.
        """
        settings = Config.from_yaml(config)
        device = pick_device(settings.device)
        data, local = training(settings, self.data.to(device))
        spec = model_spec(settings, data) if custom_model.is_custom(settings.model) else _spec(model)
        net = create(torch.Generator(), spec).to(device)
        parts = []
        for mine in self.split:
            sizes = torch.full((clients,), batch)
            sizes[self.number] = len(mine)
            samples = torch.arange(len(data.y), len(data.y) + int(sizes.sum()))
            offsets = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
            samples[offsets[self.number] : offsets[self.number + 1]] = mine
            parts.append(Parts(samples, offsets))
        splits, architectures = Splits(*parts), None
        if fleet:
            fields(fleet, {"specs": list, "owned": list})
            kinds = [_spec(one) for one in fleet["specs"]]
            if not whole_numbers(fleet["owned"]) or max(fleet["owned"]) >= len(kinds):
                raise InvalidMessage("the architectures of the clients are not numbered")
            architectures = make_fleet(net, spec, [kinds[k] for k in fleet["owned"]])
        return Federation(
            net, data, splits, participants, local, spec=spec, create=lambda rng: create(rng, spec), fleet=architectures
        )


def _spec(values: dict) -> Spec:
    try:
        return Spec.from_dict(values)
    except (ZooError, TypeError) as error:
        raise FLError(f"the request describes no model: {error}") from None


def _row(tree: Any) -> Any:
    """A stack of one."""
    return tree_map(lambda tensor: tensor[None], tree)


_KINDS: dict[str, Callable[[Node, NodeMessage], NodeMessage]] = {
    "hello": Node._hello,
    "update": Node._update,
    "score": Node._score,
    "judge": Node._judge,
    "exchange": Node._exchange,
}

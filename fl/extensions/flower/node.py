"""A node: it reports its client's data, and trains the models that it receives."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fl.algorithms.parts.additive import Cache, Validation
from fl.algorithms.parts.secure_round import to_bytes
from fl.base.errors import Diverged, FLError
from fl.base.rng import Rng
from fl.base.torch_private import tree_map
from fl.data import Dataset
from fl.engine.constants import digest as base_digest
from fl.extensions.flower.messages import InvalidMessage, NodeMessage, are_counts, fields, flat, form_of, nest
from fl.extensions.flower.secret import as_frames, as_tensors
from fl.extensions.flower.store import Store
from fl.federation import Federation
from fl.federation.client_models import ClientModels, Level
from fl.federation.clients import check_names
from fl.federation.cohort import per_client
from fl.models import custom_model
from fl.models.create import create
from fl.models.fleet import Fleet, make_fleet
from fl.models.init import find
from fl.models.library import spec_class
from fl.partition import Parts, Split, Splits
from fl.runs.assembly import make_method, make_models, model_spec, pick_device, training
from fl.runs.evaluate import score_clients
from fl.secure import Client
from fl.settings import Config
from fl.settings.extensions import model_change
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
        folder: where it keeps its client's state from round to round.
        init: the weights that adapters are beside, as --init names them; None: by the settings of the run.
    """

    number: int
    data: Dataset
    split: Split
    budget: Mapping[str, Any]
    folder: Path
    init: str | None = None

    def __post_init__(self) -> None:
        self._store = Store(self.folder)
        self._key: dict[str, Any] = {}  # of what `_open` made for an earlier request

    def answer(self, request: NodeMessage) -> NodeMessage:
        """Return the answer. Raises FLError, which says why, for what it cannot do."""
        kind = fields(request.header, {"kind": str})["kind"]
        if kind not in _KINDS:
            raise InvalidMessage(
                f"a node does not know what to do with {kind!r}: server and nodes need the same version"
            )
        return _KINDS[kind](self, request)

    def _hello(self, request: NodeMessage) -> NodeMessage:
        self._store.drop_exchange()  # of a run that was killed
        data, (train, valid, test) = self.data, self.split
        header = {
            "kind": "hello",
            "client": self.number,
            "sizes": [len(train), len(valid), len(test)],
            **form_of(data),
            "budget": dict(self.budget),
        }
        if request.header.get("labels"):  # only methods that need them on the server ask
            if data.text:
                raise InvalidMessage("a method asks for the labels of text, which it has not")
            header["labels"] = torch.bincount(data.y[train], minlength=data.classes).tolist()
        return NodeMessage(header, {})

    def _check_base(self, request: NodeMessage) -> NodeMessage:
        """Say that this node has the base of the server's adapters."""
        return self._answer(self._open(request, {})[0], {})

    def _update(self, request: NodeMessage) -> NodeMessage:
        """Run the method's client function, keep the client's state, and send the rest."""
        wanted = {"keeps": (dict, type(None)), "levels": list, "list": bool, "secure": (dict, type(None))}
        header, tensors = self._open(request, wanted)
        keeps, client_states = header["keeps"], self._client_state(tensors, header["keeps"])
        received = nest(tensors, "message")
        message = _row(received)
        if header["list"]:
            message["model"] = [received["model"]]
        message["levels"] = self._levels(tensors, header["levels"])
        self._store.forget([digest for digest in header["levels"] if digest])
        self._fed.meter.read()
        try:
            update = self._algorithm.client(message, client_states, [self.number], Rng(header["seed"], header["round"]))
        except Diverged:
            update = None
        if update is None or not update.sizes[0]:
            raise InvalidMessage("training diverged: loss or weights became infinite or not a number")
        if keeps is not None:
            new = update.client_states or client_states
            check_names(client_states, new)
            state = {name: tensor[0] for name, tensor in new.items()}
            self._store.write(keeps["run"], header["round"], keeps["as"], state, keeps["needed"])
        if header["secure"]:
            sent = self._join(header["secure"], update.received)
        else:
            sent = flat(per_client(update.received)[0] if update.received else {}, "state")
        return self._answer(header, {**sent, "loss": update.loss[0]}, flops=int(self._fed.meter.read()))

    def _join(self, secure: dict[str, Any], states: Stack) -> dict[str, torch.Tensor]:
        """Keep the trained model for an exchange in secret; returns a public key."""
        fields(secure, {"pieces": list, "server": str, "repeats": int})
        names = sorted(name for piece in secure["pieces"] for name in piece)
        if names != sorted(states) or len(secure["server"]) != 64 or secure["repeats"] < 1:
            raise InvalidMessage("the pieces of the request are not those of the model")
        (pieces,) = to_bytes(states, secure["pieces"])
        client = Client(self.number, pieces, bytes.fromhex(secure["server"]), secure["repeats"])
        self._store.keep_exchange(client.dump())
        return {"public": torch.tensor(list(client.public), dtype=torch.uint8)}

    def _exchange(self, request: NodeMessage) -> NodeMessage:
        """Take part in a phase of an exchange in secret."""
        header = self._address(request, {"phase": int})
        saved = self._store.exchange()
        try:
            client = Client.load(saved)
        except (ValueError, KeyError, TypeError):
            raise InvalidMessage("what it kept for this exchange is damaged") from None
        self._store.drop_exchange()  # a client that cannot continue is left out, and needs it no more
        envelopes = client.step(header["phase"], as_frames(request.tensors))
        if not client.finished:
            self._store.keep_exchange(client.dump())
        to = [envelope.recipient for envelope in envelopes]
        return self._answer(header, as_tensors([envelope.frame for envelope in envelopes]), to=to)

    def _score(self, request: NodeMessage) -> NodeMessage:
        """Score the models that this client predicts with on its held-out samples."""
        wanted = {"parts": list, "mean": bool, "keeps": (dict, type(None)), "levels": list}
        header, tensors = self._open(request, wanted)
        states = [level.state(0) for level in self._levels(tensors, header["levels"])]
        client_states = self._client_state(tensors, header["keeps"])
        if self._algorithm.personalize:
            rng = Rng(header["seed"], header["round"])
            personal = self._algorithm.personalize(
                _row(states[0]) if states else client_states, client_states, [self.number], rng
            )
            states = [{name: tensor[0] for name, tensor in personal.items()}]
        elif client_states:
            states.append({name: tensor[0] for name, tensor in client_states.items()})
        fed = self._fed
        alone = Federation(*fed.models_of([self.number]), fed.data, [self.split], 1, fed.local)
        levels = [Level([state], torch.zeros(1, dtype=torch.int64)) for state in states]
        scores = score_clients(alone, lambda: ClientModels(levels, header["mean"]))
        return self._answer(header, {}, scores={part: scores[part][0] for part in header["parts"]})

    def _judge(self, request: NodeMessage) -> NodeMessage:
        """Say what this client's validation samples say of levels."""
        wanted = {"what": str, "mean": bool, "levels": list, "more": list, "keeps": (dict, type(None))}
        header, tensors = self._open(request, wanted)
        if header["what"] not in ("losses", "accuracies"):
            raise InvalidMessage(f"a node does not judge {header['what']!r}: server and nodes need the same version")
        levels, more = self._levels(tensors, header["levels"]), []
        for number, kind in enumerate(header["more"]):
            state = nest(tensors, f"more{number}")
            if kind == "personal":
                state = {name: tensor[0] for name, tensor in self._client_state(tensors, header["keeps"]).items()}
            more.append(self._level(state) if kind else None)
        if self._validation is None:
            self._validation = Validation(self._fed, Cache(self._fed), header["mean"])
        values = getattr(self._validation, header["what"])(levels, more)[:, self.number]
        return self._answer(header, {}, values=values.tolist())

    def _levels(self, tensors: dict[str, torch.Tensor], digests: list) -> list[Level]:
        """Return the models of this client on some levels.

        Models with a digest stay here, and may have come before.
        """
        levels = []
        for number, digest in enumerate(digests):
            state = nest(tensors, f"level{number}")
            levels.append(self._level(self._store.level(str(digest), state) if digest else state))
        return levels

    def _level(self, state: State) -> Level:
        """Return a level with this client's model, or without any for an empty state."""
        used = torch.full((len(self._fed.clients),), -1)
        if state:
            used[self.number] = 0
        return Level([self._on_device(state)], used)

    def _client_state(self, tensors: dict[str, torch.Tensor], keeps: dict[str, Any] | None) -> Stack:
        """Return the state that this client has kept, [1, ...].

        It is the version that the request names, or the start that came with it; empty if clients of the method keep
        nothing.
        """
        if keeps is None:
            return {}
        fields(keeps, {"run": int, "from": int, "as": int, "needed": list})
        if not are_counts(keeps["needed"]):
            raise InvalidMessage("the versions that are still needed are no numbers")
        state = self._store.read(keeps["run"], keeps["from"]) if keeps["from"] else nest(tensors, "client_state")
        return _row(self._on_device(state))

    def _on_device(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: tensor.to(self._fed.data.device) for name, tensor in tensors.items()}

    def _address(self, request: NodeMessage, more: Mapping[str, Any]) -> dict[str, Any]:
        """Return the header of a request to this client, with further fields."""
        wanted = {"client": int, "seed": int, "round": int, "ticket": str}
        header = fields(request.header, {**wanted, **more})
        if header["client"] != self.number:
            raise InvalidMessage(f"the request is for client {header['client']}, and this is client {self.number}")
        return header

    def _open(self, request: NodeMessage, more: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Return the header and the tensors of a request about models.

        Makes this node's part of the federation for it.
        """
        made_of = {"config": str, "model": dict, "fleet": (dict, type(None)), "clients": int, "participants": int}
        made_of |= {"batch": int, "base": (str, type(None))}
        header = self._address(request, {**made_of, **more})
        key = {name: header[name] for name in made_of}
        if self._key != key:
            self._fed = self._federation(**key)
            self._algorithm = make_method(Config.from_yaml(header["config"]), self._fed)
            self._validation: Validation | None = None
            self._key = key
        return header, self._on_device(request.tensors)

    def _answer(self, header: dict[str, Any], tensors: dict[str, torch.Tensor], **more: Any) -> NodeMessage:
        same = {name: header[name] for name in ("kind", "client", "round", "ticket")}
        return NodeMessage({**same, "samples": len(self.split.train), **more}, tensors)

    def _federation(
        self,
        config: str,
        model: dict,
        fleet: dict | None,
        clients: int,
        participants: int,
        batch: int,
        base: str | None,
    ) -> Federation:
        """This node's part of the federation.

        The other clients are there only as numbers: each has as many samples as a step, so that steps are as large as
        where all clients are, and none of them is ever read.
        """
        settings = Config.from_yaml(config)
        device = pick_device(settings.execution.device)
        data, local = training(settings, self.data.to(device))
        spec = model_spec(settings, data) if custom_model.is_custom(settings.model.name) else _spec(model)
        if model_change(settings.extensions):
            net, make, architectures = self._adapt(settings, spec, clients, device, base)
        else:
            net, make, architectures = create(torch.Generator(), spec).to(device), partial(create, spec=spec), None
        parts = []
        for indices in self.split:
            sizes = torch.full((clients,), batch)
            sizes[self.number] = len(indices)
            samples = torch.arange(len(data.y), len(data.y) + int(sizes.sum()))
            offsets = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
            samples[offsets[self.number] : offsets[self.number + 1]] = indices
            parts.append(Parts(samples, offsets))
        splits = Splits(*parts)
        if fleet:
            fields(fleet, {"specs": list, "owned": list})
            kinds = [_spec(entry) for entry in fleet["specs"]]
            if not are_counts(fleet["owned"]) or max(fleet["owned"]) >= len(kinds):
                raise InvalidMessage("the architectures of the clients are not numbered")
            architectures = make_fleet(net, spec, [kinds[k] for k in fleet["owned"]])
        return Federation(net, data, splits, participants, local, spec=spec, create=make, fleet=architectures)

    def _adapt(
        self, settings: Config, spec: Spec, clients: int, device: torch.device, base: str | None
    ) -> tuple[nn.Module, Callable[..., nn.Module], Fleet | None]:
        """Return the models with adapters on this node's base.

        Raises InvalidMessage if it is not the server's base.
        """
        init, way = self.init or settings.model.init, "give the node its own copy: --node-config 'init=\"FILE\"'"
        try:
            models = make_models(settings, spec, find(init, spec) if init else None, clients, device)
        except FLError as error:
            raise InvalidMessage(f"{error}; {way}") from None
        if base_digest(models[0]) != base:
            of = init or "the model's own weights"
            raise InvalidMessage(f"the base of its adapters ({of}) has other numbers than the server's; {way}")
        return models


def _spec(values: dict) -> Spec:
    try:
        return spec_class(values.get("name")).from_dict(values)
    except (ZooError, FLError, TypeError) as error:
        raise FLError(f"the request describes no model: {error}", code="peers") from None


def _row(tree: Any) -> Any:
    """Return a stack of one."""
    return tree_map(lambda tensor: tensor[None], tree)


_KINDS: dict[str, Callable[[Node, NodeMessage], NodeMessage]] = {
    "hello": Node._hello,
    "base": Node._check_base,
    "update": Node._update,
    "score": Node._score,
    "judge": Node._judge,
    "exchange": Node._exchange,
}

"""What a node does: it says what it has, and trains the model that it is sent on its own data."""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fl.algorithms.algorithm import Algorithm
from fl.algorithms.parts.additive import Cache, Validation
from fl.algorithms.parts.secure_round import to_bytes
from fl.base.errors import Diverged, FLError
from fl.base.rng import Rng
from fl.config import Config
from fl.data import Dataset
from fl.deploy.letters import Letter, Refused, fields, flat, nested, repeated
from fl.deploy.letters import whole as whole_numbers
from fl.deploy.objectives import heard
from fl.deploy.secret import frames, packed
from fl.deploy.store import Store
from fl.federation import Federation
from fl.federation.cohort import Cohort
from fl.federation.local_training import LocalObjective
from fl.federation.own import Level, Own, predict
from fl.models import custom_model
from fl.models.create import create
from fl.models.fleet import make_fleet
from fl.partition import Parts, Split, Splits
from fl.runs.assembly import make_algorithm, model_spec, pick_device, training
from fl.runs.evaluate import score_clients
from fl.secure import Client
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

    def answer(self, letter: Letter) -> Letter:
        """What it sends back.

        Raises FLError, which says why, for what it cannot do.
        """
        kind = fields(letter.header, {"kind": str})["kind"]
        if kind not in _KINDS:
            raise Refused(f"a node does not know what to do with {kind!r}: server and nodes need the same version")
        return _KINDS[kind](self, letter)

    def _hello(self, letter: Letter) -> Letter:
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
        if letter.header.get("labels"):  # only methods whose server has to know them ask
            if data.text:
                raise Refused("a method asks for the labels of text, which it has not")
            header["labels"] = torch.bincount(data.y[train], minlength=data.classes).tolist()
        return Letter(header, {})

    def _train(self, letter: Letter) -> Letter:
        asked, fed, model, tensors = self._opened(letter, {"objective": dict, "ascent": (dict, type(None))})
        start = {name.removeprefix("state/"): t for name, t in tensors.items() if name.startswith("state/")}
        objective = LocalObjective(heard(asked["objective"]), [nested(tensors, "context")], heard(asked["ascent"]))
        cohort = Cohort([self.number], [model], [start])
        try:
            trained = fed.train_cohort(cohort, objective, Rng(asked["seed"], asked["round"]))
        except Diverged:
            raise Refused("training diverged: loss or weights became infinite or not a number") from None
        if "secure" in letter.header:
            return self._join(letter, asked, trained.loss[0], _row(trained.states[0]))
        return self._answer("trained", asked, {**flat(trained.states[0], "state"), "loss": trained.loss[0]})

    def _join(self, letter: Letter, asked: dict[str, Any], loss: torch.Tensor, states: Stack) -> Letter:
        """Keep the trained model for an exchange in secret, and send a public key."""
        wanted = {"pieces": list, "server": str, "repeats": int}
        secure = fields(fields(letter.header, {"secure": dict})["secure"], wanted)
        names = sorted(name for piece in secure["pieces"] for name in piece)
        if names != sorted(states) or len(secure["server"]) != 64 or secure["repeats"] < 1:
            raise Refused("the pieces of the letter are not those of the model")
        (pieces,) = to_bytes(states, secure["pieces"])
        client = Client(self.number, pieces, bytes.fromhex(secure["server"]), secure["repeats"])
        self._store.hold(client.dump())
        public = torch.tensor(list(client.public), dtype=torch.uint8)
        return self._answer("joined", asked, {"public": public, "loss": loss})

    def _exchange(self, letter: Letter) -> Letter:
        """Take part in a phase of an exchange in secret."""
        asked = fields(letter.header, {"client": int, "seed": int, "round": int, "ticket": str, "phase": int})
        if asked["client"] != self.number:
            raise Refused(f"it is client {self.number}, and was asked for client {asked['client']}")
        kept = self._store.held()
        try:
            client = Client.load(kept, self._choices(Rng(asked["seed"], asked["round"])))
        except (ValueError, KeyError, TypeError):
            raise Refused("what it kept for this exchange is damaged") from None
        self._store.hold(None)  # whoever cannot go on is left out, and needs it no more
        envelopes = client.step(asked["phase"], frames(letter.tensors))
        if not client.finished:
            self._store.hold(client.dump())
        to, tensors = packed(envelopes)
        return self._answer("exchanged", asked, tensors, to=to)

    def _choices(self, rng: Rng) -> random.Random | None:
        """The source of the client's choices in an exchange: the operating system, which no server can know."""
        return None

    def _visit(self, letter: Letter) -> Letter:
        """Do what the method does at its clients, keep what is kept, and send the rest."""
        wanted = {"visit": str, "keeps": (dict, type(None)), "levels": (list, type(None))}
        asked, fed, _, tensors = self._opened(letter, wanted)
        visits = {visit.name: visit for visit in self._method(asked, fed).visits}
        if asked["visit"] not in visits:
            raise Refused(f"{asked['method']} has no visit {asked['visit']!r}: server and nodes need the same version")
        visit, keeps, more = visits[asked["visit"]], asked["keeps"], {}
        if keeps is not None:
            fields(keeps, {"run": int, "from": int, "as": int, "needed": list})
            if not whole_numbers(keeps["needed"]):
                raise Refused("the versions that are still needed are no numbers")
        received, mine = _row(nested(tensors, "received")), self._own(tensors, keeps, fed)
        if asked["levels"] is not None:
            more = {"context": _row(nested(tensors, "context")), "levels": self._levels(tensors, asked["levels"], fed)}
            self._store.forget([digest for digest in asked["levels"] if digest])
        fed.meter.read()
        try:
            trained, new = visit.run(received, mine, [self.number], Rng(asked["seed"], asked["round"]), **more)
        except Diverged:
            raise Refused("training diverged: loss or weights became infinite or not a number") from None
        if not trained.sizes[0]:
            raise Refused("training diverged: loss or weights became infinite or not a number")
        if keeps is not None:
            kept = {name: tensor[0] for name, tensor in new.items()}
            self._store.write(keeps["run"], asked["round"], keeps["as"], kept, keeps["needed"])
        sent = {f"state/{name}": t[0] for name, t in trained.received.items() if name not in visit.withheld}
        return self._answer("visited", asked, {**sent, "loss": trained.loss[0]}, flops=int(fed.meter.read()))

    def _score(self, letter: Letter) -> Letter:
        """Say how well the models that this client predicts with do on its own held-out samples."""
        wanted = {"parts": list, "mean": bool, "mine": (dict, type(None)), "levels": list}
        asked, fed, model, tensors = self._opened(letter, wanted)
        states = [level.state(0) for level in self._levels(tensors, asked["levels"], fed)]
        if asked["mine"] is not None:
            states.append(self._made_of(asked, fed, tensors))
        alone = Federation(model, fed.data, [self.split], 1, fed.local)
        own = Own([Level([state], torch.zeros(1, dtype=torch.int64)) for state in states], asked["mean"])
        scores = score_clients(alone, lambda x, _: predict(alone.predict, own.levels, 0, x, own.mean), lambda: own)
        return self._answer("scored", asked, {}, scores={part: scores[part][0] for part in asked["parts"]})

    def _judge(self, letter: Letter) -> Letter:
        """Say what this client's validation samples say of levels."""
        wanted = {"what": str, "mean": bool, "levels": list, "more": list, "mine": (dict, type(None))}
        asked, fed, _, tensors = self._opened(letter, wanted)
        if asked["what"] not in ("losses", "accuracies"):
            raise Refused(f"a node does not judge {asked['what']!r}: server and nodes need the same version")
        levels, more = self._levels(tensors, asked["levels"], fed), []
        for number, kind in enumerate(asked["more"]):
            state = self._made_of(asked, fed, tensors) if kind == "mine" else nested(tensors, f"more{number}")
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

    def _made_of(self, asked: dict[str, Any], fed: Federation, tensors: dict[str, torch.Tensor]) -> State:
        """The model that this client makes of what it has received and kept."""
        keeps = fields(asked["mine"], {"keeps": (dict, type(None))})["keeps"]
        mine = self._own(tensors, fields(keeps, {"run": int, "from": int}) if keeps else None, fed)
        rng = Rng(asked["seed"], asked["round"])
        made = self._method(asked, fed).mine(_row(nested(tensors, "received")), mine, [self.number], rng)
        return {name: tensor[0] for name, tensor in made.items()}

    def _opened(
        self, letter: Letter, more: Mapping[str, Any]
    ) -> tuple[dict[str, Any], Federation, nn.Module, dict[str, torch.Tensor]]:
        """The header of a letter about models, this node's part of the federation, the model, and the tensors."""
        wanted = {"config": str, "method": str, "model": (dict, type(None)), "full": dict, "clients": int}
        wanted |= {"client": int, "batch": int, "seed": int, "round": int, "same": dict, "ticket": str}
        asked = fields(letter.header, {**wanted, **more})
        if asked["client"] != self.number:
            raise Refused(f"the letter is for client {asked['client']}, and this is client {self.number}")
        key = (asked["config"], asked["full"], asked["model"], asked["clients"], asked["batch"])
        if self._made[0] != key:
            self._made, self._algorithm, self._validation = (key, self._federation(*key)), None, None
        fed, model = self._made[1]
        device = fed.data.x.device
        tensors = {name: tensor.to(device) for name, tensor in repeated(letter.tensors, asked["same"]).items()}
        return asked, fed, model, tensors

    def _method(self, asked: dict[str, Any], fed: Federation) -> Algorithm:
        if self._algorithm is None:
            self._algorithm = make_algorithm(Config.from_yaml(asked["config"]), fed)
        return self._algorithm

    def _own(self, tensors: dict[str, torch.Tensor], keeps: dict[str, Any] | None, fed: Federation) -> Stack:
        """What this client has kept [1, ...]: the version that the letter names, or the start that came with it."""
        again = keeps is not None and keeps["from"]
        found = self._store.read(keeps["run"], keeps["from"]) if again else nested(tensors, "kept")
        return _row({name: tensor.to(fed.data.x.device) for name, tensor in found.items()})

    def _answer(self, kind: str, asked: dict[str, Any], tensors: dict[str, torch.Tensor], **more: Any) -> Letter:
        header = {"kind": kind, "client": self.number, "samples": len(self.split.train), **more}
        return Letter(header | {name: asked[name] for name in ("round", "seed", "ticket")}, tensors)

    def _federation(
        self, config: str, full: dict, spec: dict | None, clients: int, batch: int
    ) -> tuple[Federation, Any]:
        """This node's part of the federation, and the model that it trains.

        The other clients are there only as numbers: each has as many samples as a step, so that steps are as large as
        where all clients are, and none of them is ever read.
        """
        settings = Config.from_yaml(config)
        device = pick_device(settings.device)
        data, local = training(settings, self.data.to(device))
        whole = model_spec(settings, data) if custom_model.is_custom(settings.model) else _spec(full)
        model = create(torch.Generator(), whole).to(device)
        parts = []
        for mine in self.split:
            sizes = torch.full((clients,), batch)
            sizes[self.number] = len(mine)
            samples = torch.arange(len(data.y), len(data.y) + int(sizes.sum()))
            offsets = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
            samples[offsets[self.number] : offsets[self.number + 1]] = mine
            parts.append(Parts(samples, offsets))
        fed = Federation(model, data, Splits(*parts), 1, local, spec=whole, create=lambda rng: create(rng, whole))
        return fed, model if spec is None else make_fleet(model, whole, [_spec(spec)])[0].model


def _spec(values: dict) -> Spec:
    try:
        return Spec.from_dict(values)
    except (ZooError, TypeError) as error:
        raise FLError(f"the letter describes no model: {error}") from None


def _row(state: Mapping[str, torch.Tensor]) -> Stack:
    """A stack of one."""
    return {name: tensor[None] for name, tensor in state.items()}


_KINDS: dict[str, Callable[[Node, Letter], Letter]] = {
    "hello": Node._hello,
    "train": Node._train,
    "visit": Node._visit,
    "score": Node._score,
    "judge": Node._judge,
    "exchange": Node._exchange,
}

"""What a node does: it says what it has, and trains the model that it is sent on its own data."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from fl.base.errors import Diverged, FLError
from fl.base.rng import Rng
from fl.config import Config
from fl.data import Dataset
from fl.deploy.letters import Letter, Refused, fields, nested, repeated
from fl.deploy.objectives import heard
from fl.federation import Federation
from fl.federation.cohort import Cohort
from fl.federation.defence import Defence
from fl.federation.training import LocalObjective, train_cohort
from fl.models import own
from fl.models.create import create
from fl.models.fleet import make_fleet
from fl.partition import Parts, Split, Splits
from fl.runs.assembly import model_spec, pick_device, training
from zoo import Spec, ZooError


@dataclass
class Node:
    """A client with its data.

    Attributes:
        number: which client it is, from 0 on: it selects the random numbers of its batches.
        data: its samples; the test part is not used.
        split: which of them it trains on, validates on and tests on.
        budget: what it says of the model that it can afford: some of "width", "depth" and "budget".
    """

    number: int
    data: Dataset
    split: Split
    budget: Mapping[str, Any] = field(default_factory=dict)
    _made: tuple[Any, Any] = (None, None)

    def answer(self, letter: Letter) -> Letter:
        """What it sends back.

        Raises FLError, which says why, for what it cannot do.
        """
        kind = fields(letter.header, {"kind": str})["kind"]
        if kind not in _KINDS:
            raise Refused(f"a node does not know what to do with {kind!r}: server and nodes need the same version")
        return _KINDS[kind](self, letter)

    def _hello(self, letter: Letter) -> Letter:
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
        asked = fields(
            letter.header,
            {
                **{
                    "config": str,
                    "model": (dict, type(None)),
                    "full": dict,
                    "clients": int,
                    "client": int,
                    "batch": int,
                },
                **{"seed": int, "round": int, "objective": dict, "ascent": (dict, type(None)), "same": dict},
            },
        )
        if asked["client"] != self.number:
            raise Refused(f"the letter is for client {asked['client']}, and this is client {self.number}")
        key = (asked["config"], asked["full"], asked["model"], asked["clients"], asked["batch"])
        if self._made[0] != key:
            self._made = key, self._federation(*key)
        fed, model = self._made[1]
        device = fed.data.x.device
        tensors = {name: tensor.to(device) for name, tensor in repeated(letter.tensors, letter.header["same"]).items()}
        start = {name.removeprefix("state/"): t for name, t in tensors.items() if name.startswith("state/")}
        objective = LocalObjective(heard(asked["objective"]), [nested(tensors, "context")], heard(asked["ascent"]))
        cohort = Cohort([self.number], [model], [start])
        try:
            trained = train_cohort(
                fed, fed.local, None, Defence(), cohort, objective, Rng(asked["seed"], asked["round"])
            )
        except Diverged:
            raise Refused("training diverged: loss or weights became infinite or not a number") from None
        header = {"kind": "trained", "client": self.number, "samples": len(self.split.train)}
        header |= {name: asked[name] for name in ("round", "seed", "ticket") if name in asked}
        state = {f"state/{name}": tensor for name, tensor in trained.states[0].items()}
        return Letter(header, {**state, "loss": trained.loss[0]})

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
        whole = model_spec(settings, data) if own.is_own(settings.model) else _spec(full)
        model = create(torch.Generator(), whole).to(device)
        parts = []
        for mine in self.split:
            sizes = torch.full((clients,), batch)
            sizes[self.number] = len(mine)
            samples = torch.arange(len(data.y), len(data.y) + int(sizes.sum()))
            offsets = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
            samples[offsets[self.number] : offsets[self.number + 1]] = mine
            parts.append(Parts(samples, offsets))
        fed = Federation(model, data, Splits(*parts), 1, local, spec=whole)
        return fed, model if spec is None else make_fleet(model, whole, [_spec(spec)])[0].model


def _spec(values: dict) -> Spec:
    try:
        return Spec.from_dict(values)
    except (ZooError, TypeError) as error:
        raise FLError(f"the letter describes no model: {error}") from None


_KINDS: dict[str, Callable[[Node, Letter], Letter]] = {"hello": Node._hello, "train": Node._train}

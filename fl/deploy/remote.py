"""Clients on other machines, for a federation: a method's client function is a request to each node and its answer."""

import dataclasses
import hashlib
import math
import secrets
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from fl.algorithms import ALGORITHMS
from fl.algorithms.algorithm import Algorithm
from fl.algorithms.parts.secure_round import SecureRecombination
from fl.base.errors import FLError
from fl.base.rng import Rng
from fl.base.torch_private import tree_map
from fl.data import Dataset
from fl.deploy import secret
from fl.deploy.messages import DTYPES, InvalidMessage, NodeMessage, check_tensors, fields, flat, raw, shapes
from fl.deploy.nodes import HEADER, Link, Nodes, Waiting
from fl.federation import Federation
from fl.federation.client_models import ClientModels, Level
from fl.federation.clients import Message, at_nodes
from fl.federation.update import ClientUpdate
from fl.models.architectures import announced
from fl.models.search import Space, largest_within
from fl.partition import Parts, Splits
from fl.runs.evaluate import held_out
from fl.settings import Config
from surgery import State, stack
from zoo import Spec

_MOST = 1 << 63  # what a node says it has measured is below this
_START = "start."  # before the names of the state of clients that have no version yet


class Remote:
    """See `fl.federation.clients.RemoteClients`.

    A client's own state never leaves its node, which keeps a version of it for each round that the server may still
    name. The server stores the numbers: of the run, and of each client's version [clients], 0 for a client that has
    none yet; and the state that such a client begins with.

    Attributes:
        nodes: who is there.
        splits: how many samples each client has.
        dataset: stands in for the data of all clients, and has the test set that the server was given.
        config: the settings of the run, with the number of clients.
        federation: the clients as the server knows them, once it has been built.
    """

    federation: Federation

    def __init__(self, link: Link, config: Config, test: Dataset, waiting: Waiting = Waiting()) -> None:
        (name,) = config.algorithm
        self.labels = ALGORITHMS[name].labels(getattr(config, name, None))
        self.nodes = Nodes(link, waiting, test, self.labels)
        here = [self.nodes.reported[client] for client in range(len(self.nodes.reported))]
        self.splits = _splits([said["sizes"] for said in here])
        self.dataset = self._stand_in(test, here)
        self.config = dataclasses.replace(config, clients=len(here), eval_client_models_every=0)
        self._settings = dataclasses.replace(self.config, name=None, resume=None).to_yaml()
        self._has: dict[int, set[str]] = {}  # the digests of the finished levels that each client's node has
        self._saved: dict[int, Tensor] = {}  # by run: the versions that the last checkpoint names
        self._keys: dict[int, bytes] = {}  # of the clients that are about to recombine their models in secret

    def specs(self, space: Space) -> list[Spec] | None:
        """The architecture of each client, by the width and depth, or the budget, that its node reported."""
        budgets = [self.nodes.reported[client]["budget"] for client in sorted(self.nodes.reported)]
        if not any(budgets):
            return None
        if lacking := [client for client, budget in enumerate(budgets) if not budget]:
            raise FLError(f"client {lacking[0]} reported no width, depth or budget, and others did: give each node one")
        specs = []
        for client, budget in enumerate(budgets):
            if "budget" in budget:
                specs.append(largest_within(space, budget["budget"], self.config.architectures.unit))
            else:
                row = {key: list(v) if isinstance(v, list | tuple) else v for key, v in budget.items()}
                specs += announced(space, [row], f"what client {client} reported")
        return specs

    def begin(self, fed: Federation) -> None:
        """See `RemoteClients.begin`."""
        if fed.attack:
            raise FLError("--attack simulates malicious clients: with real ones leave it out")
        self.federation = fed

    def client_states(self, start: State) -> State:
        """See `RemoteClients.client_states`."""
        if self.federation.defence.clip:
            raise FLError(
                "--defence.clip clips what clients send, and with models of their own on other machines a method sends "
                "only a part of what it trains: leave it out"
            )
        begin = {f"{_START}{name}": tensor for name, tensor in start.items()}
        return {"run": torch.tensor(_number()), "version": torch.zeros(len(self.splits), dtype=torch.int64), **begin}

    def run(
        self, algorithm: Algorithm, message: Message, own: State, clients: Sequence[int], rng: Rng
    ) -> tuple[ClientUpdate, State]:
        """See `RemoteClients.run`."""
        fed, secure = self.federation, next((s for s in algorithm.steps if isinstance(s, SecureRecombination)), None)
        if own:
            self._snapshot(own, rng)
        begin = secret.begin(self, secure, message, clients) if secure else {}
        models, requests, seen = [], [], {}
        for k, client in enumerate(clients):
            row = {name: _row(part, k) for name, part in message.items() if name != "levels"}
            keeps, tensors = self._keeps(own, client) if own else (None, {})
            levels, below = self._levels(message.get("levels", ()), client, seen)
            header = {**self.header("update", client, rng), **begin, "keeps": keeps, "levels": levels}
            header["list"] = isinstance(message.get("model"), list)
            requests.append(NodeMessage(header, {**tensors, **flat(row, "message"), **below}))
            models.append(row.get("model", {}))
        sent = [{}] * len(clients) if secure else models

        def read(k: int, answer: NodeMessage) -> tuple[State, Tensor, bytes]:
            answer, key = secret.key_of(answer) if secure else (answer, b"")
            state, loss = self.trained(answer, requests[k], sent[k])
            flops = fields(answer.header, {"flops": int})["flops"]
            if not 0 <= flops < _MOST:
                raise InvalidMessage(f"it says that it computed {str(flops)[:20]} operations")
            fed.meter.flops += flops
            self._has[clients[k]] = {digest for digest in requests[k].header["levels"] if digest}
            return state, loss, key

        limits = [HEADER + 8 + sum(tensor.nbytes for tensor in state.values()) for state in sent]
        came = self.nodes.exchange(clients, requests, limits, read, rng.round)
        self._forget(clients, came)
        self._keys = {clients[k]: key for k, (_, _, key) in came.items()}
        if own:
            new = own["version"].clone()
            for k in came:
                new[clients[k]] = requests[k].header["keeps"]["as"]
            own = {**own, "version": new}
        return self._update(message, models, came, clients, bool(secure)), own

    def _update(
        self, message: Message, models: Sequence[State], came: dict[int, Any], clients: Sequence[int], secure: bool
    ) -> ClientUpdate:
        """The update of a round; clients whose answer did not come keep their start, and have the size 0."""
        fed, dtype = self.federation, next(loss.dtype for _, loss, _ in came.values())
        lost = torch.full((), torch.nan, dtype=dtype, device=fed.data.x.device)
        loss = torch.stack([came[k][1].to(dtype) if k in came else lost for k in range(len(clients))])
        states = [came[k][0] if k in came and not secure else model for k, model in enumerate(models)]
        sizes = tuple(len(self.splits.train[client]) if k in came else 0 for k, client in enumerate(clients))
        start = message.get("model", {})
        trained = states if isinstance(start, list) else stack(states) if start else {}
        return ClientUpdate(trained, loss, sizes, fed.clipped(trained, start, sizes))

    def recombine(
        self, update: ClientUpdate, message: Message, clients: Sequence[int], secure: SecureRecombination, rng: Rng
    ) -> ClientUpdate:
        """See `RemoteClients.recombine`."""
        return secret.recombine(self, self._keys, update, message["model"], clients, secure, rng)

    def judge(self, what: str, levels: Sequence[Level], more: Sequence[Level | None], mean: bool) -> Tensor:
        """See `RemoteClients.judge`."""
        clients, requests, seen = range(len(self.splits)), [], {}
        for client in clients:
            digests, tensors = self._levels(levels, client, seen)
            keeps, kinds = None, []
            for number, level in enumerate(more):
                used = level is not None and int(level.used[client]) >= 0
                own = used and at_nodes(level.models)
                if own:
                    keeps, first = self._keeps(level.models, client)
                    tensors |= first
                elif used:
                    tensors |= flat(level.state(int(level.used[client])), f"more{number}")
                kinds.append("own" if own else "sent" if used else "")
            header = self.header("judge", client, Rng(0))
            header |= {"what": what, "mean": mean, "levels": digests, "more": kinds, "keeps": keeps}
            requests.append(NodeMessage(header, tensors))

        def read(k: int, answer: NodeMessage) -> list[float]:
            said = fields(answer.header, {"kind": str, "ticket": str, "values": list})
            if said["kind"] != "judged" or said["ticket"] != requests[k].header["ticket"] or answer.tensors:
                raise InvalidMessage("it did not answer what was asked")
            if len(said["values"]) != len(more) or not all(map(_sound, said["values"])):
                raise InvalidMessage("what it says of its levels are no numbers")
            self._has[k] = {digest for digest in requests[k].header["levels"] if digest}
            return said["values"]

        came = self.nodes.exchange(clients, requests, [HEADER] * len(requests), read, None)
        self._forget(clients, came)
        silent = [math.nan] * len(more)
        return torch.tensor([came.get(k, silent) for k in clients], dtype=torch.float64).T

    def score(self, models: ClientModels) -> dict[str, list[dict[str, float]]]:
        """See `RemoteClients.score`."""
        fed, seen = self.federation, {}
        parts, clients = held_out(fed), range(len(self.splits))
        whats = ["accuracy", "loss", "perplexity" if fed.data.text else "f1"]
        requests = [self._question(models, client, parts, seen) for client in clients]

        def read(k: int, answer: NodeMessage) -> dict[str, dict[str, float]]:
            said = fields(answer.header, {"kind": str, "client": int, "ticket": str, "scores": dict})
            wrong = said["kind"] != "scored" or said["ticket"] != requests[k].header["ticket"] or answer.tensors
            if wrong or set(said["scores"]) != set(parts):
                raise InvalidMessage("it did not answer what was asked")
            for row in said["scores"].values():
                if not isinstance(row, dict) or list(row) != whats or not all(map(_sound, row.values())):
                    raise InvalidMessage("its scores are no numbers")
                if any(row[what] < 0 or row[what] > 1 for what in ("accuracy", "f1") if what in row):
                    raise InvalidMessage("its scores are no shares")
            return said["scores"]

        came = self.nodes.exchange(clients, requests, [HEADER] * len(requests), read, None)
        self._forget(clients, came)
        silent = dict.fromkeys(whats, math.nan)
        return {part: [came[k][part] if k in came else silent for k in clients] for part in parts} if came else {}

    def _question(self, models: ClientModels, client: int, parts: Sequence[str], seen: dict) -> NodeMessage:
        """The request that asks a node for the scores of its client's models."""
        own, used = models.own, []
        for level in models.levels:
            if (k := int(level.used[client])) >= 0:
                if at_nodes(level.models):
                    own = level.models
                else:
                    used.append(level.state(k))
        keeps, tensors = self._keeps(own, client) if own else (None, {})
        digests = []
        for number, state in enumerate(used):
            digest = _digest(state, seen)
            known = digest in self._has.get(client, ())
            digests.append(digest if known else "")
            tensors |= {} if known else flat(state, f"level{number}")
        header = {**self.header("score", client, models.rng), "parts": list(parts), "mean": models.mean}
        return NodeMessage({**header, "keeps": keeps, "levels": digests}, tensors)

    def _levels(self, levels: Sequence[Level], client: int, seen: dict) -> tuple[list[str], dict[str, Tensor]]:
        """The digests of a client's models on finished levels, "" for none, and those of the models that its node has
        not got yet.
        """
        digests, tensors = [], {}
        for number, level in enumerate(levels):
            k = int(level.used[client])
            state = level.state(k) if k >= 0 else {}
            digests.append(_digest(state, seen) if state else "")
            if state and digests[-1] not in self._has.get(client, ()):
                tensors |= flat(state, f"level{number}")
        return digests, tensors

    def _forget(self, clients: Sequence[int], came: Collection[int]) -> None:
        """A node that did not answer as it should may have lost its levels: it is sent all of them again."""
        for k, client in enumerate(clients):
            if k not in came:
                self._has.pop(client, None)

    def _keeps(self, own: State, client: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Which version of its state a client takes, and under which number it keeps a new one; and the start for one
        that has none yet.
        """
        run, version = int(own["run"]), int(own["version"][client])
        needed = {version, int(self._saved.get(run, own["version"])[client])} - {0}
        start = {name.removeprefix(_START): tensor for name, tensor in own.items() if name.startswith(_START)}
        keeps = {"run": run, "from": version, "as": _number(), "needed": sorted(needed)}
        return keeps, {} if version else flat(start, "own")

    def _snapshot(self, own: State, rng: Rng) -> None:
        """Remember the versions of the last checkpoint: a run that is resumed from it will ask for these."""
        run = int(own["run"])
        if run not in self._saved or (rng.round - 1) % self.config.checkpoint_every == 0:
            self._saved = {**self._saved, run: own["version"].clone()}

    def header(self, kind: str, client: int, rng: Rng) -> dict[str, Any]:
        """What every request about models says."""
        fed = self.federation
        specs = [dataclasses.asdict(kind.spec) for kind in fed.fleet.architectures] if fed.fleet else []
        return {
            "kind": kind,
            "config": self._settings,
            "method": self.config.algorithm[0],
            "round": rng.round,
            "seed": rng.seed,
            "client": client,
            "clients": len(fed.clients),
            "participants": fed.participants,
            "batch": fed.local.size_of_batches(fed.clients.train),
            "model": dataclasses.asdict(fed.spec),
            "fleet": {"specs": specs, "owned": list(fed.fleet.owned)} if fed.fleet else None,
            "ticket": secrets.token_hex(8),
        }

    def trained(self, answer: NodeMessage, request: NodeMessage, start: State) -> tuple[State, Tensor]:
        """(state, loss) of an answer. Raises InvalidMessage for one that cannot be used.

        Args:
            start: the tensors as they were sent; the answer has the same names, shapes and dtypes.
        """
        said = fields(answer.header, {"kind": str, "round": int, "ticket": str, "client": int, "samples": int})
        for name in ("round", "client", "ticket"):
            if said[name] != request.header[name]:
                if name == "ticket":
                    raise InvalidMessage("it answers another request")
                raise InvalidMessage(f"it answers for {name} {said[name]}, and {request.header[name]} was asked")
        if said["kind"] != "updated":
            raise InvalidMessage(f"it sent {said['kind']!r} instead of a trained model")
        if said["samples"] != self.nodes.reported[said["client"]]["sizes"][0]:
            reported = self.nodes.reported[said["client"]]["sizes"][0]
            raise InvalidMessage(f"it trained on {said['samples']} samples, and reported {reported} at the start")
        tensors = dict(answer.tensors)
        loss = tensors.pop("loss", None)
        if loss is None or loss.ndim or not loss.is_floating_point() or not loss.isfinite():
            raise InvalidMessage("its loss is infinite, not a number, or missing")
        before = flat(start, "state")
        check_tensors(tensors, shapes(before), {name: tensor.cpu() for name, tensor in before.items()})
        device = self.federation.data.x.device
        return {name.removeprefix("state/"): tensor.to(device) for name, tensor in tensors.items()}, loss.to(device)

    def _stand_in(self, test: Dataset, here: Sequence[dict[str, Any]]) -> Dataset:
        """Data of the clients' shapes and sizes, without their content: samples of zeros, which take no memory."""
        count = sum(sum(said["sizes"]) for said in here)
        sample, target = here[0]["sample"], here[0]["target"]
        x = torch.zeros(1, *sample[1:], dtype=DTYPES[sample[0]]).expand(count, *sample[1:])
        y = torch.zeros(1, *target, dtype=torch.int64).expand(count, *target)
        if self.labels:
            order = [torch.arange(len(said["labels"])).repeat_interleave(torch.tensor(said["labels"])) for said in here]
            rest = torch.zeros(count - sum(map(len, order)), dtype=torch.int64)  # validation and test samples
            y = torch.cat([*order, rest])
        return dataclasses.replace(test, x=x, y=y)


def _splits(sizes: Sequence[Sequence[int]]) -> Splits:
    """Parts of these sizes, [clients][3]: first the training samples of all clients, one after another, and so on."""
    parts, begin = [], 0
    for each in zip(*sizes):
        offsets = torch.tensor([0, *each]).cumsum(0)
        end = begin + int(offsets[-1])
        parts.append(Parts(torch.arange(begin, end), offsets))
        begin = end
    return Splits(*parts)


def _row(part: Any, k: int) -> Any:
    """What a message has for one client."""
    return part[k] if isinstance(part, list) else tree_map(lambda tensor: tensor[k], part)


def _number() -> int:
    """That no other run or version has: 63 bits."""
    return secrets.randbits(62) + 1


def _sound(value: Any) -> bool:
    """Whether this is a number that can be averaged. A loss may be nan: a model that has diverged honestly has that.

    >>> [_sound(value) for value in (0.5, 3, math.nan, math.inf, 10**400, True, "1")]
    [True, True, True, False, False, False, False]
    """
    return type(value) in (int, float) and not abs(value) >= _MOST


def _digest(state: State, seen: dict) -> str:
    """Of the names and numbers of a model. `seen` remembers those of one round, in which nothing changes."""
    key = tuple((tensor.data_ptr(), tuple(tensor.shape)) for tensor in state.values())
    if key not in seen:
        hashed = hashlib.sha256()
        for name, tensor in state.items():
            hashed.update(f"{name} {tensor.dtype} {list(tensor.shape)} ".encode())
            hashed.update(raw(tensor))
        seen[key] = hashed.hexdigest()
    return seen[key]

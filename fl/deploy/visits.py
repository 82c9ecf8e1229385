"""The server's side of visits and scores: letters to nodes that keep something, and what may come back."""

import hashlib
import math
import secrets
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from fl.base.errors import FLError
from fl.base.rng import Rng
from fl.deploy.letters import Letter, Refused, fields, flat, once, raw
from fl.federation import traffic
from fl.federation.cohort import per_client
from fl.federation.own import AtClients, Level, Own
from fl.federation.trained import Trained
from fl.federation.visit import Visit
from surgery import Stack, State

_HEADER = 1 << 20  # bytes that an answer may have beside its tensors
_MOST = 1 << 63  # what a node says it has measured is below this


class Visits:
    """What `fl.deploy.remote.Remote` asks of nodes beside plain training.

    Args:
        remote: who carries the letters.
    """

    def __init__(self, remote: Any) -> None:
        self._remote = remote
        self._has: dict[int, set[str]] = {}  # the digests of the finished levels that each client's node has
        self._saved: dict[int, Tensor] = {}  # by run: the versions that the last checkpoint names

    def kept(self, clients: int) -> State:
        """See `Elsewhere.kept`."""
        return {"run": torch.tensor(_number()), "version": torch.zeros(clients, dtype=torch.int64)}

    def visit(
        self,
        fed: Any,
        one: Visit,
        received: Stack,
        mine: State,
        start: State,
        clients: Sequence[int],
        rng: Rng,
        context: Any = None,
        levels: Sequence[Level] | None = None,
    ) -> tuple[Trained, State]:
        """See `Elsewhere.visit`."""
        if fed.defence.clip:
            raise FLError(
                "--defence.clip clips what clients send, and with models of their own on other machines a method sends "
                "only a part of what it trains: leave it out"
            )
        rows = per_client(received) if received else [{}] * len(clients)
        values = per_client(context) if context else [{}] * len(clients)
        if mine:
            self._snapshot(mine, rng)
        letters, sent, seen = [], [], {}
        for client, row, value in zip(clients, rows, values):
            keeps, tensors = self._keeps(mine, start, client) if mine else (None, {})
            if keeps:
                keeps["as"] = _number()
            header = {**self._remote.header("visit", client, rng), "visit": one.name, "keeps": keeps, "levels": None}
            tensors |= {**flat(row, "received"), **flat(value, "context")}
            if levels is not None:
                header["levels"], below = self._levels(levels, client, seen)
                tensors |= below
            packed, same = once(tensors)
            letters.append(Letter({**header, "same": same}, packed))
            sent.append({name: tensor for name, tensor in row.items() if name not in one.withheld})
        limits = [_HEADER + 8 + sum(tensor.nbytes for tensor in state.values()) for state in sent]

        def read(k: int, answer: Letter) -> tuple[State, Tensor]:
            result = self._remote.trained(answer, letters[k], sent[k], "visited")
            flops = fields(answer.header, {"flops": int})["flops"]
            if not 0 <= flops < _MOST:
                raise Refused(f"it says that it computed {str(flops)[:20]} operations")
            fed.meter.flops += flops
            self._has[clients[k]] = {digest for digest in letters[k].header["levels"] or () if digest}
            return result

        came = self._remote.exchange(clients, letters, limits, read, rng.round)
        self._forget(clients, came)
        if mine:
            mine = {**mine, "version": self._versions(mine, clients, letters, came)}
        lost = torch.full((), torch.nan, device=fed.data.x.device)
        states = [came[k][0] if k in came else sent[k] for k in range(len(clients))]
        stacked = {name: torch.stack([state[name] for state in states]) for name in states[0]}
        loss = torch.stack([came[k][1] if k in came else lost for k in range(len(clients))])
        sizes = tuple(len(fed.clients.train[client]) if k in came else 0 for k, client in enumerate(clients))
        metrics = traffic.count(received, sizes) if received else {}
        return Trained(stacked, loss, sizes, metrics, stacked), mine

    def judge(self, fed: Any, what: str, levels: Sequence[Level], more: Sequence[Level | None], mean: bool) -> Tensor:
        """See `Elsewhere.judge`."""
        clients, letters, seen = range(len(fed.clients)), [], {}
        for client in clients:
            header: dict[str, Any] = {"what": what, "mean": mean, "mine": None, "more": []}
            header["levels"], tensors = self._levels(levels, client, seen)
            for number, level in enumerate(more):
                used = level is not None and int(level.used[client]) >= 0
                own = used and isinstance(level.models, AtClients)
                if own:
                    header["mine"], first = self._mine(level.models, client)
                    tensors |= first
                elif used:
                    tensors |= flat(level.state(int(level.used[client])), f"more{number}")
                header["more"].append("mine" if own else "sent" if used else "")
            packed, same = once(tensors)
            letters.append(Letter({**self._remote.header("judge", client, Rng(0)), **header, "same": same}, packed))

        def read(k: int, answer: Letter) -> list[float]:
            said = fields(answer.header, {"kind": str, "ticket": str, "values": list})
            if said["kind"] != "judged" or said["ticket"] != letters[k].header["ticket"] or answer.tensors:
                raise Refused("it did not answer what was asked")
            if len(said["values"]) != len(more) or not all(map(_sound, said["values"])):
                raise Refused("what it says of its levels are no numbers")
            self._has[k] = {digest for digest in letters[k].header["levels"] if digest}
            return said["values"]

        came = self._remote.exchange(clients, letters, [_HEADER] * len(letters), read, None)
        self._forget(clients, came)
        silent = [math.nan] * len(more)
        return torch.tensor([came.get(k, silent) for k in clients], dtype=torch.float64).T

    def score(self, fed: Any, own: Own, parts: Sequence[str]) -> dict[str, list[dict[str, float]]]:
        """See `Elsewhere.score`.

        Args:
            parts: the held-out parts that are scored: "valid", "test".
        """
        clients, whats = range(len(fed.clients)), ["accuracy", "loss", "perplexity" if fed.data.text else "f1"]
        seen: dict = {}
        letters = [self._question(fed, own, client, parts, seen) for client in clients]

        def read(k: int, answer: Letter) -> dict[str, dict[str, float]]:
            said = fields(answer.header, {"kind": str, "client": int, "ticket": str, "scores": dict})
            wrong = said["kind"] != "scored" or said["ticket"] != letters[k].header["ticket"] or answer.tensors
            if wrong or set(said["scores"]) != set(parts):
                raise Refused("it did not answer what was asked")
            for row in said["scores"].values():
                if not isinstance(row, dict) or list(row) != whats or not all(map(_sound, row.values())):
                    raise Refused("its scores are no numbers")
                if any(row[what] < 0 or row[what] > 1 for what in ("accuracy", "f1") if what in row):
                    raise Refused("its scores are no shares")
            return said["scores"]

        came = self._remote.exchange(clients, letters, [_HEADER] * len(letters), read, None)
        self._forget(clients, came)
        silent = dict.fromkeys(whats, math.nan)
        return {part: [came[k][part] if k in came else silent for k in clients] for part in parts} if came else {}

    def _question(self, fed: Any, own: Own, client: int, parts: Sequence[str], seen: dict) -> Letter:
        tensors: dict[str, Tensor] = {}
        header: dict[str, Any] = {"parts": list(parts), "mean": own.mean, "mine": None, "levels": []}
        rng, spec = Rng(0), None
        for level in own.levels:
            if (k := int(level.used[client])) < 0:
                continue
            if isinstance(level.models, AtClients):
                rng = level.models.rng
                header["mine"], first = self._mine(level.models, client)
                tensors |= first
            else:
                state, number = level.state(k), len(header["levels"])
                digest = _digest(state, seen)
                known = digest in self._has.get(client, ())
                header["levels"].append(digest if known else "")
                tensors |= {} if known else flat(state, f"level{number}")
                spec = fed.fleet[client].spec if level.modules is not None and fed.fleet else spec
        packed, same = once(tensors)
        return Letter({**self._remote.header("score", client, rng, spec), **header, "same": same}, packed)

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

    def _mine(self, models: AtClients, client: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Of what a client makes its own model: what the letter says, and its tensors."""
        keeps, first = self._keeps(models.kept, models.start, client) if models.kept else (None, {})
        row = {name: tensor[client] for name, tensor in models.received.items()}
        return {"keeps": keeps}, {**flat(row, "received"), **first}

    def _versions(
        self, mine: State, clients: Sequence[int], letters: Sequence[Letter], came: Collection[int]
    ) -> Tensor:
        """The versions that clients keep after a round: new ones of those whose answers are used."""
        version = mine["version"].clone()
        for k in came:
            version[clients[k]] = letters[k].header["keeps"]["as"]
        return version

    def _keeps(self, mine: State, start: State, client: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Which version a client takes, and the start for one that has none yet."""
        run, version = int(mine["run"]), int(mine["version"][client])
        needed = {version, int(self._saved.get(run, mine["version"])[client])} - {0}
        return {"run": run, "from": version, "needed": sorted(needed)}, {} if version else flat(start, "kept")

    def _snapshot(self, mine: State, rng: Rng) -> None:
        """Remember the versions of the last checkpoint: a run that is resumed from it will ask for these."""
        run = int(mine["run"])
        if run not in self._saved or (rng.round - 1) % self._remote.config.checkpoint_every == 0:
            self._saved = {**self._saved, run: mine["version"].clone()}


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

"""The server's side of visits and scores: letters to nodes that keep something, and what may come back."""

import math
import secrets
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fl.base.errors import FLError
from fl.base.rng import Rng
from fl.deploy.letters import Letter, Refused, fields, flat, once
from fl.federation import traffic
from fl.federation.cohort import per_client
from fl.federation.own import AtClients, Own
from fl.federation.trained import Trained
from fl.federation.visit import Visit
from surgery import Stack, State

_HEADER = 1 << 20  # bytes that an answer may have beside its tensors


class Visits:
    """What `fl.deploy.remote.Remote` asks of nodes beside plain training.

    Args:
        remote: who carries the letters.
    """

    def __init__(self, remote: Any) -> None:
        self._remote = remote
        self._saved: dict[int, Tensor] = {}  # by run: the versions that the last checkpoint names

    def kept(self, clients: int) -> State:
        """See `Elsewhere.kept`."""
        return {"run": torch.tensor(_number()), "version": torch.zeros(clients, dtype=torch.int64)}

    def visit(
        self, fed: Any, one: Visit, received: Stack, mine: State, start: State, clients: Sequence[int], rng: Rng
    ) -> tuple[Trained, State]:
        """See `Elsewhere.visit`."""
        if fed.defence.clip:
            raise FLError(
                "--defence.clip clips what clients send, and with models of their own on other machines a method sends "
                "only a part of what it trains: leave it out"
            )
        rows = per_client(received) if received else [{}] * len(clients)
        self._snapshot(mine, rng)
        letters, sent = [], []
        for client, row in zip(clients, rows):
            keeps, tensors = self._keeps(mine, start, client)
            keeps["as"] = _number()
            header = {**self._remote.header("visit", client, rng), "visit": one.run.__name__, "keeps": keeps}
            packed, same = once({**flat(row, "received"), **tensors})
            letters.append(Letter({**header, "same": same}, packed))
            sent.append({name: tensor for name, tensor in row.items() if name not in one.withheld})
        limits = [_HEADER + 8 + sum(tensor.nbytes for tensor in state.values()) for state in sent]

        def read(k: int, answer: Letter) -> tuple[State, Tensor]:
            result = self._remote.trained(answer, letters[k], sent[k], "visited")
            fed.meter.flops += max(0, fields(answer.header, {"flops": int})["flops"])
            return result

        came = self._remote.exchange(clients, letters, limits, read, rng.round)
        version = mine["version"].clone()
        for k in came:
            version[clients[k]] = letters[k].header["keeps"]["as"]
        lost = torch.full((), torch.nan, device=fed.data.x.device)
        states = [came[k][0] if k in came else sent[k] for k in range(len(clients))]
        stacked = {name: torch.stack([state[name] for state in states]) for name in states[0]}
        loss = torch.stack([came[k][1] if k in came else lost for k in range(len(clients))])
        sizes = tuple(len(fed.clients.train[client]) if k in came else 0 for k, client in enumerate(clients))
        metrics = traffic.count(received, sizes) if received else {}
        return Trained(stacked, loss, sizes, metrics, stacked), {**mine, "version": version}

    def score(self, fed: Any, own: Own, parts: Sequence[str]) -> dict[str, list[dict[str, float]]]:
        """See `Elsewhere.score`.

        Args:
            parts: the held-out parts that are scored: "valid", "test".
        """
        clients, whats = range(len(fed.clients)), ["accuracy", "loss", "perplexity" if fed.data.text else "f1"]
        letters = [self._question(fed, own, client, parts) for client in clients]

        def read(k: int, answer: Letter) -> dict[str, dict[str, float]]:
            said = fields(answer.header, {"kind": str, "client": int, "ticket": str, "scores": dict})
            wrong = said["kind"] != "scored" or said["ticket"] != letters[k].header["ticket"] or answer.tensors
            if wrong or set(said["scores"]) != set(parts):
                raise Refused("it did not answer what was asked")
            for row in said["scores"].values():
                if not isinstance(row, dict) or list(row) != whats or not all(map(_sound, row.values())):
                    raise Refused("its scores are no numbers")
            return said["scores"]

        came = self._remote.exchange(clients, letters, [_HEADER] * len(letters), read, None)
        silent = dict.fromkeys(whats, math.nan)
        return {part: [came[k][part] if k in came else silent for k in clients] for part in parts} if came else {}

    def _question(self, fed: Any, own: Own, client: int, parts: Sequence[str]) -> Letter:
        tensors: dict[str, Tensor] = {}
        header: dict[str, Any] = {"parts": list(parts), "mean": own.mean, "mine": None, "levels": 0}
        rng, spec = Rng(0), None
        for level in own.levels:
            if (k := int(level.used[client])) < 0:
                continue
            if isinstance(level.models, AtClients):
                received, mine, start, rng = level.models
                keeps, first = self._keeps(mine, start, client) if mine else (None, {})
                row = {name: tensor[client] for name, tensor in received.items()}
                tensors |= {**flat(row, "received"), **first}
                header["mine"] = {"keeps": keeps}
            else:
                tensors |= flat(level.state(k), f"level{header['levels']}")
                header["levels"] += 1
                spec = fed.fleet[client].spec if level.modules is not None and fed.fleet else spec
        packed, same = once(tensors)
        return Letter({**self._remote.header("score", client, rng, spec), **header, "same": same}, packed)

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
    return type(value) in (int, float)

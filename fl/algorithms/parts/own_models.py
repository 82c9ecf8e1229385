"""The models that never leave their clients, which may be of any architectures."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

import surgery
from fl.algorithms.algorithm import Algorithm
from fl.algorithms.parts.personal import with_own_models
from fl.base.errors import FLError
from fl.federation import Federation
from fl.federation.client_models import ClientModels, Level
from fl.federation.clients import CLIENTS
from fl.federation.cohort import States, select
from surgery import Stack, State


class OwnModels:
    """Personal models, each of its client's architecture.

    Of one architecture they are the server's part `CLIENTS`, a stack. Of several, each client's row of that part has
    all of its tensors one after another, filled up to the length of the longest: an entry for each dtype.

    Attributes:
        modules: the architectures that occur.
        owned: for each client, which of these it has.
    """

    def __init__(self, fed: Federation) -> None:
        self.fed, fleet = fed, fed.fleet_or_uniform
        self.modules: list[nn.Module] = [kind.model for kind in fleet.architectures]
        self.owned = fleet.owned
        self.several = len(self.modules) > 1
        if self.several and not fed.transport.has_data:
            raise FLError("clients on other machines have one architecture: give one model", code="unsupported")
        self._forms = [{n: (t.dtype, t.shape) for n, t in surgery.state(module).items()} for module in self.modules]
        self._most: dict[str, int] = {}
        for form in self._forms:
            lengths: dict[str, int] = {}
            for dtype, shape in form.values():
                lengths[_key(dtype)] = lengths.get(_key(dtype), 0) + shape.numel()
            self._most |= {key: max(n, self._most.get(key, 0)) for key, n in lengths.items()}

    def algorithm(self) -> Algorithm:
        """FedAvg; clients predict with these models, which start as the initial ones."""
        fed, plain = self.fed, with_own_models(self.fed)
        if not self.several:
            return plain
        modules = [self.modules[kind] for kind in self.owned]

        def init():
            rows = [self._row({n: t.clone() for n, t in surgery.state(module).items()}) for module in self.modules]
            return {
                "global": fed.initial(),
                CLIENTS: {key: torch.stack([rows[k][key] for k in self.owned]) for key in self._most},
            }

        def models(server):
            states = self.unpack(server[CLIENTS], range(len(fed.clients)))
            return ClientModels([Level(states, torch.arange(len(fed.clients)), modules)])

        return replace(plain, init=init, models=models)

    def unpack(self, client_states: Stack, clients: Sequence[int]) -> States:
        """Return some clients' models from their rows: views, or the stack.

        There is a stack for one architecture, and a list of views for several.
        """
        if not self.several:
            return client_states
        states = []
        for row, client in enumerate(clients):
            state, at = {}, dict.fromkeys(self._most, 0)
            for name, (dtype, shape) in self._forms[self.owned[client]].items():
                first = at[_key(dtype)]
                at[_key(dtype)] += shape.numel()
                state[name] = client_states[_key(dtype)][row, first : at[_key(dtype)]].view(shape)
            states.append(state)
        return states

    def pack(self, states: States) -> Stack:
        """Undo `unpack`."""
        if not self.several:
            return states
        rows = [self._row(state) for state in states]
        return {key: torch.stack([row[key] for row in rows]) for key in self._most}

    def mean(self, client_states: Stack, otherwise: State) -> State:
        """Return a stranger's model: the mean of all clients', weighted by samples.

        Of several architectures it is the mean of those that have the global model's, and `otherwise` if none has.
        """
        if not self.several:
            return self.fed.mean_of_clients(client_states, otherwise)
        clients = [k for k, kind in enumerate(self.owned) if self.modules[kind] is self.fed.model]
        if not clients:
            return otherwise
        models = surgery.stack(self.unpack(select(client_states, clients), clients))
        return self.fed.keep_frozen(models, surgery.average(models, weights=self.fed.clients.train.sizes[clients]))

    def _row(self, state: State) -> dict[str, Tensor]:
        parts: dict[str, list[Tensor]] = {key: [] for key in self._most}
        for tensor in state.values():
            parts[_key(tensor.dtype)].append(tensor.flatten())
        device = self.fed.data.device
        row = {}
        for key, flat in parts.items():
            fill = self._most[key] - sum(map(len, flat))
            row[key] = torch.cat([*flat, torch.zeros(fill, dtype=getattr(torch, key), device=device)])
        return row


def _key(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

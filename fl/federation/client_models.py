"""The models that clients predict with.

One for all, one of several, a personal one, or the sum of some of these.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple, TypeAlias
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from fl.base.errors import FLError
from fl.base.rng import Rng
from fl.data.inputs import Inputs
from fl.federation.cohort import States, select
from fl.federation.inference import lacks_statistics
from surgery import Stack, State, broadcast
from surgery.errors import first_line, is_out_of_memory
from surgery.transfer import upload

_log = logging.getLogger("fl")

_FEW = 500  # samples of a model that predicts beside others; a model with more keeps the device busy by itself
_SIDE_BY_SIDE = 4 * _FEW  # samples of all models that predict at once
_ALONE: WeakSet[nn.Module] = WeakSet()
"""Models that do not predict side by side."""


class Level(NamedTuple):
    """Models, and the one of them that each client uses.

    Attributes:
        models: a stack, or a list of states; the server's part `fl.federation.clients.CLIENTS` if they are
            personal models.
        used: the number of each client's model, -1 for none: int64 [clients], on the CPU.
        modules: the architecture of each of the models; None: all have the federation's.
    """

    models: States
    used: Tensor
    modules: Sequence[nn.Module] | None = None

    def state(self, k: int) -> State:
        """Return one of the models."""
        return {n: t[k] for n, t in self.models.items()} if isinstance(self.models, dict) else self.models[k]


_NOTHING: Stack = {}


class ClientModels(NamedTuple):
    """The models with which clients predict: the sum of their logits on all levels.

    Attributes:
        mean: whether the mean of the logits is taken, in place of their sum.
        rng, client_states: with which clients on other machines make their models of these, where the method says so
            (`Algorithm.personalize`): the random streams, and the server's part `fl.federation.clients.CLIENTS`.
    """

    levels: Sequence[Level]
    mean: bool = False
    rng: Rng = Rng(0)
    client_states: Stack = _NOTHING


def share_model(state: State, clients: int) -> ClientModels:
    """Return one model for all clients."""
    return ClientModels([Level([state], torch.zeros(clients, dtype=torch.int64))])


def personal(models: Stack, clients: int) -> ClientModels:
    """Return a model for each client."""
    return ClientModels([Level(models, torch.arange(clients))])


def select_first_level(models: ClientModels, clients: Sequence[int]) -> Stack:
    """Return the model of each of some clients on the first level, [K, ...].

    >>> select_first_level(share_model({"w": torch.ones(1)}, clients=3), [0, 2])["w"].flatten()
    tensor([1., 1.])
    """
    if len(models.levels) != 1:
        raise FLError(
            f"clients make their model of one, and here each is given {len(models.levels)}", code="unsupported"
        )
    level = models.levels[0]
    rows = level.used[list(clients)].tolist()
    if len(set(rows)) == 1:
        return broadcast(level.state(rows[0]), len(rows))
    return select(level.models, rows, stacked=True)


def predict(call: Callable[..., Tensor], levels: Sequence[Level], client: int, x: Inputs, mean: bool) -> Tensor | None:
    """Return the sum (or mean) of a client's logits over the levels.

    None if the client has no model at all.

    Args:
        call: (model, samples) -> logits; it is also given the architecture where the level has several.
    """
    total, used = None, 0
    for level in levels:
        if (k := int(level.used[client])) >= 0:
            logits = call(level.state(k), x, *([level.modules[k]] if level.modules else ()))
            total, used = logits if total is None else total + logits, used + 1
    return total / used if mean and used else total


def count(levels: Sequence[Level], clients: int) -> Tensor:
    """On how many of the levels each client has a model: int64 [clients]."""
    return sum(((level.used >= 0).long() for level in levels), torch.zeros(clients, dtype=torch.int64))


def predict_all(fed: Any, models: ClientModels, samples: Tensor, owners: Tensor) -> Tensor:
    """Return logits [M, classes] of samples, each as its owner predicts it.

    Of text they are [M, T, classes].

    Args:
        samples: of the data's training part, int64 [M], on the CPU.
        owners: the client of each, int64 [M], on the CPU.
    """
    total: Any = sum(logits(fed, level, samples, owners) for level in models.levels)
    if not models.mean:
        return total
    used = count(models.levels, len(fed.clients)).clamp(min=1)[owners]
    return total / upload(used, total.device).view(-1, *[1] * (total.ndim - 1))


def logits(fed: Any, level: Level, samples: Tensor, owners: Tensor) -> Tensor:
    """Return the logits of each sample by its owner's model on a level, or else 0.

    See `predict_all`.
    """
    device = fed.data.device
    used, order = level.used[owners].sort(stable=True)  # so that samples are looked up once for all models
    models, sizes = (column.tolist() for column in used.unique_consecutive(return_counts=True))
    places, rows = (upload(index, device).split(sizes) for index in (order, samples[order]))
    groups = [group for group in zip(models, places, rows) if group[0] >= 0]
    # One row more than there are samples: models that predict side by side write there what fills them up.
    dtype = torch.promote_types(next(fed.model.parameters()).dtype, torch.float32)
    result = torch.zeros(len(samples) + 1, *fed.data.outputs, dtype=dtype, device=device)
    small = [group for group in groups if len(group[1]) <= _FEW] if _stackable(fed, level) else []
    large = [group for group in groups if len(group[1]) > _FEW] if small else groups
    for at, outputs in chain(_predict_one_by_one(fed, level, large), _side_by_side(fed, level, small)):
        result[at] = outputs.to(result)
    return result[:-1]


_Group: TypeAlias = tuple[int, Tensor, Tensor]
"""A model, the places of its samples in the result, and the samples."""


def _predict_one_by_one(fed: Any, level: Level, groups: Sequence[_Group]) -> Iterator[tuple[Tensor, Tensor]]:
    """(places, logits) of each model's samples."""
    for k, at, rows in groups:
        module = None if level.modules is None else level.modules[k]
        yield at, fed.predict(level.state(k), fed.data.samples_at(rows), module)


def _stackable(fed: Any, level: Level) -> bool:
    """Return whether models predict side by side: on an accelerator.

    There one after another would wait for launches.
    """
    if fed.data.device.type == "cpu" or not isinstance(level.models, dict) or fed.model in _ALONE:
        return False
    return not lacks_statistics(fed.model, level.models)


def _side_by_side(fed: Any, level: Level, groups: Sequence[_Group]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the same, with models that have about equally many samples side by side."""
    if not groups:
        return
    groups = sorted(groups, key=lambda group: -len(group[2]))
    numbers = upload(torch.tensor([k for k, _, _ in groups]), fed.data.device)
    first = 0
    while first < len(groups):
        some = groups[first : first + max(1, _SIDE_BY_SIDE // len(groups[first][2]))]
        chosen = numbers[first : first + len(some)]
        models = {name: tensor.index_select(0, chosen) for name, tensor in level.models.items()}
        rows = pad_sequence([rows for _, _, rows in some], batch_first=True)
        at = pad_sequence([at for _, at, _ in some], batch_first=True, padding_value=-1)
        reason = ""
        try:
            outputs = fed.predict_each(models, fed.data.samples_at(rows))
        except Exception as error:  # one by one the models may work, or else raise it again
            reason = first_line(error)
            if not is_out_of_memory(error):
                _ALONE.add(fed.model)
        if reason:  # out of the handler, which holds the memory of what failed
            _log.warning("warning: %s predicts for one client after another: %s", type(fed.model).__name__, reason)
            yield from _predict_one_by_one(fed, level, groups[first:])
            return
        yield at, outputs
        first += len(some)

"""How a round's clients train, honest and malicious ones, and what of it reaches the server."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from fl.base.rng import Rng
from fl.engine import Group, Job, Trained, train
from fl.engine.batches import make_batches
from fl.engine.objectives import Ascent, Objective, masked
from fl.engine.work import flops
from fl.federation import traffic
from fl.federation.attack import States
from fl.federation.divergence import drop_failed, restored
from fl.federation.population import Population
from surgery import Stack, State, stack, unstack
from surgery.transfer import upload


class Aim(NamedTuple):
    """What clients minimise, and how.

    Attributes:
        objective, ascent: see `fl.engine.objectives`.
        context: the objective's input: tensors with a leading axis K, or for a list of states a list of K contexts.
        beside: [N, ...], values beside each of the data's training samples.
    """

    objective: Objective
    context: Any
    ascent: Ascent | None = None
    beside: Tensor | None = None


def train_cohort(
    fed: Population, models: Sequence[nn.Module], starts: States, clients: Sequence[int], aim: Aim, rng: Rng
) -> Trained:
    """Train the k-th of the clients with the k-th of the models, from the k-th of the starts.

    Malicious clients train a second time, on spoilt data, and send what they make of both. Clients that failed are
    dropped, updates clipped if the defence says so, what is computed and sent is counted.

    Args:
        starts: a stack, if all have the federation's model, or a list of states.

    Raises:
        FLError: if all clients have to be dropped.
    """
    run, pick = (_stacked, _rows) if isinstance(starts, dict) else (_mixed, _entries)
    if fed.masked:
        aim = _masked(aim, fed.held(clients))
    trained = run(fed, models, starts, clients, aim, rng)
    if rows := fed.attack.rows(clients) if fed.attack else []:
        spoilt = replace(fed, data=fed.attack.data, attack=None)
        bad = aim._replace(context=pick(aim.context, rows))
        dark = run(spoilt, _entries(models, rows), pick(starts, rows), _entries(clients, rows), bad, rng)
        sent = fed.attack.amplified(trained.states, starts, dark.states, rows, _trainable(fed))
        trained = trained._replace(tampered=sent)
    _meter(fed, models, clients, 2 if aim.ascent else 1)
    return _received(fed, trained, starts, clients, rng.round)


def make_group(fed: Population, model: nn.Module, starts: Stack, clients: Sequence[int], aim: Aim, rng: Rng) -> Group:
    """Clients of one architecture, as the engine takes them."""
    parts = [fed.clients.train[client] for client in clients]
    x = fed.data.x
    batches = make_batches(
        parts, clients, fed.epochs, fed.batch_size, rng, x.device, fed.repeats, fed.augment, width=x.shape[-1]
    )
    optimizer = fed.optimizer._replace(lr=fed.optimizer.lr * fed.schedule(rng.round))
    settings = (optimizer, aim.objective, aim.ascent, fed.precision, aim.beside)
    return Job(model, fed.data, batches, *settings), starts, aim.context


def _stacked(
    fed: Population, models: Sequence[nn.Module], starts: Stack, clients: Sequence[int], aim: Aim, rng: Rng
) -> Trained:
    pieces = []
    for some in _chunks(fed, clients):
        mine, context = _rows((starts, aim.context), some)
        pieces += train(
            [make_group(fed, models[0], mine, clients[some], aim._replace(context=context), rng)], fed.backend
        )
    if len(pieces) == 1:
        return pieces[0]
    return Trained(*tree_map(lambda *parts: torch.cat(parts), *[(p.states, p.loss) for p in pieces]))


def _mixed(
    fed: Population, models: Sequence[nn.Module], starts: Sequence[State], clients: Sequence[int], aim: Aim, rng: Rng
) -> Trained:
    states, losses = [{}] * len(clients), [torch.empty(0)] * len(clients)
    for some in _chunks(fed, clients):
        alike: dict[int, list[int]] = {}
        for k in range(len(clients))[some]:
            alike.setdefault(id(models[k]), []).append(k)
        groups = []
        for members in alike.values():
            mine = stack(_entries(starts, members))
            context = tree_map(lambda *each: torch.stack(each), *_entries(aim.context, members))
            same = aim._replace(context=context)
            groups.append(make_group(fed, models[members[0]], mine, _entries(clients, members), same, rng))
        for members, trained in zip(alike.values(), train(groups, fed.backend)):
            for k, state, loss in zip(members, unstack(trained.states), trained.loss):
                states[k], losses[k] = state, loss
    return Trained(states, torch.stack(losses))


def _masked(aim: Aim, held: Tensor) -> Aim:
    if isinstance(aim.context, list):
        context = [{**mine, "held": row} for mine, row in zip(aim.context, held)]
    else:
        context = {**aim.context, "held": held}
    return aim._replace(objective=masked(aim.objective), context=context)


def _rows(stacked: Any, index: Sequence[int] | slice) -> Any:
    """Some entries of stacks in nested dicts: views for a slice."""
    if isinstance(index, slice):
        return tree_map(lambda tensor: tensor[index], stacked)
    host, moved = torch.tensor(index, dtype=torch.int64), {}
    for device in {tensor.device for tensor in tree_leaves(stacked)}:
        moved[device] = upload(host, device)
    return tree_map(lambda tensor: tensor.index_select(0, moved[tensor.device]), stacked)


def _entries(each: Sequence, index: Sequence[int]) -> list:
    return [each[k] for k in index]


def _chunks(fed: Population, clients: Sequence[int]) -> list[slice]:
    size = fed.chunk or len(clients)
    return [slice(first, first + size) for first in range(0, len(clients), size)]


def _trainable(fed: Population) -> set[str]:
    return {name for name, p in fed.model.named_parameters() if p.requires_grad}


def _meter(fed: Population, models: Sequence[nn.Module], clients: Sequence[int], passes: int) -> None:
    """What honest training of this kind computes."""
    for model, client in zip(models, clients):
        samples = len(fed.clients.train[client]) * fed.epochs * fed.repeats * passes
        fed.meter.flops += samples * flops(model, fed.data)


def _received(fed: Population, trained: Trained, starts: States, clients: Sequence[int], round: int) -> Trained:
    sizes = [len(fed.clients.train[client]) for client in clients]
    arrived = drop_failed(trained._replace(states=trained.sent), starts, clients, sizes, round)
    states, sent = arrived.states, arrived.states
    if trained.tampered is not None:
        states = restored(trained.states, starts, [size > 0 for size in arrived.sizes])
    if fed.defence.clip:
        sent = fed.defence.clipped(sent, starts, arrived.sizes, _trainable(fed))
    metrics = traffic.count(starts, arrived.sizes)
    return Trained(states, trained.loss, arrived.sizes, metrics, None if sent is states else sent)

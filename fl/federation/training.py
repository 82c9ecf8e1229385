"""How the honest and the malicious clients of a round train, and what reaches the server."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fl.base.rng import Rng
from fl.distributed import current
from fl.engine import Group, Job, Results, progress, train
from fl.engine.batches import filled, make_batches
from fl.engine.objectives import Ascent, Objective, cross_entropy
from fl.engine.work import flops
from fl.federation import traffic
from fl.federation.attack import Attack
from fl.federation.classes import classes_held
from fl.federation.cohort import Cohort, States, joined, per_client, select, select_stacked, with_entry
from fl.federation.defence import Defence
from fl.federation.divergence import drop_failed, restored
from fl.federation.local_training import LocalTraining
from fl.federation.population import Population
from fl.federation.trained import Trained
from surgery import Stack, State, stack


class LocalObjective(NamedTuple):
    """What clients minimise, and how.

    Attributes:
        objective, ascent: see `fl.engine.objectives`.
        context: the objective's input: tensors with a leading axis K, or for a list of states a list of K contexts.
        per_sample: [N, ...], values for each of the training samples.
    """

    objective: Objective = cross_entropy
    context: Any = None
    ascent: Ascent | None = None
    per_sample: Tensor | None = None


def train_cohort(
    population: Population,
    local: LocalTraining,
    attack: Attack | None,
    defence: Defence,
    cohort: Cohort,
    objective: LocalObjective,
    rng: Rng,
) -> Trained:
    """Train the clients of a cohort from its states.

    Malicious clients train a second time, on spoilt data, and send a mixture of the two results. Clients that diverge
    are dropped, updates are clipped if the defence says so, and what is sent is counted.

    Raises:
        Diverged: if all clients have to be dropped.
    """
    clients, starts = cohort.clients, cohort.states
    if population.elsewhere:
        states, loss, arrived = population.elsewhere.train(population, local, cohort, objective, rng)
        received = defence.clipped(states, starts, arrived, population.trainable) if defence.clip else states
        return Trained(states, loss, tuple(arrived), traffic.count(starts, arrived), received)
    states, loss = _train(population, local, cohort, objective, rng)
    rows = attack.rows(clients) if attack else []
    sent = states
    if rows:
        malicious, spoilt = cohort.select(rows), replace(population, data=attack.data)
        context = select(objective.context, rows)
        if local.masked:  # their honest training does not see the classes that only the spoilt samples have
            context = with_entry(context, "held", classes_held(spoilt.data, spoilt.clients.train, malicious.clients))
        learnt, _ = _train(spoilt, local, malicious, objective._replace(context=context), rng)
        sent = attack.amplified(states, malicious.states, learnt, rows, population.trainable)
    sizes = [len(population.clients.train[client]) for client in clients]
    received, arrived = drop_failed(sent, loss, starts, clients, sizes, rng.round)
    states = received if sent is states else restored(states, starts, arrived)
    if defence.clip:
        received = defence.clipped(received, starts, arrived, population.trainable)
    return Trained(states, loss, arrived, traffic.count(starts, arrived), received)


def make_group(
    population: Population,
    local: LocalTraining,
    model: nn.Module,
    starts: Stack,
    clients: Sequence[int],
    objective: LocalObjective,
    rng: Rng,
) -> Group:
    """Clients of one architecture, in the form that the engine takes."""
    x, parts = population.data.x, [population.clients.train[client] for client in clients]
    size = local.size_of_batches(population.clients.train)
    changes = (local.repeats, local.augment, x.shape[-1], local.last_batch)
    batches = make_batches(parts, clients, local.epochs, size, rng, x.device, *changes)
    optimizer = local.optimizer._replace(lr=local.optimizer.lr * local.schedule(rng.round))
    settings = (optimizer, objective.objective, objective.ascent, local.precision, objective.per_sample)
    return Job(model, population.data, batches, *settings), starts, objective.context or {}


def _train(
    population: Population, local: LocalTraining, cohort: Cohort, objective: LocalObjective, rng: Rng
) -> tuple[States, Tensor]:
    """The trained states, in the form of the cohort's, and the losses [K]."""

    def some(rows: Sequence[int]) -> tuple[States, Tensor]:
        own, context = cohort.select(rows), select(objective.context, rows)
        with progress.cohort(len(rows)):
            parts = _in_chunks(population, local, own, objective._replace(context=context), rng)
            return joined(parts, own.states)

    if not current().sharing:
        return some(range(len(cohort.clients)))

    def each(rows: Sequence[int]) -> list[tuple[State, Tensor]]:
        states, losses = some(rows)
        return list(zip(per_client(states), losses))

    size = local.size_of_batches(population.clients.train)
    samples = [filled(len(population.clients.train[client]), size) for client in cohort.clients]
    work = [n * max(1, flops(model, population.data)) for n, model in zip(samples, cohort.models)]
    states, losses = zip(*current().shared(work, each))
    return list(states) if isinstance(cohort.states, list) else stack(states), torch.stack(losses)


def _in_chunks(
    population: Population, local: LocalTraining, cohort: Cohort, objective: LocalObjective, rng: Rng
) -> list[tuple[list[int], Results]]:
    """(rows of the cohort, their results) for one group of clients after another, a few at a time."""
    parts, k = [], len(cohort.clients)
    for first in range(0, k, local.chunk or k):
        alike: dict[int, list[int]] = {}  # by architecture: the rows that have it
        for row in range(k)[first : first + (local.chunk or k)]:
            alike.setdefault(id(cohort.models[row]), []).append(row)
        groups = []
        for rows in alike.values():
            clients, model = [cohort.clients[row] for row in rows], cohort.models[rows[0]]
            starts, context = (select_stacked(each, rows) for each in (cohort.states, objective.context))
            same = objective._replace(context=context)
            groups.append(make_group(population, local, model, starts, clients, same, rng))
        parts += zip(alike.values(), train(groups, local.backend, local.chosen))
    return parts

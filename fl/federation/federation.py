"""Clients, data, model and local training: everything from which a method composes its rounds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from fl.base.checks import check_values
from fl.base.errors import FLError
from fl.base.rng import Rng
from fl.data import Dataset
from fl.engine.objectives import Ascent, Objective, cross_entropy, masked
from fl.engine.work import Meter, flops
from fl.federation.asked import ASKED
from fl.federation.attack import Attack
from fl.federation.classes import classes_held
from fl.federation.cohort import Cohort, with_entry
from fl.federation.defence import Defence
from fl.federation.inference import collect, infer, infer_each, lacks_statistics
from fl.federation.last_value import LastValue
from fl.federation.local_training import LocalTraining
from fl.federation.population import Population
from fl.federation.spread import by_layer
from fl.federation.trained import Trained
from fl.federation.training import LocalObjective, train_cohort
from fl.partition import Splits
from surgery import Stack, State, Submodel, stack_size
from surgery.transfer import upload

_LOCAL = [setting.name for setting in fields(LocalTraining)]


@dataclass(frozen=True)
class Federation(Population):
    """A population of clients that trains, and predicts with what it has trained.

    The attributes of `Population` come first.

    Attributes:
        local: how clients train. Its settings can also be given by their own names, here and in
            `dataclasses.replace(fed, epochs=1)`.
        attack: malicious clients and what they do; None: all are honest.
        defence: how the server averages, see `average` and `average_submodels`.
        meter: adds up what the clients compute.

    >>> from fl.data import load
    >>> from fl.partition import Split
    >>> own = torch.arange(300).split(100)
    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    >>> fed = Federation(model, load("digits"), [Split(part, part[:0], part[:0]) for part in own], 2, epochs=1)
    >>> fed.local.epochs, replace(fed, epochs=3).local.epochs
    (1, 3)
    """

    local: LocalTraining
    attack: Attack | None
    defence: Defence
    meter: Meter = field(repr=False, compare=False)
    _classes: dict[int, Tensor] = field(init=False, repr=False, compare=False)
    _collected: LastValue = field(init=False, repr=False, compare=False)

    def __init__(
        self,
        model: nn.Module,
        data: Dataset,
        clients: Splits,
        participants: int,
        local: LocalTraining | None = None,
        *others: Any,
        attack: Attack | None = None,
        defence: Defence = Defence(),
        meter: Meter | None = None,
        **settings: Any,
    ) -> None:
        local = LocalTraining() if local is None else local  # a new one: it remembers what `auto` has chosen
        if others or not isinstance(local, LocalTraining):
            raise FLError(
                "Federation(model, data, clients, participants) takes the settings of local training by their names, "
                "as epochs=1, batch_size=20, optimizer=SGD(0.1), or as LocalTraining(...)"
            )
        local = replace(local, **{name: settings.pop(name) for name in _LOCAL if name in settings})
        more = {"meter": meter or Meter(), "_classes": {}, "_collected": LastValue()}
        vars(self).update(local=local, attack=attack, defence=defence, **more)  # the class is frozen
        super().__init__(model, data, clients, participants, **settings)
        local.check(self.data)
        check_values(defence, "defence")

    def average(
        self, models: Stack, weights: Any = None, fallback: Mapping[str, Tensor] | None = None
    ) -> State | Stack:
        """How the server averages the models that clients send: `Defence.average`. Frozen parameters stay the same."""

        def mean(part: Stack) -> State | Stack:
            kept = fallback
            if fallback is not None and len(part) < len(models):  # some layers, of models that lie on several ranks
                kept = {name: tensor for name, tensor in fallback.items() if name in part}
            return self.keep_frozen(part, self.defence.average(part, weights, kept))

        return by_layer(models, mean)

    def average_submodels(
        self,
        states: Sequence[State],
        plans: Sequence[Submodel],
        fallback: State,
        weights: Sequence[float],
        factors: Mapping[str, Tensor] | None = None,
    ) -> State:
        """The same for parts of the model: `Defence.average_submodels`. Frozen parameters are those of the fallback."""
        mean, frozen = self.defence.average_submodels(states, plans, fallback, weights, factors), self.frozen
        if not frozen:
            return mean
        entries = [entry for plan in {id(plan): plan for plan in plans}.values() for entry in plan.entries.items()]
        kept = {source.name for name, sources in entries if name in frozen for source in sources}
        kept -= set(self.trainable)  # a frozen block may stand for deeper ones that are trained
        return mean | {name: fallback[name].clone() for name in kept}

    @property
    def asked(self) -> set[str]:
        """Which of `fl.federation.asked.ASKED` this federation asks of a method."""
        return {what for what, ask in ASKED.items() if ask.by_federation(self)}

    def classes_of(self, clients: Sequence[int]) -> Tensor:
        """Which classes (of text: tokens) each of the clients has in its training samples: bool [K, classes].

        Malicious clients also have those of their spoilt samples: they train on both, and say so.
        """
        held = self.held(clients)
        if rows := self.attack.rows(clients) if self.attack else []:
            spoilt = classes_held(self.attack.data, self.clients.train, [clients[row] for row in rows])
            index = upload(torch.tensor(rows), held.device)
            held = held.index_copy(0, index, held[index] | spoilt)
        return held

    def held(self, clients: Sequence[int]) -> Tensor:
        """The same, of their true samples alone.

        Raises:
            FLError: for clients on other machines who were not asked for their labels.
        """
        if self.elsewhere and not self.elsewhere.labels:
            raise FLError("the labels of clients on other machines are not known: leave what needs them out")
        if fresh := [client for client in dict.fromkeys(clients) if client not in self._classes]:
            self._classes.update(zip(fresh, classes_held(self.data, self.clients.train, fresh)))
        return torch.stack([self._classes[client] for client in clients])

    def train(
        self,
        starts: Stack,
        clients: Sequence[int],
        rng: Rng,
        objective: Objective = cross_entropy,
        context: Any = None,
        ascent: Ascent | None = None,
        per_sample: Tensor | None = None,
    ) -> Trained:
        """Train the k-th of the clients from the k-th of the starts. See `fl.engine.train`.

        A client whose loss or weights are no longer finite is dropped from the round: it keeps its start, its size
        counts as 0, and a warning is logged.

        Args:
            objective, context, ascent: see `fl.engine.objectives`; the context's tensors have a leading axis K.
            per_sample: [N, ...], values for each of the training samples, given to the objective with it.

        Raises:
            FLError: if all clients have to be dropped, or have models of several architectures.
        """
        if self.fleet is not None and len(self.fleet.architectures) > 1:
            raise FLError(
                f"clients have models of {len(self.fleet.architectures)} architectures, and this method trains one for "
                "all: take a method for such clients, or leave Federation(fleet=...) out"
            )
        if stack_size(starts) != len(clients):
            raise FLError(f"{stack_size(starts)} starting states for {len(clients)} clients: give one each")
        each = LocalObjective(objective, context or {}, ascent, per_sample)
        return self._train(Cohort(clients, [self.model] * len(clients), starts), each, rng)

    def train_mixed(
        self,
        models: Sequence[nn.Module],
        starts: Sequence[State],
        clients: Sequence[int],
        rng: Rng,
        objective: Objective = cross_entropy,
        context: Sequence[Any] | None = None,
        ascent: Ascent | None = None,
    ) -> Trained:
        """Train the k-th of the clients with the k-th of the models, from the k-th of the starts.

        The same as training them one by one: batches and random numbers depend on the client alone.

        Args:
            models: architectures; those that are the same object train together.
            context: the objective's input for each client, without a leading axis.

        Returns:
            Trained, its states a list of K states.

        Raises:
            FLError: as `train`.
        """
        if not len(models) == len(starts) == len(clients) == len(context or clients):
            raise FLError(
                f"{len(models)} models, {len(starts)} starting states and {len(context or clients)} contexts for "
                f"{len(clients)} clients: give one each"
            )
        each = LocalObjective(objective, list(context or [{}] * len(clients)), ascent)
        return self._train(Cohort(clients, models, list(starts)), each, rng)

    def _train(self, cohort: Cohort, each: LocalObjective, rng: Rng) -> Trained:
        if self.local.masked:
            context = with_entry(each.context, "held", self.held(cohort.clients))
            each = each._replace(objective=masked(each.objective), context=context)
        passes = self.local.epochs * self.local.repeats * (2 if each.ascent else 1)
        parts = self.clients.train
        for client, model in zip(cohort.clients, cohort.models):
            samples = self.local.samples_of_epoch(len(parts[client]), parts)
            self.meter.flops += passes * samples * flops(model, self.data)
        return train_cohort(self, self.local, self.attack, self.defence, cohort, each, rng)

    def predict(self, state: State, images: Tensor, model: nn.Module | None = None) -> Tensor:
        """Logits of one model in evaluation mode, for samples on the device: [N, classes] for uint8 images
        [N, C, H, W], [N, T, classes] for tokens [N, T], of which only a few fit at a time.

        Static batch norms take the statistics of all training data, unless the state has some.

        Args:
            model: for a state of another architecture than the global one.
        """
        model = model or self.model
        state = {**state, **self.statistics(state, model)}
        if self.local.augment.mask:  # a masked language model is asked about hidden tokens, here always the same ones
            images = self.local.augment.masked(images, torch.zeros((), dtype=torch.int64, device=images.device))
        return infer(model, state, self.data, images, self.local.precision)

    def predict_each(self, models: Stack, samples: Tensor) -> Tensor:
        """Logits of K models at once, each for its own n samples [K, n, ...], as `predict` gives them up to rounding.

        Models with static batch norms have to bring their statistics.

        Raises:
            RuntimeError: if the model has an operation that cannot be stacked.
        """
        if self.local.augment.mask:
            keys = torch.zeros(len(samples), dtype=torch.int64, device=samples.device)
            samples = self.local.augment.masked(samples, keys)
        return infer_each(self.model, models, self.data, samples, self.local.precision)

    def statistics(self, state: State, model: nn.Module | None = None, samples: Tensor | None = None) -> State:
        """The running statistics of static batch norms, if the model has such norms and the state no statistics.

        They take a pass over the data for each state. Those of the last state are kept, since they are usually needed
        again.

        Args:
            model: for a state of another architecture than the global one.
            samples: the training samples to use, indices on the CPU. None: those of all clients.
        """
        model = model or self.model
        if not lacks_statistics(model, state):
            return {}
        if self.elsewhere:
            raise FLError(
                "static batch norms need a pass over all clients' data, which lie on other machines: take another "
                "--norm than static_batch"
            )
        if samples is not None:
            return collect(model, state, self.data, samples, self.local.precision)
        if (known := self._collected.of((model, state))) is None:
            known = collect(model, state, self.data, self.clients.train.samples, self.local.precision)
            self._collected.keep((model, state), known)
        return dict(known)

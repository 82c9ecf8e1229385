"""Clients, data, model and local training: everything from which a method composes its rounds."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

import surgery
from fl.base.errors import FLError
from fl.base.rng import Rng, draw
from fl.data import Dataset
from fl.data.inputs import Inputs
from fl.distributed import current
from fl.engine import Group, Job, progress, train
from fl.engine.batches import filled, make_batches
from fl.engine.losses import cross_entropy
from fl.engine.objectives import Ascent, Objective, masked
from fl.engine.work import Meter, flops
from fl.federation.aggregator import Aggregator, WeightedMean
from fl.federation.cohort import Cohort, States, classes_held, joined, per_client, select, with_entry
from fl.federation.divergence import WithoutDiverged
from fl.federation.inference import collect, infer, infer_each, lacks_statistics
from fl.federation.last_value import LastValue
from fl.federation.local_training import LocalObjective, LocalTraining
from fl.federation.scores import Metric
from fl.federation.trainer import Middleware, Stage, Trainer, Training
from fl.federation.transport import IN_PROCESS, Transport
from fl.federation.update import ClientUpdate
from fl.models.fleet import Fleet, uniform
from fl.models.init import Start
from fl.partition import Splits
from surgery import Plan, Stack, State
from surgery.adapters import adapted_layers
from surgery.states import as_stack, stack_size
from surgery.transfer import upload
from zoo import Spec


@dataclass(frozen=True)
class Federation:
    """A population of clients that trains, and predicts with what it has trained.

    Attributes:
        model: the architecture and its initial weights, on the device of the data. Its weights are never
            changed; its mode (training, evaluation) is. Of samples with several inputs it is given the dict: see
            `fl.models.custom_model.by_keyword`.
        data: the data set, on the device that trains; or kept on the host, and a round's cohort has its samples there.
        clients: each client's samples, indices on the CPU; any sequence of `Split` is accepted and packed.
        participants: K, how many clients train in a round.
        local: how clients train.
        create: makes the model anew with weights drawn from a generator, for methods that need several; or None.
        spec: what makes the model; None for one that was given as a module.
        fleet: each client's architecture, for methods in which they differ; the model is then the global one, which
            contains them all, or, if they have no plans, one of them. None: all clients have the model.
        start: the trained weights that the run begins with; None: they are drawn.
        truth: the cluster that each client's data were dealt out in, on each level: [levels, clients]; None: unknown.
        transport: where clients are, and how the server reaches them. Methods do not look at it: `client_states` and
            `mean_of_clients` do what depends on it.
        training: what wraps local training, in any order, see `fl.federation.trainer`.
        aggregator: how the server averages, see `average`.
        malicious: clients that evaluations leave out.
        report: (federation, clients) -> the classes that they say they have; None: the truth.
        metrics: what evaluations measure beside the scores of every run.
        meter: adds up what the clients compute.

    >>> from fl.data import load
    >>> from fl.partition import Split
    >>> own = torch.arange(300).split(100)
    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    >>> clients = [Split(part, part[:0], part[:0]) for part in own]
    >>> fed = Federation(model, load("digits"), clients, participants=2, local=LocalTraining(epochs=1))
    >>> fed.local.epochs, fed.with_local(epochs=3).local.epochs
    (1, 3)
    """

    model: nn.Module
    data: Dataset
    clients: Splits
    participants: int
    local: LocalTraining = field(default_factory=LocalTraining)
    _: KW_ONLY
    create: Callable[[torch.Generator], nn.Module] | None = None
    spec: Spec | None = None
    fleet: Fleet | None = None
    start: Start | None = None
    truth: Tensor | None = None
    transport: Transport = IN_PROCESS
    training: Sequence[Middleware] = ()
    aggregator: Aggregator = WeightedMean()
    malicious: frozenset[int] = frozenset()
    report: Callable[["Federation", Sequence[int]], Tensor] | None = None
    metrics: Sequence[Metric] = ()
    meter: Meter = field(default_factory=Meter, repr=False, compare=False)
    _classes: dict[int, Tensor] = field(init=False, default_factory=dict, repr=False, compare=False)
    _collected: LastValue = field(init=False, default_factory=LastValue, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "clients", Splits.of(self.clients))
        if self.fleet is not None and len(self.fleet) != len(self.clients):
            raise FLError(f"{len(self.fleet)} architectures for {len(self.clients)} clients: give one each")
        if not 1 <= self.participants <= len(self.clients):
            raise FLError(f"{self.participants} participants a round: there are {len(self.clients)} clients")
        if len(empty := (self.clients.train.sizes == 0).nonzero()):
            raise FLError(f"client {int(empty[0])} has no training samples ({len(empty)} such clients)")
        if not self.trainable:
            raise FLError(f"{type(self.model).__name__} has no parameter to train: all are frozen")
        if not isinstance(self.local, LocalTraining):
            raise FLError(f"Federation(local={self.local!r}): give LocalTraining(epochs=1, batch_size=20, ...)")
        self.local.check(self.data)
        for one in self.training:
            if not callable(one) or not isinstance(getattr(one, "stage", None), Stage):
                raise FLError(
                    f"{one!r} is no middleware: give a function of (federation, trainer) with a `stage`, one of "
                    "fl.federation.trainer.Stage"
                )
        for one in self.training if self.aggregator.chooses else ():
            if getattr(one, "leaves_out", False):
                said = (dict.fromkeys(getattr(part, "needs", {}).values()) for part in (self.aggregator, one))
                rule, other = map(", ".join, said)
                raise FLError(
                    f"{rule or 'the aggregator'} needs all clients of a round, and {other or one} leaves some out: "
                    "drop one of the two"
                )

    def with_local(self, **settings: Any) -> "Federation":
        """Return the same clients, who train with other settings, named as in `LocalTraining`."""
        return replace(self, local=replace(self.local, **settings))

    @property
    def trainable(self) -> dict[str, nn.Parameter]:
        """The model's parameters that are trained, by name and in the model's order; frozen ones are left out."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    @property
    def client_names(self) -> list[str]:
        """The owner of each client's samples, by name; empty unless clients are whole owners, as with "natural"."""
        parts = (self.clients.train, self.clients.valid, self.clients.test)
        rows = torch.arange(len(self.clients))
        clients = torch.cat([rows.repeat_interleave(part.sizes) for part in parts])
        return self.data.names_of_clients(torch.cat([part.samples for part in parts]), clients)

    @property
    def frozen(self) -> set[str]:
        """The names of the model's parameters that are not trained."""
        return {name for name, p in self.model.named_parameters() if not p.requires_grad}

    def keep_frozen(self, models: Stack, mean: State | Stack) -> State | Stack:
        """Return the mean of models, or several means, with the frozen parameters that the models have.

        A weighted sum of equal numbers can differ from them in its last bit.
        """
        kept = {}
        for name in self.frozen.intersection(mean, models):  # which may be some layers' alone
            same = (models[name] == models[name][:1]).all(0)
            kept[name] = torch.where(same, models[name][0], mean[name])
        return mean | kept

    @property
    def fleet_or_uniform(self) -> Fleet:
        """Each client's architecture; without a fleet it is the model's for all clients."""
        return self.fleet or uniform(self.model, len(self.clients))

    def models_of(self, clients: Sequence[int]) -> list[nn.Module]:
        """Return the architecture of each of some clients, a module whose weights do not matter."""
        return [self.fleet[client].model if self.fleet else self.model for client in clients]

    def initial(self, generator: torch.Generator | None = None) -> State:
        """Return the state that training starts from, or another one whose weights are drawn from the generator."""
        model = self.model
        if generator is not None:
            if self.create is None:
                raise FLError(
                    "a method that starts several models from different weights needs a function that makes them: "
                    "model=MyNet in the place of a module, or Federation(create=...)"
                )
            model = self.create(generator).to(self.data.device, non_blocking=True)
        return {name: tensor.clone() for name, tensor in surgery.state(model).items()}

    def zeros(self) -> State:
        """Return a tensor of zeros for each trained parameter."""
        return {name: torch.zeros_like(p, requires_grad=False) for name, p in self.trainable.items()}

    def sample(self, rng: Rng) -> list[int]:
        """Draw K different clients uniformly, in random order.

        They are the same for every method in the same round with the same seed.
        """
        return draw(len(self.clients), self.participants, rng.torch("sample"))

    def average(
        self,
        models: Stack | Sequence[State],
        weights: Any = None,
        fallback: Mapping[str, Tensor] | None = None,
        *,
        plans: Sequence[Plan] | None = None,
        factors: Mapping[str, Tensor] | None = None,
    ) -> State | Stack:
        """Average the models that clients send, by the server's rule.

        Frozen parameters stay the same: those of the models, or with plans those of the fallback.

        Args:
            models, weights, fallback, plans, factors: as for `surgery.average`.
        """
        mean = self.aggregator.average(models, weights, fallback, self.trainable, plans=plans, factors=factors)
        if plans is None:
            return self.keep_frozen(dict(as_stack(models)), mean)
        if not (frozen := self.frozen):
            return mean
        entries = [entry for plan in {id(plan): plan for plan in plans}.values() for entry in plan.entries.items()]
        kept = {source.name for name, sources in entries if name in frozen for source in sources}
        kept -= set(self.trainable)  # a frozen block may stand for deeper ones that are trained
        return mean | {name: fallback[name].clone() for name in kept}

    def needs(self) -> dict[str, str]:
        """Return what a method must be able to do here, see `fl.federation.capabilities`, and what asks for it."""
        found: dict[str, str] = {}
        if self.local.masked:
            found["masked_logits"] = "--masked-loss"
        if self.local.loss is not cross_entropy:
            found["any_loss"] = "--loss, --label-smoothing and --class-weights"
        if self.data.dense:
            found["dense"] = "task='segmentation'"
        if getattr(self.model, "exits", False):
            found["several_classifiers"] = "--exits"
        if next(adapted_layers(self.model), None):
            found["low_rank"] = "--adapters.kind"
        if self.fleet and len(self.fleet.architectures) > 1:
            parts = all(kind.plan for kind in self.fleet.architectures)
            found["architectures" if parts else "own_architectures"] = (
                "--architectures" if parts else "model= of several models"
            )
        for part in (*self.training, self.aggregator):
            found |= getattr(part, "needs", {})
        return found

    def reported_classes(self, clients: Sequence[int]) -> Tensor:
        """Return which classes (of text: tokens) each client says its training samples have: bool [K, classes]."""
        return self.report(self, clients) if self.report else self.true_classes(clients)

    def true_classes(self, clients: Sequence[int]) -> Tensor:
        """Return which classes (of text: tokens) the true training samples of each client have: bool [K, classes].

        Raises:
            FLError: for clients on other machines who were not asked for their labels.
        """
        if not self.transport.labels:
            raise FLError("the labels of clients on other machines are not known: leave what needs them out")
        if fresh := [client for client in dict.fromkeys(clients) if client not in self._classes]:
            self._classes.update(zip(fresh, classes_held(self.data, self.clients.train, fresh)))
        return torch.stack([self._classes[client] for client in clients])

    def client_states(self, start: State) -> Stack:
        """Return what the server stores of client states before any of them took part.

        In a simulation this is the start, a row for each client of the population. It belongs into the server's part
        `fl.federation.clients.CLIENTS`.
        """
        return self.transport.client_states(self, start)

    def mean_of_clients(self, states: Stack, otherwise: State) -> State:
        """Return the mean of all personal models by their numbers of samples, for a stranger; nobody trains from it.

        Args:
            states: the server's part `fl.federation.clients.CLIENTS`.
            otherwise: taken where clients are on other machines and never send these models.
        """
        if not self.transport.has_data:
            return otherwise
        return self.keep_frozen(states, surgery.average(states, weights=self.clients.train.sizes))

    def train(
        self,
        starts: States,
        clients: Sequence[int],
        rng: Rng,
        objective: Objective | None = None,
        context: Any = None,
        ascent: Ascent | None = None,
        per_sample: Tensor | None = None,
        models: Sequence[nn.Module] | None = None,
    ) -> ClientUpdate:
        """Train the k-th of the clients from the k-th of the starts, within what wraps local training (`training`).

        A client whose loss or weights are no longer finite is dropped, see `fl.federation.divergence`.

        Args:
            starts: a stack [K, ...]; or a list of K states of several architectures, which train as if one by one.
            objective, ascent: see `fl.engine.objectives`; None: the mean of the loss, `LocalTraining.objective`.
            context: the objective's input: tensors with a leading axis K; for a list of starts a list of K contexts.
            per_sample: [N, ...], values for each of the training samples, given to the objective with it.
            models: for a list of starts, the architecture of each; those that are the same object train together.
                None: as the fleet says.

        Raises:
            Diverged: if all clients have to be dropped.
            FLError: for a stack if clients have models of several architectures.
        """
        k = len(clients)
        mixed = isinstance(starts, list)
        if not mixed and self.fleet is not None and len(self.fleet.architectures) > 1:
            raise FLError(
                f"clients have models of {len(self.fleet.architectures)} architectures, and this method trains one for "
                "all: take a method for such clients, or leave Federation(fleet=...) out"
            )
        given = len(starts) if mixed else stack_size(starts)
        if given != k or (mixed and not len(models or clients) == len(context or clients) == k):
            raise FLError(f"{given} starting states for {k} clients: give one each, and as many models and contexts")
        if models is None:
            models = self.models_of(clients) if mixed else [self.model] * k
        context = list(context or [{}] * k) if mixed else context or {}
        each = LocalObjective(objective or self.local.objective, context, ascent, per_sample)
        steps = self.steps(clients)
        return self.trainer(Training(Cohort(clients, models, starts), each, rng, steps, steps))

    @cached_property
    def trainer(self) -> Trainer:
        """What `train` calls: local training within its middlewares, in the order of their stages."""
        trainer: Trainer = self.train_cohort
        for middleware in sorted((WithoutDiverged(), *self.training), key=lambda one: one.stage):
            trainer = middleware(self, trainer)
        return trainer

    def train_cohort(self, training: Training) -> ClientUpdate:
        """Train a cohort, and nothing else: see `fl.engine.train`. The server receives what was trained."""
        cohort, objective, _, planned, steps = training
        parts, passes = self.clients.train, self.local.epochs * self.local.repeats * (2 if objective.ascent else 1)
        for client, model, made, every in zip(cohort.clients, cohort.models, steps, planned):
            samples = self.local.samples_of_epoch(len(parts[client]), parts)
            self.meter.flops += passes * samples * flops(model, self.data) * made // every
        states, loss = self._run(training._replace(objective=self._masked(cohort, objective)))
        return ClientUpdate(states, loss, tuple(len(parts[client]) for client in cohort.clients), states, steps=steps)

    def steps(self, clients: Sequence[int]) -> tuple[int, ...]:
        """Count the steps that clients make in a round if nobody stops them."""
        size, parts = self.local.size_of_batches(self.clients.train), self.clients.train
        per_batch = self.local.epochs * self.local.repeats
        return tuple(filled(len(parts[client]), size) // size * per_batch for client in clients)

    def _masked(self, cohort: Cohort, each: LocalObjective) -> LocalObjective:
        """Return what clients minimise: if they train so, with logits of 0 for classes that they do not have."""
        if not self.local.masked:
            return each
        context = with_entry(each.context, "held", self.true_classes(cohort.clients))
        return each._replace(objective=masked(each.objective), context=context)

    @property
    def _run(self) -> Callable[[Training], tuple[States, Tensor]]:
        """How clients train here: `_in_chunks`, on several ranks if there are some."""
        return self._over_ranks if current().sharing else self._in_chunks

    def _over_ranks(self, training: Training) -> tuple[States, Tensor]:
        """As `_in_chunks`; every rank trains its share of the clients."""

        def some(rows: Sequence[int]) -> list[tuple[State, Tensor]]:
            states, losses = self._in_chunks(training.select(rows))
            return list(zip(per_client(states), losses))

        cohort = training.cohort
        work = [n * max(1, flops(model, self.data)) for n, model in zip(training.steps, cohort.models)]
        states, losses = zip(*current().shared(work, some))
        return list(states) if isinstance(cohort.states, list) else surgery.stack(states), torch.stack(losses)

    def _in_chunks(self, training: Training) -> tuple[States, Tensor]:
        """Return the trained states, in the form of the cohort's, and the losses [K]. A few clients train at a time."""
        cohort, objective, rng, _, steps = training
        parts, k = [], len(cohort.clients)
        chunk = self.local.max_parallel_clients or k
        progress.begin(k)
        for first in range(0, k, chunk):
            alike: dict[int, list[int]] = {}  # by architecture: the rows that have it
            for row in range(k)[first : first + chunk]:
                alike.setdefault(id(cohort.models[row]), []).append(row)
            groups = []
            for rows in alike.values():
                clients, starts = [cohort.clients[row] for row in rows], select(cohort.states, rows, stacked=True)
                each = objective.select(rows, stacked=True)
                model, limits = cohort.models[rows[0]], [steps[row] for row in rows]
                groups.append(self.group(model, starts, clients, each, rng, limits))
            local = self.local
            trained = train(groups, local.backend, local.chosen, local.rounds, self.data.on_host)
            parts += zip(alike.values(), trained)
        return joined(parts, cohort.states)

    def group(
        self,
        model: nn.Module,
        starts: Stack,
        clients: Sequence[int],
        each: LocalObjective,
        rng: Rng,
        steps: Sequence[int] | None = None,
    ) -> Group:
        """Clients of one architecture, in the form that the engine takes.

        Args:
            steps: after how many each client is stopped; None: it makes all.
        """
        local, data, parts, values = self.local, self.data, self.clients.train, each.per_sample
        size = local.size_of_batches(parts)
        changes = (local.repeats, local.augment, data.shape[-1] if data.images else 0, local.last_batch)
        own = [parts[client] for client in clients]
        # Those without a step make one, which nobody receives.
        limits = None if steps is None else [max(1, n) for n in steps]
        if data.on_host:  # these clients' samples alone go to the device, and are counted from 0 there
            samples, sizes = torch.cat(own), [len(part) for part in own]
            data, own = data.taken(samples), torch.arange(len(samples)).split(sizes)
            values = None if values is None else values[upload(samples, values.device)]
        batches = make_batches(own, clients, local.epochs, size, rng, data.device, *changes, limits)
        optimizer = local.optimizer._replace(lr=local.optimizer.lr * local.schedule(rng.round))
        settings = (optimizer, each.objective, each.ascent, local.precision, values)
        return Job(model, data, batches, *settings), starts, each.context or {}

    def predict(self, state: State, images: Inputs, model: nn.Module | None = None) -> Tensor:
        """Return logits of one model in evaluation mode, for samples on the device or on the host.

        They are [N, classes] for uint8 images [N, C, H, W], [N, T, classes] for tokens [N, T].

        Static batch norms take the statistics of all training data, unless the state has some.

        Args:
            model: for a state of another architecture than the global one.
        """
        model = model or self.model
        state = {**state, **self.statistics(state, model)}
        return infer(model, state, self.data, self._hidden(images), self.local.precision)

    def predict_each(self, models: Stack, samples: Inputs) -> Tensor:
        """Return logits of K models, each for its own n samples [K, n, ...]; `predict` gives the same up to rounding.

        Models with static batch norms have to bring their statistics.

        Raises:
            RuntimeError: if the model has an operation that cannot be stacked.
        """
        samples = self._hidden(samples, len(samples))
        return infer_each(self.model, models, self.data, samples, self.local.precision)

    def _hidden(self, samples: Any, *models: int) -> Any:
        """Return samples as they are.

        Of a masked language model, which is asked about hidden tokens, always the same ones.
        """
        if not self.local.augment.mask:
            return samples
        return self.local.augment.masked(samples, torch.zeros(models, dtype=torch.int64, device=samples.device))

    def statistics(self, state: State, model: nn.Module | None = None, samples: Tensor | None = None) -> State:
        """Return the running statistics of static batch norms, if the model has such norms and the state no statistics.

        They take a pass over the data for each state; those of the last state are kept.

        Args:
            model: for a state of another architecture than the global one.
            samples: the training samples to use, indices on the CPU. None: those of all clients.
        """
        model = model or self.model
        if not lacks_statistics(model, state):
            return {}
        if not self.transport.has_data:
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

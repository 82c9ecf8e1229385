"""Clients, data, model and local training: the parts of a method's rounds."""

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
from fl.engine.batches import make_batches
from fl.engine.losses import cross_entropy
from fl.engine.objectives import Ascent, Objective, mask_absent_classes
from fl.engine.work import Meter, flops
from fl.federation.aggregator import Aggregator, WeightedMean
from fl.federation.cohort import Cohort, States, classes_held, join_results, per_client, select, with_entry
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
    """A population of clients, with data, model and settings of training.

    Attributes:
        model: the architecture and its initial weights, on the device of the data. Its weights never change; its mode
            (training, evaluation) does. It receives samples with several inputs as a dict, see
            `fl.models.custom_model.by_keyword`.
        data: the data set, on the device that trains; or on the host: then only the samples of a round's cohort go to
            the device.
        clients: each client's samples, indices on the CPU; any sequence of `Split` is accepted and packed.
        participants: K, how many clients train in a round.
        local: how clients train.
        create: makes another model, initialised from a generator, for methods that need several; or None.
        spec: the zoo's name and settings of the model; None for a model that was given as a module.
        fleet: each client's architecture, for methods where architectures differ; None: all clients have `model`. If
            the architectures have plans, `model` is the global model that contains all of them. Otherwise it is any one
            of them.
        start: the trained weights that the run begins with; None: random ones.
        truth: the true cluster of each client's data on each level of the partition: [levels, clients]; None: unknown.
        transport: where clients are, and how the server reaches them. Methods do not look at it: they call
            `client_states` and `mean_of_clients` instead.
        training: middlewares around local training, in any order, see `fl.federation.trainer`.
        aggregator: how the server averages, see `average`.
        malicious: clients that evaluations skip.
        report: (federation, clients) -> the classes that clients say they have; None: the true ones.
        metrics: further metrics of evaluations, besides the scores of every run.
        meter: adds up the operations that clients compute.

    >>> from fl.data import load
    >>> from fl.partition import Split
    >>> parts = torch.arange(300).split(100)
    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    >>> clients = [Split(part, part[:0], part[:0]) for part in parts]
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
            raise FLError(f"{len(self.fleet)} architectures for {len(self.clients)} clients: give each client one")
        if not 1 <= self.participants <= len(self.clients):
            raise FLError(f"{self.participants} participants a round: there are {len(self.clients)} clients")
        if len(empty := (self.clients.train.sizes == 0).nonzero()):
            raise FLError(f"client {int(empty[0])} has no training samples ({len(empty)} such clients)", code="data")
        if not self.trainable:
            raise FLError(f"{type(self.model).__name__} has no parameter to train: all are frozen", code="unsupported")
        if not isinstance(self.local, LocalTraining):
            raise FLError(f"Federation(local={self.local!r}): give LocalTraining(epochs=1, batch_size=20, ...)")
        self.local.check(self.data)
        for middleware in self.training:
            if not callable(middleware) or not isinstance(getattr(middleware, "stage", None), Stage):
                raise FLError(
                    f"{middleware!r} is no middleware: give a function of (federation, trainer) with a `stage`, one of "
                    "fl.federation.trainer.Stage"
                )
        for middleware in self.training if self.aggregator.chooses else ():
            if getattr(middleware, "leaves_out", False):
                flags = (dict.fromkeys(getattr(part, "needs", {}).values()) for part in (self.aggregator, middleware))
                rule, flag = map(", ".join, flags)
                raise FLError(
                    f"{rule or 'the aggregator'} needs all clients of a round, but {flag or middleware} leaves some "
                    "out: remove one of the two",
                    code="unsupported",
                )

    def with_local(self, **settings: Any) -> "Federation":
        """Return a copy with other settings of `LocalTraining`, by their names."""
        return replace(self, local=replace(self.local, **settings))

    @property
    def trainable(self) -> dict[str, nn.Parameter]:
        """The model's parameters that are trained, by name, in the model's order."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    @property
    def client_names(self) -> list[str]:
        """The clients' names; empty unless each client is one owner of samples.

        So it is with the partition "natural".
        """
        return self.data.names_of_clients(self.clients.train, self.clients.valid, self.clients.test)

    @property
    def frozen(self) -> set[str]:
        """The names of the model's parameters that are not trained."""
        return {name for name, p in self.model.named_parameters() if not p.requires_grad}

    def keep_frozen(self, models: Stack, mean: State | Stack) -> State | Stack:
        """Return the mean of models, or several means, with frozen parameters unchanged.

        A weighted sum of equal numbers can have another last bit.
        """
        frozen = {}
        for name in self.frozen.intersection(mean, models):  # the mean may hold some layers only
            same = (models[name] == models[name][:1]).all(0)
            frozen[name] = torch.where(same, models[name][0], mean[name])
        return mean | frozen

    @property
    def fleet_or_uniform(self) -> Fleet:
        """Each client's architecture; without a fleet all clients have the model."""
        return self.fleet or uniform(self.model, len(self.clients))

    def models_of(self, clients: Sequence[int]) -> list[nn.Module]:
        """Return the architectures of some clients, as modules with arbitrary weights."""
        return [self.fleet[client].model if self.fleet else self.model for client in clients]

    def initial(self, generator: torch.Generator | None = None) -> State:
        """Return the state that training starts from; a new one with a generator."""
        model = self.model
        if generator is not None:
            if self.create is None:
                raise FLError(
                    "a method that starts several models from different weights needs a function that makes them: "
                    "give model=MyNet instead of a module, or Federation(create=...)"
                )
            device = self.data.device
            model = self.create(generator).to(device, non_blocking=device.type == "cuda")  # other devices must wait
        return {name: tensor.clone() for name, tensor in surgery.state(model).items()}

    def zeros(self) -> State:
        """Return a tensor of zeros for each trained parameter."""
        return {name: torch.zeros_like(p, requires_grad=False) for name, p in self.trainable.items()}

    def sample(self, rng: Rng) -> list[int]:
        """Sample K distinct clients uniformly, in random order.

        Every method samples the same clients in the same round with the same seed.
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

        Frozen parameters keep their values: the models' values, or with plans the fallback's.

        Args:
            models, weights, fallback, plans, factors: as for `surgery.average`.
        """
        mean = self.aggregator.average(models, weights, fallback, self.trainable, plans=plans, factors=factors)
        if plans is None:
            return self.keep_frozen(dict(as_stack(models)), mean)
        if not (frozen := self.frozen):
            return mean
        entries = [entry for plan in {id(plan): plan for plan in plans}.values() for entry in plan.entries.items()]
        names = {source.name for name, sources in entries if name in frozen for source in sources}
        names -= set(self.trainable)  # a client's frozen block may map to trained blocks
        return mean | {name: fallback[name].clone() for name in names}

    def needs(self) -> dict[str, str]:
        """Return the capabilities that these settings need, each with its flag.

        See `fl.federation.capabilities`.
        """
        needs: dict[str, str] = {}
        if self.local.masked:
            needs["masked_logits"] = "--masked-loss"
        if self.local.loss is not cross_entropy:
            options, task = "--loss, --label-smoothing and --class-weights", self.data.task
            needs["any_loss"] = options if task == "classification" else f"task={task!r}"
        if self.data.dense:
            needs["dense"] = "task='segmentation'"
        if getattr(self.model, "exits", False):
            needs["several_classifiers"] = "--exits"
        if next(adapted_layers(self.model), None):
            needs["low_rank"] = "--adapters.kind"
        if self.fleet and len(self.fleet.architectures) > 1:
            have_plans = all(architecture.plan for architecture in self.fleet.architectures)
            needs["architectures" if have_plans else "own_architectures"] = (
                "--architectures" if have_plans else "model= of several models"
            )
        for part in (*self.training, self.aggregator):
            needs |= getattr(part, "needs", {})
        return needs

    def reported_classes(self, clients: Sequence[int]) -> Tensor:
        """Return the classes that clients report for their samples: bool [K, classes].

        The classes of text are tokens.
        """
        return self.report(self, clients) if self.report else self.true_classes(clients)

    def true_classes(self, clients: Sequence[int]) -> Tensor:
        """Return the true classes of clients' training samples: bool [K, classes].

        The classes of text are tokens.

        Raises:
            FLError: for clients on other machines, if their labels are not known.
        """
        if not self.transport.labels:
            raise FLError(
                "the labels of clients on other machines are not known: remove the option that needs them",
                code="unsupported",
            )
        if fresh := [client for client in dict.fromkeys(clients) if client not in self._classes]:
            self._classes.update(zip(fresh, classes_held(self.data, self.clients.train, fresh)))
        return torch.stack([self._classes[client] for client in clients])

    def client_states(self, start: State) -> Stack:
        """Return the states that the server stores for clients before they take part.

        In a simulation this is a stack with the start for each client of the population. Put it into the server's part
        `fl.federation.clients.CLIENTS`.
        """
        return self.transport.client_states(self, start)

    def mean_of_clients(self, states: Stack, otherwise: State) -> State:
        """Return the mean of personal models, weighted by samples, for new clients.

        No training starts from it.

        Args:
            states: the server's part `fl.federation.clients.CLIENTS`.
            otherwise: returned if clients are on other machines, since they never send these models.
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
        """Train the k-th client from the k-th start, inside the middlewares in `training`.

        A client whose loss or weights are no longer finite is dropped, see `fl.federation.divergence`.

        Args:
            starts: a stack [K, ...]; or a list of K states of several architectures. Each client trains as if alone.
            objective, ascent: see `fl.engine.objectives`; None: the mean loss, `LocalTraining.objective`.
            context: the objective's input, tensors with a leading axis K; for a list of starts, a list of K contexts.
            per_sample: [N, ...], a value for each training sample, which the objective receives with the sample.
            models: for a list of starts, the architecture of each client. Clients with the same object train together.
                None: the architectures in `fleet`.

        Raises:
            Diverged: if all clients are dropped.
            FLError: for a stack, if clients have models of several architectures.
        """
        k = len(clients)
        is_list = isinstance(starts, list)
        if not is_list and self.fleet is not None and len(self.fleet.architectures) > 1:
            raise FLError(
                f"clients have models of {len(self.fleet.architectures)} architectures, but this method trains one for "
                "all: choose a method for different architectures, or remove Federation(fleet=...)",
                code="unsupported",
            )
        count = len(starts) if is_list else stack_size(starts)
        if count != k or (is_list and not len(models or clients) == len(context or clients) == k):
            raise FLError(
                f"{count} starting states for {k} clients: give each client one state, one model and one context"
            )
        if models is None:
            models = self.models_of(clients) if is_list else [self.model] * k
        context = list(context or [{}] * k) if is_list else context or {}
        local_objective = LocalObjective(objective or self.local.objective, context, ascent, per_sample)
        return self.trainer(Training(Cohort(clients, models, starts), local_objective, rng, self.steps(clients)))

    @cached_property
    def trainer(self) -> Trainer:
        """The function that `train` calls: local training inside its middlewares.

        These are in the order of their stages.
        """
        trainer: Trainer = self.train_cohort
        for middleware in sorted((WithoutDiverged(), *self.training), key=lambda part: part.stage):
            trainer = middleware(self, trainer)
        return trainer

    def train_cohort(self, training: Training) -> ClientUpdate:
        """Train a cohort without middleware, see `fl.engine.train`.

        The server receives the trained models.
        """
        cohort, objective, _, steps = training
        train_sets, gradients = self.clients.train, 2 if objective.ascent else 1
        for client, model, made in zip(cohort.clients, cohort.models, steps):
            samples = self.local.samples_of_steps(made, len(train_sets[client]), train_sets)
            self.meter.flops += gradients * samples * flops(model, self.data)
        train_all = self._over_ranks if current().sharing else self._in_chunks
        states, loss = train_all(training._replace(objective=self._mask_absent_classes(cohort, objective)))
        return ClientUpdate(
            states, loss, tuple(len(train_sets[client]) for client in cohort.clients), states, steps=steps
        )

    def steps(self, clients: Sequence[int]) -> tuple[int, ...]:
        """Return each client's number of steps in a round, if no middleware stops it."""
        train_sets = self.clients.train
        return tuple(self.local.count_steps(len(train_sets[client]), train_sets) for client in clients)

    def _mask_absent_classes(self, cohort: Cohort, objective: LocalObjective) -> LocalObjective:
        """Return the objective; `masked` sets logits of a client's missing classes to 0."""
        if not self.local.masked:
            return objective
        context = with_entry(objective.context, "held", self.true_classes(cohort.clients))
        return objective._replace(objective=mask_absent_classes(objective.objective), context=context)

    def _over_ranks(self, training: Training) -> tuple[States, Tensor]:
        """Train clients as `_in_chunks` does, but let every rank train its share of them."""

        def train_rows(rows: Sequence[int]) -> list[tuple[State, Tensor]]:
            states, losses = self._in_chunks(training.select(rows))
            return list(zip(per_client(states), losses))

        cohort = training.cohort
        work = [n * max(1, flops(model, self.data)) for n, model in zip(training.steps, cohort.models)]
        states, losses = zip(*current().share(work, train_rows))
        return list(states) if isinstance(cohort.states, list) else surgery.stack(states), torch.stack(losses)

    def _in_chunks(self, training: Training) -> tuple[States, Tensor]:
        """Train clients in chunks; return their states and their losses [K].

        The states are a stack or a list, like the cohort's.
        """
        cohort, objective, rng, steps = training
        results, k = [], len(cohort.clients)
        chunk_size = self.local.max_parallel_clients or k
        progress.begin(k)
        for first in range(0, k, chunk_size):
            rows_by_architecture: dict[int, list[int]] = {}
            for row in range(k)[first : first + chunk_size]:
                rows_by_architecture.setdefault(id(cohort.models[row]), []).append(row)
            groups = []
            for rows in rows_by_architecture.values():
                clients, starts = [cohort.clients[row] for row in rows], select(cohort.states, rows, stacked=True)
                group_objective = objective.select(rows, stacked=True)
                model, limits = cohort.models[rows[0]], [steps[row] for row in rows]
                groups.append(self.group(model, starts, clients, group_objective, rng, limits))
            local = self.local
            group_results = train(groups, local.backend, local.chosen, local.rounds, self.data.on_host)
            results += zip(rows_by_architecture.values(), group_results)
        return join_results(results, cohort.states)

    def group(
        self,
        model: nn.Module,
        starts: Stack,
        clients: Sequence[int],
        objective: LocalObjective,
        rng: Rng,
        steps: Sequence[int] | None = None,
    ) -> Group:
        """Return clients of one architecture as the group that the engine trains.

        Args:
            steps: the number of steps after which each client stops. None: all clients make all their steps.
        """
        local, data, train_sets, per_sample = self.local, self.data, self.clients.train, objective.per_sample
        batch_size = local.size_of_batches(train_sets)
        batch_settings = (local.repeats, local.augment, data.shape[-1] if data.images else 0, local.last_batch)
        indices = [train_sets[client] for client in clients]
        # The engine makes at least one step; the update of a client with a limit of 0 is dropped later.
        limits = None if steps is None else [max(1, n) for n in steps]
        if data.on_host:  # only these clients' samples go to the device, where their indices start from 0
            samples, sizes = torch.cat(indices), [len(rows) for rows in indices]
            data, indices = data.take(samples), torch.arange(len(samples)).split(sizes)
            per_sample = None if per_sample is None else per_sample[upload(samples, per_sample.device)]
        batches = make_batches(indices, clients, local.epochs, batch_size, rng, data.device, *batch_settings, limits)
        optimizer = local.optimizer._replace(lr=local.optimizer.lr * local.schedule(rng.round))
        job_settings = (optimizer, objective.objective, objective.ascent, local.precision, per_sample)
        return Job(model, data, batches, *job_settings), starts, objective.context or {}

    def predict(self, state: State, images: Inputs, model: nn.Module | None = None) -> Tensor:
        """Return logits of one model in evaluation mode; samples may be on the host.

        Logits are [N, classes] for uint8 images [N, C, H, W], and [N, T, classes] for tokens [N, T]. Static batch norms
        use the statistics of all training data, unless the state has its own.

        Args:
            model: the state's architecture, if it is not the global one.
        """
        model = model or self.model
        state = {**state, **self.statistics(state, model)}
        return infer(model, state, self.data, self._hide_tokens(images), self.local.precision)

    def predict_each(self, models: Stack, samples: Inputs) -> Tensor:
        """Return logits of K models, each for its own n samples: [K, n, ...].

        They equal the logits of `predict`, except for rounding. The stack must hold the statistics of static batch
        norms.

        Raises:
            RuntimeError: if the model has an operation that cannot be stacked.
        """
        samples = self._hide_tokens(samples, len(samples))
        return infer_each(self.model, models, self.data, samples, self.local.precision)

    def _hide_tokens(self, samples: Any, *lead: int) -> Any:
        """Hide tokens from a masked language model, the same at every call.

        For another model return the samples.
        """
        if not self.local.augment.mask:
            return samples
        return self.local.augment.mask_tokens(samples, torch.zeros(lead, dtype=torch.int64, device=samples.device))

    def statistics(self, state: State, model: nn.Module | None = None, samples: Tensor | None = None) -> State:
        """Return the statistics of the model's static batch norms.

        The result is empty without such norms, or if the state holds their statistics. Collecting them takes a pass
        over the data for each state. The statistics of the last state are cached.

        Args:
            model: the state's architecture, if it is not the global one.
            samples: the training samples to use, indices on the CPU. None: all clients' samples.
        """
        model = model or self.model
        if not lacks_statistics(model, state):
            return {}
        if not self.transport.has_data:
            raise FLError(
                "static batch norms need a pass over all clients' data, but these lie on other machines: choose "
                "another --norm than static_batch",
                code="unsupported",
            )
        if samples is not None:
            return collect(model, state, self.data, samples, self.local.precision)
        if (statistics := self._collected.of((model, state))) is None:
            statistics = collect(model, state, self.data, self.clients.train.samples, self.local.precision)
            self._collected.keep((model, state), statistics)
        return dict(statistics)

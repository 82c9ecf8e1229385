"""Give a run's model to new clients, and test it before and after fine-tuning."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fl.algorithms import ALGORITHMS
from fl.algorithms.parts.personal import side_by_side, train_or_keep
from fl.base.errors import FLError
from fl.base.rng import Rng
from fl.base.tables import fit_terminal
from fl.data import GIVEN, Dataset
from fl.data.inputs import Inputs, map_inputs
from fl.federation import Federation
from fl.federation.client_models import ClientModels, Level
from fl.models.custom_model import CustomSpec, Model
from fl.partition import Split, Splits
from fl.partition.split import hold_out
from fl.runs import checkpoint
from fl.runs.assembly import make_method, make_models, model_spec, pick_device, training
from fl.runs.evaluate import score_clients
from fl.runs.export import module_with
from fl.runs.folder import load_initial_weights
from fl.runs.pathways import Pathways
from fl.runs.simulation import Run
from fl.settings import Config
from fl.settings.extensions import model_change
from surgery import State, broadcast
from zoo import Spec

_PLENTY = 10**5  # samples: enough for every method


@dataclass
class NewClients:
    """The results of new clients with the model of a run: a table, and their models.

    Attributes:
        rows: a dict for each client, or for each client and number of samples. It has `client`, the owner's name or
            number; `samples` and `tested`, the numbers of samples for fine-tuning and for the test; and the scores of a
            run, such as `accuracy_before` and `accuracy_after`.
    """

    rows: list[dict[str, Any]]
    _fed: Federation
    _used: Level

    def model(self, row: int) -> nn.Module:
        """Return the fine-tuned model of a row of the table, in evaluation mode."""
        modules = self._used.modules or [self._fed.model] * len(self.rows)
        return module_with(self._fed, self._used.state(range(len(self.rows))[row]), modules[row])

    def __str__(self) -> str:
        first = next(name.removesuffix("_before") for name in self.rows[0] if name in ("accuracy_before", "mae_before"))
        lines = [["client", "samples", "tested", f"{first} before", "after"]]
        for row in self.rows:
            scores = [f"{row[f'{first}_{when}']:.4f}" for when in ("before", "after")]
            lines.append([row["client"], str(row["samples"]), str(row["tested"]), *scores])
        return fit_terminal(lines)


def personalize(
    run: str | Path | Run,
    data: Dataset,
    epochs: int | None = None,
    *,
    samples: int | Sequence[int] = (),
    held_out: float = 0.2,
    model: Model | None = None,
) -> NewClients:
    """Fine-tune the model of a run for new clients, tested before and after.

    A new client begins with the tensors that the method would send to it:

    - in general the global model, also if the run has clients of several architectures;
    - if clients keep a part of the model, the global model with this part as initialised (with Local, FedProto and
      FedMD, which send no model, all of it);
    - with FeMAM, the models that `fl.Pathways.join` chooses. Their logits are added, and they are fine-tuned together.

    It trains like the run's clients, with their loss, optimizer and batches, at the learning rate of the last round.
    The run folder does not change.

    Args:
        run: a run folder, or its `fl.Run`.
        data: the samples of the new clients; each owner is a client. A client is tested on its samples by
            `test_owners`; without `test_owners`, on held-out samples of its own.
        epochs: the epochs of fine-tuning, 0 or more. None: the local epochs of the run.
        samples: numbers of training samples. For each number that a client has, it is fine-tuned on that many of its
            samples; a smaller set is part of a larger one. Without numbers: on all samples.
        held_out: the share of a client's samples that it is tested on, if `data` has no `test_owners`.
        model: your own model, if the run had one. Of several models, the one for the new clients.

    Raises:
        FLError: if `run` is no run folder, or if the data have no owners or are of another kind than the run's.

    >>> import tempfile, fl
    >>> data = fl.Config().load()
    >>> x, y, owners = data.x[:90], data.y[:90], ["oslo"] * 40 + ["lima"] * 50
    >>> new = fl.Dataset.from_arrays(x, y, data.test_x, data.test_y, owners)
    >>> config = fl.Config.of(algorithm="fedavg", samples=100, clients=2, rounds=1, width=0.1, local_epochs=1)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     summary = fl.simulate(config, folder)
    ...     result = fl.personalize(folder, new, epochs=1)
    >>> [(row["client"], row["samples"], row["tested"]) for row in result.rows]
    [('lima', 40, 10), ('oslo', 32, 8)]
    """
    folder = Path(run.folder if isinstance(run, Run) else run)
    model = run.model if isinstance(run, Run) and model is None else model
    if epochs is not None and (not isinstance(epochs, int) or epochs < 0):
        raise FLError(f"epochs={epochs!r}: give a whole number of 0 or more, or None for those of the run")
    samples = (samples,) if isinstance(samples, int) else samples
    if wrong := [n for n in samples if not isinstance(n, int) or n < 1]:
        raise FLError(f"samples={list(samples)}: {wrong[0]!r} is no number of samples; give whole numbers of 1 or more")
    config = Config.read(folder)
    config.check_registered(folder)
    spec, server = checkpoint.read_parts_of_one(folder, model)
    rng = Rng(config.seed, max(1, checkpoint.read_header(folder)["round"])).apart("new clients")
    config = config.replace(dataset=GIVEN, device="auto", backend="auto")
    data, clients = _dealt(_like_the_run(data, config, spec, model), held_out, rng)
    names, chosen = data.names_of_clients(clients.train), _rows(clients, samples, rng)
    if not chosen:
        raise FLError(f"samples={list(samples)}: no new client has so many; the largest has {clients.train.largest}")
    few = [Split(indices, *clients[client][1:]) for client, indices in chosen]
    fed = _federation(folder, config, spec, data, few)
    server = {part: {n: t.to(fed.data.device) for n, t in state.items()} for part, state in server.items()}
    if ALGORITHMS[config.method.name].pathways:
        before = _join(Pathways.load(folder, model), fed)
    else:
        before = Level(broadcast(_start_of(config, fed, server), len(few)), torch.arange(len(few)))
    after = _tune(fed, before, fed.local.epochs if epochs is None else epochs, rng)
    scores = [score_clients(fed, lambda used=used: ClientModels([used]))["test"] for used in (before, after)]
    rows = []
    for (client, indices), test, *stages in zip(chosen, fed.clients.test.sizes.tolist(), *scores):
        row: dict[str, Any] = {"client": names[client], "samples": len(indices), "tested": test}
        for when, stage in zip(("before", "after"), stages):
            row |= {f"{name}_{when}": value for name, value in stage.items()}
        rows.append(row)
    return NewClients(rows, fed, after)


def _like_the_run(data: Dataset, config: Config, spec: Spec, model: Model | None) -> Dataset:
    """Return the data in the form that the run's model takes, or raise FLError."""
    if not isinstance(data, Dataset):
        raise FLError(f"data is a {type(data).__name__}: give what fl.Dataset.from_arrays makes of it, with owners=")
    if data.owners is None:
        raise FLError("the data do not say which sample is whose: give owners=, a name or a number for each sample")
    if data.task == "classification" and not data.text:
        if data.classes > spec.num_classes:
            raise FLError(
                f"the new clients have {data.classes} classes, and the model knows {spec.num_classes}", code="mismatch"
            )
        data = replace(data, classes=spec.num_classes)  # new clients may have only some of them
    data = data.pad(config.data.pad)
    now = model_spec(config, data, model) if not isinstance(spec, CustomSpec) else spec
    for field in ("num_classes", "in_channels", "image_size", "tokens"):
        if (wanted := getattr(spec, field)) != (actual := getattr(now, field)):
            raise FLError(
                f"the new clients' samples are not like the run's: {field} is {actual}, and was {wanted}",
                code="mismatch",
            )
    if isinstance(spec, CustomSpec):
        shapes = [map_inputs(lambda x: list(x.shape), inputs) for inputs in (spec.sample, data.example(1))]
        wanted, actual = shapes[0], map_inputs(lambda shape: shape[1:], shapes[1])
        if actual != wanted:
            raise FLError(f"the new clients' samples are of shape {actual}, and the run's of {wanted}", code="mismatch")
    return data


def _dealt(data: Dataset, held_out: float, rng: Rng) -> tuple[Dataset, Splits]:
    """Return the data, and each owner's training and test samples."""
    if data.valid is not None and data.valid.any():
        raise FLError(
            "new clients validate on nothing, so valid= would have no use: leave these samples out of the data",
            code="data",
        )
    owners = data.owners.unique()
    if data.test_owners is None:
        parts = [(data.owners == owner).nonzero().flatten() for owner in owners]
        if not 0 < held_out < 1:
            raise FLError(f"held_out={held_out}: give a share between 0 and 1, or data with test_owners=")
        if lone := [int(owner) for owner, part in zip(owners, parts) if len(part) < 2]:
            raise FLError(
                f"{_name(data, lone[0])} has one sample: new clients need one to train on and one to test on",
                code="data",
            )
        return data, hold_out(parts, 0.0, held_out, rng.numpy("hold-out"))
    if lone := sorted({*owners.tolist()} ^ {*data.test_owners.unique().tolist()}):
        raise FLError(
            f"{_name(data, lone[0])} owns training samples or test samples alone: give each new client both, or leave "
            "test_owners= out, to hold some of its samples out",
            code="data",
        )
    if data.on_host:
        raise FLError(
            "data in memory-mapped files cannot have test_owners= here: leave it out, to hold samples out",
            code="unsupported",
        )
    whole, n = data.pool(), len(data.y)
    train, test = (
        [(owner_of == owner).nonzero().flatten() for owner in owners] for owner_of in (data.owners, data.test_owners)
    )
    return whole, Splits.of([Split(a, a[:0], b + n) for a, b in zip(train, test)])


def _name(data: Dataset, owner: int) -> str:
    return data.owner_names[owner] if data.owner_names else f"owner {owner}"


def _rows(clients: Splits, samples: Sequence[int], rng: Rng) -> list[tuple[int, Tensor]]:
    """Return (client, its samples for fine-tuning) of each row.

    That is all, or each of the numbers that the client has.
    """
    if not samples:
        return list(enumerate(clients.train))
    rows = []
    for client, indices in enumerate(clients.train):
        order = indices[torch.randperm(len(indices), generator=rng.torch("few", client))]
        rows += [(client, order[:n]) for n in sorted({*samples}) if n <= len(indices)]
    return rows


def _federation(folder: Path, config: Config, spec: Spec, data: Dataset, clients: Sequence[Split]) -> Federation:
    """Return a federation of the new clients, with the run's initial model."""
    device = pick_device(config.execution.device)
    data, local = training(config, data)
    start = load_initial_weights(folder, config)
    net, create, _ = make_models(config, spec, start, len(clients), device)
    if model_change(config.extensions):
        checkpoint.check_base(folder, net)
    data = data.to(device, config.execution.data_on)
    return Federation(net, data, clients, 1, local, create=create, spec=spec, start=start)


def _start_of(config: Config, fed: Federation, server: dict[str, State]) -> State:
    """Return the state that a new client begins with.

    Tensors that the method sends are global, others are initial. To see which tensors it sends, the method is made for
    as many clients as the run had. Their samples do not matter, but there must be enough of them.
    """
    method = ALGORITHMS[config.method.name]
    initial, known = fed.initial(), server["global"]
    if method.clients == "heterogeneous":
        return {name: known[name] for name in initial}
    count = config.clients.number
    indices = torch.arange(max(10, _PLENTY // count)) % len(fed.data.y)
    run = replace(fed, clients=[Split(indices, indices, indices)] * count, participants=config.clients.cohort())
    send = make_method(config, run).send
    clients = list(range(run.participants))
    message = send(server, clients, Rng(config.seed, 1)) if send else {"model": known}
    sent = message.get("model", {})
    return {name: known[name] if name in sent else tensor for name, tensor in initial.items()}


class _Added(nn.Module):
    """A sum of models: it adds or averages their logits."""

    def __init__(self, model: nn.Module, count: int, mean: bool) -> None:
        super().__init__()
        self.models, self.mean = nn.ModuleList(copy.deepcopy(model) for _ in range(count)), mean

    def forward(self, x: Inputs) -> Tensor:
        """Return the sum of the logits, or their mean."""
        total = sum(model(x) for model in self.models)
        return total / len(self.models) if self.mean else total


def _join(pathways: Pathways, fed: Federation) -> Level:
    """Return FeMAM's models for each new client, whose samples choose the levels."""
    kinds, states, modules = {}, [], []
    for indices in fed.clients.train:
        x, y = fed.data.gather(indices)
        inputs = map_inputs(lambda tensor: tensor.cpu(), fed.data.normalise(x))
        path = pathways.pathway(pathways.join(inputs, y.cpu()))
        used = [level.state(k) for k, level in zip(path, pathways.levels) if k >= 0]
        if len(used) not in kinds:
            kinds[len(used)] = _Added(fed.model, len(used), pathways.mean)
        modules.append(kinds[len(used)])
        named = {f"models.{at}.{name}": tensor for at, state in enumerate(used) for name, tensor in state.items()}
        states.append({name: tensor.to(fed.data.device) for name, tensor in named.items()})
    return Level(states, torch.arange(len(states)), modules)


def _tune(fed: Federation, before: Level, epochs: int, rng: Rng) -> Level:
    """Return the models after fine-tuning; a model that diverges stays as it was."""
    if not epochs:
        return before
    tuning, clients = replace(side_by_side(fed, epochs=epochs), participants=len(fed.clients)), range(len(fed.clients))
    states = train_or_keep(tuning, before.models, clients, rng, None, None, None, None, before.modules)
    return before._replace(models=states)

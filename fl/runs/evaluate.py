"""The measurements after a round."""

import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fl.base.errors import FLError
from fl.data.inputs import Inputs, split_inputs
from fl.distributed import current
from fl.engine.losses import Loss, cross_entropy, is_scored, measure, of_samples, weights_of
from fl.federation import Federation
from fl.federation.client_models import ClientModels, predict, predict_all
from fl.federation.cohort import Cohort, States, per_client
from fl.federation.scores import SCORES, Metric, Overlap, macro_f1, r2, task_of
from fl.partition import Parts
from surgery import Stack, cosine
from surgery.transfer import double, download, upload, widest

ScoreTable: TypeAlias = dict[str, list[dict[str, float]]]
"""Part ("valid", "test") -> the scores of each client on its own samples of it."""

_ALWAYS = ("accuracy", "loss", "mae", "perplexity")
"""Scores that are numbers unless a model has failed, which the mean then shows."""
_LOGITS = 2**24  # of one piece of the samples: a whole test set of text has far too many for memory
_SAMPLES = 2**14  # in one piece of the clients' samples


class _Tally(NamedTuple):
    """The predictions of models, still on their device.

    Nothing has waited for them yet. A token of text is a sample. Of masks there are counts for each mask, since there
    are too many pixels.

    Attributes:
        columns: what the scores of the task are made of, by name, [N, ...].
        sizes: how many of the N samples, which are in the clients' order, belong to each client; on the host.
    """

    columns: dict[str, Tensor]
    sizes: tuple[int, ...]


_Pieces: TypeAlias = Iterator[tuple[Tensor, Tensor]]
"""Outputs and labels of one piece of the samples after another."""


def _pieces(predict: Callable[[Inputs], Tensor], x: Inputs, y: Tensor, classes: int) -> _Pieces:
    size = max(1, _LOGITS // (classes * (1 if y.is_floating_point() else y[0].numel())))
    for some, labels in zip(split_inputs(x, size), y.split(size)):
        output = predict(some)
        yield output, upload(labels, output.device)


def _tally(pieces: _Pieces, task: str, loss: Loss, sizes: Sequence[int], outputs: bool = False) -> _Tally:
    """Collect the columns of a task.

    Args:
        outputs: whether also the outputs themselves, which metrics take.
    """
    every: dict[str, list[Tensor]] = {}
    for output, labels in pieces:
        measured = {"loss": measure(loss, output, labels)}
        if task == "text":
            if loss is not cross_entropy:
                measured["nats"] = measure(cross_entropy, output, labels)
            measured["right"] = (output.argmax(-1) == labels).flatten()
            measured["scored"] = is_scored(labels).flatten()
        elif task == "segmentation":
            measured = {"loss": of_samples(measured["loss"], loss, labels), "scored": weights_of(loss, labels)}
            measured |= _overlap(output, labels)
            if outputs:
                measured |= {"labels": labels}
                output = output.movedim(-1, 1)
        elif task == "classification":
            measured |= {"predicted": output.argmax(1), "labels": labels}
        elif task == "multilabel":
            measured |= {"predicted": output > 0, "labels": labels}
        else:
            measured |= {"predicted": output, "labels": labels}
        if outputs:
            measured["outputs"] = output
        for name, column in measured.items():
            every.setdefault(name, []).append(column)
    return _Tally({name: torch.cat(columns) for name, columns in every.items()}, tuple(sizes))


def _overlap(outputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Count classes in each mask, see `Overlap`: int64 [n, classes]."""
    classes, counts, predicted = outputs.shape[-1], is_scored(labels), outputs.argmax(-1)

    def count(values: Tensor, which: Tensor) -> Tensor:
        table = torch.zeros(len(values), classes, dtype=torch.int64, device=values.device)
        return table.scatter_add_(1, values.clamp(min=0).flatten(1), which.flatten(1).long())

    hit = count(predicted, counts & (predicted == labels))
    return {"hit": hit, "true": count(labels, counts), "said": count(predicted, counts)}


def _scores(tallies: Sequence[_Tally], task: str, metrics: Sequence[Metric] = ()) -> list[list[dict[str, float]]]:
    """Return the scores of each client of each tally; waits for the device once."""
    values = iter(download([column for tally in tallies for column in tally.columns.values()]))
    return [_of_owners({name: next(values).numpy() for name in t.columns}, t.sizes, task, metrics) for t in tallies]


def _of_owners(
    columns: dict[str, np.ndarray], sizes: Sequence[int], task: str, metrics: Sequence[Metric] = ()
) -> list[dict[str, float]]:
    """Return the scores of each owner of consecutive samples, as in `SCORES`."""
    owners = np.repeat(np.arange(len(sizes)), sizes)

    counts = np.bincount(owners, columns.get("scored"), len(sizes))

    def mean(values: np.ndarray) -> np.ndarray:
        return np.bincount(owners, values, len(sizes)) / counts

    overlaps = None
    if task == "segmentation":
        overlaps = Overlap(*(np.add.reduceat(columns[name], np.cumsum([0, *sizes[:-1]])) for name in Overlap._fields))
        columns["loss"] = columns["loss"] * columns["scored"]
    scores = {"loss": mean(columns["loss"])}
    if task == "text":
        with np.errstate(over="ignore"):
            scores["perplexity"] = np.exp(mean(columns["nats"]) if "nats" in columns else scores["loss"])
        scores["accuracy"] = mean(columns["right"])
    elif overlaps:
        labels = columns["labels"].astype(np.int64) if "labels" in columns else np.empty(0)
        scores |= {"accuracy": overlaps.accuracy(), "mean_iou": overlaps.mean("iou"), "dice": overlaps.mean("dice")}
    elif task == "regression":
        predicted, labels = columns["predicted"].astype(np.float64), columns["labels"].astype(np.float64)
        scores |= {"mae": mean(np.abs(predicted - labels).mean(1)), "r2": r2(predicted, labels, owners)}
    else:
        predicted, labels = columns["predicted"].astype(np.int64), columns["labels"].astype(np.int64)
        right = predicted == labels
        scores["accuracy"] = mean(right if right.ndim == 1 else right.all(1))
        scores["f1"] = macro_f1(predicted, labels, owners)
    rows = [dict(zip(SCORES[task], row)) for row in zip(*(scores[name].tolist() for name in SCORES[task]))]
    if overlaps:
        per_owner = [Overlap(*counts) for counts in zip(*overlaps)]
        rows = [_with(row, [m for m in metrics if m.counts], overlap) for row, overlap in zip(rows, per_owner)]
        metrics = [metric for metric in metrics if not metric.counts]
    if metrics:
        ends = np.cumsum(sizes)[:-1]
        parts = zip(np.split(columns["outputs"], ends), np.split(labels, ends))
        rows = [_with(row, metrics, *part) for row, part in zip(rows, parts)]
    return rows


def _with(row: dict[str, float], metrics: Sequence[Metric], *seen: Any) -> dict[str, float]:
    return row | {name: value for metric in metrics for name, value in metric(*seen).items()}


def _takes_outputs(metrics: Sequence[Metric]) -> bool:
    return any(not metric.counts for metric in metrics)


def evaluate_global(fed: Federation, predict: Callable[[Inputs], Tensor]) -> dict[str, float]:
    """Score the deployed model on the common test set; metrics begin with `test_`.

    Where the test set is of a few owners, such as hospitals, also its accuracy (of numbers the error) at each of them.

    The F1 is scikit-learn's, over the classes in labels or predictions. In text all tokens count alike that count at
    all (`UNSCORED`), and the perplexity is exp(mean cross entropy). Of masks all pixels count alike: accuracy is the
    share that is right, mean_iou and dice are means over the classes in labels or predictions, see `Overlap`.

    Args:
        predict: samples -> logits [n, classes], of text [n, T, classes], of masks [n, H, W, classes]; it is called with
            as many samples at a time as give about 16 million logits.
    """
    data, task = fed.data, task_of(fed.data)
    pieces = _pieces(predict, data.test_x, data.test_y, data.classes)
    number = data.test_y.numel() if task == "text" else len(data.test_y)
    tally = _tally(pieces, task, fed.local.loss, (number,), _takes_outputs(fed.metrics))
    columns = {name: values.numpy() for name, values in zip(tally.columns, download([*tally.columns.values()]))}
    (row,) = _of_owners({**columns}, tally.sizes, task, fed.metrics)
    scores = {name if name in SCORES[task] else f"test_{name}": value for name, value in row.items()}
    first, per_sample = SCORES[task][0], number // len(data.test_y)
    for column, rows in zip(site_columns(fed), data.test_sites.values()):
        rows = (rows[:, None] * per_sample + np.arange(per_sample)).ravel()
        (row,) = _of_owners({name: values[rows] for name, values in columns.items()}, (len(rows),), task)
        scores[column] = row[first]
    return scores


def site_columns(fed: Federation) -> list[str]:
    """Name the columns of the global model's score at each owner of the test set."""
    return [f"test_{SCORES[task_of(fed.data)][0]}_{name}" for name in fed.data.test_sites]


def honest_cohort(fed: Federation, states: States, clients: Sequence[int], counted: Sequence[bool]) -> Cohort:
    """Return the trained participants of a round that were counted and are honest.

    Args:
        states: the trained models of all participants, a stack or a list.
        counted: for each participant, False if it was dropped.
    """
    return Cohort(clients, fed.models_of(clients), states).select(
        [row for row, counts in enumerate(counted) if counts and clients[row] not in fed.malicious]
    )


def evaluate_models(fed: Federation, cohort: Cohort) -> dict[str, float]:
    """Score the participants' trained models on the test set, before the average.

    Returns:
        models_accuracy, models_std: mean and spread of their accuracy. For images, models_own_accuracy: the mean of
        each model's accuracy on the test samples of its client's own classes, when it chooses among these (FedFA's
        local accuracy). For text, models_perplexity: the mean of their perplexities (FedFA's local perplexity). Static
        batch norms take the statistics of the client's own training samples.
    """
    if not cohort.clients:
        return {}
    if fed.data.task != "classification":
        raise FLError(
            f"--eval-client-models-every counts right classes, and the data are for {fed.data.task}: use 0",
            code="unsupported",
        )
    text, states, reported = fed.data.text, per_client(cohort.states), fed.reported_classes(cohort.clients)

    def sums(row: int) -> Tensor:
        client, model, classes = cohort.clients[row], cohort.models[row], reported[row]
        state = states[row] | fed.statistics(states[row], model, fed.clients.train[client])
        total = torch.zeros(3, dtype=widest(classes.device), device=classes.device)
        predict = partial(fed.predict, state, model=model)
        for logits, labels in _pieces(predict, fed.data.test_x, fed.data.test_y, fed.data.classes):
            logits, labels = logits.flatten(0, -2), labels.flatten()
            counts = [(logits.argmax(1) == labels).sum()]
            if text:
                counts.append(F.cross_entropy(double(logits), labels, reduction="sum"))
            else:
                is_own = classes[labels]
                among = logits.masked_fill(~classes, -torch.inf).argmax(1) == labels
                counts += [(among & is_own).sum(), is_own.sum()]
            total[: len(counts)] += torch.stack([double(count) for count in counts])
        return total

    totals = current().share([1] * len(states), lambda rows: [sums(row) for row in rows])
    right, among, possible = torch.stack(totals).cpu().T  # for text the second is the loss
    n = is_scored(fed.data.test_y).sum().item()
    scores = {"models_accuracy": (right / n).mean().item(), "models_std": (right / n).std(correction=0).item()}
    if text:
        return scores | {"models_perplexity": (among / n).exp().mean().item()}
    return scores | {"models_own_accuracy": (among / possible.clamp(min=1)).mean().item()}


def mean_cosine(fed: Federation, cohort: Cohort) -> dict[str, float]:
    """Return mean cosine similarity over the pairs of the trained models' parameters.

    Buffers are left out: running variances would outweigh the weights. Empty for a single model, and where
    architectures differ or the server has only the models' mean.
    """
    states = _comparable(fed, cohort, [name for name, _ in fed.model.named_parameters()])
    return {"models_cosine": _over_pairs(cosine(states)).item()} if states else {}


def released_cosine(fed: Federation, cohort: Cohort) -> dict[str, float]:
    """Return mean cosine similarity as FedMR's released code measures it (its Fig. 6).

    The entries of the state, in its order and with batch norms' statistics and step counters, are cut into chunks of
    five; the measure is the mean of the chunks' cosines. If no entries are left over the last chunk counts twice. Step
    counters are large and nearly the same in all models, so that it is near 1 for models with batch norms. Empty where
    `mean_cosine` is.
    """
    states = _comparable(fed, cohort, list(fed.model.state_dict()))
    if not states:
        return {}
    names = list(states)
    chunks = [names[at : at + 5] for at in range(0, len(names), 5)] + ([] if len(names) % 5 else [names[-5:]])
    means = [_over_pairs(cosine({name: double(states[name]) for name in chunk})) for chunk in chunks]
    return {"models_cosine_released": torch.stack(means).mean().item()}


def _comparable(fed: Federation, cohort: Cohort, names: Sequence[str]) -> Stack:
    """Return named tensors of models of one architecture, if the server has them.

    Else none.
    """
    if len(cohort.clients) < 2 or isinstance(cohort.states, list):
        return {}
    if not cohort.states.keys() >= {*names}:  # clients on other machines have kept some of it
        return {}
    return {name: cohort.states[name] for name in names}


def _over_pairs(similarity: Tensor) -> Tensor:
    """Return the mean of [K, K] without its diagonal."""
    k = len(similarity)
    return (similarity.sum() - similarity.trace()) / (k * (k - 1))


def list_held_out(fed: Federation) -> list[str]:
    """Return "valid" and "test", each if all clients hold samples out for it."""
    parts = {part: getattr(fed.clients, part) for part in ("valid", "test")}
    # the former spares a look at every client
    return [part for part, indices in parts.items() if len(indices.samples) and indices.sizes.all()]


def score_clients(fed: Federation, models: Callable[[], ClientModels]) -> ScoreTable:
    """Score every client on its own held-out samples, see `list_held_out`.

    Args:
        models: () -> the models that clients predict with, which are asked for the samples of all clients at once.
    """
    parts = {part: getattr(fed.clients, part) for part in list_held_out(fed)}
    if not parts:
        return {}
    return fed.transport.score(models, partial(_score_here, fed, parts))


def _score_here(fed: Federation, parts: Mapping[str, Parts], used: ClientModels) -> ScoreTable:
    """Score clients with data in this process."""
    # What is masked of a text depends on its place among the samples that a model is asked for: each client's own.
    outputs = _of_each if fed.local.augment.mask else _of_all
    task, loss = task_of(fed.data), fed.local.loss
    tokens = fed.data.y[0].numel() if task == "text" else 1
    tallies = [
        _tally(outputs(fed, used, part), task, loss, (part.sizes * tokens).tolist(), _takes_outputs(fed.metrics))
        for part in parts.values()
    ]
    return dict(zip(parts, _scores(tallies, task, fed.metrics)))


def _of_each(fed: Federation, models: ClientModels, parts: Parts) -> _Pieces:
    """Yield the pieces of one client after another."""
    for client, index in enumerate(parts):
        x, y = fed.data.gather(index)
        call = partial(predict, fed.predict, models.levels, client, mean=models.mean)
        yield from _pieces(call, x, y, fed.data.classes)


def _of_all(fed: Federation, models: ClientModels, parts: Parts) -> _Pieces:
    """Yield the pieces of all clients together, in their order."""
    size = max(1, min(_SAMPLES, _LOGITS // prod(fed.data.outputs)))
    for samples, whose in zip(parts.samples.split(size), parts.owners.split(size)):
        yield predict_all(fed, models, samples, whose), fed.data.labels_at(samples)


def silent(scores: ScoreTable) -> set[int]:
    """Return the clients on other machines that did not say what they score.

    >>> silent({"test": [{"accuracy": 0.5, "loss": 1.0}, {"accuracy": math.nan, "loss": math.nan}]})
    {1}
    """
    return {client for rows in scores.values() for client, row in enumerate(rows) if all(map(math.isnan, row.values()))}


def summarise_clients(
    scores: ScoreTable, left_out: Container[int] = (), sizes: Mapping[str, Sequence[int]] | None = None
) -> dict[str, float]:
    """Average scores over clients, which all count alike, with how unequal they are.

    Of the first score (accuracy; of numbers the mean absolute error) also the standard deviation (`std`, `mae_std`) and
    the mean over the worst tenth of the clients, at least one (`worst_tenth`, `mae_worst_tenth`); of macro-F1 the
    standard deviation. Clients for whom a score is not defined do not count in its mean.

    Args:
        left_out: clients that do not count, such as malicious ones.
        sizes: how many samples of each part each client has. With them also the mean of the first score in which a
            client counts by its samples (`accuracy_by_samples`): of accuracies the share of all samples that are right.

    >>> rows = [{"accuracy": 0.5, "loss": 1.0, "f1": 0.25}, {"accuracy": 1.0, "loss": 2.0, "f1": 0.75}]
    >>> summarise_clients({"test": rows})  # doctest: +NORMALIZE_WHITESPACE
    {'local_test_accuracy': 0.75, 'local_test_loss': 1.5, 'local_test_f1': 0.5,
     'local_test_std': 0.25, 'local_test_worst_tenth': 0.5, 'local_test_f1_std': 0.25}
    >>> summarise_clients({"test": rows}, sizes={"test": [30, 10]})["local_test_accuracy_by_samples"]
    0.625
    """
    result = {}
    for part, every in scores.items():
        counted = [client for client in range(len(every)) if client not in left_out]
        if not (rows := [every[client] for client in counted]):
            continue
        columns = {key: torch.tensor([row[key] for row in rows], dtype=torch.float64) for key in rows[0]}
        means = {key: column.mean() if key in _ALWAYS else column.nanmean() for key, column in columns.items()}
        result |= {f"local_{part}_{key}": mean.item() for key, mean in means.items()}
        first = next(iter(columns))  # as in SCORES
        if sizes:
            weights = torch.tensor([sizes[part][client] for client in counted], dtype=torch.float64)
            result[f"local_{part}_{first}_by_samples"] = ((weights * columns[first]).sum() / weights.sum()).item()
        of = "" if first == "accuracy" else f"{first}_"
        result[f"local_{part}_{of}std"] = columns[first].std(correction=0).item()
        worst = columns[first].sort(descending=first == "mae").values[: max(1, len(rows) // 10)]
        result[f"local_{part}_{of}worst_tenth"] = worst.mean().item()
        if "f1" in columns:
            result[f"local_{part}_f1_std"] = columns["f1"][~columns["f1"].isnan()].std(correction=0).item()
    return result

"""The measurements after a round."""

import math
from collections.abc import Callable, Container, Iterator, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fl.distributed import current
from fl.federation import Federation
from fl.federation.client_models import ClientModels, predict, predict_all
from fl.federation.cohort import Cohort, States, per_client
from fl.partition import Parts
from surgery import cosine
from surgery.transfer import download, upload

Scores: TypeAlias = dict[str, list[dict[str, float]]]
"""Part ("valid", "test") -> the scores of each client on its own samples of it."""

_LOGITS = 2**24  # of one piece of the samples: a whole test set of text has far too many for memory
_SAMPLES = 2**14  # in one piece of the clients' samples


class _Tally(NamedTuple):
    """The predictions of models, still on their device: nothing has waited for them yet. A token of text is a sample.

    Attributes:
        loss: float64 [N]. right: [N], whether the most likely class is the label's.
        predicted, labels: [N]; None for text, where they are not needed.
        sizes: how many of the N samples, which are in the clients' order, belong to each client; on the host.
    """

    loss: Tensor
    right: Tensor
    predicted: Tensor | None
    labels: Tensor | None
    sizes: tuple[int, ...]


def score(predict: Callable[[Tensor], Tensor], x: Tensor, y: Tensor, classes: int) -> dict[str, float]:
    """Measure accuracy, mean cross entropy (`loss`), and macro-F1 for images (`f1`) or perplexity for text.

    The F1 is scikit-learn's, over the classes in labels or predictions. In text all tokens count alike, and the
    perplexity is exp(loss).

    Args:
        predict: samples -> logits [n, classes], of text [n, T, classes]; it is called with so many samples at
            a time that there are about 16 million logits.
        x, y: samples and labels, as in `Dataset`.

    >>> score(lambda x: x, torch.tensor([[2.0, 0.0], [2.0, 0.0]]), torch.tensor([0, 1]), 2) | {"loss": 0}
    {'accuracy': 0.5, 'loss': 0, 'f1': 0.3333333333333333}
    >>> round(score(lambda x: torch.zeros(*x.shape, 5), torch.ones(2, 3), torch.ones(2, 3).long(), 5)["perplexity"], 9)
    5.0
    """
    return _scores([_tally(_pieces(predict, x, y, classes), y.ndim > 1, (y.numel(),))])[0][0]


def _pieces(predict: Callable[[Tensor], Tensor], x: Tensor, y: Tensor, classes: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Logits [n, classes] and labels [n] of one piece of the samples after another; for text n counts tokens."""
    size = max(1, _LOGITS // (classes * y[0].numel()))
    for some, labels in zip(x.split(size), y.split(size)):
        yield predict(some).flatten(0, -2), labels.flatten()


def _tally(pieces: Iterator[tuple[Tensor, Tensor]], text: bool, sizes: Sequence[int]) -> _Tally:
    loss, predicted, every = [], [], []
    for logits, labels in pieces:
        loss.append(F.cross_entropy(logits.double(), labels, reduction="none"))
        predicted.append(logits.argmax(1))
        every.append(labels)
    loss, predicted, labels = map(torch.cat, (loss, predicted, every))
    kept = (None, None) if text else (predicted, labels)
    return _Tally(loss, predicted == labels, *kept, tuple(sizes))


def _scores(tallies: Sequence[_Tally]) -> list[list[dict[str, float]]]:
    """The scores of each client of each tally, as `score` returns them; waits for the device once."""
    columns = iter(download([t for tally in tallies for t in tally[:4] if t is not None]))
    result = []
    for tally in tallies:
        loss, right, *classes = (next(columns).numpy() for t in tally[:4] if t is not None)
        owners = np.repeat(np.arange(len(tally.sizes)), tally.sizes)
        accuracy, mean = (np.bincount(owners, values, len(tally.sizes)) / tally.sizes for values in (right, loss))
        if classes:
            name, third = "f1", macro_f1(*(column.astype(np.int64) for column in classes), owners)
        else:
            with np.errstate(over="ignore"):
                name, third = "perplexity", np.exp(mean)
        rows = zip(accuracy.tolist(), mean.tolist(), third.tolist())
        result.append([dict(zip(("accuracy", "loss", name), row)) for row in rows])
    return result


def macro_f1(predicted: np.ndarray, labels: np.ndarray, owners: np.ndarray) -> np.ndarray:
    """Compute scikit-learn's macro-F1 of each owner's samples, float64 [owners].

    That is the mean of 2 TP / (labels + predictions) over the classes in labels or predictions. It is computed for all
    owners at once, since scikit-learn takes milliseconds for each.

    Args:
        predicted, labels, owners: integers [N]; each owner from 0 on has a sample.

    >>> macro_f1(np.array([0, 0, 1]), np.array([0, 1, 1]), np.array([0, 0, 1]))
    array([0.33333333, 1.        ])
    """
    n, classes = owners.max() + 1, max(predicted.max(), labels.max()) + 1
    true, said, hit = (
        np.bincount((owners * classes + column)[chosen], minlength=n * classes).reshape(n, classes)
        for column, chosen in ((labels, ...), (predicted, ...), (labels, predicted == labels))
    )
    known = true + said > 0
    each = np.divide(2 * hit, true + said, out=np.zeros(known.shape), where=known)
    return each.sum(1) / known.sum(1)


def evaluate_global(fed: Federation, predict: Callable[[Tensor], Tensor]) -> dict[str, float]:
    """Score the deployed model on the common test set."""
    return score(predict, fed.data.test_x, fed.data.test_y, fed.data.classes)


def honest_cohort(fed: Federation, states: States, clients: Sequence[int], kept: Sequence[bool]) -> Cohort:
    """The participants of a round after local training, without those that were dropped or are malicious.

    Args:
        states: the trained models of all participants, a stack or a list.
    """
    bad = fed.attack.malicious if fed.attack else ()
    models = [fed.fleet[client].model if fed.fleet else fed.model for client in clients]
    return Cohort(clients, models, states).select(
        [row for row, keep in enumerate(kept) if keep and clients[row] not in bad]
    )


def evaluate_models(fed: Federation, cohort: Cohort) -> dict[str, float]:
    """Score the participants' trained models on the common test set, before they are averaged.

    Returns:
        models_accuracy, models_std: mean and spread of their accuracy. For images, models_own_accuracy: the mean of
        each model's accuracy on the test samples of its client's own classes, when it chooses among these (FedFA's
        local accuracy). For text, models_perplexity: the mean of their perplexities (FedFA's local perplexity). Static
        batch norms take the statistics of the client's own training samples.
    """
    if not cohort.clients:
        return {}
    text, states, reported = fed.data.text, per_client(cohort.states), fed.reported_classes(cohort.clients)

    def sums(row: int) -> Tensor:
        client, model, classes = cohort.clients[row], cohort.models[row], reported[row]
        state = states[row] | fed.statistics(states[row], model, fed.clients.train[client])
        total = torch.zeros(3, dtype=torch.float64, device=classes.device)
        predict = partial(fed.predict, state, model=model)
        for logits, labels in _pieces(predict, fed.data.test_x, fed.data.test_y, fed.data.classes):
            counts = [(logits.argmax(1) == labels).sum()]
            if text:
                counts.append(F.cross_entropy(logits.double(), labels, reduction="sum"))
            else:
                own = classes[labels]
                among = logits.masked_fill(~classes, -torch.inf).argmax(1) == labels
                counts += [(among & own).sum(), own.sum()]
            total[: len(counts)] += torch.stack([count.double() for count in counts])
        return total

    found = current().shared([1] * len(states), lambda rows: [sums(row) for row in rows])
    right, among, own = torch.stack(found).cpu().T  # for text the second is the loss
    n = fed.data.test_y.numel()
    scores = {"models_accuracy": (right / n).mean().item(), "models_std": (right / n).std(correction=0).item()}
    if text:
        return scores | {"models_perplexity": (among / n).exp().mean().item()}
    return scores | {"models_own_accuracy": (among / own.clamp(min=1)).mean().item()}


def attack_success(
    fed: Federation, predict: Callable[[Tensor], Tensor], mark: Callable[[Tensor], Tensor], target: int
) -> float:
    """The share of test images of other classes that are classified as the target when they bear the trigger."""
    others = fed.data.test_y != target
    logits = predict(mark(fed.data.test_x[others]))
    return (logits.argmax(1) == target).double().mean().item()


def mean_cosine(fed: Federation, cohort: Cohort) -> dict[str, float]:
    """Mean cosine similarity over the pairs of the trained models' parameters (FedMR's Fig. 6).

    Buffers are left out: running variances would outweigh the weights. Empty for a single model, and where
    architectures differ.
    """
    if len(cohort.clients) < 2 or isinstance(cohort.states, list):
        return {}
    k, parameters = len(cohort.clients), dict(fed.model.named_parameters())
    if not cohort.states.keys() >= parameters.keys():  # clients on other machines have kept some of it
        return {}
    similarity = cosine({name: cohort.states[name] for name in parameters})
    return {"models_cosine": ((similarity.sum() - similarity.trace()) / (k * (k - 1))).item()}


def held_out(fed: Federation) -> list[str]:
    """Return those of "valid" and "test" for which all clients hold samples out."""
    parts = {part: getattr(fed.clients, part) for part in ("valid", "test")}
    # the former spares a look at every client
    return [part for part, indices in parts.items() if len(indices.samples) and indices.sizes.all()]


def score_clients(fed: Federation, models: Callable[[], ClientModels]) -> Scores:
    """Score every client on its own held-out samples, for the parts that `held_out` names.

    Args:
        models: () -> the models that clients predict with, which are asked for the samples of all clients at once.
    """
    parts = {part: getattr(fed.clients, part) for part in held_out(fed)}
    if not parts:
        return {}
    if fed.remote:
        return fed.remote.score(models())
    # What is masked of a text depends on its place among the samples that a model is asked for: each client's own.
    logits = _of_each if fed.local.augment.mask else _of_all
    used, tokens, text = models(), fed.data.y[0].numel(), fed.data.text
    tallies = [_tally(logits(fed, used, each), text, (each.sizes * tokens).tolist()) for each in parts.values()]
    return dict(zip(parts, _scores(tallies)))


def _of_each(fed: Federation, models: ClientModels, parts: Parts) -> Iterator[tuple[Tensor, Tensor]]:
    """Like `_pieces`, for one client after another."""
    for client, index in enumerate(parts):
        index = upload(index, fed.data.x.device)
        call = partial(predict, fed.predict, models.levels, client, mean=models.mean)
        yield from _pieces(call, fed.data.x[index], fed.data.y[index], fed.data.classes)


def _of_all(fed: Federation, models: ClientModels, parts: Parts) -> Iterator[tuple[Tensor, Tensor]]:
    """Like `_pieces`, for all clients together, in their order."""
    size = max(1, min(_SAMPLES, _LOGITS // (fed.data.classes * fed.data.y[0].numel())))
    owners = torch.arange(len(parts)).repeat_interleave(parts.sizes)
    for samples, whose in zip(parts.samples.split(size), owners.split(size)):
        labels = fed.data.y[upload(samples, fed.data.y.device)]
        yield predict_all(fed, models, samples, whose).flatten(0, -2), labels.flatten()


def silent(scores: Scores) -> set[int]:
    """Return the clients on other machines that did not say what they score.

    >>> silent({"test": [{"accuracy": 0.5, "loss": 1.0}, {"accuracy": math.nan, "loss": math.nan}]})
    {1}
    """
    return {client for rows in scores.values() for client, row in enumerate(rows) if all(map(math.isnan, row.values()))}


def summarise_clients(scores: Scores, left_out: Container[int] = ()) -> dict[str, float]:
    """Average scores over clients, which all count alike; of accuracy and macro-F1 also the standard deviation.

    Args:
        left_out: clients that do not count, such as malicious ones.

    >>> rows = [{"accuracy": 0.5, "loss": 1.0, "f1": 0.25}, {"accuracy": 1.0, "loss": 2.0, "f1": 0.75}]
    >>> summarise_clients({"test": rows})  # doctest: +NORMALIZE_WHITESPACE
    {'local_test_accuracy': 0.75, 'local_test_loss': 1.5, 'local_test_f1': 0.5,
     'local_test_std': 0.25, 'local_test_f1_std': 0.25}
    """
    result = {}
    for part, every in scores.items():
        if not (rows := [row for client, row in enumerate(every) if client not in left_out]):
            continue
        columns = {key: torch.tensor([row[key] for row in rows], dtype=torch.float64) for key in rows[0]}
        result |= {f"local_{part}_{key}": column.mean().item() for key, column in columns.items()}
        for key, name in (("accuracy", "std"), ("f1", "f1_std")):
            if key in columns:
                result[f"local_{part}_{name}"] = columns[key].std(correction=0).item()
    return result

"""What is measured after a round."""

from collections.abc import Callable, Container, Iterator, Sequence
from functools import partial
from typing import NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from sklearn.metrics import f1_score
from torch import Tensor, nn

from fl.federation import Federation
from surgery import Stack, State, cosine, unstack

Scores: TypeAlias = dict[str, list[dict[str, float]]]
"""Part ("valid", "test") -> the scores of each client on its own samples of it."""

_LOGITS = 2**24  # of one piece of the samples: a whole test set of text has far too many to be held at once


class Tally(NamedTuple):
    """Sums over the predictions for some samples. They are on the samples' device, and nothing has waited for it yet.

    Attributes:
        sums: float64 [2]: how many predictions are right, and the loss of all.
        labels, predicted: [N]; of text the labels [N, T] alone, since nothing asks for the predictions.
    """

    sums: Tensor
    labels: Tensor
    predicted: Tensor | None


def score(predict: Callable[[Tensor], Tensor], x: Tensor, y: Tensor, classes: int) -> dict[str, float]:
    """Accuracy, mean cross entropy (`loss`), and of images macro-F1 (`f1`), of text perplexity.

    The F1 is scikit-learn's, over the classes in labels or predictions. Of text every token counts alike, and the
    perplexity is exp(loss).

    Args:
        predict: samples -> logits [n, classes], of text [n, T, classes]; it is called with as many samples as give
            about 16 million logits.
        x, y: samples and labels, as in `Dataset`.

    >>> score(lambda x: x, torch.tensor([[2.0, 0.0], [2.0, 0.0]]), torch.tensor([0, 1]), 2) | {"loss": 0}
    {'accuracy': 0.5, 'loss': 0, 'f1': 0.3333333333333333}
    >>> round(score(lambda x: torch.zeros(*x.shape, 5), torch.ones(2, 3), torch.ones(2, 3).long(), 5)["perplexity"], 9)
    5.0
    """
    return _scores([_tally(predict, x, y, classes)])[0]


def _pieces(predict: Callable[[Tensor], Tensor], x: Tensor, y: Tensor, classes: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Logits [n, classes] and labels [n] of one piece of the samples after another; of text n counts tokens."""
    size = max(1, _LOGITS // (classes * y[0].numel()))
    for some, labels in zip(x.split(size), y.split(size)):
        yield predict(some).flatten(0, -2), labels.flatten()


def _tally(predict: Callable[[Tensor], Tensor], x: Tensor, y: Tensor, classes: int) -> Tally:
    sums, predicted = torch.zeros(2, dtype=torch.float64, device=y.device), []
    for logits, labels in _pieces(predict, x, y, classes):
        predicted.append(logits.argmax(1))
        right = (predicted[-1] == labels).double().sum()
        sums += torch.stack([right, F.cross_entropy(logits.double(), labels, reduction="sum")])
    return Tally(sums, y, torch.cat(predicted) if y.ndim == 1 else None)


def _scores(tallies: Sequence[Tally]) -> list[dict[str, float]]:
    """What `score` returns, for each tally; waits for the device once for all sums, and for all predictions."""
    means = torch.stack([tally.sums / tally.labels.numel() for tally in tallies]).cpu()
    rows = [dict(zip(("accuracy", "loss"), mean)) for mean in means.tolist()]
    if tallies[0].predicted is None:
        return [row | {"perplexity": value} for row, value in zip(rows, means[:, 1].exp().tolist())]
    both = torch.stack([torch.cat([t.labels for t in tallies]), torch.cat([t.predicted for t in tallies])]).cpu()
    pairs = both.split([len(tally.labels) for tally in tallies], dim=1)
    return [row | {"f1": float(f1_score(*pair, average="macro", zero_division=0))} for row, pair in zip(rows, pairs)]


def evaluate_global(fed: Federation, predict: Callable[[Tensor], Tensor]) -> dict[str, float]:
    """Scores of the deployed model on the common test set."""
    return score(predict, fed.data.test_x, fed.data.test_y, fed.data.classes)


class Cohort(NamedTuple):
    """The participants of a round as they were after local training, without those that were dropped or are malicious.

    Attributes:
        clients: which they are. models: their architectures. states: a stack, or a list where architectures differ.
    """

    clients: list[int]
    models: list[nn.Module]
    states: Stack | list[State]

    @classmethod
    def of(cls, fed: Federation, states: Stack | list[State], clients: Sequence[int], kept: Sequence[bool]) -> "Cohort":
        """Those of the participants that were kept and are honest."""
        bad = fed.attack.malicious if fed.attack else ()
        alive = [k for k, keep in enumerate(kept) if keep and clients[k] not in bad]
        chosen = [clients[k] for k in alive]
        if isinstance(states, list):
            fleet = fed.architectures
            return cls(chosen, [fleet[c].model for c in chosen], [states[k] for k in alive])
        if len(alive) < len(clients):  # else nothing is copied
            states = {name: tensor[alive] for name, tensor in states.items()}
        return cls(chosen, [fed.model] * len(alive), states)


def evaluate_models(fed: Federation, cohort: Cohort) -> dict[str, float]:
    """How the participants' trained models do on the common test set, before they are averaged.

    Returns:
        models_accuracy, models_std: mean and spread of their accuracy. models_own_accuracy, of images: the mean of
        each one's accuracy on the test samples of the classes that it has in training, where it is asked for one of
        these (FedFA's local accuracy). models_perplexity, of text: the mean of their perplexities (FedFA's local
        perplexity). Static batch norms take the statistics of the client's own training samples.
    """
    if not cohort.clients:
        return {}
    states = unstack(cohort.states) if isinstance(cohort.states, dict) else cohort.states
    text, sums = fed.data.text, []
    for client, model, state, held in zip(cohort.clients, cohort.models, states, fed.held(cohort.clients)):
        state = state | fed.statistics(state, model, fed.clients.train[client])
        total = torch.zeros(3, dtype=torch.float64, device=held.device)
        predict = partial(fed.predict, state, model=model)
        for logits, labels in _pieces(predict, fed.data.test_x, fed.data.test_y, fed.data.classes):
            counts = [(logits.argmax(1) == labels).sum()]
            if text:
                counts.append(F.cross_entropy(logits.double(), labels, reduction="sum"))
            else:
                own = held[labels]
                among = logits.masked_fill(~held, -torch.inf).argmax(1) == labels
                counts += [(among & own).sum(), own.sum()]
            total[: len(counts)] += torch.stack([count.double() for count in counts])
        sums.append(total)
    right, among, own = torch.stack(sums).cpu().T  # of text the second is the loss
    n = fed.data.test_y.numel()
    scores = {"models_accuracy": (right / n).mean().item(), "models_std": (right / n).std(correction=0).item()}
    if text:
        return scores | {"models_perplexity": (among / n).exp().mean().item()}
    return scores | {"models_own_accuracy": (among / own.clamp(min=1)).mean().item()}


def attack_success(
    fed: Federation, predict: Callable[[Tensor], Tensor], mark: Callable[[Tensor], Tensor], target: int
) -> dict[str, float]:
    """The share of test images of other classes that are taken for the target once they bear the trigger."""
    others = fed.data.test_y != target
    logits = predict(mark(fed.data.test_x[others]))
    return {"attack_success": (logits.argmax(1) == target).double().mean().item()}


def mean_cosine(fed: Federation, cohort: Cohort) -> dict[str, float]:
    """Mean cosine similarity over the pairs of the trained models' parameters (FedMR's Fig. 6).

    Buffers are left out: running variances would outweigh the weights. Empty for a single model, and where
    architectures differ.
    """
    if isinstance(cohort.states, list) or not cohort.clients:
        return {}
    names = [name for name, _ in fed.model.named_parameters()]
    similarity = cosine({name: cohort.states[name] for name in names})
    k = len(similarity)
    if k < 2:
        return {}
    return {"models_cosine": ((similarity.sum() - similarity.trace()) / (k * (k - 1))).item()}


def held_out(fed: Federation) -> list[str]:
    """Which of "valid" and "test" all clients hold samples out for."""
    parts = {part: getattr(fed.clients, part) for part in ("valid", "test")}
    # the former spares a look at every client
    return [part for part, indices in parts.items() if len(indices.samples) and indices.sizes.all()]


def score_clients(fed: Federation, predict: Callable[[Tensor, int], Tensor]) -> Scores:
    """What `score` says of every client on its own held-out samples, for the parts that `held_out` names.

    Args:
        predict: (samples, client) -> logits.
    """
    result = {}
    for part in held_out(fed):
        tallies = []
        for client, index in enumerate(getattr(fed.clients, part)):
            index = index.to(fed.data.x.device)
            tallies.append(
                _tally(lambda x, k=client: predict(x, k), fed.data.x[index], fed.data.y[index], fed.data.classes)
            )
        result[part] = _scores(tallies)
    return result


def summarise_clients(scores: Scores, left_out: Container[int] = ()) -> dict[str, float]:
    """Means over clients, each client counting alike, and the spread (population standard deviation) of accuracy and
    macro-F1; malicious clients may be left out.

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

"""What is measured after a round."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from sklearn.metrics import f1_score
from torch import Tensor

from fl.federation import Federation
from surgery import Stack, cosine, unstack


class Scores(NamedTuple):
    """Quality of predictions on a set of samples."""

    accuracy: float
    loss: float
    f1: float


def score(logits: Tensor, labels: Tensor) -> Scores:
    """Accuracy, mean cross entropy and macro-F1 (scikit-learn's, over the classes in labels or predictions).

    >>> score(torch.tensor([[2.0, 0.0], [2.0, 0.0]]), torch.tensor([0, 1]))._replace(loss=0)
    Scores(accuracy=0.5, loss=0, f1=0.3333333333333333)
    """
    predicted = logits.argmax(1)
    return Scores(
        accuracy=(predicted == labels).double().mean().item(),
        loss=F.cross_entropy(logits.double(), labels).item(),
        f1=float(f1_score(labels.cpu(), predicted.cpu(), average="macro", zero_division=0)),
    )


def evaluate_global(fed: Federation, predict: Callable[[Tensor], Tensor]) -> dict[str, float]:
    """Scores of the deployed model on the common test set."""
    return score(predict(fed.data.test_x), fed.data.test_y)._asdict()


def evaluate_models(fed: Federation, models: Stack) -> dict[str, float]:
    """Mean and spread over the K trained models of their accuracy on the common test set."""
    labels = fed.data.test_y
    hits = [(fed.predict(m, fed.data.test_x).argmax(1) == labels).double().mean() for m in unstack(models)]
    accuracy = torch.stack(hits)
    return {"models_accuracy": accuracy.mean().item(), "models_std": accuracy.std(correction=0).item()}


def mean_cosine(fed: Federation, models: Stack) -> dict[str, float]:
    """Mean cosine similarity over the pairs of the K trained models' parameters (FedMR's Fig. 6).

    Buffers are left out: running variances would outweigh the weights. Empty for a single model.
    """
    names = [name for name, _ in fed.model.named_parameters()]
    similarity = cosine({name: models[name] for name in names})
    k = len(similarity)
    if k < 2:
        return {}
    return {"models_cosine": ((similarity.sum() - similarity.trace()) / (k * (k - 1))).item()}


def evaluate_local(fed: Federation, predict: Callable[[Tensor, int], Tensor]) -> dict[str, float]:
    """Mean and spread over all clients of the scores on their own held-out samples, where they have any.

    Args:
        predict: (images, client) -> logits.
    """
    result = {}
    for part in ("valid", "test"):
        indices = [getattr(split, part) for split in fed.clients]
        if not all(map(len, indices)):
            continue
        scores = []
        for client, index in enumerate(indices):
            index = index.to(fed.data.x.device)
            scores.append(score(predict(fed.data.x[index], client), fed.data.y[index]))
        accuracy, loss, f1 = (torch.tensor(column, dtype=torch.float64) for column in zip(*scores))
        result |= {
            f"local_{part}_accuracy": accuracy.mean().item(),
            f"local_{part}_std": accuracy.std(correction=0).item(),
            f"local_{part}_loss": loss.mean().item(),
            f"local_{part}_f1": f1.mean().item(),
        }
    return result

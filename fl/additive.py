"""Levels of models whose logits are added up for each client, and what clients' validation data say of them (FeMAM)."""

import itertools
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from fl.errors import FLError
from fl.federation import Federation
from fl.partition import Parts
from fl.personal import row
from surgery import Stack, State

_LIMIT = 8 * 10**9  # bytes
_unknown = itertools.count(-1, -1)

Level: TypeAlias = tuple[Stack, Tensor]
"""Models, and the one of them that each client uses: int64 [clients] on the CPU, -1 for none."""


def predict(
    call: Callable[[State, Tensor], Tensor], levels: Sequence[Level], client: int, x: Tensor, mean: bool
) -> Tensor | None:
    """The sum (or mean) of the logits of a client's models over the levels; None if it has no model at all.

    Args:
        call: (model, samples) -> logits.
    """
    total, used = None, 0
    for models, mapping in levels:
        if (k := int(mapping[client])) >= 0:
            logits = call(row(models, k), x)
            total, used = logits if total is None else total + logits, used + 1
    return total / used if mean and used else total


def count(levels: Sequence[Level], clients: int) -> Tensor:
    """On how many of the levels each client has a model: int64 [clients]."""
    return sum(((mapping >= 0).long() for _, mapping in levels), torch.zeros(clients, dtype=torch.int64))


def logits(fed: Federation, level: Level, parts: Parts) -> Tensor:
    """Of every client's samples by its own model of one level, in the order of `parts.samples`; 0 where it has none."""
    models, mapping = level
    device = fed.data.x.device
    result = torch.zeros(len(parts.samples), *fed.data.y.shape[1:], fed.data.classes, device=device)
    used, order = mapping.repeat_interleave(parts.sizes).sort(stable=True)  # one look at the samples for all models
    found, sizes = used.unique_consecutive(return_counts=True)
    for k, at in zip(found.tolist(), order.split(sizes.tolist())):
        if k >= 0:
            result[at.to(device)] = fed.predict(row(models, k), fed.data.x[parts.samples[at].to(device)]).to(result)
    return result


class Cache:
    """The summed logits of levels that do not change any more, beside each sample that clients train or validate on.

    They take the data set's samples times classes times 4 bytes on its device (of text tokens times vocabulary): of
    Fashion-MNIST with its test set 2.8 MB, of CIFAR-100 24 MB, of Tiny-ImageNet 88 MB, of pydoc 890 MB; up to three
    times that while a level is added. Above 8 GB they are refused. They are what computing them anew gives, bit for
    bit: a level is added to those below it, and all are computed anew once a model or a mapping was replaced or written
    to.
    """

    def __init__(self, fed: Federation) -> None:
        every = torch.cat([fed.clients.train.samples, fed.clients.valid.samples])
        if len(every.unique()) < len(every):
            raise FLError("logits are kept for each sample, and some sample has two places: give clients disjoint data")
        if (size := 4 * fed.data.y.numel() * fed.data.classes) > _LIMIT:
            raise FLError(
                f"FeMAM's logits of every sample take {size / 1e9:.0f} GB, more than {_LIMIT / 1e9:.0f}: take fewer "
                "--samples, or of text --text.tokens byte or a smaller --text.vocabulary"
            )
        self._fed, self._seen, self._table = fed, [], self._zeros(fed)

    def table(self, levels: Sequence[Level]) -> Tensor:
        """[N, classes] for images, [N, T, classes] for text; 0 for samples that no client has."""
        if len(self._seen) > len(levels) or not all(map(_unchanged, self._seen, levels)):
            self._seen, self._table = [], self._zeros(self._fed)
        if fresh := levels[len(self._seen) :]:
            self._table = self._table.clone()  # whoever has the other one keeps it as it is
            for models, mapping in fresh:
                for parts in (self._fed.clients.train, self._fed.clients.valid):
                    values = logits(self._fed, (models, mapping), parts)
                    self._table[parts.samples.to(values.device)] += values
                self._seen.append(([(tensor, _version(tensor)) for tensor in models.values()], mapping.clone()))
        return self._table

    @staticmethod
    def _zeros(fed: Federation) -> Tensor:
        return torch.zeros(*fed.data.y.shape, fed.data.classes, device=fed.data.x.device)


def _unchanged(seen: tuple[list[tuple[Tensor, int]], Tensor], level: Level) -> bool:
    weights, mapping = seen
    same = all(a is b and version == _version(b) for (a, version), b in zip(weights, level[0].values()))
    return same and torch.equal(mapping, level[1])


def _version(tensor: Tensor) -> int:
    """Of its content; tensors made in inference mode have none, and count as what may have changed."""
    return next(_unknown) if tensor.is_inference() else tensor._version


class Validation:
    """Scores of levels on the clients' own validation data.

    Args:
        mean: of the logits over a client's levels, in place of their sum.
    """

    def __init__(self, fed: Federation, cache: Cache, mean: bool) -> None:
        parts, device = fed.clients.valid, fed.data.x.device
        if len(empty := (parts.sizes == 0).nonzero()):
            raise FLError(
                f"client {int(empty[0])} has no samples to validate on ({len(empty)} such clients): hold some out with "
                "--local-valid, such as 0.1, or give both --femam.no-prune and --femam.level-rounds"
            )
        self._fed, self._cache, self._mean, self._parts = fed, cache, mean, parts
        self._samples = parts.samples.to(device)
        self._labels = fed.data.y[self._samples]
        self._owners = torch.arange(len(parts)).repeat_interleave(parts.sizes)

    def losses(self, levels: Sequence[Level], newest: Level | None = None) -> Tensor:
        """Mean cross entropy of each client: float64 [clients], on the CPU.

        Args:
            levels: whose logits are remembered.
            newest: one more, whose are not.
        """
        flat = self._logits(levels, newest).double().flatten(0, -2)
        return self._means(F.cross_entropy(flat, self._labels.flatten(), reduction="none").view(self._labels.shape))

    def accuracy(self, levels: Sequence[Level], newest: Level) -> float:
        """The mean over the clients of their accuracy."""
        return self._means((self._logits(levels, newest).argmax(-1) == self._labels).double()).mean().item()

    def _logits(self, levels: Sequence[Level], newest: Level | None) -> Tensor:
        total = self._cache.table(levels)[self._samples]
        if newest is not None:
            total = total + logits(self._fed, newest, self._parts)
        if not self._mean:
            return total
        used = count([*levels, *([newest] if newest else [])], len(self._parts)).clamp(min=1).to(total.device)
        return total / used[self._owners.to(total.device)].view(-1, *[1] * (total.ndim - 1))

    def _means(self, values: Tensor) -> Tensor:
        """Over each client's samples (and their tokens)."""
        values = values.flatten(1).mean(1) if values.ndim > 1 else values
        sums = torch.zeros(len(self._parts), dtype=torch.float64)
        return sums.index_add_(0, self._owners, values.cpu()) / self._parts.sizes  # on CUDA the order is not fixed

"""Levels of models whose logits are added up for each client, and what clients' validation data say of them (FeMAM)."""

import itertools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fl.base.errors import FLError
from fl.federation import Federation
from fl.federation.own import Level, count, logits
from fl.partition import Parts
from surgery.transfer import download, upload

_LIMIT = 8 * 10**9  # bytes
_unknown = itertools.count(-1, -1)


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
        self._parts = [(parts, _owners(parts)) for parts in (fed.clients.train, fed.clients.valid)]

    def table(self, levels: Sequence[Level]) -> Tensor:
        """[N, classes] for images, [N, T, classes] for text; 0 for samples that no client has."""
        if len(self._seen) > len(levels) or not all(map(_unchanged, self._seen, levels)):
            self._seen, self._table = [], self._zeros(self._fed)
        if fresh := levels[len(self._seen) :]:
            self._table = self._table.clone()  # whoever has the other one keeps it as it is
            for level in fresh:
                for parts, owners in self._parts:
                    values = logits(self._fed, level, parts.samples, owners)
                    self._table[upload(parts.samples, values.device)] += values
                weights = [(tensor, _version(tensor)) for tensor in level.models.values()]
                self._seen.append((weights, level.used.clone()))
        return self._table

    @staticmethod
    def _zeros(fed: Federation) -> Tensor:
        return torch.zeros(*fed.data.y.shape, fed.data.classes, device=fed.data.x.device)


def _unchanged(seen: tuple[list[tuple[Tensor, int]], Tensor], level: Level) -> bool:
    weights, used = seen
    same = all(a is b and version == _version(b) for (a, version), b in zip(weights, level.models.values()))
    return same and torch.equal(used, level.used)


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
        self._samples = upload(parts.samples, device)
        self._labels = fed.data.y[self._samples]
        self._owners = _owners(parts)

    def losses(self, levels: Sequence[Level], more: Sequence[Level | None]) -> Tensor:
        """Mean cross entropy of each client: float64 [len(more), clients], on the CPU.

        Args:
            levels: whose logits are remembered.
            more: a further level each time, whose logits are not, or none.
        """
        values = []
        for newest in more:
            flat = self._logits(levels, newest).double().flatten(0, -2)
            values.append(F.cross_entropy(flat, self._labels.flatten(), reduction="none").view(self._labels.shape))
        return self._means(values)

    def accuracy(self, levels: Sequence[Level], newest: Level) -> float:
        """The mean over the clients of their accuracy."""
        return self._means([self._logits(levels, newest).argmax(-1) == self._labels]).mean().item()

    def _logits(self, levels: Sequence[Level], newest: Level | None) -> Tensor:
        total = self._cache.table(levels)[self._samples]
        if newest is not None:
            total = total + logits(self._fed, newest, self._parts.samples, self._owners)
        if not self._mean:
            return total
        used = count([*levels, *([newest] if newest else [])], len(self._parts)).clamp(min=1)
        return total / upload(used[self._owners], total.device).view(-1, *[1] * (total.ndim - 1))

    def _means(self, values: Sequence[Tensor]) -> Tensor:
        """Of each of these values [N] (of text [N, T]) the mean over every client's samples: [len(values), clients]."""
        each = torch.stack([value.flatten(1).mean(1) if value.ndim > 1 else value for value in download(values)])
        sums = torch.zeros(len(values), len(self._parts), dtype=torch.float64)
        return sums.index_add_(1, self._owners, each) / self._parts.sizes  # on the host: on CUDA the order is not fixed


def _owners(parts: Parts) -> Tensor:
    """The client of each sample."""
    return torch.arange(len(parts)).repeat_interleave(parts.sizes)

"""Levels of models: each client adds up its models' logits (FeMAM).

Clients also judge them on their validation data.
"""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from fl.base.errors import FLError
from fl.engine.losses import cross_entropy, measure, of_samples
from fl.federation import Federation
from fl.federation.client_models import Level, count, logits
from fl.federation.last_value import LastValue
from fl.partition import Parts
from surgery.transfer import double, download, upload

_LIMIT = 8 * 10**9  # bytes


class Cache:
    """The summed logits of finished levels, for all samples of clients.

    They are of the samples that clients train or validate on. They take the data set's samples times classes times 4
    bytes on its device (of text tokens times vocabulary): of Fashion-MNIST with its test set 2.8 MB, of CIFAR-100 24
    MB, of Tiny-ImageNet 88 MB, of pydoc 890 MB; up to three times that while a level is added. Above 8 GB they are
    refused. They equal newly computed ones, bit for bit: a level is added to the levels below it, and all are computed
    again once a model or a mapping has changed.
    """

    def __init__(self, fed: Federation) -> None:
        parts = [_local_samples(fed, split) for split in (fed.clients.train, fed.clients.valid)]
        every = torch.cat([samples for samples, _ in parts])
        if len(every.unique()) < len(every):
            raise FLError(
                "logits are kept for each sample, and some sample has two places: give clients disjoint data",
                code="data",
            )
        if (size := 4 * len(fed.data.y) * prod(fed.data.outputs)) > _LIMIT:
            raise FLError(
                f"FeMAM's logits of every sample take {size / 1e9:.0f} GB, more than {_LIMIT / 1e9:.0f}: take fewer "
                "--samples, or of text --text.tokens byte or a smaller --text.vocabulary",
                code="memory",
            )
        self._fed, self._last, self._parts = fed, LastValue(), parts

    def table(self, levels: Sequence[Level]) -> Tensor:
        """Logits [N, classes]; 0 for samples that no client has.

        Of text they are [N, T, classes], of masks [N, H, W, classes].
        """
        # Mappings are compared by value: they are rows of a table that is replaced in every round.
        source = [(level.models, level.used.tolist()) for level in levels]
        if (known := self._last.of(source)) is not None:
            return known
        data = self._fed.data
        if not levels:
            return torch.zeros(len(data.y), *data.outputs, device=data.device)
        *below, newest = levels
        table = self.table(below).clone()  # whoever has that one keeps it as it is
        for samples, owners in self._parts:
            values = logits(self._fed, newest, samples, owners)
            table[upload(samples, values.device)] += values
        return self._last.keep(source, table)


class Validation:
    """Scores of levels on the clients' own validation data.

    Args:
        mean: of the logits over a client's levels, in place of their sum.
    """

    def __init__(self, fed: Federation, cache: Cache, mean: bool) -> None:
        parts, device = fed.clients.valid, fed.data.device
        if len(empty := (parts.sizes == 0).nonzero()):
            raise FLError(
                f"client {int(empty[0])} has no samples to validate on ({len(empty)} such clients): hold some out with "
                "--local-valid, such as 0.1, or give both --femam.no-prune and --femam.level-rounds"
            )
        self._fed, self._cache, self.mean, self._parts = fed, cache, mean, parts
        self._here, self._owners = _local_samples(fed, parts)
        self._samples = upload(self._here, device)
        self._labels = fed.data.labels_at(self._here)

    def ask_losses(self, levels: Sequence[Level], more: Sequence[Level | None]) -> tuple[Tensor, Tensor]:
        """Return the `losses`, and which clients answered: bool [clients]."""
        transport = self._fed.transport
        losses = transport.judge(self, "losses", levels, more)
        all_clients = torch.ones(len(self._parts), dtype=torch.bool)
        return losses, all_clients if transport.has_data else ~losses.isnan().all(0)

    def losses(self, levels: Sequence[Level], more: Sequence[Level | None]) -> Tensor:
        """Return mean loss of each client: float64 [len(more), clients], on the CPU.

        Args:
            levels: the levels with remembered logits.
            more: for each of the results one further level without remembered logits, or None.
        """
        loss, values = self._fed.local.loss, []
        for newest in more:
            sample_losses = measure(loss, self._logits(levels, newest), self._labels)
            values.append(of_samples(sample_losses, loss, self._labels))
        return self._means(values)

    def accuracy(self, levels: Sequence[Level], newest: Level) -> float:
        """Return the mean accuracy of the clients that answered."""
        values = self._fed.transport.judge(self, "accuracies", levels, [newest])
        return values[~values.isnan()].mean().item()

    def accuracies(self, levels: Sequence[Level], more: Sequence[Level | None]) -> Tensor:
        """Return the accuracy of each client, as `losses`."""
        every = [self._logits(levels, newest) for newest in more]
        if self._fed.data.task == "multilabel":  # a sample is right if all of its labels are
            return self._means([((logits > 0) == self._labels.bool()).all(1) for logits in every])
        right = [double(logits.argmax(-1) == self._labels) for logits in every]  # never so where none counts
        return self._means([of_samples(hits, cross_entropy, self._labels) for hits in right])

    def _logits(self, levels: Sequence[Level], newest: Level | None) -> Tensor:
        total = self._cache.table(levels)[self._samples]
        if newest is not None:
            total = total + logits(self._fed, newest, self._here, self._owners)
        if not self.mean:
            return total
        used = count([*levels, *([newest] if newest else [])], len(self._parts)).clamp(min=1)
        return total / upload(used[self._owners], total.device).view(-1, *[1] * (total.ndim - 1))

    def _means(self, values: Sequence[Tensor]) -> Tensor:
        """Return each client's mean of each of the values [N]: [len(values), clients]."""
        stacked = torch.stack(download(values))
        sums = torch.zeros(len(values), len(self._parts), dtype=torch.float64)
        # On the host: on CUDA the order is not fixed.
        return sums.index_add_(1, self._owners, stacked) / self._parts.sizes


def _local_samples(fed: Federation, parts: Parts) -> tuple[Tensor, Tensor]:
    """Return the samples that are on this machine, and the client of each.

    On a client's own machine these are only its own.
    """
    owners = torch.arange(len(parts)).repeat_interleave(parts.sizes)
    local = parts.samples < len(fed.data.y)
    return parts.samples[local], owners[local]
